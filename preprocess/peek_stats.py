"""``shardprep peek --stats``: how long the documents of each source are, as a histogram for a terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardprep.console import counted
from shardprep.format.manifest import Manifest

_BAR_COLUMNS = 30
_SOURCE_NAME = "."  # of files without a subfolder


@dataclass(frozen=True, kw_only=True)
class SourceStats:
    """The documents of a source in the finished shards.

    ``num_of_length`` counts documents by length: entry 2^b is those of 2^b to 2^(b+1) - 1 tokens, entry 0 the
    empty ones.
    """

    name: str
    num_documents: int
    num_tokens: int
    num_text_bytes: int  # as UTF-8
    num_of_length: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def stats_of(manifests: Iterable[Manifest]) -> list[SourceStats]:
    """Return the statistics of all sources, most tokens first."""
    num_documents: Counter[str] = Counter()
    num_tokens: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    lengths: dict[str, Counter[int]] = {}
    for manifest in manifests:
        for name, texts in (manifest.run.texts or {}).items():
            num_bytes[name] += texts.num_bytes
            of_source = lengths.setdefault(name, Counter())
            for low, (documents, tokens) in texts.lengths.items():
                num_documents[name] += documents
                num_tokens[name] += tokens
                of_source[_power_of_2(int(low))] += documents
    names = sorted(lengths, key=lambda name: (-num_tokens[name], name))
    return [
        SourceStats(
            name=name or _SOURCE_NAME,
            num_documents=num_documents[name],
            num_tokens=num_tokens[name],
            num_text_bytes=num_bytes[name],
            num_of_length=dict(sorted(lengths[name].items())),
        )
        for name in names
    ]


def _power_of_2(length: int) -> int:
    """Return the largest power of 2 that is at most ``length``, 0 for 0."""
    return 1 << length.bit_length() >> 1


def stats_lines(stats: Iterable[SourceStats], *, columns: int = 80) -> list[str]:
    """Return a histogram for each source, in lines of at most this many columns."""
    lines: list[str] = []
    for source in stats:
        documents = counted(source.num_documents, "document")
        tokens = counted(source.num_tokens, "token")
        tokens_per_document = source.num_tokens / max(1, source.num_documents)
        bytes_per_token = source.num_text_bytes / max(1, source.num_tokens)
        lines.append(f"{source.name}: {documents}, {tokens}")
        means = f"{tokens_per_document:,.0f} tokens per document, {bytes_per_token:.2f} bytes per token"
        lines.append(f"  {means}")
        lines += _histogram(source.num_of_length, columns)
        lines.append("")
    return lines


def _histogram(num_of_length: Mapping[int, int], columns: int) -> list[str]:
    labels = ["tokens"]
    numbers = ["documents"]
    counts = [0]  # the head has no bar
    num_bits = [low.bit_length() for low in num_of_length]
    for bits in range(min(num_bits, default=1), max(num_bits, default=0) + 1):
        low = 1 << bits >> 1
        num = num_of_length.get(low, 0)
        labels.append(f"{low:,}" if low < 2 else f"{low:,} to {2 * low - 1:,}")
        numbers.append(f"{num:,}")
        counts.append(num)
    label_columns = max(map(len, labels))
    number_columns = max(map(len, numbers))
    bar_columns = min(_BAR_COLUMNS, columns - label_columns - number_columns - 6)
    most = max(*counts, 1)
    lines = []
    for label, number, num in zip(labels, numbers, counts, strict=True):
        bar = "#" * -(-num * max(bar_columns, 1) // most)
        lines.append(f"  {label:>{label_columns}}  {number:>{number_columns}} {bar}".rstrip())
    return lines
