"""What a second process brings to `python -m preprocess run`, and what part of the CPU time encodes.

    python benchmarks/run_speed.py [--quick] [--repeats 3]

Each run makes 8 shards of one corpus in a folder planned before. `--num_proc 1` has one core and
`--num_proc 2` two; they take turns, for others' load on the machine is in wall time. Times are the
manifests': from the beginning of the first shard to the end of the last, and the shards' CPU seconds;
start-up, a line of its own, is what the command took on top. The encoding's share is the CPU time of the
engine alone on the same documents, in the worker's own batches, over that of the shards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark_text import Corpus, lay_out
from contenders import plan
from measured_run import machine_line, run_pinned

RECORDS = {"documents": [], "packed": ["--record", "packed", "--seq_len", "2048"]}
NUM_SHARDS = 8
_ENCODE = """
import sys, time
from pathlib import Path
from preprocess.formats.documents import read_documents
from preprocess.plan.plan_file import need_plan
from preprocess.make.worker import load_worker
from preprocess.options import WorkerSettings
folder = Path(sys.argv[1])
plan, settings = need_plan(folder), WorkerSettings()
worker = load_worker(plan, folder, settings, num_cpus=1, warn=print)
cpu_s = 0.0
for shard_id in range(plan.num_shards):
    ranges = plan.ranges(shard_id)
    for batch in read_documents(ranges, worker.reading):
        began = time.process_time()
        worker.engine.encode(batch.texts)
        cpu_s += time.process_time() - began
print(cpu_s)
"""


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


def encode_cpu_s(dataset: Dataset, scratch: Path) -> float:
    """CPU seconds of the engine on the same documents."""
    log = scratch / "log"
    run_pinned([sys.executable, "-c", _ENCODE, dataset.folder], cwd=scratch, log=log)
    return float(log.read_text().splitlines()[-1])


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(
    datasets: list[Dataset], runs: dict[tuple[str, int], list[Made]], encode: dict[str, list[float]]
) -> str:
    """Wall and CPU seconds with one process and two, how many times faster two are, the encoding's share."""
    lines = [
        "| `run` of 8 shards | MB | 1: wall s | 2: wall s | faster | 1: CPU s | 2: CPU s | encoding, % |",
        "|---" * 8 + "|",
    ]
    for dataset in datasets:
        one, two = (runs[dataset.label, num_proc] for num_proc in (1, 2))
        cells = [median([made.wall_s for made in of]) for of in (one, two)]
        cells.append(median([a.wall_s / b.wall_s for a, b in zip(one, two, strict=True)]) + "x")
        cells += [median([made.cpu_s for made in of]) for of in (one, two)]
        shares = [100 * cpu_s / made.cpu_s for cpu_s, made in zip(encode[dataset.label], one, strict=True)]
        cells.append(f"{statistics.median(shares):.0f} ({min(shares):.0f}-{max(shares):.0f})")
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
    encode: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch, 10_000_000 if args.quick else 20_000_000)
        datasets = plan_datasets(text.corpora[:2], text.tokenizer, scratch)
        for _ in range(num_repeats):
            for dataset in datasets:
                encode[dataset.label].append(encode_cpu_s(dataset, scratch))
                for num_proc in (1, 2):
                    runs[dataset.label, num_proc].append(make(dataset, num_proc, scratch))
    print(table(datasets, runs, encode))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{machine_line()}, load {load}; {text.caption}. Median of {num_repeats} (least-most).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
