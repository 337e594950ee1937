"""datatrove's example: JSON lines -> a uint32 stream, EOS after each document (and then no BOS)."""

import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(documents: str, tokenizer: str, output: str) -> None:
    """Tokenize ``documents``/documents.jsonl into ``output``."""
    eos_token = json.loads((Path(tokenizer) / "tokenizer_config.json").read_text())["eos_token"]
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(documents, glob_pattern="*.jsonl"),
            DocumentTokenizer(
                output_folder=f"{output}/tokens",
                tokenizer_name_or_path=f"{tokenizer}/tokenizer.json",
                eos_token=eos_token,
                shuffle_documents=False,
            ),
        ],
        logging_dir=f"{output}/logs",
        tasks=1,
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
