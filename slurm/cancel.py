"""``cancel``: the jobs of a data set that wait or run, or the tasks of some shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from shardprep.console import print_lines, say, shards_text
from shardprep.errors import ShardprepError, UsageError
from shardprep.format.names import id_ranges
from shardprep.format.plan import need_plan
from slurm.commands import SlurmRefused, slurm_output, user_name
from slurm.state import DatasetState, chosen_shards, find_state
from slurm.submissions import append_event


def cancel(args: argparse.Namespace) -> int:
    """``cancel DATA``: every job of this data set that waits or runs. Shards that are done stay done."""
    state = find_state(args.output_dir, need_plan(args.output_dir))
    if args.shards is not None:
        return _cancel_shards(args, state)
    live, here = state.live_jobs(), state.queue.cluster
    unrecorded = [*state.queue.controllers, *state.queue.strays, *state.queue.unrecorded]
    if unrecorded:  # first, as a controller would send again what is cancelled
        live[here] = [*unrecorded, *live.get(here, [])]
    _warn_of_own_task([job_id for job_ids in live.values() for job_id in job_ids])
    failed: list[ShardprepError] = []
    for cluster, job_ids in live.items():
        try:
            _scancel(state, job_ids, None if cluster == here else cluster)
        except ShardprepError as error:  # the other cluster's end all the same
            failed.append(error)
    if failed:
        raise failed[0]
    cancelled = [*state.live_job_ids(), *unrecorded]
    if cancelled:
        append_event(args.output_dir, "cancel", jobs=cancelled)
    if state.queue.foreign:
        ids = " ".join(state.queue.foreign)
        say(f"left alone: jobs of the folder that this one was copied from; to end them: scancel {ids}")
    print_lines(f"cancelled: {', '.join(cancelled)}" if cancelled else f"nothing is queued; {state.summary}")
    if unseen := state.ids("not visible"):
        named = shards_text(id_ranges(unseen))
        say(f"warning: {state.why_not_visible()}; {named} may wait or run all the same")
    return 0


def _warn_of_own_task(cancelled: Collection[str]) -> None:
    """Say it before scancel ends this process, too, and with it whatever it would still print."""
    job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
    task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if own := next((each for each in (job_id, task) if each in cancelled), None):
        say(f"warning: this runs in job {own}, which is one of {', '.join(cancelled)}, and ends with it")


def _cancel_shards(args: argparse.Namespace, state: DatasetState) -> int:
    """``--shards``: the tasks that make these shards, and no others in them."""
    wanted = chosen_shards(args.output_dir, args.shards) or set()
    tasks: dict[str, set[int]] = {}
    for shard in state.shards:
        for each in shard.attempts:
            if each.state in ("running", "pending") and "_" in each.task:
                tasks.setdefault(each.task, set()).add(shard.shard_id)
    chosen = {task: ids for task, ids in tasks.items() if ids & wanted}
    if more := {task: ids for task, ids in chosen.items() if not ids <= wanted}:
        words = "; ".join(f"task {task} makes {shards_text(id_ranges(ids))}" for task, ids in more.items())
        raise UsageError(f"--shards {args.shards} names a part of a task: {words}; name all of its shards")
    if chosen:
        _warn_of_own_task(chosen)
        _scancel(state, list(chosen))
        append_event(args.output_dir, "cancel", jobs=sorted(chosen), shards=args.shards)
    print_lines(f"cancelled: {', '.join(chosen)}" if chosen else f"none of them is queued; {state.summary}")
    return 0


def _scancel(state: DatasetState, jobs: list[str], cluster: str | None = None) -> None:
    """Cancel jobs, or tasks. Raises SlurmRefused, with whose they are where Slurm does not allow it."""
    try:
        slurm_output("scancel", *jobs, cluster=cluster)
    except SlurmRefused as error:
        if "denied" not in str(error):
            raise
        ids = {each.partition("_")[0] for each in jobs}
        users = {job.user for job in state.queue.jobs.values() if job.job_id in ids}
        whose = ", ".join(sorted(users - {user_name()})) or "another user"
        raise SlurmRefused(
            f"{whose} submitted jobs of this data set, and only that user or an administrator can cancel "
            f"them; {error}"
        ) from None
