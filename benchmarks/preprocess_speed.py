"""`make bench_preprocess`: compare the baseline, the peers and shardprep on the same text and one core.

Each run is a fresh process, pinned to one core. Its output is deleted before, and the input is in the page
cache. Numbers are user and system CPU seconds of the process and its children, because load on the machine
changes these less than wall time. The median of the same contender's runs over ten documents, its start-up,
is subtracted and has its own column. For shardprep this difference would be noise (a second of start-up, a
tenth of work), so the CPU clock of its process is read when its temporary tar appears and when its manifest
does: reading, encoding, writing, fsync and commit. Contenders take turns, so that a slow minute affects all
of them. A cell is the median with the range in brackets. The baseline reads 2 MB of the corpora with short
lines, not 10: it takes the same time per MB. Python lines have half the bytes of the other corpora.

Below the table are lower bounds: what each of our stages costs alone (stage_bounds.py), in turn with the
runs, beside the cost of a shard.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmark_text import ROOT, BenchmarkText, lay_out
from contenders import BASELINE, DOCUMENTS, PACKED, Contender, contenders
from measured_run import NotSeen, RunFailed, Usage, machine_line, run_pinned
from peer_environments import PEERS
from stage_bounds import bounds_table, medians

START = "start"
OURS = (DOCUMENTS, PACKED)
MAX_SPREAD = 1.3
Runs = dict[tuple[str, str], list[Usage]]  # (contender, corpus label or START) -> its runs
Bounds = dict[tuple[str, str], list[dict[str, float]]]  # same keys, ours only: CPU s per MB of each stage


def measure(
    text: BenchmarkText, rivals: list[Contender], num_repeats: int, scratch: Path
) -> tuple[Runs, Bounds, dict[str, str]]:
    """Run the contenders in turn. One that fails is left out from then on, with its last output.

    A first round over ten documents is not counted, because it compiles byte code.
    """
    runs: Runs = defaultdict(list)
    bounds: Bounds = defaultdict(list)
    failed: dict[str, str] = {}
    rounds = [
        (START, None),
        *[(START, None), *((corpus.label, corpus) for corpus in text.corpora)] * num_repeats,
    ]
    for number, (label, corpus) in enumerate(rounds):
        for rival in rivals:
            folder = text.ten_documents if corpus is None else rival.folder_of(corpus)[0]
            output = scratch / "output" / rival.key / folder.name
            for _ in range(0 if rival.key in failed else 1 if corpus is None else rival.num_runs):
                rival.clear(folder, output, text)
                try:
                    usage = run_pinned(
                        rival.command(folder, output),
                        cwd=scratch,
                        log=scratch / "log",
                        watch=rival.watch(output) if corpus else None,
                    )
                except NotSeen:
                    continue  # one measurement less
                except RunFailed as error:
                    if rival.key not in PEERS:
                        raise SystemExit(f"{rival.label} failed: {error}") from None
                    failed[rival.key] = str(error)
                    print(f"{rival.key} is left out: {error}", file=sys.stderr)
                    break
                if number:
                    runs[rival.key, label].append(usage)
                said = f"{usage.cpu_s:.2f} CPU s, {usage.wall_s:.1f} s, {usage.max_rss_bytes / 1e6:.0f} MB"
                print(f"{number}/{len(rounds) - 1} {label}: {rival.key} {said}", file=sys.stderr, flush=True)
            if corpus is not None and rival.key in OURS:
                bounds[rival.key, label].append(stages_alone(output, corpus.num_bytes, scratch))
    return runs, bounds, failed


def stages_alone(folder: Path, num_bytes: int, scratch: Path) -> dict[str, float]:
    """Return CPU s per MB of each stage over the documents of a data set that was just made."""
    log = scratch / "log"
    run_pinned([sys.executable, ROOT / "benchmarks/stage_bounds.py", folder], cwd=scratch, log=log)
    seconds = json.loads(log.read_text().splitlines()[-1])[str(folder)]
    return {stage: value / (num_bytes / 1e6) for stage, value in seconds.items()}


def seconds_per_mb(rival: Contender, text: BenchmarkText, runs: Runs) -> dict[str, list[float]]:
    """Return sorted CPU s per MB of each run by corpus, without start-up."""
    start = statistics.median(usage.cpu_s for usage in runs[rival.key, START])
    return {
        corpus.label: sorted(
            (usage.cpu_s - start if usage.work_cpu_s is None else usage.work_cpu_s)
            / (rival.folder_of(corpus)[1] / 1e6)
            for usage in runs[rival.key, corpus.label]
        )
        for corpus in text.corpora
    }


def table(rivals: list[Contender], text: BenchmarkText, runs: Runs) -> str:
    """Return the Markdown table, and the line of ratios below it."""
    costs = {rival.key: seconds_per_mb(rival, text, runs) for rival in rivals}
    medians = {key: {name: statistics.median(of) for name, of in cost.items()} for key, cost in costs.items()}
    labels = [corpus.label for corpus in text.corpora]
    lines = [
        f"| CPU s per MB, one core | {' | '.join(labels)} | start, s | memory, MB | writes |",
        "|---" * (len(labels) + 4) + "|",
    ]
    for rival in rivals:
        cells = []
        for label in labels:
            median, of = medians[rival.key][label], costs[rival.key][label]
            ratio = medians[BASELINE][label] / median
            cells.append(f"{median:.4f} ({of[0]:.4f}-{of[-1]:.4f}) {ratio:.1f}x")
        start = statistics.median(usage.cpu_s for usage in runs[rival.key, START])
        memory = max(usage.max_rss_bytes for label in labels for usage in runs[rival.key, label])
        lines.append(
            f"| {rival.label} | {' | '.join(cells)} | {start:.1f} | {memory / 1e6:.0f} | {rival.writes} |"
        )
    peers = [rival for rival in rivals if rival.key in PEERS]
    ratios = []
    for label in labels if peers else []:
        best = min(peers, key=lambda peer: medians[peer.key][label])
        ratio = medians[best.key][label] / medians[PACKED][label]
        ratios.append(f"{label} {ratio:.1f}x ({best.label})")
    if ratios:
        lines += ["", f"Packed rows against the best peer: {', '.join(ratios)}."]
    return "\n".join(lines)


def limits(text: BenchmarkText, rivals: list[Contender], runs: Runs, bounds: Bounds) -> str:
    """Return a table per kind of record: each stage's bound beside the cost reached."""
    labels = [corpus.label for corpus in text.corpora]
    tables = []
    for rival in rivals:
        if rival.key in OURS:
            reached = [statistics.median(of) for of in seconds_per_mb(rival, text, runs).values()]
            alone = [medians(bounds[rival.key, label]) for label in labels]
            title = f"{rival.label}: CPU s per MB of text, one core"
            tables.append(bounds_table(title, labels, alone, reached))
    return "\n\n".join(tables)


def too_noisy(rivals: list[Contender], text: BenchmarkText, runs: Runs) -> list[str]:
    """Return the cells with a maximum above MAX_SPREAD times the minimum, which are not fit to publish."""
    return [
        f"{rival.key} {label} ({of[0]:.4f}-{of[-1]:.4f})"
        for rival in rivals
        for label, of in seconds_per_mb(rival, text, runs).items()
        if of[-1] > MAX_SPREAD * of[0]
    ]


def caption(text: BenchmarkText, num_repeats: int) -> str:
    """Return the line below the table: what was measured, and where."""
    sizes = ", ".join(f"{corpus.label} {corpus.num_bytes / 1e6:.1f} MB" for corpus in text.corpora)
    return (
        f"{machine_line()}. {sizes}; a document a line; {text.caption}. Median of {num_repeats} "
        "(least-most), and how many times faster than the baseline; start-up excluded, in its own column."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 MB a corpus, one repeat")
    parser.add_argument("--mb", type=float, help="of each corpus (default 10)")
    parser.add_argument("--repeats", type=int, help="default 3")
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        help="a comma-separated list of those that peer_environments.py has built, or '' for none",
    )
    args = parser.parse_args()
    num_repeats = args.repeats or (1 if args.quick else 3)
    num_bytes = int((args.mb or (2 if args.quick else 10)) * 1e6)
    wanted = [name for name in args.peers.split(",") if name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        text = lay_out(scratch, num_bytes)
        rivals, missing = contenders(text, wanted)
        runs, bounds, failed = measure(text, rivals, num_repeats, scratch)
        left_out = {PEERS[name].label: reason for name, reason in (missing | failed).items()}
        finished = [rival for rival in rivals if rival.key not in failed]
        print(table(finished, text, runs))
        print(f"\n{caption(text, num_repeats)}")
        print(f"\n{limits(text, finished, runs, bounds)}")
    if noisy := too_noisy(finished, text, runs):
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"\nToo noisy to publish (load {load}): {'; '.join(noisy)}")
    for label, reason in left_out.items():
        print(f"\nLeft out: {label}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
