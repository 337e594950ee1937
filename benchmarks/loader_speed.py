"""Compare loaders on the same tokens, on one pinned core without workers, and print the README's tables.

    python benchmarks/loader_speed.py [--quick] [--seconds 3] [--rounds 5] [--only NAME,NAME]

One table is for rows, (8, 2048) int64 ids and labels, which each loader reads from its own format. There is
another one per corpus for documents as the baseline reads them, where padding does not count. Numbers are
millions of tokens per CPU second, with the files in the page cache. The loaders take turns, so that noise
affects all of them; ratios are within one round. Each table is printed once it is measured. Peers need an
environment (make bench_loader builds them in .bench); the others are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmark_text import ROOT
from loader_contenders import BASELINE, LITDATA, PACKED, ROWS, Loader, document_loaders
from loader_data_sets import BATCH_TOKENS, DataSets, make_data_sets
from loader_turns import Turn, take_turns
from measured_run import machine_line, run_pinned
from peer_environments import missing_reason
from stage_bounds import bounds_table


def speed(turn: Turn) -> float:
    """Return millions of tokens per CPU second, without padding."""
    return float(turn["tokens"] / turn["cpu_s"] / 1e6)


def spread(values: list[float], digits: int) -> str:
    """Format as ``median (minimum-maximum)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(turns: dict[str, list[Turn]], label: str, other: str) -> list[float]:
    """Return the speed of ``label`` over that of ``other``, for each round."""
    return [speed(mine) / speed(theirs) for mine, theirs in zip(turns[label], turns[other], strict=True)]


def table(turns: dict[str, list[Turn]]) -> str:
    """Return a row per loader, with its speed relative to the baseline if that was measured."""
    lines = [
        "| loader | Mtok per CPU second (range) | times the baseline | useful tokens | peak MiB |",
        "|---|---|---|---|---|",
    ]
    first = next((label for label in turns if BASELINE in label), None)
    for label, found in turns.items():
        times = f"{statistics.median(ratios(turns, label, first)):.1f}" if first else ""
        useful = statistics.median(turn["tokens"] / (turn["tokens"] + turn["padding"]) for turn in found)
        peak = max(turn["peak_bytes"] for turn in found) / 2**20
        speeds = spread([speed(turn) for turn in found], 2)
        lines.append(f"| {label} | {speeds} | {times} | {useful:.3f} | {peak:.0f} |")
    return "\n".join(lines)


def packed_ratios(turns: dict[str, list[Turn]]) -> list[str]:
    """Compare our packed rows with litdata and the baseline, with the spread over the rounds."""
    return [
        f"shardprep, packed / {other}: {spread(ratios(turns, PACKED, other), digits)}, round by round"
        for other, digits in ((LITDATA, 2), (BASELINE, 0))
        if PACKED in turns and other in turns
    ]


def limits(turns: dict[str, list[Turn]], data: DataSets) -> str:
    """Return each stage's bound beside the speed reached, for packed rows and documents packed at load."""
    folders = {PACKED: "packed"}
    folders |= {f"{name}: shardprep, packed at load": f"documents-{name}" for name in data.corpora}
    labels = [label for label in folders if label in turns]
    if not labels:
        return ""
    paths = [data.scratch / folders[label] for label in labels]
    log = data.scratch / "log"
    run_pinned([sys.executable, ROOT / "benchmarks/loader_bounds.py", *paths], cwd=data.scratch, log=log)
    found = json.loads(log.read_text().splitlines()[-1])
    reached = [BATCH_TOKENS / statistics.median(map(speed, turns[label])) for label in labels]
    title = f"CPU us per {BATCH_TOKENS:,} tokens"
    return bounds_table(title, labels, [found[str(path)] for path in paths], reached, digits=1)


def split_by_environment(loaders: list[Loader]) -> tuple[list[Loader], dict[str, str]]:
    """Return the loaders that can run, and why the others cannot."""
    ready, left_out = [], {}
    for loader in loaders:
        reason = missing_reason(loader.peer) if loader.peer else None
        if reason is None:
            ready.append(loader)
        else:
            left_out[loader.label] = reason
    return ready, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="2 MB of each text, three rounds of 0.5 s, one corpus"
    )
    parser.add_argument("--seconds", type=float, help="of each turn (default 3)")
    parser.add_argument("--rounds", type=int, help="turns of each loader (default 5)")
    parser.add_argument("--mb", type=float, help="of each text (default 10)")
    parser.add_argument(
        "--only", default="", help="loaders whose label contains one of these, comma-separated"
    )
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last")
    args = parser.parse_args()
    seconds = args.seconds or (0.5 if args.quick else 3)
    num_rounds = args.rounds or (3 if args.quick else 5)
    left_out: dict[str, str] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        data = make_data_sets(Path(folder), int((args.mb or (2 if args.quick else 10)) * 1e6))
        corpora = data.corpora[:1] if args.quick else data.corpora
        for whole in [ROWS, *map(document_loaders, corpora)]:
            asked = [each for each in whole if any(name in each.label for name in args.only.split(","))]
            loaders, missing = split_by_environment(asked)
            turns, failed = take_turns(loaders, data, seconds=seconds, num_rounds=num_rounds, core=args.core)
            left_out |= missing | failed
            if turns:
                print("\n".join([table(turns), "", *packed_ratios(turns), ""]), flush=True)
                print(limits(turns, data), "", sep="\n", flush=True)
        print(
            f"{np.load(data.rows, mmap_mode='r').size / 1e6:.1f} Mtok, {data.caption}; {machine_line()}; one "
            f"pinned core, no workers, page cache; median and range of {num_rounds} rounds of {seconds:g} s; "
            f"{time.monotonic() - began:.0f} s in all"
        )
    for label, reason in left_out.items():
        print(f"\nLeft out: {label}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
