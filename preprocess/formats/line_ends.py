"""Where the lines of a text end, in bytes of any codec.

Lines of plain text end at ``\\n``, ``\\r\\n`` or ``\\r``, as Python reads them; those of JSON at ``\\n``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.inputs import OpenInput

_FIRST_SCAN_BYTES, _NEXT_SCAN_BYTES, _MOST_SCAN_BYTES = 16 << 10, 64 << 10, 1 << 20

FirstLineEnd = Callable[[bytes, bool], "int | None"]
"""(bytes, whether nothing follows) -> bytes up to and with the first line end; None where it is not sure."""

MARKED_ENCODINGS = ("utf-8-sig", "utf-16", "utf-32")  # a byte order mark may stand before the text


def codec_of(head: bytes, encoding: str) -> tuple[str, int]:
    """The codec of a file without any byte order mark, and the mark's bytes. ``head``: its first 4."""
    if encoding == "utf-8-sig":
        return "utf-8", 3 * head.startswith(b"\xef\xbb\xbf")
    if encoding not in ("utf-16", "utf-32"):
        return encoding, 0
    unit = 2 if encoding == "utf-16" else 4
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        if head[:unit] == "\ufeff".encode(codec):
            return codec, unit
    return f"{encoding}-le", 0


def unit_bytes(codec: str) -> int:
    """Bytes of a code unit."""
    return 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1


def code_units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = unit_bytes(codec)
    order = ">" if codec.endswith("-be") else "<"
    return np.frombuffer(block, f"{order}u{num_bytes}", len(block) // num_bytes)


def last_line_end(block: bytes, codec: str) -> int:
    """Bytes of a block up to and with its last line end; a ``\\r`` at its very end may be half of one."""
    units = code_units(block, codec)
    if units.itemsize == 1:
        return max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
    ends = np.flatnonzero((units == 10) | (units == 13))
    if len(ends) and ends[-1] == len(units) - 1 and units[-1] == 13:
        ends = ends[:-1]
    return (int(ends[-1]) + 1) * units.itemsize if len(ends) else 0


def line_starts(block: bytes, codec: str) -> npt.NDArray[np.int64]:
    """Byte of each line's start in a block of whole lines."""
    units = code_units(block, codec)
    is_end = units == 10
    carriage_return = units == 13
    if carriage_return.any():
        carriage_return[:-1] &= ~is_end[1:]
        is_end |= carriage_return
    starts = np.flatnonzero(is_end) + 1
    if len(starts) and starts[-1] * units.itemsize == len(block):
        starts = starts[:-1]
    return np.concatenate(([0], starts)) * units.itemsize


def first_line_start(file: OpenInput, offset: int, end: int, line_end_of: FirstLineEnd) -> int | None:
    """The first byte at or after ``offset`` where a line begins; the file's size where its rest has none.

    None where none begins before ``end``; one behind it may be found all the same, and is right. Reads 16 KiB
    at first, for most lines end soon, then 64 KiB each time, and a quarter of what was read so far where that
    is more, up to 1 MiB. Lines of 250 KB take 3.2 reads and 160 KB; 4 KiB, then four times as much each time
    up to 256 KiB, would take 3.6 reads and 250 KB.
    """
    if offset >= end:
        return None
    if offset <= 0:
        return 0
    size = file.stamp.num_bytes
    position, num_bytes = offset - 1, _FIRST_SCAN_BYTES
    while position < end:
        block = file.read(position, position + num_bytes)
        if not block:
            break
        is_last = position + len(block) >= size
        line_end = line_end_of(block, is_last)
        if line_end is not None:
            return position + line_end
        # A last \r may be half of a line end: it is read again with what follows.
        position += len(block) - (block.endswith(b"\r") and not is_last)
        num_bytes = min(max(_NEXT_SCAN_BYTES, (position - offset) // 4), _MOST_SCAN_BYTES)
    return None if position < size else size


def first_line_end(block: bytes, is_last: bool) -> int | None:
    """Bytes up to and with the first line end; None where there is none, or it may go on behind the block."""
    newline = block.find(b"\n")
    carriage_return = block.find(b"\r", 0, newline if newline >= 0 else len(block))
    if carriage_return < 0 or carriage_return + 1 == newline:
        return newline + 1 if newline >= 0 else None
    if carriage_return + 1 < len(block) or is_last:
        return carriage_return + 1
    return None


def last_newline(data: bytes) -> int:
    """Bytes up to and with the last ``\\n``."""
    return data.rfind(b"\n") + 1


def first_newline(data: bytes, is_last: bool) -> int | None:  # noqa: ARG001
    """Bytes up to and with the first ``\\n``; a FirstLineEnd."""
    return data.find(b"\n") + 1 or None
