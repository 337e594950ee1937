"""The members of a tar, by its headers: ustar, and PAX and GNU names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from loader.shards.tar_bytes import TarBytes
from preprocess.shard_format import BLOCK_BYTES, BrokenShard

_REGULAR = frozenset({b"0", b"\0", b"7"})
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_PIECE_BYTES = 1 << 20


def tar_members(path: Path, tar: TarBytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset and size of the data) of every regular file of a tar.

    Raises BrokenShard where it is no tar, is cut short or goes on behind its end.
    """
    position, size = 0, len(tar)
    pax: dict[str, str] = {}
    while True:
        header = tar[position : position + BLOCK_BYTES]
        if header == _ZERO_BLOCK:
            _check_end(path, tar, position)
            return
        if len(header) < BLOCK_BYTES:
            raise BrokenShard(
                f"{path} is cut short: it ends at byte {size} without the two zero blocks that close a "
                "tar; write or copy it again"
            )
        _check_magic(path, header, position)
        kind = header[156:157]
        num_bytes = int(pax["size"]) if "size" in pax else _number(path, header[124:136], position)
        data = position + BLOCK_BYTES
        if data + num_bytes > size:
            raise BrokenShard(
                f"{path} is cut short: the member at byte {position} needs {data + num_bytes} bytes, the "
                f"file has {size}; write or copy it again"
            )
        position = data + (num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if kind == _PAX:
            pax |= _pax_records(path, tar[data : data + num_bytes])
        elif kind == _GNU_NAME:
            pax["path"] = os.fsdecode(tar[data : data + num_bytes].rstrip(b"\0"))
        elif kind not in (_PAX_GLOBAL, _GNU_LINK):
            if kind in _REGULAR:
                yield pax.get("path") or _name(header), data, num_bytes
            pax = {}


def _check_magic(path: Path, header: bytes, position: int) -> None:
    if header[257:262] == b"ustar":
        return
    if header[:2] == b"\x1f\x8b" or header[:4] == b"\x28\xb5\x2f\xfd":
        raise BrokenShard(f"{path} is compressed; the loader reads at random, so decompress it first")
    # A tar from before ustar has nothing but its checksum to know it by.
    signed = header[:148] + b" " * 8 + header[156:]
    if _number(path, header[148:156], position) != sum(signed):
        raise BrokenShard(f"{path} is no tar, or is damaged: there is no member's header at byte {position}")


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


def _number(path: Path, field: bytes, position: int) -> int:
    """A header's number: octal, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise BrokenShard(f"{path} is no tar, or is damaged: bad number at byte {position}") from None


def _name(header: bytes) -> str:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    is_posix = header[257:263] == b"ustar\0"  # GNU's old format keeps other things in the prefix
    return os.fsdecode(prefix + b"/" + name if prefix and is_posix else name)


def _pax_records(path: Path, data: bytes) -> dict[str, str]:
    """``b"17 path=a.b\\n..."`` as a dict; each record begins with its own length."""
    records = {}
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise BrokenShard(f"{path} is damaged: a PAX header has the record {data[:40]!r}")
        keyword, _, value = rest[: int(length) - len(length) - 1].rstrip(b"\n").partition(b"=")
        records[os.fsdecode(keyword)] = os.fsdecode(value)
        data = data[int(length) :]
    return records
