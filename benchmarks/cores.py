"""Measure one shard on 1, 2, 4, 8 and 16 cores, beside Megatron's fast path and datasets' num_proc.

    python benchmarks/peer_environments.py megatron_fast hf_datasets
    python benchmarks/cores.py [--mb 1000] [--repeats 3]
    python benchmarks/cores.py --quick         # a minute: little text, .jsonl, one repeat
    python benchmarks/cores.py --mb 20 --formats jsonl --peers megatron_fast    # text that does not repeat
    python benchmarks/cores.py --mb 1000 --formats jsonl --records packed       # documents of 1 GB take 22 GB

A shard is made of one file of Korean or English text, repeated up to --mb, as .jsonl, .parquet and .jsonl.gz.
A cell has wall seconds and, in brackets, CPU seconds of the whole process with its start: the median of the
runs. Contenders take turns. The peers read .jsonl.

A cell with "~" is computed, because this machine has fewer cores. For it the shard is made by three helpers
on the cores that there are. Their work divides by the number of cores, and the part of the process that
appends what they made does not: the wall time is the start plus the larger one of this part and of all CPU
time by cores. The peers are not computed.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark_text import ROOT, BenchmarkText, lay_out
from contenders import plan
from measured_run import Usage, machine_line, run_pinned
from peer_environments import PEERS, missing_reason, peer_python

NUM_CORES = (1, 2, 4, 8, 16)
RECORDS = {"documents": [], "packed": ["--record", "packed", "--seq_len", "2048"]}
FORMATS = ("jsonl", "parquet", "jsonl.gz")
DATASETS = "hf_datasets"
COMPARED = ("megatron_fast", DATASETS)
NUM_HELPERS = 3  # even for small shards
QUICK_MB = 25
# Of --quick, whose shard is too small for helpers with stretches of the usual size.
QUICK_STRETCH_BYTES = 500_000
# Runs a task as if the machine had three cores.
WITH_HELPERS = f"""
import os, sys
os.sched_getaffinity = lambda _: set(range({NUM_HELPERS}))
os.sched_setaffinity = lambda *_: None
from preprocess.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
Command = list[str | Path]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row of the table measures."""

    label: str
    command: Callable[[int], Command]  # of a number of cores
    clear: Callable[[], None]  # the output of an earlier run
    with_helpers: Command | None = None  # to compute more cores


@dataclass(frozen=True, kw_only=True)
class Share:
    """What limits a task with many cores."""

    start_s: float  # of wall time, until the helpers work
    writer_s: float  # CPU of the process that appends
    cpu_s: float  # of all processes, without the start

    def wall_s(self, num_cores: int) -> float:
        """Return the wall time on some cores.

        >>> share = Share(start_s=1, writer_s=2, cpu_s=24)
        >>> share.wall_s(8), share.wall_s(16)
        (4.0, 3)
        """
        return self.start_s + max(self.writer_s, self.cpu_s / num_cores)


def write_text(source: Path, folder: Path, suffix: str, num_bytes: int) -> Path:
    """Write .jsonl, repeated up to a number of bytes, in a format. Return its folder."""
    folder.mkdir(parents=True)
    once = source.read_bytes()
    lines = once * max(1, round(num_bytes / len(once)))
    if suffix == "parquet":
        import pyarrow.parquet as parquet
        from pyarrow import json as arrow_json

        table = arrow_json.read_json(source)
        with parquet.ParquetWriter(folder / "documents.parquet", table.schema) as writer:
            for _ in range(len(lines) // len(once)):
                writer.write_table(table, row_group_size=10_000)
        return folder
    data = gzip.compress(lines, 6) if suffix.endswith(".gz") else lines
    (folder / f"documents.{suffix}").write_bytes(data)
    return folder


def our_case(label: str, raw: Path, data: Path, record: str, tokenizer: Path) -> Case:
    plan(raw, data, tokenizer, [*RECORDS[record], "--num_shards", "1"])
    words: Command = ["--shard_id", "0", "--output_dir", data]

    def clear() -> None:
        for path in data.glob("shard-*"):
            path.unlink()

    return Case(
        label=label,
        command=lambda _: [sys.executable, "-m", "preprocess", *words],
        clear=clear,
        with_helpers=[sys.executable, "-c", WITH_HELPERS, *words],
    )


def peer_case(name: str, label: str, raw: Path, output: Path, text: BenchmarkText) -> Case:
    driver = ROOT / f"benchmarks/peers/with_{name}.py"

    def command(num_cores: int) -> Command:
        words: Command = [peer_python(name), driver, raw, text.peer_tokenizer, output]
        return [*words, str(num_cores)] if name == DATASETS else words

    def clear() -> None:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)

    return Case(label=label, command=command, clear=clear)


def cases_of(
    text: BenchmarkText,
    scratch: Path,
    num_bytes: int,
    *,
    records: Sequence[str],
    formats: Sequence[str],
    peers: Sequence[str],
) -> list[Case]:
    """Write the text, plan the data sets, and return what is measured. Says which peers are missing."""
    cases = []
    for corpus in text.corpora[:2]:
        for suffix in formats:
            name = f"{corpus.folder.name}.{suffix}"
            raw = write_text(corpus.folder / "documents.jsonl", scratch / "raw" / name, suffix, num_bytes)
            shown = f"{corpus.label}, .{suffix}"
            for record in records:
                label = f"**shardprep** {record}, {shown}"
                cases.append(our_case(label, raw, scratch / record / name, record, text.tokenizer))
            for peer in peers:
                reason = missing_reason(peer)
                if suffix == "jsonl" and reason is None:
                    output = scratch / peer / name
                    cases.append(peer_case(peer, f"{PEERS[peer].label}, {shown}", raw, output, text))
                elif reason is not None and len(cases) == len(records):
                    print(f"{PEERS[peer].label} is left out: {reason}", file=sys.stderr)
    return cases


def share_of(case: Case, scratch: Path, start: Usage) -> Share:
    """Make a shard with helpers on the cores that there are, and return what limits more of them."""
    assert case.with_helpers is not None
    case.clear()
    cores = min(NUM_HELPERS, len(os.sched_getaffinity(0)))
    usage = run_pinned(case.with_helpers, cwd=ROOT, log=scratch / "log", num_cores=cores)
    return Share(
        start_s=start.cpu_s,
        writer_s=max(0.0, usage.own_cpu_s - start.cpu_s),
        cpu_s=max(0.0, usage.cpu_s - start.cpu_s),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="of text in a shard (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--records", nargs="+", choices=RECORDS, default=RECORDS, help="(default: all)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="(default: all)")
    parser.add_argument("--peers", nargs="*", choices=COMPARED, default=COMPARED, help="(default: all)")
    parser.add_argument("--quick", action="store_true", help="little text, .jsonl, one repeat")
    args = parser.parse_args()
    num_bytes = 1_000_000 * (QUICK_MB if args.quick else args.mb)
    num_repeats = 1 if args.quick else args.repeats
    formats = FORMATS[:1] if args.quick else args.formats
    if args.quick:
        os.environ["SHARDPREP_STRETCH_BYTES"] = str(QUICK_STRETCH_BYTES)
    num_here = len(os.sched_getaffinity(0))
    measured = [number for number in NUM_CORES if number <= num_here]
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        scratch = Path(name)
        text = lay_out(scratch, min(num_bytes, 20_000_000))
        cases = cases_of(text, scratch, num_bytes, records=args.records, formats=formats, peers=args.peers)
        tiny = our_case("start", text.ten_documents, scratch / "tiny", "packed", text.tokenizer)
        runs: dict[tuple[str, int], list[Usage]] = defaultdict(list)
        shares: dict[str, list[Share]] = defaultdict(list)
        for _ in range(num_repeats):
            tiny.clear()
            start = run_pinned(tiny.command(1), cwd=ROOT, log=scratch / "log")
            for case in cases:
                for number in measured:
                    case.clear()
                    usage = run_pinned(case.command(number), cwd=ROOT, log=scratch / "log", num_cores=number)
                    runs[case.label, number].append(usage)
                    case.clear()  # up to 22 GB
                if case.with_helpers is not None and num_here < NUM_CORES[-1]:
                    shares[case.label].append(share_of(case, scratch, start))
                    case.clear()
        load = os.getloadavg()[0]
    print(f"| wall s (CPU s) on cores | {' | '.join(map(str, NUM_CORES))} |\n{'|---' * 6}|")
    for case in cases:
        cells = [_cell(runs[case.label, number], shares[case.label], number) for number in NUM_CORES]
        print(f"| {case.label} | {' | '.join(cells)} |")
    print(
        f"\n{num_bytes / 1e6:.0f} MB of text in a shard; {text.caption}; {machine_line()}; load {load:.1f}."
    )
    print(f"Median of {num_repeats}. Cells with ~ are computed from the share of the process that writes.")
    return 0


def _cell(runs: list[Usage], shares: list[Share], num_cores: int) -> str:
    if runs:
        wall_s = statistics.median(run.wall_s for run in runs)
        cpu_s = statistics.median(run.cpu_s for run in runs)
        return f"{wall_s:.1f} ({cpu_s:.1f})"
    if not shares:
        return "-"
    wall_s = statistics.median(share.wall_s(num_cores) for share in shares)
    cpu_s = statistics.median(share.start_s + share.cpu_s for share in shares)
    return f"~{wall_s:.1f} ({cpu_s:.1f})"


if __name__ == "__main__":
    sys.exit(main())
