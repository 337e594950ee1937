"""What a sample is, and how its bytes become token ids.

A sample is a stored document, a packed row, or a row that is joined at load (``seq_len``). ``make_samples``
chooses by the user's rules; each kind numbers its samples, and reads the windows that a worker asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.chunks import ORIGIN, Chunk, Ragged
from loader.decode import (
    Decoded,
    check_vocab,
    decode_samples,
    decode_starts,
    places_of,
    rows_in_place,
    with_loss_masks,
)
from loader.order import Int32s, Int64s
from loader.reading import SampleBytes, ShardReader
from loader.shards import DatasetShards, ShardSet
from shardprep.errors import BrokenShard, UsageError
from shardprep.format.dataset_spec import BLANK

Window = Callable[[int, int], Chunk]  # decodes the steps from one up to another of the samples that were read


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a sample is. A process opens a reader once, and gives it with each question."""

    shards: ShardSet
    vocab_size: int | None = None  # checked where it is given: ids that others made
    rank: int = 0  # of the process, among those that read: it opens other shards first
    world_size: int = 1
    origins: bool = False  # whether chunks say where each document comes from

    @property
    def row_tokens(self) -> int:
        """Of every sample where all are rows, else 0."""
        return 0

    @property
    def offsets(self) -> int:
        """An epoch draws a number below this, and gives it to ``read``."""
        return 1

    @property
    def num_samples(self) -> int:
        raise NotImplementedError

    @property
    def mean_tokens(self) -> float:
        """Of a sample, roughly."""
        raise NotImplementedError

    def open(self) -> ShardReader:
        return ShardReader(self.shards, self.rank, self.world_size)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        """Lengths by the idx alone, int64[n]; of the samples int64[n]."""
        raise NotImplementedError

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        """Read samples, int64[samples per step, steps]; the window ends with the reader's next ``read``."""
        raise NotImplementedError

    def decode(
        self, data: SampleBytes, rows: Int64s, max_length: int | None = None, end_ids: Int64s | None = None
    ) -> Decoded:
        """Decode samples, with ids that others made checked; those of blanked documents are BLANK, and so
        is an EOS that is put behind one. Raises BrokenShard."""
        found = decode_samples(data, rows, max_length=max_length, end_ids=end_ids)
        if (blank := self.shards.blank_id) is not None:
            found.ids[found.ids == blank] = BLANK
            if end_ids is not None:
                ends = np.cumsum(found.lengths, dtype=np.int64) - 1
                ends = ends[(end_ids >= 0) & (found.lengths > 1)]
                found.ids[ends[found.ids[ends - 1] == BLANK]] = BLANK
        self._check_vocab(data, rows, found.ids, found.lengths)
        return found

    def _check_vocab(
        self, data: SampleBytes, rows: Int64s, ids: npt.NDArray[np.integer[Any]], lengths: Int32s
    ) -> None:
        if self.vocab_size is not None:
            if self.shards.blank_id is not None:
                ids = np.where(ids == BLANK, np.int32(0), ids)
            check_vocab(data, rows, ids, lengths, self.vocab_size)

    def _origins(self, samples: Int64s) -> Int32s:
        """int32[samples, ORIGIN] of the first document of each, at place 0; row and source come later."""
        shard = self.shards.shard_of(samples)
        found = np.zeros((len(samples), len(ORIGIN)), np.int32)
        found[:, 3], found[:, 4] = shard, self.shards.records_of(samples, shard)
        return found

    def _sums(self, count: Callable[[ShardReader, int], int]) -> Int64s:
        """What is counted before each shard: int64[shards + 1]. Opens each one: 0.1 ms, files cached."""
        reader = self.open()
        counts = np.zeros(self.shards.num_shards, np.int64)
        for number in reader.opening_order(np.arange(len(counts))).tolist():
            counts[number] = count(reader, number)
        reader.close()
        return np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True, kw_only=True)
class WholeSamples(Samples):
    """Documents or packed rows, one per sample. They are decoded when their chunk is asked for."""

    max_length: int | None = None
    starts: bool = False  # of documents in packed rows

    @cached_property
    def row_tokens(self) -> int:
        return self.shards.row_tokens

    @property
    def num_samples(self) -> int:
        return int(self.shards.first_sample[-1])

    @property
    def mean_tokens(self) -> float:
        mean = self.shards.mean_tokens
        return mean if self.max_length is None else min(mean, self.max_length)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        lengths = reader.num_tokens(samples)
        return lengths if self.max_length is None else lengths.clip(max=self.max_length)

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:  # noqa: ARG002
        rows = np.arange(samples.size).reshape(samples.shape)
        data = reader.read(samples.reshape(-1), starts=(self.starts or self.origins) and self.row_tokens > 0)
        return partial(self._rows_chunk if self.row_tokens else self._documents_chunk, data, rows)

    def _documents_chunk(self, data: SampleBytes, rows: Int64s, first: int, end: int) -> Chunk:
        steps = rows[:, first:end].T
        found = self.decode(data, steps.reshape(-1), self.max_length)
        lengths = found.lengths.reshape(steps.shape).T
        chunk = Chunk(lengths=lengths, ids=Ragged.of_joined(found.ids, lengths), num_cut=found.num_cut)
        if not self.origins:
            return chunk
        return chunk.with_origins(np.ones_like(lengths), self._origins(data.sample[steps.reshape(-1)]))

    def _rows_chunk(self, data: SampleBytes, rows: Int64s, first: int, end: int) -> Chunk:
        rows = rows[:, first:end]
        steps = rows.T.reshape(-1)
        ids = rows_in_place(data, rows, self.row_tokens)
        if self.shards.blank_id not in (None, BLANK):  # ids of two bytes have another number for it
            ids = ids.joined()
            ids.flats[0][ids.flats[0] == self.shards.blank_id] = BLANK
        if self.vocab_size is not None:
            full = np.full(rows.size, self.row_tokens, np.int32)
            self._check_vocab(data, steps, ids.joined().flats[0], full)
        ids = with_loss_masks(ids, data, rows, self.row_tokens)
        chunk = Chunk(lengths=data.num_tokens[rows].astype(np.int32), ids=ids, row_tokens=self.row_tokens)
        if not (self.starts or self.origins):
            return chunk
        starts = decode_starts(data, steps, self.row_tokens)
        if self.starts:
            chunk = replace(chunk, starts=Ragged.of_joined(starts, data.num_starts[rows]))
        if not self.origins:
            return chunk
        counts, places, numbers = _document_places(starts, data.num_starts[steps])
        origins = np.repeat(self._origins(data.sample[steps]), counts, axis=0)
        origins[:, 1], origins[:, 5] = places, numbers
        return chunk.with_origins(counts.reshape(rows.T.shape).T, origins)


def _document_places(starts: Int32s, num_starts: Int64s) -> tuple[Int64s, Int32s, Int64s]:
    """Documents of packed rows: how many each row has, where each begins, and its number in the row. One that
    goes on from another row is at 0."""
    first = np.cumsum(num_starts) - num_starts
    goes_on = np.ones(len(num_starts), np.bool_)
    has = num_starts > 0
    goes_on[has] = starts[first[has]] > 0
    counts = num_starts + goes_on
    return counts, np.insert(starts, first[goes_on], 0), places_of(np.zeros_like(counts), counts)


@dataclass(frozen=True, kw_only=True)
class JoinedRows(Samples):
    """Packing at load: all documents are joined to one stream of tokens, which is cut into full rows.

    Row x is tokens ``[(offset + x S) mod T, + S)`` of the stream, found through the sums of the idx. An EOS
    is put behind documents that lack it, and counts. The price: an epoch leaves out T mod S tokens, others
    each epoch, and a worker decodes a whole window at once: 4 bytes per token.
    """

    seq_len: int
    eos_token_id: int | None
    starts: bool = False
    keeps_tail: bool = False  # the tokens that fill no row are a row that is not full

    def __post_init__(self) -> None:
        if self.eos_token_id is None and any(self._lacks_eos(source).any() for source in self.shards.sources):
            raise UsageError(
                "the shards have no EOS behind documents, and the tokenizer has none to put; prepare them "
                "with --append_eos, or set the tokenizer's eos_token"
            )
        if self.num_samples == 0:
            raise UsageError(
                f"{self.offsets:,} tokens make no row of seq_len={self.seq_len}; lower it, or add data",
                found=f"seq_len={self.seq_len}",
                expected=f"{self.offsets:,} tokens",
            )

    @cached_property
    def first_token(self) -> Int64s:
        """int64[shards + 1]: where each shard begins in the stream."""
        if self.shards.split is not None:  # of one side of a split only the idx tells the tokens
            return self._sums(
                lambda reader, number: int(reader.num_tokens_of(number).sum() + self._puts_eos(number).sum())
            )
        sizes = []
        for source in self.shards.sources:
            lacks = self._lacks_eos(source)
            num_eos = source.num_samples * lacks if source.records is None else lacks.sum()
            sizes.append(source.num_tokens + num_eos)
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def _lacks_eos(self, source: DatasetShards) -> npt.NDArray[np.bool_]:
        """Whether documents end without EOS: bool[documents] of a scanned tar, else bool[1] for all."""
        if source.records is None:
            return np.array([not source.spec.append_eos])
        last_id = source.records["last_id"]
        if self.eos_token_id is None:
            return np.ones(len(last_id), np.bool_)
        return np.not_equal(last_id, self.eos_token_id)

    def _puts_eos(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether an EOS is put behind each document of a shard: bool[documents]."""
        first, end = self.shards.first_sample[number : number + 2].tolist()
        lacks = self._lacks_eos(self.shards.locate(number)[0])
        if len(lacks) == 1:
            return np.repeat(lacks, end - first)
        return lacks[self.shards.records_of(np.arange(first, end), number)]

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

    def num_tokens(self, _: ShardReader, samples: Int64s) -> Int64s:
        return np.full(samples.shape, self.seq_len, np.int64)

    def _stretches(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """A part of the stream shard by shard: the shard, and the first token and the end in it."""
        while size > 0:
            begin %= self.offsets
            number = int(np.searchsorted(self.first_token, begin, side="right")) - 1
            taken = min(size, int(self.first_token[number + 1]) - begin)
            local = begin - int(self.first_token[number])
            yield number, local, local + taken
            begin, size = begin + taken, size - taken

    def _ends(self, reader: ShardReader, number: int) -> Int64s:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]. Raises BrokenShard."""
        shard = reader.opened(number)
        if "stream" not in shard.sums:
            puts = self._puts_eos(number)
            ends = np.concatenate([[0], np.cumsum(reader.num_tokens_of(number) + puts)])
            expected = int(self.first_token[number + 1] - self.first_token[number])
            if int(ends[-1]) != expected:
                found = f"an idx that counts {int(ends[-1])} tokens"
                raise BrokenShard(path=shard.tar.path, found=found, expected=expected, remedy=shard.remedy)
            shard.sums["stream"] = ends
            shard.sums["end_ids"] = np.where(puts, int(self.eos_token_id or 0), -1)
        return shard.sums["stream"]

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        rows, inverse = np.unique(samples, return_inverse=True)
        begins = offset + rows * self.seq_len
        at = np.empty(len(rows), np.int64)  # where each row begins in the decoded documents
        documents: list[Int64s] = []
        end_ids: list[Int64s] = []
        decoded = 0
        for first, end in self._runs(reader, rows, begins):
            at[first:end] = begins[first:end] - begins[first] + decoded
            for place, (number, *part) in enumerate(
                self._stretches(int(begins[first]), (end - first) * self.seq_len)
            ):
                ends = self._ends(reader, number)
                of_part = slice(*_documents_in(ends, *part))
                documents.append(np.arange(of_part.start, of_part.stop) + self.shards.first_sample[number])
                end_ids.append(reader.opened(number).sums["end_ids"][of_part])
                if not place:
                    at[first:end] += part[0] - ends[of_part.start]
                decoded += int(ends[of_part.stop] - ends[of_part.start])
        asked = np.concatenate(documents)
        found = self.decode(reader.read(asked), np.arange(len(asked)), end_ids=np.concatenate(end_ids))
        if len(found.ids) != decoded:
            path, record = self.shards.path_and_record(int(asked[0]))
            raise BrokenShard(
                f"sample {record} of {path} and on: {len(found.ids)} tokens, expected {decoded}", path=path
            )
        starts = np.cumsum(found.lengths, dtype=np.int64) - found.lengths
        has_tokens = found.lengths > 0
        last = self.offsets - (self.num_samples - 1) * self.seq_len  # tokens of the last row
        lengths = np.where(samples == self.num_samples - 1, min(last, self.seq_len), self.seq_len)
        places = at[inverse.reshape(samples.shape)]
        return partial(
            self._chunk,
            found.ids,
            places,
            lengths.astype(np.int32),
            starts[has_tokens],
            asked[has_tokens],
        )

    def _runs(self, reader: ShardReader, rows: Int64s, begins: Int64s) -> list[tuple[int, int]]:
        """Consecutive rows, those first that begin in shards which this process opens first."""
        runs = list(pairwise([0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]))
        first_tokens = begins[[first for first, _ in runs]] % self.offsets
        shards = np.searchsorted(self.first_token, first_tokens, side="right") - 1
        order = reader.opening_order(np.unique(shards)).tolist()
        place = {shard: number for number, shard in enumerate(order)}
        return [run for _, run in sorted(zip(map(place.__getitem__, shards.tolist()), runs, strict=True))]

    def _chunk(
        self,
        ids: Int32s,
        places: Int64s,
        lengths: Int32s,
        starts: Int64s,
        documents: Int64s,
        first: int,
        end: int,
    ) -> Chunk:
        """Rows begin at ``places`` of the ids, int64[samples per step, steps], documents at ``starts``."""
        at = places[:, first:end]
        chunk = Chunk(
            lengths=lengths[:, first:end],
            ids=Ragged.of_rows(ids, at, self.seq_len),
            row_tokens=self.seq_len,
        )
        steps = at.T.reshape(-1)
        if self.starts:
            low = np.searchsorted(starts, steps)
            counts = np.searchsorted(starts, steps + self.seq_len) - low
            within = starts[places_of(low, counts)] - np.repeat(steps, counts)
            counts = counts.reshape(at.T.shape).T
            chunk = replace(chunk, starts=Ragged.of_joined(within.astype(np.int32), counts))
        if not self.origins:
            return chunk
        low = np.searchsorted(starts, steps, side="right") - 1
        counts = np.searchsorted(starts, steps + chunk.lengths.T.reshape(-1)) - low
        taken = places_of(low, counts)
        origins = self._origins(documents[taken])
        origins[:, 1] = (starts[taken] - np.repeat(steps, counts)).clip(0)
        return chunk.with_origins(counts.reshape(at.T.shape).T, origins)


def _documents_in(ends: Int64s, begin: int, end: int) -> tuple[int, int]:
    """The documents, by their ``ends`` from 0 on, that have tokens from one up to another: [first, last)."""
    first = int(np.searchsorted(ends, begin, side="right")) - 1
    return first, int(np.searchsorted(ends, end, side="left"))


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """What one sample is; the names are arguments of ``get_llama3_dataloader``. Raises UsageError."""

    seq_len: int | None = None
    max_length: int | None = None
    group: int = 1  # samples of like length side by side

    def __post_init__(self) -> None:
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out",
                found=f"seq_len={self.seq_len}",
            )

    @property
    def needs_lengths(self) -> bool:
        """Whether the lengths of all documents must be known before the first batch."""
        return self.seq_len is not None or self.group > 1


def make_samples(
    shards: ShardSet,
    rules: SampleRules,
    *,
    eos_token_id: int | None,
    vocab_size: int | None = None,
    starts: bool = False,
    keeps_tail: bool = False,
    origins: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Samples:
    """The samples of some shards.

    ``vocab_size``: ids are checked against it where it is given. ``starts``: whether to say where documents
    begin in packed rows. ``keeps_tail``: rows packed at load end with one that is not full. ``origins``:
    chunks say where documents come from. Raises UsageError where the rules do not fit what the shards hold.
    """
    _check_rows(rules, shards)
    shared: dict[str, Any] = {
        "shards": shards,
        "vocab_size": vocab_size,
        "rank": rank,
        "world_size": world_size,
        "origins": origins,
    }
    if rules.seq_len is not None and not shards.row_tokens:
        return JoinedRows(
            seq_len=rules.seq_len, eos_token_id=eos_token_id, starts=starts, keeps_tail=keeps_tail, **shared
        )
    return WholeSamples(max_length=rules.max_length, starts=starts, **shared)


def _check_rows(rules: SampleRules, shards: ShardSet) -> None:
    if not shards.has_rows:
        return
    if not shards.row_tokens:
        found = "packed rows beside documents, or beside rows of another length"
        raise UsageError(found=found, expected="documents alone, or rows of one length: load them apart")
    rows = f"packed rows of {shards.row_tokens} tokens"
    if rules.max_length is not None or rules.group > 1:
        given = "group_by_length" if rules.max_length is None else f"max_length={rules.max_length}"
        raise UsageError(
            f"{given} is for documents; these are {rows}: leave it out, or prepare them with another "
            "--seq_len",
            found=given,
            expected=rows,
            remedy="--seq_len",
        )
    if rules.seq_len is not None and rules.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={rules.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len",
            found=f"seq_len={rules.seq_len}",
            expected=rows,
            remedy="--seq_len",
        )
