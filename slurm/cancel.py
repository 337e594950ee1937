"""``cancel``: the jobs of a data set that wait or run, or the tasks of some shards."""

from __future__ import annotations

import argparse
import os

from shardprep.console import print_lines, say, shards_text
from shardprep.errors import UsageError
from shardprep.format.jobs import append_event, user_name
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.format.plan import need_plan
from slurm.commands import SlurmRefused, slurm_output
from slurm.state import DatasetState, find_state


def cancel(args: argparse.Namespace) -> int:
    """Cancel every job of a data set that waits or runs: ``cancel DATA``. Shards that are done stay done."""
    state = find_state(args.output_dir, need_plan(args.output_dir))
    queue = state.queue
    if args.shards is None:
        # Controllers first, as one would send again what is cancelled.
        jobs = [*queue.controllers, *queue.unrecorded, *state.live_job_ids()]
    else:
        jobs = _tasks_of_shards(args, state)
    if jobs:
        # Said before scancel ends this process, too, and with it whatever it would still print.
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
        if here := next((each for each in (job_id, task) if each in jobs), None):
            say(f"warning: this runs in job {here}, which is one of {', '.join(jobs)}, and ends with it")
        try:
            slurm_output("scancel", *jobs)
        except SlurmRefused as error:
            if "denied" not in str(error):
                raise
            # scancel has ended this user's jobs all the same. Controllers and unrecorded jobs are theirs.
            user_of = {job.job_id: job.user for job in queue.jobs.values()}
            owners = {each: user_of.get(each.partition("_")[0], user_name()) for each in jobs}
            if own := [each for each in jobs if owners[each] == user_name()]:
                append_event(args.output_dir, "cancel", jobs=own, shards=args.shards)
            whose = ", ".join(sorted({*owners.values()} - {user_name()})) or "another user"
            raise SlurmRefused(
                f"{whose} submitted jobs of this data set, and only that user or an administrator can cancel "
                f"them; cancelled: {', '.join(own) or 'none'}; {error}"
            ) from None
        append_event(args.output_dir, "cancel", jobs=jobs, shards=args.shards)
    if queue.foreign and args.shards is None:
        ids = " ".join(queue.foreign)
        say(f"left alone: jobs of the folder that this one was copied from; to end them: scancel {ids}")
    nothing = "nothing is queued" if args.shards is None else "none of them is queued"
    print_lines(f"cancelled: {', '.join(jobs)}" if jobs else f"{nothing}; {state.summary}")
    if unseen := state.ids("not visible"):
        named_ids = shards_text(id_ranges(unseen))
        say(f"warning: {state.why_not_visible()}; {named_ids} may wait or run all the same")
    return 0


def _tasks_of_shards(args: argparse.Namespace, state: DatasetState) -> list[str]:
    """Return the tasks that make the shards of --shards, and no others in them. Raises UsageError."""
    wanted = chosen_shards(state.plan.num_shards, args.shards) or set()
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
    return sorted(chosen, key=lambda task: tuple(map(int, task.split("_"))))
