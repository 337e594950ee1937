"""Reads the bytes of any set of samples: neighbours in one read, each byte once.

``ShardReader`` is one object per process. It reads from ``OpenShards``, which opens files, tries failed reads
again, and logs which shard a read hangs in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from loader.reading.open_shard import STALL_WARNING_S, OpenShard, OpenShards, Part, Turn, opening_order
from loader.shards.shard_set import ShardSet
from loader.staging.staged_copies import StagedCopies
from shardprep.errors import BrokenShard

try:  # the same numbers: 1.2 us for 32 KiB, where zlib's takes 9 to 19
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

_ALIGN_BYTES = 64
_SHARDS_AT_ONCE = 16  # whose samples are looked at together, and that must be open together
_IDX_ROWS = 1 << 16  # read at a time where a whole column of the idx is wanted
_COLUMNS = ("offset", "num_bytes", "num_tokens", "starts_offset", "num_starts", "mask_offset")


@dataclass(frozen=True, kw_only=True)
class ReaderContext:
    """How the processes of a rank read; whatever opens shards is given it."""

    turn: Turn = Turn()  # noqa: RUF009  frozen
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
    mask_at: npt.NDArray[np.int64]  # byte in the buffer of a row's loss mask, a byte per token; -1 without
    sample: npt.NDArray[np.int64]


class _Columns(NamedTuple):
    """What is found of samples, in the order in which they are read: int64[n] each, as in SampleBytes."""

    start: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    encoding: npt.NDArray[np.int64]
    token_bytes: npt.NDArray[np.int64]
    starts_at: npt.NDArray[np.int64]
    num_starts: npt.NDArray[np.int64]
    mask_at: npt.NDArray[np.int64]
    row_tokens: npt.NDArray[np.int64]  # of a packed row, else 0


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Samples shard by shard, ascending in each."""

    shards: list[int]  # in the order in which they are opened
    bounds: list[int]  # where the samples of each begin, and the end
    shard: npt.NDArray[np.int64]  # int64[n]
    row: npt.NDArray[np.int64]  # int64[n]: in the shard

    def parts(self, num_shards: int) -> Iterator[tuple[slice, _Asked]]:
        """Those of ``num_shards`` shards at a time, and where they stand."""
        for first in range(0, len(self.shards), num_shards):
            bounds = self.bounds[first : first + num_shards + 1]
            part = slice(bounds[0], bounds[-1])
            yield (
                part,
                _Asked(
                    shards=self.shards[first : first + num_shards],
                    bounds=[bound - part.start for bound in bounds],
                    shard=self.shard[part],
                    row=self.row[part],
                ),
            )


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
        order, asked = self._in_opening_order(samples)
        table = np.zeros((len(_Columns._fields), len(samples)), np.int64)
        self._used = 0
        if not len(self._buffer):  # all of it at once: what is not touched costs nothing, what is copied does
            self._buffer = np.empty(
                len(samples) * self._shards.tar_bytes // self._shards.num_samples, np.uint8
            )
        for part, of_shards in asked.parts(min(_SHARDS_AT_ONCE, self._files.max_open)):
            self._read_shards(of_shards, _Columns(*table[:, part]), starts=starts)
        self._check_sizes(samples[order], _Columns(*table))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        found = _Columns(*table.take(back, axis=1))
        return SampleBytes(
            buffer=self._buffer,
            start=found.start,
            num_bytes=found.num_bytes,
            num_tokens=found.num_tokens,
            encoding=found.encoding.astype(np.int8),
            token_bytes=found.token_bytes.astype(np.int8),
            starts_at=found.starts_at,
            num_starts=found.num_starts,
            mask_at=found.mask_at,
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

    def _in_opening_order(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], _Asked]:
        """The order in which this process reads the samples, and where they lie, in that order."""
        order = np.argsort(samples)
        shard = self._shards.shard_of(samples[order])
        first = _first_of_parts(shard[1:] != shard[:-1])[: len(shard)]
        by_shard = dict(zip(shard[first].tolist(), np.split(order, first[1:]), strict=False))
        shards = self.opening_order(shard[first]).tolist()
        if len(shards) > 1:
            order = np.concatenate([by_shard[number] for number in shards])
            shard = self._shards.shard_of(samples[order])
        bounds = [0, *accumulate(len(by_shard[number]) for number in shards)]
        row = self._places(samples[order], shard)
        return order, _Asked(shards=shards, bounds=bounds, shard=shard, row=row)

    def _places(self, samples: npt.NDArray[np.int64], shard: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where samples stand in their shards: int64[n]."""
        if self._shards.split is None:
            return samples - self._shards.first_sample[shard]
        places = np.empty_like(samples)
        for number in np.unique(shard).tolist():
            here = shard == number
            places[here] = self._shards.rows_of(number, samples[here])
        return places

    def _records(self, number: int, rows: slice | npt.NDArray[np.int64]) -> Any:
        """Columns of the idx, for some rows of a shard, ascending."""
        shard = self.opened(number)
        if shard.idx is None:
            if isinstance(shard.held, dict):
                return {name: shard.held[name][rows] for name in _COLUMNS}
            return shard.held[rows] if isinstance(rows, slice) else shard.held.take(rows)
        stretches = [rows] if isinstance(rows, slice) else _stretches(rows)
        found = []
        for stretch in stretches:
            records = self._file_records(number, "idx", stretch)
            if records is None:
                return self._records(number, rows)
            found.append(records)
        return found[0] if len(found) == 1 else np.concatenate(found)

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

    def _read_shards(self, asked: _Asked, found: _Columns, *, starts: bool) -> None:
        """Read samples of some shards and fill their columns."""
        offset, starts_offset, mask_offset, limit = np.zeros((4, len(asked.row)), np.int64)
        found.mask_at.fill(-1)
        for number, bounds in zip(asked.shards, pairwise(asked.bounds), strict=True):
            here = slice(*bounds)
            rows = asked.row[here]
            records = self._records(number, rows)
            shard = self.opened(number)
            limit[here] = shard.num_bytes
            offset[here] = records["offset"]
            found.num_bytes[here] = records["num_bytes"]
            found.num_tokens[here] = records["num_tokens"]
            found.encoding[here] = shard.encoding[rows] if len(shard.encoding) > 1 else shard.encoding
            found.token_bytes[here] = shard.token_bytes
            found.row_tokens[here] = shard.row_tokens
            if starts:
                starts_offset[here] = records["starts_offset"]
                found.num_starts[here] = records["num_starts"]
            if shard.has_mask:
                mask_offset[here] = records["mask_offset"]
                found.mask_at[here] = 0
        is_cut = (asked.row[1:] - asked.row[:-1] != 1) | (asked.shard[1:] != asked.shard[:-1])
        found.start[:] = self._read_spans(asked, "ids", offset, found.num_bytes, is_cut, limit)
        if starts:
            sizes = 4 * found.num_starts
            is_cut_here = is_cut | (starts_offset[1:] != (starts_offset + sizes)[:-1])
            found.starts_at[:] = self._read_spans(asked, "starts", starts_offset, sizes, is_cut_here, limit)
        has_mask = found.mask_at == 0
        if has_mask.any():
            sizes = np.where(has_mask, found.row_tokens, 0)
            is_cut_here = is_cut | (mask_offset[1:] != (mask_offset + sizes)[:-1])
            at = self._read_spans(asked, "mask", mask_offset, sizes, is_cut_here, limit)
            found.mask_at[has_mask] = at[has_mask]

    def _read_spans(
        self,
        asked: _Asked,
        column: Literal["ids", "starts", "mask"],
        offset: npt.NDArray[np.int64],
        num_bytes: npt.NDArray[np.int64],
        is_cut: npt.NDArray[np.bool_],
        limit: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Read some bytes of each sample into the buffer: where they begin in it, int64[n].

        They begin at byte ``offset`` of the shard, which has ``limit`` bytes. Samples with no cut between
        them lie in their order in one shard, and are read at once. Raises BrokenShard.
        """
        first = _first_of_parts(is_cut)
        begin, end = offset[first], np.maximum.reduceat(offset + num_bytes, first)
        wrong = (np.minimum.reduceat(offset, first) < np.maximum(begin, 0)) | (end < begin)
        wrong |= end > limit[first]
        if wrong.any():
            span = wrong.argmax()
            shard = self.opened(int(asked.shard[first[span]]))
            raise _misplaced(shard, column, int(begin[span]), int(end[span]))
        held = -(-(end - begin) // _ALIGN_BYTES) * _ALIGN_BYTES
        place = self._used + np.cumsum(held) - held
        self._grow(int(held.sum()))
        for number, at, size, to in zip(
            *(each.tolist() for each in (asked.shard[first], begin, end - begin, place)), strict=True
        ):
            self._files.fill(number, at, self._buffer.data[to : to + size])
        places = offset + np.repeat(place - begin, np.diff(first, append=len(offset)))
        if self._compares_crcs:
            spans = np.stack([places, num_bytes])
            for begins, ends in pairwise([*first.tolist(), len(offset)]):
                number, row = int(asked.shard[begins]), int(asked.row[begins])
                rows = slice(row, row + ends - begins)
                to_tar = int(offset[begins] - places[begins])
                self._compare_crcs(number, rows, column, spans[:, begins:ends], to_tar)
        return places

    def _grow(self, num_bytes: int) -> None:
        """Let the buffer have room for so many bytes more."""
        used, self._used = self._used, self._used + num_bytes
        if self._used > len(self._buffer):
            grown = np.empty(max(self._used, 2 * len(self._buffer)), np.uint8)
            grown[:used] = self._buffer[:used]
            self._buffer = grown

    def _compare_crcs(
        self, number: int, rows: slice, column: str, places: npt.NDArray[np.int64], to_tar: int
    ) -> None:
        """Compare the crc32 of what was read of each sample with those that ``verify --crcs`` wrote.

        ``places``: int64[2, samples], byte in the buffer and number of bytes; ``to_tar``: what makes a byte
        of the tar of the first. A copy that differs is left, and read elsewhere. Raises BrokenShard.
        """
        expected = self._file_records(number, "crcs", rows)
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

    def _check_sizes(self, samples: npt.NDArray[np.int64], found: _Columns) -> None:
        """Raise BrokenShard where ids have not the bytes of their number, or a row holds more than a row.

        Once per ``read``, over all samples: once per span of bytes it would cost packed rows 6 %.
        """
        ids = np.where(found.row_tokens > 0, found.row_tokens, found.num_tokens)
        wrong = (found.token_bytes > 0) & (found.num_bytes != ids * found.token_bytes)
        wrong |= (found.row_tokens > 0) & (np.maximum(found.num_tokens, found.num_starts) > found.row_tokens)
        if wrong.any():
            sample = samples[wrong.argmax()]
            number = int(self._shards.shard_of(sample))
            row = int(self._shards.rows_of(number, sample))
            offset = int(self._records(number, slice(row, row + 1))["offset"][0])
            end = offset + int(found.num_bytes[wrong.argmax()])
            raise _misplaced(self.opened(number), "ids", offset, end)


def _first_of_parts(is_cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """The first place of each part of n places, cut between some of them: bool[n - 1] -> intp[parts]."""
    return np.concatenate([[0], np.flatnonzero(is_cut) + 1])


def _stretches(rows: npt.NDArray[np.int64]) -> list[slice]:
    """Ascending rows as stretches of consecutive ones."""
    bounds = [*_first_of_parts(np.diff(rows) != 1).tolist(), len(rows)]
    return [slice(int(rows[first]), int(rows[first]) + end - first) for first, end in pairwise(bounds)]


def _first_wrong(
    buffer: memoryview, places: npt.NDArray[np.int64], expected: npt.NDArray[np.uint32]
) -> int | None:
    """The first of some stretches of a buffer whose crc32 is not the expected one; None for none."""
    begins, sizes = places.tolist()
    found = [crc32(buffer[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]
    wrong = np.array(found, np.uint32) != expected
    return int(wrong.argmax()) if wrong.any() else None


def _misplaced(shard: OpenShard, column: str, first: int, last: int) -> BrokenShard:
    what = {"ids": "samples", "starts": "document starts", "mask": "loss masks"}[column]
    verify = f"run: python -m preprocess verify {shard.path.parent}"
    return BrokenShard(
        f"{shard.path}: its idx is damaged: it places {what} at bytes {first} to {last} of "
        f"{shard.num_bytes}, some of a wrong size or order; {shard.remedy if shard.is_copy else verify}"
    )
