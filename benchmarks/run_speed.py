"""What a second core brings: to `python -m preprocess run`, and to one task.

    python benchmarks/run_speed.py [--quick] [--repeats 3]

Each run makes 8 shards of one corpus in a folder planned before. `--num_proc 1` has one core and
`--num_proc 2` two; they take turns, for others' load on the machine is in wall time. Times are the
manifests': from the beginning of the first shard to the end of the last, and the shards' CPU seconds;
start-up, a line of its own, is what the command took on top. A task makes one shard of the whole corpus,
on one core and on two, and as two tasks with a core each; its times are those of the whole process, and its
start is a task of ten documents.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark_text import BenchmarkText, Corpus, lay_out
from contenders import plan
from measured_run import machine_line, run_pinned

RECORDS = {"documents": [], "packed": ["--record", "packed", "--seq_len", "2048"]}
NUM_SHARDS = 8
TASK_ENVIRON = {
    name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DATASET_"))
}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One corpus in one form of record, planned."""

    label: str
    num_bytes: int
    folder: Path


def plan_datasets(corpora: Sequence[Corpus], tokenizer: Path, scratch: Path) -> list[Dataset]:
    found = []
    for record, options in RECORDS.items():
        for corpus in corpora:
            folder = scratch / "data" / f"{record}_{corpus.folder.name}"
            plan(corpus.folder, folder, tokenizer, [*options, "--num_shards", str(NUM_SHARDS)])
            label = f"{record}, {corpus.label}"
            found.append(Dataset(label=label, num_bytes=corpus.num_bytes, folder=folder))
    return found


@dataclass(frozen=True, kw_only=True)
class Made:
    """One run."""

    wall_s: float  # from the first shard's beginning to the last one's end
    cpu_s: float  # of the shards
    start_s: float  # of the command's wall time, the rest


def make(dataset: Dataset, num_proc: int, scratch: Path) -> Made:
    """Make every shard anew."""
    for path in dataset.folder.glob("shard-*"):
        path.unlink()
    command = [sys.executable, "-m", "preprocess", "run", str(dataset.folder), "--num_proc", str(num_proc)]
    usage = run_pinned(command, cwd=scratch, log=scratch / "log", num_cores=num_proc)
    facts = [json.loads(path.read_bytes())["run"] for path in dataset.folder.glob("shard-*.json")]
    wall_s = max(run["began"] + run["wall_s"] for run in facts) - min(run["began"] for run in facts)
    cpu_s = sum(run["cpu_s"] for run in facts)
    return Made(wall_s=wall_s, cpu_s=cpu_s, start_s=usage.wall_s - wall_s)


def task_wall_s(folder: Path, *cores: str) -> float:
    """Wall seconds of a task for each of ``cores``, side by side; each has a data set of its own."""
    command, processes, began = [sys.executable, "-m", "preprocess", "--shard_id", "0"], [], time.monotonic()
    for number, allowed in enumerate(cores):
        data = folder / str(number)
        for path in data.glob("shard-*"):
            path.unlink()
        started = ["taskset", "-c", allowed, *command, "--output_dir", str(data)]
        processes.append(subprocess.Popen(started, stderr=subprocess.DEVNULL, env=TASK_ENVIRON))
    if any(process.wait() for process in processes):
        raise SystemExit(f"a task of {folder} failed")
    return time.monotonic() - began


def task_table(text: BenchmarkText, scratch: Path, num_repeats: int) -> str:
    """Wall seconds of one task by its cores, and of two tasks."""
    first, second = map(str, sorted(os.sched_getaffinity(0))[:2])
    cases = {
        "start": (first,),
        "one core": (first,),
        "two cores": (f"{first},{second}",),
        "two tasks": (first, second),
    }
    lines = [f"| one task, wall s | {' | '.join(cases)} |", "|---" * (1 + len(cases)) + "|"]
    for record, options in RECORDS.items():
        for corpus in text.corpora[:2]:
            folder, start = (scratch / part / f"{record}_{corpus.folder.name}" for part in ("task", "start"))
            for data, raw in (
                (folder / "0", corpus.folder),
                (folder / "1", corpus.folder),
                (start / "0", text.ten_documents),
            ):
                plan(raw, data, text.tokenizer, [*options, "--num_shards", "1"])
            walls: dict[str, list[float]] = defaultdict(list)
            for _ in range(num_repeats):
                for case, cores in cases.items():
                    walls[case].append(task_wall_s(start if case == "start" else folder, *cores))
            lines.append(f"| {record}, {corpus.label} | {' | '.join(map(median, walls.values()))} |")
    return "\n".join(lines)


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(datasets: list[Dataset], runs: dict[tuple[str, int], list[Made]]) -> str:
    """Wall and CPU seconds with one process and two, and how many times faster two are."""
    lines = [
        "| `run` of 8 shards | MB | 1: wall s | 2: wall s | faster | 1: CPU s | 2: CPU s |",
        "|---" * 7 + "|",
    ]
    for dataset in datasets:
        one, two = (runs[dataset.label, num_proc] for num_proc in (1, 2))
        cells = [median([made.wall_s for made in of]) for of in (one, two)]
        cells.append(median([a.wall_s / b.wall_s for a, b in zip(one, two, strict=True)]) + "x")
        cells += [median([made.cpu_s for made in of]) for of in (one, two)]
        lines.append(f"| {dataset.label} | {dataset.num_bytes / 1e6:.0f} | {' | '.join(cells)} |")
    for num_proc in (1, 2):
        starts = [made.start_s for dataset in datasets for made in runs[dataset.label, num_proc]]
        lines.append(f"\nStart-up of {num_proc}: {median(starts)} s.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 MB a corpus, one repeat")
    parser.add_argument("--repeats", type=int, help="default 3")
    args = parser.parse_args()
    num_repeats = args.repeats or (1 if args.quick else 3)
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("one core is allowed here; two are needed to compare")
    runs: dict[tuple[str, int], list[Made]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch, 10_000_000 if args.quick else 20_000_000)
        datasets = plan_datasets(text.corpora[:2], text.tokenizer, scratch)
        for _ in range(num_repeats):
            for dataset in datasets:
                for num_proc in (1, 2):
                    runs[dataset.label, num_proc].append(make(dataset, num_proc, scratch))
        tasks = task_table(text, scratch, num_repeats)
    print(f"{table(datasets, runs)}\n\n{tasks}")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{machine_line()}, load {load}; {text.caption}. Median of {num_repeats} (least-most).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
