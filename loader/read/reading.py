"""Open shards, and read the bytes of any set of samples: neighbours in one read, each byte once.

Opening a shard checks sizes and headers, and reads a small idx whole. A large idx is read in parts, as they
are needed. Failed reads are retried.

Each process begins with a different shard, see ``opening_order``. If many began with the same shard, they
would be as slow as the one storage target (OST) that stores it. Batches do not depend on this order.
"""

from __future__ import annotations

import contextlib
import resource
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from loader.order.hashes import Int64s
from loader.read.external_tars import TOKEN_DTYPES
from loader.read.shards import DatasetShards, ShardSet
from shardprep.errors import BrokenShard, MissingShard
from shardprep.files import NOT_THERE, RETRY_DELAYS_S, wait_to_retry, with_retries
from shardprep.format import commands
from shardprep.format.idx import IdxFile

T = TypeVar("T")

MAX_OPEN_SHARDS = 128
HELD_IDX_BYTES = 256 << 10  # an idx up to this size is read at opening, a larger one in parts


class OpenShard:
    """A tar, open for reading. The records of its samples are in memory, or are read from its open idx."""

    def __init__(self, part: DatasetShards, row: int) -> None:
        """Open the shard of a row of ``part``. Raises MissingShard, BrokenShard or OSError."""
        path = part.path_of(row)
        shard_id = int(part.shard_ids[row])
        self.part = part
        self._shard_id = shard_id
        self.cached: dict[str, Int64s] = {}  # numbers computed from the idx, until the shard is closed
        self.dtype: int | None = None  # index in TOKEN_DTYPES for all ids; None: the records have it
        self._records: Any = part.records  # the idx's records in memory; None: they are read from the idx
        self._idx: IdxFile | None = None
        with contextlib.ExitStack() as opened:  # closes the files if something fails
            try:
                self.tar = opened.enter_context(part.open_tar(row))
            except NOT_THERE:
                raise MissingShard(f"{path} is missing", path=path, remedy=self.remedy) from None
            expected = int(part.tar_bytes[row])
            if self.tar.num_bytes != expected:
                changed = " (changed since the scan)" if part.scanned_tar else ""
                found = f"{self.tar.num_bytes} bytes{changed}"
                raise BrokenShard(path=path, found=found, expected=expected, remedy=self.remedy)
            if self._records is None:
                idx = self._idx = IdxFile(part.folder, part.spec, shard_id)
                opened.enter_context(idx.file)
                expected = int(part.num_samples[row])
                if idx.num_samples != expected:
                    found = f"{idx.num_samples} samples"
                    raise BrokenShard(path=idx.file.path, found=found, expected=expected, remedy=self.remedy)
                dtype = None if part.spec.kind == "json" else part.spec.dtype
                self.dtype = TOKEN_DTYPES.index(dtype)
                if idx.num_samples * idx.dtype.itemsize <= HELD_IDX_BYTES:
                    self._records = idx.read(slice(0, idx.num_samples))
                    self._idx = None
                    idx.file.close()
            opened.pop_all()

    @property
    def remedy(self) -> str | None:
        """Return the command that makes the shard again, or None for a tar of another tool."""
        return None if self.part.scanned_tar else commands.shard(self._shard_id, self.part.folder)

    def close(self) -> None:
        self.tar.close()
        if self._idx is not None:
            self._idx.file.close()

    def records_of(self, rows: slice | Int64s) -> Any:
        """Return the idx records of some samples, in ascending order. A large idx is read in parts."""
        if self._idx is None:
            if isinstance(rows, slice):
                return self._records[rows]
            return self._records.take(rows)
        if isinstance(rows, slice):
            return self._idx.read(rows)
        # One read for consecutive rows. bounds: where they begin in ``rows``, and its length.
        bounds = [*_first_of_parts(np.diff(rows) != 1).tolist(), len(rows)]
        parts = []
        for first, end in pairwise(bounds):
            consecutive = slice(int(rows[first]), int(rows[end - 1]) + 1)
            parts.append(self._idx.read(consecutive))
        return np.concatenate(parts)


_ALIGN_BYTES = 64
_TOKEN_BYTES = np.array([0 if dtype is None else dtype.itemsize for dtype in TOKEN_DTYPES])  # 0: JSON text
_SHARDS_AT_ONCE = 16  # shards whose samples are read together; all of them are open at the same time
_MOST_AT_ONCE_BYTES = 1 << 30  # of the first buffer, whose size comes from an index that may be damaged
_MOST_GAP_BYTES = 64 << 10  # between samples in one read: other members, or samples of the other split
_IDX_ROWS = 1 << 16  # read at a time if a whole column of the idx is needed


class SampleBytes(NamedTuple):
    """Undecoded samples in one buffer. The arrays have a row per sample, in the requested order."""

    shards: ShardSet
    buffer: npt.NDArray[np.uint8]
    sample: Int64s
    start: Int64s  # byte in the buffer
    num_bytes: Int64s
    num_tokens: Int64s  # -1 if unknown before decoding
    dtype: Int64s  # of the ids, as index in TOKEN_DTYPES
    starts_at: Int64s  # byte in the buffer of a packed row's document starts, uint32 each
    num_starts: Int64s  # 0 unless requested
    mask_at: Int64s  # byte in the buffer of a row's loss mask, one byte per token; -1 if it has none

    def broken(self, row: int, found: str) -> BrokenShard:
        """Return the error for a sample whose bytes are not valid token ids."""
        sample = self.sample[row]
        shard = int(self.shards.shard_of(sample))
        part, row_of_shard = self.shards.locate(shard)
        found = f"sample {self.shards.record_numbers(sample, shard)} contains {found}"
        return BrokenShard(path=part.path_of(row_of_shard), found=found)


_NUM_COLUMNS = len(SampleBytes._fields) - 3  # arrays that reading fills in


class ShardReader:
    """Reads samples of any shards. It is reader ``number`` of ``num_readers``.

    The last used shards stay open: MAX_OPEN_SHARDS, but at most an eighth of the process's file descriptors.
    """

    def __init__(self, shards: ShardSet, number: int = 0, num_readers: int = 1) -> None:
        self._shards = shards
        self._number = number
        self._num_readers = num_readers
        self._open: OrderedDict[int, OpenShard] = OrderedDict()  # by number in the ShardSet
        self._max_open = min(MAX_OPEN_SHARDS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8, 1))
        self._buffer = np.empty(0, np.uint8)
        self._used = 0

    def opened(self, number: int) -> OpenShard:
        """Return shard ``number`` of the ShardSet, and open it if necessary."""
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        part, row = self._shards.locate(number)
        what = f"{part.path_of(row)} cannot be opened"
        self._open[number] = with_retries(what, partial(OpenShard, part, row))
        return self._open[number]

    def close(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        while self._open:
            self._open.popitem()[1].close()
        for part in self._shards.datasets:
            part.folder.close()

    def _records(self, number: int, rows: slice | Int64s) -> Any:
        """Return the idx records of some samples of a shard, in ascending order."""
        return self._retried(number, "idx", "", lambda shard: shard.records_of(rows))

    def _fill(self, number: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a shard's tar from ``offset`` on."""

        def read(shard: OpenShard) -> None:
            done = 0
            while done < len(target):
                done += shard.tar.read_some(target[done:], offset + done)

        self._retried(number, "tar", f" at byte {offset}", read)

    def _retried(self, number: int, suffix: str, where: str, read: Callable[[OpenShard], T]) -> T:
        """Read from a shard. After an error that may be temporary, open its files again and retry."""
        for delay_s in (*RETRY_DELAYS_S, None):
            shard = self.opened(number)
            try:
                return read(shard)
            except (OSError, BrokenShard) as error:
                path = shard.tar.path.with_suffix(f".{suffix}")
                wait_to_retry(f"{path} cannot be read{where}", error, delay_s)
                self._open.pop(number).close()  # a stale handle stays stale
        raise AssertionError("the last attempt returns or raises")

    def read(self, samples: Int64s, *, starts: bool = False) -> SampleBytes:
        """Return the bytes of some samples: int64[n] -> n rows in the same order.

        ``starts``: also read where documents begin in packed rows. The next ``read`` overwrites the buffer.
        """
        order = np.argsort(samples)
        shard = self._shards.shard_of(samples[order])
        first = _first_of_parts(shard[1:] != shard[:-1])
        begin = int(first[self._num_before(len(first))])  # as in opening_order
        order = np.roll(order, -begin)
        shard = np.roll(shard, -begin)
        ordered = samples[order]
        record = self._shards.record_numbers(ordered, shard)
        table = np.zeros((_NUM_COLUMNS, len(samples)), np.int64)
        self._used = 0
        if not len(self._buffer):  # at full size: untouched memory costs nothing, but growing would copy it
            num_bytes = len(samples) * self._shards.tar_bytes // self._shards.num_samples
            self._buffer = np.empty(min(num_bytes, _MOST_AT_ONCE_BYTES), np.uint8)
        first = _first_of_parts(shard[1:] != shard[:-1])[: len(shard)]  # empty if there are no samples
        begins = first[:: min(_SHARDS_AT_ONCE, self._max_open)].tolist()
        for part in (slice(*bounds) for bounds in pairwise([*begins, len(shard)])):
            found = SampleBytes(self._shards, self._buffer, ordered[part], *table[:, part])
            self._read_shards(shard[part], record[part], found, starts=starts)
        # Check the sizes of ids and rows of all parts at once: checking each part would take 6 % longer.
        whole = SampleBytes(self._shards, self._buffer, ordered, *table)
        row_tokens = self._shards.row_tokens
        token_bytes = _TOKEN_BYTES[whole.dtype]
        wrong = (token_bytes > 0) & (whole.num_bytes != (row_tokens or whole.num_tokens) * token_bytes)
        if row_tokens:
            wrong |= np.maximum(whole.num_tokens, whole.num_starts) > row_tokens
        self._check(shard, wrong)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return SampleBytes(self._shards, self._buffer, samples, *table.take(back, axis=1))

    def num_tokens(self, samples: Int64s) -> Int64s:
        """Return the tokens of some samples, from the idx alone: int64[n] -> int64[n]."""
        shard = self._shards.shard_of(samples)
        found = np.empty(len(samples), np.int64)
        for number in self.opening_order(np.unique(shard)).tolist():
            here = shard == number
            found[here] = self.num_tokens_of(number)[samples[here] - self._shards.first_sample[number]]
        return found

    def num_tokens_of(self, number: int) -> Int64s:
        """Return the tokens of each sample of a shard, -1 if they were not counted."""
        if "num_tokens" not in self.opened(number).cached:
            bounds = self._shards.first_sample[number : number + 2]
            begin, end = self._shards.record_numbers(bounds, number).tolist()
            cuts = [*range(begin, end, _IDX_ROWS), end]
            parts = [self._records(number, slice(*cut))["num_tokens"] for cut in pairwise(cuts)]
            self.opened(number).cached["num_tokens"] = np.concatenate([np.empty(0, np.int64), *parts])
        return self.opened(number).cached["num_tokens"]

    def opening_order(self, shards: Int64s) -> Int64s:
        """Rotate ascending shards, so that each process begins with another part: int64[n] -> int64[n]."""
        return np.roll(shards, -self._num_before(len(shards)))

    def _num_before(self, num_shards: int) -> int:
        """Return how many of the first shards this process opens last."""
        return num_shards * self._number // self._num_readers

    def _read_shards(self, shard_of: Int64s, record: Int64s, found: SampleBytes, *, starts: bool) -> None:
        """Read samples of some shards and fill in their columns. ``record``: their record numbers.

        Samples outside of a tar and overlapping samples are refused before memory is allocated for them.
        """
        is_border = shard_of[1:] != shard_of[:-1]
        offset, starts_offset, mask_offset, limit = np.zeros((4, len(record)), np.int64)
        has_mask = np.zeros(len(record), np.bool_)
        for bounds in pairwise([*_first_of_parts(is_border).tolist(), len(record)]):
            here = slice(*bounds)
            number = int(shard_of[bounds[0]])
            records = self._records(number, record[here])
            shard = self.opened(number)
            limit[here] = shard.tar.num_bytes
            offset[here] = records["offset"]
            found.num_bytes[here] = records["num_bytes"]
            found.num_tokens[here] = records["num_tokens"]
            found.dtype[here] = records["dtype"] if shard.dtype is None else shard.dtype
            if starts:
                starts_offset[here] = records["starts_offset"]
                found.num_starts[here] = records["num_starts"]
            if shard.part.spec.record == "chat":  # its rows have a loss mask
                mask_offset[here] = records["mask_offset"]
                has_mask[here] = True
        is_held_out = record >= self._shards.first_held_out[shard_of]
        is_border |= is_held_out[1:] != is_held_out[:-1]  # each split is in the order of the tar
        must_follow = ~is_border & (record[1:] > record[:-1])  # not a sample that is requested twice
        is_cut = is_border | (record[1:] - record[:-1] != 1)
        wanted = [(offset, found.num_bytes, found.start)]
        if starts:
            wanted.append((starts_offset, 4 * found.num_starts, found.starts_at))
        if has_mask.any():
            wanted.append((mask_offset, has_mask * self._shards.row_tokens, found.mask_at))
        for begins, num_bytes, in_buffer in wanted:
            ends = begins + num_bytes
            gap = begins[1:] - ends[:-1]
            wrong = (begins < 0) | (ends > limit)
            wrong[1:] |= must_follow & (gap < 0)
            self._check(shard_of, wrong)
            # Neighbours are read at once. Rows and starts stay at multiples of 4 bytes, to view them as ids.
            is_apart = is_cut | (gap < 0) | (gap > _MOST_GAP_BYTES)
            if self._shards.row_tokens:
                is_apart |= gap % 4 > 0
            first = _first_of_parts(is_apart)
            begin = begins[first]
            end = ends[np.append(first[1:], len(ends)) - 1]
            aligned = -(-(end - begin) // _ALIGN_BYTES) * _ALIGN_BYTES
            to_buffer = self._used + np.cumsum(aligned) - aligned
            used = self._used
            self._used += int(aligned.sum())
            if self._used > len(self._buffer):
                grown = np.empty(max(self._used, 2 * len(self._buffer)), np.uint8)
                grown[:used] = self._buffer[:used]
                self._buffer = grown
            spans = (each.tolist() for each in (shard_of[first], begin, end - begin, to_buffer))
            for number, at, size, to in zip(*spans, strict=True):
                self._fill(number, at, self._buffer.data[to : to + size])
            in_buffer[:] = begins + np.repeat(to_buffer - begin, np.diff(first, append=len(begins)))
        found.mask_at[~has_mask] = -1

    def _check(self, shard_of: Int64s, wrong: npt.NDArray[np.bool_]) -> None:
        """Raise BrokenShard if samples are wrong: their idx cannot belong to the tar."""
        if wrong.any():
            tar = self.opened(int(shard_of[wrong.argmax()])).tar
            found = "its idx places samples outside of the tar, over each other, or with a wrong size"
            expected = f"separate places in {tar.num_bytes} bytes"
            remedy = commands.on("verify", tar.path.parent)
            raise BrokenShard(path=tar.path, found=found, expected=expected, remedy=remedy)


def _first_of_parts(is_cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the first index of each part of n items by the cuts between them: bool[n - 1] -> intp[parts]."""
    return np.concatenate([[0], np.flatnonzero(is_cut) + 1])
