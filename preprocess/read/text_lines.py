"""Plain text: a document is a line, or a whole file. Compressed text, too.

A part is read in blocks of whole lines, as bytes. Where a block is UTF-8, and it nearly always is, its lines
are split at once. The lines of any other block are decoded one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from preprocess.read.compressed import LineFormat
from preprocess.read.format import MOST_DOCUMENT_BYTES, Records, too_long
from preprocess.read.inputs import RangeReader
from preprocess.read.lines import LineEnds, Numbers, TextPiece, Texts, line_blocks, line_records
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.format.options import PlanOptions

_MARK = b"\xef\xbb\xbf"
# Which white space of ``str.strip`` ``bytes.strip`` leaves: by code point, all below 0x10000.
_IS_WIDE_SPACE = np.zeros(0x10000, np.bool_)
_IS_WIDE_SPACE[0x80:0x3001] = [chr(point).isspace() for point in range(0x80, 0x3001)]
_IS_WIDE_SPACE[0x1C:0x20] = True


class TextLines(LineFormat):
    """``.txt``."""

    line_ends = LineEnds(with_cr=True)

    def can_be_split(self, options: PlanOptions) -> bool:
        """Return False where a document is a whole file."""
        return options.doc == "line"

    def read(
        self,
        reader: RangeReader,
        options: PlanOptions,
        fields: TextFields,  # noqa: ARG002 - lines have none
        batch_bytes: int,
    ) -> Iterator[Records]:
        """Yield lines, which end as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``."""
        start, pieces = self.text_of_part(reader, options, batch_bytes)
        codec = options.encoding
        if codec == "utf-8-sig":
            codec = "utf-8"
            if reader.part.start == 0:
                num_mark_bytes, pieces = _without_mark(pieces)
                start += num_mark_bytes
        if options.doc == "file":
            yield _whole_text(pieces, start, codec)
            return
        read = functools.partial(_texts_of, codec)
        yield from line_records(line_blocks(pieces, start, self.line_ends), self.line_ends, batch_bytes, read)


def _without_mark(pieces: Iterator[TextPiece]) -> tuple[int, Iterator[TextPiece]]:
    """Return the bytes of a text's byte order mark, and what stands behind it."""
    head, num_bytes = b"", 0
    for piece in pieces:
        head, num_bytes = head + piece.data, num_bytes + piece.num_bytes
        if len(head) >= len(_MARK):
            break
    rest = head.removeprefix(_MARK)
    return len(head) - len(rest), itertools.chain([TextPiece(rest, num_bytes)], pieces)


def _whole_text(pieces: Iterator[TextPiece], start: int, codec: str) -> Records:
    """Return a file as one document."""
    held: list[bytes] = []
    size = num_bytes = 0
    for piece in pieces:
        size, num_bytes = size + len(piece.data), num_bytes + piece.num_bytes
        held = [*held, piece.data] if size <= MOST_DOCUMENT_BYTES else []
    text: bytes | UnusableText = too_long("its text")
    if size <= MOST_DOCUMENT_BYTES:
        text = _text_of(b"".join(held), start, codec)
    return Records(texts=[text], starts=np.array([start]), sizes=np.array([size]), num_bytes=num_bytes)


def _texts_of(codec: str, block: bytes, starts: Numbers, at: int) -> tuple[Texts, dict[str, list[str]]]:
    if codec == "utf-8":
        with contextlib.suppress(UnicodeDecodeError):
            return _stripped(block, block.decode())[: len(starts)], {}
    bounds = itertools.pairwise([*starts.tolist(), len(block)])
    return [_text_of(block[begin:end], at + begin, codec) for begin, end in bounds], {}


def _stripped(block: bytes, text: str) -> Texts:
    """Strip the lines of a block that is UTF-8, given as ``text``, too; behind the last end stands one more.

    bytes.strip does it, in half the time, where the block has no white space but that of ASCII.
    """
    if b"\r" in block:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    else:
        code_units = np.frombuffer(text.encode("utf-16-le"), "<u2")
        if not _IS_WIDE_SPACE.take(code_units, mode="clip").any():
            return [line.strip() for line in block.split(b"\n")]
    return [line.strip().encode() for line in text.split("\n")]


def _text_of(data: bytes, at: int, codec: str) -> bytes | UnusableText:
    """Return the text of a document that begins at byte ``at``."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {at + error.start} is not {codec}: {error.reason}")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.strip().encode()
