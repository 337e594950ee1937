"""Count the round trips of each command to a remote file system, per file or shard, and what they cost.

    python benchmarks/round_trips.py [--num_files 2000] [--num_shards 20] [--ms 0] [--tail_ms 20]

slow_files.c counts every call on the raw folder and the data set that would go over the network (open, stat,
read, write, fsync, rename, unlink), and delays it if --ms is given: 0.2 is a quiet Lustre, 5 a busy one. It
needs gcc. Counts are exact and do not depend on this machine; wall seconds do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmark_text import ROOT
from measured_run import machine_line

KINDS = ("open", "stat", "read", "write", "fsync", "rename", "unlink")
_LINE = "A line of a small file, as there are many of them on some file systems.\n"
_EPOCH = (
    "import sys; from loader import get_llama3_dataloader\n"
    "with get_llama3_dataloader(sys.argv[1], 2, num_workers=0) as loader:\n"
    "    for number, _ in enumerate(loader):\n"
    "        if number == int(sys.argv[2]): break\n"
)
_WORLD = (
    "import sys; from loader import get_llama3_dataloader\n"
    "for rank in range(8):\n"
    "    loader = get_llama3_dataloader(sys.argv[1], 4, num_workers=4, rank=rank, world_size=8)\n"
    "    with loader: next(iter(loader))\n"
)


class FarAway:
    """Run commands for which the files under a folder are remote."""

    def __init__(self, root: Path, scratch: Path, *, ms: float, tail_ms: float) -> None:
        self._counts = scratch / "counts"
        library = scratch / "slow_files.so"
        source = ROOT / "benchmarks/slow_files.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": str(library),
            "SLOW_ROOT": str(root),
            "SLOW_MS": str(ms),
            "SLOW_TAIL_MS": str(tail_ms),
            "SLOW_COUNTS": str(self._counts),
        }

    def run(self, *words: str | Path | int) -> tuple[Counter[str], float]:
        """Return calls by kind, of the command and its children, and wall seconds. Exits if it fails."""
        self._counts.write_text("")
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *map(str, words)], env=self._environ, capture_output=True, text=True, check=False
        )
        wall_s = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr[-2000:]}")
        found: Counter[str] = Counter()
        for line in self._counts.read_text().splitlines():
            kind, number = line.split()
            found[kind] += int(number)
        return found, wall_s


def row(name: str, per: str, number: int, found: Counter[str], wall_s: float) -> str:
    """Return a row of calls per unit, of which there are ``number``; ``per`` is its name."""
    cells = [f"{found[kind] / number:.3g}" for kind in KINDS]
    return f"| {name} | {per} | {' | '.join(cells)} | {wall_s:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_files", type=int, default=2000)
    parser.add_argument("--num_shards", type=int, default=20)
    parser.add_argument("--ms", type=float, default=0.0, help="of a call in the middle; 0 only counts")
    parser.add_argument("--tail_ms", type=float, default=20.0, help="of the longest")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        far = scratch / "far"
        raw, data, staged = far / "raw", far / "data", scratch / "staged"
        raw.mkdir(parents=True)
        for number in range(args.num_files):
            (raw / f"{number:06d}.txt").write_text(_LINE * 20)
        sample, tokenizer = scratch / "sample", scratch / "tokenizer"
        subprocess.run([sys.executable, ROOT / "examples/sample_text.py", sample], check=True)
        away = FarAway(far, scratch, ms=args.ms, tail_ms=args.tail_ms)
        away.run("-m", "preprocess", "train_tokenizer", "--input_dir", sample, "--output_dir", tokenizer,
                 "--vocab_size", 600)  # fmt: skip
        flags = ["--input_dir", raw, "--output_dir", data, "--model_id", tokenizer]
        print(f"| command | per | {' | '.join(KINDS)} | wall s |")
        print("|---|---|" + "---|" * (len(KINDS) + 1))
        for name, per, number, words in (
            ("plan", "file", args.num_files,
             ["-m", "preprocess", "plan", *flags, "--num_shards", args.num_shards]),
            ("one shard", "input file", args.num_files // args.num_shards,
             ["-m", "preprocess", "--shard_id", 0, "--output_dir", data]),
            ("run, the other shards", "shard", args.num_shards - 1,
             ["-m", "preprocess", "run", data, "--num_proc", 1]),
            ("run, all done", "shard", args.num_shards, ["-m", "preprocess", "run", data]),
            ("verify", "shard", args.num_shards, ["-m", "preprocess", "verify", data]),
            ("verify --fast", "shard", args.num_shards, ["-m", "preprocess", "verify", data, "--fast"]),
            ("status", "shard", args.num_shards, ["-m", "slurm", "status", data]),
            ("loader, first batch of 8 ranks x 4 workers", "rank", 8, ["-c", _WORLD, data]),
            ("loader, first batch", "shard", args.num_shards, ["-c", _EPOCH, data, 0]),
            ("loader, an epoch", "shard", args.num_shards, ["-c", _EPOCH, data, -1]),
            ("stage", "shard", args.num_shards, ["-m", "loader", "stage", data, "--to", staged]),
        ):  # fmt: skip
            print(row(name, per, number, *away.run(*words)), flush=True)
        print(f"\n{args.num_files} files of {20 * len(_LINE)} bytes, {args.num_shards} shards; a call takes "
              f"{args.ms:g} ms, at most {args.tail_ms:g}; {machine_line()}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
