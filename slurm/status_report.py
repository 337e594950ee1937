"""The report of ``status``: numbers as plain data for programs (``--json``), and the same as text.

States and causes come from ``dataset_state``; tokens, times, memory and nodes from the manifests of the
shards that are done. One read per manifest, eight at a time: 10,000 manifests take about 1 s of CPU.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardprep.errors import BrokenShard, ReadWriteError
from shardprep.format.names import INDEX_NAME, id_ranges
from shardprep.format.shard_making import ShardMaking, read_making
from shardprep.regular_files import NOT_THERE, size_of_file
from slurm.dataset_state import DatasetState, ShardState, is_live
from slurm.failure_causes import NODE_FAIL
from slurm.resource_use import asked_for, core_hours, resource_use

# The beginning of Slurm's reason -> what it means for who waits.
_REASONS = {
    "Resources": "the next free nodes are for it",
    "Priority": "other jobs go before it",
    "JobArrayTaskLimit": "as many run at once as --max_parallel allows",
    "JobHeldUser": "held; scontrol release lets it go on",
    "JobHeldAdmin": "held by an administrator; ask them",
    "launch failed requeued held": "held, because it could not be started; scontrol release tries again",
    "BeginTime": "it was started again and waits a little",
    "Dependency": "it waits for another job",
    "ReqNodeNotAvail": "the nodes that it needs are down, drained or reserved; sinfo -R",
    "Nodes required for job": "the nodes that it needs are down, drained or reserved; sinfo -R",
    "PartitionDown": "the partition is down; ask an administrator",
    "PartitionInactive": "the partition is inactive; ask an administrator",
    "PartitionNodeLimit": "no job of this size may ever run in the partition: cancel, and ask for less",
    "PartitionTimeLimit": "the partition allows no job so long: cancel, and ask for less --time_min",
    "PartitionConfig": "no node of the partition is so large: cancel, and ask for less",
    "BadConstraints": "no node has what is asked for: cancel, and change --constraint",
    "Reservation": "its reservation has not begun",
    "InvalidAccount": "the account may not be used: cancel, and change --account",
    "InvalidQOS": "the QOS may not be used: cancel, and change --qos",
    "Assoc": "a limit of the account is reached",
    "QOS": "a limit of the QOS is reached",
    "MaxMem": "a limit of memory is reached",
}
STATUS_VERSION = 1  # of --json: it grows where a field goes or changes its meaning, not where one is added
_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server
_MOST_FAILURES = 8  # shown with their last lines, in the text


def read_makings(folder: Path, shard_ids: Sequence[int]) -> list[ShardMaking]:
    """How these shards were made, in their order; a manifest that is gone or broken is left out.

    ``verify`` names it.
    """

    def read_part(part: Sequence[int]) -> list[ShardMaking]:
        return [each for shard_id in part if (each := _read(folder, shard_id))]

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = [shard_ids[number::_NUM_THREADS] for number in range(_NUM_THREADS)]
        found = [each for part in pool.map(read_part, parts) for each in part]
    return sorted(found, key=lambda each: each.shard_id)


def _read(folder: Path, shard_id: int) -> ShardMaking | None:
    try:
        return read_making(folder, shard_id)
    except (*NOT_THERE, BrokenShard, ReadWriteError):
        return None


def report(state: DatasetState, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """Everything that ``status`` says, as plain data."""
    failed = [shard for shard in state.shards if shard.state == "failed"]
    return {
        "format": "shardprep-status",
        "version": STATUS_VERSION,
        "folder": str(state.folder),
        "num_shards": state.plan.num_shards,
        **{
            name.replace(" ", "_"): id_ranges(state.ids(name))
            for name in ("done", "running", "pending", "failed", "not submitted", "not visible")
        },
        "num_done": len(state.ids("done")),
        "causes": {cause: id_ranges(ids) for cause, ids in causes(failed).items()},
        "failures": [_failure(shard) for shard in failed],
        "restarts": _restarts(state),
        "other_plan": id_ranges(each.shard_id for each in made if each.plan_id != state.plan.plan_id),
        "verify": state.verify,
        "verified": size_of_file(state.folder / INDEX_NAME) is not None,
        "held_jobs": state.held,
        "stray_jobs": state.shown.strays,
        "slurm_away": state.shown.away,
        "why_not_visible": state.why_not_visible(),
        "waits_for": waits_for(state.shards),
        "wrong": id_ranges(state.wrong),
        **_speed(state, made),
        "slow_shards": [
            {"shard": each.shard_id, "node": each.node, "wall_s": each.wall_s} for each in slow_shards(made)
        ],
        "slow_nodes": [{"node": node, "speed": round(share, 2)} for node, share in slow_nodes(made)],
        "efficiency": resource_use(state, made),
        "core_hours": core_hours(state, made),
        "asked_for": asked_for(state),
    }


def _speed(state: DatasetState, made: Sequence[ShardMaking]) -> dict[str, Any]:
    """Tokens, and the speed since the newest submission; time left from input bytes."""
    numbers: dict[str, Any] = {"num_tokens": sum(each.num_tokens for each in made)}
    since = state.submissions[-1].submitted if state.submissions else 0.0
    recent = [each for each in made if each.began >= since]
    if not recent:
        return {**numbers, "tokens_per_s": None, "left_s": None}
    going = any(is_live(attempts[-1]) for attempts in state.task_attempts.values())
    until = time.time() if going else max(each.ended for each in recent)
    took_s = max(until - min(each.began for each in recent), 1e-3)
    sizes = state.plan.shard_bytes()
    queued_bytes = sum(sizes[shard_id] for shard_id in state.ids("running", "pending"))
    bytes_per_s = sum(each.input_bytes for each in recent) / took_s
    return {
        **numbers,
        "tokens_per_s": round(sum(each.num_tokens for each in recent) / took_s),
        "left_s": round(queued_bytes / bytes_per_s) if queued_bytes and bytes_per_s else None,
    }


def slow_shards(made: Sequence[ShardMaking], number: int = 3) -> list[ShardMaking]:
    """The shards that took more than twice the median time per byte, slowest first."""
    timed = [each for each in made if each.input_bytes and each.wall_s > 1]
    if len(timed) < 4:
        return []
    median = statistics.median(each.bytes_per_s for each in timed)
    slow = [each for each in timed if each.bytes_per_s * 2 < median]
    return sorted(slow, key=lambda each: each.bytes_per_s)[:number]


def slow_nodes(made: Sequence[ShardMaking], number: int = 3) -> list[tuple[str, float]]:
    """(node, its speed as a share of the others' median), where that is below 0.7."""
    speeds: dict[str, list[float]] = {}
    for each in made:
        if each.input_bytes and each.wall_s > 1:
            speeds.setdefault(each.node, []).append(each.bytes_per_s)
    if len(speeds) < 2:
        return []
    found = []
    for node, own in speeds.items():
        others = statistics.median(speed for name, each in speeds.items() if name != node for speed in each)
        share = statistics.median(own) / others
        if share < 0.7 and len(own) > 1:
            found.append((node, share))
    return sorted(found, key=lambda pair: pair[1])[:number]


def waits_for(shards: Sequence[ShardState]) -> list[dict[str, Any]]:
    """Why shards are pending, in Slurm's word and in ours, and when the first is expected to start."""
    found: dict[str, dict[str, Any]] = {}
    for shard in shards:
        if shard.state != "pending":
            continue
        attempt = next(each for each in shard.attempts if each.state == "pending")
        item = found.setdefault(attempt.reason, {"ids": [], "starts": ""})
        item["ids"].append(shard.shard_id)
        item["starts"] = min(filter(None, (item["starts"], attempt.start_time)), default="")
    return [
        {
            "reason": reason,
            "means": next((words for word, words in _REASONS.items() if reason.startswith(word)), ""),
            "shards": id_ranges(item["ids"]),
            "starts": item["starts"],
        }
        for reason, item in found.items()
    ]


def causes(failed: Sequence[ShardState]) -> dict[str, list[int]]:
    """Cause -> the shards whose last attempt ended so, the most frequent first."""
    found: dict[str, list[int]] = {}
    for shard in failed:
        found.setdefault(shard.cause or "", []).append(shard.shard_id)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _failure(shard: ShardState) -> dict[str, Any]:
    last = shard.attempts[-1]
    return {
        "shard": shard.shard_id,
        "cause": last.cause,
        "num_attempts": len(shard.attempts),
        "task": last.task,
        "node": last.node,
        "log": last.log,
        "last_lines": last.last_lines,
    }


def _restarts(state: DatasetState) -> dict[str, int]:
    """Attempts of tasks that Slurm started again afterwards, counted by how they ended."""
    found: dict[str, int] = {}
    for attempts in state.task_attempts.values():
        for attempt in attempts[:-1]:
            words = f"{attempt.state} on {attempt.node}" if attempt.state == NODE_FAIL else attempt.state
            found[words] = found.get(words, 0) + 1
    return found


def report_text(data: dict[str, Any]) -> str:
    """The report for people."""
    total, done = data["num_shards"], data["num_done"]
    lines = [f"{data['folder']}: {done} of {total} shards are done ({done / total:.1%})"]
    speed = "" if not data["tokens_per_s"] else f", {data['tokens_per_s']:,} tokens/s"
    left = "" if data["left_s"] is None else f", about {_duration(data['left_s'])} left"
    lines.append(f"  {data['num_tokens']:,} tokens{speed}{left}")
    queued = ("running", "pending", "not_submitted")
    lines += [f"  {name.replace('_', ' ')}: {data[name]}" for name in queued if data[name]]
    lines += _waiting_lines(data)
    if data["not_visible"]:
        lines.append(f"  not visible: {data['not_visible']} ({data['why_not_visible']})")
    if data["slurm_away"]:
        lines.append(f"  what waits and runs is not known: {data['slurm_away']}")
    if data["wrong"]:
        lines.append(f"  found wrong by the verify job: {data['wrong']}; retry makes them anew")
    if data["stray_jobs"]:
        ids = ", ".join(data["stray_jobs"])
        lines.append(f"  held jobs that no record names: {ids}: a submission goes on, or was cut short")
    lines += [f"  failed, {cause}: {ids}" for cause, ids in data["causes"].items()]
    lines += [f"  started again by Slurm after {how}: {n} task(s)" for how, n in data["restarts"].items()]
    if data["other_plan"]:
        lines.append(f"  of another plan: {data['other_plan']}; python -m preprocess verify says what to do")
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
    return "\n".join([*lines, _next_line(data)])


def _waiting_lines(data: dict[str, Any]) -> list[str]:
    lines = []
    for item in data["waits_for"]:
        means = f": {item['means']}" if item["means"] else ""
        starts = f"; expected to start at {item['starts'].replace('T', ' ')}" if item["starts"] else ""
        lines.append(f"    {item['shards']} wait for {item['reason']}{means}{starts}")
    return lines


def _slow_lines(data: dict[str, Any]) -> list[str]:
    shards = [
        f"{item['shard']:05d} ({item['wall_s']:.0f} s on {item['node']})" for item in data["slow_shards"]
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
    longest = f"{used['longest_task_s']:.0f} s{limit} for the longest task"
    wasted = "" if hours["failed"] is None else f", {hours['failed']:.3g} of them by attempts that failed"
    return [
        f"  used: {shares}, {longest}",
        f"  core-hours: {hours['used']:.3g}{wasted}",
        f"  next time ask for: {asked} (submit --auto does)",
    ]


def _next_line(data: dict[str, Any]) -> str:
    folder = shlex.quote(data["folder"])
    if data["slurm_away"]:
        return f"next: the same again, when Slurm answers: python -m slurm status {folder}"
    if data["held_jobs"]:
        ids = ",".join(data["held_jobs"])
        return f"next: scontrol release {ids} (they are held), or: python -m slurm cancel {folder}"
    if data["running"] or data["pending"]:
        return f"next: python -m slurm status {folder} --watch"
    if data["stray_jobs"]:
        return f"next: python -m slurm cancel {folder}, if nobody submits just now"
    if data["failed"] or data["wrong"]:
        return f"next: python -m slurm retry {folder}"
    if data["not_visible"]:
        return f"next: look where they can be seen; if they do not run: submit {folder} --shards IDS"
    if data["not_submitted"]:
        return f"next: python -m slurm submit {folder}"
    if not data["verified"]:
        return f"next: the verify job is {data['verify'] or 'missing'}; python -m preprocess verify {folder}"
    return f"verified: {data['folder']}/index.json is there"


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
