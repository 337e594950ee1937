"""Plain text: a document is a line, or a whole file. Compressed text, too.

A part is read in blocks of whole lines, as bytes; a block is decoded whole and split into lines. Only where
it cannot be decoded are its lines decoded one by one, to find the bad ones. A document of more than 4 MiB is
not read here: it comes as a LongDocument, which says where it lies. Compressed text cannot be read twice, so
there it is held.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from preprocess.read import lines, long_documents
from preprocess.read.compression import LineFormat
from preprocess.read.format import DocumentBatch, Reading, RecordBlock, batches_of, one_left_out, too_long
from preprocess.read.inputs import Place, RangeReader
from preprocess.read.lines import Records, TextPiece, codec_of
from preprocess.read.long_documents import LongDocument
from preprocess.read.text_fields import UnusableText


class TextLines(LineFormat):
    """``.txt``."""

    def can_be_split(self, reading: Reading) -> bool:
        """Not where a document is a whole file, and not in UTF-16/32."""
        return reading.doc == "line" and not reading.encoding.startswith(("utf-16", "utf-32"))

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        """A line ends as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``."""
        part = reader.part
        start, pieces = self.text_of_part(reader, reading)
        codec, num_mark_bytes = codec_of(b"", reading.encoding)
        if part.start == 0:
            codec, num_mark_bytes, pieces = _without_mark(pieces, reading.encoding)
        place = dataclasses.replace(
            reader.place(start + num_mark_bytes, line), codec=codec, keeps_space=reading.keeps_space
        )
        is_plain = self.compression is None
        if reading.doc == "line":
            blocks = lines.line_blocks_of(
                pieces,
                place.start,
                lambda data: lines.last_line_end(data, codec),
                "\r".encode(codec),
                long_documents.LONG_BYTES if is_plain else None,
            )
            yield from lines.line_documents(
                blocks,
                place,
                reading.batch_bytes,
                lambda data: lines.line_starts(data, codec),
                _texts_of,
                is_text=True,
                can_be_read_again=is_plain,
            )
        elif is_plain and part.end - place.start > long_documents.LONG_BYTES:
            reader.hash_rest()
            yield LongDocument(place=dataclasses.replace(place, end=part.end))
        else:
            yield from _whole_text(pieces, place)


def _without_mark(pieces: Iterator[TextPiece], encoding: str) -> tuple[str, int, Iterator[TextPiece]]:
    """The codec of a text, the bytes of its byte order mark, and what stands behind it."""
    head, num_bytes = b"", 0
    for piece in pieces:
        head, num_bytes = head + piece.data, num_bytes + piece.num_bytes
        if len(head) >= 4:
            break
    codec, num_mark_bytes = codec_of(head[:4], encoding)
    return codec, num_mark_bytes, itertools.chain([TextPiece(head[num_mark_bytes:], num_bytes)], pieces)


def _whole_text(pieces: Iterator[TextPiece], place: Place) -> Iterator[DocumentBatch | LongDocument]:
    held: list[bytes] = []
    size = num_bytes = 0
    for piece in pieces:
        size, num_bytes = size + len(piece.data), num_bytes + piece.num_bytes
        held = [*held, piece.data] if size <= long_documents.MOST_HELD_BYTES else []
    if size > long_documents.MOST_HELD_BYTES:
        where = dataclasses.replace(place, end=place.start + size, num_bytes=num_bytes)
        yield one_left_out(where, too_long("its text"))
        return
    record = RecordBlock(
        texts=[_text_of(b"".join(held), place)],
        starts=np.array([place.start]),
        sizes=np.array([size]),
        num_bytes=num_bytes,
        is_text=True,
    )
    yield from batches_of(record, place)


def _texts_of(block: bytes, starts: npt.NDArray[np.int64], place: Place) -> Records:
    try:
        text = block.decode(place.codec)
    except UnicodeDecodeError:
        bounds = itertools.pairwise([*starts.tolist(), len(block)])
        return Records([_text_of(block[begin:end], place, begin) for begin, end in bounds])
    texts = _with_one_end(text).split("\n")[: len(starts)]  # behind the last line end there is no line
    blanks = _blanks(place)
    return Records([text.strip(blanks) for text in texts])


def _text_of(data: bytes, place: Place, begin: int = 0) -> str | UnusableText:
    """The text of a document that begins so many bytes behind ``place``."""
    try:
        return _with_one_end(data.decode(place.codec)).strip(_blanks(place))
    except UnicodeDecodeError as error:
        error.start += place.start + begin
        return UnusableText("undecodable", place.undecodable(error).detail)


def _with_one_end(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _blanks(place: Place) -> str | None:
    """What is stripped from documents that lie here; None: all white space."""
    return " \t\n\r\v\f" if place.keeps_space else None
