"""How the shards of a data set were made, for reports of progress: of each manifest only what they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.errors import BrokenShard
from shardprep.format.checked_json import Fields
from shardprep.format.names import MAX_MANIFEST_BYTES, manifest_path
from shardprep.format.source_counts import SourceCounts, sources_of
from shardprep.regular_files import read_regular


@dataclass(frozen=True, kw_only=True)
class ShardMaking:
    """What a manifest says of the attempt that made its shard: where, when, and at what price."""

    shard_id: int
    plan_id: str
    num_tokens: int
    input_bytes: int
    sources: Mapping[str, SourceCounts]
    node: str
    job_id: str  # Slurm's, of the array where it was one; empty where no job made it
    began: float  # seconds since 1970
    wall_s: float
    cpu_s: float
    num_cpus: int
    max_rss_bytes: int

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.wall_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes of input per second of wall time."""
        return self.input_bytes / max(self.wall_s, 1e-3)


def read_making(folder: Path, shard_id: int) -> ShardMaking:
    """Of shard-N.json only what reports of progress need; nothing else of the file is checked.

    A report of 10,000 shards reads as many manifests and decides nothing by them. This takes about 110 us
    per manifest on one core, ``read_manifest`` with its hash and all its checks about 430 us.
    Raises FileNotFoundError or NotADirectoryError where it is not there, BrokenShard where it does not hold
    these values, or ReadWriteError.
    """
    return making_of(shard_id, read_unchecked(folder, shard_id))


def read_unchecked(folder: Path, shard_id: int) -> Fields:
    """The values of shard-N.json, whose format, version and hash nobody looked at. Raises as read_making."""
    path = manifest_path(folder, shard_id)
    try:
        data = json.loads(read_regular(path, max_bytes=MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise BrokenShard(f"{path} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BrokenShard(f"{path} holds {type(data).__name__}, expected an object")
    return Fields(path, data)


def making_of(shard_id: int, manifest: Fields) -> ShardMaking:
    """What a manifest's values say of its making; they are taken. Raises BrokenShard."""
    run, counts = manifest.fields("run"), manifest.fields("counts")
    return ShardMaking(
        shard_id=shard_id,
        plan_id=manifest.fields("spec").text("plan_id"),
        num_tokens=counts.whole("num_tokens"),
        input_bytes=counts.whole("input_bytes"),
        sources=sources_of(counts),
        node=run.text("host"),
        job_id=_job_id(run),
        began=run.number("began"),
        wall_s=run.number("wall_s"),
        cpu_s=run.number("cpu_s"),
        num_cpus=run.whole("num_cpus", 1),
        max_rss_bytes=run.whole("max_rss_bytes"),
    )


def _job_id(run: Fields) -> str:
    found = run.each("slurm", Fields.text)
    return found.get("SLURM_ARRAY_JOB_ID") or found.get("SLURM_JOB_ID", "")
