"""Measure the lower bound of each stage of preprocessing, alone, beside the cost of a shard.

    python benchmarks/stage_bounds.py DATA [DATA ...]

DATA is a finished data set. This prints a line of JSON: folder -> stage -> CPU seconds of this process, for
each stage once and alone, over the same documents. ``make bench_preprocess`` runs it in turn with the
workers, and prints both.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from preprocess.make.json_ids import json_ids
from preprocess.make.settings import WorkerSettings
from preprocess.make.token_ids import TokenBatch
from preprocess.make.worker import Worker
from preprocess.read.documents import DocumentBatch, DocumentReader
from shardprep.files import WRITE_BYTES
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import need_plan

READ, ENCODE, JSON_IDS = "bytes to lines of str", "engine alone", "ids as JSON alone"
COPY, HASH, DISK, TMPFS = "one copy of the tar", "sha256 of the tar", "tar to disk, synced", "tar to tmpfs"
BOUNDS = (READ, ENCODE, JSON_IDS, COPY, HASH, DISK)  # needed for every shard; tmpfs is an alternative to disk
_TMPFS = Path("/dev/shm")


def stage_seconds(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of each stage over all shards of a data set."""
    plan, settings = need_plan(DataFolder(folder)), WorkerSettings()
    paths = {part.path for shard_id in range(plan.num_shards) for part in plan.shard(shard_id).ranges}
    found = {READ: cpu_s(lambda: [path.read_bytes().decode().split("\n") for path in paths])}
    worker = Worker(plan, DataFolder(folder), settings, num_cpus=1, warn=print)
    batches, engine = _batches(worker), worker.engine
    tokens: list[TokenBatch] = []
    found[ENCODE] = cpu_s(lambda: tokens.extend(engine.encode(batch.texts) for batch in batches))
    if plan.spec.kind == "json":
        as_json = json_ids(plan.spec.tokenizer.vocab_size)
        found[JSON_IDS] = cpu_s(lambda: [as_json.separated(each.ids) for each in tokens])
    tar = b"".join(path.read_bytes() for path in sorted(folder.glob("shard-*.tar")))
    found[HASH] = cpu_s(lambda: hashlib.sha256(tar).digest())
    piece = mmap.mmap(-1, WRITE_BYTES)
    piece[:] = bytes(WRITE_BYTES)  # allocate its pages before the measurement
    found[COPY] = cpu_s(lambda: _copy(tar, piece))
    found[DISK] = cpu_s(lambda: _write(folder, tar, piece, os.O_DIRECT))
    if os.access(_TMPFS, os.W_OK):
        found[TMPFS] = cpu_s(lambda: _write(_TMPFS, tar, piece, 0))
    return found


def _batches(worker: Worker) -> list[DocumentBatch]:
    """Return the batches of the worker."""
    return [
        documents
        for shard_id in range(worker.plan.num_shards)
        for documents in DocumentReader(worker.plan.options).read_shard(worker.plan.shard(shard_id))
    ]


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def _copy(data: bytes, piece: mmap.mmap) -> None:
    view = memoryview(data)
    for begin in range(0, len(data), len(piece)):
        part = view[begin : begin + len(piece)]
        piece[: len(part)] = part


def _write(folder: Path, data: bytes, piece: mmap.mmap, flags: int) -> None:
    """Write the size of ``data`` in whole pieces, with O_DIRECT if ``flags`` have it, and sync."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bounds-") as name:
        path = Path(name) / "data"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        except OSError:  # no O_DIRECT here
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        for _ in range(-(-len(data) // len(piece))):
            os.write(fd, piece)
        os.fsync(fd)
        os.close(fd)


def bounds_table(
    title: str,
    labels: Sequence[str],
    bounds: Sequence[Mapping[str, float]],
    reached: Sequence[float],
    *,
    digits: int = 4,
) -> str:
    """Return a table: a row per stage, their sum, the cost reached, and the sum's share of it.

    There is a column per label. ``bounds`` and ``reached`` are in the unit of the title.
    """
    stages = [stage for stage in (*BOUNDS, TMPFS) if any(stage in of for of in bounds)]
    stages += [stage for of in bounds for stage in of if stage not in stages]
    rows = [(stage, [of.get(stage) for of in bounds]) for stage in dict.fromkeys(stages)]
    lines = [f"| {title} | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for stage, values in rows:
        cells = ["-" if value is None else f"{value:.{digits}f}" for value in values]
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    sums = [sum(value for stage, value in of.items() if stage != TMPFS) for of in bounds]
    lines.append(f"| sum of the bounds | {' | '.join(f'{value:.{digits}f}' for value in sums)} |")
    lines.append(f"| reached | {' | '.join(f'{value:.{digits}f}' for value in reached)} |")
    shares = [f"{100 * bound / value:.0f} %" for bound, value in zip(sums, reached, strict=True)]
    lines.append(f"| sum / reached | {' | '.join(shares)} |")
    return "\n".join(lines)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each stage over several runs."""
    return {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}


def main() -> int:
    print(json.dumps({name: stage_seconds(Path(name)) for name in sys.argv[1:]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
