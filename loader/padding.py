"""Token ids -> the tensors of a batch: which id pads, how wide a batch is, its labels and its mask.

No transformers here: importing that takes half as long as torch. ``collator.py`` has its collator.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.chunks import ID_BITS
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)

IGNORED = -100  # what cross_entropy leaves out
PAD_TOKEN = "<|finetune_right_pad_id|>"  # Llama 3.1 and later keep it for this
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>")

_PAD_IS_EOS = (
    ". It is EOS: labels of a real EOS are kept here, but a loss or another collator that leaves padding out "
    "by its id would never teach the model to end; give the tokenizer a pad token of its own"
)

Ids = npt.NDArray[np.signedinteger[Any]]


class Batch(dict[str, Any]):
    """The tensors of a batch by name: a dict that is used like transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        """``batch.labels`` is ``batch["labels"]``."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has {', '.join(self)}, but no {name}") from None

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Move all tensors to a device; the batch itself, as BatchEncoding's ``to`` returns."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device=device, non_blocking=non_blocking)
        return self


@dataclass(frozen=True, kw_only=True)
class PadToken:
    """The id that fills a batch to the right, and why it is this one."""

    token: str
    token_id: int
    reason: str


def choose_pad_token(tokenizer: Any) -> PadToken:
    """A token that the tokenizer has already; none is ever added.

    Its own pad token, else Llama's, else the first reserved one, else EOS: labels are masked by the
    attention mask, never by id, so a real EOS keeps its label. ``tokenizer``: of transformers, or
    SpecialTokens. Raises UsageError where there is none.
    """
    if tokenizer.pad_token_id is not None:
        return PadToken(
            token=tokenizer.pad_token, token_id=tokenizer.pad_token_id, reason="the tokenizer's own pad token"
        )
    by_id = sorted((number, token) for token, number in tokenizer.get_added_vocab().items())
    for number, token in by_id:
        if token == PAD_TOKEN:
            return PadToken(token=token, token_id=number, reason="the tokenizer names none, and has this one")
    for number, token in by_id:
        if _RESERVED.fullmatch(token):
            return PadToken(token=token, token_id=number, reason="the first reserved token; no text has it")
    if tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")
    return PadToken(
        token=tokenizer.eos_token,
        token_id=tokenizer.eos_token_id,
        reason="EOS, for want of another; the attention mask tells it from a real one",
    )


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

    Labels are -100 where the attention mask is 0, and those of a real EOS are kept. Batches equal those of
    transformers' DataCollatorForLanguageModeling bit for bit where the pad token is no other token; where it
    is EOS, that one loses the label of every EOS. An (8, 2048) batch costs 0.02 ms, there 4.7.
    """

    pad: PadToken
    pad_to_multiple_of: int | None = None
    pad_to_length: int | None = None  # one width for all batches, instead of the longest sample's
    max_batch_tokens: int | None = None  # of a padded batch; a larger one is refused, not left to CUDA
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

    def pad_joined(self, joined: Ids, lengths: npt.NDArray[Any]) -> Batch:
        """Samples whose ids stand one after another, padded to the longest, or as the fields say."""
        multiple = self.pad_to_multiple_of or 1
        widest = max(int(lengths.max()), self.pad_to_length or 0) - self.num_beyond
        width = max(-(-widest // multiple) * multiple, 1) + self.num_beyond
        num_rows = len(lengths)
        if self.max_batch_tokens is not None and num_rows * width > self.max_batch_tokens:
            raise UsageError(
                f"a batch of {num_rows} documents padded to {width:,} tokens has {num_rows * width:,}, "
                f"max_batch_tokens is {self.max_batch_tokens:,}; lower batch_size, or pass "
                f"max_length={self.max_batch_tokens // num_rows} or less"
            )
        is_real = np.arange(width) < lengths[:, None]
        ids = np.full(is_real.shape, self.pad.token_id, np.int64)
        ids[is_real] = joined
        return _batch_of(ids, is_real.astype(np.int64), np.where(is_real, ids, IGNORED))

    def mask_rows(self, rows: Ids, lengths: npt.NDArray[Any] | None, *, has_masks: bool = False) -> Batch:
        """Collate [batch, seq] rows, of which the first ``lengths`` ids are real (None: all).

        ``has_masks``: ids may carry NO_LABEL, and have no label then.

        Ids and labels are both widened from ``rows``: a copy of one to the other takes up to three times
        as long, where malloc puts their addresses a few bytes more than whole pages apart.
        """
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
        return _batch_of(ids, attention_mask, labels)


def _batch_of(ids: Ids, attention_mask: Ids, labels: Ids) -> Batch:
    return Batch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention_mask),
        labels=torch.from_numpy(labels),
    )


def check_padding(
    padding: str, batch_size: int, max_length: int | None, max_batch_tokens: int | None, long_documents: str
) -> None:
    """Raises UsageError where a width is needed and not given, or batches could be too large."""
    if padding not in ("longest", "max_length"):
        raise UsageError(f"padding is {padding!r}, expected longest or max_length")
    if max_length is None and (padding == "max_length" or long_documents != "truncate"):
        raise UsageError(f"padding={padding!r} with long_documents={long_documents!r} needs max_length")
    if max_batch_tokens is not None and batch_size * (max_length or 1) > max_batch_tokens:
        raise UsageError(
            f"batch_size {batch_size} x max_length {max_length} can make {batch_size * (max_length or 1):,} "
            f"tokens, max_batch_tokens is {max_batch_tokens:,}; lower one of them"
        )
