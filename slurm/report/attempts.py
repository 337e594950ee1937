"""What was submitted to Slurm, what tasks used of what they asked for, and what was sent again and why.

The report asks ``attempts_of`` alone; nothing else of it reads records of submissions, logs, or Slurm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preprocess.done_shards import MadeShards, read_findings
from preprocess.plan import Plan
from shardprep.format.names import id_ranges, ids_of_ranges
from shardprep.format.shard_making import ShardMaking
from slurm.dataset_state import DatasetState, find_state
from slurm.job_records import Submission, read_events
from slurm.resource_use import longest_task_s
from slurm.status_report import report as status_of


def attempts_of(folder: Path, plan: Plan, made: Sequence[ShardMaking]) -> dict[str, dict[str, Any]]:
    """The report's ``attempts`` and, of its ``use``, what the manifests do not say."""
    done = {each.shard_id: each for each in made}
    wrong = read_findings(folder, plan.plan_id)
    known = MadeShards(done=done, tar_bytes={}, wrong=wrong, other_plan=[], broken={})
    state = find_state(folder, plan, if_away=lambda _: None, made=known)
    status = status_of(state)
    return {
        "attempts": {
            "submissions": [_submission(state, submission, made) for submission in state.submissions],
            "retried": _retried_shards(state),
            "restarts": status["restarts"],
            "failed": status["causes"],
            "failed_tasks_of_nodes": _failed_tasks_of_nodes(state),
            "slurm_away": status["slurm_away"] if status["has_jobs"] else "",
        },
        "use": {"core_hours": status["core_hours"], "newest_submission": status["efficiency"]},
    }


def _submission(state: DatasetState, submission: Submission, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """What it asked for and what its tasks used; of its free text (setup, arguments) nothing.

    A retry may ask for other memory and time in each of its arrays: the most of them is told.
    """
    tasks = [shards for array in submission.arrays for shards in array.shards_of_tasks()]
    request = submission.arrays[0].request
    failed = [
        each for each in state.attempts.own if each.job_id in {array.job_id for array in submission.arrays}
    ]
    peaks = [each.peak_bytes for each in failed if each.peak_bytes]
    seen = max([each.max_rss_bytes for each in made if submission.made(each)] + peaks, default=0)
    return {
        "number": submission.number,
        "submitted": submission.submitted,
        "num_tasks": len(tasks),
        "num_shards": sum(map(len, tasks)),
        "job_ids": [array.job_id for array in submission.arrays],
        "partition": request.partition,
        "cpus_per_task": request.cpus_per_task,
        "mem_mb": _most([array.mem_mb for array in submission.arrays]),
        "time_min": _most([array.time_min for array in submission.arrays]),
        "num_failed_tasks": sum(each.ended is not None for each in failed),
        "max_rss_mb": math.ceil(seen / 2**20) if seen else None,
        "longest_task_s": longest_task_s(submission, made) or None,
    }


def _most(values: Sequence[int | None]) -> int | None:
    """The largest; None, which is no limit, where one of them is None."""
    numbers = [value for value in values if value]
    return max(numbers) if len(numbers) == len(values) else None


def _failed_tasks_of_nodes(state: DatasetState) -> dict[str, int]:
    """Node -> attempts on it that ended and left shards unmade."""
    return Counter(each.node for each in state.attempts.own if each.ended is not None and each.node)


def _retried_shards(state: DatasetState) -> list[dict[str, Any]]:
    """By cause, the most frequent first: the shards that were sent again after an attempt that ended so."""
    shards: dict[str, set[int]] = {}
    nodes: dict[str, Counter[str]] = {}
    for event in read_events(state.folder):
        for cause, found in event.get("causes", {}).items():
            shards.setdefault(cause, set()).update(ids_of_ranges(found["shards"]))
            nodes.setdefault(cause, Counter()).update(found["nodes"])
    return [
        {"cause": cause, "num_shards": len(ids), "shards": id_ranges(ids), "nodes": dict(nodes[cause])}
        for cause, ids in sorted(shards.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
