"""Makes batches from the workers' chunks: width, padding, labels, masks and other fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from loader.batch.fields import BatchEdges, Maker, makers_of
from loader.read.chunks import ID_BITS, IGNORED, Chunk, Edges, Ids, Integers, Ragged
from loader.read.tokenizer import SpecialTokens
from shardprep.errors import UsageError
from shardprep.format.spec import BLANK

logger = logging.getLogger(__name__)
Lengths = Integers  # [batch]: tokens of each sample
Collate = Callable[[list[Any]], object]  # samples -> the batch to deliver
Targets = Literal["same", "shifted"]

PAD_TOKEN = "<|finetune_right_pad_id|>"  # of Llama 3.1 and later
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>")


class Batch(dict[str, torch.Tensor]):
    """A dict of the tensors of a batch, used like a BatchEncoding. The loader's arguments select the fields.

    The table ``FIELDS`` of loader/batch/fields.py has all fields, with their shapes and what makes them.
    ``input_ids``, ``labels`` (-100: not trained on) and ``attention_mask`` (0 in padding) are int64[batch,
    seq]. So are ``position_ids``, from 0 in each document, and ``segment_ids``, from 1 in each row.
    ``origins`` is int64[documents, 6], with columns row, place, source, shard, sample, document.
    """

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return ``batch["labels"]`` for ``batch.labels``."""
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"the batch has {', '.join(self)}, but no {name}")

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """Move all tensors to a device, and return the same batch, like BatchEncoding's ``to``."""
        for name, value in self.items():
            if hasattr(value, "to"):
                self[name] = value.to(device=device, non_blocking=non_blocking)
        return self


@dataclass(frozen=True, kw_only=True)
class PadToken:
    """The token that pads batches, and why it was chosen."""

    token: str
    token_id: int
    reason: str


def choose_pad_token(tokenizer: SpecialTokens) -> PadToken:
    """Return the tokenizer's pad token, else Llama's, else the first reserved token, else EOS."""
    added = tokenizer.get_added_vocab()
    names = [token for token in added if _RESERVED.fullmatch(token)]
    reserved = min(names, key=lambda token: added[token], default="")
    why_eos = "EOS, as there is no other; the attention mask distinguishes it from a real EOS"
    for token, token_id, reason in (
        (tokenizer.pad_token, tokenizer.pad_token_id, "the tokenizer's own pad token"),
        (PAD_TOKEN, added.get(PAD_TOKEN), "Llama's pad token; the tokenizer names none"),
        (reserved, added.get(reserved), "the first reserved token, which no text contains"),
        (tokenizer.eos_token, tokenizer.eos_token_id, why_eos),
    ):
        if token is not None and token_id is not None:
            return PadToken(token=token, token_id=token_id, reason=reason)
    raise UsageError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")


def log_pad_token(pad: PadToken, eos_token_id: int | None) -> None:
    """Log which token pads, as a warning if it is EOS."""
    message = f"padding with {pad.token} (id {pad.token_id}): {pad.reason}"
    if pad.token_id != eos_token_id:
        logger.info(message)
        return
    advice = "if your loss ignores padding by its id, give the tokenizer a pad token of its own"
    logger.warning(f"{message}. The loader keeps the labels of a real EOS; {advice}")


@dataclass(frozen=True, kw_only=True)
class Padder:
    """Makes ``input_ids``, ``attention_mask`` and ``labels``, int64[batch, seq], padded to the right.

    They equal those of transformers' DataCollatorForLanguageModeling, except that a real EOS keeps its label
    if EOS is the pad token. An (8, 2048) batch takes 0.02 ms; transformers takes 4.7 ms.
    """

    pad: PadToken
    pad_to_multiple_of: int | None = None
    pad_to_length: int | None = None  # width of all batches, instead of the longest sample's
    num_cut_columns: int = 0  # with shifted targets, 1: cut off later, so the multiple leaves it out
    has_masks: bool = False  # ids may contain NO_LABEL
    has_blanks: bool = False  # ids may be BLANK

    def of_documents(self, joined: Integers, lengths: Lengths) -> Batch:
        """Return a padded batch of samples whose ids are joined one after another."""
        multiple = self.pad_to_multiple_of or 1
        widest = max(int(lengths.max()), self.pad_to_length or 0) - self.num_cut_columns
        width = max(-(-widest // multiple) * multiple, 1) + self.num_cut_columns
        is_real = np.arange(width) < lengths[:, None]
        ids = np.full(is_real.shape, self.pad.token_id, np.int64)
        ids[is_real] = joined
        return self._batch(ids, is_real.astype(np.int64), np.where(is_real, ids, IGNORED))

    def of_rows(self, rows: Integers, lengths: Lengths | None) -> Batch:
        """Return a batch of rows [batch, seq], of which the first ``lengths`` ids are real (None: all)."""
        # ids.copy() takes 3 times as long
        ids = rows.astype(np.int64)
        labels = rows.astype(np.int64)
        if self.has_masks:
            ids &= ID_BITS
            labels[labels < 0] = IGNORED
        attention_mask = np.empty_like(ids)
        attention_mask.fill(1)  # saves 14 of 110 us per batch over ones_like
        if lengths is not None:
            padding = np.arange(ids.shape[1]) >= lengths[:, None]
            ids[padding] = self.pad.token_id
            labels[padding] = IGNORED
            attention_mask[padding] = 0
        return self._batch(ids, attention_mask, labels)

    def _batch(self, ids: Ids, attention_mask: Ids, labels: Ids) -> Batch:
        """Return the arrays as tensors, with blanked documents turned into padding."""
        if self.has_blanks:
            is_blank = ids == BLANK
            ids[is_blank] = self.pad.token_id
            attention_mask[is_blank] = 0
            labels[is_blank] = IGNORED
            # The token after a blanked one would be predicted from padding, so it has no label.
            labels[:, 1:][is_blank[:, :-1]] = IGNORED
        batch = Batch(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(attention_mask),
            labels=torch.from_numpy(labels),
        )
        if self.has_blanks:
            keep_an_attended_place(batch["attention_mask"])
        return batch


def keep_an_attended_place(attention_mask: torch.Tensor) -> None:
    """Set the first place of each row without attended places to 1: attention over no token may give NaN."""
    attention_mask[~attention_mask.bool().any(dim=1), 0] = 1


def is_own_collator(collate_fn: Collate | None) -> bool:
    """Return whether a collate_fn is a CausalLMCollator, whose batches are made here without calling it.

    A subclass is called like any other function, as it may collate in its own way.
    """
    # Not isinstance: the module of the class imports transformers.
    return type(collate_fn).__module__ == "loader.batch.collator"


def choose_padder(
    collate_fn: Collate | None,
    tokenizer: SpecialTokens,
    *,
    pad_to_multiple_of: int | None,
    pad_to_length: int | None,
    num_cut_columns: int,
    has_masks: bool,
    has_blanks: bool,
) -> Padder:
    """Return the Padder for a collate_fn, or for None."""
    if is_own_collator(collate_fn):
        padder: Padder = getattr(collate_fn, "padder")  # noqa: B009 - mypy knows no such attribute
        return replace(padder, has_masks=has_masks, has_blanks=has_blanks)
    # Samples for a collate_fn lose their padding again, so any id will do, unless it replaces blanks.
    pad = PadToken(token="", token_id=0, reason="of a collate_fn")
    if collate_fn is None or has_blanks:
        pad = choose_pad_token(tokenizer)
    if collate_fn is None:
        log_pad_token(pad, tokenizer.eos_token_id)
    return Padder(
        pad=pad,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_to_length=pad_to_length,
        num_cut_columns=num_cut_columns,
        has_masks=has_masks,
        has_blanks=has_blanks,
    )


@dataclass(kw_only=True)
class LoaderMetrics:
    """Counts of this rank since the loader was made, or since ``reset``. Counting takes 2 us per batch."""

    num_batches: int = 0
    num_tokens: int = 0  # without padding
    num_padding: int = 0
    num_cut_tokens: int = 0  # after max_length; counted when their chunk arrives
    wait_s: float = 0.0  # seconds of waiting for workers, or without workers of reading and decoding

    @property
    def padding_share(self) -> float:
        """Return the share of padding in all delivered tokens, 0 to 1."""
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)

    def reset(self) -> None:
        """Count from 0 again, for example at the start of each logging interval."""
        vars(self).update(vars(LoaderMetrics()))

    def count(self, num_tokens: int, num_padding: int) -> None:
        """Count a delivered batch."""
        self.num_batches += 1
        self.num_tokens += num_tokens
        self.num_padding += num_padding


class CountedBatch(NamedTuple):
    """A batch, and what LoaderMetrics counts of it. Made for every batch: 0.3 us."""

    batch: Any  # a Batch, or what a collate_fn returned
    num_tokens: int  # without padding
    num_padding: int


@dataclass(kw_only=True)
class StepBatches:
    """Cuts a rank's part of a global batch into batches and collates them."""

    batch_size: int
    padder: Padder
    collate_fn: Collate | None = None
    boundaries: tuple[str, ...] = ()
    shifts_targets: bool = False  # labels[:, t] is the token after input_ids[:, t]
    origins: bool = False  # whether batches have the field
    may_lack_labels: bool = field(init=False)  # whether tokens other than padding may have no label
    is_custom: bool = field(init=False)  # whether collate_fn is called
    _has_warned: bool = field(default=False, init=False)
    _makers: dict[Maker, list[str]] = field(init=False)  # of the fields of ``boundaries``

    def __post_init__(self) -> None:
        self._makers = makers_of(self.boundaries)
        self.may_lack_labels = self.padder.has_masks or self.padder.has_blanks
        self.is_custom = self.collate_fn is not None and not is_own_collator(self.collate_fn)
        for name, is_wanted in (("origins", self.origins), ("boundaries", self.boundaries)):
            if is_wanted and self.is_custom:
                raise UsageError(f"{name}= does not work with a collate_fn; leave out one of the two")

    def of_tick(
        self, chunk: Chunk, chunk_tick: int, first_batch: int, is_filler: npt.NDArray[np.bool_] | None = None
    ) -> Iterator[CountedBatch]:
        """Yield the batches of a tick of a chunk, from ``first_batch`` on.

        ``is_filler``: bool[samples of the tick]: samples that repeat another one, and get no labels.
        """
        is_full = chunk.ids.width > 0 and chunk.shortest[chunk_tick] == chunk.ids.width  # no padding
        for first in range(first_batch * self.batch_size, chunk.num_samples, self.batch_size):
            end = first + self.batch_size
            ids = chunk.ids.of(chunk_tick, first, end)
            lengths = None if is_full else chunk.lengths[first:end, chunk_tick]
            if chunk.ids.width or lengths is None:
                made = self.padder.of_rows(ids, lengths)
            else:
                made = self.padder.of_documents(ids, lengths)
            if self.boundaries:
                edges = chunk.edges_of(chunk_tick, first, end, made["input_ids"].shape[1])
                self._add_boundaries(made, edges, lengths)
            if self.shifts_targets:
                self._shift(made)
            if self.origins and chunk.documents is not None:
                width = made["labels"].shape[1]
                made["origins"] = _origins(chunk.documents, chunk_tick, first, end, width)
            batch: object = made
            if self.is_custom:
                batch = self._collated(made, lengths)
            if is_filler is not None and is_filler[first:end].any():
                ignore_fillers(batch, is_filler[first:end])
            elif self.may_lack_labels or (lengths is not None and int(lengths.max()) < 2):
                self._warn_of_no_labels(batch)
            yield CountedBatch(batch, *_num_tokens_and_padding(batch, ids, lengths))

    def _shift(self, fields: Batch) -> None:
        """Make the label of each place the token behind it. The last place is cut off."""
        for name in ("input_ids", "attention_mask"):
            fields[name] = fields[name][:, :-1].contiguous()
        fields["labels"] = fields["labels"][:, 1:].contiguous()
        if self.padder.has_blanks:  # the last place was perhaps the only one that is not blank
            keep_an_attended_place(fields["attention_mask"])

    def _add_boundaries(self, fields: Batch, edges: Edges, lengths: Lengths | None) -> None:
        """Add the fields of ``boundaries``, and remove the label of each document's first token."""
        num_rows, width = fields["input_ids"].shape
        fields["labels"].numpy().reshape(-1)[edges.begins] = IGNORED
        if self.shifts_targets:
            # The last place of each row is cut off: a whole document of one token, or the end of one.
            row, within = np.divmod(edges.begins, width)
            is_kept = within < width - 1
            is_last = within + edges.sizes == width
            width -= 1
            edges = Edges((row * width + within)[is_kept], (edges.sizes - is_last)[is_kept])
            lengths = None if lengths is None else np.minimum(lengths, width)
        at = BatchEdges(edges.begins, edges.sizes, (num_rows, width), lengths)
        for make, names in self._makers.items():
            value: Any = make(at)  # a tensor, or a number with its methods
            for name in names:
                fields[name] = value
        if "transformers" in self.boundaries:
            del fields["attention_mask"]  # with one, transformers would ignore the boundaries

    def _collated(self, batch: Batch, lengths: Lengths | None) -> object:
        """Return ``collate_fn``'s batch. Samples have ``labels`` only if masks or blanks may remove some."""
        ids = batch["input_ids"].numpy()
        labels = batch["labels"].numpy()
        sizes = [ids.shape[1]] * len(ids) if lengths is None else lengths.tolist()
        samples = [{"input_ids": row[:size].tolist()} for row, size in zip(ids, sizes, strict=True)]
        if self.may_lack_labels:
            for sample, row, size in zip(samples, labels, sizes, strict=True):
                sample["labels"] = row[:size].tolist()
        assert self.collate_fn is not None
        return self.collate_fn(samples)

    def _warn_of_no_labels(self, batch: object) -> None:
        """Log a warning, once per loader, for a batch without any label."""
        labels = _tensor_of(batch, "labels")
        if labels is None or labels.ndim != 2:
            return
        # A model that shifts labels does not predict the first token of a row.
        predicted = labels if self.shifts_targets else labels[:, 1:]
        if predicted.eq(IGNORED).all() and not self._has_warned:
            self._has_warned = True
            problem = "a batch has no labels: its documents are blank, of one token, or without an assistant"
            logger.warning(f"{problem}. A mean over its labels is NaN: divide a sum by at least 1")


def _origins(documents: Ragged, chunk_tick: int, first: int, end: int, width: int) -> torch.Tensor:
    """Return where the documents of some samples of a tick come from, int64[documents, 6].

    With shifted targets the last place is cut off, and with it a document that begins there.
    """
    origins = documents.of(chunk_tick, first, end).astype(np.int64)
    origins[:, 0] = np.repeat(np.arange(end - first), documents.counts[first:end, chunk_tick])
    return torch.from_numpy(origins[origins[:, 1] < width])


def _num_tokens_and_padding(batch: object, ids: Integers, lengths: Lengths | None) -> tuple[int, int]:
    """Count the tokens of the samples of a batch, and the places in padding."""
    if lengths is None:
        return ids.size, 0
    num_tokens = int(lengths.sum())
    input_ids = _tensor_of(batch, "input_ids")
    if input_ids is None:
        return num_tokens, 0
    return num_tokens, max(input_ids.numel() - num_tokens, 0)


def ignore_fillers(batch: object, is_filler: npt.NDArray[np.bool_]) -> None:
    """Set the labels of rows that repeat a sample to -100, so that they do not count."""
    labels = _tensor_of(batch, "labels")
    if labels is None or len(labels) != len(is_filler):
        found = "the last batch of a validation set, which is filled with samples whose labels must be -100"
        expected = 'a tensor "labels" with a row per sample, or a global_batch_size that divides their number'
        raise UsageError(found=found, expected=expected)
    labels[torch.from_numpy(is_filler)] = IGNORED


def _tensor_of(batch: object, name: str) -> torch.Tensor | None:
    """Return a tensor of a batch, or None: the batch of a collate_fn may be of any type."""
    found = batch.get(name) if hasattr(batch, "get") else None
    return found if isinstance(found, torch.Tensor) else None
