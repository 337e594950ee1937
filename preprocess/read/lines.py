r"""Line ends of every encoding, and streams of text cut into blocks of whole lines.

Lines of plain text end at ``\n``, ``\r\n`` or ``\r``, as Python reads them; those of JSON at ``\n``.
Memory is bounded however long a line is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.read import long_documents
from preprocess.read.format import (
    SHORT_LINE_BYTES,
    DocumentBatch,
    RecordBlock,
    batches_of,
    no_documents,
    one_left_out,
    too_long,
)
from preprocess.read.inputs import OpenInput, Place
from preprocess.read.long_documents import LongDocument
from preprocess.read.text_fields import TOLD_NOTHING, Told, UnusableText


class TextPiece(NamedTuple):
    data: bytes
    num_bytes: int


_FIRST_SCAN_BYTES, _NEXT_SCAN_BYTES, _MOST_SCAN_BYTES = 16 << 10, 64 << 10, 1 << 20

FirstLineEnd = Callable[[bytes, bool], "int | None"]
"""(bytes, whether nothing follows) -> bytes up to and with the first line end; None where it is not sure."""


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


def code_units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1
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


def line_starts(block: bytes, codec: str | None) -> npt.NDArray[np.int64]:
    """Byte of each line's start in a block of whole lines; without a codec they end at ``\\n`` alone."""
    units = code_units(block, codec or "utf-8")
    is_end = units == 10
    if codec and (carriage_return := units == 13).any():
        carriage_return[:-1] &= ~is_end[1:]
        is_end |= carriage_return
    starts = np.concatenate(([0], np.flatnonzero(is_end) + 1)) * units.itemsize
    return starts[:-1] if starts[-1] == len(block) else starts


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


def first_newline(block: bytes, is_last: bool) -> int | None:  # noqa: ARG001
    """Bytes up to and with the first ``\\n``; a FirstLineEnd."""
    return block.find(b"\n") + 1 or None


class LineBlock(NamedTuple):
    """Whole lines that follow each other, or one line that is too long to be held."""

    start: int  # byte of the text
    size: int  # bytes of text
    data: bytes | None  # None: it is one line that is too long to be held
    num_bytes: int  # of the file that were read for it


class Records(NamedTuple):
    """Of each line the text, or why it has none, and what else they tell."""

    texts: Sequence[str | UnusableText]
    told: Told = TOLD_NOTHING


def line_documents(
    blocks: Iterator[LineBlock],
    place: Place,
    batch_bytes: int,
    starts_of: Callable[[bytes], npt.NDArray[np.int64]],
    records_of: Callable[[bytes, npt.NDArray[np.int64], Place], Records],
    *,
    is_text: bool = False,
    can_be_read_again: bool = False,
) -> Iterator[DocumentBatch | LongDocument]:
    """The documents of blocks of lines, the first of which has the number of ``place``.

    ``records_of`` reads whole lines, given the byte where each starts in them and their place. Each line may
    become two headers and two blocks of a tar, 2 KiB however short it is: so as many are read at once as a
    batch's share of memory allows for (see resources.py).
    """
    most = max(1, batch_bytes // SHORT_LINE_BYTES)
    for block in blocks:
        where = dataclasses.replace(
            place, start=block.start, end=block.start + block.size, num_bytes=block.num_bytes
        )
        if block.data is None:
            yield (
                LongDocument(place=where) if can_be_read_again else one_left_out(where, too_long("the line"))
            )
            place = dataclasses.replace(place, line=place.line + 1)
            continue
        if not block.data:
            yield no_documents(where)
            continue
        starts, num_bytes = starts_of(block.data), block.num_bytes
        firsts = range(0, len(starts), most)
        for first, (begin, end) in zip(
            firsts, itertools.pairwise([*starts[::most], len(block.data)]), strict=True
        ):
            data, own = block.data[begin:end], starts[first : first + most] - begin
            where = dataclasses.replace(place, start=block.start + int(begin), num_bytes=0)
            found = records_of(data, own, where)
            records = RecordBlock(
                texts=found.texts,
                starts=own + where.start,
                sizes=np.diff(own, append=len(data)),
                num_bytes=num_bytes,
                told=found.told,
                is_text=is_text,
            )
            yield from batches_of(records, where)
            num_bytes, place = 0, dataclasses.replace(place, line=place.line + len(own))


def line_blocks_of(
    pieces: Iterator[TextPiece],
    start: int,
    last_line_end: Callable[[bytes], int],
    carriage_return: bytes = b"",
    most_bytes: int | None = None,
) -> Iterator[LineBlock]:
    """Cut a stream that begins at byte ``start`` of the text into blocks of whole lines.

    ``last_line_end`` gives the bytes up to the last line end that is sure: a ``\\r`` at the very end may be
    half of one. ``carriage_return`` is the codec's, where it ends lines. A line of more than ``most_bytes``
    (MOST_HELD_BYTES) is not held. At the end stands a block without lines, for what was read behind the last
    one. How the stream is cut into pieces changes no line.
    """
    most = long_documents.MOST_HELD_BYTES if most_bytes is None else most_bytes
    held: list[bytes] = []  # the beginning of a line
    num_held, num_bytes, is_too_long = 0, 0, False
    for data, num_read in _whole_line_ends(_small_pieces(pieces), carriage_return):
        num_bytes += num_read
        ends_here = carriage_return and data.endswith(carriage_return)
        cut = len(data) if ends_here else last_line_end(data)
        if cut and num_held and num_held + cut > most:
            first = _first_cut(data, last_line_end) or cut
            is_too_long = num_held + first > most
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
        if num_held > most:
            is_too_long, held = True, []
    if num_held:
        yield LineBlock(start, num_held, None if is_too_long else b"".join(held), num_bytes)
    elif num_bytes:
        yield LineBlock(start, 0, b"", num_bytes)


def _small_pieces(pieces: Iterator[TextPiece]) -> Iterator[TextPiece]:
    """The same stream in pieces below MOST_HELD_BYTES: 16 KiB of zstd may give half a gigabyte."""
    # A \r and a part of a unit may be kept back and come with the next piece.
    most = long_documents.MOST_HELD_BYTES - 8
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
    for part in filter(None, (kept[:unit], kept[unit:])):  # behind a \r may stand a part of a unit
        yield TextPiece(part, 0)


def _first_cut(data: bytes, last_line_end: Callable[[bytes], int]) -> int:
    """Bytes up to and with the first line end that is sure, of any kind, by halving; 0 for none."""
    low, high = 0, len(data)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if last_line_end(data[:middle]) else (middle, high)
    return last_line_end(data[:high])
