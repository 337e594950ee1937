"""The script that shardprep replaces: one text file -> one tar, one document per line.

It is the reference for the default options (tests/preprocess/test_tokenizers.py compares member by member),
and the baseline of the benchmarks. Do not tune it.
"""

import argparse
from pathlib import Path

import webdataset as wds
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard_id", type=int, required=True)
    parser.add_argument("--input_dir", default="/data/raw")
    parser.add_argument("--output_dir", default="/data/processed")
    parser.add_argument("--model_id", default="meta-llama/Meta-Llama-3-8B")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model_id)
    path = sorted(Path(args.input_dir).glob("*.txt"))[args.shard_id]
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    target = Path(args.output_dir) / f"shard-{args.shard_id:05d}.tar"
    with wds.TarWriter(str(target)) as sink, path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            text = line.strip()
            if not text:
                continue
            sink.write(
                {
                    "__key__": f"sample_{args.shard_id}_{number:08d}",
                    "token_ids.json": tokenizer.encode(text, add_special_tokens=True),
                    "text.txt": text,
                }
            )


if __name__ == "__main__":
    main()
