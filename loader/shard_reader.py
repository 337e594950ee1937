"""Reads the bytes of any set of samples: neighbours in one read, each byte once."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shard_set import DatasetShards, ForeignTar, ShardSet
from preprocess.shard_format import (
    BrokenShard,
    MissingShard,
    ReadWriteError,
    idx_path,
    read_idx,
    rerun_command,
)

JSON, NPY, RAW = 0, 1, 2  # how ids lie: JSON text, a whole .npy file, or bare integers
MAX_OPEN_SHARDS = 128
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
    sample: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _OpenShard:
    path: Path
    handle: int
    num_bytes: int
    records: Any  # "offset", "num_bytes" and "num_tokens", a row a sample
    encoding: npt.NDArray[np.int8]  # one, or one a sample
    token_bytes: int  # of a RAW id
    row_tokens: int  # of a packed row, else 0


class ShardReader:
    """Opens shards when they are needed and keeps MAX_OPEN_SHARDS of them open. One a process."""

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._buffer = np.empty(0, np.uint8)

    def read(self, samples: npt.NDArray[np.int64]) -> SampleBytes:
        """The bytes of some samples: int64[n] -> n rows in the same order.

        The buffer is the reader's own: the next ``read`` overwrites it. Raises MissingShard,
        BrokenShard or ReadWriteError, each naming the shard.
        """
        order = np.argsort(samples, kind="stable")
        ascending = samples[order]
        shard = self._shards.shard_of(ascending)
        cuts = np.flatnonzero((np.diff(ascending) != 1) | (np.diff(shard) != 0)) + 1
        table = np.zeros((5, len(samples)), np.int64)  # the columns of SampleBytes but buffer and sample
        spans: list[tuple[int, int, int, int]] = []  # shard, offset in it, place in the buffer, bytes
        place = 0
        for first, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(samples)], strict=True):
            number = int(shard[first])
            local = int(ascending[first] - self._shards.first_sample[number])
            offset, num_bytes = self._describe(number, slice(local, local + end - first), table[:, first:end])
            table[0, first:end] += place
            spans.append((number, offset, place, num_bytes))
            place += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if place > len(self._buffer):
            self._buffer = np.empty(place, np.uint8)
        for number, offset, at, num_bytes in spans:
            self._fill(self._opened(number), offset, self._buffer.data[at : at + num_bytes])
        asked = np.empty_like(table)
        asked[:, order] = table
        return SampleBytes(
            buffer=self._buffer,
            start=asked[0],
            num_bytes=asked[1],
            num_tokens=asked[2],
            encoding=asked[3].astype(np.int8),
            token_bytes=asked[4].astype(np.int8),
            sample=samples,
        )

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1].handle)

    def _describe(self, number: int, rows: slice, table: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Fill a run's columns, starts counted from its first byte; the run's offset and size."""
        shard = self._opened(number)
        offset = np.asarray(shard.records["offset"][rows], np.int64)
        table[1] = shard.records["num_bytes"][rows]
        table[0] = offset - offset[0]
        table[2] = shard.records["num_tokens"][rows]
        table[3] = shard.encoding[rows] if len(shard.encoding) > 1 else shard.encoding
        table[4] = shard.token_bytes
        last = int((offset + table[1]).max())
        ids = shard.row_tokens or table[2]
        misfit = shard.token_bytes and (table[1] != ids * shard.token_bytes).any()
        if last > shard.num_bytes or table[0].min() < 0 or misfit:
            raise BrokenShard(
                f"{shard.path}: its idx is damaged: it places samples at bytes {int(offset[0])} to {last} of "
                f"{shard.num_bytes}, some of a wrong size or order; "
                f"run: python -m preprocess verify {shard.path.parent}"
            )
        return int(offset[0]), last - int(offset[0])

    def _opened(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        while len(self._open) >= MAX_OPEN_SHARDS:
            os.close(self._open.popitem(last=False)[1].handle)
        source, row = self._shards.locate(number)
        shard = _open_foreign(source) if isinstance(source, ForeignTar) else _open_ours(source, row)
        self._open[number] = shard
        return shard

    @staticmethod
    def _fill(shard: _OpenShard, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(shard.handle, [target[done:]], offset + done)  # may read short
            except OSError as error:
                raise ReadWriteError(
                    f"{shard.path} cannot be read at byte {offset + done}: {error}"
                ) from error
            if count == 0:
                raise BrokenShard(
                    f"{shard.path} ended at byte {offset + done} while it was read; was it replaced?"
                )
            done += count


def _open_ours(source: DatasetShards, row: int) -> _OpenShard:
    shard_id, path = int(source.shard_ids[row]), source.tar(row)
    rerun = rerun_command(shard_id, source.folder)
    records = read_idx(source.folder, source.spec, shard_id)
    if len(records) != source.num_samples[row]:
        raise BrokenShard(
            f"{idx_path(source.folder, shard_id)} has {len(records)} of {source.num_samples[row]} samples; "
            f"run: {rerun}"
        )
    handle, num_bytes = _open_file(path, f"run: {rerun}")
    if num_bytes != source.tar_bytes[row]:
        os.close(handle)
        raise BrokenShard(f"{path} has {num_bytes} of {source.tar_bytes[row]} bytes; run: {rerun}")
    is_json = source.spec.kind == "json"
    return _OpenShard(
        path=path,
        handle=handle,
        num_bytes=num_bytes,
        records=records,
        encoding=np.array([JSON if is_json else RAW], np.int8),
        token_bytes=0 if is_json else source.spec.dtype.itemsize,
        row_tokens=source.spec.seq_len,
    )


def _open_foreign(source: ForeignTar) -> _OpenShard:
    handle, num_bytes = _open_file(source.path, "copy it again")
    if num_bytes != source.tar_bytes:
        os.close(handle)
        raise BrokenShard(
            f"{source.path} has {num_bytes} bytes, it had {source.tar_bytes} when it was scanned"
        )
    samples = source.samples
    unknown = np.broadcast_to(np.int64(-1), samples.offset.shape)
    return _OpenShard(
        path=source.path,
        handle=handle,
        num_bytes=num_bytes,
        records={"offset": samples.offset, "num_bytes": samples.num_bytes, "num_tokens": unknown},
        encoding=np.where(samples.is_json, JSON, NPY).astype(np.int8),
        token_bytes=0,
        row_tokens=0,
    )


def _open_file(path: Path, remedy: str) -> tuple[int, int]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be opened: {error}") from error
    return handle, os.fstat(handle).st_size
