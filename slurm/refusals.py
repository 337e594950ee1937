"""Refuse jobs that Slurm would refuse, or would never start. A refusal names the job, the limit and the flag.

What cannot be read is tried by ``sbatch --test-only``, but not for a job that asks for no more than another.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence

from shardprep.console import counted, say
from slurm.commands import SlurmRefused, megabytes_of, run_slurm
from slurm.limits import Limit, Limits
from slurm.request import MEMORY_OPTIONS, JobRequest


def memory_mb(request: JobRequest) -> float:
    """Return the memory that a request names for a task, or 0."""
    return 1024 * (request.mem_gb or (request.mem_per_cpu_gb or 0) * (request.num_cpus or 1))


_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)


def check_request(request: JobRequest, limits: Limits, what: str) -> None:
    """Refuse a request that would wait for ever. ``what``: whose request it is. Raises SlurmRefused."""
    num_cpus = request.num_cpus or 1
    mem_mb = memory_mb(request)
    checks: list[tuple[str, float | None, Limit | None, Callable[[int], float]]] = [
        ("--time_min", request.time_min, limits.time_min, float),
        ("--mem_gb", mem_mb if request.mem_gb else None, limits.mem_mb, lambda mb: mb / 1024),
        ("--mem_per_cpu_gb", mem_mb if request.mem_per_cpu_gb else None, limits.mem_mb,
         lambda mb: mb / num_cpus / 1024),
        ("--cpus_per_task", request.num_cpus, limits.num_cpus, float),
    ]  # fmt: skip
    for flag, asked, limit, shown in checks:
        if asked is None or limit is None or asked <= limit.number:
            continue
        found = (
            f"{flag} {_short(shown(round(asked)))} of {what}, above {limit.of}: such a job would never start"
        )
        most = math.floor(shown(limit.number) * 1000) / 1000
        raise SlurmRefused(
            found=found, expected=f"at most {flag} {_short(most)}, or another partition or QOS"
        )
    if request.num_cpus and limits.min_cpus and request.num_cpus < limits.min_cpus.number:
        least = limits.min_cpus
        found = f"--cpus_per_task {num_cpus} of {what}, below {least.of}: such jobs would never start"
        raise SlurmRefused(found=found, expected=f"--cpus_per_task {least.number} or more, or another QOS")
    check_nodes(request, limits, what)


def check_nodes(request: JobRequest, limits: Limits, what: str) -> None:
    """Refuse a number of nodes that the partition does not give. Raises SlurmRefused."""
    num_nodes = request.nodes or 1
    least = limits.min_nodes
    most = limits.max_nodes
    found = f"{counted(num_nodes, 'node')} for {what}"
    if least and num_nodes < least.number:
        expected = f"--nodes {least.number} or more, or another partition"
        if what in (VERIFY_JOB, CONTROLLER_JOB):
            expected = "--small_partition with a partition of single nodes"
        raise SlurmRefused(
            found=f"{found}, below {least.of}: such a job would never start", expected=expected
        )
    if most and num_nodes > most.number:
        expected = f"at most --nodes {most.number}, or another partition"
        raise SlurmRefused(found=f"{found}, above {most.of}: such a job would never start", expected=expected)


def _short(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


VERIFY_JOB = "the verify job"
CONTROLLER_JOB = "the controller of --until_done"
TASKS = "the tasks"


def options_of(what: str, request: JobRequest) -> list[str]:
    """Return the options of sbatch for a job. --controller_args replace those of verify and controller."""
    options = request.sbatch_options()
    if what == TASKS:
        return options
    words = shlex.split(request.controller_args)
    replaced = {word.partition("=")[0] for word in words}
    if replaced.intersection(MEMORY_OPTIONS):
        replaced.update(MEMORY_OPTIONS)
    return [*(each for each in options if each.partition("=")[0] not in replaced), *words]


class Tester:
    """Tries jobs with ``sbatch --test-only``, but for those that ask for no more than one before."""

    def __init__(self) -> None:
        self._passed: list[list[str]] = []

    def check(self, what: str, request: JobRequest, script: str, limits: Limits) -> None:
        """Raise SlurmRefused if Slurm would refuse the script of a job, and name the job and what it asks."""
        options = options_of(what, request)
        if any(_asks_for_no_more(options, passed) for passed in self._passed):
            return
        try:
            run_slurm("sbatch", "--test-only", text=script)
        except SlurmRefused as error:
            fitting = []
            for state, node_mb, node_cpus in limits.nodes:
                if node_mb >= memory_mb(request) and node_cpus >= (request.num_cpus or 1):
                    fitting.append(state)
            is_about_nodes = "node" in str(error).lower()
            if fitting and all(map(_NODES_AWAY.search, fitting)) and is_about_nodes:
                say(f"warning: {error}; the jobs wait until such nodes are back: sinfo -R")
                return
            words = about_refused(error, what, request, limits)
            raise SlurmRefused(found=f"{words}. Nothing was written or submitted") from None
        self._passed.append(options)


def about_refused(error: SlurmRefused, what: str, request: JobRequest, limits: Limits) -> str:
    """Return Slurm's words, which job it is, what it asks for, and the flags that change it."""
    options = options_of(what, request)
    words = f"{error}. It is {what}, which asks for: {shlex.join(options)}"
    if limits.nodes:
        words += f"; a node has up to {limits.max_cpus} CPUs and {limits.max_mem_mb} MB"
    if "--mem=0" in options:
        words += "; where --mem is refused: --mem_per_cpu_gb"
    if what in (VERIFY_JOB, CONTROLLER_JOB):
        words += "; for other options of this job: --controller_args"
    return words


def _asks_for_no_more(options: Sequence[str], passed: Sequence[str]) -> bool:
    """Return whether a job with these options asks for no more than one that Slurm would take.

    Its memory may be less, and its time longer, because the limits of time are known. If a site refuses it
    for these, its submission says so. Fewer CPUs are tried: some sites refuse small jobs.
    """
    if len(options) != len(passed):
        return False
    for asked, had in zip(options, passed, strict=True):
        name, _, value = asked.partition("=")
        name_had, _, value_had = had.partition("=")
        if name != name_had:
            return False
        is_less = name in MEMORY_OPTIONS and _megabytes(value) <= _megabytes(value_had)
        if value != value_had and name != "--time" and not is_less:
            return False
    return True


def _megabytes(text: str) -> float:
    """Return a size in MB. 0 stands for all memory of a node."""
    return megabytes_of(text) or math.inf
