"""What ``status`` prints for people. Its last line is the command to type next."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from shardprep import console
from shardprep.console import counted, quoted, shards_text, shards_to_type
from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import ids_of_ranges, quarantine_name
from slurm.causes import BAD_INPUT, OUT_OF_MEMORY, TIMEOUT
from slurm.log_ends import shortened
from slurm.status_data import MAX_FAILURES, Failure, Status, newest_failures
from slurm.waits import Wait

_MAX_EVENTS = 5  # of the history
_MAX_EVENT_CHARS = 400
_SHOWN_FACTS = ("round", "causes", "why", "report", "jobs")  # of an event


def status_lines(status: Status) -> list[str]:
    """Return the lines for people: totals, queued shards, failures, and the command to type next."""
    lines = [
        *_total_lines(status),
        *_queue_lines(status),
        *(f"  {note}" for note in _notes(status)),
        *_failure_lines(status),
        *(f"  job {each} sends failed shards again (--until_done)" for each in status.controller_jobs),
    ]
    if len(status.history) > 1:
        lines += [_event_line(event) for event in status.history[-_MAX_EVENTS:]]
    lines.append(_next_line(status))
    return lines


def _total_lines(status: Status) -> list[str]:
    share = status.num_done / status.num_shards
    amounts = f"  {status.num_tokens:,} tokens"
    if status.tokens_per_s:
        span = "from the first shard's begin to the last end"
        if status.has_jobs:
            span = "since the newest submission"
        amounts += f", {console.short_number(status.tokens_per_s)} tokens/s {span}"
    if status.left_s is not None:
        amounts += f", about {console.short_time(status.left_s)} left"
    return [
        f"{status.folder}: {status.num_done} of {status.num_shards} shards are done ({share:.1%})",
        amounts,
        *console.source_lines(status.sources, all_in="--json"),
    ]


def _queue_lines(status: Status) -> list[str]:
    lines = []
    shown = {"running": status.running, "pending": status.pending, "not submitted": status.not_submitted}
    for name, ids in shown.items():
        if ids:
            lines.append(f"  {name}: {_shown_shards(ids)}")
    lines += [_wait_line(wait) for wait in status.waits_for]
    if status.not_visible:
        lines.append(f"  not visible: {_shown_shards(status.not_visible)} ({status.why_not_visible})")
    if status.slurm_away:
        lines.append(f"  which jobs wait or run is not known: {status.slurm_away}")
    return lines


def _wait_line(wait: Wait) -> str:
    verb = "waits" if wait.shards.isdecimal() else "wait"
    line = f"    {_shown_shards(wait.shards)} {verb} for {wait.reason}"
    if wait.means:
        line += f": {wait.means}"
    if wait.to_type:
        line += f"; type: {wait.to_type}"
    if wait.starts:
        line += f"; expected to start at {wait.starts.replace('T', ' ')}"
    return line


def _failure_lines(status: Status) -> list[str]:
    lines = []
    for cause, ids in status.causes.items():
        lines.append(f"  failed, {cause}: {_shown_shards(ids)}")
        lines.append(f"    {status.remedies[cause]}")
    for how, number in status.restarts.items():
        lines.append(f"  started again by Slurm after {how}: {counted(number, 'task')}")
    if status.other_plan:
        lines.append(f"  made by another plan: {_shown_shards(status.other_plan)}; verify says more")
    lines += [f"  not done, {why}" for why in list(status.broken.values())[:MAX_FAILURES]]
    for failure in newest_failures(status.failures, lambda each: each.ended):
        lines.append(_attempt_line(failure))
        lines += [f"    | {shortened(line)}" for line in failure.last_lines]
        if failure.log:
            lines.append(f"    {failure.log}")
    num_more = len(status.failures) - MAX_FAILURES
    if num_more > 0:
        lines.append(f"  and {num_more} more failures: --json has them all")
    return lines


def _attempt_line(failure: Failure) -> str:
    task = f"task {failure.task}"
    if failure.owner:
        task += f" of {failure.owner}"
    if failure.node:
        task += f" on {failure.node}"
    if failure.num_attempts > 1:
        task += f", try {failure.num_attempts}"
    return f"  shard {failure.shard:05d}, {task}: {failure.cause}"


def _event_line(event: dict[str, Any]) -> str:
    when = time.strftime("%m-%d %H:%M", time.localtime(event["time"]))
    words = [f"  {when} {event['event']}"]
    for name in _SHOWN_FACTS:
        value = event.get(name)
        if value:
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"{name} {_cut(text)}")
    return ", ".join(words)


def _cut(words: str) -> str:
    return words if len(words) <= _MAX_EVENT_CHARS else f"{words[:_MAX_EVENT_CHARS]}..."


def _shown_shards(ids: str) -> str:
    """Return shards for people: the first ranges, then how many more."""
    text = shards_text(ids)
    return f"{text} (--json has all)" if text.endswith(" more") else text


def _notes(status: Status) -> list[str]:
    """Return a text for each thing that a person should look at, most urgent first."""
    folder = shlex.quote(status.folder)
    notes = []
    if status.unrecorded_jobs:
        jobs = " ".join(status.unrecorded_jobs)
        notes.append(f"jobs without a record: {jobs}: a submission is running, or was interrupted")
    if status.wrong:
        notes.append(f"found wrong by verify: {_shown_shards(status.wrong)}; not done, to be made again")
    if status.verify_trouble:
        notes.append(f"the verify job {status.verify_trouble}")
    if status.controller_trouble:
        notes.append(f"the controller of --until_done {status.controller_trouble}")
    if status.not_begun:
        why = "cancelled, or Slurm could not start them"
        notes.append(f"ended before the task started: {_shown_shards(status.not_begun)} ({why})")
    if status.foreign_jobs:
        jobs = " ".join(status.foreign_jobs)
        notes.append(f"jobs of the folder that this one was copied from; to cancel them: scancel {jobs}")
    if status.controller_lost:
        job = status.controller_lost
        log = f"{folder}/jobs/logs/control-{job}.log"
        go_on = commands.on("retry", status.folder, "--until_done")
        notes.append(
            f"job {job} of --until_done is gone without a message (killed, its time limit, or the folder was "
            f"moved); its log: {log}; to go on: {go_on}"
        )
    if status.unexplained:
        ask = status.unexplained
        notes.append(f"no record says how these ended; Slurm's accounting, if the site has it, may: {ask}")
    for why in status.unreadable[:2]:
        what = why.partition("; its owner can type:")[0]
        notes.append(f"not known: {what}; its owner can type: chmod -R a+rX {folder}")
    return notes


def _next_line(status: Status) -> str:
    """Return the command to type next. It works from any folder, would not be refused, and loses nothing."""
    folder = Path(status.folder)
    if status.slurm_away and status.has_jobs:
        return f"next: when Slurm answers again: {commands.on('status', folder)}"
    stuck = [wait.to_type for wait in status.waits_for if wait.to_type]
    if stuck and not status.running and status.can_write:
        return f"next: {stuck[0]}"
    if status.running or status.pending:
        return f"next: {commands.on('status', folder, '--watch')}"
    if not status.can_write and not status.verified:
        return f"next: ask its owner to go on, because you cannot write into {quoted(folder)}"
    if status.unrecorded_jobs:
        return f"next: wait for the end of the jobs without a record, or: {commands.on('cancel', folder)}"
    if status.not_visible:
        again = commands.submit(folder, "--shards", shards_to_type(status.not_visible))
        return f"next: look where these jobs are visible; if they do not run: {again}"
    has_answer = status.has_slurm and not status.slurm_away
    if status.failed:
        return f"next: {_after_failures(status, folder, has_answer=has_answer)}"
    if status.not_submitted:
        return f"next: {commands.submit(folder) if has_answer else commands.run(folder)}"
    if status.other_plan or not status.verified:
        return f"next: {commands.on('verify', folder)}"
    return "verified"


def _after_failures(status: Status, folder: Path, *, has_answer: bool) -> str:
    """Return the command to type after shards failed. What a person has to decide is a comment behind it."""
    # Failed shards that retry does not send have their remedy beside their cause.
    if status.can_retry and not has_answer:
        return commands.run(folder)
    if status.can_retry:
        # The request of a job has what its tasks need; a run on one machine has left none.
        return commands.on("retry", folder) if status.has_jobs else commands.submit(folder, command="retry")
    if BAD_INPUT in status.causes:
        first = ids_of_ranges(status.causes[BAD_INPUT])[0]
        data_dir = DataFolder(folder)
        left_out = quarantine_name(first)
        about = _about_left_out(status.accepting_args, folder, has_answer=has_answer)
        if data_dir.status_of(left_out) is not None:
            return f"head -n 3 {quoted(data_dir.path_of(left_out))}  # {about}"
        if status.accepting_args:
            return f"{commands.on('logs', folder, first)}  # {about}"
    if not has_answer:
        return commands.run(folder)
    again = commands.on("retry", folder, "--shards", shards_to_type(status.failed))
    asks_for_more = status.causes.keys() <= {OUT_OF_MEMORY, TIMEOUT}  # retry does
    return again if asks_for_more else f"correct the cause, then: {again}"


def _about_left_out(accepting_args: str, folder: Path, *, has_answer: bool) -> str:
    """Return what a person can do about the documents that a quarantine file lists."""
    todo = "documents that were left out, and why; correct options or input and plan into a new folder"
    if not accepting_args:
        return todo
    if has_answer:
        accept = commands.on("retry", folder, "--worker_args", accepting_args)
    else:
        accept = commands.run(folder, "", *shlex.split(accepting_args))
    return f"{todo}, or accept the loss: {accept}"
