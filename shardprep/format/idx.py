"""shard-N.idx: where each sample lies in the tar, and where it came from; a file of records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, MissingShard, OtherPlan, ReadWriteError, UnknownVersion
from shardprep.format.checked_json import version_message
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.names import FORMAT_VERSION, idx_path, remake_command, rerun_command
from shardprep.format.record_chunks import RecordFile, open_records, record_file_bytes
from shardprep.regular_files import NOT_THERE, close_read

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
IDX_KINDS = ("json", "npy", "packed", "chat")
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
IDX_CHAT_ROW = np.dtype(
    [
        *((name, IDX_ROW[name]) for name in IDX_ROW.names or ()),
        ("mask_offset", "<u8"),  # byte in the tar of the row's part of loss_mask, a byte per token
    ]
)
_DTYPES = {"packed": IDX_ROW, "chat": IDX_CHAT_ROW}
MAX_SAMPLES = 2**40
MAX_OFFSET = 2**62  # sums with it stay in an int64; who reads at it compares it with the tar's size


_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def idx_dtype(kind: str) -> np.dtype[Any]:
    """Of a record: IDX_DOCUMENT, IDX_ROW or IDX_CHAT_ROW."""
    return _DTYPES.get(kind, IDX_DOCUMENT)


def idx_num_bytes(kind: str, num_samples: _Number) -> _Number:
    """Bytes of an idx: header, records and their crc32s; of an array of numbers, an array."""
    return record_file_bytes(idx_dtype(kind).itemsize, num_samples)


@dataclass(frozen=True, kw_only=True)
class IdxFile(RecordFile):
    """An idx, open for reading; its records are IDX_DOCUMENT or IDX_ROW."""

    def check_values(self, records: npt.NDArray[np.void]) -> None:
        """That no offset is beyond all tars. Raises BrokenShard."""
        if (last := int(records["offset"].max())) > MAX_OFFSET:
            raise BrokenShard(f"{self.path} places a sample at byte {last} of a tar; {self.remedy}")


def open_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> IdxFile:
    """Open a shard's idx and check its header and size.

    Raises MissingShard, UnknownVersion, OtherPlan or BrokenShard; OSError where the file system fails.
    """
    path = idx_path(folder, shard_id)
    expected = idx_header(spec, shard_id)
    try:
        return open_records(
            IdxFile,
            path,
            idx_dtype(spec.kind),
            check_header=lambda header: _check_header(path, header, expected),
            remedy=f"run: {remake_command(shard_id, folder)}",
        )
    except NOT_THERE:
        raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}") from None


def read_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> npt.NDArray[np.void]:
    """A shard's whole idx in memory: a structured array of ``idx_dtype``, one a sample.

    Raises MissingShard, UnknownVersion, OtherPlan, BrokenShard, or ReadWriteError.
    """
    path = idx_path(folder, shard_id)
    try:
        idx = open_idx(folder, spec, shard_id)
        try:
            return idx.read_all()
        finally:
            close_read(idx.handle)
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be read: {error.strerror}") from error


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
