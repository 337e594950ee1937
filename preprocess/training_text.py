"""The text a tokenizer is trained on: a folder's documents, in bounded memory and bounded number.

Plain text is read by lines; all else (JSON, tables, compressed files) by its format. Files are read in blocks
and never whole. Inputs beyond ``max_bytes`` are sampled in stretches of about 1 MiB whose beginnings are
spread evenly over all files, so that a 15 TB input costs no more reads than ``max_bytes``; the price is about
one line per stretch, cut by its edges and left out.

What is no plain text can be entered at few bytes alone. So each stretch of it is read from the next place
where a part of the file may begin, and a stretch without such a place lengthens the one before it: of a file
that is read whole, or has one row group, the beginning stands for all.
"""

from __future__ import annotations

import codecs
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from preprocess.documents import format_of_input
from preprocess.formats.format import DocumentBatch, Reading
from preprocess.formats.text_lines import TextLines
from preprocess.input_files import list_inputs
from preprocess.inputs import BadDocument, ByteRange, OpenInput, RangeReader
from preprocess.long_documents import LongDocument
from preprocess.text_fields import TextFields
from shardprep.errors import UsageError
from shardprep.format.names import place_text

SPAN_BYTES = 1 << 20
MIN_NUM_SPANS = 64
READ_BYTES = 1 << 18
PIECE_CHARS = 4096  # longer lines are cut: one word of a million letters would stall every merge
WIDEST_CHAR_BYTES = 4  # spans begin at multiples of it, so that UTF-16 and UTF-32 stay aligned
# Stands in decoded text where bytes could not be decoded: a lone surrogate, which no text has.
UNDECODABLE = "\udcff"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes [start, stop) of the text of a file that has ``size_bytes`` of it, about."""

    path: Path
    start: int
    stop: int
    size_bytes: int  # of plain text the file's size

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def training_reading(encoding: str, fields: TextFields | None = None) -> Reading:
    """How inputs are read for training: ``fields`` are the text of records. Raises UsageError."""
    try:
        b"\0\0\0\0".decode(encoding, "replace")
    except (LookupError, ValueError) as error:
        raise UsageError(f"--encoding {encoding!r}: Python knows no such text encoding") from error
    known = codecs.lookup(encoding).name
    return Reading(doc="line", encoding=known, batch_bytes=READ_BYTES, fields=fields or TextFields())


def find_spans(input_dir: Path, max_bytes: int, recursive: bool, reading: Reading) -> list[Span]:
    """What to read of the folder's inputs, in the order of their relative paths.

    Errors: NotFound (no folder, no input in it), BadInput (a file is not of its format, or lacks the columns
    of the text), UsageError (a format needs a library that is missing), ReadWriteError.
    """
    paths = list_inputs(input_dir, recursive=recursive)
    sizes = [text_bytes_of(OpenInput(path), reading) for path in paths]
    return sample_spans(list(zip(paths, sizes, strict=True)), max_bytes)


def sample_spans(files: list[tuple[Path, int]], max_bytes: int) -> list[Span]:
    """All of the files where they hold at most ``max_bytes``, else that many bytes spread over them."""
    total_bytes = sum(size for _, size in files)
    if total_bytes <= max_bytes:
        return [Span(path=path, start=0, stop=size, size_bytes=size) for path, size in files if size]
    num_spans = max(MIN_NUM_SPANS, max_bytes // SPAN_BYTES)
    starts = [i * total_bytes // num_spans for i in range(num_spans)]
    length = max_bytes // num_spans
    spans: list[Span] = []
    base, i = 0, 0
    for path, size in files:
        while i < num_spans and starts[i] < base + size:
            start = -(-max(0, starts[i] - base) // WIDEST_CHAR_BYTES) * WIDEST_CHAR_BYTES
            stop = min(size, starts[i] - base + length)
            if stop > start:
                spans.append(Span(path=path, start=start, stop=stop, size_bytes=size))
            if starts[i] + length > base + size:
                break  # the rest of it lies in the next file
            i += 1
        base += size
    return spans


class TrainingText:
    """Iterates over batches of stripped texts, none empty, and counts what it met on the way.

    A text is a document, or a piece of a long one. ``progress`` is told the bytes of text, about, of each
    block that was read. At most ``max_bytes`` are taken of records, whatever a file's size promised.
    """

    def __init__(
        self,
        spans: list[Span],
        reading: Reading,
        progress: Callable[[int], None] = lambda _: None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self.is_read = False
        self.num_texts = 0
        self.num_bytes = 0  # of text
        self._spans = spans
        self._reading = reading
        self._progress = progress
        self._max_bytes = max_bytes
        self._bad: Counter[str] = Counter()  # documents left out, by reason
        self._first_bad = ""

    def __iter__(self) -> Iterator[list[str]]:
        for path, spans in itertools.groupby(self._spans, lambda span: span.path):
            if isinstance(format_of_input(path.name), TextLines):
                for span in spans:
                    yield from self._lines(span)
            else:
                yield from self._records(path, list(spans))
        self.is_read = True

    def _lines(self, span: Span) -> Iterator[list[str]]:
        for num_bytes, lines in read_lines(span, self._reading.encoding):
            self._progress(num_bytes)
            self.num_bytes += num_bytes
            readable = [line for line in lines if UNDECODABLE not in line]
            if len(readable) < len(lines):
                self._leave_out(["undecodable"] * (len(lines) - len(readable)), str(span.path))
            yield self._stripped(readable)

    def _records(self, path: Path, spans: list[Span]) -> Iterator[list[str]]:
        file, size = OpenInput(path), spans[0].size_bytes
        num_left = sum(span.num_bytes for span in spans)  # for progress
        for part in sampled_parts(file, [(span.start, span.stop) for span in spans], size, self._reading):
            ends_at = self.num_bytes + part.most_bytes if part.most_bytes is not None else None
            for texts, bad, num_bytes in read_texts(file, part, self._reading):
                self._leave_out_records(bad, path)
                pieces, is_full = self._first_pieces(texts, ends_at)
                told = min(num_left, num_bytes * size // max(1, file.stamp.num_bytes))
                num_left -= told
                self._progress(told)
                yield self._stripped(pieces)
                if is_full:
                    break
        self._progress(num_left)

    def _first_pieces(self, texts: list[str], ends_at: int | None) -> tuple[list[str], bool]:
        """The texts in pieces, up to where enough was taken; whether it was."""
        limits = [limit for limit in (ends_at, self._max_bytes) if limit is not None]
        pieces: list[str] = []
        for piece in itertools.chain.from_iterable(map(_pieces, texts)):
            num_bytes = len(piece.encode())
            if limits and self.num_bytes + num_bytes > min(limits):
                return pieces, True
            self.num_bytes += num_bytes
            pieces.append(piece)
        return pieces, False

    def _stripped(self, texts: list[str]) -> list[str]:
        found = [stripped for text in texts if (stripped := text.strip())]
        self.num_texts += len(found)
        return found

    def _leave_out_records(self, bad: list[BadDocument], path: Path) -> None:
        if bad:
            self._leave_out([one.reason for one in bad], place_text(str(path), bad[0].source_offset))

    def _leave_out(self, reasons: list[str], where: str) -> None:
        self._bad.update(reasons)
        self._first_bad = self._first_bad or where

    def describe(self) -> str:
        """What was read and what was left out."""
        num_files = len({span.path for span in self._spans})
        found = (
            f"read {self.num_bytes:,} bytes of text in {num_files:,} files, {self.num_texts:,} documents, "
            "long ones in pieces"
        )
        if not self._bad:
            return found
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._bad.most_common())
        return (
            f"{found}; left out {self._bad.total():,} documents ({reasons}; the first in {self._first_bad})"
        )


def read_lines(span: Span, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (bytes read, lines) block by block; lines over PIECE_CHARS come in pieces.

    Lines end as in Python's text mode. UNDECODABLE stands for bad bytes. A line that the span's
    edge cuts is left out, unless it fills the span.
    """
    file = OpenInput(span.path)
    decoder = _decoder(encoding)
    if span.start and codecs.lookup(encoding).name in {"utf-16", "utf-32"}:
        decoder.decode(file.read(0, WIDEST_CHAR_BYTES))  # tells it the byte order
    position = span.start
    tail, cut_at_start, is_one_line = "", span.start > 0, True
    while position < span.stop and (block := file.read(position, min(position + READ_BYTES, span.stop))):
        is_first = position == span.start
        position += len(block)
        text = decoder.decode(block, final=position == span.stop == span.size_bytes)
        if is_first and span.start:
            text = text.lstrip(UNDECODABLE)  # a character that the span's edge cut
        ended, newline, tail = (tail + text).rpartition("\n")
        lines = [piece for line in ended.split("\n") for piece in _pieces(line)] if newline else []
        if cut_at_start and newline:
            lines, cut_at_start = lines[1:], False
        is_one_line = is_one_line and not newline
        *pieces, tail = _pieces(tail)
        cut_at_start = cut_at_start and not pieces
        yield len(block), lines + pieces
    if span.stop == span.size_bytes or is_one_line:
        yield 0, [tail]


def _pieces(line: str) -> Iterator[str]:
    """Cut a line into pieces of at most PIECE_CHARS, before a space where the second half has one."""
    start = 0
    while len(line) - start > PIECE_CHARS:
        space = line.rfind(" ", start + PIECE_CHARS // 2, start + PIECE_CHARS)
        stop = space if space > 0 else start + PIECE_CHARS
        yield line[start:stop]
        start = stop
    yield line[start:]


def _decoder(encoding: str) -> io.IncrementalNewlineDecoder:
    """Decodes block by block, all line ends to ``\\n``; UNDECODABLE in place of bad bytes."""
    codecs.register_error("shardprep_mark", _mark)
    return io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder(encoding)(errors="shardprep_mark"), translate=True
    )


def _mark(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return UNDECODABLE, error.end


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
    form = format_of_input(file.path.name)
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
    form = format_of_input(file.path.name)
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
    form = format_of_input(file.path.name)
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
