"""shard-N.idx: 64 bytes of header, then one fixed-size record a sample."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.shard_format.errors import (
    BrokenShard,
    MissingShard,
    OtherPlan,
    ReadWriteError,
    UnknownVersion,
)
from preprocess.shard_format.manifest import DatasetSpec, version_message
from preprocess.shard_format.names import FORMAT_VERSION, idx_path, rerun_command

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


def idx_dtype(kind: str) -> np.dtype[Any]:
    return IDX_ROW if kind == "packed" else IDX_DOCUMENT


@dataclass(frozen=True, kw_only=True)
class IdxFile:
    """An idx, open for reading, its header checked; close ``handle`` with ``os.close``.

    It is read, never mapped: where a file system fails, a read is an error that can be tried again, and a
    mapped page a SIGBUS that ends the process without a word.
    """

    path: Path
    handle: int
    dtype: np.dtype[Any]  # IDX_DOCUMENT or IDX_ROW
    num_samples: int

    def place(self, rows: slice) -> tuple[int, int]:
        """Where the records of some rows lie in the file: first byte and number of bytes."""
        size = self.dtype.itemsize
        return IDX_HEADER.itemsize + rows.start * size, (rows.stop - rows.start) * size

    def read_all(self) -> npt.NDArray[np.void]:
        """Every record, in memory. Raises BrokenShard where the file ends before; OSError."""
        offset, num_bytes = self.place(slice(0, self.num_samples))
        records = _read(self.path, self.handle, offset, num_bytes)
        if len(records) < num_bytes:
            raise BrokenShard(f"{self.path} ended at byte {offset + len(records)} while it was read")
        return records.view(self.dtype)


def open_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> IdxFile:
    """Open a shard's idx and check its header and size.

    Raises MissingShard, UnknownVersion, OtherPlan or BrokenShard; OSError where the file system fails.
    """
    path = idx_path(folder, shard_id)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}") from None
    try:
        header = _read(path, handle, 0, IDX_HEADER.itemsize).tobytes()
        _check_header(path, header, idx_header(spec, shard_id))
        num_samples = _count_records(path, os.fstat(handle).st_size, idx_dtype(spec.kind))
    except BaseException:
        os.close(handle)
        raise
    return IdxFile(path=path, handle=handle, dtype=idx_dtype(spec.kind), num_samples=num_samples)


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


def _read(path: Path, handle: int, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of a file; fewer where it ends before. Raises OSError with its path."""
    data, done = np.empty(num_bytes, np.uint8), 0
    try:
        while done < num_bytes and (count := os.preadv(handle, [data.data[done:]], offset + done)):
            done += count  # reads may be short
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return data[:done]


def _count_records(path: Path, num_bytes: int, dtype: np.dtype[Any]) -> int:
    body_bytes = num_bytes - IDX_HEADER.itemsize
    if body_bytes % dtype.itemsize:
        raise BrokenShard(f"{path} is cut short: {body_bytes} bytes are no multiple of {dtype.itemsize}")
    return body_bytes // dtype.itemsize


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
