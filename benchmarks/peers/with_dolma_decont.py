"""dolma's decontamination: a Bloom filter of the evaluation's n-grams, then marks in each paragraph."""

import json
import sys
from pathlib import Path

from dolma.cli.__main__ import main as dolma


def main(documents: str, evals: str, output: str, num_ngrams: str) -> None:
    """Mark the paragraphs of JSON lines that share 13 words with an evaluation, in ``output``."""
    root = Path(output)
    with_ids = root / "evals" / "documents" / "evals.jsonl"
    with_ids.parent.mkdir(parents=True)
    lines = Path(evals).read_text(encoding="utf-8").splitlines()
    texts = [json.dumps({"id": str(number), **json.loads(line)}) for number, line in enumerate(lines)]
    with_ids.write_text("\n".join(texts) + "\n")
    for path, read_only in ((with_ids, False), (Path(documents), True)):
        flags = {
            "--documents": str(path),
            "--dedupe.name": "decontamination",
            "--dedupe.paragraphs.attribute_name": "overlap",
            "--dedupe.paragraphs.by_ngram.ngram_length": "13",
            "--dedupe.paragraphs.by_ngram.stride": "1",
            "--dedupe.paragraphs.by_ngram.overlap_threshold": "0.000001",
            "--bloom_filter.file": str(root / "filter.bin"),
            "--bloom_filter.estimated_doc_count": num_ngrams,
            "--bloom_filter.desired_false_positive_rate": "0.000001",
            "--work_dir.input": str(root / "in"),
            "--work_dir.output": str(root / "out"),
            "--processes": "1",
        }
        words = [word for flag in flags.items() for word in flag]
        dolma(["dedupe", *words, f"--{'' if read_only else 'no-'}bloom_filter.read_only"])


if __name__ == "__main__":
    main(*sys.argv[1:])
