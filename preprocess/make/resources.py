"""The CPUs and memory that a task may use, and the settings of a worker, which do not change the output.

CPUs and memory follow from Slurm's variables and from what the kernel allows: the affinity mask, and the
limits of cgroups and ``ulimit -v``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.errors import UsageError
from shardprep.format.plan import Plan, PlannedShard
from shardprep.format.plan_options import BAD_HELP, ENGINE_HELP, INPUT, TEXT, TOKENS, EngineName
from shardprep.option import option

SMALLEST_BATCH_BYTES = 64 << 10
PROCESS_BYTES = 300 << 20  # of a worker with Llama 3's vocabulary, before its first document
_ADDRESS_BYTES = 700 << 20  # address space that a worker reserves and does not use; with 200 some fail
_M_ARENA_MAX = -8  # from glibc's malloc.h
_NUM_HEAPS = 2
_MOST_RENDERERS = 8
_RENDERER_BYTES = 250 << 20  # of a process that renders, with transformers
MEMORY_PER_BATCH_BYTE = 200  # for text, ids and tar blocks of three batches at once


def allowed_cpus(*, offset: int, num_processes: int = 1) -> list[int]:
    """Return the CPUs to use: the ``offset``-th group of SLURM_CPUS_PER_TASK in the affinity mask, or all.

    The mask is the whole node if Slurm counts CPUs but does not bind tasks to them. Without the variable,
    each of the ``num_processes`` of a launch on this node gets its part of the node's CPUs.
    """
    cpus = sorted(os.sched_getaffinity(0))
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    num_cpus = int(given) if given.isdigit() else 0
    if not num_cpus and num_processes > 1:
        on_node = os.environ.get("SLURM_CPUS_ON_NODE", "")
        of_all = int(on_node) if on_node.isdigit() else os.cpu_count() or len(cpus)
        num_cpus = max(1, of_all // num_processes)
    if not 0 < num_cpus < len(cpus):
        return cpus
    start = offset * num_cpus % len(cpus)
    return sorted((cpus * 2)[start : start + num_cpus])


def bind_to(cpus: list[int]) -> int:
    """Bind this process and its future threads to CPUs, before an engine is loaded. Return their number.

    The engines size their thread pools by the affinity mask unless variables say otherwise. Shells for
    training often set these, so they are set here.
    """
    # All threads share two heaps of glibc. By default each has its own: 60 MB more on one core.
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_M_ARENA_MAX, _NUM_HEAPS)
    os.sched_setaffinity(0, cpus)
    os.environ["RAYON_NUM_THREADS"] = str(len(cpus))  # it takes precedence over RAYON_RS_NUM_CPUS
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return len(cpus)


LEAST_WORKER_BYTES = PROCESS_BYTES + SMALLEST_BATCH_BYTES * MEMORY_PER_BATCH_BYTE


def memory_note(memory_gb: float | None, num_processes: int = 1) -> str | None:
    """Return a warning if a worker will need more memory than it may use, else None."""
    least = LEAST_WORKER_BYTES / 2**30
    if memory_gb is None or memory_gb >= least:
        return None
    each = "" if num_processes == 1 else f" for each of {num_processes} processes"
    needs = f"a worker needs about {least:.2f} GB with a vocabulary of Llama 3's size"
    remedy = "give it more (--memory_gb, sbatch --mem), or use fewer processes (--num_proc)"
    return f"{needs}, but {memory_gb:.2f} GB are available{each}; it may be killed: {remedy}"


def memory_limits() -> dict[str, int]:
    """Return the limits on this job's memory in bytes, by who sets them; for cgroups the lowest one."""
    limits = {"the machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    per_node = os.environ.get("SLURM_MEM_PER_NODE", "")
    per_cpu = os.environ.get("SLURM_MEM_PER_CPU", "")
    cpus = os.environ.get("SLURM_CPUS_ON_NODE") or os.environ.get("SLURM_CPUS_PER_TASK") or "1"
    if per_node.isdigit() and int(per_node):
        limits["Slurm"] = int(per_node) << 20
    elif per_cpu.isdigit() and int(per_cpu) and cpus.isdigit():  # from --mem-per-cpu or DefMemPerCPU
        limits["Slurm"] = int(per_cpu) * int(cpus) << 20
    cgroup_limits = []
    for path in cgroup_files("memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            cgroup_limits.append(int(path.read_text(encoding="ascii")))
    address_bytes = _address_limit()
    if address_bytes is not None:
        limits["ulimit -v"] = max(address_bytes - _ADDRESS_BYTES, 0)
    if cgroup_limits:
        limits["the cgroup"] = min(cgroup_limits)
    return limits


def _address_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_address_space() -> None:
    """Raise UsageError if ``ulimit -v`` is so low that an engine would abort during the work."""
    given, least = _address_limit(), LEAST_WORKER_BYTES + _ADDRESS_BYTES
    if given is not None and given < least:
        what = f"ulimit -v allows {given >> 10} KiB of address space, but a worker needs {least >> 10}"
        raise UsageError(f"{what}; run ulimit -v unlimited first, also in the job's script")


def cgroup_files(controller: str, limit: str, old_limit: str) -> list[Path]:
    """Return the files of a limit in this process's cgroup and its parents; ``old_limit`` in version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, file = Path("/sys/fs/cgroup"), limit
        elif controller in controllers.split(","):
            base, file = Path("/sys/fs/cgroup", controller), old_limit
        else:
            continue
        folder = base / name.lstrip("/")
        files += [parent / file for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return files


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Where the input of a plan is now. Each field is a flag of the commands that read it."""

    input_dir: Path | None = option(
        None, "folder of the raw input files, if they moved", shown="the plan's", group=INPUT
    )
    transform: Path | None = option(
        None, "the file of the plan's --transform, unchanged; required if the plan has one", group=TEXT
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(InputSettings):
    """Each field is a flag of ``--shard_id N`` and of ``run``."""

    engine: EngineName = option("auto", ENGINE_HELP, group=TOKENS)
    max_bad_fraction: float | None = option(None, BAD_HELP, shown="the plan's", group=TEXT)
    memory_gb: float | None = option(
        None, "memory of a process, in GiB", shown="the limit of Slurm and the cgroup", group="resources"
    )
    again: bool = option(False, "make shards again that are done, such as damaged ones", group="resources")
    max_batch_documents: int | None = option(None)  # from DATASET_BATCH_SIZE; not a flag
    stretch_bytes: int | None = option(None)  # from SHARDPREP_STRETCH_BYTES; not a flag

    def __post_init__(self) -> None:
        if self.memory_gb is not None and not 0 < self.memory_gb < math.inf:
            raise UsageError.of_value("--memory_gb", self.memory_gb, "more than 0, and a number")


def environment_number(name: str) -> int | None:
    """Return an environment variable that is a positive integer, None if it is not set. Raises UsageError."""
    text = os.environ.get(name, "")
    if text and not (text.isdigit() and int(text)):
        raise UsageError.of_value(name, text, "an integer of 1 or more in the environment")
    return int(text) if text else None


def worker_settings(given: dict[str, Any]) -> WorkerSettings:
    """Return the worker's options: ``given``, else from DATASET_[WRITER_]BATCH_SIZE, else the defaults."""
    numbers = map(environment_number, ("DATASET_BATCH_SIZE", "DATASET_WRITER_BATCH_SIZE"))
    settings = {"memory_gb": min(memory_limits().values()) / 2**30, **given}
    settings["stretch_bytes"] = environment_number("SHARDPREP_STRETCH_BYTES")
    return WorkerSettings(max_batch_documents=min(filter(None, numbers), default=None), **settings)


# Helpers. ------------------------------------------------------------------------------------------------

# Input that a helper reads at once. The batches of a stretch must fit into its shared memory: short
# documents take 22 times their text in a tar.
_DOCUMENT_STRETCH_BYTES = 1 << 20
_ROW_STRETCH_BYTES = 4 << 20
_HELPER_BYTES = 160 << 20  # of memory
# Two helpers are as fast as threads for some 100 MB and faster for more, while three are faster at once:
# benchmarks/results.md#cores-of-a-task.
_LEAST_BYTES_OF_TWO = 128 << 20
_FEWEST_HELPERS = 2
_LEAST_HELPER_SHARE = 8  # stretches per helper; for fewer, the helpers' start is too long


def stretch_bytes(plan: Plan, settings: WorkerSettings) -> int:
    """Return how much of a shard a helper gets at once."""
    if settings.stretch_bytes is not None:
        return settings.stretch_bytes
    return _ROW_STRETCH_BYTES if plan.options.has_rows else _DOCUMENT_STRETCH_BYTES


def num_renderers(settings: WorkerSettings, num_cpus: int) -> int:
    """Return how many processes should render conversations: one for two CPUs, as the others encode.

    Rendering takes some 40 % of the work on conversations. Each further process takes 2.5 s to start.
    """
    number = min(num_cpus // 2, _MOST_RENDERERS)
    if settings.memory_gb is not None:
        number = min(number, (int(settings.memory_gb * 2**30) - PROCESS_BYTES) // _RENDERER_BYTES)
    return max(number, 1)


def num_helpers(plan: Plan, shard: PlannedShard, settings: WorkerSettings, num_cpus: int) -> int:
    """Return how many helpers should share the work on a shard: one per CPU, or 0 if threads are as fast.

    For small shards helpers take too long to start. A limit of documents is counted in order, and
    conversations are rendered by a process of their own, so such shards have none.
    """
    if num_cpus < _FEWEST_HELPERS or shard.max_documents is not None or plan.options.is_chat:
        return 0
    number = min(num_cpus, shard.num_bytes // (_LEAST_HELPER_SHARE * stretch_bytes(plan, settings)))
    if settings.memory_gb is not None:
        spare_bytes = int(settings.memory_gb * 2**30) - PROCESS_BYTES
        number = min(number, spare_bytes // _HELPER_BYTES)
    if number == _FEWEST_HELPERS and shard.num_bytes < _LEAST_BYTES_OF_TWO:
        return 0
    return number if number >= _FEWEST_HELPERS else 0
