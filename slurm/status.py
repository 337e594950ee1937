"""``status``, ``logs`` and ``report``: the state of every shard, and the contents of a data set.

``report`` reads every manifest and no shard: 10,000 take some 5 s of CPU.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import datetime
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import shardprep
from shardprep import console
from shardprep.console import counted, print_lines, quoted, say, shards_text
from shardprep.errors import NotFound, ReadWriteError
from shardprep.files import publish_bytes
from shardprep.folders import refuse_foreign_file
from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import read_events, user_name
from shardprep.format.manifest import Manifest, ShardCounts, TextCounts, longest_of, sum_of_sources
from shardprep.format.names import TOKENIZER_DIR, id_ranges, ids_of_ranges, quarantine_name
from shardprep.format.plan import Plan, PrepConfig, flags_of, is_one_file_a_shard, need_plan
from shardprep.processes import python_command
from slurm import own as owns
from slurm import state as states
from slurm.state import DatasetState, Shard, StateName, last_lines, log_tail, meaning_of

T = TypeVar("T")
STATUS_VERSION = 4  # of --json: increased when a field is removed or changes its meaning
POLL_S = 5.0
_NEEDED_BAD_FRACTION = r"--max_bad_fraction ([0-9.]+)"  # in the message about too many bad documents
# Events of --until_done: the last one in the history says whether a controller should exist.
_CONTROLLER_EVENTS = {"submit", "retry", "cancel", "finished", "stopped"}
_MAX_FAILURES = 8  # shown with the last lines of their logs
_MAX_EVENTS = 5  # of the history


def status(args: argparse.Namespace) -> int:
    """Print the state of every shard, and why shards failed: ``status DATA``."""
    plan, state = need_plan(DataFolder(args.output_dir)), None
    while True:
        state = states.find_state(args.output_dir, plan, needs_slurm=False, before=state)
        data = status_data(state)
        lines = [json.dumps(data)] if args.json else status_lines(data)
        is_hidden = state.queue.away and state.ids("not visible")
        is_active = state.live_job_ids() or state.ids("running") or is_hidden  # ``run`` alone also counts
        if args.watch and not args.json and sys.stdout.isatty():
            last = "Ctrl-C stops watching; the jobs go on" if is_active else lines[-1]
            console.draw("\033[H\033[2J")
            print_lines(*lines[:-1], last)  # if they exceed the screen, the first ones scroll away
        else:
            print_lines(*lines)
        if not args.watch or not is_active or not console.output_is_read():
            return 0
        time.sleep(POLL_S)


def wait_for_jobs(folder: Path) -> int:
    """Show progress until all jobs have ended or wait for a person. Return 0 if the data set is verified."""
    plan = need_plan(DataFolder(folder))
    state: DatasetState | None = None
    sizes, done = plan.shard_bytes(), set[int]()
    progress = console.Progress(f"{plan.num_shards} shards", sum(sizes))
    while True:
        state = states.ask_patiently(partial(states.find_state, folder, plan, before=state))
        fresh = set(state.ids("done")) - done
        done |= fresh
        progress.add(sum(sizes[shard_id] for shard_id in fresh))
        if not state.jobs_to_wait_for() or _needs_a_person(state):
            break
        time.sleep(POLL_S)
    print_lines(*status_lines(status_data(state)))
    return 0 if state.is_verified else ReadWriteError.exit_code


def _needs_a_person(state: DatasetState) -> bool:
    """Return whether all live jobs wait, and none of them will start without a person's help."""
    jobs = [job for job in state.queue.jobs.values() if job.is_live]
    # Verify jobs and controllers wait for the other jobs.
    reasons = [job.reason for job in jobs if not re.match("Dependency$|None$", job.reason)]
    is_stuck = all(meaning_of(each)[1] for reason in reasons for each in states.reasons_of(reason))
    return bool(reasons) and is_stuck and all(job.is_waiting for job in jobs)


def logs(args: argparse.Namespace) -> int:
    """Print the attempts at one shard, newest last, with the ends of their logs: ``logs DATA N``."""
    plan, shard_id = need_plan(DataFolder(args.output_dir)), args.shard_id
    if not 0 <= shard_id < plan.num_shards:
        expected = f"0 to {plan.num_shards - 1}, as the plan has {plan.num_shards} shards"
        raise NotFound(found=f"shard {shard_id}", expected=expected)
    state = states.find_state(args.output_dir, plan, needs_slurm=False)
    shard = state.shards[shard_id]
    lines = [f"shard {shard_id:05d}: {shard.state}, {counted(len(shard.attempts), 'attempt')}"]
    if shard.state == "not visible":
        lines.append(f"  {state.why_not_visible()}")
    for each in shard.attempts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.record.began)) if each.record else ""
        where = f" on {each.node}" if each.node else ""
        whose = f" of {each.owner}" if each.owner else ""
        lines.append(f"{when or 'task'} {each.task}{whose}{where}: {each.cause(shard_id) or each.state}")
        if message := each.message(shard_id):
            lines.append(f"  {message}")
        if each.log:
            lines += [f"  | {line[:300]}" for line in last_lines(log_tail(Path(each.log)), 20)]
            lines.append(f"  {each.log}")
    if shard.cause:
        lines.append(f"  {states.remedy_of(shard.cause)}")
    print_lines(*lines)
    return 0


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
        "remedies": {cause: states.remedy_of(cause) for cause in by_cause},
        "can_retry": id_ranges(each.shard_id for each in failed if not owns.why_not_retried(each, {})),
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
        "sources": {name: asdict(source) for name, source in sources.items()},
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
    return [failed[place] for place in sorted(places[:_MAX_FAILURES])]


def _restarts(state: DatasetState) -> dict[str, int]:
    """Count the attempts after which Slurm started the task again, by how they ended."""
    own = [each for each in state.records.own if each.job_id and each.shards]
    last = {each.key: each for each in own}
    found: Counter[str] = Counter()
    for each in own:
        # A later attempt has a record, or it made the shards and removed its record.
        was_made = all(it and it.run.job_id == each.job_id for it in map(state.made.done.get, each.shards))
        if last[each.key] is not each or was_made:
            cause = states.cause_of_record(each, each.shards[0])
            found[f"{cause} on {each.node}" if cause == states.NODE_FAIL else cause] += 1
    return dict(found)


def _unexplained(state: DatasetState) -> str:
    """Return a sacct command for tasks whose end is not in any record, or ""."""
    tasks = {shard.without_record for shard in state.shards if shard.without_record}
    for shard in state.shards:
        if shard.cause == states.VANISHED and (record := shard.attempts[-1].record) and record.job_id:
            tasks.add(shard.attempts[-1].task)
    if not tasks:
        return ""
    listed = shlex.quote(",".join(sorted(tasks)[:_MAX_FAILURES]))
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
            return f"ended, {states.cause_of_record(record, -1)}; its log: {record.log}"
    return ""


def _accepting_args(state: DatasetState) -> str:
    """Return worker_args with a --max_bad_fraction that accepts all failed shards of bad input, or ""."""
    failed = state.failed_by_cause().get(states.BAD_INPUT, [])
    needed: list[float] = []
    for shard in failed:
        needed += map(float, re.findall(_NEEDED_BAD_FRACTION, shard.attempts[-1].message(shard.shard_id)))
    if not needed or max(needed) >= 1:
        return ""  # the input is bad in another way, or nothing would be left
    array = next((each.attempts[-1].array for each in failed), None)
    args = array.request.worker_args if array else ""  # if it has this flag, too, the later one counts
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
    lines += [f"  not done, {why}" for why in data["broken"].values()][:_MAX_FAILURES]
    for failure in newest_failures(data["failures"], lambda each: float(each["ended"])):
        node = f" on {failure['node']}" if failure["node"] else ""
        tries = f", try {failure['num_attempts']}" if failure["num_attempts"] > 1 else ""
        whose = f" of {failure['owner']}" if failure["owner"] else ""
        where = f"task {failure['task']}{whose}{node}{tries}"
        lines.append(f"  shard {failure['shard']:05d}, {where}: {failure['cause']}")
        lines += [f"    | {line[:300]}" for line in failure["last_lines"]]
        lines.append(f"    {failure['log']}")
    if (more := len(data["failures"]) - _MAX_FAILURES) > 0:
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
    if states.BAD_INPUT in data["causes"]:
        first = ids_of_ranges(data["causes"][states.BAD_INPUT])[0]
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
    is_fixed = data["causes"].keys() <= {states.OUT_OF_MEMORY, states.TIMEOUT}  # retry asks for more
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


# The report. -------------------------------------------------------------------------------------------

_REPORT_BEGINS = re.compile(rb".{,200}shardprep-report", re.DOTALL)  # a page, or JSON
REPORT_VERSION = 4  # increased when a field is removed or changes its meaning
_MAPPINGS = {"quarantined", "length_histogram", "sources", "validation"}
_NUMBERS = [item.name for item in dataclasses.fields(ShardCounts) if item.name not in _MAPPINGS]
_OPTIONS = ("record", "token_format", "seq_len", "validation_fraction")
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+")


def report(args: argparse.Namespace) -> int:
    """Write the report of a data set, finished or not: ``report DATA``."""
    folder = args.output_dir.absolute()
    plan, manifests = need_plan(DataFolder(folder)), dict[int, Manifest]()
    progress = console.Progress("reading manifests", plan.num_shards, unit="shards")

    def keep(manifest: Manifest) -> None:
        progress.add(manifest.shard_id not in manifests)  # find_state may read a manifest twice
        manifests[manifest.shard_id] = manifest

    state = states.find_state(folder, plan, needs_slurm=False, see=keep)
    progress.add(plan.num_shards - len(manifests))
    data = _without_secrets(report_data(state, [manifests[shard_id] for shard_id in state.made.done]))
    lines = [json.dumps(data)] if args.json else page_lines(data)
    if args.json and args.output is None:
        print_lines(*lines)
        return 0
    output = args.output or Path("report.html")
    refuse_foreign_file(output, _REPORT_BEGINS)
    publish_bytes(output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {output}")
    return 0


def report_data(state: DatasetState, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return everything that the report contains as plain data, described in docs/json.md."""
    plan, folder = state.plan, state.folder
    status = status_data(state)
    counts = [each.counts for each in manifests]
    left_out: dict[str, list[str]] = defaultdict(list)
    for reason, name in plan.left_out:
        left_out[reason].append(name)
    quarantined = sum((Counter(each.quarantined) for each in counts), Counter[str]())
    return {
        "format": "shardprep-report",
        "version": REPORT_VERSION,
        "folder": str(folder),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shardprep": shardprep.__version__,
        "plan": {
            "plan_id": plan.plan_id,
            "num_shards": plan.num_shards,
            "input_dir": str(plan.input_dir),
            "num_inputs": len(plan.inputs),
            "input_bytes": sum(item.num_bytes for item in plan.inputs),
            "inputs_left_out": left_out,
            **{name: getattr(plan.options, name) for name in _OPTIONS},
            "pack": plan.options.pack if plan.spec.has_rows else None,
            "tokenizer": dataclasses.asdict(plan.tokenizer),
        },
        "shards": {
            "verified": state.is_verified,
            **{name: status[name] for name in ("done", "running", "pending", "not_submitted", "not_visible")},
            **{name: status[name] for name in ("wrong", "broken", "other_plan")},
            "num_done": len(state.made.done),
            "failed": status["causes"],
            "remedies": status["remedies"],
            "missing": id_ranges(set(range(plan.num_shards)) - state.made.done.keys()),
        },
        "counts": {name: sum(getattr(each, name) for each in counts) for name in _NUMBERS},
        "validation": _sums([each.validation for each in counts if each.validation]),
        "tar_bytes": sum(each.tar.num_bytes for each in manifests),
        "idx_bytes": sum(each.idx.num_bytes for each in manifests),
        "sources": _sources(manifests),
        "left_out": dict(quarantined.most_common()),
        "per_shard": _per_shard(state, manifests),
        "work": _work(state),
        "slurm_away": status["slurm_away"] if status["has_jobs"] else "",
        "again": _how_to_repeat(folder, plan, manifests),
    }


def _sums(counts: Iterable[Any]) -> dict[str, int]:
    """Add up several counts, field by field."""
    found: Counter[str] = Counter()
    for each in counts:
        values = ((item.name, getattr(each, item.name)) for item in dataclasses.fields(each))
        found.update({name: value for name, value in values if isinstance(value, int)})
    return dict(found)


def _sources(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return the counts of each source, most tokens first. If there are several, their sum comes first."""
    counts, texts = defaultdict[str, list[Any]](list), defaultdict[str, list[TextCounts]](list)
    for manifest in manifests:
        of_shard = manifest.run.texts or {}
        for name, each in manifest.counts.sources.items():
            for key in ("all", f" {name}"):  # no source's name begins with a blank
                counts[key].append(each)
                texts[key] += [of_shard[name]] if name in of_shard else []
    sources = []
    listed = ["all"] if len(counts) == 2 else list(counts)  # the sum over one source is the source itself
    for name in listed:
        sums = _sums(counts[name])
        text = _text_statistics(texts[name], sums["num_tokens"])
        sources.append({"name": name.strip(), "is_all": name == "all", **sums, **text})
    return sorted(sources, key=lambda each: (not each["is_all"], -each["num_tokens"], each["name"]))


def _text_statistics(texts: Sequence[TextCounts], num_tokens: int) -> dict[str, Any]:
    """Return the size of texts in UTF-8, and percentiles of document lengths, up to 12 % too high."""
    num_bytes = sum(each.num_bytes for each in texts)
    of_length: Counter[int] = Counter()
    for each in texts:
        of_length.update({int(low): documents for low, (documents, _) in each.lengths.items()})
    bytes_per_token = round(num_bytes / num_tokens, 3) if num_tokens else None
    numbers: dict[str, Any] = {"text_bytes": num_bytes, "bytes_per_token": bytes_per_token}
    lows = sorted(of_length)
    num_up_to = list(itertools.accumulate(of_length[low] for low in lows))
    for share in (50, 90, 99):
        place = bisect.bisect_left(num_up_to, share / 100 * sum(of_length.values()))
        numbers[f"length_p{share}"] = longest_of(lows[place]) if lows else None
    return numbers


def _per_shard(state: DatasetState, manifests: Sequence[Manifest]) -> dict[str, dict[str, float]]:
    """Return minimum, median and maximum of sizes, times and memory over shards."""
    made = state.made.done.values()
    values: dict[str, list[float]] = {
        "tar_bytes": [each.tar.num_bytes for each in manifests],
        "num_tokens": [each.counts.num_tokens for each in manifests],
        "wall_s": [each.run.wall_s for each in made],
        "max_rss_bytes": [each.run.max_rss_bytes for each in made],
    }
    return {
        name: {"least": min(numbers), "median": statistics.median(numbers), "most": max(numbers)}
        for name, numbers in values.items()
        if numbers
    }


def _work(state: DatasetState) -> dict[str, Any]:
    made = [manifest.run for manifest in state.made.done.values()]
    if not made:
        return {}
    return {
        "began": min(each.began for each in made),
        "ended": max(each.ended for each in made),
        "cpu_s": round(sum(each.cpu_s for each in made), 1),
        "had_cpu_s": round(sum(each.wall_s * each.num_cpus for each in made), 1),
        "transform_cpu_s": round(sum(each.transform_cpu_s for each in made), 1),
        "nodes": dict(Counter(each.host for each in made).most_common()),
    }


def write_chat_template() -> None:
    """Write the chat template of the data set that the first argument names to NEW.jinja."""
    Path("NEW.jinja").write_text(need_plan(DataFolder(Path(sys.argv[1]))).options.chat_template, "utf-8")


def _how_to_repeat(folder: Path, plan: Plan, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the commands that make the same data set again, and the versions that made this one.

    The commands use the tokenizer and the chat template that are stored in the data set.
    """
    command = ["shardprep", "plan", "--input_dir", os.path.abspath(plan.input_dir), "--output_dir", "NEW"]  # noqa: PTH100
    command += ["--model_id", str(folder / TOKENIZER_DIR)]
    if not is_one_file_a_shard(plan):
        command += ["--num_shards", str(plan.num_shards)]
    command += flags_of(plan.options)
    if plan.max_bad_fraction != PrepConfig().max_bad_fraction:
        command += ["--max_bad_fraction", str(plan.max_bad_fraction)]
    command += ["--hash_inputs"] if plan.cuts[0].sha256 else []
    commands = []
    if plan.options.chat_template:
        commands.append(shlex.join(python_command("slurm.status:write_chat_template", str(folder))))
        command += ["--chat_template_file", "NEW.jinja"]
    commands += [shlex.join(command), "shardprep run NEW", "shardprep verify NEW"]
    versions: dict[str, Counter[str]] = {}
    for manifest in manifests:
        for name in ("shardprep", "engine", "python"):
            versions.setdefault(name, Counter())[getattr(manifest.run, name)[:80] or "?"] += 1
        for name, version in manifest.run.libraries.items():  # of --transform
            versions.setdefault(name[:80], Counter())[version[:80] or "?"] += 1
    return {
        "commands": commands,
        "transform_sha256": plan.options.transform_sha256,
        "versions": {name: dict(sorted(found.items())) for name, found in versions.items()},
    }


def _without_secrets(value: Any) -> Any:
    """Replace user names, passwords and keys in all URLs by ``***``."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", value))
    return value


def page_lines(data: Mapping[str, Any]) -> list[str]:
    """Render report.html.j2 into lines."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed for --json

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            console.printable(value) if type(value) is str else "-" if value is None else value
        ),
    )
    templates.filters.update(
        num="{:,}".format,
        short=console.short_number,
        bytes=console.short_bytes,
        time=console.short_time,
        clock=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        percent="{:.2%}".format,
        quoted=shlex.quote,
        ids=_short_ids,
    )
    return templates.get_template("report.html.j2").render(data).strip().split("\n")


def _short_ids(ids: str) -> str:
    """Format ids such as ``0-2,5`` for the page: ``0-2, 5``, with long lists cut."""
    shown = ids if len(ids) <= 150 else ids[: ids.rindex(",", 0, 150)] + ",..."
    return shown.replace(",", ", ")
