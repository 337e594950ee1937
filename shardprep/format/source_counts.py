"""What each source gave: counts in manifests and the index, their sums, and the lines that tell people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardprep.console import short_bytes
from shardprep.format.checked_json import Fields

_MOST_NAMED = 12  # sources that have a line of their own


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What one source gave: the first subfolder of the input, or what --source_field names."""

    num_documents: int
    num_tokens: int  # padding excluded
    num_bytes: int  # of the input files; with --source_field, of the documents' text
    num_quarantined: int

    @staticmethod
    def from_json(fields: Fields) -> SourceCounts:
        """Raises BrokenShard."""
        counts = SourceCounts(
            num_documents=fields.whole("num_documents"),
            num_tokens=fields.whole("num_tokens"),
            num_bytes=fields.whole("num_bytes"),
            num_quarantined=fields.whole("num_quarantined"),
        )
        fields.end()
        return counts

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            num_documents=self.num_documents + other.num_documents,
            num_tokens=self.num_tokens + other.num_tokens,
            num_bytes=self.num_bytes + other.num_bytes,
            num_quarantined=self.num_quarantined + other.num_quarantined,
        )


def sources_of(fields: Fields) -> dict[str, SourceCounts]:
    """The counts of each source, by name. Raises BrokenShard."""
    return fields.each("sources", lambda inner, name: SourceCounts.from_json(inner.fields(name)))


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
    lines = [f"  {name}: {_counts(counts)}" for name, counts in largest[:_MOST_NAMED]]
    if (more := len(largest) - _MOST_NAMED) > 0:
        lines.append(f"  and {more} more sources: {all_in} has them all")
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return (
        f"{counts['num_documents']:,} documents, {counts['num_tokens']:,} tokens, "
        f"{short_bytes(counts['num_bytes'])}, {counts['num_quarantined']:,} left out"
    )
