r"""Read files of lines, plain or compressed, as plain text or as JSON lines, in blocks of whole lines.

Lines of plain text end with ``\n``, ``\r\n`` or ``\r``, as in Python's text mode, and lines of JSON with
``\n``. All supported encodings write these as single bytes. Memory is bounded, however long a line is.

A frame of a compressed file may begin in the middle of a line. A part that begins at a frame skips the bytes
before its first line end, and reads past its own end up to the next line end. So each line is in exactly one
part. bgzip blocks and zstd's seekable format say where frames begin; other compressed files are read whole.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import itertools
import json
import lzma
import operator
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from preprocess.read import documents, text_fields
from preprocess.read.documents import InputRecords, Inspected, OpenInput, RangeReader, Start, Stretches, Texts
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, FieldPath, TextFields, UnusableText, too_long
from shardprep.command_line import needs
from shardprep.console import quoted
from shardprep.errors import BadInput, UsageError
from shardprep.format.plan import ByteRange, PlanOptions

Numbers = documents.Numbers
LineTexts = tuple[Texts | Sequence[bytes | UnusableText], dict[str, list[Any]]]  # texts, columns by name
_FIRST_SCAN_BYTES, _MAX_SCAN_BYTES = 16 << 10, 1 << 20  # read at once to find a line end
_TAIL_BYTES = 16 << 10  # decompressed at once to find the end of a part's last line
_HEAD_TEXT_BYTES = 256 << 10  # planning decompresses this much to estimate the size of a file's text
_READ_BYTES = 128 << 10
_XZ_BYTES = 1 << 30  # the most memory that xz may take; ``xz -9`` needs 64 MiB
_HEADER_BYTES = 18  # a decompressor is opened with at least this much data, or all that is left
_DEFAULT_ZSTD_LONG = 27  # log2 of the largest window that the zstd command accepts by default
_MAX_SEEK_TABLE_BYTES = 64 << 20
_BGZIP = (b"\x04", b"\x06\0")  # flags of a gzip header, and size of its extra field
_BOM = b"\xef\xbb\xbf"


# Compressed files. -------------------------------------------------------------------------------------

# Blocks of a file's text, each of at most MOST_DOCUMENT_BYTES, with the number of file bytes read for it.
TextBlocks = Iterator[tuple[bytes, int]]


@dataclass(frozen=True)
class Compression:
    """A compression format. A file has one or more members, also called streams (xz) or frames (zstd)."""

    name: str
    magics: tuple[bytes, ...]  # a member begins with one of them
    open: Callable[[bytes, int], Any]  # (data, zstd_long) -> decompressor of a member, with bz2's interface
    padding: bytes = b""  # may follow a member
    # Returns where decompression may begin; no places if the file does not list them.
    frames: Callable[[OpenInput], Iterable[Start]] = lambda _: ()


class _GzipMember:
    """A decompressor of gzip with bz2's interface. It uses isal, if installed, which is twice as fast."""

    needs_input = True

    def __init__(self, data: bytes) -> None:
        library: Any = zlib
        # isal reads an incomplete header as compressed data, and accepts flags that zlib rejects. So it gets
        # only the usual headers: without optional fields, with a file name that ends in ``data``, or bgzip's.
        flags, is_whole_name = data[3:4], b"\0" in data[10:]
        if flags == b"\0" or (flags == b"\x08" and is_whole_name) or (flags, data[10:12]) == _BGZIP:
            with contextlib.suppress(ImportError):
                from isal import isal_zlib

                library = isal_zlib
        self._member = library.decompressobj(31)

    @property
    def eof(self) -> bool:
        return bool(self._member.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._member.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out: bytes = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = not self._member.unconsumed_tail and len(out) != max_length
        return out


def load_zstd() -> Any:
    """Return the zstd module. Raises UsageError, saying what to install, if it is missing."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UsageError(needs(".zst", "backports.zstd")) from None
    return zstd


def _zstd_frame(_: bytes, zstd_long: int) -> Any:
    zstd = load_zstd()
    largest = {zstd.DecompressionParameter.window_log_max: zstd_long or _DEFAULT_ZSTD_LONG}
    return zstd.ZstdDecompressor(options=largest)


def decompressed(
    file: OpenInput,
    compression: Compression,
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    piece_bytes: int,
    zstd_long: int,
) -> TextBlocks:
    """Decompress the bytes ``span`` of a file, which are whole members or frames.

    Yields pieces of about ``piece_bytes``, at most twice as many. Raises BadInput, with file and byte, if a
    member is damaged or cut short, or if something else follows the last member.
    """
    position = counted_end = span[0]  # end of the bytes that were read, and of those that a piece counts
    data, buffer, padding = b"", bytearray(), b""  # no padding before the first member

    def read_more() -> bytes:
        nonlocal position
        block = read(position, min(position + _READ_BYTES, span[1]))
        position += len(block)
        return block

    while True:
        data = data.lstrip(padding)
        while len(data) < _HEADER_BYTES and position < span[1]:
            data = (data + read_more()).lstrip(padding)
        if not data:
            break
        if not data.startswith(compression.magics):
            found = f"{data[:8]!r} at byte {position - len(data)}"
            expected = f"{compression.magics[0]!r} of {compression.name}; rename or move it, and plan again"
            raise BadInput(path=file.path, found=found, expected=expected)
        padding = compression.padding
        stream = compression.open(data, zstd_long)
        while not stream.eof:
            if stream.needs_input and not data and not (data := read_more()):
                what = f"is cut short: incomplete {compression.name} data at byte {position}"
                raise documents.unreadable(file, what)
            try:
                text = stream.decompress(data, piece_bytes)
            except MemoryError:
                raise
            except Exception as error:  # each library raises its own class
                if compression.name == "zstd" and "too much memory" in str(error):
                    found, flag = f"a zstd window above the limit, before byte {position}", "--zstd_long 31"
                    expected = f"at most 128 MiB; plan with {flag}, which may take 2 GiB in each task, or "
                    expected += f"decompress it: zstd -d --long=31 {file.path}"
                    raise BadInput(path=file.path, found=found, expected=expected, remedy=flag) from None
                what = f"cannot be decompressed as {compression.name} before byte {position} ({error})"
                raise documents.unreadable(file, what) from None
            data = b""
            buffer += text
            if len(buffer) >= piece_bytes:
                yield bytes(buffer), position - counted_end
                counted_end, buffer = position, bytearray()
        data = stream.unused_data
    yield bytes(buffer), span[1] - counted_end


# Magic and flags, mtime, extra flags and system, 6, "BC", 2, size of the block minus 1.
_BGZF_HEADER = struct.Struct("<4sIBBH2sHH")
_GZIP_WITH_EXTRA = b"\x1f\x8b\x08\x04"


def _bgzf_blocks(file: OpenInput) -> Iterator[Start]:
    """Yield where bgzip's blocks begin; nothing for other gzip files. Reads 22 bytes per block of 64 KiB."""
    position = text = 0
    header = file.read(0, _BGZF_HEADER.size)
    while len(header) == _BGZF_HEADER.size:
        magic, _, _, _, extra_bytes, field, field_bytes, last = _BGZF_HEADER.unpack(header)
        if (magic, extra_bytes, field, field_bytes) != (_GZIP_WITH_EXTRA, 6, b"BC", 2):
            return
        yield Start(position, text)
        position += last + 1
        data = file.read(position - 4, position + _BGZF_HEADER.size)
        text += int.from_bytes(data[:4], "little")
        header = data[4:]


def _seek_table(file: OpenInput) -> list[Start]:
    """Return where the frames of a seekable zstd file begin and end, [] for one frame or no valid table."""
    size = file.stamp.num_bytes
    footer = file.read(size - 9, size) if size > 17 else b""
    if footer[5:] != struct.pack("<I", 0x8F92EAB1):
        return []
    num_frames, entry_bytes = int.from_bytes(footer[:4], "little"), 12 if footer[4] & 0x80 else 8
    table_bytes = 8 + num_frames * entry_bytes + 9
    if table_bytes > min(size, _MAX_SEEK_TABLE_BYTES):
        return []
    table = file.read(size - table_bytes, size)
    if table[:8] != struct.pack("<II", 0x184D2A5E, table_bytes - 8):
        return []
    entries = np.frombuffer(table[8:-9], "<u4").reshape(num_frames, entry_bytes // 4).astype(np.int64)
    ends = np.cumsum(entries[:, :2], axis=0)
    if num_frames < 2 or int(ends[-1, 0]) != size - table_bytes:
        return []
    return [Start(0), *(Start(byte, text) for byte, text in ends.tolist())]


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(struct.pack("<I", 0x184D2A50 + number) for number in range(16))
COMPRESSIONS = {
    ".gz": Compression("gzip", (b"\x1f\x8b",), lambda data, _: _GzipMember(data), b"\0", _bgzf_blocks),
    ".zst": Compression("zstd", (_ZSTD_MAGIC, *_SKIPPABLE), _zstd_frame, frames=_seek_table),
    ".xz": Compression("xz", (b"\xfd7zXZ\0",), lambda *_: lzma.LZMADecompressor(memlimit=_XZ_BYTES), b"\0"),
    ".bz2": Compression("bzip2", (b"BZh",), lambda *_: bz2.BZ2Decompressor()),
}


# Lines. --------------------------------------------------------------------------------------------------


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

    def check_beginning(self, file: OpenInput, text: bytes) -> None:
        """Raise BadInput if the beginning of a file's text shows that it cannot be read."""

    def texts_of_lines(self, fields: TextFields, lines: bytes, starts: Numbers, at: int) -> LineTexts:
        """Return texts and columns. ``starts``: of the lines in ``lines``, which begins at byte ``at``."""
        raise NotImplementedError

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        pieces = self.text_of_part(reader, fields.options, batch_bytes)
        return self.records_of(reader.byte_range, pieces, fields, batch_bytes)

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Estimate the text. Raises BadInput for another format, or if reading takes too much memory."""
        can_be_split, size = self.can_be_split(options), file.stamp.num_bytes
        if self.compression is None:
            return Inspected(text_bytes=size, is_whole=not can_be_split)
        span, read, zstd_long = (0, size), file.read_all, options.zstd_long
        head, num_read = next(decompressed(file, self.compression, read, span, _HEAD_TEXT_BYTES, zstd_long))
        self.check_beginning(file, head)
        has_frames = any(True for _ in self.compression.frames(file))
        text_bytes = len(head) * size // max(1, num_read)
        return Inspected(text_bytes, is_whole=not (can_be_split and has_frames))

    def starts(self, file: OpenInput, stretches: Stretches, options: PlanOptions) -> list[Start | None]:
        if self.compression is None and self.can_be_split(options):
            file.file.expect_scattered_reads()  # the system's read-ahead would read three times as much
            found = (self.first_line_start(file, byte, end) for byte, end in stretches)
            return [None if byte is None else Start(byte) for byte in found]
        frames = self.compression.frames(file) if self.compression and self.can_be_split(options) else ()
        return documents.starts_among(frames, file, stretches)

    def text_of_part(self, reader: RangeReader, options: PlanOptions, piece_bytes: int) -> TextBlocks:
        """Yield the text of a part, through the end of its last line, which may be after the part.

        A line that begins exactly at the end belongs to this part, as the next part skips its first line.
        """
        file, byte_range, compression = reader.file, reader.byte_range, self.compression
        if compression is None:
            for start in range(byte_range.start, byte_range.end, piece_bytes):
                end = min(start + piece_bytes, byte_range.end)
                yield reader.read(start, end), end - start
            return
        has_line, span, rest = (
            byte_range.start == 0,
            (byte_range.start, byte_range.end),
            (byte_range.end, file.stamp.num_bytes),
        )
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
        batch_bytes: int,
        skipped: int = 0,
    ) -> Iterator[InputRecords]:
        """Yield the records of a part, given its text without the first ``skipped`` bytes."""
        start = skipped + (byte_range.start if self.compression is None else byte_range.text_start)
        is_inside = self.compression is not None and byte_range.start > 0
        # However short a line is, it may take 2 KiB in the tar: two members with a header each. So the number
        # of lines per batch is limited, too, to stay within a batch's share of memory (see resources.py).
        most_lines = max(1, batch_bytes // documents.SHORT_LINE_BYTES)
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
                    found = self.texts_of_lines(fields, lines, begins - first, block_start + first)
                (texts, columns), at = found, begins + block_start
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
                is_inside, start = not first, start + (first or len(data))
                data = data[first:] if first else b""
            cut = self.last_end(data)
            if cut and num_begun + cut > MOST_DOCUMENT_BYTES:
                # Only the unfinished line can be too long. The lines after it are in one piece.
                first = self.first_end(data)
                size = num_begun + first
                whole = b"".join([*begun, data[:first]]) if size <= MOST_DOCUMENT_BYTES else None
                yield start, size, whole, num_bytes
                start, begun, num_begun, num_bytes = start + size, [], 0, 0
                data, cut = data[first:], cut - first
            if cut:
                yield start, num_begun + cut, b"".join([*begun, data[:cut]]), num_bytes
                start, begun, num_begun, num_bytes = start + num_begun + cut, [], 0, 0
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

    def first_line_start(self, file: OpenInput, offset: int, end: int) -> int | None:
        """Return the first byte at or after ``offset`` where a line begins, or the file's size if none does.

        If it is not before ``end``, the result may be None. Reads 16 KiB first, then doubles, up to 1 MiB.
        """
        if offset >= end:
            return None
        if offset <= 0:
            return 0
        size = file.stamp.num_bytes
        position, num_bytes = offset - 1, _FIRST_SCAN_BYTES
        while position < end and (block := file.read(position, position + num_bytes)):
            if position + len(block) < size:
                block = block.removesuffix(b"\r")  # it may be half of \r\n: read it again with the next block
            if line_end := self.first_end(block):
                return position + line_end
            position += len(block)
            num_bytes = min(2 * num_bytes, _MAX_SCAN_BYTES)
        return None if position < size else size


# Plain text. --------------------------------------------------------------------------------------------

# By UTF-16 code unit: whether it is white space that ``str.strip`` removes, but not ``bytes.strip``.
_IS_WIDE_SPACE = np.zeros(0x10000, np.bool_)
_IS_WIDE_SPACE[0x80:0x3001] = [chr(point).isspace() for point in range(0x80, 0x3001)]
_IS_WIDE_SPACE[0x1C:0x20] = True


class TextLines(LineFormat):
    """``.txt``: a document is a line, or a whole file."""

    ends_with_cr = True

    def can_be_split(self, options: PlanOptions) -> bool:
        return options.doc == "line"

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        options = fields.options
        pieces, num_bom_bytes = self.text_of_part(reader, options, batch_bytes), 0
        if options.encoding == "utf-8-sig" and reader.byte_range.start == 0:
            first, num_read = next(pieces, (b"", 0))
            num_bom_bytes = len(_BOM) if first.startswith(_BOM) else 0
            pieces = itertools.chain([(first[num_bom_bytes:], num_read)], pieces)
        if options.doc == "line":
            yield from self.records_of(reader.byte_range, pieces, fields, batch_bytes, num_bom_bytes)
            return
        buffer, size, num_bytes = bytearray(), 0, 0
        for data, num_read in pieces:
            size, num_bytes = size + len(data), num_bytes + num_read
            buffer += data if size <= MOST_DOCUMENT_BYTES else b""
        is_whole = size <= MOST_DOCUMENT_BYTES
        text = _decoded(bytes(buffer), num_bom_bytes, options.encoding) if is_whole else too_long("its text")
        starts, sizes = np.array([num_bom_bytes]), np.array([size])
        yield InputRecords(texts=[text], starts=starts, sizes=sizes, num_bytes=num_bytes)

    def texts_of_lines(self, fields: TextFields, lines: bytes, starts: Numbers, at: int) -> LineTexts:
        """Strip the lines. If a line is not UTF-8, or has another encoding, decode them one by one."""
        codec = fields.options.encoding
        if codec.startswith("utf-8"):
            with contextlib.suppress(UnicodeDecodeError):
                characters = lines.decode()
                texts = _stripped(lines, characters)[: len(starts)]
                return Texts(texts, characters=characters) if all(texts) else texts, {}
        bounds = itertools.pairwise([*starts.tolist(), len(lines)])
        return [_decoded(lines[begin:end], at + begin, codec) for begin, end in bounds], {}


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


# JSON. ---------------------------------------------------------------------------------------------------

# Strings, and other text without brackets. A string that is not closed extends to the end of the line:
# otherwise each later quote would begin a string of its own.
_NO_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"\[\]{}]+', re.DOTALL)
_HEAD_BYTES = 4 << 10
_BLANK = b" \t\r\n"


class JsonLines(LineFormat):
    """``.jsonl``: a document is the text of one object. A block of lines is read by the first way that works:

    1. ``_scanned_texts`` finds one field in all lines, without making Python objects of their other fields.
    2. orjson parses all lines. This also works for templates, and for fields beside the text.
    3. ``_record_of`` checks each line by itself. Only this one leaves out lines, each with a reason.

    All give the same texts. In case of doubt, the faster ways give up on a block, which only costs time.
    """

    def texts_of_lines(self, fields: TextFields, lines: bytes, starts: Numbers, at: int) -> LineTexts:
        """Return the text of each line, "" for a blank one."""
        if at == 0 and lines.startswith(_BOM):
            lines, starts = lines[len(_BOM) :], np.maximum(starts - len(_BOM), 0)
        if (found := _scanned_texts(lines, starts, fields)) is not None:
            return found, {}
        each = lines.split(b"\n")[: len(starts)]
        if not any(map(is_too_deep, each)) and _names_each_once(lines, len(each), fields, b"\\u" in lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                records, name = list(map(orjson.loads, each)), fields.plain_name
                texts = [record[name] for record in records] if name else list(map(fields.text, records))
                others = _side_values(records, fields)
                # If all texts are strings, no line is left out.
                if {str}.issuperset(map(type, texts)) and all(map(_are_exact, others.values())):
                    return documents.texts_of(texts), fields.columns(others)
        pairs = [_record_of(line, fields) for line in each]
        records = [record for record, _ in pairs]
        columns = fields.columns(_side_values(records, fields))
        if isinstance(fields, text_fields.RecordFields):
            columns["record"] = records
        return documents.texts_of([text for _, text in pairs]), columns


class JsonFile(JsonLines):
    """``.json``: JSON lines, too. Such a file often has one list instead, which is refused."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        if self.compression is None:
            self.check_beginning(file, file.read(0, min(file.stamp.num_bytes, _HEAD_BYTES)))
        return super().inspect(file, options)

    def check_beginning(self, file: OpenInput, text: bytes) -> None:
        if text.removeprefix(_BOM).lstrip(_BLANK).startswith(b"["):
            target = quoted(str(file.path).rpartition(".json")[0])
            remedy = f"jq -c '.[]' {quoted(file.path)} > {target}.jsonl"
            expected = "an object in each line; convert it, after decompression if needed, and move it away"
            raise BadInput(path=file.path, found="one list of JSON", expected=expected, remedy=remedy)


@functools.cache
def _decoder(name: str) -> Any:
    """Return a decoder of lines of objects, which takes one field of each as the bytes of its JSON value."""
    fields = [("text", msgspec.Raw, msgspec.field(name=name))]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False))


_TEXT = operator.attrgetter("text")
_BETWEEN_QUOTES = documents.BETWEEN[1:-1]
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
# By byte: whether white space may begin with it. In UTF-8 other characters begin with some of these, too.
_MAY_BE_SPACE = np.isin(np.arange(256), [*range(9, 14), *range(28, 33), 0xC2, 0xE1, 0xE2, 0xE3])


def _scanned_texts(block: bytes, starts: Numbers, fields: TextFields) -> Texts | None:
    r"""Return the texts of a block of lines by a scan of its bytes, or None if it needs a closer look.

    This is the fast path. Each line must be an object with the field once, as a string that is not blank.
    From ``{"n": 1, "text": "a"}`` and ``{"text": "b\"c"}`` msgspec takes the bytes ``"a"`` and ``"b\"c"``.
    Without a backslash they are the text itself in quotes, and have only to be joined.

    msgspec finds the values four times as fast as orjson makes objects, but it accepts lines that orjson
    rejects. So this checks for invalid UTF-8, infinite numbers, several objects in a line, an object over
    several lines, and a field that is named twice.
    """
    if fields.plain_name is None or fields.named:
        return None
    # Each line begins with { and ends with }.
    if not block.startswith(b"{") or not block.endswith((b"}", b"}\n")):
        return None
    octets = np.frombuffer(block, np.uint8)
    if (octets[starts] != ord("{")).any() or (octets[starts[1:] - 2] != ord("}")).any():
        return None
    # No line opens more brackets than may be nested. Those in strings count, too.
    is_opening = octets | 0x20 == ord("{")  # [ and { differ by this bit
    may_be_deep = np.count_nonzero(is_opening) - len(starts) >= text_fields.MAX_JSON_DEPTH
    if may_be_deep and np.add.reduceat(is_opening, starts, dtype=np.int64).max() > text_fields.MAX_JSON_DEPTH:
        return None
    # No line names the field twice. Such a line is left out, and no parser reports it.
    escapes = np.flatnonzero(octets == ord("\\"))
    has_unicode_escapes = bool((octets[escapes + 1] == ord("u")).any())
    if not _names_each_once(block, len(starts), fields, has_unicode_escapes):
        return None
    try:
        # Equal numbers of values and lines: no line has several objects, no object has several lines.
        characters = block.decode()
        values = list(map(_TEXT, _decoder(fields.plain_name).decode_lines(block)))
        if len(values) != len(starts):
            return None
        # msgspec accepts infinite numbers in the fields that it skips. orjson raises ValueError.
        for number in _lines_at(_places_of_large_numbers(octets), starts):
            orjson.loads(block[starts[number] : block.find(b"}\n", starts[number]) + 1 or len(block)])
        # Decode the values of lines with a backslash, all in one call.
        if escaped := _lines_at(escapes, starts):
            texts = _unescaped([values[number] for number in escaped]).split(_BETWEEN_QUOTES)
            for number, text in zip(escaped, texts, strict=True):
                values[number] = text
        joined = _BETWEEN_QUOTES.join(values)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError, ValueError, TypeError):
        return None
    # Each value must be in quotes, so that it is a string. The separators are found by their first byte, NUL.
    # A text with a NUL of its own gives one separator too many.
    octets = np.frombuffer(joined, np.uint8)
    separators = np.flatnonzero(octets == 0)
    begins = np.append(0, separators + len(_BETWEEN_QUOTES))  # of each value: its opening and closing quote
    ends = np.append(separators - 1, len(joined) - 1)
    if len(begins) != len(values) or (octets[np.append(begins, ends)] != ord('"')).any():
        return None
    # No text is blank. Only those that are empty, or may begin with white space, are decoded for this.
    may_be_blank = np.flatnonzero(_MAY_BE_SPACE[octets[begins + 1]] | (begins + 1 == ends))
    for begin, end in zip(begins[may_be_blank].tolist(), ends[may_be_blank].tolist(), strict=True):
        if not joined[begin + 1 : end].decode().strip():
            return None
    if len(joined) > MOST_DOCUMENT_BYTES:
        return None  # one of the texts may be too long
    # With the quotes around it, each separator is BETWEEN.
    joined = joined[1:-1]
    return Texts(joined=joined, num_texts=len(values), characters=None if has_unicode_escapes else characters)


def _unescaped(strings: list[bytes]) -> bytes:
    """Decode JSON strings. Returns the texts in quotes, joined. Raises TypeError if one is not a string."""
    return f'"{documents.BETWEEN.decode().join(orjson.loads(b"[%b]" % b",".join(strings)))}"'.encode()


def _lines_at(places: Numbers, starts: Numbers) -> list[int]:
    """Return the numbers of the lines that contain some bytes of the block, each number once."""
    num_places = np.bincount(np.searchsorted(starts, places, side="right") - 1)
    numbers: list[int] = np.flatnonzero(num_places).tolist()  # np.unique would import numpy.ma, 10 ms
    return numbers


def _places_of_large_numbers(octets: npt.NDArray[np.uint8]) -> Numbers:
    """Return a byte of each number that may be infinite: it has about 200 digits, or an exponent of 3."""
    is_digit = octets - ord("0") < 10
    is_exponent = octets | 0x20 == ord("e")
    is_exponent[1:] &= is_digit[:-1]
    is_exponent[:-2] &= is_digit[2:]
    is_exponent[:-3] &= is_digit[3:]
    places = np.flatnonzero(is_exponent)
    samples = is_digit[::64]  # an infinite number has over 300 digits, so at least three samples in a row
    return np.concatenate([places, 64 * np.flatnonzero(samples[:-2] & samples[1:-1] & samples[2:])])


def _side_values(records: list[Any], fields: TextFields) -> dict[FieldPath, list[Any]]:
    """Return the values of the fields beside the text, for each path one per record."""
    paths = fields.named.values()
    return {path: [text_fields.value_at(record, path) for record in records] for path in paths}


def _are_exact(values: Sequence[Any]) -> bool:
    """Return whether orjson kept the values as they are: it turns integers beyond 64 bits into floats."""
    kinds = set(map(type, values))
    if float in kinds and any(abs(value) >= 2**63 for value in values if type(value) is float):
        return False
    return kinds.isdisjoint((list, dict))


def _names_each_once(block: bytes, num_lines: int, fields: TextFields, has_unicode_escapes: bool) -> bool:
    """Return whether no line names a field of the text twice, provided that every line has all of them.

    Then each key occurs at least once per line, so as many keys as lines means exactly once. The first four
    bytes of a key occur at least as often as the key: if they occur once per line, so does the key.
    """
    if fields.is_chat or isinstance(fields, text_fields.RecordFields):
        return False  # each line is checked by itself: what follows takes 20 times as long
    name = fields.plain_name
    # Without unicode escapes a key has one spelling. To count it takes a fifth of a search for all spellings.
    if name and name.isidentifier() and not has_unicode_escapes:
        key = b'"%b"' % name.encode()
        if _count_beginning(block, key) == num_lines or block.count(key) == num_lines:
            return True
    objects = {path[:end] for path in fields.text_paths for end in range(1, len(path) + 1)}
    times_of = Counter(path[-1] for path in objects)
    return all(len(_keys(name).findall(block)) == times * num_lines for name, times in times_of.items())


def _count_beginning(block: bytes, word: bytes) -> int:
    """Count the occurrences of a word's first four bytes, in a third of the time of bytes.count."""
    if len(word) < 4:
        return block.count(word)
    shifted = (np.frombuffer(block, "<u4", (len(block) - k) // 4, k) for k in range(min(4, len(block))))
    return sum(int(np.count_nonzero(units == int.from_bytes(word[:4], "little"))) for units in shifted)


_SHORT_ESCAPES = dict(zip('"\\/\b\f\n\r\t', (b'"', b"\\", b"/", b"b", b"f", b"n", b"r", b"t"), strict=True))


@functools.lru_cache(maxsize=256)
def _keys(name: str) -> re.Pattern[bytes]:
    """Return a pattern of a key and its colon, in all spellings of JSON. A text may look like that, too."""
    pattern = b""
    for character in name:  # the character itself, or one of its escapes
        units = struct.iter_unpack(">H", character.encode("utf-16-be", "surrogatepass"))
        found = [b"".join(rb"\\u(?i:%04x)" % number for (number,) in units)]
        if character in _SHORT_ESCAPES:
            found.append(rb"\\" + re.escape(_SHORT_ESCAPES[character]))
        if character not in '"\\':
            found.append(re.escape(character.encode("utf-8", "surrogatepass")))
        pattern += b"(?:%b)" % b"|".join(found)
    # With the empty group findall returns empty matches, and makes no object for each key.
    return re.compile(b'"%b"(?::|[ \\t\\r]+:)()' % pattern)


def _record_of(line: bytes, fields: TextFields) -> tuple[Any, str | UnusableText]:
    """Return the object of a line, and its text, or why the line is left out.

    A line that names a field of the text twice is left out. For other keys the last value counts.
    """
    if not line.strip(_BLANK):
        return None, ""
    try:
        record = orjson.loads(line)
    except ValueError:
        return None, why_not_json(line)
    if is_too_deep(line):
        return None, _TOO_DEEP
    if isinstance(fields, text_fields.RecordFields):
        is_exact = _LONG_NUMBER.search(line) is None
    else:
        others = [text_fields.value_at(record, path) for path in fields.named.values()]
        is_exact = _names_each_once(line, 1, fields, b"\\u" in line) and _are_exact(others)
    if not is_exact:
        try:
            record = json.loads(line, object_pairs_hook=_Object)
        except ValueError:  # an integer with more digits than Python converts
            return None, _TOO_DEEP
        if twice := next(_named_twice(record, fields), None):
            return record, UnusableText("bad_json", f"the key {twice} occurs twice in one object")
    text = fields.text(record)
    if isinstance(fields, text_fields.RecordFields) and isinstance(text, str):
        text = line.decode()
    return record, text


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys occur twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice: list[str] = []
        if len(self) < len(pairs):
            self.twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]


def _named_twice(record: Any, fields: TextFields) -> Iterator[str]:
    """Yield the keys of the text's fields that occur twice in their object, and any such key in messages."""
    for path in fields.text_paths:
        inner = record
        for name in path:
            if isinstance(inner, _Object) and name in inner.twice:
                yield name
            inner = text_fields.value_at(inner, (name,))
        inside = [inner] if fields.is_chat else []
        while inside:
            value = inside.pop()
            if isinstance(value, _Object):
                yield from value.twice
                inside += reversed(value.values())
            elif isinstance(value, list):
                inside += reversed(value)


def why_not_json(line: bytes) -> UnusableText:
    """Return why a line is not JSON, in words that no version of a library changes."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the line is not utf-8")
    if is_too_deep(line):
        return _TOO_DEEP
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        what = "ends in the middle" if not text[error.pos :].strip() else f"is not JSON from byte {at} on"
        return UnusableText("bad_json", f"the line {what}")
    except ValueError:
        return _TOO_DEEP
    if half := re.search(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", text):
        return UnusableText("surrogate", f"it has half of a surrogate pair, {half[0]} or another")
    return UnusableText("bad_json", "the line has NaN, Infinity or a number beyond 1.8e308")


_TOO_DEEP = UnusableText(
    "bad_json",
    f"it is nested too deep, more than {text_fields.MAX_JSON_DEPTH} levels, or has too long a number",
)


def is_too_deep(raw: bytes | bytearray) -> bool:
    """Return whether objects and lists are nested more than MAX_JSON_DEPTH deep.

    Takes 0.2 us for a line with no more brackets than that, otherwise as much per bracket and string.
    """
    most = text_fields.MAX_JSON_DEPTH
    if len(raw) <= 2 * most or raw.count(b"[") + raw.count(b"{") <= most:
        return False
    steps = (1 if bracket in b"[{" else -1 for bracket in _NO_BRACKETS.sub(b"", raw))
    return max(itertools.accumulate(steps), default=0) > most
