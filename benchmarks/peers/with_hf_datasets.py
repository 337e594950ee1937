"""HF datasets: JSON lines -> Arrow, by a batched map and save_to_disk. BOS by the tokenizer, EOS appended."""

import sys

from datasets import load_dataset
from transformers import AutoTokenizer


def main(documents: str, tokenizer_folder: str, output: str) -> None:
    """Tokenize ``documents``/documents.jsonl with the library's cache in ``output``, so that it is cold."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def tokenize(batch: dict) -> dict:
        encoded = tokenizer(batch["text"])["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded]}

    dataset = load_dataset(
        "json", data_files=f"{documents}/documents.jsonl", split="train", cache_dir=f"{output}/cache"
    )
    dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
    dataset.save_to_disk(f"{output}/dataset")


if __name__ == "__main__":
    main(*sys.argv[1:])
