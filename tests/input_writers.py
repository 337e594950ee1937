"""Writers of the input formats that no library at hand writes: seekable zstd, and bgzip's blocks."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable

import zstandard


def pieces_of(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """The data in pieces of these sizes, again and again; no size is 0."""
    pieces, position, size = [], 0, itertools.cycle(list(sizes))
    while position < len(data):
        pieces.append(data[position : position + next(size)])
        position += len(pieces[-1])
    return pieces


def seekable_zstd(data: bytes, sizes: Iterable[int]) -> bytes:
    """zstd's seekable format: frames of these sizes of text, and a table of them at the end."""
    frames, table = [], b""
    for piece in pieces_of(data, sizes):
        frames.append(zstandard.ZstdCompressor().compress(piece))
        table += struct.pack("<II", len(frames[-1]), len(piece))
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


def zstd_of_blocks(data: bytes, sizes: Iterable[int]) -> bytes:
    """One frame in blocks of these sizes of text: a decompressor gives them one by one."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    blocks = [
        packer.compress(piece) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for piece in pieces_of(data, sizes)
    ]
    return b"".join(blocks) + packer.flush()


def bgzip(data: bytes, sizes: Iterable[int]) -> bytes:
    """What bgzip writes: gzip members that say their size, and an empty one at the end."""
    return b"".join(map(_bgzip_block, [*pieces_of(data, sizes), b""]))


def _bgzip_block(data: bytes) -> bytes:
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = deflate.compress(data) + deflate.flush()
    head = b"\x1f\x8b\x08\x04" + bytes(4) + b"\x00\xff" + struct.pack("<H2sHH", 6, b"BC", 2, len(body) + 25)
    return head + body + struct.pack("<II", zlib.crc32(data), len(data))
