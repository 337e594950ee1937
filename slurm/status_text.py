"""The report of ``status`` as text: for people, and in Prometheus' format."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from shardprep.console import counted, short_time
from shardprep.files import publish_bytes
from shardprep.format.names import ids_of_ranges
from shardprep.format.shard_making import source_lines

_MOST_FAILURES = 8  # shown with their last lines
_METRIC_STATES = ("done", "running", "pending", "failed", "not_submitted", "not_visible")
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
    lines += [f"  {name.replace('_', ' ')}: {data[name]}" for name in queued if data[name]]
    lines += _waiting_lines(data)
    lines += _note_lines(data)
    lines += [f"  failed, {cause}: {ids}" for cause, ids in data["causes"].items()]
    lines += [
        f"  started again by Slurm after {how}: {counted(n, 'task')}" for how, n in data["restarts"].items()
    ]
    if data["other_plan"]:
        lines.append(f"  of another plan: {data['other_plan']}; shardprep verify says what to do")
    lines += _slow_lines(data)
    lines += _efficiency_lines(data)
    lines += _asked_lines(data["asked_for"])
    for failure in data["failures"][:_MOST_FAILURES]:
        node = f" on {failure['node']}" if failure["node"] else ""
        tries = f", try {failure['num_attempts']}" if failure["num_attempts"] > 1 else ""
        lines.append(
            f"  shard {failure['shard']:05d}, task {failure['task']}{node}{tries}: {failure['cause']}"
        )
        lines += [f"    | {line[:300]}" for line in failure["last_lines"]]
        lines.append(f"    {failure['log']}")
    if (more := len(data["failures"]) - _MOST_FAILURES) > 0:
        lines.append(f"  and {more} more failures: --json has them all")
    return [*lines, next_line(data)]


def _waiting_lines(data: dict[str, Any]) -> list[str]:
    lines = []
    for item in data["waits_for"]:
        means = f": {item['means']}" if item["means"] else ""
        starts = f"; expected to start at {item['starts'].replace('T', ' ')}" if item["starts"] else ""
        lines.append(f"    {item['shards']} wait for {item['reason']}{means}{starts}")
    return lines


def _note_lines(data: dict[str, Any]) -> list[str]:
    """What is not known, and what somebody should look at."""
    lines = []
    if data["not_visible"]:
        lines.append(f"  not visible: {data['not_visible']} ({data['why_not_visible']})")
    if data["slurm_away"]:
        lines.append(f"  what waits and runs is not known: {data['slurm_away']}")
    return lines + [f"  {note}" for note in notes(data)]


def notes(data: dict[str, Any]) -> list[str]:
    """What somebody should look at, a text each, most pressing first."""
    found = []
    if data["unrecorded_jobs"]:
        ids = ", ".join(data["unrecorded_jobs"])
        found.append(f"wait or run, and no record says for which shards: {ids}: its jobs folder was emptied")
    if data["stray_jobs"]:
        ids = ", ".join(data["stray_jobs"])
        found.append(f"held jobs that no record names: {ids}: a submission goes on, or was cut short")
    if data["suspended"]:
        found.append(f"suspended: {data['suspended']}; scontrol resume JOB lets them go on")
    if data["wrong"]:
        found.append(f"found wrong by the verify job: {data['wrong']}; retry makes them anew")
    if abs(data["clock_difference_s"]) > _CLOCKS_DIFFER_S:
        way = "ahead of" if data["clock_difference_s"] > 0 else "behind"
        by = short_time(abs(data["clock_difference_s"]))
        found.append(
            f"the nodes' clocks are {by} or more {way} this one: munge refuses to talk from 5 min on"
        )
    if data["accounts_away"]:
        found.append(f"Slurm's accounts give no answer, causes are from logs: {data['accounts_away']}")
    return found


def _slow_lines(data: dict[str, Any]) -> list[str]:
    shards = [
        f"{item['shard']:05d} ({short_time(item['wall_s'])} on {item['node']})"
        for item in data["slow_shards"]
    ]
    nodes = [f"{item['node']} ({item['speed']:.0%} of the others' speed)" for item in data["slow_nodes"]]
    lines = [f"  slowest shards: {', '.join(shards)}"] if shards else []
    return lines + ([f"  slow nodes: {', '.join(nodes)}"] if nodes else [])


def _asked_lines(asked: dict[str, dict[str, Any]]) -> list[str]:
    words = [f"{name} {item['value']} ({item['source']})" for name, item in asked.items()]
    return [f"  asked for: {', '.join(words)}"] if words else []


def _efficiency_lines(data: dict[str, Any]) -> list[str]:
    used, hours = data["efficiency"], data["core_hours"]
    if not used:
        return []
    of = f" of {used['mem_mb']}" if used["mem_mb"] else ""
    limit = f" of {used['time_min']} min" if used["time_min"] else ""
    asked = " ".join(f"--{name} {value:g}" for name, value in used["next_time"].items())
    shares = f"{used['cpu']:.0%} of the CPUs, {used['max_rss_mb']}{of} MB of memory"
    longest = f"{short_time(used['longest_task_s'])}{limit} for the longest task"
    wasted = "" if hours["failed"] is None else f", {hours['failed']:.3g} of them by attempts that failed"
    return [
        f"  used: {shares}, {longest}",
        f"  core-hours: {hours['used']:.3g}{wasted}",
        f"  next time ask for: {asked} (submit --auto does)",
    ]


def next_line(data: dict[str, Any]) -> str:
    """What to type next."""
    folder = shlex.quote(data["folder"])
    if data["slurm_away"]:
        return f"next: the same again, when Slurm answers: shardprep status {folder}"
    if data["held_jobs"]:
        ids = ",".join(data["held_jobs"])
        return f"next: scontrol release {ids} (they are held), or: shardprep cancel {folder}"
    if data["running"] or data["pending"]:
        return f"next: shardprep status {folder} --watch"
    if data["unrecorded_jobs"]:
        return f"next: wait for their end, or: shardprep cancel {folder}"
    if data["stray_jobs"]:
        return f"next: shardprep cancel {folder}, if nobody submits just now"
    if data["failed"] or data["wrong"]:
        return f"next: shardprep retry {folder}"
    if data["not_visible"]:
        return f"next: look where they can be seen; if they do not run: submit {folder} --shards IDS"
    if data["not_submitted"]:
        return f"next: shardprep submit {folder}"
    if not data["verified"]:
        return f"next: the verify job is {data['verify'] or 'missing'}; shardprep verify {folder}"
    return f"verified: {data['folder']}/index.json is there"


def write_metrics(path: Path, data: dict[str, Any]) -> None:
    """Write the file of ``status --metrics``, for node_exporter's textfile collector: whole, by a rename.

    Raises CannotWrite or ReadWriteError.
    """
    publish_bytes(path, metrics_text(data).encode("utf-8"))


def metrics_text(data: dict[str, Any]) -> str:
    """The report as lines of metrics; what is not known has no line.

    Names and labels are an interface: they stay.
    """
    folder = {"folder": data["folder"]}
    lines: list[str] = []

    def add(name: str, text: str, samples: list[tuple[dict[str, str], float | None]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.extend([f"# HELP shardprep_{name} {text}", f"# TYPE shardprep_{name} gauge"])
            lines.extend(f"shardprep_{name}{_labels({**folder, **own})} {value}" for own, value in known)

    states = [({"state": name}, float(_number(data[name]))) for name in _METRIC_STATES]
    add("shards", "Shards of the data set by state.", list(states))
    failed = [({"cause": cause}, float(_number(ids))) for cause, ids in data["causes"].items()]
    add("shards_failed", "Failed shards by cause.", list(failed))
    add("tokens", "Tokens of the shards that are done.", [({}, data["num_tokens"])])
    speed = data["tokens_per_s"]
    add("tokens_per_second", "Tokens per second since the newest submission.", [({}, speed)])
    add("seconds_left", "Seconds until what is queued will be made, at this speed.", [({}, data["left_s"])])
    hours = data["core_hours"]
    core_hours = [({"kind": "all"}, hours["used"]), ({"kind": "failed"}, hours["failed"])]
    add("core_hours", "Core-hours of all attempts, and of those that failed.", core_hours)
    add("verified", "1 where index.json is there.", [({}, float(data["verified"]))])
    add("slurm_answers", "1 where Slurm said what waits and runs.", [({}, float(not data["slurm_away"]))])
    return "\n".join([*lines, ""])


def _number(ids: str) -> int:
    return len(ids_of_ranges(ids)) if ids else 0


def _labels(labels: dict[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
