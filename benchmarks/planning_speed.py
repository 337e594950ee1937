"""Measure what a person waits for before the first document: planning, and the plain form without a plan.

    python benchmarks/planning_speed.py [--repeats 5] [--mb 6]
    python benchmarks/planning_speed.py --num_inputs 3000 300000

The baseline, the plain form (``--shard_id 0`` without a plan), and ``plan`` take turns on one core, with an
empty cache of tokenizers and with this tokenizer in it; on a file of two lines, and on ``--mb`` of English.
Shown are CPU seconds and peak memory of the whole process: median and range, and the speed relative to the
baseline in the same turn. The load of each engine, which cannot be avoided, is shown, too.

``--num_inputs`` measures a task and ``status`` instead, for plans with this many inputs, 30 per shard. Only
the inputs of the task's shard exist. The bytes read are those of the whole process, with libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from benchmark_text import ROOT, lay_out
from contenders import plan as plan_folder
from measured_run import Usage, machine_line, run_pinned

from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Cut, need_plan, plan_id, publish_plan

BASELINE = "baseline"
_BARE = {
    "bare load of tokenizers": "import tokenizers, sys; tokenizers.Tokenizer.from_file(sys.argv[1])",
    "bare load of gigatoken": "import gigatoken, sys; gigatoken.Tokenizer(sys.argv[1])",
}


def runs(tokenizer: Path, raw: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], Usage]]]:
    """Return name -> call of each measurement. Each call starts without an output folder."""
    output, log, cache = scratch / "output", scratch / "log", scratch / "cache"
    flags: list[str | Path] = ["--input_dir", raw, "--output_dir", output, "--model_id", tokenizer]
    plain: list[str | Path] = ["-m", "preprocess", "--shard_id", "0", *flags]

    def call(*words: str | Path, is_known: bool = True) -> Callable[[], Usage]:
        def run() -> Usage:
            shutil.rmtree(output, ignore_errors=True)
            if not is_known:
                shutil.rmtree(cache, ignore_errors=True)
            return run_pinned([sys.executable, *words], cwd=scratch, log=log)

        return run

    for name, code in _BARE.items():
        yield name, call("-c", code, tokenizer / "tokenizer.json")
    yield BASELINE, call(ROOT / "benchmarks/baseline.py", "--shard_id", "0", *flags)
    yield "plain form, tokenizer not seen before", call(*plain, is_known=False)
    yield "plain form, tokenizer known", call(*plain)
    yield "plan, tokenizer not seen before", call("-m", "preprocess", "plan", *flags, is_known=False)
    yield "plan, tokenizer known", call("-m", "preprocess", "plan", *flags)


def table(title: str, found: dict[str, list[Usage]]) -> str:
    """Return a row per run."""
    lines = [f"| {title} | CPU s | times the baseline | peak MB |", "|---|---|---|---|"]
    first = [usage.cpu_s for usage in found[BASELINE]]
    for name, usages in found.items():
        cpu = [usage.cpu_s for usage in usages]
        ratios = [theirs / ours for theirs, ours in zip(first, cpu, strict=True)]
        peak = max(usage.max_rss_bytes for usage in usages) / 1e6
        lines.append(f"| {name} | {_spread(cpu)} | {_spread(ratios)} | {peak:.0f} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


_INPUTS_PER_SHARD = 30
_BYTES_READ = (
    "import sys; from shardprep.__main__ import main; code = main(sys.argv[1:]);"
    "print(open('/proc/self/io').read()); sys.exit(code)"
)


def enlarge_plan(data: Path, num_inputs: int) -> int:
    """Add inputs to a plan of one shard, most of them just names. Return the bytes of plan.json."""
    plan = need_plan(DataFolder(data))
    first, num_shards = plan.inputs[0], num_inputs // _INPUTS_PER_SHARD
    names = [f"crawl-2026-{number % 100:02d}/part-{number:07d}.txt" for number in range(num_inputs)]
    inputs = [
        *plan.inputs,
        *(msgspec.structs.replace(first, path=name) for name in names[_INPUTS_PER_SHARD:]),
    ]
    cuts = [Cut(number * _INPUTS_PER_SHARD, 0) for number in range(num_shards + 1)]
    plan = dataclasses.replace(plan, inputs=inputs, cuts=cuts)
    plan = dataclasses.replace(plan, plan_id=plan_id(plan))
    (data / "plan.json").unlink()
    publish_plan(plan, DataFolder(data))
    return (data / "plan.json").stat().st_size


def print_tasks(nums_inputs: list[int], repeats: int, scratch: Path) -> None:
    """Print a row for a task and for ``status`` of each size."""
    text, raw, log = lay_out(scratch, 100_000), scratch / "raw", scratch / "log"
    raw.mkdir()
    for number in range(_INPUTS_PER_SHARD):
        (raw / f"{number:02d}.txt").write_text("Two lines.\nOf text.\n")
    print("| | plan.json, MB | CPU s | peak MB | MB read |", "|---|---|---|---|---|", sep="\n")
    for num_inputs in nums_inputs:
        data = scratch / f"data-{num_inputs}"
        plan_folder(raw, data, text.tokenizer, ["--num_shards", "1"])
        num_bytes = enlarge_plan(data, num_inputs)
        task: list[str | Path] = [
            "--shard_id",
            "0",
            "--planned",
            "--output_dir",
            data,
            "--engine",
            "gigatoken",
        ]
        for name, words in (("a task", task), ("status", ["status", data])):
            found, read = [], 0
            for _ in range(repeats):
                for path in data.glob("shard-*"):
                    path.unlink()
                found.append(run_pinned([sys.executable, "-c", _BYTES_READ, *words], cwd=scratch, log=log))
                read = int(re.findall(r"^rchar: (\d+)", log.read_text(), re.MULTILINE)[-1])
            peak = max(usage.max_rss_bytes for usage in found) / 1e6
            cpu = _spread([usage.cpu_s for usage in found])
            size = f"{num_bytes / 1e6:.1f}"
            print(f"| {name}, {num_inputs:,} inputs | {size} | {cpu} | {peak:.0f} | {read / 1e6:.1f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mb", type=float, default=6.0)
    parser.add_argument("--num_inputs", type=int, nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        if args.num_inputs:
            print_tasks(args.num_inputs, args.repeats, scratch)
            print(f"{args.repeats} turns; {machine_line()}")
            return 0
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        text = lay_out(scratch, int(args.mb * 1e6))
        tiny = scratch / "tiny"
        tiny.mkdir()
        (tiny / "documents.txt").write_text("Two lines.\nOf text.\n")
        english = next(corpus.folder for corpus in text.corpora if corpus.label.startswith("English"))
        for title, raw in (("a file of two lines", tiny), (f"{args.mb:g} MB of English", english)):
            found: dict[str, list[Usage]] = {}
            for _ in range(args.repeats):
                for name, run in runs(text.tokenizer, raw, scratch):
                    found.setdefault(name, []).append(run())
            print(table(title, found), "", sep="\n", flush=True)
        print(f"{text.caption}; {args.repeats} turns; {machine_line()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
