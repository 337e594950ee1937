"""``submit``: which shards go to Slurm, in which tasks, with which resources.

First everything is checked and every script is rendered, once: what ``--dry_run`` prints is what
``Sending.send`` sends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import lustre
from preprocess.cost_estimate import estimate_of
from preprocess.done_shards import find_made_shards
from shardprep.errors import ShardprepError
from shardprep.format.names import id_ranges
from slurm.cluster_limits import (
    ClusterLimits,
    check_folder,
    check_request,
    find_limits,
    find_partition_limits,
    tasks_of_shards,
)
from slurm.dataset_state import DatasetState, find_state
from slurm.job_records import JOBS_FOLDER
from slurm.job_script import (
    JobRequest,
    array_script,
    job_names,
    prep_script,
    quoted,
    settings_of,
    verify_script,
)
from slurm.resource_use import advice_of_makings, advice_of_plan, within
from slurm.sending import ArrayToSend, Sending
from slurm.slurm_commands import SlurmAway, SlurmRefused

Group = tuple[JobRequest, list[int]]  # shards that are asked for in the same way


def prepare_submit(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    shard_ids: Container[int] | None = None,
    sources: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> tuple[DatasetState, Sending | None]:
    """Check everything and choose the missing shards that are not queued; None where there are none.

    ``shard_ids``: no others, and these also where it cannot be seen whether they run. A dry run only says so
    where Slurm gives no answer, and goes on without what Slurm would know.
    """
    plan = check_folder(folder, request, say)
    state = find_state(folder, plan, if_away=_warn(say) if dry_run else None)
    check_recorded(state)
    if queued := state.ids("running", "pending"):
        say(f"{len(queued)} shards wait or run already: {id_ranges(queued)}")
    missing = state.ids("failed", "not submitted")
    unseen = state.ids("not visible")
    if shard_ids is not None or (dry_run and state.shown.away):
        missing, unseen = sorted([*missing, *unseen]), []
    if unseen:
        say(
            f"left out: {len(unseen)} shards may wait or run where it cannot be seen from here "
            f"({state.why_not_visible()}); if they do not: --shards {id_ranges(unseen)}"
        )
    if shard_ids is not None:
        missing = [shard_id for shard_id in missing if shard_id in shard_ids]
    if not missing:
        return state, None
    for line in _room_lines(state, missing):
        say(line)
    groups = [(request, missing)]
    return state, prepare(state, groups, shards_per_task, say, sources=sources, dry_run=dry_run)


def _room_lines(state: DatasetState, shard_ids: Sequence[int]) -> list[str]:
    """What these shards need against quotas and free space; empty off Lustre, where nothing is asked.

    The need is measured on a sample of the input, as planning did: a second or two of CPU. Never raises.
    """
    if lustre.why_not_usable(state.folder):
        return []
    try:
        whole = estimate_of(state.plan, state.folder).output_bytes
    except (ShardprepError, OSError) as error:
        return [f"note: whether the shards will fit cannot be told: {error}"]
    sizes = state.plan.shard_bytes()
    part = sum(sizes[shard_id] for shard_id in shard_ids) / max(1, sum(sizes))
    need = lustre.Need(num_bytes=round(whole * part), num_files=3 * len(shard_ids))
    return lustre.space_lines(state.folder, need)


def check_recorded(state: DatasetState) -> None:
    """Raises SlurmRefused where jobs run of which nobody can say what they make: it would be made twice."""
    if state.shown.unrecorded:
        raise SlurmRefused(
            f"jobs {', '.join(state.shown.unrecorded)} of this data set wait or run, and no file in "
            f"{state.folder / JOBS_FOLDER} says which shards they make (was it emptied?); wait until they "
            f"have ended, or end them: shardprep cancel {quoted(state.folder)}"
        )


def prepare(
    state: DatasetState,
    groups: Sequence[Group],
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    sources: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Sending:
    """Preflight of every group against the site. Writes and submits nothing."""
    if_away = _warn(say) if dry_run else None
    body, folder = prep_script(), state.folder
    name, verify_name = job_names(folder, state.plan.plan_id, state.next_number)
    arrays: list[ArrayToSend] = []
    cluster = ""
    for request, shard_ids in groups:
        limits = _limits(request, if_away)
        per_task = shards_per_task
        if request.num_cpus is None and limits and per_task is None:  # a process on each of the node's CPUs
            partition = find_partition_limits(request)
            per_task = partition.max_cpus if partition else None
        tasks = _tasks(shard_ids, limits, len(groups), per_task, say)
        settings = settings_of(request, os.environ, sys.executable)
        script = array_script(folder, name, tasks, request, settings=settings, body=body)
        if limits:
            cluster = limits.cluster
            check_request(request, script, say)
        arrays.append(ArrayToSend(request=request, tasks=tasks, script=script))
    first = groups[0][0]
    settings = settings_of(first, os.environ, sys.executable)
    verify = verify_script(folder, verify_name, state.plan.num_shards, first, settings=settings, body=body)
    return Sending(
        state=state,
        arrays=arrays,
        verify=verify,
        cluster=cluster,
        sources=dict(sources or {}),
    )


def advised(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    has_cpus: bool,
) -> tuple[dict[str, Any], str]:
    """What ``--auto`` asks for: CPUs, memory and time of a task, and what that was taken from.

    ``has_cpus``: the request's CPUs were given; memory and time are then what a task of these needs.
    """
    plan = check_folder(folder, request, say)
    made = find_made_shards(folder, plan).done
    limits = _limits(request, _warn(say))
    num_left = plan.num_shards - len(made)
    most = limits.max_tasks if limits else num_left
    partition = find_partition_limits(request) if limits else None
    num_cpus = None
    if has_cpus:
        num_cpus = request.num_cpus or (partition.max_cpus if partition else None)
        if request.num_cpus is None:  # a whole node, which makes a shard on each of its CPUs
            shards_per_task = shards_per_task or num_cpus
    per_task = max(shards_per_task or 1, -(-num_left // max(1, most)), 1)
    if made:
        advice = advice_of_makings(list(made.values()), per_task, num_cpus, partition)
        return within(advice, partition), f"auto: {len(made)} shards that are made"
    try:
        advice = advice_of_plan(plan, folder, per_task, num_cpus, partition)
        return within(advice, partition), "auto: a sample of the input"
    except (ShardprepError, OSError) as error:
        say(f"warning: --auto cannot measure the input from here ({error}); the defaults are taken")
        return {}, ""


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
