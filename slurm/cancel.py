"""``cancel DATA``: end the jobs of a data set."""

from __future__ import annotations

import os
from pathlib import Path

from shardprep.console import print_lines, say, shards_text
from shardprep.errors import UsageError
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.format.plan import need_plan
from slurm.commands import SlurmRefused, run_slurm
from slurm.own import live_attempts, others_with_jobs, own_records
from slurm.state import DatasetState, find_state


def cancel(folder: Path, shards: str | None) -> int:
    """Cancel every waiting or running job of a data set: ``cancel DATA``. Finished shards stay.

    Only jobs of this user's own records, or with a name that only this data set's jobs have.
    """
    state = find_state(folder, need_plan(DataFolder(folder)))
    own = own_records(state)
    others = others_with_jobs(state)
    if shards is None:
        # Controllers first: one that runs would send the cancelled shards again. One scancel asks for them in
        # this order, but may not wait for one answer before it asks for the next job. That is enough: before
        # a controller sends anything, it asks Slurm for the jobs, which takes longer.
        jobs = [*own.controllers, *own.unrecorded, *own.live_job_ids()]
    else:
        # Controllers stay: they wait for the other shards, too.
        chosen = _tasks_of_shards(shards, state)
        jobs = [task for task in chosen if task.partition("_")[0] not in others]
        others = {task: others[task.partition("_")[0]] for task in chosen if task not in jobs}
    if jobs:
        # Printed first, because scancel may end this process, too.
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
        here = [each for each in (job_id, task) if each in jobs]
        if here:
            say(f"warning: this command runs in job {here[0]}, which it cancels, too: {', '.join(jobs)}")
        run_slurm("scancel", *jobs)
        job_files.append_event(DataFolder(folder), "cancel", jobs=jobs, shards=shards)
    if state.queue.foreign and shards is None:
        ids = " ".join(state.queue.foreign)
        say(f"not cancelled: jobs of the folder that this one was copied from; for them type: scancel {ids}")
    if others:
        whose = ", ".join(sorted(set(others.values())))
        found = f"{whose} submitted jobs {', '.join(sorted(others))} of this data set"
        done = f"cancelled: {', '.join(jobs) or 'none'}"
        expected = "that user or an administrator to cancel them"
        raise SlurmRefused(found=f"{found}; {done}", expected=expected)
    nothing = "nothing is queued" if shards is None else "none of these shards is queued"
    print_lines(f"cancelled: {', '.join(jobs)}" if jobs else f"{nothing}; {state.summary}")
    not_visible = state.ids("not visible")
    if not_visible:
        named_ids = shards_text(id_ranges(not_visible))
        say(f"warning: {state.why_not_visible()}; {named_ids} may still wait or run")
    return 0


def _tasks_of_shards(shards: str, state: DatasetState) -> list[str]:
    """Return the tasks that make the shards of --shards. Raises UsageError if a task makes others, too."""
    wanted = chosen_shards(state.plan.num_shards, shards) or set()
    chosen = {}
    for shard_id in wanted:
        for each in live_attempts(state.shards[shard_id]):
            chosen[each.task] = each
    for task, each in chosen.items():
        if not wanted.issuperset(each.shards):
            expected = f"all shards of task {task}: {shards_text(id_ranges(each.shards))}"
            raise UsageError(found=f"--shards {shards}", expected=expected)
    return sorted(chosen, key=lambda task: tuple(map(int, task.split("_"))))
