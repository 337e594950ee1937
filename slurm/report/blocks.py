"""What a report is made of, for the page and the text alike: sections of facts, tables, charts, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names and values."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence or two."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; the first column names the row. ``shares``: 0 to 1, a bar for each row that has one."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    shares: Sequence[float | None] = ()


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A histogram: a column for each step, with labels below its edges."""

    title: str
    heights: Sequence[float]
    names: Sequence[str]  # what each column stands for
    values: Sequence[str]  # its height in words
    labels: Sequence[tuple[float, str]]  # (place, 0 to 1, of a label; its text)


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """A value over time, as an area; or, with ``ranges``, least, median and most of each step."""

    title: str
    most: str  # the largest value in words
    heights: Sequence[float] = ()  # 0 to 1
    ranges: Sequence[tuple[float, float, float] | None] = ()  # least, median, most; 0 to 1
    labels: Sequence[tuple[float, str]] = ()
    gaps: Sequence[float] = ()  # places, 0 to 1, of pauses that the axis leaves out


@dataclass(frozen=True, kw_only=True)
class BusyRows:
    """A row for each node: how busy it was in each step of time, 0 to 1."""

    title: str
    rows: Sequence[tuple[str, str, Sequence[float]]]  # name, what is said of it, steps
    labels: Sequence[tuple[float, str]] = ()
    gaps: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Quotes:
    """Examples: where each stands, what is wrong with it, and its text, which may be empty."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Lines to type."""

    lines: Sequence[str]


Block: TypeAlias = Facts | Note | Table | Columns | TimeLine | BusyRows | Quotes | Commands


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report, with its heading."""

    title: str
    blocks: Sequence[Block]
    is_wide: bool = False  # takes the whole width of the page


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole of it."""

    language: str
    title: str
    subtitle: str
    tiles: Sequence[tuple[str, str]]  # the numbers that come first: name, value
    notes: Sequence[Note] = field(default_factory=list)
    sections: Sequence[Section] = field(default_factory=list)
