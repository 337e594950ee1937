"""Megatron-LM's fast path, ``tools/preprocess_data_fast.py`` of August 2026, which is not in any wheel.

    python with_megatron_fast.py DOCUMENTS TOKENIZER OUTPUT

As in the tool, gigatoken reads and encodes the whole .jsonl, the tokens are one array in memory, and a
``.bin`` of int32 and an ``.idx`` of lengths are written. In its favour, the imports of Megatron and torch and
the processes that it starts are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import awkward as ak
import gigatoken as gt
import numpy as np

_INDEX_HEADER = b"MMIDIDX\x00\x00"
_INT32 = 4  # its code for the dtype


def main(documents: Path, tokenizer: Path, output: Path) -> None:
    source = gt.JsonlFileSource(sorted(documents.glob("*.jsonl")), "text")
    encoded = gt.Tokenizer(tokenizer / "tokenizer.json").encode_files(source)
    lengths = np.asarray(ak.num(encoded, axis=1), np.int32)
    ids = np.asarray(ak.flatten(encoded), np.int32)
    ids.tofile(output / "documents.bin")
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * np.int64(4), out=pointers[1:])
    with (output / "documents.idx").open("wb") as index:
        index.write(_INDEX_HEADER + np.array([1], "<u8").tobytes() + bytes([_INT32]))
        index.write(np.array([len(lengths), len(lengths) + 1], "<u8").tobytes())
        for table in (lengths, pointers, np.arange(len(lengths) + 1, dtype=np.int64)):
            index.write(table.tobytes())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
