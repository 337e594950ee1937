"""Part of a file -> blocks of whole lines, as bytes, in any encoding whose line ends can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from preprocess.long_documents import LONG_BYTES
from preprocess.shard_format import ReadWriteError

_SCAN_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Part of one input file."""

    source: int  # position of the file in the plan
    path: Path
    start: int  # byte
    end: int  # byte, not included


def codec_at(file: BinaryIO, part: ByteRange, encoding: str) -> tuple[str, int]:
    """The codec of a range without any byte order mark, and where its text begins."""
    head = read_bytes(file, part.start, min(part.start + 4, part.end), part)
    if encoding == "utf-8-sig":
        return "utf-8", part.start + 3 * (part.start == 0 and head.startswith(b"\xef\xbb\xbf"))
    if encoding not in ("utf-16", "utf-32"):
        return encoding, part.start
    unit = 2 if encoding == "utf-16" else 4
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        if head[:unit] == "\ufeff".encode(codec):
            return codec, part.start + unit
    return f"{encoding}-le", part.start


def _units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1
    order = ">" if codec.endswith("-be") else "<"
    return np.frombuffer(block, f"{order}u{num_bytes}", len(block) // num_bytes)


def read_bytes(file: BinaryIO, start: int, end: int, part: ByteRange) -> bytes:
    file.seek(start)
    pieces = []
    while start < end:
        piece = file.read(end - start)
        if not piece:
            raise ReadWriteError(f"input {part.path} ended at byte {start}, the plan says {part.end}")
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def line_blocks(
    file: BinaryIO, start: int, part: ByteRange, codec: str, batch_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut a range into blocks of whole lines: (byte where it begins, where it ends, its bytes).

    A line of more than LONG_BYTES is a block of its own, without its bytes.
    """
    held: list[bytes] = []  # the beginning of a line that ends in a later block
    offset = position = start
    while position < part.end:
        block = read_bytes(file, position, min(position + batch_bytes, part.end), part)
        position += len(block)
        cut = len(block) if position == part.end else _last_line_end(block, codec)
        if not cut and position - offset > LONG_BYTES:
            position = _next_line(file, position - len(block), part, codec)
            yield offset, position, None
            offset, held = position, []
            continue
        if cut:
            held.append(block[:cut])
            end = position - len(block) + cut
            yield offset, end, b"".join(held)
            offset, held = end, []
        if cut < len(block):
            held.append(block[cut:])


def _next_line(file: BinaryIO, position: int, part: ByteRange, codec: str) -> int:
    """The byte after the next line end at or behind ``position``, or the range's end."""
    while position < part.end:
        block = read_bytes(file, position, min(position + _SCAN_BYTES, part.end), part)
        units = _units(block, codec)
        ends = np.flatnonzero((units == 10) | (units == 13))
        if len(ends):
            first = int(ends[0])
            if units[first] == 13 and first + 1 == len(units) and position + len(block) < part.end:
                position += first * units.itemsize  # it may be half of a line end: read on from it
                continue
            first += bool(units[first] == 13 and first + 1 < len(units) and units[first + 1] == 10)
            return position + (first + 1) * units.itemsize
        position += len(block)
    return part.end


def _last_line_end(block: bytes, codec: str) -> int:
    """Bytes of a block up to and with its last line end; a ``\\r`` at its very end may be half of one."""
    units = _units(block, codec)
    if units.itemsize == 1:
        return max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
    ends = np.flatnonzero((units == 10) | (units == 13))
    if len(ends) and ends[-1] == len(units) - 1 and units[-1] == 13:
        ends = ends[:-1]
    return (int(ends[-1]) + 1) * units.itemsize if len(ends) else 0


def line_starts(block: bytes, codec: str) -> npt.NDArray[np.int64]:
    """Byte of each line's start in a block of whole lines."""
    units = _units(block, codec)
    is_end = units == 10
    carriage_return = units == 13
    if carriage_return.any():
        carriage_return[:-1] &= ~is_end[1:]
        is_end |= carriage_return
    starts = np.flatnonzero(is_end) + 1
    if len(starts) and starts[-1] * units.itemsize == len(block):
        starts = starts[:-1]
    return np.concatenate(([0], starts)) * units.itemsize
