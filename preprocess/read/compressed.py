"""Compressed files: their text in bounded pieces, and the places where a file says that it may be entered.

bgzip's blocks and zstd's seekable format say where frames begin; any other compressed file is read whole.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from preprocess.read.format import OpenInput, Start, unreadable
from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError

_READ_BYTES = 128 << 10
_XZ_BYTES = 1 << 30  # of memory that a stream may ask for; ``xz -9`` asks for 64 MiB
_HEADER_BYTES = 18  # at hand when a member, stream or frame is opened
_ZSTD_LONG = 27  # log2 of the largest window that zstd itself decompresses
_MOST_TABLE_BYTES = 64 << 20
_BGZIP = (b"\x04", b"\x06\0")  # flags of a gzip header, and size of its extra field


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
    return zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: zstd_long or _ZSTD_LONG}
    )


def decompressed(
    file: OpenInput,
    compression: Compression,
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    piece_bytes: int,
    zstd_long: int,
) -> Iterator[TextPiece]:
    """Yield the text of the file's bytes [span), whole members or frames, in pieces of about ``piece_bytes``.

    None has more than twice as many, however much a few bytes say. Raises BadInput, naming file and byte, for
    what is no such member, is damaged or cut short, or stands behind the last one.
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
            raise BadInput(
                path=file.path,
                found=f"at byte {position - len(data)} stands {data[:8]!r}",
                expected=f"{compression.name}, which begins with {compression.magics[0]!r}; give it the name "
                "that it should have, or move it away, and plan anew",
            )
        padding = b"\0" if compression.may_end_in_zeros else b""
        stream = compression.open(data, zstd_long)
        while not stream.eof:
            if stream.needs_input and not data:
                data = more()
                if not data:
                    what = f"its {compression.name} data does not end with it, at byte {position}"
                    raise unreadable(file, f"is cut short: {what}")
            try:
                text = stream.decompress(data, piece_bytes)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                if compression.name == "zstd" and "too much memory" in str(error):
                    raise BadInput(
                        f"input {file.path} asks for a larger window of memory than is allowed, before byte "
                        f"{position}; plan with --zstd_long 31, which may take 2 GiB in each task, or unpack "
                        f"the file: zstd -d --long=31 {file.path}",
                        path=file.path,
                        remedy="--zstd_long 31",
                    ) from None
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
