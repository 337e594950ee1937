"""shard-N.idx: 64 bytes of header, a fixed-size record a sample, and a crc32 for every IDX_CHUNK records."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from preprocess.shard_format.checked_json import version_message
from preprocess.shard_format.dataset_spec import DatasetSpec
from preprocess.shard_format.errors import (
    BrokenShard,
    MissingShard,
    OtherPlan,
    ReadWriteError,
    UnknownVersion,
)
from preprocess.shard_format.names import FORMAT_VERSION, idx_path, remake_command, rerun_command
from preprocess.shard_format.regular_files import NOT_THERE, open_regular

IDX_MAGIC = b"shardidx"
IDX_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("kind", "<u4"),  # IDX_KINDS
        ("token_bytes", "<u4"),  # bytes of a token id; 0 where ids are JSON
        ("seq_len", "<u4"),  # 0 unless packed
        ("shard_id", "<u4"),
        ("plan_id", "S32"),  # the first 32 hex digits
        ("zero", "<u4"),
    ]
)
IDX_KINDS = ("json", "npy", "packed")
IDX_DOCUMENT = np.dtype(
    [
        ("offset", "<u8"),  # byte in the tar where the sample's ids begin (past any npy header)
        ("num_bytes", "<u4"),  # bytes of those ids
        ("num_tokens", "<u4"),  # ids in it; in a packed row, without the padding
        ("source", "<u4"),  # position of the input file in plan.json
        ("source_offset", "<u8"),  # byte where its document, or its row's first, begins there
    ]
)
IDX_ROW = np.dtype(
    [
        *((name, IDX_DOCUMENT[name]) for name in IDX_DOCUMENT.names or ()),
        ("starts_offset", "<u8"),  # byte in the tar of the row's part of doc_starts
        ("num_starts", "<u4"),  # documents that begin in the row
    ]
)
IDX_CHUNK = 512  # records that share a crc32, and are read together: 14 KB of documents, 20 KB of rows
IDX_CRC = np.dtype("<u4")
MAX_SAMPLES = 2**40
MAX_OFFSET = 2**62  # sums with it stay in an int64; who reads at it compares it with the tar's size


_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def idx_dtype(kind: str) -> np.dtype[Any]:
    """Of a record: IDX_ROW or IDX_DOCUMENT."""
    return IDX_ROW if kind == "packed" else IDX_DOCUMENT


def idx_num_bytes(kind: str, num_samples: _Number) -> _Number:
    """Bytes of an idx: header, records and their crc32s; of an array of numbers, an array."""
    num_chunks = -(-num_samples // IDX_CHUNK)
    return IDX_HEADER.itemsize + num_samples * idx_dtype(kind).itemsize + num_chunks * IDX_CRC.itemsize


def _num_samples(path: Path, num_bytes: int, kind: str) -> int:
    """How many records make an idx of that size; one number at most does. Raises BrokenShard."""
    record_bytes = idx_dtype(kind).itemsize
    body_bytes = num_bytes - IDX_HEADER.itemsize
    num_chunks, rest_bytes = divmod(body_bytes, IDX_CHUNK * record_bytes + IDX_CRC.itemsize)
    num_records = max(0, rest_bytes - IDX_CRC.itemsize) // record_bytes
    num_samples = num_chunks * IDX_CHUNK + num_records
    if num_bytes != idx_num_bytes(kind, num_samples):
        raise BrokenShard(
            f"{path} is cut short: no number of records of {record_bytes} bytes, with their crc32s, takes "
            f"{body_bytes} bytes"
        )
    return num_samples


class ChunkCrcs:
    """The crc32 of each IDX_CHUNK records, taken while they are written one after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._chunk_bytes = IDX_CHUNK * dtype.itemsize
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
        return np.array(self._crcs, IDX_CRC).tobytes()


@dataclass(frozen=True, kw_only=True)
class IdxFile:
    """An idx, open for reading, its header and size checked; close ``handle`` with ``os.close``.

    It is read, never mapped: where a file system fails, a read is an error that can be tried again, and a
    mapped page a SIGBUS that ends the process without a word.
    """

    path: Path
    handle: int
    dtype: np.dtype[Any]  # IDX_DOCUMENT or IDX_ROW
    num_samples: int
    crcs: npt.NDArray[np.uint32]  # one a chunk
    remedy: str

    def place(self, rows: slice) -> tuple[int, int]:
        """Where the chunks that hold some rows lie in the file: first byte and number of bytes."""
        first, end = self._chunk_rows(rows)
        size = self.dtype.itemsize
        return IDX_HEADER.itemsize + first * size, (end - first) * size

    def records(self, rows: slice, chunks: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
        """The records of some rows, given the bytes that ``place`` tells. Raises BrokenShard.

        Costs a crc32 of the chunks: 14 us for 512 documents, where reading and decoding them takes 0.5 ms.
        """
        first, _ = self._chunk_rows(rows)
        size = IDX_CHUNK * self.dtype.itemsize
        data = chunks.data
        for number, crc in enumerate(self.crcs[first // IDX_CHUNK :][: -(-len(chunks) // size)].tolist()):
            if zlib.crc32(data[number * size : (number + 1) * size]) != crc:
                chunk = first // IDX_CHUNK + number
                raise BrokenShard(
                    f"{self.path} is damaged: the crc32 of its records from {chunk * IDX_CHUNK} on is not "
                    f"the one written; {self.remedy}"
                )
        records = chunks.view(self.dtype)[rows.start - first : rows.stop - first]
        if len(records) and (last := int(records["offset"].max())) > MAX_OFFSET:
            raise BrokenShard(f"{self.path} places a sample at byte {last} of a tar; {self.remedy}")
        return records

    def read_all(self) -> npt.NDArray[np.void]:
        """Every record, in memory. Raises BrokenShard; OSError."""
        rows = slice(0, self.num_samples)
        return self.records(rows, _read(self.path, self.handle, *self.place(rows)))

    def _chunk_rows(self, rows: slice) -> tuple[int, int]:
        """The first row and the end of the chunks that hold some rows."""
        first = rows.start // IDX_CHUNK * IDX_CHUNK
        return first, min(-(-rows.stop // IDX_CHUNK) * IDX_CHUNK, self.num_samples)


def open_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> IdxFile:
    """Open a shard's idx and check its header and size.

    Raises MissingShard, UnknownVersion, OtherPlan or BrokenShard; OSError where the file system fails.
    """
    path = idx_path(folder, shard_id)
    try:
        handle = open_regular(path)
    except NOT_THERE:
        raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}") from None
    try:
        header = _read(path, handle, 0, IDX_HEADER.itemsize, whole=False).tobytes()
        _check_header(path, header, idx_header(spec, shard_id))
        num_bytes = os.fstat(handle).st_size
        num_samples = _num_samples(path, num_bytes, spec.kind)
        crcs_bytes = -(-num_samples // IDX_CHUNK) * IDX_CRC.itemsize
        crcs = _read(path, handle, num_bytes - crcs_bytes, crcs_bytes).view(IDX_CRC)
    except BaseException:
        os.close(handle)
        raise
    return IdxFile(
        path=path,
        handle=handle,
        dtype=idx_dtype(spec.kind),
        num_samples=num_samples,
        crcs=crcs,
        remedy=f"run: {remake_command(shard_id, folder)}",
    )


def read_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> npt.NDArray[np.void]:
    """A shard's whole idx in memory: a structured array of IDX_DOCUMENT or IDX_ROW, one a sample.

    Raises MissingShard, UnknownVersion, OtherPlan, BrokenShard, or ReadWriteError.
    """
    path = idx_path(folder, shard_id)
    try:
        idx = open_idx(folder, spec, shard_id)
        try:
            return idx.read_all()
        finally:
            os.close(idx.handle)
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be read: {error.strerror}") from error


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


def _check_header(path: Path, header: bytes, expected: bytes) -> None:
    if len(header) < IDX_HEADER.itemsize or not header.startswith(IDX_MAGIC):
        raise BrokenShard(f"{path} is not an idx: it begins {header[:8]!r}, expected {IDX_MAGIC!r}")
    version = int(np.frombuffer(header, IDX_HEADER)["version"][0])
    if version != FORMAT_VERSION:
        raise UnknownVersion(version_message(path, version))
    if header != expected:
        found = np.frombuffer(header, IDX_HEADER)[0]
        raise OtherPlan(f"{path} was written for {found}, expected {np.frombuffer(expected, IDX_HEADER)[0]}")


def idx_header(spec: DatasetSpec, shard_id: int) -> bytes:
    """The 64 bytes that begin an idx."""
    fields = (
        IDX_MAGIC,
        FORMAT_VERSION,
        IDX_KINDS.index(spec.kind),
        0 if spec.kind == "json" else spec.dtype.itemsize,
        spec.seq_len,
        shard_id,
        spec.plan_id[:32].encode(),
        0,
    )
    return np.array([fields], IDX_HEADER).tobytes()
