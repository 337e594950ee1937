"""Loaders on the same tokens, one pinned core, no workers: prints the table that README shows.

    python benchmarks/loader_speed.py [--quick] [--seconds 5] [--repeats 3] [--only NAME,NAME]

Two tables: rows of (8, 2048) int64 ids and labels, every loader from its own format; and documents as
today's script reads them, tokens that are no padding. Millions of tokens a CPU second, files in the page
cache; the median of the repeats, and how far they spread. Peers whose environment stands (or builds) in
.bench are measured, the others named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmark_text import lay_out
from measured_run import machine_line
from peer_environments import PEERS, Peer, build, peer_python

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "loader_peers"
RUN_LIMIT_S = 900

# Environments that preprocessing's benchmark does not need.
PEERS["loader_hf_datasets"] = Peer(
    label="HF datasets 5.2", requirements=("datasets==5.2.*",), needs_torch=True
)
PEERS["grain"] = Peer(label="Grain 0.2.18", requirements=("grain==0.2.18", "array-record"), needs_torch=True)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """One row of a table."""

    label: str
    script: str
    peer: str | None = None  # whose environment; None: this one
    data: str = ""  # a folder that is there already, else it is prepared from the rows
    environ: dict[str, str] = field(default_factory=dict)


ROWS = [
    Loader(label="**shardprep, packed**", script="shardprep_loader", data="packed"),
    Loader(
        label="shardprep, packed, position_ids and cu_seqlens",
        script="shardprep_loader",
        data="packed",
        environ={"BENCH_OPTIONS": '{"boundaries": ["position_ids", "cu_seqlens"]}'},
    ),
    Loader(label="litdata 0.2.76 TokensLoader", script="litdata_tokens", peer="litdata"),
    Loader(label="HF datasets 5.2, numpy", script="hf_datasets", peer="loader_hf_datasets"),
    Loader(label="Grain 0.2.18, ArrayRecord", script="grain_records", peer="grain"),
    Loader(label="nanoGPT memmap", script="nanogpt"),
    Loader(label="webdataset, raw uint32", script="webdataset_raw"),
    Loader(label="webdataset, npy", script="webdataset_npy"),
    Loader(label="MosaicML streaming 0.13", script="mosaicml", peer="mosaicml"),
    Loader(label="today's script", script="first_script"),
]


def document_loaders(corpus: str) -> list[Loader]:
    """Today's script and ours on the same tars: batch 32, documents cut at 2,048 tokens."""
    limits = {"batch_size": 32, "max_length": 2048}
    return [
        Loader(
            label=f"{corpus}: today's script, padded",
            script="first_script",
            data=f"documents-{corpus}",
            environ={"BENCH_BATCH": "32", "BENCH_MAX_LENGTH": "2048"},
        ),
        *(
            Loader(
                label=f"{corpus}: shardprep, {name}",
                script="shardprep_loader",
                data=f"documents-{corpus}",
                environ={"BENCH_OPTIONS": json.dumps(options)},
            )
            for name, options in {
                "padded": limits,
                "padded, grouped by length": {**limits, "group_by_length": True},
                "packed at load": {"seq_len": 2048},
            }.items()
        ),
    ]


def prepared(scratch: Path, num_bytes: int) -> tuple[Path, list[str]]:
    """Lay the data sets out in ``scratch``; the rows that every peer gets, and the corpora's names."""
    text = lay_out(scratch, num_bytes)
    os.environ["BENCH_TOKENIZER"] = str(text.tokenizer)
    corpora = [corpus for corpus in text.corpora if not corpus.label.startswith("Python")]
    everything = scratch / "raw"
    everything.mkdir()
    for corpus in corpora:
        name = corpus.label.split()[0]
        (everything / f"{name}.txt").symlink_to(corpus.folder / "documents.txt")
        (scratch / f"raw-{name}").mkdir()
        (scratch / f"raw-{name}" / "a.txt").symlink_to(corpus.folder / "documents.txt")
        _preprocess(text.tokenizer, scratch / f"raw-{name}", scratch / f"documents-{name}")
    _preprocess(text.tokenizer, everything, scratch / "packed", "--record", "packed", "--seq_len", "2048")
    return _dump_rows(scratch), [corpus.label.split()[0] for corpus in corpora]


def _preprocess(tokenizer: Path, raw: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "preprocess"]
    flags = ["--input_dir", raw, "--output_dir", out, "--model_id", tokenizer, "--num_shards", "8", *options]
    for step in (["plan", *flags], ["run", out], ["verify", out]):
        done = subprocess.run([*command, *map(str, step)], cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(f"{step[0]} failed: {done.stderr.decode()}")


def _dump_rows(scratch: Path) -> Path:
    from loader import get_llama3_dataloader

    with get_llama3_dataloader(scratch / "packed", 1, num_workers=0, shuffle=False) as loader:
        rows = [batch["input_ids"].numpy().astype(np.uint32) for batch in loader]
    np.save(scratch / "rows.npy", np.concatenate(rows))
    return scratch / "rows.npy"


def measure(
    loader: Loader, scratch: Path, rows: Path, seconds: float, repeats: int
) -> list[dict[str, float]]:
    """Prepare one loader's data and read it ``repeats`` times. Raises RuntimeError with what it said."""
    python = sys.executable if loader.peer is None else str(peer_python(loader.peer))
    script = str(SCRIPTS / f"{loader.script}.py")
    data = scratch / (loader.data or loader.script)
    if not data.exists():
        _run([python, script, "prepare", str(rows), str(data)], loader)
    return [
        json.loads(_run([python, script, "read", str(data), str(seconds)], loader).splitlines()[-1])
        for _ in range(repeats)
    ]


def _run(command: list[str], loader: Loader) -> str:
    core = min(os.sched_getaffinity(0))
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = {"PYTHONPATH": str(ROOT)} if loader.peer is None else {}
    done = subprocess.run(
        ["taskset", "-c", str(core), *command],
        env={**os.environ, **single, **path, **loader.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-300:])
    return done.stdout


def table_line(label: str, runs: list[dict[str, float]], baseline: float | None) -> tuple[str, float]:
    """A row, and its speed."""
    speeds = sorted(run["tokens"] / run["cpu_s"] / 1e6 for run in runs)
    speed = statistics.median(speeds)
    useful = statistics.median(run["tokens"] / (run["tokens"] + run["padding"]) for run in runs)
    peak = max(run["peak_bytes"] for run in runs) / 2**20
    times = f"{speed / baseline:.1f}" if baseline else ""
    shown = f"{speed:.2f} ({speeds[0]:.2f}-{speeds[-1]:.2f})"
    return f"| {label} | {shown} | {times} | {useful:.3f} | {peak:.0f} |", speed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 MB of each text, one repeat of two seconds")
    parser.add_argument("--seconds", type=float, help="of each measurement (default 5)")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 3)")
    parser.add_argument("--mb", type=float, help="of each text (default 10)")
    parser.add_argument("--only", help="rows whose label contains one of these, comma-separated")
    args = parser.parse_args()
    seconds = args.seconds or (2 if args.quick else 5)
    repeats = args.repeats or (1 if args.quick else 3)
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        scratch = Path(folder)
        rows, corpora = prepared(scratch, int((args.mb or (2 if args.quick else 10)) * 1e6))
        tables = [ROWS, *(document_loaders(corpus) for corpus in corpora)]
        for table in tables:
            names = args.only.split(",") if args.only else [""]
            wanted = [each for each in table if any(name in each.label for name in names)]
            found: dict[str, list[dict[str, float]]] = {}
            for loader in wanted:
                reason = build(loader.peer) if loader.peer else None
                try:
                    if reason is None:
                        found[loader.label] = measure(loader, scratch, rows, seconds, repeats)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    reason = str(error)
                if reason is not None:
                    left_out[loader.label] = reason
            if found:
                print_table(found)
        print(
            f"{np.load(rows, mmap_mode='r').size / 1e6:.1f} Mtok; {machine_line()}; one pinned core, "
            f"no workers, page cache; median and range of {repeats} x {seconds:g} s"
        )
    for label, reason in left_out.items():
        print(f"\nLeft out: {label}: {reason}")
    return 0


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    """One table; how many times as fast as today's script, where that was measured."""
    first = next((runs for label, runs in found.items() if "today's script" in label), None)
    baseline = table_line("", first, None)[1] if first else None
    print("| loader | Mtok a CPU second (range) | times today's script | useful tokens | peak MiB |")
    print("|---|---|---|---|---|")
    for label, runs in found.items():
        print(table_line(label, runs, baseline)[0])
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
