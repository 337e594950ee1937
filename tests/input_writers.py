"""Write input formats, including seekable zstd and bgzip, which none of the installed libraries writes."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard


def json_lines(texts: Iterable[str]) -> bytes:
    """Return a JSON line with an id for each text."""
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def table_bytes(table: Any, suffix: str, rows: int = 3, **options: Any) -> bytes:
    """Return a table (or columns, or rows) as parquet, stream.arrow or file.arrow with ``rows`` per group."""
    if not isinstance(table, pyarrow.Table):
        table = pyarrow.Table.from_pylist(table) if isinstance(table, list) else pyarrow.table(table)
    sink = io.BytesIO()
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, sink, row_group_size=rows)
        return sink.getvalue()
    opened = pyarrow.ipc.new_file if suffix.startswith("file") else pyarrow.ipc.new_stream
    with opened(sink, table.schema, **options) as writer:
        for start in range(0, max(1, len(table)), rows):
            # Each batch has a dictionary of its own: a stream replaces the last one, or adds to it.
            chunk = table.slice(start, rows)
            writer.write_table(chunk if suffix.startswith("file") else chunk.unify_dictionaries())
    return sink.getvalue()


def pieces_of(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Split data into pieces of these sizes, which repeat and must not be 0."""
    pieces, position, size = [], 0, itertools.cycle(list(sizes))
    while position < len(data):
        pieces.append(data[position : position + next(size)])
        position += len(pieces[-1])
    return pieces


def seekable_zstd(data: bytes, sizes: Iterable[int]) -> bytes:
    """Compress data in zstd's seekable format: frames of these uncompressed sizes and a table at the end."""
    frames, table = [], b""
    for piece in pieces_of(data, sizes):
        frames.append(zstandard.ZstdCompressor().compress(piece))
        table += struct.pack("<II", len(frames[-1]), len(piece))
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


def zstd_of_blocks(data: bytes, sizes: Iterable[int]) -> bytes:
    """Compress data to one zstd frame with blocks of these uncompressed sizes."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    blocks = [
        packer.compress(piece) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for piece in pieces_of(data, sizes)
    ]
    return b"".join(blocks) + packer.flush()


def bgzip(data: bytes, sizes: Iterable[int]) -> bytes:
    """Compress data as bgzip does: gzip members that state their size, and an empty one at the end."""
    members = []
    for piece in [*pieces_of(data, sizes), b""]:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = deflate.compress(piece) + deflate.flush()
        size = struct.pack("<H2sHH", 6, b"BC", 2, len(body) + 25)
        head = b"\x1f\x8b\x08\x04" + bytes(4) + b"\x00\xff" + size
        members.append(head + body + struct.pack("<II", zlib.crc32(piece), len(piece)))
    return b"".join(members)


def write_every_format(folder: Path) -> None:
    """Write the lines of ``a.txt`` in the folder, and a record without text, in each format.

    Shards may begin inside most of these files.
    """
    text = (folder / "a.txt").read_bytes()
    rows = [{"text": each} for each in [*text.decode().splitlines(), None]]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name, data in {
        "c.jsonl": lines,
        "d.jsonl.gz": gzip.compress(lines),
        "e.jsonl.zst": zstandard.compress(lines),
        "f.jsonl.zst": seekable_zstd(lines, [900]),
        "g.jsonl.gz": bgzip(lines, [700]),
        "h.jsonl.xz": lzma.compress(lines),
        "i.jsonl.bz2": bz2.compress(lines),
        "j.txt.gz": gzip.compress(text),
        "k.parquet": table_bytes(rows, "parquet", 9),
        "l.arrow": table_bytes(rows, "stream.arrow", 9),
    }.items():
        (folder / name).write_bytes(data)
