"""litdata's README for language models: lines -> chunks of tokens, read as blocks of 2,049. BOS and EOS."""

import sys
from functools import partial
from pathlib import Path

import torch
from litdata import TokensLoader, optimize
from transformers import AutoTokenizer

BLOCK = 2048 + 1


def tokenize(path, tokenizer=None):
    """Yield the ids of each line."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            if text := line.strip():
                yield torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id], dtype=torch.int)


def main(documents: str, tokenizer_folder: str, output: str) -> None:
    """Tokenize ``documents``/documents.txt into ``output``."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    optimize(
        fn=partial(tokenize, tokenizer=tokenizer),
        inputs=[f"{documents}/documents.txt"],
        output_dir=output,
        chunk_size=BLOCK * 8012,
        item_loader=TokensLoader(BLOCK),
        num_workers=1,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
