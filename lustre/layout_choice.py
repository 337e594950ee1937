"""Which layout for shards: published advice as a table of rows, and one pure function that reads it.

Each shard is written by one process and read from start to end by many. Too many stripes cost a lock and an
object on every OST per file, and a file is lost with any one of its OSTs. With too few stripes one OST gets
most of the load. Nothing here was measured on a Lustre of ours: every row names its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lustre.layout import Layout, size_text
from lustre.layout_options import parse_layout_options

# Shards per OST that readers can keep busy; from there on one stripe per shard spreads the load. An
# inference, no source says so.
MANY = 4
_GIB = 1 << 30
NERSC = "docs.nersc.gov/performance/io/lustre (one file per process: keep one stripe)"
WIKI = "wiki.lustre.org/Lustre_Striping_Best_Practices"
AWS = "docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html#striping-data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: from the bytes of the row before up to ``below_bytes``, for few or many shards, or both."""

    below_bytes: int
    for_few: bool | None = None
    count: str = ""
    pfl: str | None = None
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout for shards, in a sentence why, and whose advice it is."""

    layout: Layout
    why: str
    source: str


ROWS = (
    Row(
        below_bytes=100_000_000,
        count="1",
        why="below 100 MB more stripes bring nothing",
        source=f"OLCF's advice on striping; {AWS}",
    ),
    Row(
        below_bytes=_GIB,
        count="1",
        why="one writer a shard and many shards: OSTs are shared by shards, not by stripes",
        source=f"{NERSC}; {WIKI} (1 to 4); Azure Managed Lustre, optimize-file-layouts (1 below 1 GiB)",
    ),
    Row(
        below_bytes=4 * _GIB,
        for_few=False,
        count="1",
        why=f"at least {MANY} shards an OST keep every OST busy with a stripe each",
        source=f"{NERSC}; the threshold of {MANY} is an inference",
    ),
    Row(
        below_bytes=4 * _GIB,
        for_few=True,
        count="4",
        why=f"fewer than {MANY} shards an OST: stripes spread them and their readers",
        source=f"{WIKI} (4 to 8 above 1 GiB for one client)",
    ),
    Row(
        below_bytes=10 * _GIB,
        for_few=False,
        count="4",
        why="large shards, enough of them to share the OSTs",
        source=f"{WIKI} (4 to 8); {AWS}; which of 4 and 8 is an inference",
    ),
    Row(
        below_bytes=10 * _GIB,
        for_few=True,
        count="8",
        why="large shards, and few of them",
        source=f"{WIKI} (4 to 8); {AWS}; which of 4 and 8 is an inference",
    ),
)
MIXED = Row(
    below_bytes=0,
    pfl="1G:1,10G:4,-1:8",
    why="sizes that are mixed, unknown or above 10 GiB: stripes are added as a file grows",
    source="composed of the rows above it",
)


def choose_layout(
    *, shard_bytes: int | None, num_shards: int | None, num_readers: int | None = None, num_osts: int
) -> Choice:
    """The table's layout for ``num_shards`` shards of ``shard_bytes`` on ``num_osts`` OSTs. Pure.

    An unknown number of shards counts as few. Readers that are fewer than the OSTs cannot keep all busy: the
    shards are many where they are many for the OSTs that can be busy. No count is above the OSTs there are;
    0 OSTs are unknown.
    """
    num_busy = num_osts if num_readers is None else min(num_osts or num_readers, num_readers)
    is_few = num_shards is None or num_shards < MANY * num_busy
    fitting = (
        row
        for row in ROWS
        if shard_bytes is not None and shard_bytes < row.below_bytes and row.for_few in {None, is_few}
    )
    row = next(fitting, MIXED)
    layout = parse_layout_options(count=row.count or None, pfl=row.pfl, size="4M")
    assert layout is not None
    return Choice(layout=_at_most(layout, num_osts), why=row.why, source=row.source)


def _at_most(layout: Layout, num_osts: int) -> Layout:
    parts = tuple(
        replace(part, stripe_count=min(part.stripe_count, num_osts or part.stripe_count))
        for part in layout.components
    )
    return replace(layout, components=parts)


def load_text(layout: Layout, *, shard_bytes: int, num_shards: int, num_readers: int, num_osts: int) -> str:
    """How many shards ``num_readers`` have open at once, and on how many OSTs: arithmetic, no measurement."""
    num_open = min(num_shards, num_readers)
    each = _most_stripes(layout, shard_bytes, num_osts)
    busy = min(num_osts, max(1, each) * (1 if layout.fixed_place else num_open))
    text = (
        f"{num_readers} readers have {num_open} of {num_shards} shards open at once: {busy} of {num_osts} "
        f"OSTs at work, about {num_readers / max(1, busy):.3g} readers on each"
    )
    if num_readers > num_shards:
        text += f"; {num_readers / num_shards:.3g} readers share a shard, more shards would spread them"
    if layout.fixed_place:
        text += f", because every new file lies {layout.fixed_place}"
    return text


def _most_stripes(layout: Layout, shard_bytes: int, num_osts: int) -> int:
    """Of the component with the most: the bytes behind it lie there."""
    parts = layout.of_file(shard_bytes)
    return max(
        replace(layout, components=(part,)).num_objects(part.start_bytes + 1, num_osts) for part in parts
    )


def shards_text(shard_bytes: int | None, num_shards: int | None) -> str:
    """``500 shards of 2 GiB``, for a person."""
    number = "shards" if num_shards is None else f"{num_shards} shards"
    return f"{number} of {'unknown size' if shard_bytes is None else size_text(shard_bytes)}"
