"""What the manifests of a data set say, added up: each is read once, and only its numbers are kept."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardprep.errors import BrokenShard, ReadWriteError
from shardprep.format.checked_json import Fields
from shardprep.format.manifest import ShardCounts
from shardprep.format.shard_making import ShardMaking, making_of, read_unchecked
from shardprep.regular_files import NOT_THERE

_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server
_AT_ONCE = 64  # manifests between two steps of the progress
_LATEST_S = 253_402_300_799  # the end of the year 9999: a date can be written
VERSIONS = ("shardprep", "engine", "python")


@dataclass(frozen=True, kw_only=True)
class ReadShard:
    """One manifest."""

    making: ShardMaking
    counts: ShardCounts
    tar_bytes: int
    idx_bytes: int
    versions: tuple[str, ...]  # of VERSIONS
    num_restarts: int  # by Slurm, of the task that made it


@dataclass(kw_only=True)
class ShardSums:
    """All manifests of one plan. Lists are in the order of ``made``, which is that of the shards."""

    made: list[ShardMaking] = field(default_factory=list)
    tar_bytes: list[int] = field(default_factory=list)
    idx_bytes: int = 0
    num_left_out: list[int] = field(default_factory=list)  # documents in quarantine, of each shard
    numbers: Counter[str] = field(default_factory=Counter)  # the whole numbers of ShardCounts
    quarantined: Counter[str] = field(default_factory=Counter)  # reason -> documents
    histogram: list[int] = field(default_factory=list)  # [b]: documents of 2**(b-1) <= tokens < 2**b
    versions: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in VERSIONS})
    num_restarted: int = 0  # shards whose task Slurm had started again
    other_plan: list[int] = field(default_factory=list)
    not_read: list[int] = field(default_factory=list)  # gone meanwhile, or broken: ``verify`` says more

    def add(self, shard: ReadShard) -> None:
        """Add one shard of the plan."""
        counts = shard.counts
        self.made.append(shard.making)
        self.tar_bytes.append(shard.tar_bytes)
        self.idx_bytes += shard.idx_bytes
        self.num_left_out.append(sum(counts.quarantined.values()))
        for item in dataclasses.fields(counts):
            if isinstance(value := getattr(counts, item.name), int):
                self.numbers[item.name] += value
        self.quarantined.update(counts.quarantined)
        longer = len(counts.length_histogram) - len(self.histogram)
        self.histogram += [0] * longer
        for number, documents in enumerate(counts.length_histogram):
            self.histogram[number] += documents
        for name, version in zip(VERSIONS, shard.versions, strict=True):
            self.versions[name][version] += 1
        self.num_restarted += shard.num_restarts > 0


def sum_shards(
    folder: Path, plan_id: str, shard_ids: Sequence[int], progress: Callable[[int], object]
) -> ShardSums:
    """Read these manifests, eight at a time, and add them up; ``progress`` is told how many more were read.

    10,000 take about 3 s of CPU. What cannot be read is named in the sums and left out of them.
    """
    sums = ShardSums()
    parts = [shard_ids[start : start + _AT_ONCE] for start in range(0, len(shard_ids), _AT_ONCE)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found_of_parts = pool.map(lambda part: list(_read_part(folder, part)), parts)
        for part, found in zip(parts, found_of_parts, strict=True):
            for shard_id, shard in zip(part, found, strict=True):
                if shard is None:
                    sums.not_read.append(shard_id)
                elif shard.making.plan_id != plan_id:
                    sums.other_plan.append(shard_id)
                else:
                    sums.add(shard)
            progress(len(part))
    return sums


def _read_part(folder: Path, shard_ids: Sequence[int]) -> Iterator[ReadShard | None]:
    for shard_id in shard_ids:
        try:
            yield _read(folder, shard_id)
        except (*NOT_THERE, BrokenShard, ReadWriteError):
            yield None


def _read(folder: Path, shard_id: int) -> ReadShard:
    fields = read_unchecked(folder, shard_id)
    run, counts = fields.mapping("run"), fields.mapping("counts")
    spec = fields.mapping("spec")
    making = making_of(shard_id, Fields(fields.path, {"run": run, "counts": counts, "spec": spec}))
    if making.ended > _LATEST_S:
        raise fields.wrong("run.began", making.began, "seconds since 1970")
    return ReadShard(
        making=making,
        counts=ShardCounts.from_json(Fields(fields.path, counts, "counts.")),
        tar_bytes=fields.stamp("tar").num_bytes,
        idx_bytes=fields.stamp("idx").num_bytes,
        versions=tuple(str(run.get(name, "?"))[:80] for name in VERSIONS),
        num_restarts=_restarts_of(run.get("slurm")),
    )


def _restarts_of(slurm: Any) -> int:
    """How often Slurm had started the task before, by the variables that its last attempt saw."""
    text = slurm.get("SLURM_RESTART_COUNT", "0") if isinstance(slurm, dict) else "0"
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 6 else 0
