"""How fast shards are made, and how long the queued ones take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from slurm.reasons import meaning_of
from slurm.state import DatasetState
from slurm.waits import Wait


def speed_of(state: DatasetState, waits: Sequence[Wait]) -> tuple[int | None, int | None]:
    """Return tokens per second since the newest submission, and the seconds left by input bytes."""
    recent = list(state.made.done.values())
    since = 0.0
    if state.submissions:
        newest = state.submissions[-1]
        since = newest.submitted
        job_ids = {array.job_id for array in newest.arrays}
        recent = [each for each in recent if each.run.job_id in job_ids or each.run.began >= since]
    if not recent:
        return None, None
    queued = state.ids("running", "pending")
    until = time.time() if queued else max(each.run.ended for each in recent)
    since = since or min(each.run.began for each in recent)
    took_s = max(until - since, 1e-3)
    tokens_per_s = round(sum(each.counts.num_tokens for each in recent) / took_s)

    since_last_s = time.time() - max(each.run.ended for each in recent)
    running = _running_s(state, since_last_s)
    is_stuck = not running or any(meaning_of(each.reason)[1] for each in waits)
    # If a task takes much longer than any before, no estimate is possible.
    is_late = max(running, default=0) > 30 + 2 * max(each.run.wall_s for each in recent)
    num_bytes = sum(each.counts.input_bytes for each in recent)
    if is_stuck or is_late or not num_bytes:
        return tokens_per_s, None
    sizes = state.plan.shard_bytes()  # reads the whole table of the plan
    left_s = round(sum(sizes[shard_id] for shard_id in queued) * took_s / num_bytes)
    for each in waits:  # shards are not made before their job starts
        if each.starts:
            starts = time.mktime(time.strptime(each.starts, "%Y-%m-%dT%H:%M:%S"))
            left_s = max(left_s, round(starts - time.time()))
    return tokens_per_s, left_s


def _running_s(state: DatasetState, since_last_s: float) -> list[float]:
    """Return how long each running shard takes. ``since_last_s``: since any shard was made."""
    running: list[float] = []
    for shard in state.shards:
        if shard.state != "running":
            continue
        last = shard.attempts[-1]
        elapsed_s: float = last.elapsed_s
        if len(last.shards) > 1:  # it is late if it has made none for long
            elapsed_s = min(elapsed_s, since_last_s)
        running.append(elapsed_s)
    return running
