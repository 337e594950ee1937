"""What the shards that are done say of their making: tokens, times, memory, nodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from preprocess.shard_format import BrokenShard, manifest_path
from slurm.checked_json import Fields, read_json

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
