"""Measure a loader's time to its first batch, time and memory to open 99,999 shards, memory over ten epochs.

loader_limits.py uses this. ``python benchmarks/loader_footprint.py FOLDER`` opens one data set in a fresh
process, and prints seconds and bytes as JSON.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_text import ROOT

from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import idx_num_bytes
from shardprep.format.index import DatasetIndex, read_index
from shardprep.format.names import tar_name

NUM_SHARDS = 99_999
TAR_BYTES = 2_000_000_000 // 512 * 512
_READINGS, _APART_S = 10, 0.05  # the minimum counts, because workers read ahead meanwhile


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The cost of ``get_llama3_dataloader`` in a fresh process that has imported torch and transformers."""

    seconds: float
    peak_bytes: int  # above the memory of the imports
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory and handles of a loader's process and its workers together.

    Resident memory counts shared pages once per process. Private memory would jump without a leak: by 45 MiB
    per process at some epoch, likely when a full garbage collection first writes to pages shared by the fork.
    """

    resident_bytes: int
    num_handles: int


def make_index(model: Path, folder: Path) -> None:
    """Write an index.json of NUM_SHARDS shards of 2 GB, with spec and tokenizer of the data set ``model``.

    The tars are sparse: to open a data set, the loader only compares their sizes and reads the index.
    """
    spec = dataclasses.replace(read_index(DataFolder(model)).spec, num_shards=NUM_SHARDS)
    number = np.arange(NUM_SHARDS)
    columns = [240_000 + number % 1000, 240_000 + number % 1000, 480_000_000 + number]
    columns += [np.full(NUM_SHARDS, TAR_BYTES), idx_num_bytes(spec.kind, columns[0])]
    hashes = tuple(f"{each * 2**40:016x}" for each in range(NUM_SHARDS))
    index = DatasetIndex(spec=spec, columns=np.stack(columns, axis=1), tar_sha256=hashes)
    folder.mkdir()
    (folder / "tokenizer").symlink_to(model / "tokenizer")
    (folder / "index.json").write_bytes(index.to_json())
    for shard_id in range(NUM_SHARDS):
        with (folder / tar_name(shard_id)).open("wb") as file:
            file.truncate(TAR_BYTES)


def opening(folder: Path) -> Opening:
    """Open ``folder`` in a new process."""
    command = [sys.executable, __file__, str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    return Opening(**json.loads(done.stdout))


_FIRST_BATCH = """
import sys, time
import torch
imported = time.process_time()
from loader import get_llama3_dataloader
next(iter(get_llama3_dataloader(sys.argv[1], 8, num_workers=0)))
print(imported, time.process_time() - imported)
"""


def first_batch(folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a fresh process to import torch, and from there to the first batch."""
    command = [sys.executable, "-P", "-c", _FIRST_BATCH, str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    imported, above = map(float, done.stdout.split())
    return imported, above


def open_here(folder: str) -> Opening:
    """Open ``folder`` in this process, which has imported little before."""
    import torch  # noqa: F401
    import transformers

    _ = transformers.AutoTokenizer, transformers.DataCollatorForLanguageModeling  # imported on first use
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status_bytes("VmRSS")
    began = time.perf_counter()
    from loader import get_llama3_dataloader

    loader = get_llama3_dataloader(folder, 8, num_workers=0, rank=0, world_size=1)
    return Opening(
        seconds=time.perf_counter() - began,
        peak_bytes=_status_bytes("VmHWM") - before,
        num_samples=loader.run.sources[0].order.num_samples,
    )


def footprints(
    folder: Path, options: Mapping[str, Any], epochs: tuple[int, ...], *, batch_size: int = 8
) -> list[Footprint]:
    """Return the footprint of a loader with two persistent workers after each of ``epochs``, ascending."""
    from loader import get_llama3_dataloader

    before = set(multiprocessing.active_children())
    found = []
    with get_llama3_dataloader(folder, batch_size, num_workers=2, **options) as loader:
        for epoch in range(1, max(epochs) + 1):
            for _ in loader:
                pass
            if epoch in epochs:
                gc.collect()
                workers = set(multiprocessing.active_children()) - before
                found.append(_footprint([os.getpid(), *(int(each.pid or 0) for each in workers)]))
    return found


def _footprint(processes: list[int]) -> Footprint:
    memory, handles = [], []
    for _ in range(_READINGS):
        time.sleep(_APART_S)
        rollups = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in processes)
        memory.append(1024 * sum(map(int, re.findall(r"^Rss: +(\d+) kB", rollups, re.MULTILINE))))
        handles.append(sum(1 for pid in processes for _ in Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(resident_bytes=min(memory), num_handles=min(handles))


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Return by how many bytes ``work`` raises the peak memory of this process."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    """Return a number of KiB in /proc/self/status as bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(open_here(sys.argv[1]))))
