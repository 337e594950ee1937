"""A stream of text in pieces -> blocks of whole lines, in bounded memory however long a line is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from preprocess.formats.compression import TextPiece
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


def line_blocks_of(
    pieces: Iterator[TextPiece],
    start: int,
    last_line_end: Callable[[bytes], int],
    carriage_return: bytes = b"",
) -> Iterator[LineBlock]:
    """Cut a stream that begins at byte ``start`` of the text into blocks of whole lines.

    ``last_line_end`` gives the bytes up to the last line end that is sure: a ``\\r`` at the very end may be
    half of one. ``carriage_return`` is the codec's, where it ends lines. At the end stands a block without
    lines, for what was read behind the last one. How the stream is cut into pieces changes no line.
    """
    held: list[bytes] = []  # the beginning of a line
    num_held, num_bytes, is_too_long = 0, 0, False
    for data, num_read in _whole_line_ends(_small_pieces(pieces), carriage_return):
        num_bytes += num_read
        ends_here = carriage_return and data.endswith(carriage_return)
        cut = len(data) if ends_here else last_line_end(data)
        if cut and num_held and num_held + cut > MOST_HELD_BYTES:
            first = _first_cut(data, last_line_end) or cut
            is_too_long = num_held + first > MOST_HELD_BYTES
        if cut and is_too_long:
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


def _small_pieces(pieces: Iterator[TextPiece]) -> Iterator[TextPiece]:
    """The same stream in pieces below MOST_HELD_BYTES: 16 KiB of zstd may give half a gigabyte."""
    most = MOST_HELD_BYTES - 8  # a \r and a part of a unit may be kept back and come with the next piece
    for data, num_bytes in pieces:
        for begin in range(0, max(1, len(data)), most):
            yield TextPiece(data[begin : begin + most], 0 if begin else num_bytes)


def _whole_line_ends(pieces: Iterator[TextPiece], carriage_return: bytes) -> Iterator[TextPiece]:
    """The same stream in pieces of whole code units; a ``\\r`` at the end of one is a whole line end."""
    unit, kept = max(1, len(carriage_return)), b""
    for data, num_bytes in pieces:
        joined = kept + data
        cut = len(joined) // unit * unit
        if carriage_return and joined.endswith(carriage_return, 0, cut):
            cut -= unit
        kept = joined[cut:]
        yield TextPiece(joined[:cut], num_bytes)
    if kept:
        yield TextPiece(kept, 0)


def _first_cut(data: bytes, last_line_end: Callable[[bytes], int]) -> int:
    """Bytes up to and with the first line end that is sure, of any kind, by halving; 0 for none."""
    low, high = 0, len(data)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if last_line_end(data[:middle]) else (middle, high)
    return last_line_end(data[:high])
