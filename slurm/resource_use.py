"""What tasks used of what they asked for, and what to ask for: for ``status`` and for ``submit --auto``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.plan.plan_file import Plan
from shardprep.console import counted, say
from shardprep.errors import ShardprepError
from shardprep.format.done import find_made_shards
from shardprep.format.shard_making import ShardMaking
from slurm.request import JobRequest
from slurm.site import SiteLimits, check_folder
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
    num_cpus = array.request.num_cpus or max(each.num_cpus for each in made)
    num_processes = min(num_cpus, max(len(ids) for ids in array.shards_of_tasks()))
    rss = max(each.max_rss_bytes for each in made)
    longest_s = max(each.wall_s for each in made)
    task_s = max(longest_s, longest_task_s(submission, made))
    return {
        "cpu": round(_cpu_share(made), 2),
        "max_rss_mb": math.ceil(rss / 2**20),
        "num_processes": num_processes,
        "mem_mb": array.mem_mb if num_processes == 1 else None,
        "longest_shard_s": round(longest_s, 1),
        "longest_task_s": round(task_s, 1),
        "time_min": array.time_min,
        "next_time": {
            "cpus_per_task": _fewer(num_cpus, made),
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

    A task counts from its begin to the end of its last shard. Where a manifest does not say when its task
    began (an older one, submitit before Slurm 24.11, ``run``), the time of making the shard alone counts.
    """
    task_s: dict[tuple[str, str, int, int], float] = {}
    used_s = 0.0
    for each in made:
        if each.task is None:
            used_s += each.wall_s * each.num_cpus
        else:
            task_s[each.task] = max(task_s.get(each.task, 0), each.ended - each.task[2])
    used = (used_s + sum(length_s * task[3] for task, length_s in task_s.items())) / 3600
    spans = [each.core_s for each in state.attempts.own if each.ended is not None]
    spans += [float(each["failed_core_s"]) for each in read_events(state.folder) if "failed_core_s" in each]
    failed = sum(spans) / 3600
    return {"used": round(used + failed, 4), "failed": round(failed, 4) if spans else None}


def asked_for(state: DatasetState) -> dict[str, dict[str, Any]]:
    """Of the newest submission: its values that are no defaults, and where each came from."""
    if not state.submissions:
        return {}
    newest = state.submissions[-1]
    request = dataclasses.asdict(newest.arrays[0].request)
    sources = {name: source for name, source in newest.sources.items() if name in request}
    return {name: {"value": request[name], "source": source} for name, source in sources.items()}


class _Work(NamedTuple):
    """What the largest shard takes, by the shards that are made, or by a sample of the input."""

    process_gb: float
    core_s: float  # wall time by the CPUs that it had
    cpu_s: float
    useful_cpus: int  # more of them would have nothing to do
    cpus: int  # to ask for, of one shard


def advised(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    limits: SiteLimits | None,
    *,
    has_cpus: bool,
) -> tuple[dict[str, Any], str]:
    """What ``--auto`` asks for: CPUs, memory and time of a task, and what that was taken from.

    ``has_cpus``: the request's CPUs were given; memory and time are then what a task of these needs.
    """
    plan = check_folder(folder, request)
    made = list(find_made_shards(folder, plan.spec).done.values())
    num_cpus = None
    if has_cpus:
        num_cpus = request.num_cpus or (limits.max_cpus if limits else None)
        if request.num_cpus is None:  # a whole node, which makes a shard on each of its CPUs
            shards_per_task = shards_per_task or num_cpus
    per_task = shards_per_task or 1
    if limits:
        per_task = max(per_task, math.ceil((plan.num_shards - len(made)) / max(1, limits.max_tasks)))
    try:
        work = _work_of_makings(made) if made else _work_of_plan(plan, folder)
    except (ShardprepError, OSError) as error:
        say(f"warning: --auto cannot measure the input from here ({error}); the defaults are taken")
        return {}, ""
    source = f"auto: {counted(len(made), 'finished shard')}" if made else "auto: a sample of the input"
    return _advice(work, per_task, num_cpus, limits), source


def _work_of_makings(made: Sequence[ShardMaking]) -> _Work:
    useful_cpus = max(each.num_cpus for each in made)
    return _Work(
        process_gb=max(each.max_rss_bytes for each in made) / 2**30 * _SPARE,
        core_s=max(each.wall_s * each.num_cpus for each in made),
        cpu_s=max(each.cpu_s for each in made),
        useful_cpus=useful_cpus,
        cpus=_fewer(useful_cpus, made),
    )


def _work_of_plan(plan: Plan, folder: Path) -> _Work:
    """A second or two of CPU. Raises what loading the tokenizer and reading the input raise."""
    from preprocess.plan.cost_estimate import estimate_of  # numpy, which status does not need

    cost = estimate_of(plan, folder)
    cpus = max(1, min(cost.num_useful_cores, _MOST_CPUS))
    return _Work(_PROCESS_GB, cost.longest_shard_s, cost.longest_shard_s, cost.num_useful_cores, cpus)


def _advice(
    work: _Work, shards_per_task: int, num_cpus: int | None, limits: SiteLimits | None
) -> dict[str, Any]:
    """CPUs, memory and time of a task, as far as some node of the partition has so much."""
    limits = limits or SiteLimits(cluster="", max_tasks=1)
    if num_cpus is None:
        worth = math.ceil(max(work.cpu_s * shards_per_task, 1) / 60)  # each CPU has a minute of work
        num_cpus = min(work.cpus, worth, limits.max_cpus or work.cpus)
    well_used = min(num_cpus, work.useful_cpus * shards_per_task)
    mem_gb = _quarters(work.process_gb * min(num_cpus, shards_per_task))
    advice = {
        "cpus_per_task": (num_cpus, limits.max_cpus),
        "mem_gb": (mem_gb, (limits.max_mem_mb or 0) / 1024),
        "time_min": (_minutes(work.core_s * shards_per_task / well_used), limits.max_time_min),
    }
    return {name: min(value, most or value) for name, (value, most) in advice.items()}


def _fewer(num_cpus: int, made: Sequence[ShardMaking]) -> int:
    share = _cpu_share(made)
    return max(1, math.ceil(num_cpus * share * 1.2)) if share < 0.5 else num_cpus


def _quarters(gigabytes: float) -> float:
    return max(1, math.ceil(gigabytes * 4)) / 4


def _minutes(seconds: float) -> int:
    return math.ceil(seconds * _SLOWEST / 60) + _START_MIN
