r"""Cut plain text into documents at blank lines (``--doc paragraph``) or at a string (``--separator``).

A shard may begin behind each separator. What is cut does not depend on where shards begin: white space around
a document is stripped. A string that overlaps itself, such as ``---`` in ``----``, ends no shard, nor does
one beyond ASCII.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from preprocess.read import formats
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES
from shardprep.format.plan_options import PlanOptions

_LINE_END = rb"(?:\r\n|\r(?!\n)|\n)"
_BLANK_LINES = re.compile(_LINE_END + rb"(?:[ \t]*" + _LINE_END + rb")+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t]*" + _LINE_END + rb")*")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
_KEPT_BYTES = 256  # of blank lines, to find one across two reads


class Separator(NamedTuple):
    """What ends a document."""

    pattern: re.Pattern[bytes]
    num_kept_bytes: int  # at the end of a read, in which a separator may begin
    can_end_shards: bool


class Piece(NamedTuple):
    """The text of one document, None if it is too long, and where it stands in the file's text."""

    start: int
    num_bytes: int
    text: bytes | None


@functools.lru_cache(maxsize=16)
def _string(separator: str, codec: str) -> Separator:
    data = re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], separator).encode(codec)
    overlaps_itself = any(data[size:] == data[:-size] for size in range(1, len(data)))
    return Separator(re.compile(re.escape(data)), len(data) - 1, not overlaps_itself)


def separator_of(options: PlanOptions, codec: str) -> Separator:
    """Return what ends documents of .txt by these options."""
    if options.doc == "paragraph":
        return Separator(_BLANK_LINES, _KEPT_BYTES, can_end_shards=True)
    return _string(options.separator, codec.removesuffix("-sig"))


def may_end_shards(options: PlanOptions) -> bool:
    """Return whether shards may begin behind separators: if these are the same bytes in each encoding."""
    return options.separator.isascii() and separator_of(options, "utf-8").can_end_shards


def first_start(file: OpenInput, byte: int, end: int, separator: Separator) -> int | None:
    """Return the first byte at or after ``byte`` behind a separator, see ``formats.first_place``."""

    def find(block: bytes, position: int) -> int | None:
        for match in separator.pattern.finditer(block):
            if position + match.end() >= byte:
                return position + match.end()
        return None

    num_kept = separator.num_kept_bytes
    return formats.first_place(file, byte, end, find, before=num_kept + 1, overlap=num_kept)


def documents_between(
    pieces: Iterable[tuple[bytes, int]], start: int, separator: Separator
) -> Iterator[tuple[list[Piece], int]]:
    """Yield the documents that end in each piece of text, and the number of file bytes read for it.

    ``start``: place of the first byte in the file's text. Memory is bounded, however long a document is.
    """
    buffer = bytearray()  # text since the last separator; only its end, once it is too long
    num_dropped = 0  # bytes of this document that were in the buffer before
    num_searched = 0  # bytes of the buffer in which no separator begins
    for data, num_read in pieces:
        buffer += data
        documents: list[Piece] = []
        begin = 0
        for match in separator.pattern.finditer(buffer, num_searched):
            # A run of blank lines may go on in the next piece.
            if match.end() == len(buffer) and separator.pattern is _BLANK_LINES:
                break
            size = num_dropped + match.start() - begin
            documents.append(_document(buffer[begin : match.start()], start, size))
            start += size + match.end() - match.start()
            begin = match.end()
            num_dropped = 0
        del buffer[:begin]
        if num_dropped + len(buffer) > MOST_DOCUMENT_BYTES:
            num_kept = min(len(buffer), separator.num_kept_bytes)
            num_dropped += len(buffer) - num_kept
            del buffer[: len(buffer) - num_kept]
        num_searched = max(0, len(buffer) - separator.num_kept_bytes)
        yield documents, num_read
    if buffer or num_dropped:
        yield [_document(buffer, start, num_dropped + len(buffer))], 0


def _document(text: bytearray, start: int, num_bytes: int) -> Piece:
    if num_bytes > MOST_DOCUMENT_BYTES:
        return Piece(start, num_bytes, None)
    match = _LEADING_BLANK_LINES.match(text)
    num_blank = match.end() if match else 0
    return Piece(start + num_blank, num_bytes - num_blank, bytes(text[num_blank:]))
