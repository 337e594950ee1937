"""Decompress files, piece by piece, and find the frames at which a shard may begin.

bgzip blocks and zstd's seekable format say where frames begin; other compressed files are read whole.
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
from typing import Any

import numpy as np

from preprocess.read import inputs
from preprocess.read.formats import Start
from preprocess.read.inputs import OpenInput
from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError

_READ_BYTES = 128 << 10
HEAD_TEXT_BYTES = 256 << 10  # of a text, that planning looks at
_XZ_BYTES = 1 << 30  # the most memory that xz may take; ``xz -9`` needs 64 MiB
_HEADER_BYTES = 18  # a decompressor is opened with at least this much data, or all that is left
_DEFAULT_ZSTD_LONG = 27  # log2 of the largest window that the zstd command accepts by default
_MAX_SEEK_TABLE_BYTES = 64 << 20
_BGZIP = (b"\x04", b"\x06\0")  # flags of a gzip header, and size of its extra field
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
        flags = data[3:4]
        is_whole_name = b"\0" in data[10:]
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


def beginning_of_text(file: OpenInput, compression: Compression | None, zstd_long: int) -> tuple[bytes, int]:
    """Return the first 256 KiB of a file's text, and an estimate of the bytes of all its text."""
    size = file.stamp.num_bytes
    pieces = decompressed(file, compression, file.read_all, (0, size), HEAD_TEXT_BYTES, zstd_long)
    head, num_read = next(pieces, (b"", 0))
    return head, len(head) * size // max(1, num_read)


def decompressed(
    file: OpenInput,
    compression: Compression | None,
    read: Callable[[int, int], bytes],
    span: tuple[int, int],
    piece_bytes: int,
    zstd_long: int,
) -> TextBlocks:
    """Decompress the bytes ``span`` of a file, which are whole members or frames.

    Yields pieces of about ``piece_bytes``, at most twice as many. Raises BadInput, with file and byte, if a
    member is damaged or cut short, or if something else follows the last member. The bytes of a plain file,
    whose compression is None, are its text.
    """
    if compression is None:
        for start in range(*span, piece_bytes):
            end = min(start + piece_bytes, span[1])
            yield read(start, end), end - start
        return
    position = counted_end = span[0]  # end of the bytes that were read, and of those that a piece counts
    data = b""
    buffer = bytearray()
    padding = b""  # none before the first member

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
            expected = f"{compression.magics[0]!r} of {compression.name}"
            advice = "rename or move it, and plan again"
            raise BadInput(path=file.path, found=found, expected=expected, advice=advice)
        padding = compression.padding
        stream = compression.open(data, zstd_long)
        while not stream.eof:
            if stream.needs_input and not data and not (data := read_more()):
                what = f"is cut short: incomplete {compression.name} data at byte {position}"
                raise inputs.unreadable(file, what)
            try:
                text = stream.decompress(data, piece_bytes)
            except MemoryError:
                raise
            except Exception as error:  # each library raises its own class
                if compression.name == "zstd" and "too much memory" in str(error):
                    found = f"a zstd window above the limit, before byte {position}"
                    flag = "--zstd_long 31"
                    expected = "at most 128 MiB"
                    advice = f"plan with {flag}, which may take 2 GiB in each task, or "
                    advice += f"decompress it: zstd -d --long=31 {file.path}"
                    raise BadInput(
                        path=file.path, found=found, expected=expected, advice=advice, remedy=flag
                    ) from None
                what = f"cannot be decompressed as {compression.name} before byte {position} ({error})"
                raise inputs.unreadable(file, what) from None
            data = b""
            buffer += text
            if len(buffer) >= piece_bytes:
                yield bytes(buffer), position - counted_end
                counted_end = position
                buffer = bytearray()
        data = stream.unused_data
    yield bytes(buffer), span[1] - counted_end


# Magic and flags, mtime, extra flags and system, 6, "BC", 2, size of the block minus 1.
_BGZF_HEADER = struct.Struct("<4sIBBH2sHH")
_GZIP_WITH_EXTRA = b"\x1f\x8b\x08\x04"


def _bgzf_blocks(file: OpenInput) -> Iterator[Start]:
    """Yield where bgzip's blocks begin, nothing for other gzip files. Reads 22 bytes per block of 64 KiB."""
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
    num_frames = int.from_bytes(footer[:4], "little")
    entry_bytes = 12 if footer[4] & 0x80 else 8
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
