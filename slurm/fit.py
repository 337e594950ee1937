"""Requests of retries, verify and controller, as much of them as the site's limits allow."""

from __future__ import annotations

import math
import re

from shardprep.console import counted
from slurm.limits import Limits
from slurm.request import JobRequest

CONTROLLER_MEM_GB = 1.0
_VERIFIED_BYTES_PER_S = 5e6  # bytes of input, on one slow core


def request_of_small_jobs(request: JobRequest) -> JobRequest:
    """Return the request behind those of verify and controller: in the partition for small jobs."""
    if request.small_partition is None:
        return request
    return request.changed(partition=request.small_partition)


def verify_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a job that verifies all bytes, as much of it as the limits allow."""
    num_cpus = min(4, request.num_cpus or 4, limits.most_cpus or 4)
    num_cpus = max(num_cpus, limits.min_cpus.number if limits.min_cpus else 1)
    small = request.changed(cpus_per_task=num_cpus, max_parallel=1)
    if request.mem_gb is not None:
        small = small.changed(mem_gb=min(request.mem_gb, _most_memory_gb(limits)))
    if request.mem_per_cpu_gb is not None:
        most_gb = _most_memory_gb(limits, num_cpus)
        small = small.changed(mem_per_cpu_gb=min(request.mem_per_cpu_gb, most_gb))
    if request.time_min is None:
        return small
    wanted_min = request.time_min + math.ceil(input_bytes / _VERIFIED_BYTES_PER_S / 60)
    most_min = limits.time_min.number if limits.time_min else wanted_min
    return small.changed(time_min=max(min(wanted_min, most_min), 1))


def _most_memory_gb(limits: Limits, num_cpus: int = 1) -> float:
    """Return the most memory of a job on one node, divided by its CPUs. Whole MB, rounded down."""
    if limits.max_mem_mb is None:
        return math.inf
    return math.floor(limits.max_mem_mb // num_cpus * 1000 / 1024) / 1000


def controller_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a controller: one CPU and 1 GB, in the form that the user's request has.

    Without memory in the request there is none here, unless the site's default is less. A task's own smaller
    memory is not exceeded where a limit says so.
    """
    num_cpus = limits.min_cpus.number if limits.min_cpus else 1
    small = verify_request(request, limits, input_bytes).changed(cpus_per_task=num_cpus)
    mem_gb = min(CONTROLLER_MEM_GB, _most_memory_gb(limits))
    has_less = limits.default_mem_mb is not None and limits.default_mem_mb * num_cpus < 1000 * mem_gb
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
