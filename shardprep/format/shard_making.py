"""How shards were made, and what each source gave: of each manifest what reports need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from shardprep.console import short_bytes
from shardprep.errors import BrokenShard
from shardprep.files import read_regular
from shardprep.format.checked_json import CONTENT_HASH, MOST, Fields, content_sha256
from shardprep.format.names import FORMAT_VERSION, MAX_MANIFEST_BYTES

_MOST_NAMED = 12  # sources that have a line of their own


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What one source gave: the first subfolder of the input, or what --source_field names."""

    num_documents: int
    num_tokens: int  # padding excluded
    num_bytes: int  # of the input files; with --source_field, of the documents' text
    num_quarantined: int

    def __add__(self, other: SourceCounts) -> SourceCounts:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return SourceCounts(**sums)


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """The texts of one source, as they were encoded: stripped, changed, rendered; for reports alone."""

    num_bytes: int  # as UTF-8
    num_chars: int
    # Documents and tokens by length in tokens, rounded down to four binary digits: "22" is 22 and 23.
    lengths: dict[str, list[int]]


LENGTH_BITS = 4  # that a length keeps


def longest_of(low: int) -> int:
    """The largest number of tokens that is counted at ``low`` in the lengths of TextCounts."""
    return low + (1 << max(low.bit_length() - LENGTH_BITS, 0)) - 1


def texts_of(fields: Fields) -> dict[str, TextCounts] | None:
    """The texts of each source, of a manifest's ``run``; None where they were not counted yet.

    Raises BrokenShard.
    """
    if not fields.has("texts"):
        return None
    texts: dict[str, TextCounts] = fields.value("texts", dict[str, TextCounts])
    for name, counts in texts.items():
        for low, numbers in counts.lengths.items():
            if not re.fullmatch("[0-9]{1,19}", low) or len(numbers) != 2:
                raise fields.wrong(f"texts.{name}.lengths", {low: numbers}, "documents and tokens by length")
    return texts


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


class ShardMaking(NamedTuple):
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


def read_making(path: Path | str, shard_id: int) -> tuple[ShardMaking, dict[str, Any]]:
    """How a shard was made and all values of its manifest, of which nobody checked bounds and agreement.

    For reports of progress: it takes a quarter of the time of ``read_manifest``. Raises FileNotFoundError,
    NotADirectoryError, BrokenShard or ReadWriteError.
    """
    try:
        data = orjson.loads(read_regular(path, max_bytes=MAX_MANIFEST_BYTES))
        return _making_of(shard_id, data), data
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BrokenShard(f"{path} is no manifest ({error})") from None


def _making_of(shard_id: int, data: dict[str, Any]) -> ShardMaking:
    """Raises what ``read_making`` catches. ``Fields`` would say more, and take three times as long."""
    if data["shard_id"] != shard_id:
        raise ValueError(f"it is of shard {data['shard_id']!r:.20}")
    if data["version"] != FORMAT_VERSION or data[CONTENT_HASH] != content_sha256(data):
        raise ValueError("it was altered since it was written, or is of another version")
    run, counts = data["run"], data["counts"]
    slurm, sources = run["slurm"], counts["sources"]
    making = ShardMaking(
        shard_id=shard_id,
        plan_id=data["spec"]["plan_id"],
        num_tokens=counts["num_tokens"],
        input_bytes=counts["input_bytes"],
        sources={name: SourceCounts(**of) for name, of in sources.items()},
        node=run["host"],
        job_id=slurm.get("SLURM_ARRAY_JOB_ID") or slurm.get("SLURM_JOB_ID", ""),
        began=run["began"],
        wall_s=run["wall_s"],
        cpu_s=run["cpu_s"],
        num_cpus=run["num_cpus"],
        max_rss_bytes=run["max_rss_bytes"],
    )
    wholes = [making.num_tokens, making.input_bytes, making.num_cpus - 1, making.max_rss_bytes]
    for of in sources.values():
        wholes += of.values()
    for value in (*wholes, making.began, making.wall_s, making.cpu_s):
        if not 0 <= value <= MOST or type(value) is bool:
            raise ValueError(f"{value!r:.60} in run or counts")
    for value in wholes:
        if type(value) is not int:
            raise ValueError(f"{value!r:.60} in run or counts, expected a whole number")
    for text in (making.plan_id, making.node, making.job_id):
        if type(text) is not str or "\0" in text:
            raise ValueError(f"{text!r:.60} in spec or run, expected a text")
    return making
