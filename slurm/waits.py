"""What jobs of a data set wait for, and small jobs that will not come to anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardprep.format import commands
from shardprep.format.jobs import user_name
from shardprep.format.names import id_ranges
from slurm.attempts import Shard
from slurm.causes import cause_of_record
from slurm.reasons import meaning_of
from slurm.squeue import Job
from slurm.state import DatasetState

# Events of --until_done: the last one in the history says whether a controller should exist.
_CONTROLLER_EVENTS = {"submit", "retry", "cancel", "finished", "stopped"}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A reason for which shards wait, or are suspended."""

    reason: str  # Slurm's
    means: str
    to_type: str  # a command, if a person must act
    starts: str  # when Slurm expects the first start, in local time, or ""
    shards: str


def waits_of(state: DatasetState) -> list[Wait]:
    """Return the reasons for which jobs wait, their meaning, and the command to type if one is needed."""
    shards_of: dict[str, list[int]] = {}
    for shard in state.shards:
        job = _job_of(shard) if shard.state in ("pending", "running") else None
        if job and job.waits_for:
            shards_of.setdefault(job.waits_for, []).append(shard.shard_id)
    waits = []
    for reason, shard_ids in shards_of.items():
        means, action = meaning_of(reason)
        jobs = [job for job in state.queue.jobs.values() if job.waits_for == reason]
        starts = ""
        to_type = ""
        if action == "release":
            ids = sorted({job.job_id for job in jobs}, key=int)
            to_type = f"scontrol release {','.join(ids)}"
        elif action == "cancel":
            to_type = commands.on("cancel", state.folder)
        elif not action:  # if a person must act first, the start that Slurm expects does not matter
            starts = min((job.start_time for job in jobs if job.start_time), default="")
        waits.append(
            Wait(reason=reason, means=means, to_type=to_type, starts=starts, shards=id_ranges(shard_ids))
        )
    return waits


def _job_of(shard: Shard) -> Job | None:
    """Return the job by which a shard has its state."""
    for attempt in shard.attempts:
        if attempt.state == shard.state and attempt.job:
            return attempt.job
    return None


def verify_trouble(state: DatasetState) -> str:
    """Return why the newest verify job did not verify the data set or never will, or ""."""
    if not state.submissions or state.is_verified or state.queue.away:
        return ""
    newest = state.submissions[-1]
    job = state.queue.jobs.get((newest.number, newest.verify.job_id, 0))
    if job and job.is_waiting:
        return _why_stuck(job.job_id, job.reason)
    if job and job.is_live:
        return ""
    for record in state.records.of_this_folder:
        if record.job_id == newest.verify.job_id:
            return f"ended, {cause_of_record(record, -1)}; its log: {record.log}"
    return ""


def controller_trouble(state: DatasetState) -> str:
    """Return why a controller will not begin before a person acts, or ""."""
    for job_id, reason in state.queue.controllers_wait.items():
        why = _why_stuck(job_id, reason)
        if why:
            return why
    return ""


def _why_stuck(job_id: str, reason: str) -> str:
    """Return why a job that waits never begins by itself, or "" if it does."""
    means, action = meaning_of(reason)
    if not action:
        return ""
    words = f"waits for {reason}: {means}"
    return f"{words}; type: scontrol release {job_id}" if action == "release" else words


def lost_controller(state: DatasetState, history: Sequence[dict[str, object]]) -> str:
    """Return the id of a controller that is gone without an event that says why, or ""."""
    events = [each for each in history if each["event"] in _CONTROLLER_EVENTS and not each.get("shards")]
    if not events or not state.submissions or state.queue.away:
        return ""
    last = events[-1]
    if last.get("user") != user_name():
        return ""  # the event is of the folder that this one was copied from, or of another user
    job_id = str(last.get("controller", ""))
    return "" if job_id in state.queue.controllers else job_id
