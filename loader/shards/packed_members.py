"""The rows of a packed tar of ours whose idx is not there, from its members; see docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

    No ids are read. Raises UnknownMember or BrokenShard.
    """
    parts, forms = [], set()
    for member in members:
        _check_fields(path, member)
        ids = _array(path, tar, member, IDS_FIELD, ("<u2", "<u4"))
        forms.add((ids.shape[-1], ids.dtype.itemsize))
        is_rows = len(ids.shape) == 2 and 0 < ids.shape[1] * ids.dtype.itemsize < 2**32 and ids.shape[0] > 0
        if not is_rows or len(forms) > 1:
            raise BrokenShard(f"{path}: {member.key!r} has ids {ids.shape}, expected rows as those before it")
        parts.append(_rows(path, tar, member, ids))
    row_tokens, token_bytes = forms.pop()
    return np.concatenate(parts), row_tokens, token_bytes


def _rows(path: Path, tar: TarBytes, member: PackedMember, ids: NpyHeader) -> npt.NDArray[np.void]:
    num_rows, seq_len = ids.shape
    starts = _numbers(path, tar, member, DOC_STARTS_FIELD)
    rows = np.zeros(num_rows, _ROW)
    rows["num_bytes"] = seq_len * ids.dtype.itemsize
    rows["offset"] = member.fields[IDS_FIELD][0] + ids.data_start + np.arange(num_rows) * rows["num_bytes"][0]
    rows["num_tokens"] = seq_len
    if ROW_TOKENS_FIELD in member.fields:
        tokens = _numbers(path, tar, member, ROW_TOKENS_FIELD)
        if tokens.shape != (num_rows,) or not 0 < tokens.min() <= tokens.max() <= seq_len:
            raise BrokenShard(
                f"{path}: {ROW_TOKENS_FIELD} of {member.key!r} has {tokens[:4].tolist()} ..., expected "
                f"{num_rows} numbers from 1 to {seq_len}"
            )
        rows["num_tokens"] = tokens
    if not (starts < num_rows * seq_len).all() or (starts[1:] <= starts[:-1]).any():
        raise BrokenShard(
            f"{path}: {DOC_STARTS_FIELD} of {member.key!r} has {starts[:4].tolist()} ..., expected ascending "
            f"numbers below {num_rows * seq_len}"
        )
    edges = np.searchsorted(starts, np.arange(num_rows + 1) * seq_len)
    rows["num_starts"] = np.diff(edges)
    starts_end = sum(member.fields[DOC_STARTS_FIELD])
    rows["starts_offset"] = starts_end - starts.nbytes + edges[:-1] * starts.itemsize
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


def _array(path: Path, tar: TarBytes, member: PackedMember, field: str, dtypes: tuple[str, ...]) -> NpyHeader:
    """The header of a member, which must be an array of one of some types, and of the member's size."""
    if field not in member.fields:
        raise BrokenShard(f"{path}: {member.key!r} has no {field}")
    offset, num_bytes = member.fields[field]
    header = _header(tar, offset)
    if header is None or header.dtype.str not in dtypes:
        found = "none" if header is None else header.dtype.str
        raise BrokenShard(
            f"{path}: {field} of {member.key!r} is no .npy of {' or '.join(dtypes)}, but of {found}"
        )
    if header.num_bytes != num_bytes:
        raise BrokenShard(
            f"{path}: {field} of {member.key!r} has {num_bytes} bytes, its header says {header.num_bytes}"
        )
    return header


def _numbers(path: Path, tar: TarBytes, member: PackedMember, field: str) -> npt.NDArray[np.uint32]:
    """The numbers of a small member: uint32[n]."""
    header = _array(path, tar, member, field, ("<u4",))
    offset, num_bytes = member.fields[field]
    if len(header.shape) != 1:
        raise BrokenShard(f"{path}: {field} of {member.key!r} has the shape {header.shape}, expected a list")
    return np.frombuffer(tar[offset + header.data_start : offset + num_bytes], "<u4")
