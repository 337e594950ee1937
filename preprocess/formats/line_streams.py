"""A stream of text in pieces -> blocks of whole lines, in bounded memory however long a line is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from preprocess.formats.compression import TextPiece
from preprocess.formats.line_ends import unit_bytes
from preprocess.inputs import RangeReader
from preprocess.long_documents import MOST_HELD_BYTES


class LineBlock(NamedTuple):
    """Whole lines that follow each other, or one line that is too long to be held."""

    start: int  # byte of the text
    size: int  # bytes of text
    data: bytes | None  # None: it is one line of more than MOST_HELD_BYTES
    num_bytes: int  # of the file that were read for it


def plain_pieces(reader: RangeReader, piece_bytes: int) -> Iterator[TextPiece]:
    """The bytes of a part as they are."""
    part = reader.part
    for start in range(part.start, part.end, piece_bytes):
        data = reader.read(start, min(start + piece_bytes, part.end))
        yield TextPiece(data, len(data))


def whole_units(pieces: Iterator[TextPiece], codec: str) -> Iterator[TextPiece]:
    """The same stream in pieces of whole code units, but for a last half of one."""
    unit, kept = unit_bytes(codec), b""
    for data, num_bytes in pieces:
        joined = kept + data
        cut = len(joined) // unit * unit
        kept = joined[cut:]
        yield TextPiece(joined[:cut], num_bytes)
    if kept:
        yield TextPiece(kept, 0)


def line_blocks_of(
    pieces: Iterator[TextPiece], start: int, last_line_end: Callable[[bytes], int]
) -> Iterator[LineBlock]:
    """Cut a stream that begins at byte ``start`` of the text into blocks of whole lines.

    ``last_line_end`` gives the bytes up to the last line end that is sure: a ``\\r`` at the very end may be
    half of one. At the end stands a block without lines, for what was read behind the last one.
    """
    held: list[bytes] = []  # the beginning of a line
    num_held, num_bytes, is_too_long = 0, 0, False
    for data, num_read in _without_half_line_ends(pieces):
        num_bytes += num_read
        cut = last_line_end(data)
        if cut and is_too_long:
            first = _first_cut(data[:cut], last_line_end)
            yield LineBlock(start, num_held + first, None, 0)
            start, held, num_held, is_too_long = start + num_held + first, [], 0, False
            data, cut = data[first:], cut - first
        if cut:
            held.append(data[:cut])
            yield LineBlock(start, num_held + cut, b"".join(held), num_bytes)
            start, held, num_held, num_bytes = start + num_held + cut, [], 0, 0
        num_held += len(data) - cut
        held = [] if is_too_long else [*held, data[cut:]]
        if num_held > MOST_HELD_BYTES:
            is_too_long, held = True, []
    if num_held:
        yield LineBlock(start, num_held, None if is_too_long else b"".join(held), num_bytes)
    elif num_bytes:
        yield LineBlock(start, 0, b"", num_bytes)


def _without_half_line_ends(pieces: Iterator[TextPiece]) -> Iterator[TextPiece]:
    """The same stream, in which a ``\\r`` stands at no piece's end but the last one's."""
    kept = b""
    for data, num_bytes in pieces:
        joined = kept + data
        kept = b"\r" if joined.endswith(b"\r") else b""
        yield TextPiece(joined[: len(joined) - len(kept)], num_bytes)
    if kept:
        yield TextPiece(kept, 0)


def _first_cut(data: bytes, last_line_end: Callable[[bytes], int]) -> int:
    """Bytes up to and with the first line end of data that has one, of any kind, by halving."""
    low, high = 0, len(data)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if last_line_end(data[:middle]) else (middle, high)
    return last_line_end(data[:high])
