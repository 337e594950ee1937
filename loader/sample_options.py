"""What makes a sample of the shards: options, their checks, and the Samples that follow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from loader.boundaries import check_boundaries
from loader.dataset import Samples
from loader.reading.opening_order import Turn
from loader.reading.shard_reader import STALL_WARNING_S
from loader.samples.document_pieces import DocumentPieces
from loader.samples.joined_rows import JoinedRows
from loader.samples.whole_samples import LongDocuments, WholeSamples
from loader.shards.find_shards import find_shards
from loader.shards.input_paths import InputShards
from loader.shards.shard_set import ShardSet
from preprocess.shard_format import UsageError

Padding = Literal["longest", "max_length"]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """See ``get_llama3_dataloader``, whose arguments these are."""

    input_shards: InputShards
    exclude_shards: Iterable[int | str | os.PathLike[str]] = ()
    cache_dir: str | os.PathLike[str] | None = None
    seq_len: int | None = None
    boundaries: tuple[str, ...] = ()
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    padding: Padding = "longest"
    group: int = 1
    stall_warning_s: float = STALL_WARNING_S
    turn: Turn = field(default_factory=Turn)
    staged_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_boundaries(self.boundaries)
        for name in ("seq_len", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        for name, kind in (("long_documents", LongDocuments), ("padding", Padding)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(get_args(kind))}")
        if self.max_length is None and (self.padding == "max_length" or self.long_documents != "truncate"):
            raise UsageError(
                f"padding={self.padding!r} with long_documents={self.long_documents!r} needs max_length"
            )
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out"
            )

    def find_shards(self) -> ShardSet:
        """The shards that are named and not excluded, with the lengths of documents where they are needed."""
        needs_lengths = self.seq_len is not None or self.group > 1 or self.long_documents == "split"
        return find_shards(
            self.input_shards,
            exclude_shards=self.exclude_shards,
            cache_dir=self.cache_dir,
            count_tokens=needs_lengths,
            staged_dir=self.staged_dir,
        )


def make_samples(options: SampleOptions, shards: ShardSet, tokenizer: Any) -> Samples:
    """The samples of some shards. Raises UsageError where the options do not fit what they hold."""
    made_by_others = len(shards.datasets) < len(shards.sources)
    shared: dict[str, Any] = {
        "shards": shards,
        "starts": bool(options.boundaries),
        "vocab_size": max(tokenizer.get_vocab().values()) + 1 if made_by_others else None,
        "stall_warning_s": options.stall_warning_s,
        "turn": options.turn,
    }
    _check_rows(options, shards)
    if options.seq_len is not None and not shards.row_tokens:
        return JoinedRows(seq_len=options.seq_len, eos_token_id=tokenizer.eos_token_id, **shared)
    splits = options.long_documents == "split" and options.max_length is not None
    return WholeSamples(
        max_length=options.max_length,
        pieces=DocumentPieces(shards, int(options.max_length or 0), options.turn) if splits else None,
        refuse_longer=options.long_documents == "error",
        **shared,
    )


def _check_rows(options: SampleOptions, shards: ShardSet) -> None:
    if not shards.has_rows:
        return
    rows = f"packed rows of {shards.row_tokens} tokens" if shards.row_tokens else "some packed rows"
    if options.max_length is not None or options.group > 1:
        raise UsageError(
            f"max_length={options.max_length} and group_by_length are for documents; these are {rows}: "
            "prepare them with another --seq_len"
        )
    if options.seq_len is not None and options.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={options.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len"
        )
    if options.boundaries and not shards.row_tokens:
        raise UsageError("boundaries are for rows of one length; load documents and packed rows apart")
