"""``status``: a report as data (``--json``) and text, drawn again and again (``--watch``); ``logs``.

States and causes come from ``slurm.state``; tokens, times, memory and nodes from the manifests of the shards
that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardprep.console import (
    Progress,
    counted,
    draw,
    num_cells,
    output_is_read,
    print_lines,
    printable,
    quoted,
    shards_text,
    short_time,
    source_lines,
)
from shardprep.errors import NotFound, ReadWriteError
from shardprep.format.manifest import ShardMaking, sum_of_sources
from shardprep.format.names import id_ranges
from shardprep.format.plan import need_plan
from slurm.commands import ask_patiently, user_name
from slurm.queue import meaning_of
from slurm.state import (
    BAD_INPUT,
    NODE_FAIL,
    OUT_OF_MEMORY,
    TIMEOUT,
    VANISHED,
    Attempt,
    DatasetState,
    Shard,
    StateName,
    cause_of,
    find_state,
    last_lines,
    log_tail,
    reason_to_leave,
    remedy_of,
)
from slurm.submissions import event_line, read_events

POLL_S = 5.0
_STATES: tuple[StateName, ...] = ("done", "running", "pending", "failed", "not submitted", "not visible")
_MAX_BAD_FRACTION = r"--max[_-]bad[_-]fraction[ =]([0-9]*\.?[0-9]+)"
STATUS_VERSION = 2  # of --json: it grows where a field goes or changes its meaning, not where one is added
MOST_TAILS = 8  # logs whose last lines are read
# Of --until_done: the last of these in the history says whether a controller should be there.
_ENDS_OF_CONTROLLERS = {"submit", "retry", "cancel", "finished", "stopped"}
_MOST_SLOW = 3  # shards and nodes that are named


def status(args: argparse.Namespace) -> int:
    """``status DATA``: where every shard is, and why what failed did."""
    plan, state = need_plan(args.output_dir), None
    while True:
        state = find_state(args.output_dir, plan, if_away=lambda _: None, before=state)
        data = report(state)
        lines = [json.dumps(data)] if args.json else report_lines(data)
        goes_on = state.live_job_ids() or (state.queue.away and state.ids("not visible"))
        if args.watch and not args.json and sys.stdout.isatty():
            last = "Ctrl-C ends this look, the jobs go on" if goes_on else lines[-1]
            rows = screen_rows([*lines[:-1], last], *shutil.get_terminal_size())
            draw("\033[H" + "".join(f"{row}\033[K\n" for row in rows) + "\033[J")
        else:
            print_lines(*lines)
        if not args.watch or not goes_on or not output_is_read():
            return 0
        time.sleep(POLL_S)


def wait_for_jobs(folder: Path) -> int:
    """One bar over the whole data set until no job of it is queued; 0 only where it is verified then.

    It ends, too, where jobs wait for what only a person can do, and no other job goes on.
    """
    plan = need_plan(folder)
    state: DatasetState | None = None
    sizes, done = plan.shard_bytes(), set[int]()

    def look() -> DatasetState:
        return find_state(folder, plan, before=state)

    with Progress(f"{plan.num_shards} shards", sum(sizes)) as progress:
        while True:
            state = ask_patiently(look)
            fresh = set(state.ids("done")) - done
            done |= fresh
            progress.add(sum(sizes[shard_id] for shard_id in fresh))
            if not state.jobs_to_wait_for() or state.waits_for_a_person():
                break
            time.sleep(POLL_S)
    print_lines(*report_lines(report(state)))
    return 0 if state.is_verified else ReadWriteError.exit_code


def logs(args: argparse.Namespace) -> int:
    """``logs DATA N``: the attempts at one shard, newest last, with the ends of their logs."""
    plan = need_plan(args.output_dir)
    if not 0 <= args.shard_id < plan.num_shards:
        raise NotFound(
            f"there is no shard {args.shard_id}: the plan has {plan.num_shards}, 0 to {plan.num_shards - 1}",
            found=f"shard {args.shard_id}",
            expected=f"0 to {plan.num_shards - 1}",
        )
    state = find_state(args.output_dir, plan, if_away=lambda _: None)
    shard = state.shards[args.shard_id]
    told = "" if shard.state == "done" else f", {counted(len(shard.attempts), 'attempt')}"
    lines = [f"shard {shard.shard_id:05d}: {shard.state}{told}"]
    lines += [f"  {state.why_not_visible()}"] if shard.state == "not visible" else []
    for each in shard.attempts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.record.began)) if each.record else ""
        where = f" on {each.node}" if each.node else ""
        lines.append(f"{when or 'task'} {each.task}{where}: {each.cause or each.state}")
        lines += [f"  {each.message}"] if each.message else []
        if each.log:
            lines += [f"  | {line[:300]}" for line in last_lines(log_tail(Path(each.log)), args.lines)]
            lines.append(f"  {each.log}")
        lines += [f"  {remedy_of(each.cause)}"] if each.cause and each is shard.attempts[-1] else []
    print_lines(*lines)
    return 0


def report(state: DatasetState) -> dict[str, Any]:
    """Everything that ``status`` says, as plain data."""
    made = list(state.made.done.values())
    failed = [shard for shard in state.shards if shard.state == "failed"]
    by_cause = state.failed_by_cause()
    return {
        "format": "shardprep-status",
        "version": STATUS_VERSION,
        "folder": str(state.folder),
        "num_shards": state.plan.num_shards,
        **{name.replace(" ", "_"): id_ranges(state.ids(name)) for name in _STATES},
        **{f"num_{name.replace(' ', '_')}": len(state.ids(name)) for name in _STATES},
        "causes": {cause: id_ranges(each.shard_id for each in of) for cause, of in by_cause.items()},
        "remedies": {cause: remedy_of(cause) for cause in by_cause},
        "can_retry": id_ranges(each.shard_id for each in failed if not reason_to_leave(each, 3, {})),
        "not_begun": id_ranges(shard.shard_id for shard in state.shards if shard.without_record),
        "failures": _failures(failed),
        "restarts": _restarts(state),
        "other_plan": id_ranges(state.made.other_plan),
        "broken": {str(shard_id): why for shard_id, why in state.made.broken.items()},
        "verify": state.verify,
        "verify_trouble": _verify_trouble(state),
        "verified": state.is_verified,
        "foreign_jobs": state.queue.foreign,
        "can_write": os.access(state.folder, os.W_OK),
        "accepting_args": _accepting_args(state),
        "num_foreign_attempts": len(state.records.foreign),
        "unreadable": state.records.unreadable,
        "has_slurm": shutil.which("sbatch") is not None,
        "has_jobs": bool(state.submissions or any(each.job_id for each in state.records.own)),
        "history": read_events(state.folder),
        "controller_jobs": state.queue.controllers,
        "held_jobs": sorted(state.held_jobs(), key=int),
        "stray_jobs": state.queue.strays,
        "unrecorded_jobs": state.queue.unrecorded,
        "slurm_away": state.queue.away,
        "why_not_visible": state.why_not_visible(),
        "suspended": id_ranges(
            each.shard_id for each in state.shards if any(attempt.is_suspended for attempt in each.attempts)
        ),
        "waits_for": waits_for(state),
        "wrong": id_ranges(state.made.wrong),
        "findings": {str(number): each.message for number, each in state.made.wrong.items()},
        **_speed(state, made),
        "controller_lost": _lost_controller(state),
        "sources": {name: asdict(of) for name, of in sum_of_sources(each.sources for each in made).items()},
        "slow_shards": _slow_shards(made),
        "slow_nodes": _slow_nodes(made),
        "unexplained": _unexplained(state),
    }


def _verify_trouble(state: DatasetState) -> str:
    """Return how the newest verify job ended that left the data set unverified, or why it never begins."""
    if not state.submissions or state.is_verified or state.queue.away:
        return ""
    last = state.submissions[-1]
    job = state.queue.jobs.get((last.number, last.verify_job_id, 0))
    if job and job.is_live:
        means, who = meaning_of(job.reason) if job.is_waiting else ("", "")
        return f"waits for {job.reason}: {means}" if who else ""
    records = [each for each in state.records.own if each.job_id == last.verify_job_id]
    return f"ended, {cause_of(records[-1], job, -1)}; its log: {records[-1].log}" if records else ""


def _accepting_args(state: DatasetState) -> str:
    """The worker's arguments that let shards of bad input leave out more; "" where they allow all already."""
    array = next((each.attempts[-1].array for each in state.failed_by_cause().get(BAD_INPUT, [])), None)
    args = array.request.worker_args if array else ""
    given = re.findall(_MAX_BAD_FRACTION, args)
    had = float(given[-1]) if given else state.plan.max_bad_fraction
    kept = re.sub(_MAX_BAD_FRACTION, "", args).strip()
    more = next((each for each in (0.05, 0.5, 1) if each > had), None)
    return f"{kept} --max_bad_fraction {more}".strip() if more else ""


def _speed(state: DatasetState, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """Tokens, and the speed since the newest submission; time left from input bytes."""
    numbers: dict[str, Any] = {"num_tokens": sum(each.num_tokens for each in made)}
    newest = state.submissions[-1] if state.submissions else None
    since = newest.submitted if newest else 0.0
    recent = [each for each in made if newest is None or newest.made(each) or each.began >= since]
    # No shard can have been begun before it was submitted, nor be finished in the future.
    ahead_s = max((each.ended - time.time() for each in recent), default=0.0)
    behind_s = max((since - each.began for each in recent), default=0.0)
    clock_s = ahead_s if ahead_s > 0 else min(0.0, -behind_s)  # of the nodes, against this one's
    numbers["clock_difference_s"] = round(clock_s)
    if not recent:
        return {**numbers, "tokens_per_s": None, "left_s": None}
    queued = state.ids("running", "pending")
    until = time.time() if queued else max(each.ended for each in recent) - clock_s
    took_s = max(until - (since or min(each.began for each in recent)), 1e-3)
    sizes = state.plan.shard_bytes() if queued else []  # it reads every part of the plan
    queued_bytes = sum(sizes[shard_id] for shard_id in queued)
    bytes_per_s = sum(each.input_bytes for each in recent) / took_s
    running = [shard.attempts[-1].elapsed_s for shard in state.shards if shard.state == "running"]
    if max(running, default=0) > 30 + 2 * max(each.wall_s for each in recent):
        bytes_per_s = 0  # a task takes much longer than any so far: nobody knows how long
    left_s = round(queued_bytes / bytes_per_s) if queued_bytes and bytes_per_s else None
    waits = waits_for(state)
    if not running or any(each["to_type"] for each in waits):
        left_s = None  # what waits begins nobody knows when
    elif left_s is not None:  # what begins later is not made earlier
        starts = [
            time.mktime(time.strptime(each["starts"], "%Y-%m-%dT%H:%M:%S"))
            for each in waits
            if each["starts"]
        ]
        left_s = max([left_s, *(round(each - time.time()) for each in starts)])
    return {
        **numbers,
        "tokens_per_s": round(sum(each.num_tokens for each in recent) / took_s),
        "left_s": left_s,
    }


def _lost_controller(state: DatasetState) -> str:
    """Return the job of --until_done that is gone and has not said why it stopped; "" where there is none."""
    last: dict[str, Any] = {}
    for event in read_events(state.folder):
        if event["event"] in _ENDS_OF_CONTROLLERS:
            last = event
    if not state.submissions or state.queue.away or last.get("user") != user_name():
        return ""  # of the folder that this one was copied from, or of a colleague
    job_id = str(last.get("controller", ""))
    return "" if job_id in state.queue.controllers else job_id


def _slow_shards(made: Sequence[ShardMaking]) -> list[dict[str, Any]]:
    """Those that took more than twice the median time per byte, slowest first."""
    timed = [each for each in made if each.input_bytes and each.wall_s > 1]
    if len(timed) < 4:
        return []
    median = statistics.median(each.bytes_per_s for each in timed)
    slow = sorted(
        (each for each in timed if each.bytes_per_s * 2 < median), key=lambda each: each.bytes_per_s
    )
    return [{"shard": each.shard_id, "node": each.node, "wall_s": each.wall_s} for each in slow[:_MOST_SLOW]]


def _slow_nodes(made: Sequence[ShardMaking]) -> list[dict[str, Any]]:
    """Those with less than 0.7 of the others' median speed, slowest first."""
    speeds: dict[str, list[float]] = {}
    for each in made:
        if each.input_bytes and each.wall_s > 1:
            speeds.setdefault(each.node, []).append(each.bytes_per_s)
    found = []
    for node, own in speeds.items():
        others = [speed for name, each in speeds.items() if name != node for speed in each]
        if others and len(own) > 1 and (share := statistics.median(own) / statistics.median(others)) < 0.7:
            found.append((share, node))
    return [{"node": node, "speed": round(share, 2)} for share, node in sorted(found)[:_MOST_SLOW]]


def _unexplained(state: DatasetState) -> str:
    """Return the command that may tell how tasks ended of which no record does; "" where there are none."""
    tasks = {shard.without_record for shard in state.shards if shard.without_record}
    for shard in state.shards:
        if shard.cause == VANISHED and shard.attempts[-1].record and shard.attempts[-1].record.job_id:
            tasks.add(shard.attempts[-1].task)
    if not tasks:
        return ""
    listed = shlex.quote(",".join(sorted(tasks)[:_MOST_FAILURES]))
    return f"sacct -D -j {listed} --format=JobID,State,ExitCode,NodeList,Elapsed,MaxRSS"


def waits_for(state: DatasetState) -> list[dict[str, Any]]:
    """Return why shards are pending, in Slurm's word and in ours, and what a person must type, if so."""
    found: dict[str, list[tuple[int, Attempt]]] = {}
    for shard in state.shards:
        if shard.state == "pending":
            attempt = next(each for each in shard.attempts if each.state == "pending")
            found.setdefault(attempt.reason, []).append((shard.shard_id, attempt))
    folder, waits = quoted(state.folder), []
    for reason, waiting in found.items():
        means, remedy = meaning_of(reason)
        jobs = sorted({attempt.task.partition("_")[0] for _, attempt in waiting}, key=int)
        commands = {"release": f"scontrol release {','.join(jobs)}", "cancel": f"shardprep cancel {folder}"}
        waits.append(
            {
                "reason": reason,
                "means": means,
                "to_type": commands.get(remedy, ""),
                "shards": id_ranges(shard_id for shard_id, _ in waiting),
                "starts": min((each.start_time for _, each in waiting if each.start_time), default=""),
            }
        )
    return waits


def _failures(failed: Sequence[Shard]) -> list[dict[str, Any]]:
    """The last attempt at each failed shard; the end of its log for the newest few."""
    last = {shard.shard_id: shard.attempts[-1] for shard in failed}
    ended = {
        number: (each.record.ended or each.record.began) if each.record else 0.0
        for number, each in last.items()
    }
    newest = sorted(last, key=lambda number: ended[number], reverse=True)[:MOST_TAILS]
    tails = {number: last_lines(log_tail(Path(last[number].log))) for number in newest if last[number].log}
    return [
        {
            "shard": shard.shard_id,
            "cause": each.cause,
            "num_attempts": sum(attempt.state == "failed" for attempt in shard.attempts),
            "task": each.task,
            "node": each.node,
            "log": each.log,
            "message": each.message,
            "ended": ended[shard.shard_id],
            "last_lines": [each.message] if each.message else tails.get(shard.shard_id, []),
        }
        for shard, each in zip(failed, last.values(), strict=True)
    ]


def _restarts(state: DatasetState) -> dict[str, int]:
    """Attempts of tasks that Slurm started again afterwards, counted by how they ended."""
    own = [each for each in state.records.own if each.job_id and each.shards]
    last = {each.key: each for each in own}
    found: Counter[str] = Counter()
    for each in own:
        made = [state.made.done.get(shard_id) for shard_id in each.shards]
        if last[each.key] is not each or all(of and of.job_id == each.job_id for of in made):
            cause = cause_of(each, state.queue.job_of(each), each.shards[0])
            found[f"{cause} on {each.node}" if cause == NODE_FAIL else cause] += 1
    return dict(found)


_MOST_FAILURES = 8  # shown with their last lines
_MOST_EVENTS = 5  # of the history
_CLOCKS_DIFFER_S = 30  # less is told by --json alone


def report_lines(data: dict[str, Any]) -> list[str]:
    """The report for people."""
    total, done = data["num_shards"], data["num_done"]
    lines = [f"{data['folder']}: {done} of {total} shards are done ({done / total:.1%})"]
    speed = "" if not data["tokens_per_s"] else f", {data['tokens_per_s']:,} tokens/s"
    left = "" if data["left_s"] is None else f", about {short_time(data['left_s'])} left"
    lines.append(f"  {data['num_tokens']:,} tokens{speed}{left}")
    lines += source_lines(data["sources"], all_in="--json")
    queued = ("running", "pending", "not_submitted")
    lines += [f"  {name.replace('_', ' ')}: {shards_text(data[name])}" for name in queued if data[name]]
    for item in data["waits_for"]:
        means = f": {item['means']}" if item["means"] else ""
        means += f"; type: {item['to_type']}" if item["to_type"] else ""
        starts = f"; expected to start at {item['starts'].replace('T', ' ')}" if item["starts"] else ""
        wait = "waits" if item["shards"].isdecimal() else "wait"
        lines.append(f"    {shards_text(item['shards'])} {wait} for {item['reason']}{means}{starts}")
    unseen = f"  not visible: {shards_text(data['not_visible'])} ({data['why_not_visible']})"
    lines += [unseen] if data["not_visible"] else []
    lines += [f"  what waits and runs is not known: {data['slurm_away']}"] if data["slurm_away"] else []
    lines += [f"  {note}" for note in notes(data)]
    for cause, ids in data["causes"].items():
        lines += [f"  failed, {cause}: {shards_text(ids)}", f"    {data['remedies'][cause]}"]
    lines += [
        f"  started again by Slurm after {how}: {counted(n, 'task')}" for how, n in data["restarts"].items()
    ]
    others = f"  of another plan: {shards_text(data['other_plan'])}; shardprep verify says what to do"
    lines += [others] if data["other_plan"] else []
    lines += [f"  not done, {why}" for why in data["broken"].values()][:_MOST_FAILURES]
    slow = [f"{it['shard']:05d} ({short_time(it['wall_s'])} on {it['node']})" for it in data["slow_shards"]]
    nodes = [f"{it['node']} ({it['speed']:.0%} of the others' speed)" for it in data["slow_nodes"]]
    lines += [f"  slowest shards: {', '.join(slow)}"] if slow else []
    lines += [f"  slow nodes: {', '.join(nodes)}"] if nodes else []
    for failure in data["failures"][:_MOST_FAILURES]:
        node = f" on {failure['node']}" if failure["node"] else ""
        tries = f", try {failure['num_attempts']}" if failure["num_attempts"] > 1 else ""
        lines.append(
            f"  shard {failure['shard']:05d}, task {failure['task']}{node}{tries}: {failure['cause']}"
        )
        lines += [f"    | {line[:300]}" for line in failure["last_lines"]]
        lines.append(f"    {failure['log']}")
    lines += [f"  job {each} sends again what fails (--until_done)" for each in data["controller_jobs"]]
    for event in data["history"][-_MOST_EVENTS:] if len(data["history"]) > 1 else []:
        when = time.strftime("%m-%d %H:%M", time.localtime(float(event.get("time", 0))))
        lines.append(f"  {when} {event_line(event)}")
    if (more := len(data["failures"]) - _MOST_FAILURES) > 0:
        lines.append(f"  and {more} more failures: --json has them all")
    return [*lines, next_line(data)]


_NOTES = {  # field -> what it says to people, most pressing first
    "unrecorded_jobs": "wait or run, and no record says for which shards: {}: its jobs folder was emptied",
    "stray_jobs": "held jobs that no record names: {}: a submission goes on, or was cut short",
    "suspended": "suspended: {}; to go on: scontrol resume JOB",
    "wrong": "found wrong by verify: {}; not done, to be made anew",
    "verify_trouble": "the verify job {}",
    "not_begun": "ended before they began: {} (cancelled, or Slurm could not start them)",
    "foreign_jobs": "jobs of the folder that this one was copied from are left alone: {0} "
    "(to end them: scancel {0})",
    "controller_lost": "job {0} of --until_done is gone and did not say why (killed, its time limit, or the "
    "folder was moved); its log: jobs/logs/control-{0}.log; to go on: shardprep retry --until_done",
    "unexplained": "no record says how these ended; Slurm's accounts may, where there are any: {}",
}


def notes(data: dict[str, Any]) -> list[str]:
    """What somebody should look at, a text each."""
    found = []
    for name, text in _NOTES.items():
        if value := data[name]:
            of_shards = name in ("suspended", "wrong", "not_begun")
            words = value if isinstance(value, str) else " ".join(value)
            found.append(text.format(shards_text(words) if of_shards else words))
    mend = f"its owner can type: chmod -R a+rX {shlex.quote(data['folder'])}"
    hidden = [why.partition("; its owner can type:")[0] for why in data["unreadable"]]
    found += [f"not known: {why}; {mend}" for why in hidden[:2]]
    if abs(data["clock_difference_s"]) > _CLOCKS_DIFFER_S:
        way = "ahead of" if data["clock_difference_s"] > 0 else "behind"
        by = short_time(abs(data["clock_difference_s"]))
        found.append(
            f"the nodes' clocks are {by} or more {way} this one: munge refuses to talk from 5 min on"
        )
    return found


def next_line(data: dict[str, Any]) -> str:
    """What to type next: a command that the program would not refuse, from any folder."""
    folder = shlex.quote(data["folder"])
    if data["slurm_away"] and data["has_jobs"]:
        return f"next: the same again, when Slurm answers: shardprep status {folder}"
    stuck = [each["to_type"] for each in data["waits_for"] if each["to_type"]]
    if data["held_jobs"] and data["can_write"]:
        ids = ",".join(data["held_jobs"])
        return f"next: scontrol release {ids} (they are held), or: shardprep cancel {folder}"
    if stuck and not data["running"] and data["can_write"]:
        return f"next: {stuck[0]}"
    if (data["running"] or data["pending"]) and not data["held_jobs"]:
        return f"next: shardprep status {folder} --watch"
    if not data["can_write"] and not data["verified"]:
        return f"next: its owner goes on, as you may not write into {folder}"
    if data["unrecorded_jobs"] or data["stray_jobs"]:
        return f"next: wait for the end of the jobs that no record names, or: shardprep cancel {folder}"
    if data["not_visible"]:
        return (
            "next: look where they can be seen; if they do not run: "
            f"shardprep submit {folder} --shards {data['not_visible']}"
        )
    if data["can_retry"] or data["failed"]:
        return f"next: {_retry_command(data, folder)}"
    if data["not_submitted"]:
        return f"next: shardprep {'submit' if data['has_slurm'] else 'run'} {folder}"
    if data["other_plan"] or not data["verified"]:
        return f"next: shardprep verify {folder}"
    return f"verified: {data['folder']}/index.json is there"


def _retry_command(data: dict[str, Any], folder: str) -> str:
    """What makes failed shards again; what only people can help with is said by its cause's remedy."""
    args = data["accepting_args"] if BAD_INPUT in data["causes"] else ""
    if not data["has_slurm"]:
        flags = f" {args}" if args and not data["can_retry"] else ""
        return f"shardprep run {folder}{flags}"
    if data["can_retry"]:
        return f"shardprep retry {folder}"
    if args:
        return f"shardprep retry {folder} --worker_args {shlex.quote(args)}"
    if {*data["causes"]} == {BAD_INPUT}:
        return "correct the input and plan into a new folder"
    most = max(each["num_attempts"] for each in data["failures"])
    again = f"shardprep retry {folder} --max_attempts {most + 3}"
    return again if {*data["causes"]} <= {OUT_OF_MEMORY, TIMEOUT} else f"correct the cause, then: {again}"


def screen_rows(lines: Sequence[str], width: int, height: int) -> list[str]:
    """Return lines as rows of a terminal: broken at blanks, the last line at the bottom, whole.

    A Korean letter takes two cells. Where there are more rows than the terminal has, those before the last
    line are left out; ``status`` without ``--watch`` prints them all.
    """
    rows = [row for line in lines[:-1] for row in _rows_of(line, width)]
    last = _rows_of(lines[-1], width)
    return [*rows[: max(height - 1 - len(last), 0)], *last]


def _rows_of(line: str, width: int) -> list[str]:
    """Break a line at blanks, where it has any, into rows of at most ``width`` cells, indented as it is."""
    text = printable(line)
    indent = " " * min(len(text) - len(text.lstrip(" ")) + 2, width // 2)
    rows = [""]
    for word in re.findall(r" *[^ ]+", text):
        if rows[-1].strip() and num_cells(rows[-1] + word) > width:
            rows.append(indent)
            word = word.lstrip(" ")
        for char in word:  # one that is wider than the terminal, such as a path
            if num_cells(rows[-1] + char) > width:
                rows.append(indent)
            rows[-1] += char
    return rows
