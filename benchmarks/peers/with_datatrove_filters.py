"""datatrove's filters before its tokenizer. Words are separated by white space, as in our recipes."""

import json
import re
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import (
    FineWebQualityFilter,
    GopherQualityFilter,
    LambdaFilter,
    RegexFilter,
    fineweb_quality_filter,
    gopher_quality_filter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter

LINE_ENDS = (".", "!", "?", "…", "。", "！", "？", ";", '"', "'", "”", "’")
HANGUL = re.compile("[\uac00-\ud7a3]")


def is_korean(document) -> bool:
    """Return whether a review has a minimum length, and half of it is Korean."""
    text = document.text
    return len(text) >= 20 and len(HANGUL.findall(text)) >= 0.5 * len(text)


FILTERS = {
    "none": list,
    "gopher": lambda: [GopherQualityFilter()],
    "fineweb": lambda: [FineWebQualityFilter(stop_chars=LINE_ENDS)],
    "korean": lambda: [LambdaFilter(is_korean), RegexFilter(r"https?://|www\.|(\S)\1{9}")],
}


def main(documents: str, tokenizer: str, output: str, recipe: str, kind: str) -> None:
    """Filter ``documents``/documents.jsonl; ``kind`` is "tokens", or "texts" to see which are kept."""
    for module in (gopher_quality_filter, fineweb_quality_filter):
        module.split_into_words = lambda text, _: text.split()
    eos_token = json.loads((Path(tokenizer) / "tokenizer_config.json").read_text())["eos_token"]
    writer = JsonlWriter(f"{output}/texts", compression=None)
    if kind == "tokens":
        writer = DocumentTokenizer(
            output_folder=f"{output}/tokens",
            tokenizer_name_or_path=f"{tokenizer}/tokenizer.json",
            eos_token=eos_token,
            shuffle_documents=False,
        )
    LocalPipelineExecutor(
        pipeline=[JsonlReader(documents, glob_pattern="*.jsonl"), *FILTERS[recipe](), writer],
        logging_dir=f"{output}/logs",
        tasks=1,
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
