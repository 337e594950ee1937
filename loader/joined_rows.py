"""Packing at load: all documents joined to one stream of tokens, and cut into full rows.

Row x is tokens ``[(offset + x S) mod T, + S)`` of the stream, found through the sums of the idx, so
nothing is laid out beforehand and any row can be read. An epoch leaves out T mod S tokens, others each
epoch; documents are cut at row edges. An EOS is put behind documents whose shards have none, and counts.

A worker decodes a whole window at once, each document once (twice at a block's edge), so its memory is
the window's bytes and 4 bytes a token of it, and the first row of a window waits for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from loader.open_shard import OpenShard
from loader.run import Run
from loader.shard_reader import STALL_WARNING_S, ShardReader
from loader.shard_set import DatasetShards, ForeignTar, ShardSet
from loader.token_ids import CannotDecode, check_vocab, decode_samples
from preprocess.shard_format import BrokenShard, UsageError

_NONE = -1  # no EOS is put


@dataclass(frozen=True)
class JoinedRows:
    """Rows of ``seq_len`` tokens over the documents of some shards."""

    shards: ShardSet
    seq_len: int
    eos_token_id: int | None
    starts: bool = False
    vocab_size: int | None = None
    stall_warning_s: float = STALL_WARNING_S

    def __post_init__(self) -> None:
        puts_eos = any(_lacks_eos(source) for source in self.shards.sources)
        if puts_eos and self.eos_token_id is None:
            raise UsageError(
                "the shards have no EOS behind documents, and the tokenizer has none to put; prepare them "
                "with --append_eos, or set the tokenizer's eos_token"
            )
        if self.num_samples == 0:
            raise UsageError(
                f"{self.offsets:,} tokens make no row of seq_len={self.seq_len}; lower it, or add data"
            )

    @cached_property
    def first_token(self) -> npt.NDArray[np.int64]:
        """int64[shards + 1]: where each shard begins in the stream."""
        sizes = [
            source.num_tokens + source.num_samples * _lacks_eos(source) for source in self.shards.sources
        ]
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    @property
    def row_tokens(self) -> int:
        return self.seq_len

    @property
    def num_samples(self) -> int:
        return self.offsets // self.seq_len

    @property
    def mean_tokens(self) -> float:
        return float(self.seq_len)

    @property
    def offsets(self) -> int:
        """T: tokens of the stream; an epoch's rows begin at any of them."""
        return int(self.first_token[-1])

    def open(self) -> RowReader:
        return RowReader(self)


def _lacks_eos(source: DatasetShards | ForeignTar) -> bool:
    """Whether documents end without EOS; tars of others are taken to, as the tokenizers leave them."""
    return not (isinstance(source, DatasetShards) and source.spec.append_eos)


class RowReader:
    """A WindowReader of JoinedRows."""

    def __init__(self, rows: JoinedRows) -> None:
        self._rows = rows
        self._reader = ShardReader(rows.shards, stall_warning_s=rows.stall_warning_s)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(samples.shape, self._rows.seq_len, np.int64)

    def close(self) -> None:
        self._reader.close()

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> RowWindow:
        seq_len = self._rows.seq_len
        rows, inverse = np.unique(samples, return_inverse=True)
        at = np.empty(len(rows), np.int64)  # where each row begins in the decoded documents
        documents: list[npt.NDArray[np.int64]] = []
        end_ids: list[int] = []
        decoded = 0
        cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
        for first, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            begin = offset + int(rows[first]) * seq_len
            skipped, held = self._join(begin, (end - first) * seq_len, documents, end_ids)
            at[first:end] = decoded + skipped + np.arange(end - first) * seq_len
            decoded += held
        ids, starts = self._decoded(np.concatenate(documents), end_ids, decoded)
        at = at[inverse.reshape(samples.shape)]
        return RowWindow(ids=ids, at=at, seq_len=seq_len, starts=starts if self._rows.starts else None)

    def _join(
        self, begin: int, size: int, documents: list[npt.NDArray[np.int64]], end_ids: list[int]
    ) -> tuple[int, int]:
        """Append the documents of a part of the stream; tokens skipped of the first, and tokens of all."""
        edges, skipped, held = self._rows.first_token, -1, 0
        while size > 0:
            begin %= self._rows.offsets
            number = int(np.searchsorted(edges, begin, side="right")) - 1
            taken = min(size, int(edges[number + 1]) - begin)
            local = begin - int(edges[number])
            ends, end_id = self._ends(number)
            first = int(np.searchsorted(ends, local, side="right")) - 1
            last = int(np.searchsorted(ends, local + taken, side="left"))
            documents.append(np.arange(first, last) + self._rows.shards.first_sample[number])
            end_ids += [end_id] * (last - first)
            skipped = local - int(ends[first]) if skipped < 0 else skipped
            held += int(ends[last] - ends[first])
            begin, size = begin + taken, size - taken
        return skipped, held

    def _ends(self, number: int) -> tuple[npt.NDArray[np.int64], int]:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]; and the EOS to put."""
        shard: OpenShard = self._reader.opened(number)
        source, _ = self._rows.shards.locate(number)
        puts = _lacks_eos(source)
        if "joined" not in shard.sums:
            ends = np.concatenate([[0], np.cumsum(shard.num_tokens + puts)])
            expected = int(self._rows.first_token[number + 1] - self._rows.first_token[number])
            if int(ends[-1]) != expected:
                raise BrokenShard(
                    f"{shard.path}: its idx counts {int(ends[-1])} tokens, its manifest {expected}; "
                    f"{shard.remedy}"
                )
            shard.sums["joined"] = ends
        return shard.sums["joined"], int(self._rows.eos_token_id or 0) if puts else _NONE

    def _decoded(
        self, documents: npt.NDArray[np.int64], end_ids: list[int], expected: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of documents one after another, and where each begins."""
        data = self._reader.read(documents)
        every = np.arange(len(documents))
        try:
            found = decode_samples(data, every, end_ids=end_ids)
            if self._rows.vocab_size is not None:
                check_vocab(found.ids, found.lengths, every, self._rows.vocab_size)
        except CannotDecode as error:
            where = self._rows.shards.describe(int(documents[error.row]))
            raise BrokenShard(f"{where} holds {error}") from None
        if len(found.ids) != expected:
            where = self._rows.shards.describe(int(documents[0]))
            raise BrokenShard(f"{where} and on: {len(found.ids)} tokens, expected {expected}")
        starts = np.cumsum(found.lengths, dtype=np.int64) - found.lengths
        return found.ids, starts[found.lengths > 0]


@dataclass(frozen=True, kw_only=True)
class RowWindow:
    """A Window of rows cut from decoded documents."""

    ids: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]  # int64[samples a step, steps]: where each row begins in ids
    seq_len: int
    starts: npt.NDArray[np.int64] | None  # where documents begin in ids, ascending

    def run(self, first: int, end: int) -> Run:
        at = self.at[:, first:end]
        flat = at.reshape(-1)
        ids = sliding_window_view(self.ids, self.seq_len)[flat].reshape(*at.shape, self.seq_len)
        lengths = np.full(at.shape, self.seq_len, np.int32)
        if self.starts is None:
            return Run(lengths=lengths, ids=ids)
        low = np.searchsorted(self.starts, flat)
        high = np.searchsorted(self.starts, flat + self.seq_len)
        parts = [
            (self.starts[a:b] - begin).astype(np.int32)
            for a, b, begin in zip(low.tolist(), high.tolist(), flat.tolist(), strict=True)
        ]
        num_starts = (high - low).astype(np.int32).reshape(at.shape)
        return Run(lengths=lengths, ids=ids, num_starts=num_starts, starts=np.concatenate(parts))
