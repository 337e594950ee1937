"""Write a text repeatedly into one member, one row group or one record batch of an input file.

    python benchmarks/large_inputs.py TEXT NUM_BYTES PATH    # .txt, .jsonl[.gz|.zst|.xz], .parquet or .arrow

This runs as its own process, so that the memory of these writers does not count in measurements.
"""

from __future__ import annotations

import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard

FORMS = (".txt", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".parquet", ".arrow")


def write_large_input(text: Path, num_bytes: int, path: Path) -> None:
    """Write about ``num_bytes`` of text in the format given by the name of ``path``."""
    lines = text.read_bytes()
    repeats = num_bytes // len(lines)
    suffix = path.name[path.name.index(".") :]
    if suffix == ".txt":
        with path.open("wb") as file:
            file.writelines(lines for _ in range(repeats))
    elif suffix in (".parquet", ".arrow"):
        _write_rows(lines.decode().splitlines(), repeats, path)
    else:
        _write_compressed(lines.decode().splitlines(), repeats, path)


def _write_rows(texts: list[str], repeats: int, path: Path) -> None:
    once = pyarrow.table({"text": texts})
    table = pyarrow.concat_tables([once] * repeats).combine_chunks()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=table.num_rows, compression="zstd")
        return
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=table.num_rows)


def _write_compressed(texts: list[str], repeats: int, path: Path) -> None:
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    for piece in _compressed(lines, repeats, path.suffix):
        with path.open("ab") as file:
            file.write(piece)


def _compressed(data: bytes, repeats: int, suffix: str) -> Iterator[bytes]:
    """Yield one compressed member. Fast levels suffice: only zstd's window changes the reader's memory."""
    compressor: Any
    if suffix == ".zst":
        compressor = zstandard.ZstdCompressor(level=3).compressobj()
    elif suffix == ".xz":
        compressor = lzma.LZMACompressor(preset=1)
    else:
        compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    for _ in range(repeats):
        yield compressor.compress(data)
    yield compressor.flush()


if __name__ == "__main__":
    write_large_input(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
