"""Which layout to choose for shards: published advice as a table, and one pure function that reads it.

Each shard is written by one process and read from start to end by many. Too many stripes cost a lock and an
object on every OST per file, and a file is lost with any one of its OSTs. With too few stripes one OST gets
most of the load. Nothing here was measured on a Lustre of ours: every row names its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lustre.layouts import Layout, counted, parse_layout_options, size_text
from shardprep.errors import LustreUsageError

# Shards per OST that readers can keep busy; from there on one stripe per shard spreads the load. An
# inference, no source says so.
MANY = 4
_GIB = 1 << 30
_NERSC = "docs.nersc.gov/performance/io/lustre (one file per process: keep one stripe)"
_WIKI = "wiki.lustre.org/Lustre_Striping_Best_Practices"
_AWS = "docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html#striping-data"
# Of FSx file systems made since 2023-08-25: -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32
_FSX = [(100 << 20, 1), (10 << 30, 8), (100 << 30, 16), (None, 32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """The shards that a layout is chosen for; None where it is not known."""

    shard_bytes: int | None = None
    num_shards: int | None = None
    num_readers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no data set has, with LustreUsageError."""
        for name in ("shard_bytes", "num_shards", "num_readers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LustreUsageError(f"--{name} is {value}, expected 1 or more")

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return self != DataSize()

    def text(self) -> str:
        """``500 shards of 2 GiB``, for a person."""
        number = "shards" if self.num_shards is None else counted(self.num_shards, "shard")
        return f"{number} of {'unknown size' if self.shard_bytes is None else size_text(self.shard_bytes)}"


class Row(NamedTuple):
    """One row: from the bytes of the row before up to ``below_bytes``, for few or many shards, or both."""

    below_bytes: int
    for_few: bool | None
    pfl_or_count: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout for shards, in a sentence why, and whose advice it is."""

    layout: Layout
    why: str
    source: str

    def lines(self, size: DataSize) -> list[str]:
        """The choice for a person."""
        return [f"for {size.text()}: {self.layout.text()}", f"  why: {self.why}", f"  source: {self.source}"]


_ENOUGH = f"at least {MANY} shards an OST keep every OST busy with a stripe each"
_FEW = f"fewer than {MANY} shards an OST: stripes spread them and their readers"
_SHARED = "one writer a shard and many shards: OSTs are shared by shards, not by stripes"
_AZURE = "Azure Managed Lustre, optimize-file-layouts (1 below 1 GiB)"
_WIDE = f"{_WIKI} (4 to 8); {_AWS}; which of 4 and 8 is an inference"
ROWS = (
    Row(100_000_000, None, "1", "below 100 MB more stripes bring nothing", f"OLCF's advice; {_AWS}"),
    Row(_GIB, None, "1", _SHARED, f"{_NERSC}; {_WIKI} (1 to 4); {_AZURE}"),
    Row(4 * _GIB, False, "1", _ENOUGH, f"{_NERSC}; the threshold of {MANY} is an inference"),
    Row(4 * _GIB, True, "4", _FEW, f"{_WIKI} (4 to 8 above 1 GiB for one client)"),
    Row(10 * _GIB, False, "4", "large shards, enough of them to share the OSTs", _WIDE),
    Row(10 * _GIB, True, "8", "large shards, and few of them", _WIDE),
)
_GROWS = "sizes that are mixed, unknown or above 10 GiB: stripes are added as a file grows"
_MIXED = Row(0, None, "1G:1,10G:4,-1:8", _GROWS, "composed of the rows above it")


def choose_layout(size: DataSize, num_osts: int) -> Choice:
    """Return the table's layout for these shards on ``num_osts`` OSTs. Pure.

    An unknown number of shards counts as few. Readers that are fewer than the OSTs cannot keep all busy: the
    shards are many where they are many for the OSTs that can be busy. No count is above the OSTs there are;
    0 OSTs are unknown.
    """
    num_busy = min(num_osts or size.num_readers or 0, size.num_readers or num_osts)
    is_few = size.num_shards is None or size.num_shards < MANY * num_busy
    shard_bytes = math.inf if size.shard_bytes is None else size.shard_bytes
    fitting = (row for row in ROWS if shard_bytes < row.below_bytes and row.for_few in {None, is_few})
    row = next(fitting, _MIXED)
    option = "pfl" if ":" in row.pfl_or_count else "count"
    layout = parse_layout_options(**{option: row.pfl_or_count}, size="4M")
    assert layout is not None
    parts = (
        replace(part, stripe_count=min(part.stripe_count, num_osts or part.stripe_count))
        for part in layout.components
    )
    return Choice(layout=replace(layout, components=tuple(parts)), why=row.why, source=row.source)


def why_leave(layout: Layout, of_file_system: Layout | None = None) -> str | None:
    """Say why a layout is left alone unless a user names another one; None for Lustre's plain one.

    A composite layout, a pool, several stripes, a start or a default of the folder's own is somebody's
    choice; whose, shows where the file system's root has the same (``of_file_system``).
    """
    if [(part.end_bytes, part.stripe_count) for part in layout.components] == _FSX:
        return "this is the default of FSx for Lustre, which is right for shards"
    if layout.is_composite:
        who = "the site" if layout == of_file_system else "somebody"
        return f"{who} chose this {'mirrored' if len(layout.mirrors) > 1 else 'progressive'} layout"
    if not layout.is_inherited and layout != of_file_system:
        return "this folder has a default of its own"
    part = layout.components[0]
    if part.pool or part.stripe_count != 1 or part.place:
        return "the site chose this default"
    return None


def load_text(layout: Layout, size: DataSize, num_osts: int) -> str:
    """Say how many shards the readers have open at once, and on how many OSTs: arithmetic, no measurement.

    The number of shards and of readers are known.
    """
    num_shards, num_readers = size.num_shards or 1, size.num_readers or 1
    num_open = min(num_shards, num_readers)
    # Most bytes of a file lie in the component with the most stripes.
    each = max(part.num_stripes(num_osts) for part in layout.of_file(size.shard_bytes or 1))
    busy = min(num_osts, max(1, each) * (1 if layout.fixed_place else num_open))
    text = (
        f"{counted(num_readers, 'reader')} have {num_open} of {counted(num_shards, 'shard')} open at once: "
        f"{busy} of {num_osts} OSTs at work, about {num_readers / max(1, busy):.3g} readers on each"
    )
    if num_readers > num_shards:
        text += f"; {num_readers / num_shards:.3g} readers share a shard, more shards would spread them"
    if layout.fixed_place:
        text += f", because every new file lies {layout.fixed_place}"
    return text
