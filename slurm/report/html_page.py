"""The report as one HTML page: no scripts, no network, light and dark, on a telephone and on paper.

Whatever comes from data (names, text of documents, causes) passes ``html.escape``; and a policy in the page
lets it load nothing, should something slip through. The charts are SVG without text, a few elements each,
drawn in a box of 1000 by 100 that the page stretches (preserveAspectRatio="none") to any width. Colours are
classes of the page's style.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from slurm.report.blocks import (
    Block,
    BusyRows,
    Columns,
    Commands,
    Facts,
    Note,
    Quotes,
    Report,
    Section,
    Table,
    TimeLine,
)

STYLE_FILE = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WIDTH, _HEIGHT = 1000, 100
_LEVELS = 5  # of how busy a node is
_SHORT_NAME = 5  # characters: a first column of these may be as narrow as they are
_NUMBER = re.compile(r"[~<-]?[0-9](?!.*, ).*|-?")  # and no list that begins with one


def html_page(report: Report, heading: str) -> str:
    """The whole page. ``heading`` stands over the title. Raises OSError where the style is not installed."""
    style = STYLE_FILE.read_text(encoding="utf-8")
    tiles = "".join(
        f'<div class="tile"><span class="value">{escape(value)}</span>'
        f'<span class="name">{escape(name)}</span></div>'
        for name, value in report.tiles
    )
    return (
        f'<!doctype html>\n<html lang="{report.language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(report.title)}: {escape(heading)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><p class="kind">{escape(heading)}</p><h1>{escape(report.title)}</h1>'
        f'<p class="subtitle">{escape(report.subtitle)}</p></header>\n<main>\n'
        f"{''.join(map(_note, report.notes))}"
        f'<div class="tiles">{tiles}</div>\n'
        f"{_cards(report.sections)}</main>\n</body>\n</html>\n"
    )


def _cards(sections: Sequence[Section]) -> str:
    """Sections side by side where there is room, and the wide ones between them."""
    groups = []
    for is_wide, group in itertools.groupby(sections, key=lambda section: section.is_wide):
        kind = "wide" if is_wide else "beside"
        groups.append(f'<div class="{kind}">\n{"".join(map(_section, group))}</div>\n')
    return "".join(groups)


def _section(section: Section) -> str:
    blocks = "\n".join(_RENDERERS[type(block)](block) for block in section.blocks)
    return f'<section class="card"><h2>{escape(section.title)}</h2>\n{blocks}\n</section>\n'


def _facts(facts: Facts) -> str:
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items
    )
    return f"<dl>{rows}</dl>"


def _note(note: Note) -> str:
    return f'<p class="{"warning" if note.is_warning else "note"}">{escape(note.text)}</p>\n'


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True))
    classes = [_class_of_column(number, cells) for number, cells in enumerate(columns)]
    classes = classes or [""] * len(table.columns)
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for kind, name in zip(classes, table.columns, strict=True)
    )
    rows = []
    for number, row in enumerate(table.rows):
        cells = [f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(classes, row, strict=True)]
        share = table.shares[number] if table.shares else None
        if share is not None:
            name = escape(row[0])
            cells[0] = f'<td>{name}<div class="bar">{_svg(_svg_bar(share), f"{share:.1%}")}</div></td>'
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def _class_of_column(number: int, cells: Sequence[str]) -> str:
    if number == 0:
        return ' class="short"' if all(len(cell) < _SHORT_NAME for cell in cells) else ""
    return ' class="number"' if all(map(_NUMBER.fullmatch, cells)) else ""


def _figure(title: str, drawing: str, labels: Sequence[tuple[float, str]], *, most: str = "") -> str:
    top = f'<span class="most">{escape(most)}</span>' if most else ""
    return (
        f"<figure><figcaption><span>{escape(title)}</span>{top}</figcaption>"
        f'<div class="plot">{drawing}</div>{_labels(labels)}</figure>'
    )


def _labels(labels: Sequence[tuple[float, str]]) -> str:
    spans = "".join(
        f'<span class="{"first" if place <= 0 else "last" if place >= 1 else "inner"}" '
        f'style="left:{100 * place:.2f}%">{escape(text)}</span>'
        for place, text in labels
    )
    return f'<div class="labels">{spans}</div>'


def _columns(chart: Columns) -> str:
    most = max(zip(chart.heights, chart.values, strict=True), default=(0, ""))[1]
    drawing = _svg(_svg_columns(chart.heights, chart.names, chart.values), chart.title)
    return _figure(chart.title, drawing, chart.labels, most=most)


def _time_line(chart: TimeLine) -> str:
    shapes = _svg_ranges(chart.ranges) if chart.ranges else _svg_area(chart.heights)
    shapes += _svg_gap_lines(chart.gaps)
    return _figure(chart.title, _svg(shapes, chart.title), chart.labels, most=chart.most)


def _busy_rows(chart: BusyRows) -> str:
    gaps = _svg_gap_lines(chart.gaps)
    rows = "".join(
        f'<div class="busyrow"><span class="node">{escape(name)}</span>'
        f'<span class="plot">{_svg(_svg_busy_row(steps) + gaps, name)}</span>'
        f'<span class="words">{escape(words)}</span></div>'
        for name, words, steps in chart.rows
    )
    axis = (
        f'<div class="busyrow axis"><span class="node"></span>{_labels(chart.labels)}'
        '<span class="words"></span></div>'
    )
    return f'<figure class="busy"><figcaption>{escape(chart.title)}</figcaption>{rows}{axis}</figure>'


def _quotes(quotes: Quotes) -> str:
    items = []
    for place, what, text in quotes.items:
        quoted = f"<blockquote>{escape(text)}</blockquote>" if text else ""
        items.append(f"<li><code>{escape(place)}</code><br>{escape(what)}{quoted}</li>")
    return f'<ul class="quotes">{"".join(items)}</ul>'


def _commands(commands: Commands) -> str:
    """Lines break between words alone: a browser would break behind the dashes of a flag, too."""
    lines = [" ".join(f"<span>{escape(word)}</span>" for word in line.split(" ")) for line in commands.lines]
    return "<pre>{}</pre>".format("\n".join(lines))


def _svg(shapes: str, name: str) -> str:
    """An SVG element around shapes; ``name`` says what it shows to who cannot see it."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{shapes}</svg>'
    )


def _svg_bar(share: float) -> str:
    """One bar from the left, over its track."""
    width = round(_WIDTH * min(max(share, 0), 1), 1)
    return (
        f'<rect class="track" width="{_WIDTH}" height="{_HEIGHT}"/>'
        f'<rect class="fill" width="{width}" height="{_HEIGHT}"/>'
    )


def _svg_columns(heights: Sequence[float], names: Sequence[str], values: Sequence[str]) -> str:
    """A column for each height, 0 to 1; what it stands for is shown where the pointer is."""
    step = _WIDTH / max(1, len(heights))
    shapes = []
    for number, (height, name, value) in enumerate(zip(heights, names, values, strict=True)):
        tall = max(_HEIGHT * height, 1.5) if height else 0  # so that one document of 10^9 is seen
        title = f"<title>{escape(name)}: {escape(value)}</title>"
        x, width = round(number * step + step * 0.06, 2), round(step * 0.88, 2)
        shapes.append(
            f'<g>{title}<rect class="none" x="{x}" width="{width}" height="{_HEIGHT}"/>'
            f'<rect class="fill" x="{x}" y="{_HEIGHT - tall:.2f}" width="{width}" height="{tall:.2f}"/></g>'
        )
    return "".join(shapes)


def _svg_area(heights: Sequence[float]) -> str:
    """Steps, filled down to the ground."""
    step = _WIDTH / max(1, len(heights))
    path = [f"M0 {_HEIGHT}"]
    for number, height in enumerate(heights):
        path.append(f"V{_HEIGHT * (1 - height):.1f}H{(number + 1) * step:.1f}")
    return f'<path class="area" d="{"".join(path)}V{_HEIGHT}Z"/>'


def _svg_ranges(steps: Sequence[tuple[float, float, float] | None]) -> str:
    """A box from the least to the most of each step, and a line at its median."""
    step = _WIDTH / max(1, len(steps))
    boxes, lines = [], []
    for number, each in enumerate(steps):
        if each is None:
            continue
        least, median, most = (_HEIGHT * (1 - value) for value in each)
        x, width = number * step + step * 0.1, step * 0.8
        boxes.append(f"M{x:.1f} {most:.1f}h{width:.1f}V{max(least, most + 0.8):.1f}h-{width:.1f}z")
        lines.append(f"M{x:.1f} {median:.1f}h{width:.1f}")
    return f'<path class="range" d="{"".join(boxes)}"/><path class="line" d="{"".join(lines)}"/>'


def _svg_busy_row(steps: Sequence[float]) -> str:
    """Boxes, darker where a value, 0 to 1, is larger; neighbours of one level are one box."""
    step = _WIDTH / max(1, len(steps))
    levels = [-(-round(value * 1000) * _LEVELS // 1000) for value in steps]
    of_level: dict[int, list[str]] = {}
    begin = 0
    for number in range(1, len(levels) + 1):
        if number == len(levels) or levels[number] != levels[begin]:
            if level := min(levels[begin], _LEVELS):
                box = f"M{begin * step:.1f} 0H{number * step:.1f}V{_HEIGHT}H{begin * step:.1f}z"
                of_level.setdefault(level, []).append(box)
            begin = number
    track = f'<rect class="track" width="{_WIDTH}" height="{_HEIGHT}"/>'
    return track + "".join(
        f'<path class="busy{level}" d="{"".join(boxes)}"/>' for level, boxes in of_level.items()
    )


def _svg_gap_lines(places: Sequence[float]) -> str:
    """Dashed lines at these places, 0 to 1."""
    path = "".join(f"M{_WIDTH * place:.1f} 0V{_HEIGHT}" for place in places)
    return f'<path class="gap" d="{path}"/>' if path else ""


_RENDERERS: dict[type[Block], Callable[[Any], str]] = {
    Facts: _facts,
    Note: _note,
    Table: _table,
    Columns: _columns,
    TimeLine: _time_line,
    BusyRows: _busy_rows,
    Quotes: _quotes,
    Commands: _commands,
}
