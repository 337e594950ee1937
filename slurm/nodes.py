"""What whole nodes cost, and requests that use all of them.

Where a partition gives whole nodes only, a task of one CPU is charged as a node. So tasks get all CPUs of
their node, and as many shards as it has CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from shardprep.console import say
from shardprep.format.manifest import Manifest
from slurm.limits import Limits
from slurm.request import JobRequest

_SLOW_BYTES_PER_S = 2e6  # of input, of a core whose speed is not known
_TIMES_LONGER = 2  # than it should take, as a time limit
_START_MIN = 10
_SHORT_MIN = 10  # of a job; its start takes a part of that


def on_whole_nodes(
    request: JobRequest,
    limits: Limits,
    sizes: Sequence[int],
    shard_ids: Collection[int],
    made: Iterable[Manifest],
) -> JobRequest:
    """Return a request that uses all of each node that it is charged for, with a time limit for --nodes.

    ``sizes``: bytes of input of each shard of the plan. ``shard_ids``: those to make. ``made``: shards that
    tell the speed.
    """
    num_cpus = limits.min_cpus_of_nodes
    if limits.is_exclusive and request.num_cpus and request.num_cpus < (limits.max_cpus or 1):
        say(
            f"note: the partition gives whole nodes only, so each task uses all {limits.max_cpus} CPUs of a "
            "node, as --cpus_per_task node does; another partition for verify and controller: "
            "--small_partition NAME"
        )
        request = request.changed(cpus_per_task="node", mem_gb=None)
    if request.nodes is None:
        return request
    num_nodes = min(request.nodes, len(shard_ids))
    if num_nodes < request.nodes:
        request = request.changed(nodes=num_nodes)
    if request.time_min is None and num_cpus:
        needed_s = _seconds(sizes, shard_ids, num_nodes * num_cpus, made)
        time_min = _START_MIN + math.ceil(_TIMES_LONGER * needed_s / 60)
        if limits.time_min:
            time_min = min(time_min, limits.time_min.number)
        request = request.changed(time_min=time_min)
    return request


def _seconds(
    sizes: Sequence[int], shard_ids: Collection[int], num_cores: int, made: Iterable[Manifest]
) -> float:
    """Return how long cores take for shards: together, and for the longest one alone."""
    known = list(made)
    core_s = sum(each.run.wall_s * each.run.num_cpus for each in known)
    num_bytes = sum(each.counts.input_bytes for each in known)
    bytes_per_s = _SLOW_BYTES_PER_S
    if core_s and num_bytes:
        bytes_per_s = num_bytes / core_s
    wanted = [sizes[shard_id] for shard_id in shard_ids]
    return max(sum(wanted) / num_cores, max(wanted)) / bytes_per_s


def nodes_note(
    request: JobRequest,
    limits: Limits,
    sizes: Sequence[int],
    tasks: Sequence[Collection[int]],
    made: Iterable[Manifest],
    *,
    is_cut: bool,
) -> str:
    """Return advice to send one job of whole nodes in place of few or short jobs, or "".

    ``tasks``: the shards of each. ``is_cut``: Slurm refused more of them.
    """
    num_cpus = limits.min_cpus_of_nodes
    has_short_jobs = request.num_cpus is None
    if request.nodes or len(tasks) == 1 or not num_cpus or not (is_cut or has_short_jobs):
        return ""
    known = list(made)
    longest_s = max(_seconds(sizes, shard_ids, num_cpus, known) for shard_ids in tasks)
    num_nodes = math.ceil(len(tasks) * longest_s / 60 / _SHORT_MIN)
    if limits.max_nodes:
        num_nodes = min(num_nodes, limits.max_nodes.number)
    advice = f"one job makes all shards: --nodes {num_nodes}"
    if is_cut:
        return f"note: Slurm takes no more than {len(tasks)} jobs here; {advice}"
    if longest_s > 60 * _SHORT_MIN:
        return ""
    minutes = math.ceil(longest_s / 60)
    return f"note: {len(tasks)} jobs of a whole node take about {minutes} min each; {advice}"


def node_hours(request: JobRequest, num_tasks: int, time_min: int) -> float:
    """Return the most node-hours that tasks on whole nodes are billed."""
    return num_tasks * (request.nodes or 1) * time_min / 60
