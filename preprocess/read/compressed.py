"""Lines, plain or compressed: their text in pieces, in bounded memory, and where it may be entered.

A compressed file is read whole, unless the file itself says where frames begin: bgzip's blocks do, and zstd's
seekable format with a table at the file's end. A frame knows nothing of lines, so a part that begins at one
leaves out what stands before its first line end, and reads on behind its end up to the first line end there.
"""

from __future__ import annotations

import bz2
import contextlib
import itertools
import lzma
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from preprocess.read.format import Inspected, Start, starts_among
from preprocess.read.inputs import OpenInput, RangeReader, unreadable
from preprocess.read.lines import LineEnds, TextPiece, first_line_start
from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError
from shardprep.format.options import PlanOptions

_READ_BYTES = 128 << 10
_XZ_BYTES = 1 << 30  # of memory that a stream may ask for; more is refused
_TAIL_BYTES = 16 << 10
_HEADER_BYTES = 18  # the longest header of a frame of zstd; magics are shorter
_ZSTD_LONG = 27  # log2 of the largest window that zstd itself decompresses
_HEAD_TEXT_BYTES = 256 << 10  # of which planning judges how much text there is
_MOST_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way to compress a file."""

    name: str
    magics: tuple[bytes, ...]
    open: Callable[[], Any]  # what reads one member, stream or frame, with the methods of bz2's
    may_end_in_zeros: bool = False


class _GzipMember:
    """zlib's decompressor in the shape of bz2's; isal's where it is installed: 2 to 3 times as fast."""

    def __init__(self) -> None:
        self._member: Any = None
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member is not None and bool(self._member.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._member.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._member is None:
            library: Any = zlib
            # isal takes an optional field that goes on in the next block for deflated data, and knows
            # flags that zlib refuses. A file is to be read alike with and without it.
            if _has_plain_header(data):
                with contextlib.suppress(ImportError):
                    from isal import isal_zlib

                    library = isal_zlib
            self._member = library.decompressobj(31)
        out: bytes = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = not self._member.unconsumed_tail and len(out) != max_length
        return out


def _has_plain_header(data: bytes) -> bool:
    """Return whether the header of a gzip member (RFC 1952) is whole in ``data``, without reserved flags."""
    if len(data) < 10 or data[3] & 0xE0:
        return False
    flags, end = data[3], 10
    if flags & 4:  # FEXTRA: its size, and as many bytes
        if len(data) < end + 2:
            return False
        end += 2 + int.from_bytes(data[end : end + 2], "little")
    for flag in (8, 16):  # FNAME, FCOMMENT: each ends in a zero
        if flags & flag:
            end = data.find(b"\0", end) + 1
            if not end:
                return False
    if flags & 2:  # FHCRC
        end += 2
    return len(data) >= end


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


def _zstd_frame() -> Any:
    zstd = load_zstd()
    return zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: 31}
    )  # see _check_window


def _xz_stream() -> lzma.LZMADecompressor:
    """Its header declares a dictionary of up to 4 GiB; ``xz -9`` has one of 64 MiB."""
    return lzma.LZMADecompressor(memlimit=_XZ_BYTES)


def _errors() -> tuple[type[Exception], ...]:
    found: list[Any] = [OSError, EOFError, ValueError, zlib.error, lzma.LZMAError]
    with contextlib.suppress(ImportError):
        from isal import isal_zlib

        found.append(getattr(isal_zlib, "error"))  # noqa: B009 - its types call it an error, and no class
    with contextlib.suppress(UsageError):
        found.append(load_zstd().ZstdError)
    return tuple(found)


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(struct.pack("<I", 0x184D2A50 + number) for number in range(16))
COMPRESSIONS = {
    ".gz": Compression(name="gzip", magics=(b"\x1f\x8b",), open=_GzipMember, may_end_in_zeros=True),
    ".zst": Compression(name="zstd", magics=(_ZSTD_MAGIC, *_SKIPPABLE), open=_zstd_frame),
    ".xz": Compression(name="xz", magics=(b"\xfd7zXZ\0",), open=_xz_stream, may_end_in_zeros=True),
    ".bz2": Compression(name="bzip2", magics=(b"BZh",), open=bz2.BZ2Decompressor),
}


def decompressed(
    file: OpenInput,
    compression: Compression,
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    piece_bytes: int,
    zstd_long: int,
) -> Iterator[TextPiece]:
    """The text of the file's bytes [span), whole members or frames, in pieces of about ``piece_bytes``.

    None has more than twice as many, however much a few bytes say. Raises BadInput, naming file and byte, for
    what is no such member, is damaged or cut short.
    """
    starts = range(*span, _READ_BYTES)
    blocks = (read(start, min(start + _READ_BYTES, span[1])) for start in starts)
    errors = _errors()
    position = told = span[
        0
    ]  # up to which byte of the file was read, and which of these a piece accounts for
    data = leading = b""
    held: list[bytes] = []
    num_held = 0
    while True:
        data = data.lstrip(leading)
        while len(data) < _HEADER_BYTES and (block := next(blocks, b"")):
            position += len(block)
            data = (data + block).lstrip(leading)
        if not data:
            break
        _check_magic(file, compression, data, position - len(data))
        _check_window(file, data, position - len(data), zstd_long)
        stream = compression.open()
        leading = b"\0" if compression.may_end_in_zeros else b""
        while not stream.eof:
            if stream.needs_input and not data:
                data = next(blocks, b"")
                position += len(data)
            if stream.needs_input and not data:
                why = f"is cut short: its {compression.name} data does not end with it, at byte {position}"
                raise unreadable(file, why)
            try:
                text = stream.decompress(data, piece_bytes)
            except errors as error:
                why = f"cannot be decompressed as {compression.name} before byte {position} ({error})"
                raise unreadable(file, why) from None
            data = b""
            held.append(text)
            num_held += len(text)
            if num_held >= piece_bytes:
                yield TextPiece(b"".join(held), position - told)
                told, held, num_held = position, [], 0
        data = stream.unused_data
    yield TextPiece(b"".join(held), span[1] - told)


def _check_magic(file: OpenInput, compression: Compression, data: bytes, at: int) -> None:
    if data.startswith(compression.magics):
        return
    raise BadInput(
        path=file.path,
        found=f"at byte {at} stands {data[:8]!r}",
        expected=f"{compression.name}, which begins with {compression.magics[0]!r}; give it the name that it "
        "should have, or move it away, and plan anew",
    )


def _check_window(file: OpenInput, data: bytes, at: int, zstd_long: int) -> None:
    """That the frame that begins with ``data`` asks for no more memory than is allowed. Raises BadInput."""
    if not data.startswith(_ZSTD_MAGIC):
        return
    window = _zstd_window(data)
    if window <= 1 << (zstd_long or _ZSTD_LONG):
        return
    long = (window - 1).bit_length()
    raise BadInput(
        f"input {file.path} asks for a window of {window} bytes of memory at byte {at}, expected at most "
        f"{1 << (zstd_long or _ZSTD_LONG)}; plan with --zstd_long {long}, which takes that much memory in "
        f"each task, or unpack the file: zstd -d --long={long} {file.path}"
    )


def _zstd_window(header: bytes) -> int:
    """The bytes of memory that a frame of zstd asks for (RFC 8878, 3.1.1.1), 0 where its header is cut."""
    if len(header) < 6:
        return 0
    flags = header[4]
    is_single_segment = flags & 0x20
    if not is_single_segment:
        base = 1 << (10 + (header[5] >> 3))
        return base + base // 8 * (header[5] & 7)
    # The window is all of the text, whose size stands behind the number of a dictionary.
    start, num_bytes = 5 + (0, 1, 2, 4)[flags & 3], (1, 2, 4, 8)[flags >> 6]
    return int.from_bytes(header[start : start + num_bytes], "little") + (256 if num_bytes == 2 else 0)


@dataclass(frozen=True)
class LineFormat:
    """What formats of lines have in common; ``Format`` but for ``read``."""

    line_ends: ClassVar[LineEnds]
    compression: Compression | None  # of the file

    def can_be_split(self, options: PlanOptions) -> bool:  # noqa: ARG002 - plain text's to say
        """Return whether a part may begin at a line."""
        return True

    def check_beginning(self, file: OpenInput, text: bytes) -> None:
        """Raise BadInput where the beginning of a compressed file's text shows that it cannot be read."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Raises BadInput where it is of another kind, or its first frame asks for too much memory."""
        can_be_split = self.can_be_split(options)
        if self.compression is None:
            return Inspected(text_bytes=file.stamp.num_bytes, is_whole=not can_be_split)
        num_bytes, head = _text_bytes_about(file, self.compression, options.zstd_long)
        self.check_beginning(file, head)
        has_frames = next(iter(_frames(file, self.compression)), None) is not None
        return Inspected(num_bytes, is_whole=not (can_be_split and has_frames))

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], options: PlanOptions
    ) -> list[Start | None]:
        if not self.can_be_split(options):
            return starts_among((), file, stretches)
        if self.compression is None:
            file.expect_scattered_reads()
            found = (first_line_start(file, byte, end, self.line_ends) for byte, end in stretches)
            return [None if byte is None else Start(byte) for byte in found]
        return starts_among(_frames(file, self.compression), file, stretches)

    def text_of_part(
        self, reader: RangeReader, options: PlanOptions, piece_bytes: int
    ) -> tuple[int, Iterator[TextPiece]]:
        """Return the byte of the text where the part's first line begins, and its pieces from there on.

        A part without a line has nothing but the bytes that it accounts for.
        """
        file, part, compression = reader.file, reader.part, self.compression
        if compression is None:
            starts = range(part.start, part.end, piece_bytes)
            spans = ((start, min(start + piece_bytes, part.end)) for start in starts)
            return part.start, (TextPiece(reader.read(*span), span[1] - span[0]) for span in spans)

        def tail() -> Iterator[bytes]:
            """Return the text behind the part. It is hashed with the part that it lies in."""
            span = (part.end, file.stamp.num_bytes)
            texts = decompressed(file, compression, file.read_all, span, _TAIL_BYTES, options.zstd_long)
            return (piece.data for piece in texts)

        span = (part.start, part.end)
        pieces = decompressed(file, compression, reader.read, span, piece_bytes, options.zstd_long)
        at, has_line = part.text_start, True
        if part.start:
            at, pieces, has_line = _skip_line(pieces, tail(), self.line_ends, at)
        if has_line and part.end < file.stamp.num_bytes:
            pieces = _with_tail(pieces, tail(), self.line_ends)
        return at, pieces


def _skip_line(
    pieces: Iterator[TextPiece], tail: Iterator[bytes], line_ends: LineEnds, at: int
) -> tuple[int, Iterator[TextPiece], bool]:
    """(where the first line behind a line end begins, the pieces from there on, whether there is one).

    Where no line begins in the part, or just behind it, all of it is of the line before.
    """
    held, num_bytes = b"", 0
    for piece in pieces:
        held, num_bytes = held + piece.data, num_bytes + piece.num_bytes
        if cut := line_ends.first(held):
            return at + cut, itertools.chain([TextPiece(held[cut:], num_bytes)], pieces), True
        at, held = at + max(0, len(held) - 1), held[-1:]  # a last \r may be half of a line end
    rest = held + next((data for data in tail if data), b"")
    cut = line_ends.first(rest, is_last=len(rest) == len(held))
    has_line = 0 < cut <= len(held)
    return at + cut, iter([TextPiece(b"", num_bytes)]), has_line


def _with_tail(
    pieces: Iterator[TextPiece], tail: Iterator[bytes], line_ends: LineEnds
) -> Iterator[TextPiece]:
    """Yield the pieces, and what follows them up to the first line end."""
    yield from pieces
    held = b""
    for data in tail:
        held += data
        if cut := line_ends.first(held):
            yield TextPiece(held[:cut], 0)
            return
        if held:
            yield TextPiece(held[:-1], 0)
            held = held[-1:]
    yield TextPiece(held, 0)


def _text_bytes_about(file: OpenInput, compression: Compression, zstd_long: int) -> tuple[int, bytes]:
    """Return about how much text a file has, by its beginning, and that. Raises BadInput."""
    size = file.stamp.num_bytes
    pieces = decompressed(file, compression, file.read_all, (0, size), _HEAD_TEXT_BYTES, zstd_long)
    head = next(pieces)
    return len(head.data) * size // max(1, head.num_bytes), head.data


def _frames(file: OpenInput, compression: Compression) -> Iterable[Start]:
    """Return the places where the file says that it may be entered, the first one and the end among them."""
    if compression.name == "gzip":
        return _bgzf_blocks(file)
    return _seek_table(file) if compression.name == "zstd" else ()


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
