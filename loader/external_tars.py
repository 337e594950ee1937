"""Tars that have no idx: their members and samples, by one scan of the headers.

A header that says nothing unusual is read here, in about 5 us; all others by Python's tarfile, as webdataset
does. The bytes of the tar are read, not mapped: a failing page of a map would end the process with SIGBUS.

Keys are formed as webdataset forms them: a member's name up to its first dot is the key, the rest is the
field, and members of one sample stand together. Where lengths are needed beforehand a scan reads everything
once, at about 1 GB/s. Tars of our packed rows are known by their two-dimensional ids, see docs/format.md.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import adler32

import numpy as np
import numpy.typing as npt

from loader.order import Int64s
from shardprep.errors import BrokenShard, UnknownMember
from shardprep.files import ReadFile
from shardprep.format.names import BLOCK_BYTES, DOC_STARTS_FIELD, LOSS_MASK_FIELD, ROW_TOKENS_FIELD

_LEAST_BYTES, _MOST_BYTES = 4 << 10, 1 << 20
_MOST_EXTENDED_BYTES = 1 << 20  # of a long name or PAX records; a path has 4,096 at most


class TarBytes:
    """Read-only; use it in ``with``. ``tar[first:end]`` is ``bytes``, shorter at the file's end.

    It keeps the last block that it read, which grows to 1 MiB while slices follow each other closely and
    is 4 KiB where they are far apart: 0.3 us a slice. Raises as ``ReadFile`` does.
    """

    def __init__(self, path: Path) -> None:
        self._file = ReadFile(path)
        self._block = b""
        self._first = self._end = 0  # of the block
        self._ahead_bytes = _LEAST_BYTES
        self._position = 0  # of tarfile

    def __len__(self) -> int:
        return self._file.num_bytes

    def __getitem__(self, part: slice) -> bytes:
        first, end = part.start, min(part.stop, len(self))
        if first < self._first or end > self._end:
            is_near = self._first <= first < self._end + self._ahead_bytes
            self._ahead_bytes = min(4 * self._ahead_bytes, _MOST_BYTES) if is_near else _LEAST_BYTES
            num_bytes = max(min(max(end - first, self._ahead_bytes), len(self) - first), 0)
            self._block = bytes(self._file.read(first, num_bytes))
            self._first, self._end = first, first + num_bytes
        return self._block[first - self._first : end - self._first]

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position

    def read(self, num_bytes: int) -> bytes:
        """As tarfile asks: a header, or what one says of the next member."""
        if num_bytes > _MOST_EXTENDED_BYTES:
            raise BrokenShard(
                f"{self._file.path} is damaged: the long name at byte {self._position - BLOCK_BYTES} has "
                f"{num_bytes:,} bytes, expected at most {_MOST_EXTENDED_BYTES:,}; write or copy it again"
            )
        data = self[self._position : self._position + num_bytes]
        self._position += len(data)
        return data

    def __enter__(self) -> TarBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


_ZERO_BLOCK = bytes(BLOCK_BYTES)
_PIECE_BYTES = 1 << 20
_KINDS = b"\x0001234567xgLK"  # files, links, folders, devices; and headers that say more of the next one
_SIZE = re.compile(r"\d{1,18}")
_TIME = re.compile(rb"(\d\d) [acm]time=[\d.]+\n")
# Records that change which bytes a member has; a global one would change all members.
_LAYOUT_KEYS = {"path", "size", "hdrcharset"}


def tar_members(path: Path, tar: TarBytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset and size of the data) of every regular file of a tar.

    The same as Python's tarfile finds, or BrokenShard.
    """
    position, size = 0, len(tar)
    archive = tarfile.TarFile(
        fileobj=io.BytesIO(bytes(2 * BLOCK_BYTES)), encoding="utf-8", errors="surrogateescape"
    )
    archive.fileobj = tar  # type: ignore[assignment]
    while True:
        block = tar[position : position + BLOCK_BYTES]
        if block == _ZERO_BLOCK:
            _check_end(path, tar, position)
            return
        if len(block) < BLOCK_BYTES:
            raise BrokenShard(
                f"{path} is cut short: it ends at byte {size} without the two zero blocks that close a "
                "tar; write or copy it again",
                path=path,
                found=f"byte {size}",
                expected="two zero blocks",
            )
        start = position
        if block[156] == ord("x") and _says_a_time_alone(block, tar[position : position + 2 * BLOCK_BYTES]):
            start += 2 * BLOCK_BYTES
        found = _plain_header(tar[start : start + BLOCK_BYTES], "0")
        if found is None:
            name, data, num_bytes, is_file = _unusual_member(path, archive, block, position)
        else:
            (name, num_bytes), data, is_file = found, start + BLOCK_BYTES, True
        if data + num_bytes > size:
            raise BrokenShard(
                f"{path} is cut short: the member at byte {position} needs {data + num_bytes} bytes, the "
                f"file has {size}; write or copy it again"
            )
        position = data + (num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if is_file:
            yield name, data, num_bytes


def _says_a_time_alone(block: bytes, both: bytes) -> bool:
    """Whether a PAX header has one record, a time, as webdataset writes before each member."""
    header = _plain_header(block, "x")
    record = None if header is None else _TIME.fullmatch(both[BLOCK_BYTES:].rstrip(b"\0"))
    return header is not None and record is not None and header[1] == int(record[1]) == len(record[0])


def _plain_header(block: bytes, kind: str) -> tuple[str, int] | None:
    """Name and size of a header of this kind; None where tarfile has to look: bytes[512]. 5 us."""
    if len(block) < BLOCK_BYTES or block[156] != ord(kind) or block[345]:
        return None
    said, size = block[148:154], block[124:135]
    if not (said.isdigit() and size.isdigit() and block[135] in b"\0 " and block[154] in b"\0 "):
        return None
    if b"8" in size or b"9" in size or b"8" in said or b"9" in said:
        return None
    # Adler's lower half is 1 + the sum modulo 65,521, which no 256 bytes reach; 20 times as fast as sum.
    parts = adler32(block[:148]), adler32(block[156:356]), adler32(block[356:])
    counted = sum(part & 0xFFFF for part in parts) - 3 + 8 * ord(" ")
    if int(said, 8) != counted or not _are_numbers(block[100:124] + block[136:148] + block[329:345]):
        return None
    return block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape"), int(size, 8)


@lru_cache(maxsize=256)  # most members of a tar have the same
def _are_numbers(fields: bytes) -> bool:
    """Mode, owner, group; time; device. Nothing is made of them, but tarfile ends where one is no number."""
    try:
        for start, end in pairwise((0, 8, 16, 24, 36, 44, 52)):
            tarfile.nti(fields[start:end])  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return False
    return True


def _unusual_member(
    path: Path, archive: tarfile.TarFile, block: bytes, position: int
) -> tuple[str, int, int, bool]:
    """Name, first byte and size of the data, and whether it is a regular file, as tarfile reads the header
    and those before it that say more of the member. Raises BrokenShard."""
    try:
        _check_kind(path, tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").type, position)
        archive.fileobj.seek(position)
        member = tarfile.TarInfo.fromtarfile(archive)
    except tarfile.HeaderError as error:
        if position == 0 and (block[:2] == b"\x1f\x8b" or block[:4] == b"\x28\xb5\x2f\xfd"):
            why = "is compressed; the loader reads at random, so decompress it first"
        elif isinstance(error, tarfile.SubsequentHeaderError):  # type: ignore[attr-defined]
            why = (
                f"is cut short, or damaged: behind the header at byte {position} no whole one stands; write "
                "or copy it again"
            )
        else:
            why = (
                f"is no tar, or is damaged: at byte {position} stands no member's header of a right checksum "
                f"and numbers ({error}); copy it again, or write it again"
            )
        raise BrokenShard(f"{path} {why}", path=path) from None
    _check_kind(path, member.type, member.offset)
    records, shared = member.pax_headers, archive.pax_headers
    has_size = _SIZE.fullmatch(records.get("size", "0"))
    if member.size < 0 or not has_size or not _LAYOUT_KEYS.isdisjoint(shared) or "hdrcharset" in records:
        what = f"PAX records {records} {shared}" if records or shared else f"a size of {member.size} bytes"
        raise BrokenShard(
            f"{path} is damaged: the header at byte {position} has {what}, expected a whole number of bytes, "
            "and none for all members; write or copy it again"
        )
    if member.sparse is not None or any(key.startswith("GNU.sparse.") for key in records):
        raise _unknown(path, "sparse", position)
    is_file = member.isreg()
    return member.name, member.offset_data, member.size if is_file else 0, is_file


def _check_kind(path: Path, kind: bytes, position: int) -> None:
    if kind not in _KINDS:
        raise _unknown(path, repr(kind), position)


def _unknown(path: Path, kind: str, position: int) -> BrokenShard:
    return BrokenShard(
        f"{path} has a member of kind {kind} at byte {position}, expected files, folders and links; "
        "sparse files and parts of volumes cannot be read: unpack and pack them again"
    )


def _check_end(path: Path, tar: TarBytes, position: int) -> None:
    end = tar[position : position + 2 * BLOCK_BYTES]
    if len(end) < 2 * BLOCK_BYTES:
        raise BrokenShard(f"{path} is cut short: only one of the two zero blocks that close a tar is there")
    behind = range(position, len(tar), _PIECE_BYTES)
    if any(tar[first : first + _PIECE_BYTES].strip(b"\0") for first in behind):
        raise BrokenShard(
            f"{path} goes on behind its end at byte {position}, so samples would be lost; were tars joined "
            "with cat? Unpack and pack them again"
        )


_FIELDS = re.compile(
    rb"\{ *'descr': *'([<|>=][iu][1248])' *, *'fortran_order': *False *, "
    rb"*'shape': *\( *((?:\d{1,15} *, *)*(?:\d{1,15})?) *\) *,? *\}[ \n\0]*"
)
_VERSIONS = (b"\x01\0", b"\x02\0", b"\x03\0")


@dataclass(frozen=True, kw_only=True)
class NpyHeader:
    """What an array of integers says of itself."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_start: int  # byte of the file where the numbers begin

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.data_start + math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(raw: bytes) -> NpyHeader | None:
    """The header that ``raw`` begins with, or None where it is none of an integer array in C order.

    Only a whole header counts, with nothing before, between or behind its fields that numpy does not write.
    """
    size_bytes = 2 if raw[6:7] == b"\x01" else 4
    data_start = 8 + size_bytes + int.from_bytes(raw[8 : 8 + size_bytes], "little")
    match = _FIELDS.fullmatch(raw, 8 + size_bytes, data_start)
    is_npy = raw.startswith(b"\x93NUMPY") and raw[6:8] in _VERSIONS and data_start <= len(raw)
    if not is_npy or match is None:
        return None
    shape = tuple(int(part) for part in match[2].split(b",") if part.strip())
    return NpyHeader(dtype=np.dtype(match[1].decode()), shape=shape, data_start=data_start)


IDS_FIELD = "token_ids.npy"
_KNOWN = {IDS_FIELD, DOC_STARTS_FIELD, ROW_TOKENS_FIELD, LOSS_MASK_FIELD}
_HEADER_BYTES = 4096
_ROW = np.dtype(
    [
        ("offset", np.int64),  # byte in the tar where the ids begin; of NPY, their .npy header
        ("num_bytes", np.int64),
        ("num_tokens", np.int64),  # -1 where they were not counted
        ("starts_offset", np.int64),  # of packed rows, as in the idx; else 0
        ("num_starts", np.int64),
        ("mask_offset", np.int64),  # of rows with a loss mask, as in the idx; else 0
    ]
)
JSON, NPY, RAW = 0, 1, 2  # how ids lie: JSON text, a whole .npy file, or bare integers
TOKEN_FIELDS = {"token_ids.json": JSON, "token_ids.npy": NPY}
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's base_plus_ext
_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips such names


_MOST_DIGITS = 10  # of an id
_FINGERPRINTED = 16  # samples whose bytes enter a tar's fingerprint

Fields = dict[str, tuple[int, int]]  # field -> (offset, size) of its member


@dataclass(frozen=True, kw_only=True)
class TarSamples:
    """Where the token ids of a tar's samples lie. All arrays have a row per sample, in tar order."""

    rows: npt.NDArray[np.void]  # of _ROW: columns as in an idx
    last_id: Int64s  # -1 where tokens were not counted, or there are none
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW
    fingerprint: str  # of sizes, places and some samples' bytes
    token_bytes: int = 0  # of a RAW id
    row_tokens: int = 0  # of packed rows, else 0


def scan_tar(path: Path, *, count_tokens: bool = False) -> TarSamples:
    """Index a tar by its headers; with ``count_tokens`` by its data, too.

    Raises BrokenShard; UnknownMember for a member that would change the training; OSError.
    """
    with TarBytes(path) as tar:
        found = _group_members(path, tar_members(path, tar))
        if found and _is_packed(tar, found[0][1]):
            return _rows_of(path, tar, found)
        members = [_token_member(path, key, fields) for key, fields in found]
        rows, last_id = np.zeros(len(members), _ROW), np.full(len(members), -1, np.int64)
        rows["offset"], rows["num_bytes"], encoding = np.array(members, np.int64).reshape(-1, 3).T
        rows["num_tokens"] = -1
        if count_tokens and members:
            counted = [_count_tokens(tar, *member) for member in members]
            rows["num_tokens"], last_id = np.transpose(counted).copy()
        return TarSamples(
            rows=rows,
            last_id=last_id,
            encoding=encoding.astype(np.int8),
            fingerprint=_fingerprint(tar, rows),
        )


def _is_packed(tar: TarBytes, fields: Fields) -> bool:
    """Whether a sample's ids are rows, ``[rows, seq_len]``."""
    header = _header(tar, fields[IDS_FIELD][0]) if IDS_FIELD in fields else None
    return header is not None and len(header.shape) == 2 and DOC_STARTS_FIELD in fields


def _rows_of(path: Path, tar: TarBytes, found: list[tuple[str, Fields]]) -> TarSamples:
    """All rows as the idx has them; no ids are read. Raises UnknownMember or BrokenShard."""
    parts, forms = [], set()
    for key, fields in found:
        member = _PackedMember(path, key, fields, tar)
        ids = member.array(IDS_FIELD, ("<u2", "<u4"))
        forms.add((ids.shape[-1], ids.dtype.itemsize))
        is_rows = len(ids.shape) == 2 and 0 < ids.shape[1] * ids.dtype.itemsize < 2**32 and ids.shape[0] > 0
        if not is_rows or len(forms) > 1:
            raise BrokenShard(f"{path}: {key!r} has ids {ids.shape}, expected rows as those before it")
        parts.append(member.rows(ids))
    if len({LOSS_MASK_FIELD in fields for _, fields in found}) > 1:
        raise BrokenShard(f"{path}: some of its rows have a {LOSS_MASK_FIELD} and others have none")
    rows, (row_tokens, token_bytes) = np.concatenate(parts), forms.pop()
    return TarSamples(
        rows=rows,
        last_id=np.full(len(rows), -1, np.int64),
        encoding=np.full(len(rows), RAW, np.int8),
        fingerprint=_fingerprint(tar, rows),
        token_bytes=token_bytes,
        row_tokens=row_tokens,
    )


class _PackedMember:
    """One sample of the tar: a group of rows. Raises BrokenShard, UnknownMember for other fields."""

    def __init__(self, path: Path, key: str, fields: Fields, tar: TarBytes) -> None:
        self._path = path
        self._key = key
        self._fields = fields
        self._tar = tar
        if fields.keys() - _KNOWN or IDS_FIELD not in fields:
            raise UnknownMember(
                f"{path}: {key!r} has the fields {', '.join(sorted(fields))}, expected of "
                f"{', '.join(sorted(_KNOWN))}; leaving one out could change the training"
            )
        if DOC_STARTS_FIELD not in fields:
            raise BrokenShard(f"{path}: {key!r} has no {DOC_STARTS_FIELD}")

    def rows(self, ids: NpyHeader) -> npt.NDArray[np.void]:
        num_rows, seq_len = ids.shape
        starts = self._numbers(DOC_STARTS_FIELD)
        if not (starts < num_rows * seq_len).all() or (starts[1:] <= starts[:-1]).any():
            raise self._broken(
                DOC_STARTS_FIELD,
                f"has {starts[:4].tolist()} ..., expected ascending numbers below {num_rows * seq_len}",
            )
        edges = np.searchsorted(starts, np.arange(num_rows + 1) * seq_len)
        rows = np.zeros(num_rows, _ROW)
        rows["num_bytes"] = seq_len * ids.dtype.itemsize
        rows["offset"] = (
            self._fields[IDS_FIELD][0] + ids.data_start + np.arange(num_rows) * rows["num_bytes"][0]
        )
        rows["num_tokens"] = seq_len
        rows["num_starts"] = np.diff(edges)
        starts_end = sum(self._fields[DOC_STARTS_FIELD])
        rows["starts_offset"] = starts_end - starts.nbytes + edges[:-1] * starts.itemsize
        if ROW_TOKENS_FIELD in self._fields:
            tokens = self._numbers(ROW_TOKENS_FIELD)
            if tokens.shape != (num_rows,) or not 0 < tokens.min() <= tokens.max() <= seq_len:
                what = f"has {tokens[:4].tolist()} ..., expected {num_rows} numbers from 1 to {seq_len}"
                raise self._broken(ROW_TOKENS_FIELD, what)
            rows["num_tokens"] = tokens
        if LOSS_MASK_FIELD in self._fields:
            mask = self.array(LOSS_MASK_FIELD, ("|u1",))
            if mask.shape != ids.shape:
                raise self._broken(LOSS_MASK_FIELD, f"is {mask.shape}, not {ids.shape}")
            first = self._fields[LOSS_MASK_FIELD][0] + mask.data_start
            rows["mask_offset"] = first + np.arange(num_rows) * seq_len
        return rows

    def array(self, field: str, dtypes: tuple[str, ...]) -> NpyHeader:
        """The header of a member, which must be an array of one of some types, and of the member's size."""
        offset, num_bytes = self._fields[field]
        header = _header(self._tar, offset)
        if header is None or header.dtype.str not in dtypes:
            found = "none" if header is None else header.dtype.str
            raise self._broken(field, f"is no .npy of {' or '.join(dtypes)}, but of {found}")
        if header.num_bytes != num_bytes:
            raise self._broken(field, f"has {num_bytes} bytes, its header says {header.num_bytes}")
        return header

    def _numbers(self, field: str) -> npt.NDArray[np.uint32]:
        """The numbers of a small member: uint32[n]."""
        header = self.array(field, ("<u4",))
        offset, num_bytes = self._fields[field]
        if len(header.shape) != 1:
            raise self._broken(field, f"has the shape {header.shape}, expected a list")
        return np.frombuffer(self._tar[offset + header.data_start : offset + num_bytes], "<u4")

    def _broken(self, field: str, what: str) -> BrokenShard:
        return BrokenShard(f"{self._path}: {field} of {self._key!r} {what}")


def _header(tar: TarBytes, offset: int) -> NpyHeader | None:
    return parse_npy_header(tar[offset : offset + _HEADER_BYTES])


def _fingerprint(tar: TarBytes, rows: npt.NDArray[np.void]) -> str:
    offset, num_bytes = rows["offset"], rows["num_bytes"]
    digest = hashlib.sha256(np.stack([offset, num_bytes]).astype("<i8").tobytes())
    for row in range(0, len(rows), max(len(rows) // _FINGERPRINTED, 1)):
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
    if LOSS_MASK_FIELD in fields:
        raise UnknownMember(
            f"{path}: sample {key!r} has a {LOSS_MASK_FIELD}, which only packed rows may have; leaving it "
            "out would change the training"
        )
    for field, encoding in TOKEN_FIELDS.items():
        if field in fields:
            return (*fields[field], encoding)
    raise BrokenShard(
        f"{path}: sample {key!r} has the fields {', '.join(sorted(fields))}, expected "
        f"{' or '.join(TOKEN_FIELDS)}; what stands before a name's first dot is the sample's key",
        path=path,
        found=", ".join(sorted(fields)),
        expected=" or ".join(TOKEN_FIELDS),
    )
