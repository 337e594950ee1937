"""The rows of a packed tar of ours whose idx is not there, from its members; see docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shards.npy_header import NpyHeader, parse_npy_header
from loader.shards.tar_bytes import TarBytes
from preprocess.shard_format import (
    DOC_STARTS_FIELD,
    IDX_ROW,
    RESERVED_FIELD,
    ROW_TOKENS_FIELD,
    BrokenShard,
    UnknownMember,
)

IDS_FIELD = "token_ids.npy"
_KNOWN = {IDS_FIELD, DOC_STARTS_FIELD, ROW_TOKENS_FIELD}
_HEADER_BYTES = 4096
_COLUMNS = ("offset", "num_bytes", "num_tokens", "starts_offset", "num_starts")
_ROW = np.dtype([(name, IDX_ROW[name]) for name in _COLUMNS])


@dataclass(frozen=True, kw_only=True)
class PackedMember:
    """One sample of the tar: a group of rows."""

    key: str
    fields: dict[str, tuple[int, int]]  # field -> (offset, size) of its member


def is_packed(tar: TarBytes, fields: dict[str, tuple[int, int]]) -> bool:
    """Whether a sample's ids are rows, ``[rows, seq_len]``."""
    if IDS_FIELD not in fields:
        return False
    header = _header(tar, fields[IDS_FIELD][0])
    return header is not None and len(header.shape) == 2 and DOC_STARTS_FIELD in fields


def packed_rows(
    path: Path, tar: TarBytes, members: list[PackedMember]
) -> tuple[npt.NDArray[np.void], int, int]:
    """All rows as the idx has them, without their sources; with seq_len and the bytes of an id.

    Raises UnknownMember or BrokenShard.
    """
    parts, forms = [], set()
    for member in members:
        _check_fields(path, member)
        ids = _numbers(path, tar, member, IDS_FIELD)
        forms.add((ids.shape[-1], ids.dtype.itemsize))
        if ids.ndim != 2 or len(forms) > 1:
            raise BrokenShard(f"{path}: {member.key!r} has ids {ids.shape}, expected rows as those before it")
        parts.append(_rows(path, tar, member, ids))
    row_tokens, token_bytes = forms.pop()
    return np.concatenate(parts), row_tokens, token_bytes


def _rows(path: Path, tar: TarBytes, member: PackedMember, ids: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    num_rows, seq_len = ids.shape
    starts = _numbers(path, tar, member, DOC_STARTS_FIELD)
    rows = np.zeros(num_rows, _ROW)
    rows["num_bytes"] = seq_len * ids.dtype.itemsize
    rows["offset"] = _data_start(path, tar, member, IDS_FIELD) + np.arange(num_rows) * rows["num_bytes"][0]
    rows["num_tokens"] = seq_len
    if ROW_TOKENS_FIELD in member.fields:
        rows["num_tokens"] = _numbers(path, tar, member, ROW_TOKENS_FIELD)
    edges = np.searchsorted(starts, np.arange(num_rows + 1) * seq_len)
    rows["num_starts"] = np.diff(edges)
    rows["starts_offset"] = _data_start(path, tar, member, DOC_STARTS_FIELD) + edges[:-1] * 4
    return rows


def _check_fields(path: Path, member: PackedMember) -> None:
    unknown = member.fields.keys() - _KNOWN
    if RESERVED_FIELD in unknown or unknown or IDS_FIELD not in member.fields:
        raise UnknownMember(
            f"{path}: {member.key!r} has the fields {', '.join(sorted(member.fields))}, expected of "
            f"{', '.join(sorted(_KNOWN))}; leaving one out could change the training"
        )


def _header(tar: TarBytes, offset: int) -> NpyHeader | None:
    return parse_npy_header(tar[offset : offset + _HEADER_BYTES])


def _data_start(path: Path, tar: TarBytes, member: PackedMember, field: str) -> int:
    offset = member.fields[field][0]
    header = _header(tar, offset)
    if header is None:
        raise BrokenShard(f"{path}: {field} of {member.key!r} is no .npy of integers")
    return offset + header.data_start


def _numbers(path: Path, tar: TarBytes, member: PackedMember, field: str) -> npt.NDArray[Any]:
    if field not in member.fields:
        raise BrokenShard(f"{path}: {member.key!r} has no {field}")
    offset, num_bytes = member.fields[field]
    header = _header(tar, offset)
    if header is None or header.dtype.byteorder == ">":
        raise BrokenShard(f"{path}: {field} of {member.key!r} is no little-endian .npy of integers")
    count = int(np.prod(header.shape, dtype=np.int64))
    if header.data_start + count * header.dtype.itemsize != num_bytes:
        raise BrokenShard(
            f"{path}: {field} of {member.key!r} has {num_bytes} bytes, not what its header says"
        )
    raw = tar[offset + header.data_start : offset + num_bytes]
    return np.frombuffer(raw, header.dtype).reshape(header.shape)
