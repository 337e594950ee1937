"""``submit`` and ``retry``: which shards go to Slurm, with which resources, and what is left out."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.id_ranges import id_ranges

from shardprep.errors import NotFound, UsageError
from slurm.cluster_limits import (
    ClusterLimits,
    check_folder,
    check_request,
    find_limits,
    find_partition_limits,
    tasks_of_shards,
)
from slurm.dataset_state import (
    BAD_INPUT,
    NODE_FAIL,
    OUT_OF_MEMORY,
    TIMEOUT,
    DatasetState,
    ShardState,
    find_state,
)
from slurm.job_script import JobRequest, array_script, prep_script, settings_of, verify_script
from slurm.slurm_commands import SlurmAway
from slurm.submission import ArrayToSend, Submission, submit_arrays

Group = tuple[JobRequest, list[int]]  # shards that are asked for in the same way


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What one command is about to send, rendered once: to look at, or to send as it is."""

    state: DatasetState
    arrays: list[ArrayToSend]
    verify: str  # script of the verify job
    cluster: str

    @property
    def scripts(self) -> list[str]:
        return [*(array.script for array in self.arrays), self.verify]

    def send(self) -> Submission:
        """Submit it. Raises what ``submit_arrays`` raises."""
        state = self.state
        return submit_arrays(
            state.folder,
            state.plan,
            self.arrays,
            self.verify,
            cluster=self.cluster,
            wait_for=[job_id for job_id in state.live_job_ids() if not _is_verify(state, job_id)],
        )


def prepare_submit(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> tuple[DatasetState, Sending | None]:
    """Check everything and choose the missing shards that are not queued; None where there are none.

    A dry run only says so where Slurm gives no answer, and goes on without what Slurm would know.
    """
    plan = check_folder(folder, request, say)
    state = find_state(folder, plan, if_away=_warn(say) if dry_run else None)
    if queued := state.ids("running", "pending"):
        say(f"{len(queued)} shards wait or run already: {id_ranges(queued)}")
    missing = state.ids("failed", "not submitted")
    if not missing:
        return state, None
    return state, prepare(state, [(request, missing)], shards_per_task, say, dry_run=dry_run)


def prepare(
    state: DatasetState,
    groups: Sequence[Group],
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> Sending:
    """Preflight of every group against the site. Writes and submits nothing."""
    if_away = _warn(say) if dry_run else None
    body, plan_id = prep_script(), state.plan.plan_id
    arrays: list[ArrayToSend] = []
    cluster = ""
    for request, shard_ids in groups:
        limits = _limits(request, if_away)
        tasks = _tasks(shard_ids, limits, len(groups), shards_per_task, say)
        settings = settings_of(request, os.environ, sys.executable)
        script = array_script(state.folder, plan_id, tasks, request, settings=settings, body=body)
        if limits:
            cluster = limits.cluster
            check_request(request, script)
        arrays.append(ArrayToSend(request=request, tasks=tasks, script=script))
    first = groups[0][0]
    settings = settings_of(first, os.environ, sys.executable)
    verify = verify_script(state.folder, plan_id, first, settings=settings, body=body)
    return Sending(state=state, arrays=arrays, verify=verify, cluster=cluster)


def _limits(request: JobRequest, if_away: Callable[[SlurmAway], None] | None) -> ClusterLimits | None:
    """The site's limits; None where Slurm gives no answer and ``if_away`` was told so."""
    try:
        return find_limits(request)
    except SlurmAway as error:
        if if_away is None:
            raise
        if_away(error)
        return None


def _warn(say: Callable[[str], None]) -> Callable[[SlurmAway], None]:
    return lambda error: say(
        f"warning: {error}. What is queued, and what this site allows, is left out of this dry run"
    )


def _tasks(
    shard_ids: Sequence[int],
    limits: ClusterLimits | None,
    num_groups: int,
    shards_per_task: int | None,
    say: Callable[[str], None],
) -> list[str]:
    if limits is None:
        return tasks_of_shards(shard_ids, len(shard_ids), shards_per_task)
    # MaxArraySize bounds each array, every other limit all of them together
    most = limits.max_tasks if limits.why == "MaxArraySize" else limits.max_tasks // num_groups
    tasks = tasks_of_shards(shard_ids, max(1, most), shards_per_task)
    if len(tasks) < -(-len(shard_ids) // (shards_per_task or 1)):
        say(
            f"{len(shard_ids)} shards become {len(tasks)} tasks of up to "
            f"{-(-len(shard_ids) // len(tasks))} shards each, because of {limits.why}"
        )
    return tasks


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
