"""What the shards that are done say of their making: tokens, times, memory, nodes.

``status O``: one report of numbers, as JSON for programs and as text for people.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.id_ranges import id_ranges

from shardprep.errors import BrokenShard
from shardprep.format.names import INDEX_NAME, manifest_path
from shardprep.regular_files import size_of_file
from slurm.checked_json import Fields, read_json
from slurm.dataset_state import NODE_FAIL, DatasetState, ShardState, is_live

_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server


@dataclass(frozen=True, kw_only=True)
class ShardRun:
    """The ``run`` part of one manifest, and its counts."""

    shard_id: int
    plan_id: str
    num_tokens: int
    input_bytes: int
    node: str
    began: float  # seconds since 1970
    wall_s: float
    cpu_s: float
    num_cpus: int
    max_rss_bytes: int

    @property
    def ended(self) -> float:
        return self.began + self.wall_s

    @property
    def bytes_per_s(self) -> float:
        return self.input_bytes / max(self.wall_s, 1e-3)


def read_shard_runs(folder: Path, shard_ids: Sequence[int]) -> list[ShardRun]:
    """One read a manifest, eight at once; one that went away, or is none, is left out: verify names it."""

    def read_part(part: Sequence[int]) -> list[ShardRun]:
        return [run for shard_id in part if (run := _read(folder, shard_id))]

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = [shard_ids[number::_NUM_THREADS] for number in range(_NUM_THREADS)]
        return sorted(
            (run for runs in pool.map(read_part, parts) for run in runs), key=lambda run: run.shard_id
        )


def _read(folder: Path, shard_id: int) -> ShardRun | None:
    path = manifest_path(folder, shard_id)
    try:
        data = Fields(path, read_json(path))
        run, counts = data.inner("run"), data.inner("counts")
        return ShardRun(
            shard_id=shard_id,
            plan_id=data.inner("spec").text("plan_id"),
            num_tokens=counts.integer("num_tokens"),
            input_bytes=counts.integer("input_bytes"),
            node=run.text("host"),
            began=run.number("began"),
            wall_s=run.number("wall_s"),
            cpu_s=run.number("cpu_s"),
            num_cpus=run.integer("num_cpus", at_least=1),
            max_rss_bytes=run.integer("max_rss_bytes"),
        )
    except (OSError, BrokenShard):
        return None


def slow_shards(runs: Sequence[ShardRun], number: int = 3) -> list[ShardRun]:
    """The shards that took twice the median time a byte, slowest first."""
    timed = [run for run in runs if run.input_bytes and run.wall_s > 1]
    if len(timed) < 4:
        return []
    median = statistics.median(run.bytes_per_s for run in timed)
    slow = [run for run in timed if run.bytes_per_s * 2 < median]
    return sorted(slow, key=lambda run: run.bytes_per_s)[:number]


def slow_nodes(runs: Sequence[ShardRun], number: int = 3) -> list[tuple[str, float]]:
    """(node, its speed as a share of the others' median), where that is below 0.7."""
    speeds: dict[str, list[float]] = {}
    for run in runs:
        if run.input_bytes and run.wall_s > 1:
            speeds.setdefault(run.node, []).append(run.bytes_per_s)
    if len(speeds) < 2:
        return []
    found = []
    for node, own in speeds.items():
        others = statistics.median(speed for name, each in speeds.items() if name != node for speed in each)
        share = statistics.median(own) / others
        if share < 0.7 and len(own) > 1:
            found.append((node, share))
    return sorted(found, key=lambda pair: pair[1])[:number]


_MOST_FAILURES = 8  # shown with their last lines, in the text


def report(state: DatasetState, runs: Sequence[ShardRun]) -> dict[str, Any]:
    """Everything that ``status`` says, as plain data."""
    failed = [shard for shard in state.shards if shard.state == "failed"]
    return {
        "folder": str(state.folder),
        "num_shards": state.plan.num_shards,
        **{
            name.replace(" ", "_"): id_ranges(state.ids(name))
            for name in ("done", "running", "pending", "failed", "not submitted")
        },
        "num_done": len(state.ids("done")),
        "causes": {cause: id_ranges(ids) for cause, ids in causes(failed).items()},
        "failures": [_failure(shard) for shard in failed],
        "restarts": _restarts(state),
        "other_plan": id_ranges(run.shard_id for run in runs if run.plan_id != state.plan.plan_id),
        "verify": state.verify,
        "verified": size_of_file(state.folder / INDEX_NAME) is not None,
        "held_jobs": state.held,
        **_speed(state, runs),
        "slow_shards": [
            {"shard": run.shard_id, "node": run.node, "wall_s": run.wall_s} for run in slow_shards(runs)
        ],
        "slow_nodes": [{"node": node, "speed": round(share, 2)} for node, share in slow_nodes(runs)],
        "efficiency": efficiency(state, runs),
    }


def causes(failed: Sequence[ShardState]) -> dict[str, list[int]]:
    """Cause -> the shards whose last try ended so, the most frequent first."""
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
    """Earlier runs of tasks that Slurm started again, by how they ended."""
    found: dict[str, int] = {}
    for runs in state.runs.values():
        for run in runs[:-1]:
            words = f"{run.state} on {run.node}" if run.state == NODE_FAIL else run.state
            found[words] = found.get(words, 0) + 1
    return found


def _speed(state: DatasetState, runs: Sequence[ShardRun]) -> dict[str, Any]:
    """Tokens, and the speed since the newest submission; time left from input bytes."""
    numbers: dict[str, Any] = {"num_tokens": sum(run.num_tokens for run in runs)}
    since = state.submissions[-1].submitted if state.submissions else 0.0
    recent = [run for run in runs if run.began >= since]
    if not recent:
        return {**numbers, "tokens_per_s": None, "left_s": None}
    going = any(is_live(each[-1]) for each in state.runs.values())
    until = time.time() if going else max(run.ended for run in recent)
    took_s = max(until - min(run.began for run in recent), 1e-3)
    sizes = state.plan.shard_bytes()
    queued_bytes = sum(sizes[shard_id] for shard_id in state.ids("running", "pending"))
    bytes_per_s = sum(run.input_bytes for run in recent) / took_s
    return {
        **numbers,
        "tokens_per_s": round(sum(run.num_tokens for run in recent) / took_s),
        "left_s": round(queued_bytes / bytes_per_s) if queued_bytes and bytes_per_s else None,
    }


def efficiency(state: DatasetState, runs: Sequence[ShardRun]) -> dict[str, Any]:
    """What the newest submission used of what it asked for, and what to ask for next time.

    Memory is the largest that the accounts saw of a task; without them, or where their samples (30 s
    apart by default) missed it, the largest process's by its manifest, times the processes of a task.
    """
    if not state.submissions or not runs:
        return {}
    array = state.submissions[-1].arrays[0]
    timed = [run for run in runs if run.wall_s > 0]
    cpu = sum(run.cpu_s for run in timed) / max(sum(run.wall_s * run.num_cpus for run in timed), 1e-3)
    seen = [run.max_rss_bytes for each in state.runs.values() for run in each]
    num_processes = min(array.request.cpus_per_task, max(len(ids) for ids in array.shards_of_tasks()))
    own = max(run.max_rss_bytes for run in runs)
    rss = max(seen, default=0)
    rss = rss if rss >= own else own * num_processes
    longest_s = max(run.wall_s for run in runs)
    cpus = array.request.cpus_per_task
    next_cpus = max(1, math.ceil(cpus * cpu * 1.2)) if cpu < 0.5 else cpus
    return {
        "cpu": round(cpu, 2),
        "max_rss_mb": math.ceil(rss / 2**20),
        "mem_mb": array.mem_mb,
        "longest_shard_s": round(longest_s, 1),
        "time_min": array.time_min,
        "next_time": {
            "cpus_per_task": next_cpus,
            "mem_gb": math.ceil(rss * 1.25 / 2**28) / 4,
            "time_min": math.ceil(longest_s * 2 / 60) + 5,
        },
    }


def report_text(data: dict[str, Any]) -> str:
    """The report for people."""
    total, done = data["num_shards"], data["num_done"]
    lines = [f"{data['folder']}: {done} of {total} shards are done ({done / total:.1%})"]
    speed = "" if not data["tokens_per_s"] else f", {data['tokens_per_s']:,} tokens/s"
    left = "" if data["left_s"] is None else f", about {_duration(data['left_s'])} left"
    lines.append(f"  {data['num_tokens']:,} tokens{speed}{left}")
    queued = ("running", "pending", "not_submitted")
    lines += [f"  {name.replace('_', ' ')}: {data[name]}" for name in queued if data[name]]
    lines += [f"  failed, {cause}: {ids}" for cause, ids in data["causes"].items()]
    lines += [f"  started again by Slurm after {how}: {n} task(s)" for how, n in data["restarts"].items()]
    if data["other_plan"]:
        lines.append(f"  of another plan: {data['other_plan']}; python -m preprocess verify says what to do")
    lines += _slow_lines(data)
    lines += _efficiency_lines(data["efficiency"])
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


def _slow_lines(data: dict[str, Any]) -> list[str]:
    shards = [
        f"{item['shard']:05d} ({item['wall_s']:.0f} s on {item['node']})" for item in data["slow_shards"]
    ]
    nodes = [f"{item['node']} ({item['speed']:.0%} of the others' speed)" for item in data["slow_nodes"]]
    lines = [f"  slowest shards: {', '.join(shards)}"] if shards else []
    return lines + ([f"  slow nodes: {', '.join(nodes)}"] if nodes else [])


def _efficiency_lines(used: dict[str, Any]) -> list[str]:
    if not used:
        return []
    of = f" of {used['mem_mb']}" if used["mem_mb"] else ""
    limit = f" of {used['time_min']} min" if used["time_min"] else ""
    asked = " ".join(f"--{name} {value:g}" for name, value in used["next_time"].items())
    shares = f"{used['cpu']:.0%} of the CPUs, {used['max_rss_mb']}{of} MB of memory"
    longest = f"{used['longest_shard_s']:.0f} s{limit} for the longest shard"
    return [f"  used: {shares}, {longest}", f"  next time ask for: {asked}"]


def _next_line(data: dict[str, Any]) -> str:
    folder = data["folder"]
    if data["held_jobs"]:
        ids = ",".join(data["held_jobs"])
        return f"next: scontrol release {ids} (they are held), or: python -m slurm cancel {folder}"
    if data["running"] or data["pending"]:
        return f"next: python -m slurm status {folder} --watch"
    if data["failed"]:
        return f"next: python -m slurm retry {folder}"
    if data["not_submitted"]:
        return f"next: python -m slurm submit {folder}"
    if not data["verified"]:
        return f"next: the verify job is {data['verify'] or 'missing'}; python -m preprocess verify {folder}"
    return f"verified: {folder}/index.json is there"


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
