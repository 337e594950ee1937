"""``submit`` and ``retry``: which shards go to Slurm, with which resources, and what is left out."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.shard_format import NotFound, UsageError, id_ranges
from slurm.cluster_limits import find_limits, find_partition_limits, tasks_of_shards
from slurm.dataset_state import DatasetState, ShardState, find_state
from slurm.failure_causes import BAD_INPUT, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT
from slurm.job_request import JobRequest
from slurm.preflight import check_folder, check_request
from slurm.sbatch_script import array_script, prep_script, settings_of, verify_script
from slurm.submission import Submission, submit_arrays

Group = tuple[JobRequest, list[int]]  # shards that are asked for in the same way


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What one command is about to send: scripts to look at, and the call that sends them."""

    scripts: list[str]
    shard_ids: list[int]
    send: Callable[[], Submission]


def prepare_submit(
    folder: Path, request: JobRequest, shards_per_task: int | None, say: Callable[[str], None]
) -> tuple[DatasetState, Sending | None]:
    """Check everything and choose the missing shards that are not queued; None where there are none."""
    plan = check_folder(folder, request, say)
    state = find_state(folder, plan)
    if queued := state.ids("running", "pending"):
        say(f"{len(queued)} shards wait or run already: {id_ranges(queued)}")
    missing = state.ids("failed", "not submitted")
    if not missing:
        return state, None
    return state, prepare(state, [(request, missing)], shards_per_task, say)


def prepare(
    state: DatasetState, groups: Sequence[Group], shards_per_task: int | None, say: Callable[[str], None]
) -> Sending:
    """Preflight of every group against the site. Writes and submits nothing."""
    folder, body = state.folder, prep_script()
    arrays: list[tuple[JobRequest, list[str]]] = []
    scripts: list[str] = []
    limits = None
    for request, shard_ids in groups:
        limits = find_limits(request)
        # MaxArraySize bounds each array, every other limit all of them together
        most = limits.max_tasks if limits.why == "MaxArraySize" else limits.max_tasks // len(groups)
        tasks = tasks_of_shards(shard_ids, max(1, most), shards_per_task)
        if len(tasks) < -(-len(shard_ids) // (shards_per_task or 1)):
            say(
                f"{len(shard_ids)} shards become {len(tasks)} tasks of up to "
                f"{-(-len(shard_ids) // len(tasks))} shards each, because of {limits.why}"
            )
        settings = settings_of(request, os.environ, sys.executable)
        script = array_script(folder, tasks, request, settings=settings, body=body)
        check_request(request, script)
        scripts.append(script)
        arrays.append((request, tasks))
    assert limits is not None
    cluster, verify_settings = limits.cluster, settings_of(groups[0][0], os.environ, sys.executable)
    scripts.append(verify_script(folder, groups[0][0], settings=verify_settings, body=body))

    def send() -> Submission:
        return submit_arrays(
            folder,
            state.plan,
            arrays,
            settings=verify_settings,
            body=body,
            cluster=cluster,
            wait_for=[job_id for job_id in state.live_job_ids() if not _is_verify(state, job_id)],
        )

    return Sending(scripts=scripts, shard_ids=sorted(i for _, ids in groups for i in ids), send=send)


def prepare_retry(
    state: DatasetState,
    changes: dict[str, Any],
    *,
    max_attempts: int,
    shards_per_task: int | None,
    say: Callable[[str], None],
) -> tuple[list[ShardState], Sending | None]:
    """What is missing and not queued, each as its failure asks; returns the shards left, too.

    ``changes`` are the request's fields that the user gave; they win over what a cause would change.
    """
    if not state.submissions:
        raise NotFound(
            f"nothing was submitted for {state.folder} yet; run: python -m slurm submit {state.folder}"
        )
    if max_attempts < 1:
        raise UsageError(f"--max_attempts is {max_attempts}, expected 1 or more")
    base = state.submissions[-1].arrays[0].request
    limits = find_partition_limits(base.changed(**changes))
    nodes = failing_nodes(state)
    groups: dict[JobRequest, list[int]] = {}
    left = []
    for shard in state.shards:
        if shard.state not in ("failed", "not submitted"):
            continue
        if reason_to_leave(shard, max_attempts, changes):
            left.append(shard)
            continue
        request = retry_request(shard, base, limits.max_mem_mb if limits else 0, nodes).changed(**changes)
        groups.setdefault(request, []).append(shard.shard_id)
    if not groups:
        return left, None
    for request in groups:
        check_folder(state.folder, request, say)
    return left, prepare(state, list(groups.items()), shards_per_task, say)


def reason_to_leave(shard: ShardState, max_attempts: int, changes: dict[str, Any]) -> str | None:
    """Why a shard is not tried again: it failed the same way too often, or must fail the same way."""
    if not shard.attempts:
        return None
    cause, last = shard.cause, shard.attempts[-1].array.request
    same = 0
    for attempt in reversed(shard.attempts):
        if attempt.cause != cause:
            break
        same += 1
    if cause == BAD_INPUT and changes.get("worker_args", last.worker_args) == last.worker_args:
        return "the same input fails in the same way"
    return f"failed the same way {same} times" if same >= max_attempts else None


def retry_request(
    shard: ShardState, base: JobRequest, max_mem_mb: int, failing: Sequence[str] = ()
) -> JobRequest:
    """The last try's request: with twice the memory after OOM, twice the time after TIMEOUT, and
    without nodes that failed repeatedly. Memory stops at the largest node's.
    """
    request = base
    if shard.attempts:
        last = shard.attempts[-1]
        request = last.array.request
        if last.cause == OUT_OF_MEMORY and last.array.mem_mb:
            mem_mb = min(2 * last.array.mem_mb, max_mem_mb or 2 * last.array.mem_mb)
            request = request.changed(mem_gb=round(mem_mb / 1024, 3))
        if last.cause == TIMEOUT and last.array.time_min:
            request = request.changed(time_min=2 * last.array.time_min)
    if failing:
        kept = (request.exclude or "").split(",") if "[" not in (request.exclude or "") else [request.exclude]
        names = dict.fromkeys(str(name) for name in [*kept, *failing] if name)
        request = request.changed(exclude=",".join(names))
    return request


def failing_nodes(state: DatasetState, at_least: int = 2) -> list[str]:
    """Nodes that took ``at_least`` tasks of this data set down with them."""
    counts = Counter(
        run.node for runs in state.runs.values() for run in runs if run.state == NODE_FAIL and run.node
    )
    return sorted(node for node, number in counts.items() if number >= at_least)


def _is_verify(state: DatasetState, job_id: str) -> bool:
    return any(submission.verify_job_id == job_id for submission in state.submissions)
