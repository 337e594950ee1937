r"""Files of lines, plain or compressed: blocks of whole lines, the records in them, and plain text itself.

Lines of plain text end at ``\n``, ``\r\n`` or ``\r``, as Python's text mode reads them; those of JSON at
``\n``. Every encoding that is read has these ends as single bytes. Memory is bounded however long a line is.

A frame of a compressed file knows nothing of lines: a part that begins at one leaves out what stands before
its first line end, and reads on behind its own end up to the first line end there. bgzip's blocks and zstd's
seekable format say where frames begin; any other compressed file is read whole.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import itertools
import lzma
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.read.documents import (
    SHORT_LINE_BYTES,
    Inspected,
    OpenInput,
    RangeReader,
    Records,
    Start,
    Texts,
    no_records,
    starts_among,
    unreadable,
)
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, TextFields, UnusableText, too_long
from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError
from shardprep.format.plan import ByteRange, PlanOptions

Numbers = npt.NDArray[np.int64]
# Of lines, the byte where each starts in them, and the byte of the text where the first one starts: their
# texts, and what they tell beside them.
ReadLines = Callable[
    [bytes, Numbers, int], tuple[Texts | Sequence[bytes | UnusableText], dict[str, list[Any]]]
]
_FIRST_SCAN_BYTES, _MOST_SCAN_BYTES = 16 << 10, 1 << 20
_TAIL_BYTES = 16 << 10
_HEAD_TEXT_BYTES = 256 << 10  # of a compressed file, of which planning judges how much text there is
_READ_BYTES = 128 << 10
_XZ_BYTES = 1 << 30  # of memory that a stream may ask for; ``xz -9`` asks for 64 MiB
_HEADER_BYTES = 18  # at hand when a member, stream or frame is opened
_ZSTD_LONG = 27  # log2 of the largest window that zstd itself decompresses
_MOST_TABLE_BYTES = 64 << 20
_BGZIP = (b"\x04", b"\x06\0")  # flags of a gzip header, and size of its extra field
_MARK = b"\xef\xbb\xbf"


# Compressed files. -------------------------------------------------------------------------------------


class TextPiece(NamedTuple):
    """Bytes of a file's text, at most MOST_DOCUMENT_BYTES, and the file's bytes that were read for them."""

    data: bytes
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way to compress a file."""

    name: str
    magics: tuple[bytes, ...]
    open: Callable[[bytes, int], Any]  # (data, zstd_long) -> bz2's interface, for one member, stream or frame
    may_end_in_zeros: bool = False
    # The places where a file says that it may be entered, the first one and the end among them.
    frames: Callable[[OpenInput], Iterable[Start]] = lambda _: ()


class _GzipMember:
    """zlib's decompressor with bz2's interface; isal's, which is twice as fast, where it is installed."""

    needs_input = True

    def __init__(self, data: bytes) -> None:
        library: Any = zlib
        # isal takes a cut header for deflated data, and knows flags that zlib refuses. So it gets the usual
        # headers alone: without optional fields, with a name that ends in this data, or of bgzip.
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
    """Return Python's library of zstd. Raises UsageError, with what to install, where it is missing."""
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
    largest = {zstd.DecompressionParameter.window_log_max: zstd_long or _ZSTD_LONG}
    return zstd.ZstdDecompressor(options=largest)


def decompressed(
    file: OpenInput,
    compression: Compression,
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    piece_bytes: int,
    zstd_long: int,
) -> Iterator[TextPiece]:
    """Yield the text of the file's bytes [span), whole members or frames, in pieces of about ``piece_bytes``.

    None has more than twice as many. Raises BadInput, naming file and byte, for what is no such member, is
    damaged or cut short, or stands behind the last one.
    """
    position = told = span[0]  # bytes of the file that were read, and that a piece accounts for
    data = b""
    held = bytearray()
    padding = b""  # that may stand before a member: zeros behind the first one

    def more() -> bytes:
        nonlocal position
        block = read(position, min(position + _READ_BYTES, span[1]))
        position += len(block)
        return block

    while True:
        data = data.lstrip(padding)
        while len(data) < _HEADER_BYTES and position < span[1]:
            data = (data + more()).lstrip(padding)
        if not data:
            break
        if not data.startswith(compression.magics):
            found = f"at byte {position - len(data)} stands {data[:8]!r}"
            expected = f"{compression.name}, which begins with {compression.magics[0]!r}"
            expected += "; give it the name that it should have, or move it away, and plan anew"
            raise BadInput(path=file.path, found=found, expected=expected)
        padding = b"\0" if compression.may_end_in_zeros else b""
        stream = compression.open(data, zstd_long)
        while not stream.eof:
            if stream.needs_input and not data and not (data := more()):
                what = f"its {compression.name} data does not end with it, at byte {position}"
                raise unreadable(file, f"is cut short: {what}")
            try:
                text = stream.decompress(data, piece_bytes)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                if compression.name == "zstd" and "too much memory" in str(error):
                    what, flag = "asks for a larger window of memory than is allowed", "--zstd_long 31"
                    todo = f"plan with {flag}, which may take 2 GiB in each task, or unpack the file"
                    message = f"input {file.path} {what}, before byte {position}; {todo}"
                    message += f": zstd -d --long=31 {file.path}"
                    raise BadInput(message, path=file.path, remedy=flag) from None
                what = f"cannot be decompressed as {compression.name} before byte {position} ({error})"
                raise unreadable(file, what) from None
            data = b""
            held += text
            if len(held) >= piece_bytes:
                yield TextPiece(bytes(held), position - told)
                told, held = position, bytearray()
        data = stream.unused_data
    yield TextPiece(bytes(held), span[1] - told)


# Magic, mtime, flags, system, 6, "BC", 2, bytes of the block less 1.
_BGZF_HEADER = struct.Struct("<4sIBBH2sHH")
_GZIP_WITH_EXTRA = b"\x1f\x8b\x08\x04"


def _bgzf_blocks(file: OpenInput) -> Iterator[Start]:
    """Read the header of every block, 22 bytes of 64 KiB; nothing where the first is none of bgzip's."""
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
    """The frames of zstd's seekable format and the last one's end; nothing for one, or no right table."""
    size = file.stamp.num_bytes
    footer = file.read(size - 9, size) if size > 17 else b""
    if footer[5:] != struct.pack("<I", 0x8F92EAB1):
        return []
    num_frames, entry_bytes = int.from_bytes(footer[:4], "little"), 12 if footer[4] & 0x80 else 8
    table_bytes = 8 + num_frames * entry_bytes + 9
    if table_bytes > min(size, _MOST_TABLE_BYTES):
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
    ".gz": Compression(
        name="gzip",
        magics=(b"\x1f\x8b",),
        open=lambda data, _: _GzipMember(data),
        may_end_in_zeros=True,
        frames=_bgzf_blocks,
    ),
    ".zst": Compression(name="zstd", magics=(_ZSTD_MAGIC, *_SKIPPABLE), open=_zstd_frame, frames=_seek_table),
    ".xz": Compression(
        name="xz",
        magics=(b"\xfd7zXZ\0",),
        open=lambda _, __: lzma.LZMADecompressor(memlimit=_XZ_BYTES),
        may_end_in_zeros=True,
    ),
    ".bz2": Compression(name="bzip2", magics=(b"BZh",), open=lambda _, __: bz2.BZ2Decompressor()),
}


# Lines. --------------------------------------------------------------------------------------------------


class LineBlock(NamedTuple):
    """Whole lines that follow each other, or one line that is too long to be held."""

    start: int  # byte of the text
    size: int  # bytes of text
    data: bytes | None  # None: it is one line that is too long
    num_bytes: int  # of the file that were read for it


class LineEnds:
    r"""Where lines end: at ``\n`` alone, or also at ``\r`` and ``\r\n`` (``with_cr``)."""

    def __init__(self, *, with_cr: bool) -> None:
        self.with_cr = with_cr

    def first(self, block: bytes) -> int:
        r"""Return the bytes up to and with the first line end, 0 for none. A last ``\r`` is a whole one."""
        newline = block.find(b"\n") + 1
        cr = block.find(b"\r", 0, newline or len(block)) + 1 if self.with_cr else 0
        return newline if not cr or cr + 1 == newline else cr

    def last(self, block: bytes) -> int:
        r"""Return the bytes up to and with the last line end, 0 for none. A last ``\r`` is a whole one."""
        return max(block.rfind(b"\n"), block.rfind(b"\r") if self.with_cr else -1) + 1

    def starts(self, block: bytes) -> Numbers:
        """Return where each line of a block of whole lines starts in it."""
        letters = np.frombuffer(block, np.uint8)
        is_end = letters == 10
        if self.with_cr and b"\r" in block:
            is_cr = letters == 13
            is_cr[:-1] &= ~is_end[1:]
            is_end |= is_cr
        starts = np.concatenate(([0], np.flatnonzero(is_end) + 1))
        return starts[:-1] if starts[-1] == len(block) else starts


def first_line_start(file: OpenInput, offset: int, end: int, line_ends: LineEnds) -> int | None:
    """The first byte at or after ``offset`` where a line begins; the file's size where its rest has none.

    None where none begins before ``end``; one behind it may be found all the same, and is right. It reads
    16 KiB, for most lines end soon, then twice as much each time, up to 1 MiB.
    """
    if offset >= end:
        return None
    if offset <= 0:
        return 0
    size = file.stamp.num_bytes
    position, num_bytes = offset - 1, _FIRST_SCAN_BYTES
    while position < end and (block := file.read(position, position + num_bytes)):
        if position + len(block) < size:
            block = block.removesuffix(
                b"\r"
            )  # perhaps half of a line end: it is read again with what follows
        if line_end := line_ends.first(block):
            return position + line_end
        position += len(block)
        num_bytes = min(2 * num_bytes, _MOST_SCAN_BYTES)
    return None if position < size else size


class LineFormat:
    """What formats of lines have in common; ``Format`` but for the text of a line."""

    line_ends: LineEnds

    def __init__(self, suffix: str | None) -> None:
        """``suffix`` of a compressed file. Raises UsageError where its library is missing."""
        self.compression = COMPRESSIONS[suffix] if suffix else None
        if suffix == ".zst":
            load_zstd()  # before any work

    def can_be_split(self, options: PlanOptions) -> bool:  # noqa: ARG002 - plain text's to say
        """Return whether a part may begin at a line."""
        return True

    def check_beginning(self, file: OpenInput, text: bytes) -> None:
        """Raise BadInput where the beginning of a file's text shows that it cannot be read."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Raises BadInput where it is of another kind, or its first frame asks for too much memory."""
        can_be_split, size = self.can_be_split(options), file.stamp.num_bytes
        if self.compression is None:
            return Inspected(text_bytes=size, is_whole=not can_be_split)
        pieces = decompressed(
            file, self.compression, file.read_all, (0, size), _HEAD_TEXT_BYTES, options.zstd_long
        )
        head = next(pieces)
        self.check_beginning(file, head.data)
        has_frames = next(iter(self.compression.frames(file)), None) is not None
        text_bytes = len(head.data) * size // max(1, head.num_bytes)
        return Inspected(text_bytes, is_whole=not (can_be_split and has_frames))

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], options: PlanOptions
    ) -> list[Start | None]:
        if not self.can_be_split(options):
            return starts_among((), file, stretches)
        if self.compression is None:
            file.expect_scattered_reads()
            found = (first_line_start(file, byte, end, self.line_ends) for byte, end in stretches)
            return [None if byte is None else Start(byte) for byte in found]
        return starts_among(self.compression.frames(file), file, stretches)

    def text_of_part(
        self, reader: RangeReader, options: PlanOptions, piece_bytes: int
    ) -> Iterator[TextPiece]:
        """Yield the text of a part, and of its last line what stands behind the part.

        Frames know nothing of lines. A line that begins where the part's text ends is the part's, for the
        next part leaves its first line out.
        """
        file, part, compression = reader.file, reader.part, self.compression
        if compression is None:
            for start in range(part.start, part.end, piece_bytes):
                end = min(start + piece_bytes, part.end)
                yield TextPiece(reader.read(start, end), end - start)
            return
        has_line, span, behind = part.start == 0, (part.start, part.end), (part.end, file.stamp.num_bytes)
        for piece in decompressed(file, compression, reader.read, span, piece_bytes, options.zstd_long):
            has_line = has_line or self.line_ends.first(piece.data) > 0
            yield piece
        if part.end == file.stamp.num_bytes:
            return
        others = decompressed(file, compression, file.read_all, behind, _TAIL_BYTES, options.zstd_long)
        for data, _ in _whole_line_ends(others, self.line_ends):
            end = self.line_ends.first(data)
            yield TextPiece(data[: end or len(data)], 0)  # these bytes are of another part
            if end or (data and not has_line):
                return  # nothing of a line without end is the part's

    def records_of(
        self,
        part: ByteRange,
        pieces: Iterator[TextPiece],
        batch_bytes: int,
        read_lines: ReadLines,
        *,
        num_skipped: int = 0,
    ) -> Iterator[Records]:
        """Yield the records of the lines that begin in a part.

        ``pieces``: of its text, without the first ``num_skipped`` bytes.
        """
        start = num_skipped + (part.start if self.compression is None else part.text_start)
        is_inside = self.compression is not None and part.start > 0
        # Each line may become two headers and two blocks of a tar, 2 KiB however short it is. So as many are
        # read at once as a batch's share of memory allows for (see resources.py).
        most = max(1, batch_bytes // SHORT_LINE_BYTES)
        for block in line_blocks(pieces, start, self.line_ends, is_inside=is_inside):
            num_bytes, data = block.num_bytes, block.data
            starts = np.zeros(1, np.int64) if data is None else self.line_ends.starts(data)
            bounds = np.append(starts, block.size)
            if not len(starts):
                yield no_records(num_bytes)
            for number in range(0, len(starts), most):
                begins, sizes = starts[number : number + most], np.diff(bounds[number : number + most + 1])
                texts: Texts | Sequence[bytes | UnusableText] = [too_long("the line")]
                columns: dict[str, list[Any]] = {}
                if data is not None:
                    first = int(begins[0])
                    lines = data[first : first + int(sizes.sum())]
                    texts, columns = read_lines(lines, begins - first, block.start + first)
                at = begins + block.start
                yield Records(texts=texts, starts=at, sizes=sizes, num_bytes=num_bytes, columns=columns)
                num_bytes = 0


def line_blocks(
    pieces: Iterator[TextPiece], start: int, line_ends: LineEnds, *, is_inside: bool
) -> Iterator[LineBlock]:
    """Cut a stream that begins at byte ``start`` of the text into blocks of whole lines.

    A line of more than MOST_DOCUMENT_BYTES is not held. At the end stands a block without lines, for what was
    read behind the last one. What stands before the first line end is left out where the stream begins inside
    of a line (``is_inside``).
    """
    begun: list[bytes] = []  # pieces of a line that goes on, held; none where it is too long
    num_begun = num_bytes = 0
    for data, num_read in _whole_line_ends(pieces, line_ends):
        num_bytes += num_read
        if is_inside:
            first = line_ends.first(data)
            is_inside, start = not first, start + (first or len(data))
            data = data[first:] if first else b""
        cut = line_ends.last(data)
        if cut and num_begun + cut > MOST_DOCUMENT_BYTES:
            # The line that goes on here may be too long, those behind it are not.
            first = line_ends.first(data)
            size = num_begun + first
            whole = b"".join([*begun, data[:first]]) if size <= MOST_DOCUMENT_BYTES else None
            yield LineBlock(start, size, whole, num_bytes)
            start, begun, num_begun, num_bytes = start + size, [], 0, 0
            data, cut = data[first:], cut - first
        if cut:
            yield LineBlock(start, num_begun + cut, b"".join([*begun, data[:cut]]), num_bytes)
            start, begun, num_begun, num_bytes = start + num_begun + cut, [], 0, 0
        begun.append(data[cut:])
        num_begun += len(data) - cut
        if num_begun > MOST_DOCUMENT_BYTES:
            begun = []
    if num_begun or num_bytes:
        whole = b"".join(begun) if num_begun <= MOST_DOCUMENT_BYTES else None
        yield LineBlock(start, num_begun, whole, num_bytes)


def _whole_line_ends(pieces: Iterator[TextPiece], line_ends: LineEnds) -> Iterator[TextPiece]:
    r"""Yield the same stream; a ``\r`` at the end of a piece is a whole line end."""
    kept = b""
    for data, num_bytes in pieces:
        joined = kept + data
        kept = b"\r" if line_ends.with_cr and joined.endswith(b"\r") else b""
        yield TextPiece(joined[: len(joined) - len(kept)], num_bytes)
    if kept:
        yield TextPiece(kept, 0)


# Which white space of ``str.strip`` ``bytes.strip`` leaves: by code point, all below 0x10000.
_IS_WIDE_SPACE = np.zeros(0x10000, np.bool_)
_IS_WIDE_SPACE[0x80:0x3001] = [chr(point).isspace() for point in range(0x80, 0x3001)]
_IS_WIDE_SPACE[0x1C:0x20] = True


class TextLines(LineFormat):
    """``.txt``: a document is a line, or a whole file."""

    line_ends = LineEnds(with_cr=True)

    def can_be_split(self, options: PlanOptions) -> bool:
        """Return False where a document is a whole file."""
        return options.doc == "line"

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[Records]:
        options = fields.options
        pieces = self.text_of_part(reader, options, batch_bytes)
        codec, num_mark_bytes = options.encoding, 0
        if codec == "utf-8-sig":
            codec = "utf-8"
            if reader.part.start == 0:  # drop the byte order mark, which stands in the first piece
                first = next(pieces, TextPiece(b"", 0))
                num_mark_bytes = len(_MARK) if first.data.startswith(_MARK) else 0
                pieces = itertools.chain([first._replace(data=first.data[num_mark_bytes:])], pieces)
        if options.doc == "file":
            yield _whole_text(pieces, num_mark_bytes, codec)
            return
        read_lines = functools.partial(_texts_of, codec)
        yield from self.records_of(reader.part, pieces, batch_bytes, read_lines, num_skipped=num_mark_bytes)


def _whole_text(pieces: Iterator[TextPiece], start: int, codec: str) -> Records:
    """Return a file as one document."""
    held = bytearray()
    size = num_bytes = 0
    for piece in pieces:
        size, num_bytes = size + len(piece.data), num_bytes + piece.num_bytes
        if size <= MOST_DOCUMENT_BYTES:
            held += piece.data
    text = _text_of(bytes(held), start, codec) if size <= MOST_DOCUMENT_BYTES else too_long("its text")
    return Records(texts=[text], starts=np.array([start]), sizes=np.array([size]), num_bytes=num_bytes)


def _texts_of(
    codec: str, block: bytes, starts: Numbers, at: int
) -> tuple[Texts | Sequence[bytes | UnusableText], dict[str, list[Any]]]:
    """Return the lines of a block. It nearly always is UTF-8; any other one is decoded line by line."""
    if codec == "utf-8":
        with contextlib.suppress(UnicodeDecodeError):
            characters = block.decode()
            texts = _stripped(block, characters)[: len(starts)]
            return Texts(texts, characters=characters) if all(texts) else texts, {}
    bounds = itertools.pairwise([*starts.tolist(), len(block)])
    return [_text_of(block[begin:end], at + begin, codec) for begin, end in bounds], {}


def _stripped(block: bytes, text: str) -> list[bytes]:
    """Strip the lines of a block that is UTF-8, given as ``text``, too; behind the last end stands one more.

    bytes.strip does it, in half the time, where the block has no white space but that of ASCII.
    """
    if b"\r" not in block:
        code_units = np.frombuffer(text.encode("utf-16-le"), "<u2")
        if not _IS_WIDE_SPACE.take(code_units, mode="clip").any():
            return [line.strip() for line in block.split(b"\n")]
    return [line.strip().encode() for line in _with_newlines(text).split("\n")]


def _text_of(data: bytes, at: int, codec: str) -> bytes | UnusableText:
    """Return the text of a document that begins at byte ``at``."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {at + error.start} is not {codec}: {error.reason}")
    return _with_newlines(text).strip().encode()


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
