"""What is sampled of inputs that are no plain text (JSON, tables, compressed files), read by their formats.

A sample is told in bytes of a file's text, which few formats can be entered by. So each stretch is read from
the next place where a part of the file may begin, and a stretch without such a place lengthens the one before
it: of a file that is read whole, or has one row group, the beginning stands for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from preprocess.documents import format_of
from preprocess.formats.format import DocumentBatch, Reading
from preprocess.inputs import BadDocument, ByteRange, OpenInput, RangeReader
from preprocess.long_documents import LongDocument


class SampledPart(NamedTuple):
    """A part of a file, of which text is read up to some bytes."""

    start: int  # byte of the file
    text_start: int  # byte of the text there, where the file is compressed; else 0
    end: int  # byte of the file
    most_bytes: int | None  # of text; None: all


class Texts(NamedTuple):
    """Texts that follow each other in a file."""

    texts: list[str]
    bad: list[BadDocument]
    num_bytes: int  # of the file, that were read for them


def text_bytes_of(file: OpenInput, reading: Reading) -> int:
    """About how much text a file has; of plain text, its size. Raises BadInput, ReadWriteError."""
    form = format_of(file.path.name)
    assert form is not None, file.path  # it was listed by its name
    return form.inspect(file, reading).text_bytes


def sampled_parts(
    file: OpenInput, stretches: Sequence[tuple[int, int]], text_bytes: int, reading: Reading
) -> list[SampledPart]:
    """The parts of a file to read for stretches (byte, end) of its about ``text_bytes`` of text, ascending.

    One stretch of the whole text is one part without a limit. Raises BadInput, ReadWriteError.
    """
    size = file.stamp.num_bytes
    if list(stretches) == [(0, text_bytes)]:
        return [SampledPart(0, 0, size, None)]
    form = format_of(file.path.name)
    assert form is not None, file.path
    begin_bytes = [begin * size // text_bytes for begin, _ in stretches]
    places = list(itertools.pairwise([*begin_bytes, size]))
    begins: list[tuple[int, int]] = []
    limits: list[int] = []
    for found, (begin, end) in zip(form.starts(file, places, reading), stretches, strict=True):
        if found is not None and found.byte < size and (not begins or found.byte > begins[-1][0]):
            begins.append((found.byte, found.text_byte))
            limits.append(0)
        elif not begins:
            begins.append((0, 0))
            limits.append(0)
        limits[-1] += end - begin
    ends = [*(byte for byte, _ in begins[1:]), size]
    return [
        SampledPart(byte, text_byte, end, limit)
        for (byte, text_byte), end, limit in zip(begins, ends, limits, strict=True)
    ]


def read_texts(file: OpenInput, part: SampledPart, reading: Reading) -> Iterator[Texts]:
    """The texts of a part as they come, a long document in pieces.

    Raises BadInput, ReadWriteError, Refused.
    """
    form = format_of(file.path.name)
    assert form is not None, file.path
    span = ByteRange(
        input_number=0, path=file.path, start=part.start, end=part.end, text_start=part.text_start
    )
    for item in form.read(RangeReader(file, span, None), reading, 0):
        if isinstance(item, DocumentBatch):
            yield Texts(item.texts, item.bad, item.num_bytes)
        else:
            yield from _long_texts(item)


def _long_texts(document: LongDocument) -> Iterator[Texts]:
    try:
        for piece in document.text():
            yield Texts([piece], [], 0)
    except UnicodeDecodeError as error:
        yield Texts([], [document.place.undecodable(error)], document.num_bytes)
    else:
        yield Texts([], [], document.num_bytes)
