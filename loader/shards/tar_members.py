"""The members of a tar, by its headers: ustar, and PAX and GNU names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from loader.shards.tar_bytes import TarBytes
from loader.shards.tar_header import (
    EMPTY,
    GNU_LINK,
    GNU_NAME,
    PAX_GLOBAL,
    REGULAR,
    TarHeader,
    parse_header,
    tar_text,
)
from preprocess.shard_format import BLOCK_BYTES, BrokenShard

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
