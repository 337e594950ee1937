"""What a sample of some shards is: the rules that a user gives, checked, and the Samples that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from loader.dataset import Samples
from loader.reading.shard_reader import ReaderContext
from loader.samples.joined_rows import JoinedRows
from loader.samples.token_batches import TokenBatches
from loader.samples.whole_samples import DocumentPieces, LongDocuments, WholeSamples
from loader.shards.shard_set import ShardSet
from shardprep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """What one sample is; the names are arguments of ``get_llama3_dataloader``. Raises UsageError."""

    seq_len: int | None = None
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    group: int = 1  # samples of like length side by side
    batch_tokens: int | None = None  # places of a batch of as many documents as fit
    batch_multiple: int = 1  # of the width of such a batch
    num_beyond: int = 0  # tokens of a document that are no place of a batch

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_length", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        if self.long_documents not in get_args(LongDocuments):
            raise UsageError(
                f"long_documents is {self.long_documents!r}, expected {' or '.join(get_args(LongDocuments))}"
            )
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out"
            )
        if self.batch_tokens is not None and (self.seq_len is not None or self.group > 1):
            raise UsageError(
                f"batch_tokens={self.batch_tokens} makes batches of whole documents of like length; seq_len, "
                "which packs them, and group_by_length have no meaning beside it: leave them out"
            )

    @property
    def settings(self) -> dict[str, int]:
        """What fixes which documents make a batch, as a state has it."""
        if self.batch_tokens is None:
            return {}
        return {
            "batch_tokens": self.batch_tokens,
            "pad_to_multiple_of": self.batch_multiple,
            "num_beyond": self.num_beyond,
        }

    @property
    def needs_lengths(self) -> bool:
        """Whether the lengths of all documents must be known before the first batch."""
        is_whole = self.seq_len is None and self.group == 1 and self.batch_tokens is None
        return not is_whole or self.long_documents == "split"


def make_samples(
    shards: ShardSet,
    rules: SampleRules,
    *,
    eos_token_id: int | None,
    vocab_size: int | None = None,
    starts: bool = False,
    keeps_tail: bool = False,
    context: ReaderContext = ReaderContext(),  # noqa: B008  frozen
) -> Samples:
    """The samples of some shards.

    ``vocab_size``: ids are checked against it where it is given. ``starts``: whether to say where documents
    begin in packed rows. ``keeps_tail``: rows packed at load end with one that is not full. Raises UsageError
    where the rules do not fit what the shards hold.
    """
    _check_rows(rules, shards, starts)
    shared: dict[str, Any] = {
        "shards": shards, "starts": starts, "vocab_size": vocab_size, "context": context
    }  # fmt: skip
    if rules.seq_len is not None and not shards.row_tokens:
        return JoinedRows(seq_len=rules.seq_len, eos_token_id=eos_token_id, keeps_tail=keeps_tail, **shared)
    splits = rules.long_documents == "split" and rules.max_length is not None
    documents = WholeSamples(
        max_length=rules.max_length,
        pieces=DocumentPieces(shards, int(rules.max_length or 0), context) if splits else None,
        refuse_longer=rules.long_documents == "error",
        **shared,
    )
    if rules.batch_tokens is None:
        return documents
    return TokenBatches(
        documents=documents,
        batch_tokens=rules.batch_tokens,
        multiple=rules.batch_multiple,
        num_beyond=rules.num_beyond,
    )


def _check_rows(rules: SampleRules, shards: ShardSet, starts: bool) -> None:
    if not shards.has_rows:
        return
    rows = f"packed rows of {shards.row_tokens} tokens" if shards.row_tokens else "some packed rows"
    if rules.batch_tokens is not None:
        raise UsageError(
            f"batch_tokens={rules.batch_tokens} is for documents; these are {rows}, each as long as the "
            "others: pass batch_size"
        )
    if rules.max_length is not None or rules.group > 1:
        raise UsageError(
            f"max_length={rules.max_length} and group_by_length are for documents; these are {rows}: "
            "prepare them with another --seq_len"
        )
    if rules.seq_len is not None and rules.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={rules.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len"
        )
    if starts and not shards.row_tokens:
        raise UsageError("boundaries are for rows of one length; load documents and packed rows apart")
