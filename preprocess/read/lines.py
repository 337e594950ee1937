r"""Line ends, and streams of text cut into blocks of whole lines.

Lines of plain text end at ``\n``, ``\r\n`` or ``\r``, as Python's text mode reads them; those of JSON at
``\n``. Every encoding that is read has these ends as single bytes. Memory is bounded however long a line is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.read.format import MOST_DOCUMENT_BYTES, SHORT_LINE_BYTES, Records, no_records, too_long
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import UnusableText

Numbers = npt.NDArray[np.int64]
_FIRST_SCAN_BYTES, _NEXT_SCAN_BYTES, _MOST_SCAN_BYTES = 16 << 10, 64 << 10, 1 << 20


class TextPiece(NamedTuple):
    """Bytes of a file's text, at most MOST_DOCUMENT_BYTES, and the file's bytes that were read for them."""

    data: bytes
    num_bytes: int


class LineBlock(NamedTuple):
    """Whole lines that follow each other, or one line that is too long to be held."""

    start: int  # byte of the text
    size: int  # bytes of text
    data: bytes | None  # None: it is one line that is too long
    num_bytes: int  # of the file that were read for it


class LineEnds:
    r"""Where lines end: at ``\n`` alone, or also at ``\r`` and ``\r\n`` (``with_cr``)."""

    def __init__(self, *, with_cr: bool) -> None:
        self.with_cr = with_cr

    def first(self, block: bytes, *, is_last: bool = False) -> int:
        r"""Return the bytes up to and with the first line end; 0 where it is not sure.

        A ``\r`` at the very end may be half of a line end, unless the block is the text's last.
        """
        newline = block.find(b"\n") + 1
        if not self.with_cr:
            return newline
        cr = block.find(b"\r", 0, newline or len(block)) + 1
        if not cr or cr + 1 == newline:
            return newline
        return cr if cr < len(block) or is_last else 0

    def last(self, block: bytes) -> int:
        r"""Return the bytes up to and with the last line end that is sure; 0 for none."""
        newline = block.rfind(b"\n")
        return (max(newline, block.rfind(b"\r", 0, -1)) if self.with_cr else newline) + 1

    def starts(self, block: bytes) -> Numbers:
        """Return where each line of a block of whole lines starts in it."""
        letters = np.frombuffer(block, np.uint8)
        is_end = letters == 10
        if self.with_cr and b"\r" in block:
            is_cr = letters == 13
            is_cr[:-1] &= ~is_end[1:]
            is_end |= is_cr
        starts = np.concatenate(([0], np.flatnonzero(is_end) + 1))
        return starts[:-1] if starts[-1] == len(block) else starts


def first_line_start(file: OpenInput, offset: int, end: int, line_ends: LineEnds) -> int | None:
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
        if line_end := line_ends.first(block, is_last=is_last):
            return position + line_end
        # A last \r may be half of a line end: it is read again with what follows.
        position += len(block) - (block.endswith(b"\r") and not is_last)
        num_bytes = min(max(_NEXT_SCAN_BYTES, (position - offset) // 4), _MOST_SCAN_BYTES)
    return None if position < size else size


def line_blocks(pieces: Iterator[TextPiece], start: int, line_ends: LineEnds) -> Iterator[LineBlock]:
    """Cut a stream that begins at byte ``start`` of the text into blocks of whole lines.

    A line of more than MOST_DOCUMENT_BYTES is not held. At the end stands a block without lines, for what was
    read behind the last one. How the stream is cut into pieces changes no line.
    """
    begun: list[bytes] = []  # pieces of a line that goes on; none where it is too long
    num_begun = num_bytes = 0
    for data, num_read in _whole_line_ends(pieces, line_ends):
        num_bytes += num_read
        cut = line_ends.last(data)
        if data.endswith(b"\r") and line_ends.with_cr:
            cut = len(data)  # nothing follows that would make it half of a line end
        if cut and num_begun + cut > MOST_DOCUMENT_BYTES:
            # The line that goes on here may be too long, those behind it are not.
            first = line_ends.first(data) or cut
            size = num_begun + first
            whole = b"".join([*begun, data[:first]]) if size <= MOST_DOCUMENT_BYTES else None
            yield LineBlock(start, size, whole, 0)
            start, begun, num_begun = start + size, [], 0
            data, cut = data[first:], cut - first
        if cut:
            yield LineBlock(start, num_begun + cut, b"".join([*begun, data[:cut]]), num_bytes)
            start, begun, num_begun, num_bytes = start + num_begun + cut, [], 0, 0
        begun.append(data[cut:])
        num_begun += len(data) - cut
        if num_begun > MOST_DOCUMENT_BYTES:
            begun = []
    if num_begun > MOST_DOCUMENT_BYTES:
        yield LineBlock(start, num_begun, None, num_bytes)
    elif num_begun or num_bytes:
        yield LineBlock(start, num_begun, b"".join(begun), num_bytes)


def _whole_line_ends(pieces: Iterator[TextPiece], line_ends: LineEnds) -> Iterator[TextPiece]:
    r"""Yield the same stream; a ``\r`` at the end of a piece is a whole line end."""
    kept = b""
    for data, num_bytes in pieces:
        joined = kept + data
        kept = b"\r" if line_ends.with_cr and joined.endswith(b"\r") else b""
        yield TextPiece(joined[: len(joined) - len(kept)], num_bytes)
    if kept:
        yield TextPiece(kept, 0)


Texts = list[bytes | UnusableText]


def line_records(
    blocks: Iterator[LineBlock],
    line_ends: LineEnds,
    batch_bytes: int,
    texts_of: Callable[[bytes, Numbers, int], tuple[Texts, dict[str, list[str]]]],
) -> Iterator[Records]:
    """Yield the records of blocks of lines.

    ``texts_of`` reads whole lines, given where each starts in them, and the byte of the text where the first
    one starts: their texts, and what they tell beside them. Each line may become two headers and two blocks
    of a tar, 2 KiB however short it is: so as many are read at once as a batch's share of memory allows for
    (see resources.py).
    """
    most = max(1, batch_bytes // SHORT_LINE_BYTES)
    for block in blocks:
        if block.data is None:
            yield Records(
                texts=[too_long("the line")],
                starts=np.array([block.start]),
                sizes=np.array([block.size]),
                num_bytes=block.num_bytes,
            )
            continue
        num_bytes, starts = block.num_bytes, line_ends.starts(block.data)
        if not len(starts):
            yield no_records(num_bytes)
        bounds = [*starts[::most].tolist(), len(block.data)]
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            own = starts[number * most : (number + 1) * most] - begin
            data = block.data[begin:end]
            texts, columns = texts_of(data, own, block.start + begin)
            yield Records(
                texts=texts,
                starts=own + (block.start + begin),
                sizes=np.diff(own, append=len(data)),
                num_bytes=num_bytes,
                columns=columns,
            )
            num_bytes = 0
