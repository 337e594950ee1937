"""Options of one run of a worker, which change no byte of a shard, and the limits they stand under."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from preprocess.config import EngineName
from preprocess.shard_format import UsageError

BATCH_BYTES = 512 << 10  # of raw text; 128 KiB to 2 MiB take the same time (benchmarks/preprocess.py)
_SMALLEST_BATCH_BYTES = 64 << 10
PROCESS_BYTES = 300 << 20  # a worker of Llama 3's vocabulary before its first document
_BYTES_A_BATCH_BYTE = (
    200  # what a byte of a batch takes on its way: text, ids, tar blocks, three batches at once
)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Each field is a flag of ``--shard_id N`` and of ``run``."""

    input_dir: Path | None = field(
        default=None, metadata={"help": "folder of the raw .txt files, where it is no longer the plan's"}
    )
    engine: EngineName = field(
        default="auto", metadata={"help": "what encodes; the ids never depend on it (default auto)"}
    )
    max_bad_fraction: float | None = field(
        default=None, metadata={"help": "share of undecodable documents above which a shard fails (65)"}
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "most documents encoded at once (default DATASET_BATCH_SIZE, or any)"}
    )
    writer_batch_size: int | None = field(
        default=None,
        metadata={"help": "most documents laid out at once (default DATASET_WRITER_BATCH_SIZE, or any)"},
    )
    memory_gb: float | None = field(
        default=None, metadata={"help": "memory of a process to stay below (default: the cgroup's limit)"}
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "writer_batch_size", "memory_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{name} is {value}, expected more than 0, and a number")

    @property
    def batch_bytes(self) -> int:
        """Raw text taken at once: BATCH_BYTES, less where memory is short."""
        if self.memory_gb is None:
            return BATCH_BYTES
        spare = int(min(self.memory_gb, 2**20) * 2**30) - PROCESS_BYTES
        return min(BATCH_BYTES, max(_SMALLEST_BATCH_BYTES, spare // _BYTES_A_BATCH_BYTE))


def memory_note(memory_gb: float, num_processes: int = 1) -> str | None:
    """What to say where a worker will need more memory than it may have, else None."""
    least = (PROCESS_BYTES + _SMALLEST_BATCH_BYTES * _BYTES_A_BATCH_BYTE) / 2**30
    if memory_gb >= least:
        return None
    each = "" if num_processes == 1 else f" for each of {num_processes} processes"
    return (
        f"a worker needs about {least:.2f} GB with a vocabulary as large as Llama 3's, and there are "
        f"{memory_gb:.2f} GB{each}; it may be killed: give it more (--memory_gb, sbatch --mem), or "
        "take fewer processes (--num_proc)"
    )


def environment_number(environ: Mapping[str, str], name: str) -> int | None:
    """A positive whole number of the environment, None where it is not set. Raises UsageError."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} is {text!r} in the environment, expected a whole number of 1 or more")
    return int(text)


def memory_limit_gb(environ: Mapping[str, str], root: Path = Path("/")) -> float:
    """The memory that this job may use: the least of Slurm's, the cgroups' and the machine's, in GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (megabytes := environ.get("SLURM_MEM_PER_NODE", "")).isdigit() and int(megabytes):
        limits.append(int(megabytes) << 20)
    for path in _cgroup_limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits) / 2**30


def _cgroup_limit_files(root: Path) -> list[Path]:
    """Where the limits of this process's cgroup and of those above it are, in either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / name.lstrip("/")
        files += [parent / limit for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return files
