"""What ``status`` prints for people, and the command to type next."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from shardprep import console
from shardprep.console import counted, quoted, shards_text
from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import ids_of_ranges, quarantine_name
from slurm.causes import BAD_INPUT, OUT_OF_MEMORY, TIMEOUT
from slurm.status_data import MAX_FAILURES, newest_failures

_MAX_EVENTS = 5  # of the history


def status_lines(data: dict[str, Any]) -> list[str]:
    """Return the lines for people: totals, queued shards, failures, and the command to type next."""
    total, done = data["num_shards"], data["num_done"]
    speed = "" if not data["tokens_per_s"] else f", {data['tokens_per_s']:,} tokens/s"
    left = "" if data["left_s"] is None else f", about {console.short_time(data['left_s'])} left"
    lines = [
        f"{data['folder']}: {done} of {total} shards are done ({done / total:.1%})",
        f"  {data['num_tokens']:,} tokens{speed}{left}",
        *console.source_lines(data["sources"], all_in="--json"),
    ]
    shown = [name for name in ("running", "pending", "not_submitted") if data[name]]
    lines += [f"  {name.replace('_', ' ')}: {_shown_shards(data[name])}" for name in shown]
    for item in data["waits_for"]:
        means = f": {item['means']}" if item["means"] else ""
        to_type = f"; type: {item['to_type']}" if item["to_type"] else ""
        starts = f"; expected to start at {item['starts'].replace('T', ' ')}" if item["starts"] else ""
        wait = "waits" if item["shards"].isdecimal() else "wait"
        lines.append(
            f"    {_shown_shards(item['shards'])} {wait} for {item['reason']}{means}{to_type}{starts}"
        )
    if data["not_visible"]:
        lines.append(f"  not visible: {_shown_shards(data['not_visible'])} ({data['why_not_visible']})")
    if data["slurm_away"]:
        lines.append(f"  which jobs wait or run is not known: {data['slurm_away']}")
    lines += [f"  {note}" for note in notes(data)]

    for cause, ids in data["causes"].items():
        lines += [f"  failed, {cause}: {_shown_shards(ids)}", f"    {data['remedies'][cause]}"]
    for how, number in data["restarts"].items():
        lines.append(f"  started again by Slurm after {how}: {counted(number, 'task')}")
    if data["other_plan"]:
        lines.append(f"  made by another plan: {_shown_shards(data['other_plan'])}; verify says more")
    lines += [f"  not done, {why}" for why in data["broken"].values()][:MAX_FAILURES]
    for failure in newest_failures(data["failures"], lambda each: float(each["ended"])):
        node = f" on {failure['node']}" if failure["node"] else ""
        tries = f", try {failure['num_attempts']}" if failure["num_attempts"] > 1 else ""
        whose = f" of {failure['owner']}" if failure["owner"] else ""
        where = f"task {failure['task']}{whose}{node}{tries}"
        lines.append(f"  shard {failure['shard']:05d}, {where}: {failure['cause']}")
        lines += [f"    | {line[:300]}" for line in failure["last_lines"]]
        lines.append(f"    {failure['log']}")
    if (more := len(data["failures"]) - MAX_FAILURES) > 0:
        lines.append(f"  and {more} more failures: --json has them all")

    lines += [f"  job {each} sends failed shards again (--until_done)" for each in data["controller_jobs"]]
    for event in data["history"][-_MAX_EVENTS:] if len(data["history"]) > 1 else []:
        when = time.strftime("%m-%d %H:%M", time.localtime(event["time"]))
        words = [f"  {when} {event['event']}"]
        said = {name: event[name] for name in ("round", "causes", "why", "report", "jobs") if event.get(name)}
        words += [f"{name} {_cut(x if isinstance(x, str) else json.dumps(x))}" for name, x in said.items()]
        lines.append(", ".join(words))
    return [*lines, next_line(data)]


_MAX_IDS_CHARS = 200
_MAX_EVENT_CHARS = 400


def _shown_shards(ids: str) -> str:
    """Return shards for people: the first ranges, then how many more."""
    if len(ids) <= _MAX_IDS_CHARS:
        return shards_text(ids)
    first, rest = _first_ranges(ids)
    return f"{shards_text(first)} and {len(ids_of_ranges(rest)):,} more (--json has all)"


def _first_ranges(ids: str) -> tuple[str, str]:
    """Split long ids at a comma."""
    end = ids.rindex(",", 0, _MAX_IDS_CHARS)
    return ids[:end], ids[end + 1 :]


def _cut(words: str) -> str:
    return words if len(words) <= _MAX_EVENT_CHARS else f"{words[:_MAX_EVENT_CHARS]}..."


def _to_type(ids: str) -> str:
    """Return ids for a command: long ones as one range around them, as it leaves out what is done or runs."""
    if len(ids) <= _MAX_IDS_CHARS:
        return ids
    every = ids_of_ranges(ids)
    return f"{every[0]}-{every[-1]}"


_NOTES = {  # field -> text for people, most urgent first
    "unrecorded_jobs": "jobs without a record: {}: a submission is running, or was interrupted",
    "wrong": "found wrong by verify: {}; not done, to be made again",
    "verify_trouble": "the verify job {}",
    "not_begun": "ended before they began: {} (cancelled, or Slurm could not start them)",
    "foreign_jobs": "jobs of the folder that this one was copied from; to cancel them: scancel {}",
    "controller_lost": "job {0} of --until_done is gone without a message (killed, its time limit, or the "
    "folder was moved); its log: {1}/jobs/logs/control-{0}.log; to go on: {2}",
    "unexplained": "no record says how these ended; Slurm's accounting, if the site has it, may: {}",
}


def notes(data: dict[str, Any]) -> list[str]:
    """Return a text for each thing that a person should look at."""
    found, folder = [], shlex.quote(data["folder"])
    go_on = commands.on("retry", data["folder"], "--until_done")
    for name, text in _NOTES.items():
        if value := data[name]:
            words = value if isinstance(value, str) else " ".join(value)
            if name in ("wrong", "not_begun"):
                words = _shown_shards(words)
            found.append(text.format(words, folder, go_on))
    remedy = f"its owner can type: chmod -R a+rX {folder}"
    hidden = [why.partition("; its owner can type:")[0] for why in data["unreadable"]]
    return [*found, *(f"not known: {why}; {remedy}" for why in hidden[:2])]


def next_line(data: dict[str, Any]) -> str:
    """Return the command to type next. It works from any folder, would not be refused, and loses nothing."""
    folder = Path(data["folder"])
    if data["slurm_away"] and data["has_jobs"]:
        return f"next: when Slurm answers again: {commands.on('status', folder)}"
    stuck = [each["to_type"] for each in data["waits_for"] if each["to_type"]]
    if stuck and not data["running"] and data["can_write"]:
        return f"next: {stuck[0]}"
    if data["running"] or data["pending"]:
        return f"next: {commands.on('status', folder, '--watch')}"
    if not data["can_write"] and not data["verified"]:
        return f"next: ask its owner to go on, because you cannot write into {quoted(folder)}"
    if data["unrecorded_jobs"]:
        return f"next: wait for the end of the jobs without a record, or: {commands.on('cancel', folder)}"
    if data["not_visible"]:
        again = commands.submit(folder, "--shards", _to_type(data["not_visible"]))
        return f"next: look where these jobs are visible; if they do not run: {again}"
    has_answer = data["has_slurm"] and not data["slurm_away"]
    if data["failed"]:
        return f"next: {_after_failures(data, folder, has_answer=has_answer)}"
    if data["not_submitted"]:
        return f"next: {commands.submit(folder) if has_answer else commands.run(folder)}"
    if data["other_plan"] or not data["verified"]:
        return f"next: {commands.on('verify', folder)}"
    return f"verified: {data['folder']}/index.json exists"


def _after_failures(data: dict[str, Any], folder: Path, *, has_answer: bool) -> str:
    """Return the command to type after shards failed. What a person has to decide is a comment behind it."""
    # Failed shards that retry does not send have their remedy beside their cause.
    if data["can_retry"] and has_answer:
        # The request of a job has what its tasks need; a run on one machine has left none.
        return commands.on("retry", folder) if data["has_jobs"] else commands.submit(folder, command="retry")
    if data["can_retry"]:
        return commands.run(folder)
    if BAD_INPUT in data["causes"]:
        first = ids_of_ranges(data["causes"][BAD_INPUT])[0]
        data_dir = DataFolder(folder)
        left_out = quarantine_name(first)
        about = _about_left_out(data, folder, has_answer=has_answer)
        if data_dir.status_of(left_out) is not None:
            return f"head -n 3 {quoted(data_dir.path_of(left_out))}  # {about}"
        if data["accepting_args"]:
            return f"{commands.on('logs', folder, first)}  # {about}"
    if not has_answer:
        return commands.run(folder)
    again = commands.on("retry", folder, "--shards", _to_type(data["failed"]))
    is_fixed = data["causes"].keys() <= {OUT_OF_MEMORY, TIMEOUT}  # retry asks for more
    return again if is_fixed else f"correct the cause, then: {again}"


def _about_left_out(data: dict[str, Any], folder: Path, *, has_answer: bool) -> str:
    """Return what a person can do about the documents that a quarantine file lists."""
    todo = "documents that were left out, and why; correct options or input and plan into a new folder"
    args = data["accepting_args"]
    if not args:
        return todo
    accept = commands.run(folder, "", *shlex.split(args))
    if has_answer:
        accept = commands.on("retry", folder, "--worker_args", args)
    return f"{todo}, or accept the loss: {accept}"
