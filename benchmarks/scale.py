"""Measure sizes of real data sets: 100,000 inputs, one input of 50 GB, 99,999 shards.

    python benchmarks/scale.py [FOLDER] [--files 100000] [--gb 50] [--shards 99999] [--quick]

Plans and a fast verify run on one core. Inputs and shards are artificial, and are removed afterwards: the
50 GB are holes with a block of text lines every 256 KiB (0.8 GB on disk), and shards are sparse files of 2 GB
with manifests like those of the worker. FOLDER (default: the system's scratch folder) needs 2 GB and room for
400,000 names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark_text import ROOT, lay_out
from measured_run import machine_line, run_pinned

from shardprep.files import FileStamp
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import idx_num_bytes
from shardprep.format.manifest import Manifest, RunFacts, ShardCounts
from shardprep.format.names import INDEX_NAME, idx_name, manifest_name, tar_name
from shardprep.format.plan import Plan, need_plan

BLOCK = ("A line of text, as there are many; its number is not written down anywhere. " * 4 + "\n").encode()
SPACING_BYTES = 256 << 10
TIMES: dict[str, Any] = {"began": 1.7e9, "wall_s": 1234.567, "cpu_s": 4321.0, "max_rss_bytes": 400 << 20}
TAR_BYTES = 2_000_000_000 // 512 * 512


def make_small_files(folder: Path, num_files: int) -> None:
    """Write files of one line each in one folder."""
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number:06d}.txt").write_bytes(b"document %d of many\n" % number)


def make_sparse_file(folder: Path, num_bytes: int) -> None:
    """Write holes, and a block of whole lines every SPACING_BYTES."""
    folder.mkdir()
    text = b"\n" + BLOCK * (4000 // len(BLOCK))
    fd = os.open(folder / "huge.txt", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(fd, num_bytes)
    for offset in range(0, num_bytes - len(text), SPACING_BYTES):
        os.pwrite(fd, text, offset)
    os.pwrite(fd, b"\n", num_bytes - 1)
    os.close(fd)


def make_shards(folder: Path, plan: Plan) -> None:
    """Write a sparse tar, a sparse idx and a manifest of realistic sizes for every shard of ``plan``."""
    for shard_id, input_bytes in enumerate(plan.shard_bytes()):
        manifest = Manifest(
            spec=plan.spec,
            shard_id=shard_id,
            counts=ShardCounts(
                num_samples=240_000 + shard_id % 1000,
                num_documents=240_000 + shard_id % 1000,
                num_tokens=480_000_000 + shard_id,
                num_lines=240_000,
                num_empty_lines=0,
                num_pad_tokens=0,
                num_documents_across_rows=0,
                input_bytes=input_bytes,
                quarantined={},
                length_histogram=[0, 10, 20, 40, 80, 160, 320, 640, 320, 160, 80, 40, 20, 10],
                sources={},
            ),
            tar=FileStamp(num_bytes=TAR_BYTES, sha256=f"{shard_id:064x}"),
            idx=FileStamp(
                num_bytes=idx_num_bytes(plan.spec.kind, 240_000 + shard_id % 1000), sha256=f"{shard_id:064x}"
            ),
            quarantine=None,
            ids=None,
            run=RunFacts(engine="gigatoken 0.10.0", host="node0123", num_cpus=4, **TIMES),
        )
        (folder / manifest_name(shard_id)).write_bytes(manifest.to_json())
        for path, stamp in (
            (folder / tar_name(shard_id), manifest.tar),
            (folder / idx_name(shard_id), manifest.idx),
        ):
            with path.open("wb") as file:
                file.truncate(stamp.num_bytes)


def report(what: str, command: list[str | Path], scratch: Path, package: str = "preprocess") -> None:
    """Run ``python -m preprocess`` with these arguments, and print its cost."""
    usage = run_pinned([sys.executable, "-m", package, *command], cwd=ROOT, log=scratch / "log")
    print(
        f"| {what} | {usage.wall_s:.1f} | {usage.cpu_s:.1f} | {usage.max_rss_bytes / 1e6:.0f} |", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--gb", type=float, default=50)
    parser.add_argument("--shards", type=int, default=99_999)
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    args = parser.parse_args()
    if args.quick:
        args.files, args.gb, args.shards = args.files // 10, args.gb / 10, args.shards // 10
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="shardprep-bench-") as name:
        scratch = Path(name)
        tokenizer = lay_out(scratch, 100_000).tokenizer
        make_small_files(scratch / "small", args.files)
        make_sparse_file(scratch / "huge", int(args.gb * 1e9))
        print("| | wall s | CPU s | memory, MB |\n|---|---|---|---|")
        common: list[str | Path] = ["--model_id", tokenizer]
        small: list[str | Path] = ["--input_dir", scratch / "small", "--output_dir", scratch / "shards"]
        huge: list[str | Path] = ["--input_dir", scratch / "huge", "--output_dir", scratch / "huge_shards"]
        report(
            "plan of ten documents",
            ["plan", "--dry_run", "--input_dir", scratch / "text/ten", *common],
            scratch,
        )
        plan = ["plan", *small, *common, "--num_shards", str(args.shards)]
        report(f"plan of {args.files:,} files, {args.shards:,} shards", plan, scratch)
        plan = ["plan", *huge, *common, "--num_shards", str(args.shards)]
        report(f"plan of one file of {args.gb:.0f} GB, {args.shards:,} shards", plan, scratch)
        shutil.rmtree(scratch / "huge")
        shards = scratch / "shards"
        make_shards(shards, need_plan(DataFolder(shards)))
        report(f"verify --fast of {args.shards:,} shards", ["verify", "--fast", shards], scratch)
        report(f"slurm status of {args.shards:,} shards", ["status", shards], scratch, "slurm")
        num_bytes = (shards / INDEX_NAME).stat().st_size
        print(f"\n{INDEX_NAME}: {num_bytes / args.shards:.1f} bytes per shard. {machine_line()}.")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
