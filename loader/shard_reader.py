"""Reads the bytes of any set of samples: neighbours in one read, each byte once."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.open_shard import OpenShard, open_shard
from loader.shard_set import ShardSet
from loader.stall_watch import StallWatch
from preprocess.shard_format import BrokenShard, ReadWriteError

logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 128
RETRY_DELAYS_S = (0.5, 1, 2, 4, 8, 16)  # a client that Lustre evicted is back in seconds
# What file systems over a network say while a server or the connection to it is gone.
RETRIED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})
STALL_WARNING_S = 60.0
_ALIGN_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class SampleBytes:
    """Undecoded samples in one buffer; the arrays have a row a sample, in the order asked for."""

    buffer: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]  # byte in the buffer
    num_bytes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]  # -1 where only decoding tells
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW
    token_bytes: npt.NDArray[np.int8]  # of a RAW id
    starts_at: npt.NDArray[np.int64]  # byte in the buffer of a packed row's document starts, uint32 each
    num_starts: npt.NDArray[np.int64]  # 0 unless asked for
    sample: npt.NDArray[np.int64]


class ShardReader:
    """Opens shards when they are needed and keeps the latest of them open. One a process.

    At most MAX_OPEN_SHARDS, and a quarter of the process's handles: an open shard holds two.
    """

    def __init__(self, shards: ShardSet, *, stall_warning_s: float = STALL_WARNING_S) -> None:
        self._shards = shards
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._max_open = min(MAX_OPEN_SHARDS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8, 1))
        self._buffer = np.empty(0, np.uint8)
        self._used = 0
        self._watch = StallWatch(stall_warning_s)

    def read(self, samples: npt.NDArray[np.int64], *, starts: bool = False) -> SampleBytes:
        """The bytes of some samples: int64[n] -> n rows in the same order; of packed rows, the starts too.

        The buffer is the reader's own: the next ``read`` overwrites it. Raises MissingShard,
        BrokenShard or ReadWriteError, each naming the shard.
        """
        order = np.argsort(samples, kind="stable")
        table = np.zeros((7, len(samples)), np.int64)  # the columns of SampleBytes between buffer and sample
        self._used = 0
        for number, rows, part in self._neighbours(samples[order]):
            self._read_run(number, rows, table[:, part])
            if starts:
                self._read_starts(number, rows, table[:, part])
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
            sample=samples,
        )

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of some samples, by the idx alone: int64[n] -> int64[n]."""
        order = np.argsort(samples, kind="stable")
        found = np.empty(len(samples), np.int64)
        for number, rows, part in self._neighbours(samples[order]):
            found[order[part]] = self.opened(number).num_tokens[rows]
        return found

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1].handle)
        self._watch.close()

    def opened(self, number: int) -> OpenShard:
        """A shard, opened if it is not; counted through all sources."""
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        while len(self._open) >= self._max_open:
            os.close(self._open.popitem(last=False)[1].handle)
        source, row = self._shards.locate(number)
        path = source.path_of(row)
        for delay_s in (*RETRY_DELAYS_S, None):
            self._watch.begin(path, 0)
            try:
                self._open[number] = open_shard(source, row)
            except (OSError, BrokenShard) as error:
                self._wait_to_retry(f"{path} cannot be opened", error, delay_s)
            else:
                return self._open[number]
            finally:
                self._watch.end()
        raise AssertionError("the last attempt returns or raises")

    def _neighbours(self, ascending: npt.NDArray[np.int64]) -> list[tuple[int, slice, slice]]:
        """Runs of consecutive samples of one shard: (shard, its rows, their part of ``ascending``)."""
        shard = self._shards.shard_of(ascending)
        cuts = (np.flatnonzero((np.diff(ascending) != 1) | (np.diff(shard) != 0)) + 1).tolist()
        local = (ascending - self._shards.first_sample[shard]).tolist()
        numbers = shard.tolist()
        return [
            (numbers[first], slice(local[first], local[first] + end - first), slice(first, end))
            for first, end in zip([0, *cuts], [*cuts, len(ascending)], strict=True)
            if first < end
        ]

    def _read_run(self, number: int, rows: slice, table: npt.NDArray[np.int64]) -> None:
        """Read consecutive samples and fill their columns."""
        shard = self.opened(number)
        offset = np.asarray(shard.records["offset"][rows], np.int64)
        table[1] = shard.records["num_bytes"][rows]
        table[2] = shard.records["num_tokens"][rows]
        table[3] = shard.encoding[rows] if len(shard.encoding) > 1 else shard.encoding
        table[4] = shard.token_bytes
        first, last = int(offset[0]), int((offset + table[1]).max())
        ids = shard.row_tokens or table[2]
        misfit = shard.token_bytes and (table[1] != ids * shard.token_bytes).any()
        if last > shard.num_bytes or int(offset.min()) < first or misfit:
            raise BrokenShard(
                f"{shard.path}: its idx is damaged: it places samples at bytes {first} to {last} of "
                f"{shard.num_bytes}, some of a wrong size or order; "
                f"run: python -m preprocess verify {shard.path.parent}"
            )
        table[0] = self._read_span(number, first, last - first) + (offset - first)

    def _read_starts(self, number: int, rows: slice, table: npt.NDArray[np.int64]) -> None:
        """Read where documents begin in consecutive packed rows, one span a member of the tar."""
        shard = self.opened(number)
        offset = np.asarray(shard.records["starts_offset"][rows], np.int64)
        table[6] = shard.records["num_starts"][rows]
        ends = offset + 4 * table[6]
        if len(ends) and not 0 <= offset.min() <= ends.max() <= shard.num_bytes:
            raise BrokenShard(
                f"{shard.path}: its idx is damaged: document starts lie outside of it; {shard.remedy}"
            )
        cuts = (np.flatnonzero(offset[1:] != ends[:-1]) + 1).tolist()
        for first, end in zip([0, *cuts], [*cuts, len(offset)], strict=True):
            span = int(offset[first]), int(ends[end - 1] - offset[first])
            table[5, first:end] = self._read_span(number, *span) + (offset[first:end] - span[0])

    def _read_span(self, number: int, offset: int, num_bytes: int) -> int:
        """Read bytes of a shard into the buffer; where they begin in it."""
        place = self._used
        self._used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._used > len(self._buffer):
            grown = np.empty(max(self._used, 2 * len(self._buffer)), np.uint8)  # untouched, it costs nothing
            grown[:place] = self._buffer[:place]
            self._buffer = grown
        self._fill(number, offset, self._buffer.data[place : place + num_bytes])
        return place

    def _fill(self, number: int, offset: int, target: memoryview) -> None:
        done = 0
        for delay_s in (*RETRY_DELAYS_S, None):
            shard = self.opened(number)
            self._watch.begin(shard.path, offset + done)
            try:
                while done < len(target):
                    count = os.preadv(shard.handle, [target[done:]], offset + done)  # may read short
                    if count == 0:
                        raise BrokenShard(
                            f"{shard.path} ended at byte {offset + done} while it was read; was it replaced?"
                        )
                    done += count
            except OSError as error:
                self._wait_to_retry(f"{shard.path} cannot be read at byte {offset + done}", error, delay_s)
                os.close(self._open.pop(number).handle)  # a stale handle stays stale
            else:
                return
            finally:
                self._watch.end()

    @staticmethod
    def _wait_to_retry(what: str, error: Exception, delay_s: float | None) -> None:
        """Sleep before another attempt, or raise where the error stays or will not go away."""
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise error
        if cause.errno not in RETRIED or delay_s is None:
            tries = "" if delay_s is not None else f" in {len(RETRY_DELAYS_S) + 1} attempts"
            raise (
                error if not isinstance(error, OSError) else ReadWriteError(f"{what}{tries}: {cause}")
            ) from error
        logger.warning("%s (%s); trying again in %s s", what, cause, delay_s)
        time.sleep(delay_s)
