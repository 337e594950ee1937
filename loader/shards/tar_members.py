"""The members of a tar, by its headers: ustar, PAX and GNU names.

Every header is checked: first its checksum, then that each of its numbers is one. The bytes of the tar are
read, not mapped: a failing page of a map would end the process with SIGBUS. A header costs 10 us.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from zlib import adler32

from shardprep.errors import BrokenShard
from shardprep.format.names import BLOCK_BYTES
from shardprep.regular_files import close_read, open_regular

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
