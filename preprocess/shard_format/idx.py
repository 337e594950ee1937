"""shard-N.idx: 64 bytes of header, then one fixed-size record a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.shard_format.errors import BrokenShard, MissingShard, OtherPlan, UnknownVersion
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


def read_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> npt.NDArray[np.void]:
    """Map a shard's idx: a read-only structured array of IDX_DOCUMENT or IDX_ROW, one a sample.

    Raises MissingShard, UnknownVersion, OtherPlan or BrokenShard.
    """
    path = idx_path(folder, shard_id)
    try:
        raw = np.memmap(path, mode="r", dtype=np.uint8)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}") from None
    except (ValueError, OSError) as error:  # an empty file cannot be mapped
        raise BrokenShard(f"{path} cannot be read as an idx: {error}") from None
    header = raw[: IDX_HEADER.itemsize].tobytes()
    if len(header) < IDX_HEADER.itemsize or not header.startswith(IDX_MAGIC):
        raise BrokenShard(f"{path} is not an idx: it begins {header[:8]!r}, expected {IDX_MAGIC!r}")
    version = int(np.frombuffer(header, IDX_HEADER)["version"][0])
    if version != FORMAT_VERSION:
        raise UnknownVersion(version_message(path, version))
    expected = idx_header(spec, shard_id)
    if header != expected:
        found = np.frombuffer(header, IDX_HEADER)[0]
        raise OtherPlan(f"{path} was written for {found}, expected {np.frombuffer(expected, IDX_HEADER)[0]}")
    body = raw[IDX_HEADER.itemsize :]
    dtype = idx_dtype(spec.kind)
    if len(body) % dtype.itemsize:
        raise BrokenShard(f"{path} is cut short: {len(body)} bytes are no multiple of {dtype.itemsize}")
    return body.view(dtype)


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
