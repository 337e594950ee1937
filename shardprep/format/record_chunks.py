"""A file of fixed-size records: 64 bytes of header, one record per sample, a crc32 for each 512 records.

An idx is one, and so is a file of crcs/. They are read, never mapped: where a file system fails, a read is an
error that can be tried again, and a mapped page a SIGBUS that ends the process without a word.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard
from shardprep.regular_files import close_read, open_regular

HEADER_BYTES = 64
CHUNK_RECORDS = 512  # share a crc32, and are read together: of an idx 14 KB of documents, 20 KB of rows
CHUNK_CRC = np.dtype("<u4")

_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def record_file_bytes(record_bytes: int, num_records: _Number) -> _Number:
    """Bytes of a file: header, records and their crc32s; of an array of numbers, an array."""
    num_chunks = -(-num_records // CHUNK_RECORDS)
    return HEADER_BYTES + num_records * record_bytes + num_chunks * CHUNK_CRC.itemsize


def _num_records(path: Path, num_bytes: int, record_bytes: int) -> int:
    """How many records make a file of that size; one number at most does. Raises BrokenShard."""
    body_bytes = num_bytes - HEADER_BYTES
    num_chunks, rest_bytes = divmod(body_bytes, CHUNK_RECORDS * record_bytes + CHUNK_CRC.itemsize)
    num_records = num_chunks * CHUNK_RECORDS + max(0, rest_bytes - CHUNK_CRC.itemsize) // record_bytes
    if num_bytes != record_file_bytes(record_bytes, num_records):
        raise BrokenShard(
            f"{path} is cut short: no number of records of {record_bytes} bytes, with their crc32s, takes "
            f"{body_bytes} bytes"
        )
    return num_records


class ChunkCrcs:
    """The crc32 of each CHUNK_RECORDS records, taken while they are written one after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._chunk_bytes = CHUNK_RECORDS * dtype.itemsize
        self._crcs: list[int] = []
        self._num_bytes = 0  # of all records so far

    def add(self, records: bytes) -> None:
        """Take the next records, any number of them."""
        view = memoryview(records)
        while view:
            in_chunk = self._num_bytes % self._chunk_bytes
            part = view[: self._chunk_bytes - in_chunk]
            if in_chunk:
                self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            else:
                self._crcs.append(zlib.crc32(part))
            self._num_bytes += len(part)
            view = view[len(part) :]

    def table(self) -> bytes:
        """What stands behind the records."""
        return np.array(self._crcs, CHUNK_CRC).tobytes()


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    """A file of records, open, its header and size checked; close ``handle`` with ``close_read``."""

    path: Path
    handle: int
    dtype: np.dtype[Any]
    num_samples: int
    crcs: npt.NDArray[np.uint32]  # one a chunk
    checked: bytearray  # of each chunk, whether its crc32 was compared
    remedy: str

    def place(self, rows: slice) -> tuple[int, int]:
        """Where to read for some rows: first byte and number of bytes.

        The chunks that hold the rows, or the rows alone once these chunks were found to be right.
        """
        first, end = self._rows_to_read(rows)
        size = self.dtype.itemsize
        return HEADER_BYTES + first * size, (end - first) * size

    def records(self, rows: slice, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
        """The records of some rows, given the bytes that ``place`` told to read. Raises BrokenShard.

        A chunk is checked once while the file is open: crc32 takes 10 us for 20 KB of records, where reading
        the ids of as many rows takes 0.7 ms (one core, in the page cache).
        """
        if self._is_checked(rows):
            return data.view(self.dtype)
        first, _ = self._rows_to_read(rows)
        size = CHUNK_RECORDS * self.dtype.itemsize
        for place in range(0, len(data), size):
            self._check(first // CHUNK_RECORDS + place // size, data[place : place + size])
        return data.view(self.dtype)[rows.start - first : rows.stop - first]

    def check_values(self, records: npt.NDArray[np.void]) -> None:
        """What must hold of a chunk besides its crc32: here nothing. Raises BrokenShard."""

    def _check(self, chunk: int, data: npt.NDArray[np.uint8]) -> None:
        """Compare the crc32 of a chunk. Raises BrokenShard."""
        if zlib.crc32(data.data) != self.crcs[chunk]:
            raise BrokenShard(
                f"{self.path} is damaged: the crc32 of its records from {chunk * CHUNK_RECORDS} on is not "
                f"the one written; {self.remedy}"
            )
        self.check_values(data.view(self.dtype))
        self.checked[chunk] = True

    def _is_checked(self, rows: slice) -> bool:
        return 0 not in self.checked[rows.start // CHUNK_RECORDS : -(-rows.stop // CHUNK_RECORDS)]

    def _rows_to_read(self, rows: slice) -> tuple[int, int]:
        """The rows, widened to whole chunks where some of these were not checked: first and end."""
        if self._is_checked(rows):
            return rows.start, rows.stop
        first = rows.start // CHUNK_RECORDS * CHUNK_RECORDS
        return first, min(-(-rows.stop // CHUNK_RECORDS) * CHUNK_RECORDS, self.num_samples)

    def read_all(self) -> npt.NDArray[np.void]:
        """Every record, in memory. Raises BrokenShard; OSError."""
        rows = slice(0, self.num_samples)
        return self.records(rows, _read(self.path, self.handle, *self.place(rows)))


_File = TypeVar("_File", bound=RecordFile)


def open_records(
    kind: type[_File],
    path: Path,
    dtype: np.dtype[Any],
    *,
    check_header: Callable[[bytes], None],
    remedy: str,
) -> _File:
    """Open a file of records; ``check_header`` is given its first 64 bytes, or all if it has fewer.

    Raises what that raises, and BrokenShard for a size that no number of records has; OSError.
    """
    handle = open_regular(path)
    try:
        check_header(_read(path, handle, 0, HEADER_BYTES, whole=False).tobytes())
        num_bytes = os.fstat(handle).st_size
        num_samples = _num_records(path, num_bytes, dtype.itemsize)
        crcs_bytes = -(-num_samples // CHUNK_RECORDS) * CHUNK_CRC.itemsize
        crcs = _read(path, handle, num_bytes - crcs_bytes, crcs_bytes).view(CHUNK_CRC)
    except BaseException:
        close_read(handle)
        raise
    return kind(
        path=path,
        handle=handle,
        dtype=dtype,
        num_samples=num_samples,
        crcs=crcs,
        checked=bytearray(len(crcs)),
        remedy=remedy,
    )


def _read(
    path: Path, handle: int, offset: int, num_bytes: int, *, whole: bool = True
) -> npt.NDArray[np.uint8]:
    """Bytes of a file. Raises BrokenShard where it ends before, if ``whole``; OSError with its path."""
    data, done = np.empty(num_bytes, np.uint8), 0
    try:
        while done < num_bytes and (count := os.preadv(handle, [data.data[done:]], offset + done)):
            done += count  # reads may be short
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if whole and done < num_bytes:
        raise BrokenShard(f"{path} ended at byte {offset + done} while it was read; was it replaced?")
    return data[:done]
