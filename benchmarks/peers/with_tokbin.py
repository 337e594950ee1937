"""tokbin: lines -> a stream of uint32 in shards with hashes, BOS and EOS of each document."""

import sys
from pathlib import Path

from tokbin import Dataset, WriterConfig


def lines(path):
    with path.open(encoding="utf-8") as file:
        yield from filter(None, map(str.strip, file))


def main(documents: str, tokenizer_folder: str, output: str) -> None:
    """Tokenize ``documents``/documents.txt into ``output``."""
    config = WriterConfig(prepend_bos=True, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    texts = lines(Path(documents, "documents.txt"))
    Dataset(output).write("text", texts, f"{tokenizer_folder}/tokenizer.json", config=config)


if __name__ == "__main__":
    main(*sys.argv[1:])
