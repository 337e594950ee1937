"""Chunks of the workers -> the tensors of a batch: widths, padding, labels, masks, fields."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from loader.boundaries import HostNumber, boundary_fields
from loader.chunks import ID_BITS, IGNORED, ORIGIN, Chunk, Edges, Ids
from loader.order import Int64s
from loader.shards import check_choice
from shardprep.errors import UsageError
from shardprep.format.dataset_spec import BLANK

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|finetune_right_pad_id|>"  # Llama 3.1 and later keep it for this
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>")

_PAD_IS_EOS = (
    ". It is EOS: labels of a real EOS are kept here, but a loss or another collator that leaves padding out "
    "by its id would never teach the model to end; give the tokenizer a pad token of its own"
)


class BatchFields(TypedDict, total=False):
    """The fields of a batch, by name. Which ones there are follows from the loader's arguments."""

    input_ids: torch.Tensor  # int64[batch, seq]
    labels: torch.Tensor  # int64[batch, seq]; -100 where nothing is to be learnt
    attention_mask: torch.Tensor  # int64[batch, seq]: 0 in padding; not with boundaries="transformers"
    position_ids: torch.Tensor  # int64[batch, seq]: from 0 in each document
    segment_ids: torch.Tensor  # int64[batch, seq]: documents from 1 in each row, 0 in padding
    cu_seqlens: torch.Tensor  # int32[documents + 1]: edges in the flattened batch
    max_seqlen: HostNumber  # the longest document
    cu_seq_lens_q: torch.Tensor  # as cu_seqlens: these names are transformers'
    cu_seq_lens_k: torch.Tensor
    max_length_q: HostNumber
    max_length_k: HostNumber
    use_cache: HostNumber  # 0
    origins: torch.Tensor  # int64[documents, 6]: row, place, source, shard, sample, document


class Batch(dict[str, torch.Tensor]):
    """The tensors of a batch by name, used like a BatchEncoding; BatchFields tells each."""

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return ``batch["labels"]`` for ``batch.labels``."""
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"the batch has {', '.join(self)}, but no {name}")

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Move all tensors to a device. Returns the batch itself, as BatchEncoding's ``to`` does."""
        for name, value in self.items():
            if hasattr(value, "to"):
                self[name] = value.to(device=device, non_blocking=non_blocking)
        return self


@dataclass(frozen=True, kw_only=True)
class PadToken:
    """The id that fills a batch to the right, and why it is this one."""

    token: str
    token_id: int
    reason: str


def choose_pad_token(tokenizer: Any) -> PadToken:
    """Return a token that the tokenizer has: its pad token, Llama's, the first reserved one, or EOS.

    ``tokenizer``: of transformers, or SpecialTokens. Raises UsageError where there is none.
    """
    added = {number: token for token, number in tokenizer.get_added_vocab().items()}
    reserved = sorted(number for number, token in added.items() if _RESERVED.fullmatch(token))
    llamas = [number for number, token in added.items() if token == PAD_TOKEN]
    if tokenizer.pad_token_id is not None:
        found = tokenizer.pad_token_id, tokenizer.pad_token, "the tokenizer's own pad token"
    elif llamas:
        found = llamas[0], PAD_TOKEN, "the tokenizer names none, and has this one"
    elif reserved:
        found = reserved[0], added[reserved[0]], "the first reserved token; no text has it"
    elif tokenizer.eos_token_id is not None:
        why = "EOS, for want of another; the attention mask tells it from a real one"
        found = tokenizer.eos_token_id, tokenizer.eos_token, why
    else:
        raise UsageError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")
    return PadToken(token_id=found[0], token=found[1], reason=found[2])


def log_pad_token(pad: PadToken, eos_token_id: int | None) -> None:
    """Say which token pads: a warning where it is EOS."""
    is_eos = pad.token_id == eos_token_id
    logger.log(
        logging.WARNING if is_eos else logging.INFO,
        "padding with %s (id %d): %s%s",
        pad.token,
        pad.token_id,
        pad.reason,
        _PAD_IS_EOS if is_eos else "",
    )


@dataclass(frozen=True, kw_only=True)
class PaddedBatches:
    """Makes int64[batch, seq] ``input_ids``, ``attention_mask`` and ``labels``, padded to the right.

    Equal to those of transformers' DataCollatorForLanguageModeling, but that a real EOS keeps its label where
    EOS is the pad token. An (8, 2048) batch costs 0.02 ms, there 4.7.
    """

    pad: PadToken
    pad_to_multiple_of: int | None = None
    pad_to_length: int | None = None  # one width for all batches, instead of the longest sample's
    num_beyond: int = 0  # places that a batch loses again, and that the multiple leaves out

    def __call__(self, examples: Sequence[Any]) -> Batch:
        """Collate samples as transformers gives them: ids, or dicts with ``input_ids`` (and ``labels``)."""
        rows, masks, labels = [], [], []
        for example in examples:
            fields = example if isinstance(example, Mapping) else {"input_ids": example}
            unknown = fields.keys() - {"input_ids", "attention_mask", "special_tokens_mask", "labels"}
            if unknown:
                raise UsageError(
                    f"samples have {sorted(unknown)}, expected input_ids; pass your own collate_fn"
                )
            rows.append(np.asarray(fields["input_ids"], np.int64))
            masks.append(np.asarray(fields.get("attention_mask", np.ones(len(rows[-1]))), np.int64))
            labels.append(np.asarray(fields.get("labels", rows[-1]), np.int64))
        batch = self.pad_joined(np.concatenate(rows), np.array([len(row) for row in rows]))
        for row, (mask, of_row) in enumerate(zip(masks, labels, strict=True)):
            batch["attention_mask"][row, : len(mask)] = torch.from_numpy(mask)
            batch["labels"][row, : len(of_row)] = torch.from_numpy(of_row)
        batch["labels"].masked_fill_(batch["attention_mask"] == 0, IGNORED)
        return batch

    def pad_joined(self, joined: Ids, lengths: npt.NDArray[Any], *, has_blanks: bool = False) -> Batch:
        """Samples whose ids stand one after another, padded to the longest, or as the fields say.
        ``has_blanks``: BLANK may stand among the ids."""
        multiple = self.pad_to_multiple_of or 1
        widest = max(int(lengths.max()), self.pad_to_length or 0) - self.num_beyond
        width = max(-(-widest // multiple) * multiple, 1) + self.num_beyond
        is_real = np.arange(width) < lengths[:, None]
        ids = np.full(is_real.shape, self.pad.token_id, np.int64)
        ids[is_real] = joined
        attention_mask, labels = is_real.astype(np.int64), np.where(is_real, ids, IGNORED)
        if has_blanks:
            self._pad_blanks(ids, attention_mask, labels)
        return _batch_of(ids, attention_mask, labels)

    def _pad_blanks(self, ids: Ids, attention_mask: Ids, labels: Ids) -> None:
        """Make blanked documents padding where they stand. A token behind one has no label: its prediction
        would be made at a place of padding. Of a row that is nothing else, the first place is attended to:
        attention over nothing may give NaN."""
        is_blank = ids == BLANK
        if not is_blank.any():
            return
        ids[is_blank], attention_mask[is_blank], labels[is_blank] = self.pad.token_id, 0, IGNORED
        labels[:, 1:][is_blank[:, :-1]] = IGNORED
        attention_mask[~attention_mask.any(axis=1), 0] = 1

    def mask_rows(
        self,
        rows: Ids,
        lengths: npt.NDArray[Any] | None,
        *,
        has_masks: bool = False,
        has_blanks: bool = False,
    ) -> Batch:
        """Collate [batch, seq] rows, of which the first ``lengths`` ids are real (None: all). ``has_masks``:
        ids may carry NO_LABEL; ``has_blanks``: or be BLANK. Labels are widened from ``rows``: a copy
        may take 3 times as long."""
        ids, labels = rows.astype(np.int64), rows.astype(np.int64)
        if has_masks:
            ids &= ID_BITS
            labels[labels < 0] = IGNORED
        if lengths is None:
            attention_mask = np.empty_like(ids)
            attention_mask.fill(1)  # 14 us less than ones_like, of 110 for a batch
        else:
            padding = np.arange(ids.shape[1]) >= lengths[:, None]
            ids[padding] = self.pad.token_id
            labels[padding] = IGNORED
            attention_mask = (~padding).astype(np.int64)
        if has_blanks:
            self._pad_blanks(ids, attention_mask, labels)
        return _batch_of(ids, attention_mask, labels)


def _batch_of(ids: Ids, attention_mask: Ids, labels: Ids) -> Batch:
    return Batch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention_mask),
        labels=torch.from_numpy(labels),
    )


def check_padding(padding: str, max_length: int | None) -> None:
    """Raise UsageError where a width is needed and not given."""
    check_choice("padding", padding, Literal["longest", "max_length"])
    if max_length is None and padding == "max_length":
        raise UsageError(
            f"padding={padding!r} needs max_length", found=f"padding={padding!r}", expected="max_length"
        )


Collate = Callable[[list[Any]], Any]


def collate_lists(
    collate_fn: Collate,
    samples: Sequence[Ids],
    *,
    has_masks: bool = False,
    pad_for_blanks: int | None = None,
) -> Any:
    """What a ``collate_fn`` of the user's makes of some samples; with masks or blanks, they have labels, too.
    ``pad_for_blanks`` takes the place of BLANK; None: no document is blanked."""

    def as_lists(ids: Ids) -> dict[str, Any]:
        if not has_masks and pad_for_blanks is None:
            return {"input_ids": ids.tolist()}
        ids = ids.astype(np.int32, copy=False)
        labels = np.where(ids < 0, IGNORED, ids)
        ids = ids & ID_BITS
        if pad_for_blanks is not None:
            is_blank = ids == BLANK
            ids[is_blank], labels[is_blank] = pad_for_blanks, IGNORED
            labels[1:][is_blank[:-1]] = IGNORED
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}

    return collate_fn([as_lists(ids) for ids in samples])


Targets = Literal["same", "shifted"]


def check_targets(targets: str, boundaries: tuple[str, ...], *, has_collate_fn: bool) -> bool:
    """Return whether labels are shifted. Raises UsageError where other arguments do not go with that."""
    check_choice("targets", targets, Targets)
    if targets == "shifted" and "transformers" in boundaries:
        raise UsageError(
            "transformers' models shift labels themselves, so targets='shifted' would shift them twice; "
            "leave it out, or take other boundaries than 'transformers'",
            found="targets='shifted'",
            expected="other boundaries than 'transformers'",
        )
    if targets == "shifted" and has_collate_fn:
        raise UsageError("targets='shifted' is for the loader's own batches; leave out collate_fn or it")
    return targets == "shifted"


def shift(fields: dict[str, Any]) -> None:
    """Take the last place off ``input_ids`` and mask, and the first one off ``labels``."""
    for name in ("input_ids", "attention_mask"):
        fields[name] = fields[name][:, :-1].contiguous()
    fields["labels"] = fields["labels"][:, 1:].contiguous()


def _without_last_place(edges: Edges, width: int) -> Edges:
    """Return the edges of the same rows, ``width`` places wide, one place narrower."""
    row, within = np.divmod(edges.begins, width)
    is_kept = within < width - 1
    # A document that ends its row loses a place.
    is_last = (within + edges.sizes == width)[is_kept]
    sizes = edges.sizes[is_kept] - is_last
    return Edges((row * (width - 1) + within)[is_kept], sizes, int(sizes.max()))


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
        """Return the share of padding in all that was delivered, 0 to 1."""
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)

    def reset(self) -> None:
        """Count from 0 again, as for each logging interval."""
        vars(self).update(vars(LoaderMetrics()))

    def count(self, part: Uncollated, batch: Any) -> None:
        """Count a batch that is delivered, and the samples that it was made of."""
        num_tokens = part.num_tokens
        self.num_batches += 1
        self.num_tokens += num_tokens
        if part.lengths is None:
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
    origins: Int64s | None = None  # int64[documents, ORIGIN], if they were asked for

    @property
    def num_tokens(self) -> int:
        """Return the tokens without padding."""
        return self.ids.size if self.lengths is None else int(self.lengths.sum())

    def samples(self) -> list[Ids]:
        """Return the ids of each sample, without padding."""
        rows: list[Ids] = list(self.ids) if self.ids.ndim > 1 else []
        if self.lengths is not None and self.ids.ndim == 1:
            bounds = [0, *np.cumsum(self.lengths).tolist()]
            rows = [self.ids[first:end] for first, end in pairwise(bounds)]
        elif self.lengths is not None:
            rows = [row[:length] for row, length in zip(rows, self.lengths.tolist(), strict=True)]
        return rows


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """Cuts a rank's part of a global batch into batches and collates them. PaddedBatches and CausalLMCollator
    get arrays; any other ``collate_fn`` is called, with ids as lists."""

    batch_size: int
    row_tokens: int  # of every sample where all are rows, else 0
    collate_fn: Collate
    boundaries: tuple[str, ...] = ()
    has_masks: bool = False  # ids may carry NO_LABEL
    pad_for_blanks: int | None = None  # what a collate_fn gets for ids that are BLANK; None: none is
    shifts_targets: bool = False  # labels stand where the token before them stands
    origins: bool = False  # whether batches say where their documents come from

    def __post_init__(self) -> None:
        if self.origins and not self.is_own:
            raise UsageError("origins are told of the loader's own batches; leave out collate_fn or them")
        if self.boundaries and not self.is_own:
            raise UsageError("boundaries are made for the loader's own batches; leave out collate_fn or them")

    @property
    def is_own(self) -> bool:
        """Return whether batches are made here, from arrays, and no collate_fn is called."""
        return self.padded is not None

    @cached_property
    def padded(self) -> PaddedBatches | None:
        """Return what makes the tensors, where no collate_fn is called."""
        if type(self.collate_fn) is PaddedBatches:
            return self.collate_fn
        collator = sys.modules.get("loader.collator")  # it imports transformers: only where the user did
        if collator is None or type(self.collate_fn) is not collator.CausalLMCollator:
            return None
        batches: PaddedBatches = self.collate_fn.batches  # type: ignore[attr-defined]  # CausalLMCollator
        return batches

    def cut(
        self, chunks: list[Chunk], tick: int, first_batch: int, is_filler: Fillers = None
    ) -> Iterator[Uncollated]:
        """Yield the batches of one tick from one of them on. The chunks have its samples one under another.

        ``is_filler``: which samples of the tick are fillers.
        """
        num_samples = sum(chunk.num_samples for chunk in chunks)
        is_full = self.row_tokens > 0 and all(chunk.is_full(tick) for chunk in chunks)
        for part in _batch_parts(self.batch_size, num_samples, first_batch):
            pieces = [(chunks[0], part.start, part.stop)] if len(chunks) == 1 else _pieces(chunks, part)
            ids = _concatenated([chunk.ids.of(tick, first, end) for chunk, first, end in pieces])
            lengths = edges = origins = fillers = None
            if not is_full:
                lengths = _concatenated([chunk.lengths[first:end, tick] for chunk, first, end in pieces])
            if self.boundaries and self.row_tokens:
                edges = Edges.joined(
                    [chunk.edges_of(tick, first, end) for chunk, first, end in pieces],
                    [(end - first) * self.row_tokens for _, first, end in pieces],
                )
            if self.origins:
                origins = _origins(pieces, tick)
            if is_filler is not None and is_filler[part].any():
                fillers = is_filler[part]
            yield Uncollated(ids, lengths, edges, fillers, origins)

    def collate(self, part: Uncollated) -> Any:
        """Return the batch of some samples. What ``collate_fn`` makes may be anything."""
        batch = self._collated(part)
        if part.is_filler is not None:
            blank_labels(batch, part.is_filler)
        if part.origins is not None:
            origins = part.origins
            if self.shifts_targets:  # a document that begins at the place which is lost is not in the batch
                origins = origins[origins[:, 1] < batch["labels"].shape[1]]
            batch["origins"] = torch.from_numpy(origins)
        return batch

    def warn_of_no_labels(self, part: Uncollated, batch: Any) -> None:
        """Warn, once for a loader, of a batch of which a model has nothing to predict."""
        is_masked = self.has_masks or self.pad_for_blanks is not None
        is_short = part.lengths is not None and int(part.lengths.max()) < 2
        if part.is_filler is not None or not (is_masked or is_short):
            return  # no label is missing, or evaluation counts the labels itself
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
            return  # a user's own batch may be anything
        # Nothing stands before the first token of a row, that could predict it.
        if (labels if self.shifts_targets else labels[:, 1:]).eq(IGNORED).all():
            self._warned_of_no_labels  # noqa: B018

    @cached_property
    def _warned_of_no_labels(self) -> bool:
        logger.warning(
            "a batch has no label left: the assistant wrote none of its tokens, or they are blanked, or "
            "each document has one token. A loss that is a mean over labels is NaN there; divide the sum of "
            "the loss by at least 1, or raise batch_size"
        )
        return True

    def _collated(self, part: Uncollated) -> Any:
        pad = self.padded
        if pad is None:
            return collate_lists(
                self.collate_fn,
                part.samples(),
                has_masks=self.has_masks,
                pad_for_blanks=self.pad_for_blanks,
            )
        has_blanks = self.pad_for_blanks is not None
        if self.row_tokens or part.lengths is None:
            batch = pad.mask_rows(part.ids, part.lengths, has_masks=self.has_masks, has_blanks=has_blanks)
        else:
            batch = pad.pad_joined(part.ids, part.lengths, has_blanks=has_blanks)
        if self.boundaries:
            self._add_boundaries(batch, part)
            return batch
        if self.shifts_targets:
            shift(batch)
        return batch

    def _add_boundaries(self, fields: Batch, part: Uncollated) -> None:
        """Add the fields of ``boundaries``. The first id of a document is no label."""
        lengths, edges = part.lengths, part.edges
        num_rows, width = fields["input_ids"].shape
        if edges is None:  # each row is one document
            assert lengths is not None
            nothing = np.zeros(0, np.int32)
            edges = Edges.of_rows(nothing, np.zeros(num_rows, np.int64), lengths, width)
        fields["labels"].numpy().reshape(-1)[edges.begins] = IGNORED
        if self.shifts_targets:
            shift(fields)
            edges, width = _without_last_place(edges, width), width - 1
            lengths = None if lengths is None else np.minimum(lengths, width)
        fields.update(boundary_fields(self.boundaries, edges, (num_rows, width), lengths))
        if "transformers" in self.boundaries:
            del fields["attention_mask"]  # where there is one, transformers looks for no documents


@lru_cache
def _batch_parts(batch_size: int, num_samples: int, first_batch: int) -> tuple[slice, ...]:
    """Return which samples of a tick each batch has. Kept, as ticks are alike."""
    firsts = range(first_batch * batch_size, num_samples, batch_size)
    return tuple(slice(first, min(first + batch_size, num_samples)) for first in firsts)


def _pieces(chunks: list[Chunk], part: slice) -> list[tuple[Chunk, int, int]]:
    """Return some of a tick's samples, which the chunks have one under another: of each chunk which ones."""
    found, before = [], 0
    for chunk in chunks:
        first, end = max(part.start - before, 0), min(part.stop - before, chunk.num_samples)
        if first < end:
            found.append((chunk, first, end))
        before += chunk.num_samples
    return found


def _concatenated(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _origins(pieces: list[tuple[Chunk, int, int]], tick: int) -> Int64s:
    """Return the origins of some of a tick's samples, int64[documents, ORIGIN], whose rows count from 0."""
    found, row = [], 0
    for chunk, first, end in pieces:
        assert chunk.origins is not None
        found.append(chunk.origins.of(tick, first, end).reshape(-1, len(ORIGIN)).astype(np.int64))
        found[-1][:, 0] += row - first
        row += end - first
    return _concatenated(found)


def blank_labels(batch: Any, is_filler: npt.NDArray[np.bool_]) -> None:
    """Take the labels of some rows of a batch away: they fill a last batch up, and count for no loss. Raises
    UsageError where a batch has no labels for each row: a loss would count samples twice."""
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor) or len(labels) != len(is_filler):
        raise UsageError(
            "the last batch of a validation set is filled up with samples that have labels of -100, and this "
            'collate_fn makes no tensor "labels" with a row for each sample; pass a global_batch_size that '
            "divides the number of samples"
        )
    labels[torch.from_numpy(is_filler)] = IGNORED
