"""Plain text: a document is a line, or a whole file. Compressed text, too.

A part is read in blocks of whole lines, as bytes. Where a block is UTF-8, and it nearly always is, its lines
are found and stripped in numpy. The lines of any other block are decoded one by one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from preprocess.read.compressed import LineFormat
from preprocess.read.format import MOST_DOCUMENT_BYTES, Records, too_long
from preprocess.read.inputs import RangeReader
from preprocess.read.lines import LineEnds, Numbers, TextPiece, Texts, line_blocks, line_records
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.format.options import PlanOptions

_MARK = b"\xef\xbb\xbf"
# White space as str.strip() knows it: in ASCII, and what a first or last letter beyond it may be, by the
# bytes of its UTF-8 as one number.
_IS_ASCII_SPACE = np.zeros(256, np.bool_)
_IS_ASCII_SPACE[list(b"\t\n\v\f\r\x1c\x1d\x1e\x1f ")] = True
_WIDE_SPACES = np.array(
    sorted(
        int.from_bytes(chr(point).encode(), "big") for point in range(0x80, 0x10000) if chr(point).isspace()
    )
)


class TextLines(LineFormat):
    """``.txt``."""

    line_ends = LineEnds(with_cr=True)

    def can_be_split(self, options: PlanOptions) -> bool:
        """Not where a document is a whole file."""
        return options.doc == "line"

    def read(
        self,
        reader: RangeReader,
        options: PlanOptions,
        fields: TextFields,  # noqa: ARG002 - lines have none
        batch_bytes: int,
    ) -> Iterator[Records]:
        """A line ends as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``."""
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
    """The bytes of a text's byte order mark, and what stands behind it."""
    head, num_bytes = b"", 0
    for piece in pieces:
        head, num_bytes = head + piece.data, num_bytes + piece.num_bytes
        if len(head) >= len(_MARK):
            break
    rest = head.removeprefix(_MARK)
    return len(head) - len(rest), itertools.chain([TextPiece(rest, num_bytes)], pieces)


def _whole_text(pieces: Iterator[TextPiece], start: int, codec: str) -> Records:
    """A file as one document."""
    held: list[bytes] = []
    size = num_bytes = 0
    for piece in pieces:
        size, num_bytes = size + len(piece.data), num_bytes + piece.num_bytes
        held = [*held, piece.data] if size <= MOST_DOCUMENT_BYTES else []
    text = _text_of(b"".join(held), start, codec) if size <= MOST_DOCUMENT_BYTES else too_long("its text")
    return Records(texts=[text], starts=np.array([start]), sizes=np.array([size]), num_bytes=num_bytes)


def _texts_of(codec: str, block: bytes, starts: Numbers, at: int) -> tuple[Texts, dict[str, list[str]]]:
    bounds = [*starts.tolist(), len(block)]
    if codec == "utf-8":
        try:
            block.decode()
        except UnicodeDecodeError:
            pass
        else:
            return _stripped(block, starts), {}
    lines = itertools.pairwise(bounds)
    return [_text_of(block[begin:end], at + begin, codec) for begin, end in lines], {}


def _text_of(data: bytes, at: int, codec: str) -> bytes | UnusableText:
    """The text of a document that begins at byte ``at``."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {at + error.start} is not {codec}: {error.reason}")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.strip().encode()


def _stripped(block: bytes, starts: Numbers) -> Texts:
    """Strip lines of UTF-8 as ``str.strip`` does. Each line begins where the one before it ends."""
    letters = np.frombuffer(block, np.uint8)
    begins, ends = starts.copy(), np.append(starts[1:], len(block))
    # A few rounds: each takes a letter off the lines that still begin, or end, with ASCII white space.
    left = np.arange(len(begins))
    while len(left := left[begins[left] < ends[left]]):
        left = left[_IS_ASCII_SPACE[letters[ends[left] - 1]]]
        ends[left] -= 1
    left = np.flatnonzero(begins < ends)
    while len(left := left[begins[left] < ends[left]]):
        left = left[_IS_ASCII_SPACE[letters[begins[left]]]]
        begins[left] += 1
    texts: Texts = [block[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    for number in _with_wide_spaces(letters, begins, ends).tolist():
        texts[number] = block[begins[number] : ends[number]].decode().strip().encode()
    return texts


def _with_wide_spaces(letters: npt.NDArray[np.uint8], begins: Numbers, ends: Numbers) -> Numbers:
    """Return which lines begin or end with white space beyond ASCII: two or three bytes of UTF-8.

    Some others may be among them: of very short lines, letters of their neighbours are looked at, too.
    """

    def at(places: Numbers) -> Numbers:
        return letters[places.clip(0, len(letters) - 1)].astype(np.int64)

    lines = np.flatnonzero(begins < ends)
    beginning = lines[letters[begins[lines]] >= 0x80]
    first = begins[beginning]
    two = at(first) << 8 | at(first + 1)
    begin_so = np.isin(two, _WIDE_SPACES) | np.isin(two << 8 | at(first + 2), _WIDE_SPACES)
    ending = lines[letters[ends[lines] - 1] >= 0x80]
    last = ends[ending] - 1
    two = at(last - 1) << 8 | at(last)
    end_so = np.isin(two, _WIDE_SPACES) | np.isin(at(last - 2) << 16 | two, _WIDE_SPACES)
    return np.union1d(beginning[begin_so], ending[end_so])
