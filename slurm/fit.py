"""Requests of tasks, retries, verify and controller that fit the site's limits. Every request passes here.

What cannot be read is tried by ``sbatch --test-only``, once for each set of options. A refusal names the job,
the limit and the flag.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping

from shardprep.console import counted, say
from slurm.commands import SlurmAway, SlurmRefused, run_slurm
from slurm.limits import Limit, Limits, find_limits
from slurm.request import JobRequest

CONTROLLER_MEM_GB = 1.0
_VERIFIED_BYTES_PER_S = 5e6  # bytes of input, on one slow core
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


def memory_mb(request: JobRequest) -> float:
    """Return the memory that a request names for a task, or 0."""
    return 1024 * (request.mem_gb or (request.mem_per_cpu_gb or 0) * (request.num_cpus or 1))


def request_of_small_jobs(request: JobRequest) -> JobRequest:
    """Return the request behind those of verify and controller: in the partition for small jobs."""
    if request.small_partition is None:
        return request
    return request.changed(partition=request.small_partition)


def verify_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a job that verifies all bytes, as much of it as the limits allow."""
    num_cpus = min(4, request.num_cpus or 4)
    num_cpus = max(num_cpus, limits.min_cpus.number if limits.min_cpus else 1)
    small = request.changed(cpus_per_task=num_cpus, max_parallel=1)
    if request.time_min is None:
        return small
    wanted_min = request.time_min + math.ceil(input_bytes / _VERIFIED_BYTES_PER_S / 60)
    most_min = limits.time_min.number if limits.time_min else wanted_min
    return small.changed(time_min=max(min(wanted_min, most_min), 1))


def controller_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a controller: one CPU and 1 GB, in the form that the user's request has.

    Without memory in the request there is none here, unless the site's default is less. A task's own smaller
    memory is not exceeded where a limit says so.
    """
    num_cpus = limits.min_cpus.number if limits.min_cpus else 1
    small = verify_request(request, limits, input_bytes).changed(cpus_per_task=num_cpus)
    mem_gb = CONTROLLER_MEM_GB
    if limits.mem_mb:
        mem_gb = min(mem_gb, math.floor(limits.mem_mb.number * 1000 / 1024) / 1000)
    has_less = limits.default_mem_mb is not None and limits.default_mem_mb * num_cpus < 1024 * mem_gb
    if request.mem_per_cpu_gb is not None:
        return small.changed(mem_per_cpu_gb=mem_gb / num_cpus)
    if request.mem_gb is not None or request.num_cpus is None or has_less:
        return small.changed(mem_gb=mem_gb)
    return small


def more_time(request: JobRequest, ran_min: int, limits: Limits) -> tuple[JobRequest, str]:
    """Return a request with twice the time, or as much as the limits allow, and what to say then, or ""."""
    wanted_min = max(2 * ran_min, 2)
    most = limits.time_min
    if most is None or wanted_min <= most.number:
        return request.changed(time_min=wanted_min), ""
    note = f"asks for {most.number} min, the most that {most.of} allows"
    if ran_min >= most.number:
        note += (
            ", which was too little before: send fewer shards per task (--shards_per_task 1), name another "
        )
        note += "partition or QOS, or make smaller shards"
    return request.changed(time_min=most.number), note


NUM_PROC = r"--num[_-]proc[= ](\d+)"  # in worker_args
_WORTHWHILE = 1.25  # times the memory; with less, a task would fail again


def more_memory(
    request: JobRequest, had_mb: int | None, num_shards: int, limits: Limits
) -> tuple[JobRequest, str]:
    """Return a request with twice the memory, and what to say if it cannot be twice, or "".

    Where a node has no more, tasks of several processes start half as many. A task of ``num_shards`` shards
    has a process for each, up to its CPUs.
    """
    has_all = request.num_cpus is None and not request.names_memory  # --mem=0
    most_mb = limits.max_mem_mb
    wanted_mb = 2 * had_mb if had_mb and not has_all else None
    note = ""
    if wanted_mb and most_mb and wanted_mb > most_mb:
        wanted_mb = max(most_mb, had_mb or 0)
        note = f"asks for {wanted_mb:,} MB, the most that a task can have here"
    if wanted_mb and wanted_mb != had_mb:
        if request.mem_per_cpu_gb is None:
            request = request.changed(mem_gb=round(wanted_mb / 1024, 3))
        else:
            request = request.changed(mem_per_cpu_gb=round(wanted_mb / 1024 / (request.num_cpus or 1), 3))
    if had_mb and wanted_mb and wanted_mb >= _WORTHWHILE * had_mb:
        return request, note
    if not (has_all or had_mb):
        return request, "Slurm names no memory limit of this task: --mem_gb asks for more"
    given = re.findall(NUM_PROC, request.worker_args)
    num_processes = min(num_shards, request.num_cpus or limits.max_cpus or 1)
    if given:
        num_processes = int(given[-1])
    size = f"a node has no more than {most_mb:,} MB" if most_mb else "the task has all memory of its node"
    if num_processes > 1:
        fewer = num_processes // 2
        others = re.sub(NUM_PROC, "", request.worker_args).strip()
        request = request.changed(worker_args=f"{others} --num_proc {fewer}".strip())
        return request, f"{size}: starts {counted(fewer, 'process')} in place of {num_processes}"
    larger = sorted(limits.larger_nodes.items(), key=lambda item: -item[1])
    where = (
        f"--partition {larger[0][0]} has nodes of {larger[0][1]:,} MB" if larger else "name another partition"
    )
    return request, f"{size}, and it was too little: {where}, or make smaller shards"


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


class Site:
    """The limits of each request, asked for once. A dry run without Slurm has none."""

    def __init__(self, config: Mapping[str, str], *, is_needed: bool) -> None:
        """``config``: of the controller, or {}."""
        self._config = config
        self._is_needed = is_needed
        self._known: dict[tuple[tuple[str, ...], bool], Limits] = {}

    def limits(self, request: JobRequest, *, for_memory: bool = False) -> Limits:
        """Return the limits for a request's partition, account and QOS. Raises as ``slurm_answer`` does.

        ``for_memory``: those of memory, too, even if the request names none.
        """
        key = tuple(options_of(TASKS, request.changed(**_NO_SIZES)))
        has_memory = for_memory or request.names_memory
        if (key, has_memory) not in self._known:
            try:
                limits = find_limits(request, self._config, has_memory=has_memory)
            except SlurmAway:
                if self._is_needed:
                    raise
                limits = Limits()
            self._known[key, has_memory] = limits
            self._known[key, False] = limits
        limits = self._known[key, has_memory]
        if limits.elsewhere and _is_above(request, limits):
            return limits.elsewhere
        return limits


def _is_above(request: JobRequest, limits: Limits) -> bool:
    """Return whether a request exceeds the time or memory of the default partition."""
    mem_mb = memory_mb(request)
    is_long = request.time_min and limits.time_min and request.time_min > limits.time_min.number
    is_large = mem_mb and limits.mem_mb and mem_mb > limits.mem_mb.number
    return bool(is_long or is_large)


_NO_SIZES: Mapping[str, int | None] = {
    "cpus_per_task": 1,
    "mem_gb": None,
    "mem_per_cpu_gb": None,
    "time_min": None,
}
