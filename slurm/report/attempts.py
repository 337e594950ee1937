"""What was submitted to Slurm, what tasks used of what they asked for, and what was sent again and why.

The report asks ``attempts_of`` alone; nothing else of it reads records of submissions, logs, or Slurm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from preprocess.plan.plan_file import Plan
from shardprep.format.names import id_ranges
from shardprep.format.shard_making import ShardMaking
from slurm.dataset_state import DatasetState, find_state
from slurm.failure_causes import cause_of, log_tail, node_of
from slurm.job_records import JobArray, Submission, has_submissions
from slurm.resource_use import longest_task_s
from slurm.slurm_queries import TaskAttempt
from slurm.status_report import report as status_of

_MOST_LOGS = 1000  # that are read for why shards were sent again
_NOT_LOOKED_AT = "not looked at"


def attempts_of(folder: Path, plan: Plan, made: Sequence[ShardMaking]) -> dict[str, dict[str, Any]]:
    """The report's ``attempts`` and, of its ``use``, what the manifests do not say.

    Slurm is asked only where something was submitted.
    """
    if not has_submissions(folder):
        lists: dict[str, Any] = {"submissions": [], "retried": []}
        attempts = {**lists, "restarts": {}, "failed": {}, "failed_tasks_of_nodes": {}, "slurm_away": ""}
        used = sum(each.wall_s * each.num_cpus for each in made) / 3600
        hours = {"used": round(used, 4), "failed": None}
        return {"attempts": attempts, "use": {"core_hours": hours, "newest_submission": {}}}
    state = find_state(folder, plan, if_away=lambda _: None)
    status = status_of(state, made)
    return {
        "attempts": {
            "submissions": [_submission(state, submission, made) for submission in state.submissions],
            "retried": _retried_shards(state),
            "restarts": status["restarts"],
            "failed": status["causes"],
            "failed_tasks_of_nodes": _failed_tasks_of_nodes(state),
            "slurm_away": status["slurm_away"],
        },
        "use": {"core_hours": status["core_hours"], "newest_submission": status["efficiency"]},
    }


def _submission(state: DatasetState, submission: Submission, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """What it asked for and what its tasks used; of its free text (setup, arguments) nothing.

    A retry may ask for other memory and time in each of its arrays: the most of them is told.
    """
    tasks = [shards for array in submission.arrays for shards in array.shards_of_tasks()]
    request = submission.arrays[0].request
    attempts = list(_ended_attempts(state, submission))
    own = [each.max_rss_bytes for each in made if submission.made(each)]
    seen = max([each.max_rss_bytes for each in attempts] + own, default=0)
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
        "num_failed_tasks": sum(each.state != "COMPLETED" for each in attempts) if attempts else None,
        "max_rss_mb": math.ceil(seen / 2**20) if seen else None,
        "longest_task_s": max(
            [longest_task_s(submission, made), *(float(each.elapsed_s) for each in attempts)]
        )
        or None,
    }


def _most(values: Sequence[int | None]) -> int | None:
    """The largest; None, which is no limit, where one of them is None."""
    numbers = [value for value in values if value]
    return max(numbers) if len(numbers) == len(values) else None


def _ended_attempts(state: DatasetState, submission: Submission) -> Iterator[TaskAttempt]:
    """All ended starts of its tasks that Slurm still knows, without its verify job."""
    job_ids = {array.job_id for array in submission.arrays}
    for (number, job_id, _), attempts in state.task_attempts.items():
        if number == submission.number and job_id in job_ids:
            yield from (each for each in attempts if not each.is_live)


def _failed_tasks_of_nodes(state: DatasetState) -> dict[str, int]:
    """Node -> ended starts of tasks on it that did not complete, as far as Slurm knows them."""
    return Counter(
        each.node
        for submission in state.submissions
        for each in _ended_attempts(state, submission)
        if each.state != "COMPLETED" and node_of(each, "") == each.node != ""
    )


def _retried_shards(state: DatasetState) -> list[dict[str, Any]]:
    """By cause, the most frequent first: the shards that were sent again after a task that ended so."""
    last: dict[int, tuple[Submission, JobArray, int]] = {}
    causes: dict[str, set[int]] = {}
    nodes: dict[str, Counter[str]] = {}
    ends: dict[tuple[str, int], tuple[TaskAttempt | None, str]] = {}
    for submission in state.submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                for shard_id in shard_ids:
                    if shard_id in last and last[shard_id][0] is not submission:
                        cause, node = _cause_and_node(state, last[shard_id], shard_id, ends)
                        causes.setdefault(cause, set()).add(shard_id)
                        nodes.setdefault(cause, Counter()).update([node] if node else [])
                    last[shard_id] = (submission, array, index)
    return [
        {"cause": cause, "num_shards": len(ids), "shards": id_ranges(ids), "nodes": dict(nodes[cause])}
        for cause, ids in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _cause_and_node(
    state: DatasetState,
    task: tuple[Submission, JobArray, int],
    shard_id: int,
    ends: dict[tuple[str, int], tuple[TaskAttempt | None, str]],
) -> tuple[str, str]:
    """Why a task ended, and on which node, by Slurm and its log; each log is read once."""
    submission, array, index = task
    key = (array.job_id, index)
    if key not in ends:
        if len(ends) >= _MOST_LOGS:
            return _NOT_LOOKED_AT, ""
        attempts = state.task_attempts.get((submission.number, *key))
        ends[key] = (attempts[-1] if attempts else None, log_tail(state.folder, *key))
    attempt, log = ends[key]
    return cause_of(attempt, log, shard_id, array.request.sbatch_args), node_of(attempt, log)
