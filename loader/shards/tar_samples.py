"""Where the samples of a tar without an idx lie: one scan of its headers.

Keys are formed as webdataset forms them: a member's name up to its first dot is the key, the rest
the field, members of one sample stand together. Understands ustar, PAX and GNU names, as Python's
tarfile writes them for webdataset's TarWriter. A scan costs about 10 us a header. It reads no data but
16 samples for the fingerprint; where lengths are needed beforehand, it reads everything once, at about
1 GB/s, and notes each sample's last id. Tars of our packed rows are known by their two-dimensional ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loader.shards.npy_header import parse_npy_header
from loader.shards.packed_members import PackedMember, is_packed, packed_rows
from loader.shards.tar_bytes import TarBytes
from loader.shards.tar_members import tar_members
from preprocess.shard_format import RESERVED_FIELD, BrokenShard, UnknownMember

JSON, NPY, RAW = 0, 1, 2  # how ids lie: JSON text, a whole .npy file, or bare integers
TOKEN_FIELDS = {"token_ids.json": JSON, "token_ids.npy": NPY}
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's base_plus_ext
_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips such names


_MOST_DIGITS = 10  # of an id
_FINGERPRINTED = 16  # samples whose bytes enter a tar's fingerprint

Fields = dict[str, tuple[int, int]]  # field -> (offset, size) of its member


@dataclass(frozen=True, kw_only=True)
class TarSamples:
    """Where the token ids of a tar's samples lie. All arrays have a row a sample, in tar order."""

    offset: npt.NDArray[np.int64]  # byte in the tar where the ids begin; of NPY, their .npy header
    num_bytes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]  # -1 where they were not counted
    last_id: npt.NDArray[np.int64]  # -1 where tokens were not counted, or there are none
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW
    starts_offset: npt.NDArray[np.int64]  # of packed rows, as in the idx; else 0
    num_starts: npt.NDArray[np.int64]
    token_bytes: int  # of a RAW id
    row_tokens: int  # of packed rows, else 0
    fingerprint: str  # of sizes, places and some samples' bytes


def scan_tar(path: Path, *, count_tokens: bool = False) -> TarSamples:
    """Index a tar by its headers; with ``count_tokens`` by its data, too.

    Raises BrokenShard where the tar is cut short, even at a member's end, is compressed or no tar,
    or where a sample has no token ids; UnknownMember for a member that would change the training; OSError.
    """
    with TarBytes(path) as tar:
        found = _group_members(path, tar_members(path, tar))
        if found and is_packed(tar, found[0][1]):
            return _rows_of(path, tar, found)
        return _documents_of(path, tar, found, count_tokens)


def _documents_of(path: Path, tar: TarBytes, found: list[tuple[str, Fields]], count: bool) -> TarSamples:
    members = [_token_member(path, key, fields) for key, fields in found]
    table = np.array(members, np.int64).reshape(len(members), 3)
    offset, num_bytes, encoding = (table[:, column].copy() for column in range(3))
    tokens = np.full((len(members), 2), -1, np.int64)
    if count and members:
        tokens[:] = [_count_tokens(tar, *member) for member in members]
    nothing = np.zeros(len(members), np.int64)
    return TarSamples(
        offset=offset,
        num_bytes=num_bytes,
        num_tokens=tokens[:, 0].copy(),
        last_id=tokens[:, 1].copy(),
        encoding=encoding.astype(np.int8),
        starts_offset=nothing,
        num_starts=nothing,
        token_bytes=0,
        row_tokens=0,
        fingerprint=_fingerprint(tar, offset, num_bytes),
    )


def _rows_of(path: Path, tar: TarBytes, found: list[tuple[str, Fields]]) -> TarSamples:
    members = [PackedMember(key=key, fields=fields) for key, fields in found]
    rows, row_tokens, token_bytes = packed_rows(path, tar, members)
    return TarSamples(
        **{name: rows[name].astype(np.int64) for name in rows.dtype.names or ()},
        last_id=np.full(len(rows), -1, np.int64),
        encoding=np.full(len(rows), RAW, np.int8),
        token_bytes=token_bytes,
        row_tokens=row_tokens,
        fingerprint=_fingerprint(tar, rows["offset"], rows["num_bytes"]),
    )


def _fingerprint(tar: TarBytes, offset: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]) -> str:
    digest = hashlib.sha256(np.stack([offset, num_bytes]).astype("<i8").tobytes())
    for row in range(0, len(offset), max(len(offset) // _FINGERPRINTED, 1)):
        digest.update(tar[int(offset[row]) : int(offset[row] + num_bytes[row])])
    return digest.hexdigest()


def _count_tokens(tar: TarBytes, offset: int, num_bytes: int, encoding: int) -> tuple[int, int]:
    """Number of a member's ids, and the last one or -1; the others are not made.

    What is no list of ids is found when it is decoded. 2 us a JSON document of 30 tokens.
    """
    raw = tar[offset : offset + num_bytes]
    if encoding == JSON:
        last = raw.rpartition(b",")[2].strip(b"[] \t\r\n")
        is_id = last.isdigit() and len(last) <= _MOST_DIGITS
        return (raw.count(b",") + 1 if last else 0), (int(last) if is_id else -1)
    header = parse_npy_header(raw)
    if header is None or len(header.shape) != 1 or not header.shape[0] or header.num_bytes != len(raw):
        return 0, -1
    last_id = int(np.frombuffer(raw[-header.dtype.itemsize :], header.dtype)[0])
    return header.shape[0], last_id if 0 <= last_id < 2**31 else -1


def _group_members(path: Path, members: Iterator[tuple[str, int, int]]) -> list[tuple[str, Fields]]:
    """Members of one sample, which stand together: (key, its fields)."""
    found: list[tuple[str, Fields]] = []
    for name, offset, num_bytes in members:
        match = _KEY_AND_FIELD.match(name)
        if match is None or _META.match(name):
            continue
        if not found or match[1] != found[-1][0]:
            found.append((match[1], {}))
        key, fields = found[-1]
        field = match[2].lower()
        if field in fields:
            raise BrokenShard(
                f"{path} has two members {field!r} for sample {key!r}; what stands before a name's first "
                "dot is the sample's key, so keys may hold no dot and must differ"
            )
        fields[field] = (offset, num_bytes)
    return found


def _token_member(path: Path, key: str, fields: Fields) -> tuple[int, int, int]:
    if RESERVED_FIELD in fields:
        raise UnknownMember(
            f"{path}: sample {key!r} has a {RESERVED_FIELD}; this version cannot apply it, and leaving it "
            "out would change the training"
        )
    for field, encoding in TOKEN_FIELDS.items():
        if field in fields:
            return (*fields[field], encoding)
    raise BrokenShard(
        f"{path}: sample {key!r} has the fields {', '.join(sorted(fields))}, expected "
        f"{' or '.join(TOKEN_FIELDS)}; what stands before a name's first dot is the sample's key"
    )
