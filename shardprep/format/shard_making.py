"""How shards were made, and what each source gave: of each manifest what reports need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.console import short_bytes
from shardprep.errors import BrokenShard
from shardprep.files import read_regular
from shardprep.format.checked_json import Fields
from shardprep.format.names import MAX_MANIFEST_BYTES, manifest_path

_MOST_NAMED = 12  # sources that have a line of their own


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What one source gave: the first subfolder of the input, or what --source_field names."""

    num_documents: int
    num_tokens: int  # padding excluded
    num_bytes: int  # of the input files; with --source_field, of the documents' text
    num_quarantined: int

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def sources_of(fields: Fields) -> dict[str, SourceCounts]:
    """The counts of each source, by name. Raises BrokenShard."""
    return fields.value("sources", dict[str, SourceCounts])  # type: ignore[no-any-return]


def sum_of_sources(shards: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """The counts of several shards added up, in the order of the sources' names."""
    found: dict[str, SourceCounts] = {}
    for sources in shards:
        for name, counts in sources.items():
            found[name] = found[name] + counts if name in found else counts
    return dict(sorted(found.items()))


def source_lines(sources: Mapping[str, Mapping[str, int]], *, all_in: str) -> list[str]:
    """A line per source for people, those of most tokens first; none where there is one source alone.

    ``sources``: the fields of SourceCounts, by name. ``all_in`` has those that get no line.
    """
    if len(sources) < 2:
        return []
    largest = sorted(sources.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    lines = [
        f"  {name}: {of['num_documents']:,} documents, {of['num_tokens']:,} tokens, "
        f"{short_bytes(of['num_bytes'])}, {of['num_quarantined']:,} left out"
        for name, of in largest[:_MOST_NAMED]
    ]
    if (more := len(largest) - _MOST_NAMED) > 0:
        lines.append(f"  and {more} more sources: {all_in} has them all")
    return lines


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


def read_unchecked(folder: Path, shard_id: int) -> Fields:
    """The values of shard-N.json, whose format, version and hash nobody looked at, for reports of progress.

    It takes a fourth of the time of ``read_manifest``. Raises FileNotFoundError, NotADirectoryError,
    BrokenShard or ReadWriteError.
    """
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
    slurm = run.each("slurm", Fields.text)
    return ShardMaking(
        shard_id=shard_id,
        plan_id=manifest.fields("spec").text("plan_id"),
        num_tokens=counts.whole("num_tokens"),
        input_bytes=counts.whole("input_bytes"),
        sources=sources_of(counts),
        node=run.text("host"),
        job_id=slurm.get("SLURM_ARRAY_JOB_ID") or slurm.get("SLURM_JOB_ID", ""),
        began=run.number("began"),
        wall_s=run.number("wall_s"),
        cpu_s=run.number("cpu_s"),
        num_cpus=run.whole("num_cpus", 1),
        max_rss_bytes=run.whole("max_rss_bytes"),
    )
