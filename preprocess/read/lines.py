r"""Read files of lines, plain or compressed, as plain text or as JSON lines, in blocks of whole lines.

Lines of plain text end with ``\n``, ``\r\n`` or ``\r``, as in Python's text mode, and lines of JSON with
``\n``. All supported encodings write these as single bytes. Memory is bounded, however long a line is.

A frame of a compressed file may begin in the middle of a line. A part that begins at a frame skips the bytes
before its first line end, and reads past its own end up to the next line end. So each line is in exactly one
part.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from preprocess.read import formats
from preprocess.read.compressed import COMPRESSIONS, TextBlocks, beginning_of_text, decompressed, load_zstd
from preprocess.read.encodings import UTF_8, UTF_8_WITH_MARK, encoding_of
from preprocess.read.formats import InputRecords, Inspected, Numbers, SearchRanges, Start, Texts
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.separated import (
    Piece,
    Separator,
    documents_between,
    first_start,
    may_end_shards,
    separator_of,
)
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, TextFields, UnusableText, too_long
from shardprep.format.plan import ByteRange
from shardprep.format.plan_options import PlanOptions

LineTexts = tuple[Texts | Sequence[bytes | UnusableText], dict[str, list[Any]]]  # texts, columns by name
_TAIL_BYTES = 16 << 10  # decompressed at once to find the end of a part's last line
BOM = b"\xef\xbb\xbf"


class LineFormat:
    """A ``Format`` whose files consist of lines. Subclasses take the texts out of the lines."""

    ends_with_cr = False  # whether \r and \r\n also end a line

    def __init__(self, suffix: str | None) -> None:
        """``suffix``: of a compressed file. Raises UsageError if a library for it is missing."""
        self.compression = COMPRESSIONS[suffix] if suffix else None
        if suffix == ".zst":
            load_zstd()  # so that a missing library is an error before any work

    def can_be_split(self, options: PlanOptions) -> bool:  # noqa: ARG002 - TextLines uses it
        """Return whether a part may begin at any line, not only at the beginning of the file."""
        return True

    def texts_of_lines(
        self, fields: TextFields, lines: bytes, starts: Numbers, at: int, codec: str
    ) -> LineTexts:
        """Return texts and columns. ``starts``: of the lines in ``lines``, which begins at byte ``at``."""
        raise NotImplementedError

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        pieces = self.text_of_part(reader, fields.options, batch_bytes)
        codec = encoding_of(reader.byte_range, fields.options)
        return self.records_of(reader.byte_range, pieces, fields, codec, batch_bytes)

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:
        """Estimate the text. Raises BadInput for another format, or if reading takes too much memory."""
        options = fields.options
        can_be_split = self.can_be_split(options)
        size = file.stamp.num_bytes
        if self.compression is None:
            return Inspected(text_bytes=size, is_whole=not can_be_split)
        head, text_bytes = beginning_of_text(file, self.compression, options.zstd_long)
        has_frames = any(True for _ in self.compression.frames(file))
        return Inspected(text_bytes, is_whole=not (can_be_split and has_frames), head=head)

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:
        options = fields.options
        if not self.can_be_split(options):
            return formats.starts_among((), file, ranges)
        if self.compression is not None:
            return formats.starts_among(self.compression.frames(file), file, ranges)
        file.file.expect_scattered_reads()  # the system's read-ahead would read three times as much
        starts: list[Start | None] = []
        for byte, end in ranges:
            line_start = self.first_start(file, byte, end, options)
            starts.append(None if line_start is None else Start(line_start))
        return starts

    def text_of_part(self, reader: RangeReader, options: PlanOptions, piece_bytes: int) -> TextBlocks:
        """Yield the text of a part, through the end of its last line, which may be after the part.

        A line that begins exactly at the end belongs to this part, as the next part skips its first line.
        """
        file = reader.file
        byte_range = reader.byte_range
        compression = self.compression
        span = (byte_range.start, byte_range.end)
        if compression is None:
            yield from decompressed(file, None, reader.read, span, piece_bytes, 0)
            return
        has_line = byte_range.start == 0
        rest = (byte_range.end, file.stamp.num_bytes)
        for piece in decompressed(file, compression, reader.read, span, piece_bytes, options.zstd_long):
            has_line = has_line or self.first_end(piece[0]) > 0
            yield piece
        if byte_range.end == file.stamp.num_bytes:
            return
        others = decompressed(file, compression, file.read_all, rest, _TAIL_BYTES, options.zstd_long)
        for data, _ in self.whole_line_ends(others):
            end = self.first_end(data)
            yield data[: end or len(data)], 0  # bytes of the file that another part counts
            if end or (data and not has_line):
                return  # without a line end in the part, no line begins in it

    def records_of(
        self,
        byte_range: ByteRange,
        pieces: TextBlocks,
        fields: TextFields,
        codec: str,
        batch_bytes: int,
        skipped: int = 0,
    ) -> Iterator[InputRecords]:
        """Yield the records of a part, given its text without the first ``skipped`` bytes."""
        start = skipped + (byte_range.start if self.compression is None else byte_range.text_start)
        is_inside = self.compression is not None and byte_range.start > 0
        # However short a line is, it may take 2 KiB in the tar: two members with a header each. So the number
        # of lines per batch is limited, too, to stay within a batch's share of memory (see resources.py).
        most_lines = max(1, batch_bytes // formats.SHORT_LINE_BYTES)
        for block_start, size, data, num_bytes in self.blocks(pieces, start, is_inside):
            starts = np.zeros(1, np.int64) if data is None else self.line_starts(data)
            bounds = np.append(starts, size)
            if not len(starts):
                yield InputRecords(num_bytes=num_bytes)
            for number in range(0, len(starts), most_lines):
                begins = starts[number : number + most_lines]
                sizes = np.diff(bounds[number : number + most_lines + 1])
                if data is None:
                    found: LineTexts = ([too_long("the line")], {})
                else:
                    first = int(begins[0])
                    lines = data[first : first + int(sizes.sum())]
                    found = self.texts_of_lines(fields, lines, begins - first, block_start + first, codec)
                texts, columns = found
                at = begins + block_start
                yield InputRecords(texts=texts, starts=at, sizes=sizes, num_bytes=num_bytes, columns=columns)
                num_bytes = 0

    def blocks(
        self, pieces: TextBlocks, start: int, is_inside: bool
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        """Cut pieces of text into blocks of whole lines.

        Yields (start, size, data, num_bytes) for each block: its first byte in the text, its size, its bytes,
        and the number of file bytes read for it. A line of more than MOST_DOCUMENT_BYTES is a block of its
        own, whose data is None. The last block may have size 0: it counts the file bytes after the last line.
        The pieces begin at byte ``start`` of the text. If this ``is_inside`` a line, its rest is skipped.
        """
        begun: list[bytes] = []  # pieces of an unfinished line; empty once it is too long
        num_begun = num_bytes = 0  # bytes of the unfinished line; bytes of the file that no block counts yet
        for data, num_read in self.whole_line_ends(pieces):
            num_bytes += num_read
            if is_inside:
                first = self.first_end(data)
                is_inside = not first
                start += first or len(data)
                data = data[first:] if first else b""
            cut = self.last_end(data)
            if cut and num_begun + cut > MOST_DOCUMENT_BYTES:
                # Only the unfinished line can be too long. The lines after it are in one piece.
                first = self.first_end(data)
                size = num_begun + first
                whole = b"".join([*begun, data[:first]]) if size <= MOST_DOCUMENT_BYTES else None
                yield start, size, whole, num_bytes
                start += size
                begun = []
                num_begun = 0
                num_bytes = 0
                data = data[first:]
                cut -= first
            if cut:
                yield start, num_begun + cut, b"".join([*begun, data[:cut]]), num_bytes
                start += num_begun + cut
                begun = []
                num_begun = 0
                num_bytes = 0
            begun.append(data[cut:])
            num_begun += len(data) - cut
            if num_begun > MOST_DOCUMENT_BYTES:
                begun = []
        if num_begun or num_bytes:
            whole = b"".join(begun) if num_begun <= MOST_DOCUMENT_BYTES else None
            yield start, num_begun, whole, num_bytes

    def whole_line_ends(self, pieces: TextBlocks) -> TextBlocks:
        r"""Yield the same text, with no ``\r\n`` divided between two pieces."""
        kept = b""
        for data, num_bytes in pieces:
            joined = kept + data
            kept = b"\r" if self.ends_with_cr and joined.endswith(b"\r") else b""
            yield joined[: len(joined) - len(kept)], num_bytes
        if kept:
            yield kept, 0

    def first_end(self, block: bytes) -> int:
        r"""Return the number of bytes through the first line end, or 0. A ``\r`` at the end counts as one."""
        newline = block.find(b"\n") + 1
        cr = block.find(b"\r", 0, newline or len(block)) + 1 if self.ends_with_cr else 0
        return newline if not cr or cr + 1 == newline else cr

    def last_end(self, block: bytes) -> int:
        r"""Return the number of bytes through the last line end, or 0. A ``\r`` at the end counts as one."""
        return max(block.rfind(b"\n"), block.rfind(b"\r") if self.ends_with_cr else -1) + 1

    def line_starts(self, block: bytes) -> Numbers:
        """Return int64[num_lines]: where each line of a block starts in it."""
        octets = np.frombuffer(block, np.uint8)
        is_end = octets == 10
        if self.ends_with_cr and b"\r" in block:
            is_cr = octets == 13
            is_cr[:-1] &= ~is_end[1:]  # of \r\n only the \n ends the line
            is_end |= is_cr
        starts = np.concatenate(([0], np.flatnonzero(is_end) + 1))
        return starts[:-1] if starts[-1] == len(block) else starts

    def first_start(self, file: OpenInput, byte: int, end: int, options: PlanOptions) -> int | None:  # noqa: ARG002
        """Return the first byte at or after ``byte`` where a line begins, see ``formats.first_place``."""
        size = file.stamp.num_bytes

        def find(block: bytes, position: int) -> int | None:
            if position + len(block) < size:
                # It may be half of \r\n, so it is read again with the next block.
                block = block.removesuffix(b"\r")
            line_end = self.first_end(block)
            return position + line_end if line_end else None

        return formats.first_place(file, byte, end, find, before=1, overlap=1)


# By UTF-16 code unit: whether it is white space that ``str.strip`` removes, but not ``bytes.strip``.
_IS_WIDE_SPACE = np.zeros(0x10000, np.bool_)
_IS_WIDE_SPACE[0x80:0x3001] = [chr(point).isspace() for point in range(0x80, 0x3001)]
_IS_WIDE_SPACE[0x1C:0x20] = True


class TextLines(LineFormat):
    """``.txt``: a document is a line, a whole file, or what stands between separators."""

    ends_with_cr = True

    def can_be_split(self, options: PlanOptions) -> bool:
        if options.is_separated:
            # Frames of compressed files begin in the middle of documents.
            return self.compression is None and may_end_shards(options)
        return options.doc == "line"

    def first_start(self, file: OpenInput, byte: int, end: int, options: PlanOptions) -> int | None:
        if options.is_separated:
            return first_start(file, byte, end, separator_of(options, UTF_8))
        return super().first_start(file, byte, end, options)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        options = fields.options
        codec = encoding_of(reader.byte_range, options)
        pieces = self.text_of_part(reader, options, batch_bytes)
        num_bom_bytes = 0
        if codec == UTF_8_WITH_MARK and reader.byte_range.start == 0:
            first, num_read = next(pieces, (b"", 0))
            num_bom_bytes = len(BOM) if first.startswith(BOM) else 0
            pieces = itertools.chain([(first[num_bom_bytes:], num_read)], pieces)
        if options.is_separated:
            start = reader.byte_range.start + num_bom_bytes
            yield from _separated(pieces, start, separator_of(options, codec), codec, batch_bytes)
        elif options.doc == "line":
            yield from self.records_of(reader.byte_range, pieces, fields, codec, batch_bytes, num_bom_bytes)
        else:
            yield _whole(pieces, num_bom_bytes, codec)

    def texts_of_lines(
        self,
        fields: TextFields,  # noqa: ARG002
        lines: bytes,
        starts: Numbers,
        at: int,
        codec: str,
    ) -> LineTexts:
        """Strip the lines. If a line is not UTF-8, or has another encoding, decode them one by one."""
        if codec.startswith("utf-8"):
            with contextlib.suppress(UnicodeDecodeError):
                characters = lines.decode()
                texts = _stripped(lines, characters)[: len(starts)]
                return Texts(texts, characters=characters) if all(texts) else texts, {}
        bounds = itertools.pairwise([*starts.tolist(), len(lines)])
        return [_decoded(lines[begin:end], at + begin, codec) for begin, end in bounds], {}


def _whole(pieces: TextBlocks, num_bom_bytes: int, codec: str) -> InputRecords:
    """Return a file's text as one document."""
    buffer = bytearray()
    size = num_bytes = 0
    for data, num_read in pieces:
        size += len(data)
        num_bytes += num_read
        buffer += data if size <= MOST_DOCUMENT_BYTES else b""
    is_whole = size <= MOST_DOCUMENT_BYTES
    text = _decoded(bytes(buffer), num_bom_bytes, codec) if is_whole else too_long("its text")
    starts = np.array([num_bom_bytes])
    return InputRecords(texts=[text], starts=starts, sizes=np.array([size]), num_bytes=num_bytes)


def _separated(
    pieces: TextBlocks, start: int, separator: Separator, codec: str, batch_bytes: int
) -> Iterator[InputRecords]:
    """Yield the documents between separators, given the text from byte ``start`` of the file's text on."""
    some: list[Piece] = []
    num_bytes = num_text_bytes = 0
    for documents, num_read in documents_between(pieces, start, separator):
        num_bytes += num_read
        for piece in documents:
            some.append(piece)
            num_text_bytes += piece.num_bytes + formats.SHORT_LINE_BYTES
            if num_text_bytes >= batch_bytes:
                yield _records_of_pieces(some, num_bytes, codec)
                some = []
                num_bytes = num_text_bytes = 0
    if some or num_bytes:
        yield _records_of_pieces(some, num_bytes, codec)


def _records_of_pieces(pieces: Sequence[Piece], num_bytes: int, codec: str) -> InputRecords:
    texts: list[bytes | UnusableText] = []
    for piece in pieces:
        if piece.text is None:
            texts.append(too_long("the document"))
        else:
            texts.append(_decoded(piece.text, piece.start, codec))
    return InputRecords(
        texts=texts,
        starts=np.array([piece.start for piece in pieces], np.int64),
        sizes=np.array([piece.num_bytes for piece in pieces], np.int64),
        num_bytes=num_bytes,
    )


def _stripped(block: bytes, text: str) -> list[bytes]:
    """Return the stripped lines of a UTF-8 block, and the rest after its last line end.

    ``text``: the block, decoded. ``bytes.strip`` takes half the time, but does not know all white space.
    """
    if b"\r" not in block:
        code_units = np.frombuffer(text.encode("utf-16-le"), "<u2")
        if not _IS_WIDE_SPACE.take(code_units, mode="clip").any():
            return [line.strip() for line in block.split(b"\n")]
    return [line.strip().encode() for line in _with_newlines(text).split("\n")]


def _decoded(data: bytes, at: int, codec: str) -> bytes | UnusableText:
    """Return the text of a document, which begins at byte ``at`` of the file's text, as UTF-8."""
    codec = codec.removesuffix("-sig")  # ``read`` has dropped the byte order mark
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {at + error.start} is not {codec}: {error.reason}")
    return _with_newlines(text).strip().encode()


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
