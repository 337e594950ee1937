"""The documents of a file of plain text in every other format, beside it."""

from __future__ import annotations

import bz2
import gzip
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
    texts = [*text.decode().splitlines(), None]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts).encode()
    (folder / "c.jsonl").write_bytes(lines)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "e.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "f.jsonl.zst").write_bytes(seekable_zstd(lines, [900]))
    (folder / "g.jsonl.gz").write_bytes(bgzip(lines, [700]))
    (folder / "h.jsonl.xz").write_bytes(lzma.compress(lines))
    (folder / "i.jsonl.bz2").write_bytes(bz2.compress(lines))
    (folder / "j.txt.gz").write_bytes(gzip.compress(text))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "k.parquet", row_group_size=_ROWS_AT_ONCE, compression="zstd")
    with pyarrow.ipc.new_stream(folder / "l.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=_ROWS_AT_ONCE)
