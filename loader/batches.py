"""Chunks of the workers -> the tensors of a batch: widths, padding, labels, masks, fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from loader.boundaries import boundary_fields
from loader.chunks import ID_BITS, IGNORED, Chunk, Edges, Ids, Integers
from shardprep.errors import UsageError
from shardprep.format.names import BLANK

logger = logging.getLogger(__name__)
Lengths = npt.NDArray[np.integer[Any]]  # [batch]: tokens of each sample
Collate = Callable[[list[Any]], Any]
Targets = Literal["same", "shifted"]

PAD_TOKEN = "<|finetune_right_pad_id|>"  # Llama 3.1 and later keep it for this
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>")


class Batch(dict[str, torch.Tensor]):
    """The tensors of a batch by name, used like a BatchEncoding. The loader's arguments say which there are.

    ``input_ids``, ``labels`` (-100 where nothing is to be learnt) and ``attention_mask`` (0 in padding) are
    int64[batch, seq]; so are ``position_ids`` and ``segment_ids``, which ``boundary_fields`` explains with
    the edges of documents. ``origins``: int64[documents, 6]: row, place, source, shard, sample, document.
    """

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
    """Return a token that the tokenizer has: its pad token, Llama's, the first reserved one, or EOS."""
    added = tokenizer.get_added_vocab()
    reserved = min((token for token in added if _RESERVED.fullmatch(token)), key=added.get, default="")
    why_eos = "EOS, for want of another; the attention mask tells it from a real one"
    for token, token_id, reason in (
        (tokenizer.pad_token, tokenizer.pad_token_id, "the tokenizer's own pad token"),
        (PAD_TOKEN, added.get(PAD_TOKEN), "the tokenizer names none, and has this one"),
        (reserved, added.get(reserved), "the first reserved token; no text has it"),
        (tokenizer.eos_token, tokenizer.eos_token_id, why_eos),
    ):
        if token_id is not None:
            return PadToken(token=token, token_id=token_id, reason=reason)
    raise UsageError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")


def log_pad_token(pad: PadToken, eos_token_id: int | None) -> None:
    """Say which token pads: a warning where it is EOS."""
    said = f"padding with {pad.token} (id {pad.token_id}): {pad.reason}"
    if pad.token_id != eos_token_id:
        logger.info(said)
        return
    advice = "give the tokenizer a pad token of its own, for a loss that leaves padding out by its id"
    logger.warning(f"{said}. Labels of a real EOS are kept here; {advice}")


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
    has_masks: bool = False  # ids may carry NO_LABEL
    has_blanks: bool = False  # or be BLANK

    def of_documents(self, joined: Integers, lengths: Lengths) -> Batch:
        """Pad samples, whose ids stand one after another, to the longest, or as the fields say."""
        multiple = self.pad_to_multiple_of or 1
        widest = max(int(lengths.max()), self.pad_to_length or 0) - self.num_beyond
        width = max(-(-widest // multiple) * multiple, 1) + self.num_beyond
        is_real = np.arange(width) < lengths[:, None]
        ids = np.full(is_real.shape, self.pad.token_id, np.int64)
        ids[is_real] = joined
        return self._batch(ids, is_real.astype(np.int64), np.where(is_real, ids, IGNORED))

    def of_rows(self, rows: Integers, lengths: Lengths | None) -> Batch:
        """Collate [batch, seq] rows, of which the first ``lengths`` ids are real (None: all)."""
        ids, labels = rows.astype(np.int64), rows.astype(np.int64)  # copying ids takes 3 times as long
        if self.has_masks:
            ids &= ID_BITS
            labels[labels < 0] = IGNORED
        attention_mask = np.empty_like(ids)
        attention_mask.fill(1)  # 14 us less than ones_like, of 110 for a batch
        if lengths is not None:
            padding = np.arange(ids.shape[1]) >= lengths[:, None]
            ids[padding], labels[padding], attention_mask[padding] = self.pad.token_id, IGNORED, 0
        return self._batch(ids, attention_mask, labels)

    def _batch(self, ids: Ids, attention_mask: Ids, labels: Ids) -> Batch:
        """Return the arrays as tensors, with blanked documents as padding where they stand."""
        if self.has_blanks:
            is_blank = ids == BLANK
            ids[is_blank], attention_mask[is_blank], labels[is_blank] = self.pad.token_id, 0, IGNORED
            # A token behind a blanked one has no label: its prediction would be made at a place of padding.
            labels[:, 1:][is_blank[:, :-1]] = IGNORED
            # Attention over nothing may give NaN.
            attention_mask[~attention_mask.any(axis=1), 0] = 1
        return Batch(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(attention_mask),
            labels=torch.from_numpy(labels),
        )


def padded_batches(collate_fn: Collate | None, tokenizer: Any, **options: Any) -> PaddedBatches:
    """Return what pads for a collate_fn, or for none. ``options``: fields of PaddedBatches."""
    batches = getattr(collate_fn, "batches", None)  # of a CausalLMCollator
    if isinstance(batches, PaddedBatches):
        return replace(batches, has_masks=options["has_masks"], has_blanks=options["has_blanks"])
    # Before a collate_fn gets samples their padding is cut off again, but where it stands for blanks.
    if collate_fn is not None and not options["has_blanks"]:
        return PaddedBatches(pad=PadToken(token="", token_id=0, reason="of a collate_fn"), **options)
    pad = choose_pad_token(tokenizer)
    if collate_fn is None:
        log_pad_token(pad, tokenizer.eos_token_id)
    return PaddedBatches(pad=pad, **options)


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

    def count(self, num_tokens: int, num_padding: int) -> None:
        """Count a batch that is delivered."""
        self.num_batches += 1
        self.num_tokens += num_tokens
        self.num_padding += num_padding


@dataclass(kw_only=True)
class StepBatches:
    """Cuts a rank's part of a global batch into batches and collates them."""

    batch_size: int
    padded: PaddedBatches
    collate_fn: Collate | None = None  # called with ids as lists, where it is not the loader's own
    boundaries: tuple[str, ...] = ()
    shifts_targets: bool = False  # labels stand where the token before them stands
    origins: bool = False  # whether batches say where their documents come from
    may_lack_labels: bool = field(init=False)  # of tokens that are no padding
    is_own: bool = field(init=False)  # no collate_fn is called, nor a CausalLMCollator
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.may_lack_labels = self.padded.has_masks or self.padded.has_blanks
        self.is_own = self.collate_fn is None or type(self.collate_fn).__module__ == "loader.collator"
        for name, is_wanted in (("origins", self.origins), ("boundaries", self.boundaries)):
            if is_wanted and not self.is_own:
                raise UsageError(f"{name} are for the loader's own batches; leave out collate_fn or {name}")

    def of_tick(
        self, chunk: Chunk, tick: int, first_batch: int, is_filler: npt.NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield the batches of one tick from one of them on, each with its numbers of tokens and of padding.

        ``is_filler``: which samples of the tick fill a last batch up, if any do: they have no labels.
        """
        is_full = chunk.ids.width > 0 and chunk.shortest[tick] == chunk.ids.width  # no padding
        for first in range(first_batch * self.batch_size, chunk.num_samples, self.batch_size):
            end = first + self.batch_size
            ids = chunk.ids.of(tick, first, end)
            lengths = None if is_full else chunk.lengths[first:end, tick]
            batch: Any
            if chunk.ids.width or lengths is None:
                batch = self.padded.of_rows(ids, lengths)
            else:
                batch = self.padded.of_documents(ids, lengths)
            if self.boundaries:
                edges = chunk.edges_of(tick, first, end, batch["input_ids"].shape[1])
                self._add_boundaries(batch, edges, lengths)
            if not self.is_own:
                batch = self._collated(batch, lengths)
            elif self.shifts_targets:
                for name in ("input_ids", "attention_mask"):
                    batch[name] = batch[name][:, :-1].contiguous()
                batch["labels"] = batch["labels"][:, 1:].contiguous()
            if self.origins and chunk.documents is not None:
                origins = chunk.documents.of(tick, first, end).astype(np.int64)
                origins[:, 0] = np.repeat(np.arange(end - first), chunk.documents.counts[first:end, tick])
                # Of shifted targets a document that begins at the place which is lost is not in the batch.
                batch["origins"] = torch.from_numpy(origins[origins[:, 1] < batch["labels"].shape[1]])
            if is_filler is not None and is_filler[first:end].any():
                blank_labels(batch, is_filler[first:end])
            elif self.may_lack_labels or (lengths is not None and int(lengths.max()) < 2):
                self._warn_of_no_labels(batch)
            num_tokens = num_places = ids.size if lengths is None else int(lengths.sum())
            if lengths is not None and (made := _tensor_of(batch, "input_ids")) is not None:
                num_places = made.numel()
            yield batch, (num_tokens, max(num_places - num_tokens, 0))

    def _add_boundaries(self, fields: Batch, edges: Edges, lengths: Lengths | None) -> None:
        """Add the fields of ``boundaries``. The first id of a document is no label."""
        num_rows, width = fields["input_ids"].shape
        fields["labels"].numpy().reshape(-1)[edges.begins] = IGNORED
        if self.shifts_targets:
            # Each row loses its last place: a document that begins there, or the end of a longer one.
            row, within = np.divmod(edges.begins, width)
            is_kept, is_last = within < width - 1, within + edges.sizes == width
            width -= 1
            edges = Edges((row * width + within)[is_kept], (edges.sizes - is_last)[is_kept])
            lengths = None if lengths is None else np.minimum(lengths, width)
        fields.update(boundary_fields(self.boundaries, edges, (num_rows, width), lengths))
        if "transformers" in self.boundaries:
            del fields["attention_mask"]  # where there is one, transformers looks for no documents

    def _collated(self, batch: Batch, lengths: Lengths | None) -> Any:
        """Return what ``collate_fn`` makes; its samples have labels where masks or blanks take some away."""
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        sizes = [ids.shape[1]] * len(ids) if lengths is None else lengths.tolist()
        samples = [{"input_ids": row[:size].tolist()} for row, size in zip(ids, sizes, strict=True)]
        if self.may_lack_labels:
            for sample, row, size in zip(samples, labels, sizes, strict=True):
                sample["labels"] = row[:size].tolist()
        assert self.collate_fn is not None
        return self.collate_fn(samples)

    def _warn_of_no_labels(self, batch: Any) -> None:
        """Warn, once for a loader, of a batch of which a model has nothing to predict."""
        labels = _tensor_of(batch, "labels")
        if labels is None or labels.ndim != 2:
            return
        # Nothing stands before the first token of a row, that could predict it.
        if (labels if self.shifts_targets else labels[:, 1:]).eq(IGNORED).all() and not self._has_warned:
            self._has_warned = True
            said = "a batch has no label left: they are blanked, of no assistant, or of one token a document"
            logger.warning(f"{said}. A mean over labels is NaN there: divide a sum by at least 1")


def blank_labels(batch: Any, is_filler: npt.NDArray[np.bool_]) -> None:
    """Take the labels of some rows of a batch away: they fill a last batch up, and count for no loss."""
    labels = _tensor_of(batch, "labels")
    if labels is None or len(labels) != len(is_filler):
        found = "the last batch of a validation set, filled up with samples that must have labels of -100"
        rows = 'a collate_fn that makes a tensor "labels" with a row for each sample'
        expected = f"{rows}, or a global_batch_size that divides the number of samples"
        raise UsageError(found=found, expected=expected)
    labels[torch.from_numpy(is_filler)] = IGNORED


def _tensor_of(batch: Any, name: str) -> torch.Tensor | None:
    """Return a tensor of a batch, if it has that: a user's own batch may be anything."""
    found = batch.get(name) if hasattr(batch, "get") else None
    return found if isinstance(found, torch.Tensor) else None
