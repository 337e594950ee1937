"""How many CPUs a task may use: what Slurm gave it, then what the kernel lets it run on."""

from __future__ import annotations

import os
from collections.abc import Mapping


def allowed_cpus(environ: Mapping[str, str], affinity: set[int], *, offset: int) -> list[int]:
    """The CPUs to use, given the environment and the kernel's affinity mask.

    Where Slurm counts CPUs without binding tasks to them, the mask is the whole node; then a
    run of SLURM_CPUS_PER_TASK of them is taken, beginning at the ``offset``-th such run so that
    tasks of one node spread. Never ``os.cpu_count()``, which counts other people's CPUs.
    """
    cpus = sorted(affinity)
    given = environ.get("SLURM_CPUS_PER_TASK", "")
    if not given.isdigit() or not 0 < int(given) < len(cpus):
        return cpus
    number = int(given)
    start = offset * number % len(cpus)
    return sorted((cpus * 2)[start : start + number])


def bind_to_task_cpus(offset: int) -> int:
    """Bind this process, and the threads it will start, to its task's CPUs; returns their number."""
    cpus = allowed_cpus(os.environ, os.sched_getaffinity(0), offset=offset)
    bind_to(cpus)
    return len(cpus)


def bind_to(cpus: list[int]) -> None:
    """Bind this process, and the threads it will start, to some CPUs.

    fastokens sizes its thread pool by the affinity mask alone. tokenizers does so, too, unless
    RAYON_NUM_THREADS, RAYON_RS_NUM_CPUS or TOKENIZERS_PARALLELISM say otherwise (all seen), which stand in
    many a shell for the sake of training; so they are set. This comes before either is loaded.
    """
    os.sched_setaffinity(0, cpus)
    os.environ["RAYON_NUM_THREADS"] = str(len(cpus))  # it goes before RAYON_RS_NUM_CPUS
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
