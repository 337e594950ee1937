"""The report as plain text for a terminal or a log: the same sections, charts as small bars."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from shardprep.console import printable
from slurm.report.blocks import (
    Block,
    BusyRows,
    Columns,
    Commands,
    Facts,
    Note,
    Quotes,
    Report,
    Table,
    TimeLine,
)

_LEVELS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_BAR = 30


def text_page(report: Report, heading: str) -> list[str]:
    """The lines of the text. Control characters of names and documents are escapes."""
    lines = [f"{heading}: {report.title}", report.subtitle, ""]
    lines += [f"! {note.text}" for note in report.notes]
    lines += _facts(Facts(items=report.tiles))
    for section in report.sections:
        lines += ["", section.title, "-" * _columns_of(section.title)]
        for block in section.blocks:
            lines += _RENDERERS[type(block)](block)
    return [*map(printable, lines)]


def _columns_of(text: str) -> int:
    """Columns that a text takes on a terminal: Korean takes two for each character."""
    return sum(
        1 + (unicodedata.east_asian_width(char) in "WF") for char in text if not unicodedata.combining(char)
    )


def _padded(text: str, width: int, *, right: bool = False) -> str:
    blanks = " " * (width - _columns_of(text))
    return blanks + text if right else text + blanks


def _facts(facts: Facts) -> list[str]:
    width = max((_columns_of(name) for name, _ in facts.items), default=0)
    return [f"  {_padded(name, width)}  {value}" for name, value in facts.items]


def _note(note: Note) -> list[str]:
    return [f"  {note.text}"]


def _table(table: Table) -> list[str]:
    rows = [list(table.columns), *map(list, table.rows)]
    widths = [max(map(_columns_of, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [_padded(cell, widths[n], right=n > 0) for n, cell in enumerate(row)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def _columns(chart: Columns) -> list[str]:
    width = max(map(_columns_of, chart.names), default=0)
    return [f"  {chart.title}:"] + [
        f"  {_padded(name, width)}  {'#' * round(_BAR * height):<{_BAR}} {value}".rstrip()
        for height, name, value in zip(chart.heights, chart.names, chart.values, strict=True)
    ]


def _time_line(chart: TimeLine) -> list[str]:
    heights = [0.0 if each is None else each[1] for each in chart.ranges] or list(chart.heights)
    return [f"  {chart.title} ({chart.most})", f"  {_sparks(heights)}", *_ends(chart.labels, "  ")]


def _sparks(heights: Sequence[float]) -> str:
    """One line of at most _WIDTH signs, each as high as the highest of its steps."""
    each = -(-len(heights) // _WIDTH)
    highest = [max(heights[start : start + each]) for start in range(0, len(heights), each)]
    return "".join(_LEVELS[min(len(_LEVELS) - 1, -(-round(height * 1000) * 8 // 1000))] for height in highest)


def _ends(labels: Sequence[tuple[float, str]], indent: str) -> list[str]:
    if len(labels) < 2:
        return []
    first, last = labels[0][1], labels[-1][1]
    return [f"{indent}{first}{' ' * max(1, _WIDTH - len(first) - len(last))}{last}"]


def _busy_rows(chart: BusyRows) -> list[str]:
    width = max((_columns_of(name) for name, _, _ in chart.rows), default=0)
    rows = [f"  {_padded(name, width)}  {_sparks(steps)}  {words}" for name, words, steps in chart.rows]
    return [f"  {chart.title}:", *rows, *_ends(chart.labels, " " * (width + 4))]


def _quotes(quotes: Quotes) -> list[str]:
    lines = []
    for place, what, text in quotes.items:
        lines += [f"  - {place}", f"    {what}", *([f"    | {text}"] if text else [])]
    return lines


def _commands(commands: Commands) -> list[str]:
    return [f"  $ {line}" for line in commands.lines]


_RENDERERS: dict[type[Block], Callable[[Any], list[str]]] = {
    Facts: _facts,
    Note: _note,
    Table: _table,
    Columns: _columns,
    TimeLine: _time_line,
    BusyRows: _busy_rows,
    Quotes: _quotes,
    Commands: _commands,
}
