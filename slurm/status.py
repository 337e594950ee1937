"""``status DATA``: print the state of every shard, once or until all jobs have ended."""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

from shardprep import console
from shardprep.console import print_exactly, print_lines
from shardprep.errors import ReadWriteError
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import need_plan
from slurm.commands import ask_patiently
from slurm.reasons import meaning_of, reasons_of
from slurm.state import DatasetState, find_state
from slurm.status_data import status_of
from slurm.status_text import status_lines

POLL_S = 5.0


def status(folder: Path, *, watches: bool, is_json: bool) -> int:
    """Print the state of every shard, and why shards failed: ``status DATA``."""
    plan = need_plan(DataFolder(folder))
    state = None
    while True:
        state = find_state(folder, plan, needs_slurm=False, before=state)
        shown = status_of(state)
        lines = [json.dumps(msgspec.to_builtins(shown))] if is_json else status_lines(shown)
        is_hidden = state.queue.away and state.ids("not visible")
        is_active = state.live_job_ids() or state.ids("running") or is_hidden  # ``run`` alone also counts
        if watches and not is_json and sys.stdout.isatty():
            last = "Ctrl-C stops watching; the jobs go on" if is_active else lines[-1]
            console.draw("\033[H\033[2J")
            print_lines(*lines[:-1], last)  # if they exceed the screen, the first ones scroll away
        elif is_json:
            print_exactly(*lines)
        else:
            print_lines(*lines)
        if not watches or not is_active or not console.output_is_read():
            return 0
        time.sleep(POLL_S)


def wait_for_jobs(folder: Path) -> int:
    """Show progress until all jobs have ended or wait for a person. Return 0 if the data set is verified."""
    plan = need_plan(DataFolder(folder))
    state: DatasetState | None = None
    sizes = plan.shard_bytes()
    done: set[int] = set()
    progress = console.Progress("", sum(sizes), num_shards=plan.num_shards)
    while True:
        state = ask_patiently(partial(find_state, folder, plan, before=state))
        fresh = set(state.ids("done")) - done
        done |= fresh
        progress.add_shards(len(fresh))
        progress.add(sum(sizes[shard_id] for shard_id in fresh))
        if not state.jobs_to_wait_for() or _needs_a_person(state):
            break
        time.sleep(POLL_S)
    print_lines(*status_lines(status_of(state)))
    return 0 if state.is_verified else ReadWriteError.exit_code


def _needs_a_person(state: DatasetState) -> bool:
    """Return whether all live jobs wait, and none of them will start without a person's help."""
    jobs = [job for job in state.queue.jobs.values() if job.is_live]
    # Verify jobs and controllers wait for the other jobs.
    reasons = [job.reason for job in jobs if not re.match("Dependency$|None$", job.reason)]
    is_stuck = all(meaning_of(each)[1] for reason in reasons for each in reasons_of(reason))
    return bool(reasons) and is_stuck and all(job.is_waiting for job in jobs)
