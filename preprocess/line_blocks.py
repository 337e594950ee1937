"""Part of a file -> blocks of whole lines, as bytes, in any encoding whose line ends can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.long_documents import LONG_BYTES
from preprocess.open_input import OpenInput

_SCAN_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Part of one input file."""

    source: int  # position of the file in the plan
    path: Path
    start: int  # byte
    end: int  # byte, not included


class Digest(Protocol):
    """A hash of hashlib."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""


class RangeReader:
    """Reads a range from its open file, for one thread; hashes, in order, each byte that it meets first."""

    def __init__(self, file: OpenInput, part: ByteRange, digest: Digest | None) -> None:
        self.file = file
        self.part = part
        self._digest = digest
        self._num_hashed = part.start  # byte up to which the range is hashed

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._num_hashed:
            self._digest.update(memoryview(data)[self._num_hashed - start :])
            self._num_hashed = end
        return data

    def hash_rest(self) -> None:
        """Hash what was not read, if the range is hashed at all."""
        while self._digest is not None and self._num_hashed < self.part.end:
            self.read(self._num_hashed, min(self._num_hashed + _SCAN_BYTES, self.part.end))


def codec_at(reader: RangeReader, encoding: str) -> tuple[str, int]:
    """The codec of a range without any byte order mark, and where its text begins."""
    part = reader.part
    head = reader.read(part.start, min(part.start + 4, part.end))
    if encoding == "utf-8-sig":
        return "utf-8", part.start + 3 * (part.start == 0 and head.startswith(b"\xef\xbb\xbf"))
    if encoding not in ("utf-16", "utf-32"):
        return encoding, part.start
    unit = 2 if encoding == "utf-16" else 4
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        if head[:unit] == "\ufeff".encode(codec):
            return codec, part.start + unit
    return f"{encoding}-le", part.start


def _unit_bytes(codec: str) -> int:
    return 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1


def _units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = _unit_bytes(codec)
    order = ">" if codec.endswith("-be") else "<"
    return np.frombuffer(block, f"{order}u{num_bytes}", len(block) // num_bytes)


def line_blocks(
    reader: RangeReader, start: int, codec: str, batch_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut a range into blocks of whole lines: (byte where it begins, where it ends, its bytes).

    Reads ``batch_bytes`` at once, or the whole code units in them. A line of more than LONG_BYTES is a
    block of its own, without its bytes.
    """
    unit = _unit_bytes(codec)
    batch_bytes = max(unit, batch_bytes // unit * unit)
    carriage_return = "\r".encode(codec)
    held: list[bytes] = []  # the beginning of a line that ends in a later block
    offset = position = start
    end = reader.part.end
    while position < end:
        block = reader.read(position, min(position + batch_bytes, end))
        cut = len(block) if position + len(block) == end else _last_line_end(block, codec)
        if not cut and held and held[-1].endswith(carriage_return):  # no line end goes on in this block
            yield offset, position, b"".join(held)
            offset, held = position, []
        position += len(block)
        if not cut and position - offset > LONG_BYTES:
            position = _next_line(reader, position - len(block), codec)
            yield offset, position, None
            offset, held = position, []
            continue
        if cut:
            held.append(block[:cut])
            line_end = position - len(block) + cut
            yield offset, line_end, b"".join(held)
            offset, held = line_end, []
        if cut < len(block):
            held.append(block[cut:])


def _next_line(reader: RangeReader, position: int, codec: str) -> int:
    """The byte after the next line end at or behind ``position``, or the range's end."""
    unit, range_end = _unit_bytes(codec), reader.part.end
    scan_bytes = max(2, _SCAN_BYTES // unit) * unit
    while position < range_end:
        block = reader.read(position, min(position + scan_bytes, range_end))
        units = _units(block, codec)
        ends = np.flatnonzero((units == 10) | (units == 13))
        if len(ends):
            first = int(ends[0])
            if units[first] == 13 and first + 1 == len(units) and position + len(block) < range_end:
                position += first * unit  # it may be half of a line end: read on from it
                continue
            first += bool(units[first] == 13 and first + 1 < len(units) and units[first + 1] == 10)
            return position + (first + 1) * unit
        position += len(block)
    return range_end


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
