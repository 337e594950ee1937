"""Measure the CPU seconds of packed shards from each input format, relative to .txt.

    python benchmarks/input_formats.py [--mb 20] [--repeats 3]

One process runs on one core, and the formats take turns. The CPU time is that of making the shard without
start-up, from its manifest. All files contain the same documents. Memory is the peak over the runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard
from benchmark_text import lay_out
from contenders import plan
from measured_run import machine_line, run_pinned

PACKED = ["--record", "packed", "--seq_len", "2048"]


def write_formats(texts: list[str], folder: Path) -> dict[str, Path]:
    """Write a folder with one file for each format."""
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    table = pyarrow.table({"text": texts})
    found = {}
    for name in (".txt", ".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".arrow"):
        found[name] = folder / name.replace(".", "_")
        found[name].mkdir(parents=True)
        path = found[name] / f"documents{name}"
        if name == ".txt":
            path.write_text("".join(text + "\n" for text in texts))
        elif name == ".parquet":
            pyarrow.parquet.write_table(table, path, compression="zstd")
        elif name == ".arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=1000)
        else:
            pack: dict[str, Callable[[bytes], bytes]] = {
                ".jsonl": bytes,
                ".jsonl.zst": zstandard.ZstdCompressor().compress,
                ".jsonl.gz": gzip.compress,
            }
            path.write_bytes(pack[name](lines))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch / "text", args.mb * 1_000_000)
        for corpus in text.corpora[:2]:
            texts = (corpus.folder / "documents.txt").read_text().splitlines()
            folders = write_formats(texts, scratch / "raw" / corpus.folder.name)
            spent: dict[str, list[float]] = {form: [] for form in folders}
            memory = dict.fromkeys(folders, 0)
            for form, folder in folders.items():
                plan(folder, scratch / "data" / corpus.folder.name / form, text.tokenizer, PACKED)
            for _ in range(args.repeats):
                for form in folders:
                    data = scratch / "data" / corpus.folder.name / form
                    for path in data.glob("shard-*"):
                        path.unlink()
                    run_pinned(
                        [sys.executable, "-m", "preprocess", "run", data, "--num_proc", "1"],
                        cwd=scratch,
                        log=scratch / "log",
                    )
                    run = json.loads((data / "shard-00000.json").read_bytes())["run"]
                    spent[form].append(run["cpu_s"])
                    memory[form] = max(memory[form], run["max_rss_bytes"])
            print(f"| {corpus.label}, packed | CPU s per MB of text | .txt is 1 | memory, MB |")
            print("|---|---|---|---|")
            for form, seconds in spent.items():
                ratios = [plain / each for plain, each in zip(spent[".txt"], seconds, strict=True)]
                per_mb = statistics.median(seconds) / (corpus.num_bytes / 1e6)
                print(
                    f"| {form} | {per_mb:.4f} | {statistics.median(ratios):.2f} "
                    f"({min(ratios):.2f}-{max(ratios):.2f}) | {memory[form] / 1e6:.0f} |"
                )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{machine_line()}, load {load}; {text.caption}. Median of {args.repeats} (least-most).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
