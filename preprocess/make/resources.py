"""The CPUs and memory that a task may use.

CPUs and memory follow from Slurm's variables and from what the kernel allows: the affinity mask, and the
limits of cgroups and ``ulimit -v``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

from shardprep.errors import UsageError

SMALLEST_BATCH_BYTES = 64 << 10
PROCESS_BYTES = 300 << 20  # of a worker with Llama 3's vocabulary, before its first document
_ADDRESS_BYTES = 700 << 20  # address space that a worker reserves and does not use; with 200 some fail
_M_ARENA_MAX = -8  # from glibc's malloc.h
_NUM_HEAPS = 2
MEMORY_PER_BATCH_BYTE = 200  # for text, ids and tar blocks of three batches at once


def allowed_cpus(*, offset: int, num_processes: int = 1) -> list[int]:
    """Return the CPUs to use: the ``offset``-th group of SLURM_CPUS_PER_TASK in the affinity mask, or all.

    The mask is the whole node if Slurm counts CPUs but does not bind tasks to them. Without the variable,
    each of the ``num_processes`` of a launch on this node gets its share of the node's CPUs.
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
    """Return the limits on this job's memory in bytes, by who sets them. Of cgroups, it is the lowest one."""
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
    """Return the files of a limit in this process's cgroup and its parents. ``old_limit``: in version 1."""
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
