"""What was sent to Slurm again, and why: how the task ended that was to make a shard before."""

from __future__ import annotations

from typing import Any

from shardprep.format.names import id_ranges
from slurm.dataset_state import DatasetState
from slurm.failure_causes import cause_of, log_tail
from slurm.job_records import JobArray, Submission

_MOST_LOGS = 1000  # that are read
NOT_LOOKED_AT = "not looked at"


def submissions_of(state: DatasetState) -> list[dict[str, Any]]:
    """Each submission with what its first array asked for; of its free text (setup, arguments) nothing."""
    found = []
    for submission in state.submissions:
        first = submission.arrays[0]
        ids = [shard for array in submission.arrays for ids in array.shards_of_tasks() for shard in ids]
        found.append(
            {
                "number": submission.number,
                "submitted": submission.submitted,
                "num_tasks": sum(len(array.tasks) for array in submission.arrays),
                "num_shards": len(ids),
                "job_ids": [array.job_id for array in submission.arrays],
                "partition": first.request.partition,
                "cpus_per_task": first.request.cpus_per_task,
                "mem_mb": first.mem_mb,
                "time_min": first.time_min,
            }
        )
    return found


def retried_shards(state: DatasetState) -> list[dict[str, Any]]:
    """By cause, the most frequent first: the shards that were sent again after a task that ended so."""
    last: dict[int, tuple[Submission, JobArray, int]] = {}
    causes: dict[str, set[int]] = {}
    logs: dict[tuple[str, int], str] = {}
    for submission in state.submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                for shard_id in shard_ids:
                    if shard_id in last and last[shard_id][0] is not submission:
                        cause = _cause(state, last[shard_id], shard_id, logs)
                        causes.setdefault(cause, set()).add(shard_id)
                    last[shard_id] = (submission, array, index)
    return [
        {"cause": cause, "num_shards": len(ids), "shards": id_ranges(ids)}
        for cause, ids in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _cause(
    state: DatasetState,
    task: tuple[Submission, JobArray, int],
    shard_id: int,
    logs: dict[tuple[str, int], str],
) -> str:
    submission, array, index = task
    key = (array.job_id, index)
    if key not in logs:
        if len(logs) >= _MOST_LOGS:
            return NOT_LOOKED_AT
        logs[key] = log_tail(state.folder, *key)
    attempts = state.task_attempts.get((submission.number, *key))
    return cause_of(attempts[-1] if attempts else None, logs[key], shard_id, array.request.sbatch_args)
