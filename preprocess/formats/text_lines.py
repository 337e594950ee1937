"""Plain text: a document is a line, or a whole file. Compressed text, too.

A part is read in blocks of whole lines, as bytes; a block is decoded whole and split into lines. Only where
it cannot be decoded are its lines decoded one by one, to find the bad ones. A document of more than 4 MiB is
not read here: it comes as a LongDocument, which says where it lies. Compressed text cannot be read twice, so
there it is held.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from preprocess.formats.compression import (
    Compression,
    has_frames,
    line_starts_in,
    text_bytes_about,
    text_of_part,
)
from preprocess.formats.format import (
    SHORT_LINE_BYTES,
    DocumentBatch,
    Inspected,
    Reading,
    Start,
    no_documents,
    one_left_out,
    too_long,
    whole_file_starts,
)
from preprocess.formats.inputs import BadDocument, OpenInput, Place, RangeReader
from preprocess.formats.lines import (
    LineBlock,
    TextPiece,
    codec_of,
    first_line_end,
    last_line_end,
    line_blocks_of,
    line_starts,
)
from preprocess.formats.long_documents import LONG_BYTES, MOST_HELD_BYTES, LongDocument
from preprocess.options import Doc


def can_be_split(reading: Reading) -> bool:
    """Whether a part may begin at a line end: not where a document is a whole file, and not in UTF-16/32."""
    return reading.doc == "line" and not reading.encoding.startswith(("utf-16", "utf-32"))


@dataclass(frozen=True)
class TextLines:
    """``.txt``, plain or compressed."""

    compression: Compression | None

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """See Format."""
        if self.compression is None:
            return Inspected(text_bytes=file.stamp.num_bytes, is_whole=not can_be_split(reading))
        num_bytes, _ = text_bytes_about(file, self.compression, reading)
        is_whole = not (can_be_split(reading) and has_frames(file, self.compression))
        return Inspected(text_bytes=num_bytes, is_whole=is_whole)

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], reading: Reading
    ) -> list[Start | None]:
        """See Format."""
        if not can_be_split(reading):
            return whole_file_starts(file, stretches)
        return line_starts_in(file, self.compression, stretches, first_line_end)

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        """See Format. A line ends as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``."""
        part = reader.part
        none = dataclasses.replace(reader.place(part.text_start, line), keeps_space=reading.keeps_space)
        for start, pieces in text_of_part(reader, self.compression, reading, first_line_end):
            head, pieces = _with_head(pieces)
            codec, num_mark_bytes = codec_of(head if part.start == 0 else b"", reading.encoding)
            place = dataclasses.replace(none, start=start + num_mark_bytes, codec=codec, num_bytes=0)
            pieces = _without_mark(pieces, num_mark_bytes)
            if reading.doc == "line":
                yield from _lines_of(pieces, place, reading, can_be_read_again=self.compression is None)
            elif self.compression is None and part.end - place.start > LONG_BYTES:
                reader.hash_rest()
                yield LongDocument(
                    place=dataclasses.replace(none, start=place.start, end=part.end, codec=codec)
                )
            else:
                yield from _whole_text(pieces, place)
            return
        yield no_documents(none)


def _with_head(pieces: Iterator[TextPiece]) -> tuple[bytes, Iterator[TextPiece]]:
    """The first four bytes of the text, and all pieces."""
    held: list[TextPiece] = []
    head = b""
    for piece in pieces:
        held.append(piece)
        head += piece.data
        if len(head) >= 4:
            break
    return head[:4], itertools.chain(held, pieces)


def _without_mark(pieces: Iterator[TextPiece], num_mark_bytes: int) -> Iterator[TextPiece]:
    for data, num_bytes in pieces:
        cut = min(num_mark_bytes, len(data))
        num_mark_bytes -= cut
        yield TextPiece(data[cut:], num_bytes)


def _whole_text(pieces: Iterator[TextPiece], place: Place) -> Iterator[DocumentBatch | LongDocument]:
    """All of a file as one document."""
    held: list[bytes] = []
    size = num_bytes = 0
    for piece in pieces:
        size, num_bytes = size + len(piece.data), num_bytes + piece.num_bytes
        held = [*held, piece.data] if size <= MOST_HELD_BYTES else []
    where = dataclasses.replace(place, end=place.start + size, num_bytes=num_bytes)
    if size > MOST_HELD_BYTES:
        yield one_left_out(where, *too_long("its text"))
    else:
        yield from _held(b"".join(held), where, "file")


def _held(data: bytes, place: Place, doc: Doc) -> Iterator[DocumentBatch | LongDocument]:
    """One document whose bytes are held, however long."""
    batch = _decode(data, np.zeros(1, np.int64), place, doc)
    if len(data) > LONG_BYTES and batch.texts:
        yield LongDocument(place=place, held=batch.texts[0])
    else:
        yield batch


def _lines_of(
    pieces: Iterator[TextPiece], place: Place, reading: Reading, *, can_be_read_again: bool
) -> Iterator[DocumentBatch | LongDocument]:
    """The lines of a text that begins at ``place``."""
    codec, line = place.codec, place.line
    most_bytes = LONG_BYTES if can_be_read_again else None

    def last_end(data: bytes) -> int:
        return last_line_end(data, codec)

    for block in line_blocks_of(pieces, place.start, last_end, "\r".encode(codec), most_bytes):
        where = dataclasses.replace(
            place, start=block.start, end=block.start + block.size, line=line, num_bytes=block.num_bytes
        )
        if block.data is None and can_be_read_again:
            yield LongDocument(place=where)
            line += 1
            continue
        for batch in _block_documents(block, where, reading):
            line += batch.num_lines
            yield batch


def _block_documents(
    block: LineBlock, place: Place, reading: Reading
) -> Iterator[DocumentBatch | LongDocument]:
    if block.data is None:
        yield one_left_out(place, *too_long("the line"))
        return
    starts = line_starts(block.data, place.codec) if block.data else np.empty(0, np.int64)
    ends = [*starts[1:].tolist(), len(block.data)]
    long = [number for number, end in enumerate(ends[: len(starts)]) if end - starts[number] > LONG_BYTES]
    firsts = sorted({0, *long, *(number + 1 for number in long), len(starts)})
    num_left, line = place.num_bytes, place.line
    for first, last in itertools.pairwise(firsts):
        begin, end = int(starts[first]), ends[last - 1]
        for offset, part_starts, lines in few_lines(
            block.data[begin:end], starts[first:last] - begin, reading.batch_bytes
        ):
            where = dataclasses.replace(
                place,
                start=place.start + begin + offset,
                end=place.start + begin + offset + len(lines),
                line=line,
                num_bytes=num_left,
            )
            num_left = 0
            line += len(part_starts)
            if first in long:
                yield from _held(lines, where, "line")
            else:
                yield _decode(lines, part_starts, where, "line")
    if num_left:
        yield no_documents(dataclasses.replace(place, num_bytes=num_left))


def few_lines(
    block: bytes, starts: npt.NDArray[np.int64], batch_bytes: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], bytes]]:
    """Parts of a block of lines: (byte where it begins, where its lines start in it, its bytes).

    Each line may become two headers and two blocks of a tar, 2 KiB however short it is: so there are at
    most as many in a part as a batch's share of memory allows for (see resources.py).
    """
    most = max(1, batch_bytes // SHORT_LINE_BYTES)
    if len(starts) <= most:
        yield 0, starts, block
        return
    firsts = [*starts[::most].tolist(), len(block)]
    for number, (begin, end) in enumerate(itertools.pairwise(firsts)):
        yield begin, starts[number * most : (number + 1) * most] - begin, block[begin:end]


def _decode(block: bytes, starts: npt.NDArray[np.int64], place: Place, doc: Doc) -> DocumentBatch:
    """Decode a block of documents that lies at ``place``; ``starts`` are their first bytes in it."""
    bad: list[BadDocument] = []
    try:
        text = block.decode(place.codec)
    except UnicodeDecodeError:
        texts = list(_decode_each(block, starts, place, bad))
    else:
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = [text] if doc == "file" else text.split("\n")
        blanks = _blanks(place)
        texts = [item.strip(blanks) for item in lines]
        del texts[len(starts) :]  # behind the last line end there is no line
    kept = np.fromiter(map(bool, texts), np.bool_, len(texts))
    return DocumentBatch(
        texts=[text for text in texts if text],
        lines=np.flatnonzero(kept) + place.line,
        input_number=place.input_number,
        input_offsets=starts[kept] + place.start,
        first_line=place.line,
        num_lines=len(starts),
        num_bytes=place.num_bytes,
        bad=bad,
        keeps_space=place.keeps_space,
    )


def _blanks(place: Place) -> str | None:
    """What is stripped from documents that lie here; None: all white space."""
    return " \t\n\r\v\f" if place.keeps_space else None


def _decode_each(
    block: bytes, starts: npt.NDArray[np.int64], place: Place, bad: list[BadDocument]
) -> Iterator[str]:
    """Decode documents one by one; one that cannot be decoded is empty, and told of in ``bad``."""
    ends = [*starts[1:].tolist(), len(block)]
    for number, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        raw = block[start:end]
        try:
            yield raw.decode(place.codec).replace("\r\n", "\n").replace("\r", "\n").strip(_blanks(place))
        except UnicodeDecodeError as error:
            error.start += place.start + start
            one = dataclasses.replace(
                place, start=place.start + start, end=place.start + end, line=place.line + number
            )
            bad.append(one.undecodable(error))
            yield ""
