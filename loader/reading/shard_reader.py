"""Reads the bytes of any set of samples: neighbours in one read, each byte once.

``ShardReader`` is one object per process. It reads from ``OpenShards``, which opens files, tries failed reads
again, and logs which shard a read hangs in. ``opening_order`` chooses with which shard a process begins. If
every rank and worker began with the lowest shard, the start of a job would be as slow as the one storage
target (OST) that holds it. Batches do not depend on this order.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from loader.reading.open_shard import STALL_WARNING_S, OpenShard, OpenShards, Part
from loader.shards.shard_set import ShardSet
from loader.staging.staged_copies import StagedCopies
from shardprep.errors import BrokenShard, UsageError

try:  # the same numbers: 1.2 us for 32 KiB, where zlib's takes 9 to 19
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

logger = logging.getLogger(__name__)

_ALIGN_BYTES = 64
_IDX_ROWS = 1 << 16  # read at a time where a whole column of the idx is wanted
_COLUMNS = ("offset", "num_bytes", "num_tokens", "starts_offset", "num_starts", "mask_offset")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which of all processes that read one data set this one is: ``number`` of ``count``."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(f"turn {self.number} of {self.count}: expected 0 <= number < count")

    def of_worker(self, worker: int, num_workers: int) -> Turn:
        """The turn of one of a rank's workers, where this is the rank's."""
        return Turn(number=self.number * num_workers + worker, count=self.count * num_workers)


@dataclass(frozen=True, kw_only=True)
class ReaderContext:
    """How the processes of a rank read; whatever opens shards is given it."""

    turn: Turn = Turn()
    stall_warning_s: float = STALL_WARNING_S  # a read that takes longer is logged
    staged_dir: str | os.PathLike[str] | None = None  # where copies of shards may lie on this node
    compares_crcs: bool = False  # of what is read of each sample of a data set


@dataclass(frozen=True, kw_only=True)
class SampleBytes:
    """Undecoded samples in one buffer; the arrays have a row per sample, in the order asked for."""

    buffer: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]  # byte in the buffer
    num_bytes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]  # -1 where only decoding tells
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW
    token_bytes: npt.NDArray[np.int8]  # of a RAW id
    starts_at: npt.NDArray[np.int64]  # byte in the buffer of a packed row's document starts, uint32 each
    num_starts: npt.NDArray[np.int64]  # 0 unless asked for
    mask_at: npt.NDArray[
        np.int64
    ]  # byte in the buffer of a row's loss mask, a byte per token; -1 without one
    sample: npt.NDArray[np.int64]


class ShardReader:
    """Reads samples of the shards that its process has open. One per process.

    Each process begins with another shard, see ``opening_order``.
    """

    def __init__(self, shards: ShardSet, context: ReaderContext = ReaderContext()) -> None:
        self._shards = shards
        worker, turn = get_worker_info(), context.turn
        self._turn = turn if worker is None else turn.of_worker(worker.id, worker.num_workers)
        self._compares_crcs = context.compares_crcs
        self._files = OpenShards(
            shards,
            copies=None if context.staged_dir is None else StagedCopies(context.staged_dir),
            compares_crcs=context.compares_crcs,
            stall_warning_s=context.stall_warning_s,
        )
        self.opened = self._files.opened  # no call more: it is asked several times per read
        self._buffer = np.empty(0, np.uint8)
        self._used = 0

    def read(self, samples: npt.NDArray[np.int64], *, starts: bool = False) -> SampleBytes:
        """The bytes of some samples: int64[n] -> n rows in the same order; of packed rows, the starts too.

        The buffer is the reader's own: the next ``read`` overwrites it. Raises MissingShard,
        BrokenShard or ReadWriteError, each naming the shard.
        """
        order = np.argsort(samples, kind="stable")
        table = np.zeros(
            (9, len(samples)), np.int64
        )  # SampleBytes' columns after buffer, row_tokens, mask_at
        self._used = 0
        if not len(self._buffer):  # all of it at once: what is not touched costs nothing, what is copied does
            self._buffer = np.empty(
                len(samples) * self._shards.tar_bytes // self._shards.num_samples, np.uint8
            )
        for number, rows, part in self._stretches(samples[order]):
            records = self._records(number, rows)
            self._read_samples(number, rows, records, table[:, part])
            if starts:
                self._read_starts(number, rows, records, table[:, part])
            table[8, part] = self._read_masks(number, rows, records) if self.opened(number).has_mask else -1
        self._check_sizes(samples[order], table)
        asked = np.empty_like(table)
        asked[:, order] = table
        return SampleBytes(
            buffer=self._buffer,
            start=asked[0],
            num_bytes=asked[1],
            num_tokens=asked[2],
            encoding=asked[3].astype(np.int8),
            token_bytes=asked[4].astype(np.int8),
            starts_at=asked[5],
            num_starts=asked[6],
            mask_at=asked[8],
            sample=samples,
        )

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of some samples, by the idx alone: int64[n] -> int64[n]."""
        shard = self._shards.shard_of(samples)
        found = np.empty(len(samples), np.int64)
        for number in self.opening_order(np.unique(shard)).tolist():
            here = shard == number
            found[here] = self.num_tokens_of(number)[samples[here] - self._shards.first_sample[number]]
        return found

    def num_tokens_of(self, number: int) -> npt.NDArray[np.int64]:
        """Tokens of each sample of a shard, -1 where they were not counted; kept while it is open."""
        if "num_tokens" not in self.opened(number).sums:
            num_records = int(self._shards.num_records[number])
            cuts = [*range(0, num_records, _IDX_ROWS), num_records]
            parts = [self._records(number, slice(*cut))["num_tokens"] for cut in pairwise(cuts)]
            counts = np.concatenate([np.empty(0, np.int64), *parts])
            if self._shards.split is not None:
                first, end = self._shards.first_sample[number : number + 2].tolist()
                counts = counts[self._shards.rows_of(number, np.arange(first, end))]
            self.opened(number).sums["num_tokens"] = counts
        return self.opened(number).sums["num_tokens"]

    def close(self) -> None:
        """Close every file."""
        self._files.close()

    def opening_order(self, shards: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Shards, ascending, in the order in which this process opens them: int64[n] -> int64[n]."""
        osts = self._shards.osts
        return opening_order(shards, self._turn, None if osts is None else osts[shards])

    def _stretches(self, ascending: npt.NDArray[np.int64]) -> list[tuple[int, slice, slice]]:
        """Stretches of consecutive samples of one shard: (shard, its rows, their part of ``ascending``).

        Shards come in opening order, the stretches of each in ascending order.
        """
        shard = self._shards.shard_of(ascending)
        places = self._places(ascending, shard)
        cuts = (np.flatnonzero((np.diff(places) != 1) | (np.diff(shard) != 0)) + 1).tolist()
        local, numbers = places.tolist(), shard.tolist()
        found: dict[int, list[tuple[int, slice, slice]]] = {}
        for first, end in zip([0, *cuts], [*cuts, len(ascending)], strict=True):
            if first < end:
                rows = slice(local[first], local[first] + end - first)
                found.setdefault(numbers[first], []).append((numbers[first], rows, slice(first, end)))
        order = self.opening_order(np.array(list(found), np.int64)).tolist()
        return [stretch for number in order for stretch in found[number]]

    def _places(self, samples: npt.NDArray[np.int64], shard: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where samples stand in their shards: int64[n]."""
        if self._shards.split is None:
            return samples - self._shards.first_sample[shard]
        places = np.empty_like(samples)
        for number in np.unique(shard).tolist():
            here = shard == number
            places[here] = self._shards.rows_of(number, samples[here])
        return places

    def _records(self, number: int, rows: slice) -> Any:
        """Columns of the idx, for some rows of a shard."""
        shard = self.opened(number)
        if shard.idx is None:
            held = shard.held
            return {name: held[name][rows] for name in _COLUMNS} if isinstance(held, dict) else held[rows]
        found = self._file_records(number, "idx", rows)
        return self._records(number, rows) if found is None else found

    def _file_records(self, number: int, part: Part, rows: slice) -> npt.NDArray[np.void] | None:
        """Some records of a shard's idx or crc32s; None where it was opened anew, without that file."""
        file = self.opened(number).records_of(part)
        if file is None:
            return None
        offset, num_bytes = file.place(rows)
        chunks = np.empty(num_bytes, np.uint8)
        self._files.fill(number, offset, chunks.data, part)
        if self.opened(number).records_of(part) is None:
            return None
        try:
            return file.records(rows, chunks)
        except BrokenShard as error:
            if part != "idx" or not self._files.leave_copy(self.opened(number), error):
                raise
        self._files.drop(number)
        return None

    def _read_samples(self, number: int, rows: slice, records: Any, table: npt.NDArray[np.int64]) -> None:
        """Read consecutive samples and fill their columns."""
        shard = self.opened(number)
        offset = records["offset"].astype(np.int64)
        table[1] = records["num_bytes"]
        table[2] = records["num_tokens"]
        table[3] = shard.encoding[rows] if len(shard.encoding) > 1 else shard.encoding
        table[4] = shard.token_bytes
        table[7] = shard.row_tokens
        first, last = int(offset[0]), int((offset + table[1]).max())
        if not 0 <= first <= int(offset.min()) <= last <= shard.num_bytes:
            raise _misplaced(shard, first, last)
        place = self._read_span(number, first, last - first)
        table[0] = place + (offset - first)
        self._compare_crcs(number, rows, "ids", table[:2], first - place)

    def _read_starts(self, number: int, rows: slice, records: Any, table: npt.NDArray[np.int64]) -> None:
        """Read where documents begin in consecutive packed rows, one span a member of the tar."""
        shard = self.opened(number)
        offset = records["starts_offset"].astype(np.int64)
        table[6] = records["num_starts"]
        ends = offset + 4 * table[6]
        if not 0 <= offset.min() <= ends.max() <= shard.num_bytes:
            raise BrokenShard(
                f"{shard.path}: its idx is damaged: it places {int(table[6].max())} document starts of a row "
                f"at bytes {int(offset.min())} to {int(ends.max())} of {shard.num_bytes}; {shard.remedy}"
            )
        cuts = (np.flatnonzero(offset[1:] != ends[:-1]) + 1).tolist()
        for first, end in zip([0, *cuts], [*cuts, len(offset)], strict=True):
            span = int(offset[first]), int(ends[end - 1] - offset[first])
            place = self._read_span(number, *span)
            table[5, first:end] = place + (offset[first:end] - span[0])
            places = np.stack([table[5, first:end], 4 * table[6, first:end]])
            of_rows = slice(rows.start + first, rows.start + end)
            self._compare_crcs(number, of_rows, "starts", places, span[0] - place)

    def _compare_crcs(
        self, number: int, rows: slice, column: str, places: npt.NDArray[np.int64], to_tar: int
    ) -> None:
        """With ``compares_crcs``, the crc32 of what was read of each sample, as ``verify --crcs`` wrote it.

        ``places``: int64[2, samples], byte in the buffer and number of bytes; ``to_tar``: what makes a byte
        of the tar of the first. A copy that differs is left, and read elsewhere. Raises BrokenShard.
        """
        expected = self._file_records(number, "crcs", rows) if self._compares_crcs else None
        while expected is not None:
            wrong = _first_wrong(self._buffer.data, places, expected[column])
            if wrong is None:
                return
            begin, size = places[:, wrong].tolist()
            shard = self.opened(number)
            error = BrokenShard(
                f"{shard.path}: bytes {begin + to_tar} to {begin + to_tar + size}, of sample "
                f"{rows.start + wrong}, have not the crc32 that verify --crcs found; the file changed, or a "
                f"disk or memory fails: python -m preprocess verify {shard.path.parent} tells"
            )
            if not self._files.leave_copy(shard, error):
                raise error
            self._files.drop(number)
            first, end = int(places[0].min()), int(places.sum(axis=0).max())
            self._files.fill(number, first + to_tar, self._buffer.data[first:end])

    def _read_masks(self, number: int, rows: slice, records: Any) -> npt.NDArray[np.int64]:
        """Read the loss masks of consecutive rows, one span per member; where each lies in the buffer."""
        shard = self.opened(number)
        offset, size = records["mask_offset"].astype(np.int64), shard.row_tokens
        if not 0 <= offset.min() <= offset.max() <= shard.num_bytes - size:
            raise _misplaced(shard, int(offset.min()), int(offset.max()) + size)
        places = np.empty_like(offset)
        cuts = (np.flatnonzero(np.diff(offset) != size) + 1).tolist()
        for first, end in pairwise([0, *cuts, len(offset)]):
            at = self._read_span(number, int(offset[first]), (end - first) * size)
            places[first:end] = at + (offset[first:end] - offset[first])
            read = np.stack([places[first:end], np.full(end - first, size)])
            of_rows = slice(rows.start + first, rows.start + end)
            self._compare_crcs(number, of_rows, "mask", read, int(offset[first]) - at)
        return places

    def _check_sizes(self, samples: npt.NDArray[np.int64], table: npt.NDArray[np.int64]) -> None:
        """Raise BrokenShard where ids have not the bytes of their number, or a row holds more than a row.

        Once per ``read``, over all samples: once per span of bytes it would cost packed rows 6 %.
        """
        _, num_bytes, num_tokens, _, token_bytes, _, num_starts, row_tokens, _ = table
        ids = np.where(row_tokens > 0, row_tokens, num_tokens)
        wrong = (token_bytes > 0) & (num_bytes != ids * token_bytes)
        wrong |= (row_tokens > 0) & (np.maximum(num_tokens, num_starts) > row_tokens)
        if wrong.any():
            sample = samples[wrong.argmax()]
            number = int(self._shards.shard_of(sample))
            row = int(self._shards.rows_of(number, sample))
            offset = int(self._records(number, slice(row, row + 1))["offset"][0])
            raise _misplaced(self.opened(number), offset, offset + int(num_bytes[wrong.argmax()]))

    def _read_span(self, number: int, offset: int, num_bytes: int) -> int:
        """Read bytes of a shard into the buffer; where they begin in it."""
        place = self._used
        self._used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._used > len(self._buffer):
            grown = np.empty(max(self._used, 2 * len(self._buffer)), np.uint8)
            grown[:place] = self._buffer[:place]
            self._buffer = grown
        self._files.fill(number, offset, self._buffer.data[place : place + num_bytes])
        return place


def opening_order(
    shards: npt.NDArray[np.int64], turn: Turn, osts: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """The same shards in the order to open them in: int64[n] -> int64[n], a permutation.

    ``shards``: different numbers, ascending. ``osts``: the OST of each, int64[n]; -1 stands for one that
    is not known. Without them the list is rotated by the turn's part of its length. With them the OSTs
    take turns, each by its share of the shards; T processes on O OSTs begin on min(T, O) of them, and
    those that begin on one OST in different parts of its list. 10 us for 300 shards, 110 us
    with OSTs.
    """
    if osts is None:
        return np.roll(shards, -(len(shards) * turn.number // turn.count))
    _, ost, size = np.unique(osts, return_inverse=True, return_counts=True)
    num_osts = len(size)
    first_ost, rest = divmod(turn.number * num_osts, turn.count)
    by_ost = np.argsort(ost, kind="stable")
    place = np.empty(len(shards), np.int64)  # in the list of its OST
    place[by_ost] = np.arange(len(shards)) - np.repeat(np.cumsum(size) - size, size)
    rotated = (place - (size * rest // turn.count)[ost]) % size[ost]
    return shards[np.lexsort(((ost - first_ost) % num_osts, rotated / size[ost]))]


def _first_wrong(
    buffer: memoryview, places: npt.NDArray[np.int64], expected: npt.NDArray[np.uint32]
) -> int | None:
    """The first of some stretches of a buffer whose crc32 is not the expected one; None for none."""
    begins, sizes = places.tolist()
    found = [crc32(buffer[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]
    wrong = np.array(found, np.uint32) != expected
    return int(wrong.argmax()) if wrong.any() else None


def _misplaced(shard: OpenShard, first: int, last: int) -> BrokenShard:
    verify = f"run: python -m preprocess verify {shard.path.parent}"
    return BrokenShard(
        f"{shard.path}: its idx is damaged: it places samples at bytes {first} to {last} of "
        f"{shard.num_bytes}, some of a wrong size or order; {shard.remedy if shard.is_copy else verify}"
    )
