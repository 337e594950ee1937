"""Refuse jobs that Slurm would refuse, or would never start. A refusal names the job, the limit and the flag.

What cannot be read is tried by ``sbatch --test-only``, once for each set of options.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable

from shardprep.console import counted, say
from slurm.commands import SlurmRefused, run_slurm
from slurm.limits import Limit, Limits
from slurm.request import JobRequest


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
_MEMORY_OPTIONS = ("--mem", "--mem-per-cpu")  # sbatch takes one of them


def options_of(what: str, request: JobRequest) -> list[str]:
    """Return the options of sbatch for a job. --controller_args replace those of verify and controller."""
    options = request.sbatch_options()
    if what == TASKS:
        return options
    words = shlex.split(request.controller_args)
    replaced = {word.partition("=")[0] for word in words}
    if replaced.intersection(_MEMORY_OPTIONS):
        replaced.update(_MEMORY_OPTIONS)
    return [*(each for each in options if each.partition("=")[0] not in replaced), *words]


class Tester:
    """Tries jobs with ``sbatch --test-only``, once for each set of options."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, ...]] = set()

    def check(self, what: str, request: JobRequest, script: str, limits: Limits) -> None:
        """Raise SlurmRefused if Slurm would refuse the script of a job, and name the job and what it asks."""
        options = tuple(options_of(what, request))
        if options in self._passed:
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
            words = f"{error}. It is {what}, which asks for: {shlex.join(options)}"
            if limits.nodes:
                words += f"; a node has up to {limits.max_cpus} CPUs and {limits.max_mem_mb} MB"
            if "--mem=0" in options:
                words += "; where --mem is refused: --mem_per_cpu_gb"
            if what in (VERIFY_JOB, CONTROLLER_JOB):
                words += "; for other options of this job: --controller_args"
            raise SlurmRefused(found=f"{words}. Nothing was written or submitted") from None
        self._passed.add(options)
