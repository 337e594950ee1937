"""Tars that have no idx: find their members and samples by scanning the headers.

The members of a tar, by its headers: ustar, PAX and GNU names.

Every header is checked: first its checksum, then that each of its numbers is one. The bytes of the tar are
read, not mapped: a failing page of a map would end the process with SIGBUS. A header costs 10 us.

Where the samples of a tar without an idx lie: one scan of its headers.

Keys are formed as webdataset forms them: a member's name up to its first dot is the key, the rest is the
field, and members of one sample stand together. A scan costs about 10 us per header. Of the data it reads 16
samples, for the fingerprint. Where lengths are needed beforehand it reads everything once, at about 1 GB/s,
and notes the last id of each sample. Tars of our packed rows are known by their two-dimensional ids; their
rows are found from the members, see docs/format.md. A .npy header is parsed in 2 us; numpy's parser takes 40.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import adler32

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, UnknownMember
from shardprep.files import close_read, open_regular
from shardprep.format.idx import IDX_CHAT_ROW
from shardprep.format.names import BLOCK_BYTES, DOC_STARTS_FIELD, LOSS_MASK_FIELD, ROW_TOKENS_FIELD

_LEAST_BYTES, _MOST_BYTES = 4 << 10, 1 << 20


class TarBytes:
    """Read-only; use it in ``with``. ``tar[first:end]`` is ``bytes``, shorter at the file's end.

    It keeps the last block that it read, which grows to 1 MiB while slices follow each other closely and
    is 4 KiB where they are far apart, so that neither many small members nor a few large ones cost more
    than they must: 0.3 us a slice. Raises OSError, and BrokenShard where it is no regular file or became
    shorter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = open_regular(path)
        try:
            self._num_bytes = os.fstat(self._handle).st_size
        except BaseException:
            close_read(self._handle)
            raise
        self._block = b""
        self._first = self._end = 0  # of the block
        self._ahead_bytes = _LEAST_BYTES

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> bytes:
        first, end = part.start, min(part.stop, self._num_bytes)
        if first < self._first or end > self._end:
            self._read(first, end)
        return self._block[first - self._first : end - self._first]

    def __enter__(self) -> TarBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_read(self._handle)

    def _read(self, first: int, end: int) -> None:
        is_near = self._first <= first < self._end + self._ahead_bytes
        self._ahead_bytes = min(4 * self._ahead_bytes, _MOST_BYTES) if is_near else _LEAST_BYTES
        wanted = min(max(end - first, self._ahead_bytes), self._num_bytes - first)
        parts, done = [], 0
        while done < wanted:
            parts.append(self._read_some(wanted - done, first + done))
            done += len(parts[-1])
        self._block = parts[0] if len(parts) == 1 else b"".join(parts)
        self._first, self._end = first, first + done

    def _read_some(self, num_bytes: int, offset: int) -> bytes:
        try:
            part = os.pread(self._handle, num_bytes, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if not part:
            raise BrokenShard(f"{self._path} ended at byte {offset} while it was read; was it replaced?")
        return part


REGULAR, EMPTY, PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = range(6)
# A link, a device, a folder or a FIFO has no data, whatever size its header has.
_KINDS = {
    **dict.fromkeys([b"0", b"\0", b"7"], REGULAR),
    **dict.fromkeys([b"1", b"2", b"3", b"4", b"5", b"6"], EMPTY),
    b"x": PAX,
    b"g": PAX_GLOBAL,
    b"L": GNU_NAME,
    b"K": GNU_LINK,
}
_OCTAL = re.compile(rb" *([0-7]*) *(?:\0.*)?", re.DOTALL)
_BASE_256 = 0o200  # the first byte of a number that is no text
_BASE_256_NEGATIVE = 0o377
_OTHER_NUMBERS = ((0, 8), (8, 16), (16, 24), (24, 36), (36, 44), (44, 52))


class TarHeader(NamedTuple):
    """What a header says: REGULAR, EMPTY ..., the name, and the bytes of data that follow.

    No frozen dataclass, as one is made a member: 0.4 us instead of 1.2.
    """

    kind: int
    name: str
    num_bytes: int


def parse_header(path: Path, header: bytes, position: int) -> TarHeader:
    """The header at a byte of a tar: bytes[512]. 5 us.

    A kind that is not known is refused, as its data could be a sample's; so is whatever Python's tarfile,
    and so webdataset, would read in another way. Raises BrokenShard.
    """
    _check_sum(path, header, position)
    num_bytes = _number(header[124:136])
    if num_bytes is None or not _are_numbers(header[100:124] + header[136:148] + header[329:345]):
        raise BrokenShard(
            f"{path} is no tar, or is damaged: the header at byte {position} has a field that is no number; "
            "write or copy it again"
        )
    if num_bytes < 0:
        raise BrokenShard(
            f"{path} is damaged: the member at byte {position} has {num_bytes} bytes, expected 0 or more; "
            "write or copy it again"
        )
    kind = _KINDS.get(header[156:157])
    if kind is None:
        raise BrokenShard(
            f"{path} has a member of kind {header[156:157]!r} at byte {position}, expected files, folders "
            "and links; sparse files and parts of volumes cannot be read: unpack and pack them again"
        )
    name = header[:100].partition(b"\0")[0]
    if kind == REGULAR and header[156] == 0 and name.endswith(b"/"):
        kind = EMPTY  # a folder, as tars from before ustar have it
    prefix = header[345:500].partition(b"\0")[0]
    if prefix and header[257:263] != b"ustar\0":  # GNU's times of access, which tarfile takes for a name
        raise BrokenShard(
            f"{path} has a header at byte {position} whose name has two readings; pack it again"
        )
    return TarHeader(kind, tar_text(prefix + b"/" + name if prefix else name), num_bytes)


def tar_text(raw: bytes) -> str:
    """A name: UTF-8, where it is that."""
    return raw.decode("utf-8", "surrogateescape")


def _check_sum(path: Path, header: bytes, position: int) -> None:
    """The one thing that an altered header cannot keep."""
    said = _number(header[148:156])
    # Adler's lower half is 1 + the sum modulo 65,521, which no 256 bytes reach; 20 times as fast as sum.
    parts = adler32(header[:148]), adler32(header[156:356]), adler32(header[356:])
    counted = (parts[0] & 0xFFFF) + (parts[1] & 0xFFFF) + (parts[2] & 0xFFFF) - 3 + 8 * ord(" ")
    if said == counted:
        return
    num_high = sum(byte > 127 for byte in header[:148] + header[156:])
    if num_high and said == counted - 256 * num_high:  # old tars add signed bytes up
        return
    if position == 0 and (header[:2] == b"\x1f\x8b" or header[:4] == b"\x28\xb5\x2f\xfd"):
        raise BrokenShard(f"{path} is compressed; the loader reads at random, so decompress it first")
    raise BrokenShard(
        f"{path} is no tar, or is damaged: at byte {position} no member's header stands whose checksum is "
        "right; copy it again, or write it again"
    )


@lru_cache(maxsize=256)  # most members of a tar have the same
def _are_numbers(fields: bytes) -> bool:
    """Mode, owner, group; time; device. Nothing is made of them, but tarfile ends where one is no number."""
    return all(_number(fields[start:end]) is not None for start, end in _OTHER_NUMBERS)


def _number(field: bytes) -> int | None:
    """Octal, or base 256 after a byte that says so; None for neither."""
    if field[:-1].isdigit() and field[-1] in b"\0 " and not (b"8" in field or b"9" in field):
        return int(field[:-1], 8)  # as most write it, in half the time
    if field[0] in (_BASE_256, _BASE_256_NEGATIVE):
        number = int.from_bytes(field[1:], "big")
        return number if field[0] == _BASE_256 else number - 256 ** (len(field) - 1)
    match = _OCTAL.fullmatch(field)
    return None if match is None else int(match[1] or b"0", 8)


_ZERO_BLOCK = bytes(BLOCK_BYTES)
_PIECE_BYTES = 1 << 20
_MOST_EXTENDED_BYTES = 1 << 20  # of a long name or PAX records; a path has 4,096 at most
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")
_SIZE = re.compile(rb"\d{1,18}")
# Records that change which bytes a member has; a global one would change all members.
_LAYOUT_KEYS = (b"path", b"size", b"hdrcharset")
_SPARSE = b"GNU.sparse."


def tar_members(path: Path, tar: TarBytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset and size of the data) of every regular file of a tar.

    The same as Python's tarfile finds, or BrokenShard: where it is no tar, a header is altered, it is cut
    short, it goes on behind its end, or other programs could find other members in it. A header costs 10 us.
    """
    position, size = 0, len(tar)
    extended: dict[bytes, bytes] = {}  # what stands before a member's header and says more of it
    waits = False  # for that header
    while True:
        block = tar[position : position + BLOCK_BYTES]
        if block == _ZERO_BLOCK and not waits:
            _check_end(path, tar, position)
            return
        if len(block) < BLOCK_BYTES:
            raise BrokenShard(
                f"{path} is cut short: it ends at byte {size} without the two zero blocks that close a "
                "tar; write or copy it again"
            )
        header = parse_header(path, block, position)
        data = position + BLOCK_BYTES
        waits = header.kind not in (REGULAR, EMPTY)
        num_bytes = _data_bytes(path, header, extended, position)
        if data + num_bytes > size:
            raise BrokenShard(
                f"{path} is cut short: the member at byte {position} needs {data + num_bytes} bytes, the "
                f"file has {size}; write or copy it again"
            )
        position = data + (num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if waits:
            found = _extended(path, header.kind, tar[data:position], num_bytes, data)
            if extended.keys() & found.keys():
                raise BrokenShard(f"{path} is damaged: two headers before byte {position} name one member")
            extended |= found
            continue
        if header.kind == REGULAR:
            yield tar_text(extended[b"path"]) if b"path" in extended else header.name, data, num_bytes
        extended = {}


def _data_bytes(path: Path, header: TarHeader, extended: dict[bytes, bytes], position: int) -> int:
    """Bytes of data behind a header."""
    if header.kind == EMPTY:
        return 0
    if header.kind == REGULAR:
        return int(extended[b"size"]) if b"size" in extended else header.num_bytes
    if header.num_bytes > _MOST_EXTENDED_BYTES:
        raise BrokenShard(
            f"{path} is damaged: the long name at byte {position} has {header.num_bytes:,} bytes, expected "
            f"at most {_MOST_EXTENDED_BYTES:,}; write or copy it again"
        )
    return header.num_bytes


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


def _extended(path: Path, kind: int, padded: bytes, num_bytes: int, position: int) -> dict[bytes, bytes]:
    """What one header says of the next: its ``path`` and ``size``, where they are there."""
    data = padded[:num_bytes]
    if padded[num_bytes:].strip(b"\0"):
        raise BrokenShard(f"{path} is damaged: a long name at byte {position} goes on behind its end")
    if kind == GNU_LINK:
        return {}
    if kind == GNU_NAME:
        return {b"path": data.partition(b"\0")[0]}
    records = _pax_records(path, data, position)
    sparse = any(keyword.startswith(_SPARSE) for keyword in records)
    if sparse or (kind == PAX_GLOBAL and not records.keys().isdisjoint(_LAYOUT_KEYS)):
        raise BrokenShard(
            f"{path} has a PAX header at byte {position} of sparse files, or of sizes or names of all "
            "members; unpack and pack them again"
        )
    _check_records(path, records, position)
    return {keyword: value for keyword, value in records.items() if keyword in _LAYOUT_KEYS}


def _check_records(path: Path, records: dict[bytes, bytes], position: int) -> None:
    if b"path" in records:
        records[b"path"] = records[b"path"].rstrip(b"/")
    is_named = records.get(b"path", b"name") != b""
    has_size = b"size" not in records or _SIZE.fullmatch(records[b"size"])
    is_utf8 = records.get(b"hdrcharset", b"ISO-IR 10646 2000 UTF-8") == b"ISO-IR 10646 2000 UTF-8"
    if not (is_named and has_size and is_utf8):
        wrong = {key.decode(): records[key] for key in _LAYOUT_KEYS if key in records}
        raise BrokenShard(f"{path} is damaged: the PAX header at byte {position} says {wrong}")


def _pax_records(path: Path, data: bytes, position: int) -> dict[bytes, bytes]:
    """``b"17 path=a.b\\n..."`` as a dict; each record begins with its own length."""
    records, first = {}, 0
    while first < len(data):
        match = _PAX_LENGTH.match(data, first)
        end = first + int(match[1]) if match else 0
        keyword, equals, value = data[match.end() : end - 1].partition(b"=") if match else (b"", b"", b"")
        if end > len(data) or not (keyword and equals) or data[end - 1] != ord("\n"):
            raise BrokenShard(
                f"{path} is damaged: the PAX header at byte {position} has the record "
                f"{data[first : first + 40]!r}; write or copy it again"
            )
        if keyword in records:
            raise BrokenShard(f"{path} is damaged: a PAX header at byte {position} says {keyword!r} twice")
        records[keyword] = value
        first = end
    return records


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
_COLUMNS = ("offset", "num_bytes", "num_tokens", "starts_offset", "num_starts", "mask_offset")
_ROW = np.dtype([(name, IDX_CHAT_ROW[name]) for name in _COLUMNS])


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
    if len({LOSS_MASK_FIELD in member.fields for member in members}) > 1:
        raise BrokenShard(f"{path}: some of its rows have a {LOSS_MASK_FIELD} and others have none")
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
    if LOSS_MASK_FIELD in member.fields:
        mask = _array(path, tar, member, LOSS_MASK_FIELD, ("|u1",))
        if mask.shape != ids.shape:
            raise BrokenShard(f"{path}: {LOSS_MASK_FIELD} of {member.key!r} is {mask.shape}, not {ids.shape}")
        first = member.fields[LOSS_MASK_FIELD][0] + mask.data_start
        rows["mask_offset"] = first + np.arange(num_rows) * seq_len
    starts_end = sum(member.fields[DOC_STARTS_FIELD])
    rows["starts_offset"] = starts_end - starts.nbytes + edges[:-1] * starts.itemsize
    return rows


def _check_fields(path: Path, member: PackedMember) -> None:
    unknown = member.fields.keys() - _KNOWN
    if unknown or IDS_FIELD not in member.fields:
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

    offset: npt.NDArray[np.int64]  # byte in the tar where the ids begin; of NPY, their .npy header
    num_bytes: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]  # -1 where they were not counted
    last_id: npt.NDArray[np.int64]  # -1 where tokens were not counted, or there are none
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW
    starts_offset: npt.NDArray[np.int64]  # of packed rows, as in the idx; else 0
    num_starts: npt.NDArray[np.int64]
    mask_offset: npt.NDArray[np.int64]  # of rows with a loss mask, as in the idx; else 0
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
        mask_offset=nothing,
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
        f"{' or '.join(TOKEN_FIELDS)}; what stands before a name's first dot is the sample's key"
    )
