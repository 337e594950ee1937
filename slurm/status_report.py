"""The report of ``status``: numbers as plain data, for programs (``--json``) and for the texts made of it.

States and causes come from ``dataset_state``; tokens, times, memory and nodes from the manifests of the
shards that are done.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardprep.format.names import id_ranges
from shardprep.format.shard_making import ShardMaking
from shardprep.format.source_counts import sum_of_sources
from slurm.dataset_state import DatasetState, ShardAttempt, ShardState, StateName, can_retry
from slurm.failure_causes import NODE_FAIL, cause_of, last_lines, log_tail, remedy_of
from slurm.job_records import read_events
from slurm.resource_use import asked_for, core_hours, resource_use

# The beginning of Slurm's reason -> what it means for who waits.
_REASONS = {
    "Resources": "the next free nodes are for it",
    "Priority": "other jobs go before it",
    "JobArrayTaskLimit": "as many run at once as --max_parallel allows",
    "JobHeldUser": "held; scontrol release lets it go on",
    "JobHeldAdmin": "held by an administrator; ask them",
    "launch failed requeued held": "held, because it could not be started; scontrol release tries again",
    "BeginTime": "its start time has not come; one that was started again waits a little",
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
_STATES: tuple[StateName, ...] = ("done", "running", "pending", "failed", "not submitted", "not visible")
STATUS_VERSION = 1  # of --json: it grows where a field goes or changes its meaning, not where one is added
MOST_TAILS = 8  # logs whose last lines are read


def report(state: DatasetState) -> dict[str, Any]:
    """Everything that ``status`` says, as plain data."""
    made = list(state.made.done.values())
    failed = [shard for shard in state.shards if shard.state == "failed"]
    return {
        "format": "shardprep-status",
        "version": STATUS_VERSION,
        "folder": str(state.folder),
        "num_shards": state.plan.num_shards,
        **{name.replace(" ", "_"): id_ranges(state.ids(name)) for name in _STATES},
        **{f"num_{name.replace(' ', '_')}": len(state.ids(name)) for name in _STATES},
        "causes": {cause: id_ranges(ids) for cause, ids in causes(failed).items()},
        "remedies": {cause: remedy_of(cause) for cause in causes(failed)},
        "can_retry": id_ranges(can_retry(state)),
        "not_begun": id_ranges(shard.shard_id for shard in state.shards if shard.has_not_begun),
        "failures": _failures(failed),
        "restarts": _restarts(state),
        "other_plan": id_ranges(state.made.other_plan),
        "broken": {str(shard_id): why for shard_id, why in state.made.broken.items()},
        "verify": state.verify,
        "verified": state.is_verified,
        "foreign_jobs": [job.job_id for each in state.foreign for job in each.jobs],
        "num_foreign_attempts": len(state.attempts.foreign),
        "unreadable": state.attempts.unreadable,
        "has_slurm": shutil.which("sbatch") is not None,
        "has_jobs": bool(state.submissions or any(each.job_id for each in state.attempts.own)),
        "history": read_events(state.folder),
        "controller_jobs": state.shown.controllers,
        "held_jobs": state.held,
        "stray_jobs": state.shown.strays,
        "unrecorded_jobs": state.shown.unrecorded,
        "slurm_away": state.shown.away,
        "why_not_visible": state.why_not_visible(),
        "accounts_away": state.shown.accounts_away,
        "suspended": id_ranges(_suspended(state.shards)),
        "waits_for": waits_for(state.shards),
        "wrong": id_ranges(state.wrong),
        "findings": {str(number): each.message for number, each in state.made.wrong.items()},
        **_speed(state, made),
        "sources": {name: asdict(of) for name, of in sum_of_sources(each.sources for each in made).items()},
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
    newest = state.submissions[-1] if state.submissions else None
    since = newest.submitted if newest else 0.0
    recent = [each for each in made if newest is None or newest.made(each) or each.began >= since]
    clock_s = clock_difference_s(recent, since, time.time())
    numbers["clock_difference_s"] = round(clock_s)
    if not recent:
        return {**numbers, "tokens_per_s": None, "left_s": None}
    going = bool(state.ids("running", "pending"))
    until = time.time() + clock_s if going else max(each.ended for each in recent)
    took_s = max(until - min(each.began for each in recent), 1e-3)
    sizes = state.plan.shard_bytes()
    queued_bytes = sum(sizes[shard_id] for shard_id in state.ids("running", "pending"))
    bytes_per_s = sum(each.input_bytes for each in recent) / took_s
    running = [shard.attempts[-1].elapsed_s for shard in state.shards if shard.state == "running"]
    if max(running, default=0) > 30 + 2 * max(each.wall_s for each in recent):
        bytes_per_s = 0  # a task takes much longer than any so far: nobody knows how long
    return {
        **numbers,
        "tokens_per_s": round(sum(each.num_tokens for each in recent) / took_s),
        "left_s": round(queued_bytes / bytes_per_s) if queued_bytes and bytes_per_s else None,
    }


def clock_difference_s(made: Sequence[ShardMaking], submitted: float, now: float) -> float:
    """How far the nodes' clocks are ahead of this one (below 0: behind), at least; 0 where nothing says so.

    No shard can have been begun before it was submitted, nor be finished in the future.
    """
    ahead_s = max((each.ended - now for each in made), default=0.0)
    behind_s = max((submitted - each.began for each in made), default=0.0)
    return ahead_s if ahead_s > 0 else min(0.0, -behind_s)


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


def _suspended(shards: Sequence[ShardState]) -> list[int]:
    return [
        shard.shard_id
        for shard in shards
        if shard.state == "running" and any(attempt.is_suspended for attempt in shard.attempts)
    ]


def causes(failed: Sequence[ShardState]) -> dict[str, list[int]]:
    """Cause -> the shards whose last attempt ended so, the most frequent first."""
    found: dict[str, list[int]] = {}
    for shard in failed:
        found.setdefault(shard.cause or "", []).append(shard.shard_id)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _failures(failed: Sequence[ShardState]) -> list[dict[str, Any]]:
    """The last attempt at each failed shard; the end of its log for the newest few."""
    newest = sorted(failed, key=lambda shard: _ended(shard.attempts[-1]), reverse=True)[:MOST_TAILS]
    with_tail = {shard.shard_id for shard in newest}
    return [_failure(shard, has_tail=shard.shard_id in with_tail) for shard in failed]


def _ended(attempt: ShardAttempt) -> float:
    return (attempt.record.ended or attempt.record.began) if attempt.record else 0.0


def _failure(shard: ShardState, *, has_tail: bool) -> dict[str, Any]:
    last = shard.attempts[-1]
    lines = last_lines(log_tail(Path(last.log))) if has_tail and last.log else []
    return {
        "shard": shard.shard_id,
        "cause": last.cause,
        "num_attempts": sum(each.state == "failed" for each in shard.attempts),
        "task": last.task,
        "node": last.node,
        "log": last.log,
        "message": last.message,
        "ended": _ended(last),
        "last_lines": [last.message] if last.message else lines,
    }


def _restarts(state: DatasetState) -> dict[str, int]:
    """Attempts of tasks that Slurm started again afterwards, counted by how they ended."""
    last = {each.key: each for each in state.attempts.own if each.job_id}
    found: dict[str, int] = {}
    for each in state.attempts.own:
        is_over = last[each.key] is not each if each.job_id else False
        made = [state.made.done.get(shard_id) for shard_id in each.shards]
        if each.job_id and made and (is_over or all(of and of.job_id == each.job_id for of in made)):
            cause = cause_of(each, state.shown.task_of(each), each.shards[0])
            words = f"{cause} on {each.node}" if cause == NODE_FAIL else cause
            found[words] = found.get(words, 0) + 1
    return found
