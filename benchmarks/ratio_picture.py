"""Draw the ratios of a benchmark's table as an SVG with rows of bars, in one or more columns.

    python benchmarks/ratio_picture.py FILE FOLDER

FILE contains the output of `make bench_preprocess` or `make bench_loader`; docs/speed.md has both tables.
Each table becomes FOLDER/preprocess_speed.svg or FOLDER/loader_speed.svg.

The picture has its own background, light or dark like the reader's screen, and no script. The bars of a
column have one linear scale that begins at 0, and each one has its number beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH = 720  # px; a phone shows half of it, so that letters are large
SHOWN_WIDTH = 880  # px, about the width of a README on GitHub
_GAP, _NUMBER = 14, 72  # px between columns, and px for the number beside a bar
_CHARACTER, _LONGEST = 8.6, 48  # px of a bold character, and the longest label in characters
_TOP, _ROW, _BAR, _BOTTOM = 72, 29, 18, 38
_STYLE = """
  .back { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 15px system-ui, sans-serif }
  .title { font-size: 17px; font-weight: 600 } .head, .foot { fill: #59636e; font-size: 14px }
  .bar { fill: #a8b3bf } .ours { fill: #0969da } .own { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .head, .foot { fill: #9198a1 }
    .bar { fill: #59636e } .ours { fill: #4493f8 }
  }
"""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A row with one bar per column, None if nothing was measured."""

    label: str
    values: Sequence[float | None]
    is_ours: bool = False


def picture(title: str, columns: Sequence[str], rows: Sequence[Bars], *, foot: str) -> str:
    """Return the SVG. ``columns`` are the heads. Raises ValueError for a row without a value per column."""
    if not rows or not columns or any(len(row.values) != len(columns) for row in rows):
        raise ValueError(f"{len(columns)} columns, and rows of {[len(row.values) for row in rows]} values")
    height = _TOP + _ROW * len(rows) + _BOTTOM
    size = f'viewBox="0 0 {WIDTH} {height}" width="{SHOWN_WIDTH}" height="{height * SHOWN_WIDTH / WIDTH:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        _text(16, 26, title, "title"),
    ]
    labels = [row.label if len(row.label) <= _LONGEST else f"{row.label[: _LONGEST - 1]}…" for row in rows]
    label_end = 16 + _CHARACTER * max(map(len, labels))
    for number, row in enumerate(rows):
        kind = "own" if row.is_ours else ""
        lines.append(_text(label_end, _baseline(number), labels[number], kind, anchor="end"))
    pitch = (WIDTH - label_end - _GAP) / len(columns)
    for number, head in enumerate(columns):
        left = label_end + _GAP + number * pitch
        lines.append(_text(left, _TOP - 12, head, "head"))
        lines += _column(left, pitch - _GAP - _NUMBER, [row.values[number] for row in rows], rows)
    lines += [_text(16, height - 12, foot, "foot"), "</svg>", ""]
    return "\n".join(lines)


def ratios_of_table(text: str, head: str) -> tuple[list[str], list[Bars]]:
    """Return columns and rows of the first Markdown table in ``text`` whose first line contains ``head``.

    Ratios are cells that end like ``1.2x``, and those of a column whose name begins with ``times``. Other
    columns are not drawn. Names in bold are ours. Raises ValueError without such a table.
    """
    lines = iter(text.splitlines())
    names = next((_cells(line) for line in lines if line.startswith("|") and head in line), None)
    if names is None:
        raise ValueError(f"no table whose first line has {head!r}")
    next(lines)  # the line below the head
    body = []
    for line in lines:
        if not line.startswith("|"):
            break
        body.append(_cells(line))
    found = {
        name: values
        for number, name in enumerate(names)
        if any(values := [_ratio(name, cells[number]) for cells in body])
    }
    rows = [
        Bars(
            label=cells[0].replace("*", ""),
            values=[values[number] for values in found.values()],
            is_ours="**" in cells[0],
        )
        for number, cells in enumerate(body)
    ]
    return list(found), rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _ratio(name: str, cell: str) -> float | None:
    pattern = r"([\d.]+)" if name.startswith("times") else r".*?([\d.]+)x"
    found = re.fullmatch(pattern, cell)
    return float(found[1]) if found else None


def _column(left: float, width: float, values: list[float | None], rows: Sequence[Bars]) -> list[str]:
    most = max((value for value in values if value is not None), default=0) or 1
    lines = []
    for number, (value, row) in enumerate(zip(values, rows, strict=True)):
        if value is None:
            lines.append(_text(left, _baseline(number), "-", "head"))
            continue
        long, top = max(1.0, width * value / most), _TOP + number * _ROW + (_ROW - _BAR) / 2
        kind = "bar ours" if row.is_ours else "bar"
        lines.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{long:.1f}" height="{_BAR}" rx="2"/>'
        )
        lines.append(_text(left + long + 6, _baseline(number), number_text(value), "own" * row.is_ours))
    return lines


def number_text(value: float) -> str:
    """Format as ``1.3x``, from 10 on without a decimal."""
    return f"{value:.1f}x" if value < 9.95 else f"{value:.0f}x"


def _baseline(number: int) -> float:
    return _TOP + number * _ROW + _ROW / 2 + 4.5


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{where}>{escape(text)}</text>'


TABLES = {  # name of the picture -> head of its table, title, foot
    "preprocess_speed": (
        "CPU s per MB, one core |",
        "Text to shards: how many times the baseline's speed",
        "per CPU second of one core, start-up apart; the higher the better",
    ),
    "loader_speed": (
        "Mtok per CPU second",
        "Packed rows to batches: how many times the speed of the baseline",
        "tokens per CPU second of one core, no workers; the higher the better",
    ),
}


def pictures(text: str) -> dict[str, str]:
    """Return the SVG of each of TABLES that ``text`` contains, by name."""
    found = {}
    for name, (head, title, foot) in TABLES.items():
        if any(line.startswith("|") and head in line for line in text.splitlines()):
            columns, rows = ratios_of_table(text, head)
            found[name] = picture(title, columns, rows, foot=foot)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what a benchmark printed, or docs/speed.md")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    args = parser.parse_args()
    drawn = pictures(args.file.read_text(encoding="utf-8"))
    if not drawn:
        raise SystemExit(
            f"{args.file} has none of the tables: {', '.join(head for head, *_ in TABLES.values())}"
        )
    for name, content in drawn.items():
        (args.folder / f"{name}.svg").write_text(content, encoding="utf-8")
        print(args.folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
