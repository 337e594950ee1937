"""Megatron-core's IndexedDatasetBuilder, fed as its tools/preprocess_data.py does: lines -> .bin and .idx.

The tool itself is only in the repository. Its tokenizer worker encodes one document at a time, with BOS from
the tokenizer and EOS (eod) appended, and so does this loop.
"""

import sys
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from transformers import AutoTokenizer


def main(documents: str, tokenizer_folder: str, output: str) -> None:
    """Tokenize ``documents``/documents.txt into ``output``."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    builder = IndexedDatasetBuilder(f"{output}/data.bin", dtype=np.int32)
    with (Path(documents) / "documents.txt").open(encoding="utf-8") as file:
        for line in file:
            if text := line.strip():
                ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{output}/data.idx")


if __name__ == "__main__":
    main(*sys.argv[1:])
