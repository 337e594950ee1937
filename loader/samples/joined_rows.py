"""Packing at load: all documents are joined to one stream of tokens, which is cut into full rows.

Row x is tokens ``[(offset + x S) mod T, + S)`` of the stream, found through the sums of the idx. Nothing is
laid out beforehand, and any row can be read. An epoch leaves out T mod S tokens, others each epoch; documents
are cut at the edges of rows. An EOS is put behind documents that lack it, and counts: in our shards all or
none, as they were prepared; in external tars each document whose last id is not EOS.

A worker decodes a whole window at once, each document once (twice at the edge of a block). So its memory is
the bytes of the window and 4 bytes per token of it, and the first row of a window waits for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk, ScatteredRows
from loader.reading.open_shard import OpenShard
from loader.reading.shard_reader import ReaderContext, ShardReader
from loader.samples.token_ids import CannotDecode, check_vocab, decode_samples, places_of
from loader.shards.shard_set import DatasetShards, ExternalTar, ShardSet
from shardprep.errors import BrokenShard, UsageError

_NONE = -1  # no EOS is put


@dataclass(frozen=True)
class JoinedRows:
    """Rows of ``seq_len`` tokens over the documents of some shards."""

    shards: ShardSet
    seq_len: int
    eos_token_id: int | None
    starts: bool = False
    vocab_size: int | None = None
    keeps_tail: bool = False  # the tokens that fill no row are a row that is not full
    context: ReaderContext = ReaderContext()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.eos_token_id is None and any(self.lacks_eos(source).any() for source in self.shards.sources):
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
        if self.shards.split is not None:
            return self._first_token_of_split()
        sizes = []
        for source in self.shards.sources:
            lacks = self.lacks_eos(source)
            num_eos = lacks.sum() if isinstance(source, ExternalTar) else source.num_samples * lacks
            sizes.append(source.num_tokens + num_eos)
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def _first_token_of_split(self) -> npt.NDArray[np.int64]:
        """The same of one side of a split, of which only the idx tells the tokens: 0.1 ms per shard."""
        reader, shards = ShardReader(self.shards, self.context), self.shards
        sizes = np.zeros(shards.num_shards, np.int64)
        for number in reader.opening_order(np.arange(shards.num_shards)).tolist():
            sizes[number] = reader.num_tokens_of(number).sum() + self.num_ends(number)
        reader.close()
        return np.concatenate([[0], np.cumsum(sizes)])

    def num_ends(self, number: int) -> int:
        """EOS that are put behind documents of a shard."""
        return int(self.puts_eos(number).sum())

    def puts_eos(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether an EOS is put behind each document of a shard: bool[documents]."""
        first, end = self.shards.first_sample[number : number + 2].tolist()
        source, _ = self.shards.locate(number)
        lacks = self.lacks_eos(source)
        if len(lacks) == 1:
            return np.repeat(lacks, end - first)
        return lacks[self.shards.rows_of(number, np.arange(first, end))]

    @property
    def row_tokens(self) -> int:
        return self.seq_len

    @property
    def num_samples(self) -> int:
        return -(-self.offsets // self.seq_len) if self.keeps_tail else self.offsets // self.seq_len

    @property
    def mean_tokens(self) -> float:
        return float(self.seq_len)

    @property
    def offsets(self) -> int:
        """T: tokens of the stream; an epoch's rows begin at any of them."""
        return int(self.first_token[-1])

    def lacks_eos(self, source: DatasetShards | ExternalTar) -> npt.NDArray[np.bool_]:
        """Whether documents end without EOS: bool[documents] of an external tar, else bool[1] for all."""
        if isinstance(source, DatasetShards):
            return np.array([not source.spec.append_eos])
        if self.eos_token_id is None:
            return np.ones(len(source.samples.last_id), np.bool_)
        return np.not_equal(source.samples.last_id, self.eos_token_id)

    def open(self) -> RowReader:
        return RowReader(self)

    def stream_place(self, reader: ShardReader, document: int) -> tuple[int, int]:
        """The tokens of the stream that a document is, without an EOS that is put behind it: [begin, end)."""
        number = int(self.shards.shard_of(np.array(document)))
        local = document - int(self.shards.first_sample[number])
        begin = int(self.first_token[number]) + int(self._ends_of(reader, number)[local])
        return begin, begin + int(reader.num_tokens_of(number)[local])

    def documents_of(self, reader: ShardReader, row: int, offset: int) -> list[tuple[int, int, int]]:
        """The documents of a row, for an epoch's offset: (document, first token of it, number of tokens)."""
        begin, left = (offset + row * self.seq_len) % self.offsets, self.seq_len
        found: list[tuple[int, int, int]] = []
        while left > 0:
            number = int(np.searchsorted(self.first_token, begin, side="right")) - 1
            ends = self._ends_of(reader, number)
            local = begin - int(self.first_token[number])
            document = int(np.searchsorted(ends, local, side="right")) - 1
            taken = min(left, int(ends[document + 1]) - local)
            held = int(reader.num_tokens_of(number)[document])
            first = local - int(ends[document])
            if first < held:
                sample = int(self.shards.first_sample[number]) + document
                found.append((sample, first, min(taken, held - first)))
            begin, left = (begin + taken) % self.offsets, left - taken
        return found

    def _ends_of(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]."""
        sums = reader.opened(number).sums
        if "stream" not in sums:
            counts = reader.num_tokens_of(number)
            sums["stream"] = np.concatenate([[0], np.cumsum(counts + self.puts_eos(number))])
        return sums["stream"]


class RowReader:
    """A WindowReader of JoinedRows."""

    def __init__(self, rows: JoinedRows) -> None:
        self._rows = rows
        self._reader = ShardReader(rows.shards, rows.context)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(samples.shape, self._rows.seq_len, np.int64)

    def close(self) -> None:
        self._reader.close()

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> RowWindow:
        seq_len = self._rows.seq_len
        rows, inverse = np.unique(samples, return_inverse=True)
        at = np.empty(len(rows), np.int64)  # where each row begins in the decoded documents
        documents: list[npt.NDArray[np.int64]] = []
        end_ids: list[npt.NDArray[np.int64]] = []
        decoded = 0
        cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
        for first, end in self._in_opening_order(rows, offset, list(pairwise([0, *cuts, len(rows)]))):
            begin = offset + int(rows[first]) * seq_len
            skipped, held = self._join(begin, (end - first) * seq_len, documents, end_ids)
            at[first:end] = decoded + skipped + np.arange(end - first) * seq_len
            decoded += held
        ids, starts = self._decoded(np.concatenate(documents), np.concatenate(end_ids), decoded)
        at = at[inverse.reshape(samples.shape)]
        last = self._rows.offsets - (self._rows.num_samples - 1) * seq_len  # tokens of the last row
        return RowWindow(
            ids=ids,
            at=at,
            lengths=np.where(samples == self._rows.num_samples - 1, min(last, seq_len), seq_len).astype(
                np.int32
            ),
            seq_len=seq_len,
            starts=starts if self._rows.starts else None,
        )

    def _in_opening_order(
        self, rows: npt.NDArray[np.int64], offset: int, parts: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Parts of the rows, those first that begin in shards which this process opens first."""
        begins = (offset + rows[[first for first, _ in parts]] * self._rows.seq_len) % self._rows.offsets
        shards = np.searchsorted(self._rows.first_token, begins, side="right") - 1
        order = self._reader.opening_order(np.unique(shards)).tolist()
        place = {shard: number for number, shard in enumerate(order)}
        keys = [place[shard] for shard in shards.tolist()]
        return [parts[number] for number in np.argsort(keys, kind="stable").tolist()]

    def _join(
        self,
        begin: int,
        size: int,
        documents: list[npt.NDArray[np.int64]],
        end_ids: list[npt.NDArray[np.int64]],
    ) -> tuple[int, int]:
        """Append the documents of a part of the stream; tokens skipped of the first, and tokens of all."""
        edges, skipped, held = self._rows.first_token, -1, 0
        while size > 0:
            begin %= self._rows.offsets
            number = int(np.searchsorted(edges, begin, side="right")) - 1
            taken = min(size, int(edges[number + 1]) - begin)
            local = begin - int(edges[number])
            ends, puts = self._ends(number)
            first = int(np.searchsorted(ends, local, side="right")) - 1
            last = int(np.searchsorted(ends, local + taken, side="left"))
            documents.append(np.arange(first, last) + self._rows.shards.first_sample[number])
            end_ids.append(puts[first:last])
            skipped = local - int(ends[first]) if skipped < 0 else skipped
            held += int(ends[last] - ends[first])
            begin, size = begin + taken, size - taken
        return skipped, held

    def _ends(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]; and the ids to put, or -1."""
        shard: OpenShard = self._reader.opened(number)
        if "joined" not in shard.sums:
            counts, lacks = self._reader.num_tokens_of(number), self._rows.puts_eos(number)
            ends = np.concatenate([[0], np.cumsum(counts + lacks)])
            expected = int(self._rows.first_token[number + 1] - self._rows.first_token[number])
            if int(ends[-1]) != expected:
                raise BrokenShard(
                    f"{shard.path}: its idx counts {int(ends[-1])} tokens, its manifest {expected}; "
                    f"{shard.remedy}"
                )
            shard.sums["joined"] = ends
            shard.sums["end_ids"] = np.where(lacks, int(self._rows.eos_token_id or 0), _NONE)
        return shard.sums["joined"], shard.sums["end_ids"]

    def _decoded(
        self, documents: npt.NDArray[np.int64], end_ids: npt.NDArray[np.int64], expected: int
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
    at: npt.NDArray[np.int64]  # int64[samples per step, steps]: where each row begins in ids
    lengths: npt.NDArray[np.int32]  # int32[samples per step, steps]: tokens of each
    seq_len: int
    starts: npt.NDArray[np.int64] | None  # where documents begin in ids, ascending

    def chunk(self, first: int, end: int) -> Chunk:
        at = self.at[:, first:end]
        flat = at.reshape(-1)
        ids = ScatteredRows(flat=self.ids, at=at, row_tokens=self.seq_len)
        lengths = self.lengths[:, first:end]
        if self.starts is None:
            return Chunk(lengths=lengths, ids=ids, row_tokens=self.seq_len)
        low = np.searchsorted(self.starts, flat)
        high = np.searchsorted(self.starts, flat + self.seq_len)
        num_starts = high - low
        starts = self.starts[places_of(low, num_starts)] - np.repeat(flat, num_starts)
        return Chunk(
            lengths=lengths,
            ids=ids,
            row_tokens=self.seq_len,
            num_starts=num_starts.astype(np.int32).reshape(at.shape),
            starts=starts.astype(np.int32),
        )
