"""The facts that ``status`` prints."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import read_events, user_name
from shardprep.format.manifest import sum_of_sources
from shardprep.format.names import id_ranges
from slurm.causes import BAD_INPUT, NODE_FAIL, VANISHED, cause_of_record, last_lines, log_tail, remedy_of
from slurm.own import why_not_retried
from slurm.queue import StateName
from slurm.reasons import meaning_of
from slurm.state import DatasetState, Shard

T = TypeVar("T")
STATUS_VERSION = 4  # of --json: increased when a field is removed or changes its meaning
_NEEDED_BAD_FRACTION = r"--max_bad_fraction ([0-9.]+)"  # in the message about too many bad documents
# Events of --until_done: the last one in the history says whether a controller should exist.
_CONTROLLER_EVENTS = {"submit", "retry", "cancel", "finished", "stopped"}
MAX_FAILURES = 8  # shown with the last lines of their logs


def status_data(state: DatasetState) -> dict[str, Any]:
    """Return everything that ``status`` prints as plain data, described in docs/json.md."""
    failed = [shard for shard in state.shards if shard.state == "failed"]
    by_cause = state.failed_by_cause()
    queue, history = state.queue, read_events(DataFolder(state.folder))
    waits = _waits_for(state)
    sources = sum_of_sources(each.counts.sources for each in state.made.done.values())
    return {
        "format": "shardprep-status",
        "version": STATUS_VERSION,
        "folder": str(state.folder),
        "num_shards": state.plan.num_shards,
        **{name.replace(" ", "_"): id_ranges(state.ids(name)) for name in get_args(StateName)},
        **{f"num_{name.replace(' ', '_')}": len(state.ids(name)) for name in get_args(StateName)},
        "causes": {cause: id_ranges(each.shard_id for each in shards) for cause, shards in by_cause.items()},
        "remedies": {cause: remedy_of(cause) for cause in by_cause},
        "can_retry": id_ranges(each.shard_id for each in failed if not why_not_retried(each, {})),
        "not_begun": id_ranges(shard.shard_id for shard in state.shards if shard.without_record),
        "failures": _failures(failed),
        "restarts": _restarts(state),
        "unexplained": _unexplained(state),
        "other_plan": id_ranges(state.made.other_plan),
        "broken": {str(shard_id): why for shard_id, why in state.made.broken.items()},
        "wrong": id_ranges(state.made.wrong),
        "findings": {str(number): each.message for number, each in state.made.wrong.items()},
        "verify_trouble": _verify_trouble(state),
        "verified": state.is_verified,
        "can_write": os.access(state.folder, os.W_OK),
        "accepting_args": _accepting_args(state),
        "unreadable": state.records.unreadable,
        "has_slurm": shutil.which("sbatch") is not None,
        "has_jobs": bool(state.submissions or any(each.job_id for each in state.records.own)),
        "waits_for": waits,
        "unrecorded_jobs": queue.unrecorded,
        "foreign_jobs": queue.foreign,
        "controller_jobs": queue.controllers,
        "controller_lost": _lost_controller(state, history),
        "slurm_away": queue.away,
        "why_not_visible": state.why_not_visible(),
        "history": history,
        "sources": {name: source.to_dict() for name, source in sources.items()},
        **_progress(state, waits),
    }


def _failures(failed: Sequence[Shard]) -> list[dict[str, Any]]:
    """Return the last attempt at each failed shard. The newest few include the end of their log."""
    newest = newest_failures(failed, lambda shard: shard.attempts[-1].ended)
    failures = []
    for shard in failed:
        last, message = shard.attempts[-1], shard.attempts[-1].message(shard.shard_id)
        facts = {name: getattr(last, name) for name in ("task", "node", "log", "ended")}
        facts |= {"shard": shard.shard_id, "cause": shard.cause, "message": message, "owner": last.owner}
        facts["num_attempts"] = sum(attempt.state == "failed" for attempt in shard.attempts)
        facts["last_lines"] = [message] if message else []
        if not message and last.log and shard in newest:
            facts["last_lines"] = last_lines(log_tail(Path(last.log)))
        failures.append(facts)
    return failures


def newest_failures(failed: Sequence[T], ended: Callable[[T], float]) -> list[T]:
    """Return the few failures that ended last, which people are shown, in the given order."""
    places = sorted(range(len(failed)), key=lambda place: ended(failed[place]), reverse=True)
    return [failed[place] for place in sorted(places[:MAX_FAILURES])]


def _restarts(state: DatasetState) -> dict[str, int]:
    """Count the attempts after which Slurm started the task again, by how they ended."""
    own = [each for each in state.records.own if each.job_id and each.shards]
    last = {each.key: each for each in own}
    found: Counter[str] = Counter()
    for each in own:
        # A later attempt has a record, or it made the shards and removed its record.
        was_made = all(it and it.run.job_id == each.job_id for it in map(state.made.done.get, each.shards))
        if last[each.key] is not each or was_made:
            cause = cause_of_record(each, each.shards[0])
            found[f"{cause} on {each.node}" if cause == NODE_FAIL else cause] += 1
    return dict(found)


def _unexplained(state: DatasetState) -> str:
    """Return a sacct command for tasks whose end is not in any record, or ""."""
    tasks = {shard.without_record for shard in state.shards if shard.without_record}
    for shard in state.shards:
        if shard.cause == VANISHED and (record := shard.attempts[-1].record) and record.job_id:
            tasks.add(shard.attempts[-1].task)
    if not tasks:
        return ""
    listed = shlex.quote(",".join(sorted(tasks)[:MAX_FAILURES]))
    return f"sacct -D -j {listed} --format=JobID,State,ExitCode,NodeList,Elapsed,MaxRSS"


def _verify_trouble(state: DatasetState) -> str:
    """Return why the newest verify job did not verify the data set or never will, or ""."""
    if not state.submissions or state.is_verified or state.queue.away:
        return ""
    last = state.submissions[-1]
    job = state.queue.jobs.get((last.number, last.verify.job_id, 0))
    if job and job.is_live:
        means, action = meaning_of(job.reason) if job.is_waiting else ("", "")
        return f"waits for {job.reason}: {means}" if action else ""
    for record in state.records.own:
        if record.job_id == last.verify.job_id:
            return f"ended, {cause_of_record(record, -1)}; its log: {record.log}"
    return ""


def _accepting_args(state: DatasetState) -> str:
    """Return worker_args with a --max_bad_fraction that accepts all failed shards of bad input, or ""."""
    failed = state.failed_by_cause().get(BAD_INPUT, [])
    needed: list[float] = []
    for shard in failed:
        needed += map(float, re.findall(_NEEDED_BAD_FRACTION, shard.attempts[-1].message(shard.shard_id)))
    if not needed or max(needed) >= 1:
        return ""  # the input is bad in another way, or nothing would be left
    request = failed[0].attempts[-1].request
    args = request.worker_args if request else ""  # if it has this flag, too, the later one counts
    return f"{args} --max_bad_fraction {max(needed):g}".strip()


def _waits_for(state: DatasetState) -> list[dict[str, Any]]:
    """Return the reasons for which jobs wait, their meaning, and the command to type if one is needed."""
    shards_of: dict[str, list[int]] = {}
    for shard in state.shards:
        if shard.state in ("pending", "running"):
            job = next((each.job for each in shard.attempts if each.state == shard.state and each.job), None)
            if job and job.waits_for:
                shards_of.setdefault(job.waits_for, []).append(shard.shard_id)
    waits = []
    for reason, shard_ids in shards_of.items():
        means, action = meaning_of(reason)
        jobs = [job for job in state.queue.jobs.values() if job.waits_for == reason]
        ids = ",".join(sorted({job.job_id for job in jobs}, key=int))
        # If a person must act first, the start that Slurm expects does not matter.
        starts = "" if action else min((job.start_time for job in jobs if job.start_time), default="")
        cancel = commands.on("cancel", state.folder)
        to_type = {"release": f"scontrol release {ids}", "cancel": cancel}.get(action, "")
        facts = {"reason": reason, "means": means, "to_type": to_type, "starts": starts}
        waits.append({**facts, "shards": id_ranges(shard_ids)})
    return waits


def _lost_controller(state: DatasetState, history: Sequence[dict[str, Any]]) -> str:
    """Return the id of a controller that is gone without an event that says why, or ""."""
    events = [each for each in history if each["event"] in _CONTROLLER_EVENTS and not each.get("shards")]
    last = events[-1] if events else {}
    if not state.submissions or state.queue.away or last.get("user") != user_name():
        return ""  # the event is of the folder that this one was copied from, or of another user
    job_id = str(last.get("controller", ""))
    return "" if job_id in state.queue.controllers else job_id


def _progress(state: DatasetState, waits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens, tokens per second since the newest submission, and the time left by input bytes."""
    made = list(state.made.done.values())
    num_tokens = sum(each.counts.num_tokens for each in made)
    numbers: dict[str, Any] = {"num_tokens": num_tokens, "tokens_per_s": None, "left_s": None}
    since, recent = 0.0, made
    if state.submissions:
        newest = state.submissions[-1]
        since, own = newest.submitted, {array.job_id for array in newest.arrays}
        recent = [each for each in made if each.run.job_id in own or each.run.began >= since]
    if not recent:
        return numbers
    queued = state.ids("running", "pending")
    until = time.time() if queued else max(each.run.ended for each in recent)
    took_s = max(until - (since or min(each.run.began for each in recent)), 1e-3)
    numbers["tokens_per_s"] = round(sum(each.counts.num_tokens for each in recent) / took_s)

    running = [shard.attempts[-1].elapsed_s for shard in state.shards if shard.state == "running"]
    is_stuck = not running or any(meaning_of(each["reason"])[1] for each in waits)
    # If a task takes much longer than any before, no estimate is possible.
    is_late = max(running, default=0) > 30 + 2 * max(each.run.wall_s for each in recent)
    num_bytes = sum(each.counts.input_bytes for each in recent)
    if is_stuck or is_late or not num_bytes:
        return numbers
    sizes = state.plan.shard_bytes()  # reads the whole table of the plan
    left_s = [round(sum(sizes[shard_id] for shard_id in queued) * took_s / num_bytes)]
    for each in waits:  # shards are not made before their job starts
        if each["starts"]:
            starts = time.mktime(time.strptime(each["starts"], "%Y-%m-%dT%H:%M:%S"))
            left_s.append(round(starts - time.time()))
    numbers["left_s"] = max(left_s)
    return numbers
