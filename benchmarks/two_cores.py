"""Compare a second core for one task with a second task.

    python benchmarks/two_cores.py [--repeats 3] [--copies 4]

A task makes one shard of a whole corpus: with one core, with two cores, and as two parallel tasks, each with
its own core and data set. Shown are shards per second relative to one task with one core, and CPU seconds per
shard, of whole processes. --copies repeats the text, so that the start matters less. As root the tasks run
before all other processes (SCHED_RR). Otherwise the load of the machine changes the results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_text import lay_out
from contenders import plan
from measured_run import machine_line

RECORDS = {"documents": [], "packed": ["--record", "packed", "--seq_len", "2048"]}
CASES = ("one core", "two cores", "two tasks")


def run_tasks(folders: list[Path], cores: list[set[int]]) -> tuple[float, float]:
    """Make the shards of all folders in parallel. Return the wall seconds and CPU seconds per shard."""
    for folder in folders:
        for path in folder.glob("shard-*"):
            path.unlink()
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "DATASET_"))}
    before, began, tasks = os.times(), time.monotonic(), []
    for folder, allowed in zip(folders, cores, strict=True):
        task = [sys.executable, "-m", "preprocess", "--shard_id", "0", "--output_dir", str(folder)]
        first = ["chrt", "--rr", "1"] if os.geteuid() == 0 else []
        command = [*first, "taskset", "-c", ",".join(map(str, allowed)), *task]
        tasks.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ))
    if any(task.wait() for task in tasks):
        raise SystemExit(f"a task of {folders[0]} failed")
    wall_s, after = time.monotonic() - began, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, cpu_s / len(folders)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=4)
    args = parser.parse_args()
    if len(cores := sorted(os.sched_getaffinity(0))[:2]) < 2:
        raise SystemExit("one core is allowed here; two are needed to compare")
    print(f"| one shard | MB | {' | '.join(CASES)} | CPU s: {' | '.join(CASES)} |\n{'|---' * 8}|")
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        text = lay_out(Path(name), 20_000_000)
        for corpus in text.corpora[:2]:
            (raw := Path(name, corpus.folder.name)).mkdir()
            once = (corpus.folder / "documents.txt").read_bytes()
            (raw / "documents.txt").write_bytes(once * args.copies)
            for record, options in RECORDS.items():
                data = [Path(name, f"{record}_{raw.name}_{number}") for number in range(2)]
                for folder in data:
                    plan(raw, folder, text.tokenizer, [*options, "--num_shards", "1"])
                found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
                for _ in range(args.repeats):
                    found["one core"].append(run_tasks(data[:1], [{cores[0]}]))
                    found["two cores"].append(run_tasks(data[:1], [{*cores}]))
                    found["two tasks"].append(run_tasks(data, [{core} for core in cores]))
                walls = {case: statistics.median(wall for wall, _ in runs) for case, runs in found.items()}
                walls["two tasks"] /= 2  # per shard
                speeds = [f"{walls['one core'] / walls[case]:.2f}" for case in CASES]
                cpus = [f"{statistics.median(cpu for _, cpu in runs):.2f}" for runs in found.values()]
                size = f"{len(once) * args.copies / 1e6:.0f}"
                print(f"| {record}, {corpus.label} | {size} | {' | '.join([*speeds, *cpus])} |", flush=True)
    print(f"\n{machine_line()}; {text.caption}. Median of {args.repeats}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
