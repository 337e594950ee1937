"""The shape of a hub data set: seven columns in Parquet, by a template, through Slurm; each row compared.

    eval "$(tests/slurm_cluster.sh up)"    # or any Slurm whose nodes see FOLDER
    python benchmarks/slurm_rows.py FOLDER [--rows 100000] [--shards 6] [--here]

The rows are made up, as long as those of nvidia/OpenCodeGeneticInstruct. ``plan`` with --text_template and
--id_field, ``submit``, and the verify job; with --here ``run`` and ``verify`` take Slurm's place. Then the
texts and ids of all shards, in order, must be the rows as pyarrow reads them. Ends with 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
from benchmark_text import ROOT, lay_out

WORDS = (
    "def",
    "return",
    "for",
    "in",
    "range",
    "if",
    "else",
    "value",
    "list",
    "string",
    "number",
    "sort",
    "the",
)
NUM_WORDS = {  # of each column
    "input": 60,
    "output": 120,
    "domain": 1,
    "generation_algorithm": 1,
    "llm_judgement": 40,
    "unit_tests": 40,
}
TEMPLATE = r"{input}\n\n{output}"
_NUM_FILES = 2
_MOST_S = 3600


def write_rows(folder: Path, num_rows: int) -> None:
    """Parquet files of 2,000 rows per row group, as the hub has them."""
    folder.mkdir(parents=True)
    chance = random.Random(5)
    for number in range(_NUM_FILES):
        rows = range(number * num_rows // _NUM_FILES, (number + 1) * num_rows // _NUM_FILES)
        columns = {"id": [f"row-{row}" for row in rows]}
        for name, num_words in NUM_WORDS.items():
            columns[name] = [f"{name} {row}: {' '.join(chance.choices(WORDS, k=num_words))}" for row in rows]
        path = folder / f"train-{number:05d}-of-{_NUM_FILES:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", row_group_size=2000)


def expected_rows(folder: Path) -> Iterator[tuple[str, str]]:
    """(id, text) of each row, as pyarrow reads them."""
    for path in sorted(folder.glob("*.parquet")):
        for row in pyarrow.parquet.read_table(path, columns=["id", "input", "output"]).to_pylist():
            yield row["id"], f"{row['input']}\n\n{row['output']}"


def found_rows(data: Path) -> Iterator[tuple[str, str]]:
    """(id, text) of each sample, as tarfile and json read them."""
    for path in sorted(data.glob("shard-*.tar")):
        ids = (data / "ids" / f"{path.stem}.jsonl").read_text().splitlines()
        with tarfile.open(path) as tar:
            texts = [tar.extractfile(member) for member in tar if member.name.endswith(".text.txt")]
            assert len(ids) == len(texts), path
            for line, text in zip(ids, texts, strict=True):
                assert text is not None, path
                yield json.loads(line)[2], text.read().decode()


def _command(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, check=True)


def make(data: Path, *, is_here: bool) -> float:
    """Seconds until the data set is verified. Raises TimeoutError."""
    began = time.monotonic()
    if is_here:
        _command("preprocess", "run", data)
        _command("preprocess", "verify", data)
        return time.monotonic() - began
    _command("slurm", "submit", data, "--mem_gb", "1")
    while not (data / "index.json").exists():
        if time.monotonic() - began > _MOST_S:
            raise TimeoutError(f"{data} was not verified in {_MOST_S} s; see: python -m slurm status {data}")
        time.sleep(1)
    _command("slurm", "status", data)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new, or empty; nodes must see it")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--here", action="store_true", help="without Slurm")
    args = parser.parse_args()
    folder = args.folder.resolve()
    raw, data = folder / "raw", folder / "data"
    write_rows(raw, args.rows)
    tokenizer = lay_out(folder / "text", 1_000_000).tokenizer
    flags = ["--input_dir", raw, "--output_dir", data, "--model_id", tokenizer, "--id_field", "id"]
    _command("preprocess", "plan", *flags, "--num_shards", str(args.shards), "--text_template", TEMPLATE)
    seconds = make(data, is_here=args.here)
    found, expected = list(found_rows(data)), list(expected_rows(raw))
    manifests = [json.loads(path.read_bytes()) for path in sorted(data.glob("shard-*.json"))]
    cpu_s = sum(manifest["run"]["cpu_s"] for manifest in manifests)
    print(f"{len(found)} of {len(expected)} rows, {cpu_s:.1f} CPU s of making shards, {seconds:.0f} s in all")
    print("ids and texts are equal" if found == expected else "ids or texts DIFFER")
    return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
