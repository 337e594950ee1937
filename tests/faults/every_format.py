"""The documents of a file of plain text in every other format, beside it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from tests.input_writers import bgzip, seekable_zstd

_ROWS_AT_ONCE = 9  # so that shards may be cut inside the file


def write_every_format(folder: Path) -> None:
    """Write what ``a.txt`` in the folder says, and a record without text, in each format."""
    text = (folder / "a.txt").read_bytes()
    texts = text.decode().splitlines()
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts).encode() + b'{"text": null}\n'
    files = {
        "c.jsonl": lines,
        "d.jsonl.gz": gzip.compress(lines),
        "e.jsonl.zst": zstandard.ZstdCompressor().compress(lines),
        "f.jsonl.zst": seekable_zstd(lines, [900]),
        "g.jsonl.gz": bgzip(lines, [700]),
        "h.jsonl.xz": lzma.compress(lines),
        "i.jsonl.bz2": bz2.compress(lines),
        "j.txt.gz": gzip.compress(text),
        "k.parquet": _parquet([*texts, None]),
        "l.arrow": _arrow([*texts, None]),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _parquet(texts: list[str | None]) -> bytes:
    sink = io.BytesIO()
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, sink, row_group_size=_ROWS_AT_ONCE, compression="zstd")
    return sink.getvalue()


def _arrow(texts: list[str | None]) -> bytes:
    sink, table = io.BytesIO(), pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=_ROWS_AT_ONCE)
    return sink.getvalue()
