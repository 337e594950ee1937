"""``cancel``: the jobs of a data set that wait or run, or the tasks of some shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from shardprep.console import print_lines, say, shards_text
from shardprep.errors import ShardprepError, UsageError
from shardprep.format.names import id_ranges
from shardprep.format.plan import need_plan
from shardprep.format.submissions import append_event, user_name
from slurm.commands import SlurmRefused, slurm_output
from slurm.state import DatasetState, chosen_shards, find_state


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


def _cancel_shards(args: argparse.Namespace, state: DatasetState) -> int:
    """``--shards``: the tasks that make these shards, and no others in them."""
    wanted = chosen_shards(args.output_dir, args.shards) or set()
    chosen = set()
    for shard_id in wanted:
        for each in state.shards[shard_id].attempts:
            if each.state not in ("running", "pending") or each.job is None:
                continue
            if not wanted.issuperset(each.shards):
                all_shards = shards_text(id_ranges(each.shards))
                raise UsageError(
                    f"--shards {args.shards} names a part of a task: task {each.task} makes {all_shards}; "
                    "name all of its shards"
                )
            chosen.add(each.task)
    tasks = sorted(chosen, key=lambda task: tuple(map(int, task.split("_"))))
    if tasks:
        _warn_of_own_task(tasks)
        _scancel(state, tasks)
        append_event(args.output_dir, "cancel", jobs=tasks, shards=args.shards)
    print_lines(f"cancelled: {', '.join(tasks)}" if tasks else f"none of them is queued; {state.summary}")
    return 0


def _warn_of_own_task(cancelled: Collection[str]) -> None:
    """Say it before scancel ends this process, too, and with it whatever it would still print."""
    job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
    task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if own := next((each for each in (job_id, task) if each in cancelled), None):
        say(f"warning: this runs in job {own}, which is one of {', '.join(cancelled)}, and ends with it")


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
