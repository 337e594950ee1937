"""The text a tokenizer is trained on: a folder's lines, in bounded memory and bounded number.

Files are read in blocks and never whole. Inputs beyond ``max_bytes`` are sampled in stretches of
about 1 MiB whose beginnings are spread evenly over all files, so that a 15 TB input costs no more
reads than ``max_bytes``; the price is about one line a stretch, cut by its edges and left out.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from preprocess.input_files import list_inputs
from preprocess.inputs import OpenInput
from shardprep.errors import NotFound, UsageError

SPAN_BYTES = 1 << 20
MIN_NUM_SPANS = 64
READ_BYTES = 1 << 18
PIECE_CHARS = 4096  # longer lines are cut: one word of a million letters would stall every merge
WIDEST_CHAR_BYTES = 4  # spans begin at multiples of it, so that UTF-16 and UTF-32 stay aligned
# Stands in decoded text where bytes could not be decoded: a lone surrogate, which no text has.
UNDECODABLE = "\udcff"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes [start, stop) of a file of ``size_bytes``."""

    path: Path
    start: int
    stop: int
    size_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def find_spans(input_dir: Path, max_bytes: int, recursive: bool, encoding: str) -> list[Span]:
    """What to read of the folder's ``*.txt``, in the order of their relative paths.

    Errors: NotFound (no folder, no ``*.txt`` in it), UsageError (no such encoding), ReadWriteError.
    """
    try:
        b"\0\0\0\0".decode(encoding, "replace")
    except (LookupError, ValueError) as error:
        raise UsageError(f"--encoding {encoding!r}: Python knows no such text encoding") from error
    paths = [path for path in list_inputs(input_dir, recursive=recursive) if path.name.endswith(".txt")]
    if not paths:
        raise NotFound(
            f"--input_dir {input_dir} holds no .txt file; a tokenizer is trained on plain text: "
            "jq -r .text FILE.jsonl > FILE.txt"
        )
    sizes = [OpenInput(path).stamp.num_bytes for path in paths]
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
    """Iterates over batches of stripped lines, none empty, and counts what it met on the way.

    ``progress`` is told the bytes of each block that was read.
    """

    def __init__(
        self, spans: list[Span], encoding: str, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self.encoding = encoding
        self.is_read = False
        self.num_lines = 0
        self.num_undecodable = 0
        self._spans = spans
        self._first_undecodable: Path | None = None
        self._progress = progress

    def __iter__(self) -> Iterator[list[str]]:
        for span in self._spans:
            yield from self._batches(span)
        self.is_read = True

    def _batches(self, span: Span) -> Iterator[list[str]]:
        for num_bytes, lines in read_lines(span, self.encoding):
            self._progress(num_bytes)
            yield self._documents(lines, span.path)

    def _documents(self, lines: list[str], path: Path) -> list[str]:
        readable = [line for line in lines if UNDECODABLE not in line]
        if len(readable) < len(lines):
            self.num_undecodable += len(lines) - len(readable)
            self._first_undecodable = self._first_undecodable or path
        documents = [stripped for line in readable if (stripped := line.strip())]
        self.num_lines += len(documents)
        return documents

    def describe(self) -> str:
        """What was read and what was left out."""
        num_files = len({span.path for span in self._spans})
        left_out = ""
        if self.num_undecodable:
            left_out = (
                f"; left out {self.num_undecodable:,} lines that are not {self.encoding}"
                f" (the first in {self._first_undecodable})"
            )
        lines = f"{self.num_lines:,} lines, long ones in pieces"
        num_bytes = sum(span.num_bytes for span in self._spans)
        return f"read {num_bytes:,} bytes of {num_files:,} files, {lines}{left_out}"


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
