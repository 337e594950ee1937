"""What tasks used of what they asked for, and what to ask for: for ``status`` and for ``submit --auto``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preprocess.plan.plan_file import Plan
from shardprep.format.shard_making import ShardMaking
from slurm.site import PartitionLimits
from slurm.state import DatasetState
from slurm.submissions import Submission, read_events

_PROCESS_GB = 1.0  # a worker has 0.4 GB with Llama 3's vocabulary; the rest is for what nobody foresaw
_SPARE = 1.25  # of memory
_SLOWEST = 2.0  # how much longer than the longest a task may take
_START_MIN = 5
_MOST_CPUS = 64  # of a task, unless somebody asks for more


def resource_use(state: DatasetState, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """What the newest submission used of what it asked for, by the manifests, and what to ask for next time.

    Memory is the largest process's: a task of several processes needs more, how much nobody measured. It is
    compared with what was asked for only where a task is one process.
    """
    if not state.submissions or not made:
        return {}
    submission = state.submissions[-1]
    array = submission.arrays[0]
    cpu = _cpu_share(made)
    num_cpus = array.request.num_cpus or max(each.num_cpus for each in made)
    shards_per_task = max(len(ids) for ids in array.shards_of_tasks())
    rss = max(each.max_rss_bytes for each in made)
    num_processes = min(num_cpus, shards_per_task)
    longest_s = max(each.wall_s for each in made)
    task_s = max(longest_s, longest_task_s(submission, made))
    return {
        "cpu": round(cpu, 2),
        "max_rss_mb": math.ceil(rss / 2**20),
        "num_processes": num_processes,
        "mem_mb": array.mem_mb if num_processes == 1 else None,
        "longest_shard_s": round(longest_s, 1),
        "longest_task_s": round(task_s, 1),
        "time_min": array.time_min,
        "next_time": {
            "cpus_per_task": _fewer(num_cpus, cpu),
            "mem_gb": _quarters(rss * num_processes / 2**30 * _SPARE),
            "time_min": _minutes(task_s),
        },
    }


def _cpu_share(made: Sequence[ShardMaking]) -> float:
    """Of the CPU time that the shards' processes could have used."""
    timed = [each for each in made if each.wall_s > 0]
    return sum(each.cpu_s for each in timed) / max(sum(each.wall_s * each.num_cpus for each in timed), 1e-3)


def longest_task_s(submission: Submission, made: Sequence[ShardMaking]) -> float:
    """The longest time from the first to the last shard of one task of a submission, by the manifests."""
    of_shard = {each.shard_id: each for each in made if submission.made(each)}
    spans = []
    for array in submission.arrays:
        for shard_ids in array.shards_of_tasks():
            own = [of_shard[shard_id] for shard_id in shard_ids if shard_id in of_shard]
            if own:
                share = len(shard_ids) / len(own)  # of a task that has not made all of them yet
                spans.append(share * (max(each.ended for each in own) - min(each.began for each in own)))
    return max(spans, default=0.0)


def core_hours(state: DatasetState, made: Sequence[ShardMaking]) -> dict[str, float | None]:
    """Of the shards that are done, by their manifests, and of the failed attempts, by records and history.

    The start of a task is in neither: Slurm's accounts say more.
    """
    used = sum(each.wall_s * each.num_cpus for each in made) / 3600
    spans = [each.core_s for each in state.attempts.own if each.ended is not None]
    spans += [float(each["failed_core_s"]) for each in read_events(state.folder) if "failed_core_s" in each]
    failed = sum(spans) / 3600
    return {"used": round(used + failed, 4), "failed": round(failed, 4) if spans else None}


def asked_for(state: DatasetState) -> dict[str, dict[str, Any]]:
    """Of the newest submission: its values that are no defaults, and where each came from."""
    if not state.submissions:
        return {}
    submission = state.submissions[-1]
    request = dataclasses.asdict(submission.arrays[0].request)
    return {
        name: {"value": request[name], "source": source}
        for name, source in submission.sources.items()
        if name in request
    }


def advice_of_makings(
    made: Sequence[ShardMaking],
    shards_per_task: int,
    num_cpus: int | None = None,
    partition: PartitionLimits | None = None,
) -> dict[str, Any]:
    """CPUs, memory and time of a task, by the shards that were made already.

    ``num_cpus``: of a task, where somebody has chosen them.
    """
    num_cpus = num_cpus or _at_most(
        min(
            _fewer(max(each.num_cpus for each in made), _cpu_share(made)),
            _worth_cpus(max(each.cpu_s for each in made) * shards_per_task),
        ),
        partition,
    )
    num_processes = min(num_cpus, shards_per_task)
    rss_gb = max(each.max_rss_bytes for each in made) / 2**30
    num_well_used = min(num_cpus, max(each.num_cpus for each in made) * shards_per_task)
    longest_s = max(each.wall_s * each.num_cpus for each in made) / num_well_used
    return {
        "cpus_per_task": num_cpus,
        "mem_gb": _quarters(rss_gb * num_processes * _SPARE),
        "time_min": _minutes(longest_s * shards_per_task),
    }


def advice_of_plan(
    plan: Plan,
    folder: Path,
    shards_per_task: int,
    num_cpus: int | None = None,
    partition: PartitionLimits | None = None,
) -> dict[str, Any]:
    """CPUs, memory and time of a task, by a sample of the input, as ``plan`` measures it: a second or two.

    ``num_cpus``: of a task, where somebody has chosen them.
    Raises what loading the tokenizer and reading the input raise.
    """
    from preprocess.plan.cost_estimate import estimate_of  # numpy, which status does not need

    cost = estimate_of(plan, folder)
    num_cpus = num_cpus or _at_most(
        max(1, min(cost.num_useful_cores, _MOST_CPUS, _worth_cpus(cost.longest_shard_s * shards_per_task))),
        partition,
    )
    num_well_used = min(num_cpus, cost.num_useful_cores * shards_per_task)
    return {
        "cpus_per_task": num_cpus,
        "mem_gb": _PROCESS_GB * min(num_cpus, shards_per_task),
        "time_min": _minutes(cost.longest_shard_s * shards_per_task / num_well_used),
    }


def _worth_cpus(cpu_s: float) -> int:
    """As many CPUs as leave each of them a minute of a task's work."""
    return math.ceil(max(cpu_s, 1) / 60)


def _at_most(num_cpus: int, partition: PartitionLimits | None) -> int:
    return min(num_cpus, partition.max_cpus or num_cpus) if partition else num_cpus


def within(advice: dict[str, Any], partition: PartitionLimits | None) -> dict[str, Any]:
    """The advice, as far as some node of the partition has so much."""
    if partition is None:
        return advice
    most = {
        "cpus_per_task": partition.max_cpus,
        "mem_gb": partition.max_mem_mb / 1024,
        "time_min": partition.max_time_min,
    }
    return {name: min(value, most[name] or value) for name, value in advice.items()}


def _fewer(num_cpus: int, share: float) -> int:
    return max(1, math.ceil(num_cpus * share * 1.2)) if share < 0.5 else num_cpus


def _quarters(gigabytes: float) -> float:
    return max(1, math.ceil(gigabytes * 4)) / 4


def _minutes(seconds: float) -> int:
    return math.ceil(seconds * _SLOWEST / 60) + _START_MIN
