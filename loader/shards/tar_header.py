"""One header of a tar, checked: its checksum first, then that every number in it is one."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from zlib import adler32

from preprocess.shard_format import BrokenShard

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
