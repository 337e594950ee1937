"""Chunks of the workers -> batches: the tensors that a causal language model trains on.

``StepBatches`` cuts a rank's part of a global batch into batches, ``padding.py`` makes their tensors, and
``LoaderMetrics`` counts what was delivered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loader.boundaries import boundary_fields
from loader.chunks import Chunk, Edges, RowEdges, split_ids, step_edges
from loader.padding import IGNORED, Batch, Ids, PaddedBatches
from loader.row_lengths import cut_edges, cut_lengths, cut_rows
from loader.sample_fields import Collate, collate_lists, with_fields
from loader.shifted_targets import shift, without_last_place
from shardprep.errors import UsageError

Fillers = npt.NDArray[np.bool_] | None


@dataclass(kw_only=True)
class LoaderMetrics:
    """Counts since the loader was made, or since ``reset``; of this rank alone. 2 us per batch."""

    num_batches: int = 0
    num_tokens: int = 0  # without padding
    num_padding: int = 0
    num_cut_tokens: int = 0  # left out behind max_length; counted when their chunk arrives
    wait_s: float = 0.0  # the consumer waited for workers; without workers: read and decoded itself

    @property
    def padding_share(self) -> float:
        """Padding of all that was delivered, 0 to 1."""
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)

    def reset(self) -> None:
        """Count from 0 again, as for each logging interval."""
        self.__init__()  # type: ignore[misc]  # no subclass changes it

    def count(self, part: Uncollated, batch: Any) -> None:
        """Count a batch that is delivered, and the samples that it was made of."""
        num_tokens = part.num_tokens
        self.num_batches += 1
        self.num_tokens += num_tokens
        if part.is_full:
            return
        ids = batch.get("input_ids") if hasattr(batch, "get") else None
        if isinstance(ids, torch.Tensor):  # a user's own batch may be anything
            self.num_padding += max(ids.numel() - num_tokens, 0)


class Uncollated(NamedTuple):
    """The samples of one batch, as they came from the workers."""

    ids: Ids  # int32[batch, row_tokens]; of samples of any length int32[tokens], one after another
    lengths: npt.NDArray[Any] | None  # of each sample, unless all are full rows
    edges: Edges | None = None  # where documents begin in rows, if boundaries were asked for
    is_filler: Fillers = None  # samples that fill a last batch up, if there are any: they have no labels
    width: int = 0  # that rows are cut to, side by side; 0: as they are
    starts: Sequence[Ids] | None = None  # where documents begin in each row, if sample_fields ask for it

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self.ids.size if self.lengths is None else int(self.lengths.sum())

    @property
    def is_full(self) -> bool:
        """Whether all samples are rows without padding."""
        return self.lengths is None

    def samples(self) -> list[Ids]:
        """The ids of each sample, without padding."""
        if self.width:
            return self._pieces()
        if self.lengths is None:
            return list(self.ids)
        if self.ids.ndim == 1:
            return split_ids(self.ids, self.lengths)
        return [row[:length] for row, length in zip(self.ids, self.lengths.tolist(), strict=True)]

    def _pieces(self) -> list[Ids]:
        """The rows cut to ``width``, without what is padding alone."""
        rows = Uncollated(self.ids, self.lengths).samples()
        return [row[first : first + self.width] for row in rows for first in range(0, len(row), self.width)]


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """Cuts a rank's part of a global batch into batches and collates them.

    PaddedBatches and CausalLMCollator get arrays. Any other ``collate_fn``, also one that inherits from
    them, is called: ids as lists.
    """

    batch_size: int
    row_tokens: int  # of every sample where all are rows, else 0
    collate_fn: Collate
    boundaries: tuple[str, ...] = ()
    has_masks: bool = False  # ids may carry NO_LABEL
    shifts_targets: bool = False  # labels stand where the token before them stands
    sample_fields: tuple[str, ...] = ()  # what a collate_fn gets beside the ids

    def __post_init__(self) -> None:
        if self.boundaries and not self.is_own:
            raise UsageError("boundaries are made for the loader's own batches; leave out collate_fn or them")

    @property
    def is_own(self) -> bool:
        """Whether batches are made here, from arrays, and no collate_fn is called."""
        return self.padded is not None

    @cached_property
    def padded(self) -> PaddedBatches | None:
        """What makes the tensors, where no collate_fn is called."""
        if type(self.collate_fn) is PaddedBatches:
            return self.collate_fn
        collator = sys.modules.get("loader.collator")  # it imports transformers: only where the user did
        if collator is None or type(self.collate_fn) is not collator.CausalLMCollator:
            return None
        batches: PaddedBatches = self.collate_fn.batches  # type: ignore[attr-defined]  # CausalLMCollator
        return batches

    def cut(
        self, chunks: list[Chunk], step: int, first_batch: int, is_filler: Fillers = None, width: int = 0
    ) -> Iterator[Uncollated]:
        """The batches of one step of some chunks, from one of them on.

        ``is_filler``: which samples of the step are fillers. ``width``: what rows are to be cut to.
        """
        if not self.row_tokens:
            yield from self._cut_documents(chunks, step, first_batch, is_filler)
            return
        rows, lengths = _rows_of_step(chunks, step)
        every_start = (
            [each for chunk in chunks for each in chunk.starts_of(step)] if self.sample_fields else []
        )
        for part in _batch_parts(self.batch_size, len(rows), first_batch):
            edges = step_edges(chunks, step, part) if self.boundaries else None
            of_rows = None if lengths is None else lengths[part]
            starts = every_start[part] if self.sample_fields else None
            yield Uncollated(rows[part], of_rows, edges, _of_part(is_filler, part), width, starts)

    def _cut_documents(
        self, chunks: list[Chunk], step: int, first_batch: int, is_filler: Fillers
    ) -> Iterator[Uncollated]:
        """The same of samples of any length; with ``starts``, each sample is a batch."""
        if chunks[0].starts is not None:
            yield from cut_token_batches(chunks, step, first_batch, is_filler)
            return
        lengths = np.concatenate([chunk.lengths[:, step] for chunk in chunks])
        parts = [chunk.ids_of(step) for chunk in chunks]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        bounds = np.cumsum([0, *lengths.tolist()])
        for part in _batch_parts(self.batch_size, len(lengths), first_batch):
            of_samples = lengths[part]
            first, end = bounds[part.start], bounds[part.start + len(of_samples)]
            yield Uncollated(ids[first:end], of_samples, None, _of_part(is_filler, part))

    def collate(self, part: Uncollated) -> Any:
        """The batch of some samples; what ``collate_fn`` makes may be anything."""
        batch = self._collated(part)
        if part.is_filler is not None:
            blank_labels(batch, part.is_filler)
        return batch

    def samples_of(self, part: Uncollated) -> list[Any]:
        """What a collate_fn gets of a batch, before ids are lists."""
        return (
            with_fields(part.samples(), part.starts, self.sample_fields)
            if self.sample_fields
            else part.samples()
        )

    def _collated(self, part: Uncollated) -> Any:
        pad = self.padded
        if pad is None:
            return collate_lists(self.collate_fn, self.samples_of(part), has_masks=self.has_masks)
        if self.row_tokens or part.lengths is None:
            batch = pad.mask_rows(part.ids, part.lengths, has_masks=self.has_masks)
        else:
            batch = pad.pad_joined(part.ids, part.lengths)
        if self.boundaries:
            self._add_boundaries(batch, part)
            return batch
        if self.shifts_targets:
            shift(batch)
        if part.width:
            cut_rows(batch, part.width)
        return batch

    def _add_boundaries(self, fields: Batch, part: Uncollated) -> None:
        """Add the fields of ``boundaries``; the first id of a document is no label."""
        lengths, edges = part.lengths, part.edges
        if edges is None:
            assert lengths is not None  # documents have them
            nothing = np.empty(0, np.int64)
            width = fields["input_ids"].shape[1]
            edges = RowEdges.of_rows(nothing.astype(np.int32), nothing, lengths, width).part(0, len(lengths))
        fields["labels"].numpy().reshape(-1)[edges.begins] = IGNORED
        if self.shifts_targets:
            shift(fields)
            edges = without_last_place(edges)
            lengths = None if lengths is None else np.minimum(lengths, edges.shape[1])
        if part.width:
            cut_rows(fields, part.width)
            lengths = None if lengths is None else cut_lengths(lengths, edges.shape[1], part.width)
            edges = cut_edges(edges, part.width)
        fields.update(boundary_fields(self.boundaries, edges, lengths))
        if "transformers" in self.boundaries:
            del fields["attention_mask"]  # where there is one, transformers looks for no documents


@lru_cache
def _batch_parts(batch_size: int, num_samples: int, first_batch: int) -> tuple[slice, ...]:
    """Which samples of a step each batch has; kept, as steps are alike."""
    firsts = range(first_batch * batch_size, num_samples, batch_size)
    return tuple(slice(first, first + batch_size) for first in firsts)


def _of_part(is_filler: Fillers, part: slice) -> Fillers:
    if is_filler is None or not is_filler[part].any():
        return None
    return is_filler[part]


def _rows_of_step(chunks: list[Chunk], step: int) -> tuple[Any, npt.NDArray[Any] | None]:
    """The rows of one step of some chunks, and their lengths unless all are full."""
    if len(chunks) == 1:
        chunk = chunks[0]
        return chunk.ids[:, step], None if chunk.is_full(step) else chunk.lengths[:, step]
    rows = np.concatenate([chunk.ids[:, step] for chunk in chunks])
    if all(chunk.is_full(step) for chunk in chunks):
        return rows, None
    return rows, np.concatenate([chunk.lengths[:, step] for chunk in chunks])


def cut_token_batches(
    chunks: list[Chunk], step: int, first_batch: int, is_filler: Fillers
) -> Iterator[Uncollated]:
    """The batches of one step whose samples are batches, from one of them on."""
    number = 0
    for chunk in chunks:
        ids, begin = chunk.ids_of(step), 0
        for size, starts in zip(chunk.lengths[:, step].tolist(), chunk.starts_of(step), strict=True):
            if number >= first_batch:
                lengths = np.diff(starts, append=size)
                fills = is_filler is not None and is_filler[number]
                yield Uncollated(
                    ids[begin : begin + size], lengths, None, np.ones(len(lengths), bool) if fills else None
                )
            number, begin = number + 1, begin + size


def blank_labels(batch: Any, is_filler: npt.NDArray[np.bool_]) -> None:
    """Take the labels of some rows of a batch away: they fill a last batch up, and count for no loss.

    Raises UsageError where a batch has no labels for each row: a loss would count samples twice.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor) or len(labels) != len(is_filler):
        raise UsageError(
            "the last batch of a validation set is filled up with samples that have labels of -100, and this "
            'collate_fn makes no tensor "labels" with a row for each sample; pass a global_batch_size that '
            "divides the number of samples"
        )
    labels[torch.from_numpy(is_filler)] = IGNORED
