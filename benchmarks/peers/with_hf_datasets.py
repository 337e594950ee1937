"""HF datasets: JSON lines -> Arrow, by a batched map and save_to_disk. BOS by the tokenizer, EOS appended."""

import sys

from datasets import load_dataset
from transformers import AutoTokenizer


def main(documents: str, tokenizer_folder: str, output: str, num_proc: str = "1") -> None:
    """Tokenize ``documents``/documents.jsonl with the library's cache in ``output``, so that it is cold."""
    processes = None if num_proc == "1" else int(num_proc)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def tokenize(batch: dict) -> dict:
        encoded = tokenizer(batch["text"])["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded]}

    dataset = load_dataset(
        "json", data_files=f"{documents}/documents.jsonl", split="train", cache_dir=f"{output}/cache"
    )
    columns = dataset.column_names
    dataset = dataset.map(tokenize, batched=True, remove_columns=columns, num_proc=processes)
    dataset.save_to_disk(f"{output}/dataset", num_proc=processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
