"""A report's data as a page and as text: sections.j2 says what, page.html.j2 and TextForm draw it."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardprep.console import num_cells, printable, short_bytes, short_number
from slurm.report.words import REASONS, Words

_LIMITS = {"MAX_ROWS": 20, "MAX_OSTS": 8, "MAX_NODES": 5, "MAX_NAMES": 5}  # that are shown
_MAX_IDS = 150  # characters of a list of shards
_MAX_LABELS = 7  # of a histogram
_BARS = " ▁▂▃▄▅▆▇█"
_CHART_COLUMNS = 60
_BAR_COLUMNS = 30

_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>#|~!&]")

Labels = Sequence[tuple[float, str]]  # (place on the axis, 0 to 1; text)


def page_lines(data: Mapping[str, Any], words: Words) -> list[str]:
    """The report as the lines of one HTML file, which needs no network and no scripts."""
    templates = _environment(words, is_html=True)
    form = templates.get_template("page.html.j2").module
    return templates.get_template("sections.j2").render(data, form=form).strip().split("\n")


def text_lines(data: Mapping[str, Any], words: Words) -> list[str]:
    """The report as lines for a terminal or a log."""
    form = TextForm()
    _environment(words, is_html=False).get_template("sections.j2").render(data, form=form)
    return [printable(line) for line in form.lines]


def card_lines(data: Mapping[str, Any], words: Words) -> list[str]:
    """The report as Markdown, with the head that a dataset card of the Hugging Face hub has."""
    own = data["data"]
    form = CardForm((own["index"] if own["has_index_alone"] else own)["num_documents"])
    _environment(words, is_html=False).get_template("sections.j2").render(data, form=form)
    return [printable(line) for line in form.lines]


def _environment(words: Words, *, is_html: bool) -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=is_html,  # noqa: S701 - text is no HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    filters: dict[str, Callable[..., Any]] = {
        "num": "{:,}".format,
        "short": short_number,
        "bytes": short_bytes,
        "bytes_or_none": lambda number: "-" if number is None else short_bytes(number),
        "time": words.time,
        "clock": _clock,
        "seconds": lambda text: datetime.datetime.fromisoformat(text).timestamp(),
        "ratio": lambda value: "-" if value is None else f"{value:.2f}",
        "percent": lambda share: (
            "-" if share is None else "<0.01%" if 0 < share < 5e-5 else f"{share:.{2 if share < 0.1 else 1}%}"
        ),
        "hours": lambda hours: f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}",
        "length_in_tokens": lambda number: f"{number:,}" if number < 100_000 else short_number(number),
        "ids": _short_ids,
        "quoted": shlex.quote,
        "flags": lambda values: " ".join(f"--{name} {value:g}" for name, value in values.items()),
        "filled": lambda bins: list(itertools.dropwhile(lambda each: not each["num_documents"], bins)),
        "shares": lambda values, whole: [value / (whole or 1) for value in values],
        "without": lambda counts, names: {name: counts[name] for name in counts if name not in names},
        "most_frequent": functools.partial(_most_frequent, words),
        "edge_labels": lambda bins, form: _edge_labels(bins, filters[form]),
        "clock_labels": lambda ticks, form: [(tick["at"], _clock(tick["time"], form)) for tick in ticks],
        "runs_of_levels": _runs_of_levels,
    }
    templates.filters.update(filters)
    templates.globals.update(_LIMITS, w=words, REASONS=REASONS, sum_of=_sum_of)
    return templates


def _clock(seconds: float, form: str) -> str:
    """A time, given in seconds since 1970, in the time zone of who writes the report."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime(form)


def _short_ids(ids: str) -> str:
    """A list of ids such as ``0-2, 5``, cut where it is long."""
    shown = ids if len(ids) <= _MAX_IDS else ids[: ids.rindex(",", 0, _MAX_IDS)] + ",..."
    return shown.replace(",", ", ")


def _most_frequent(
    words: Words, counts: Mapping[str, int], most: int, text: str = "{name} ({number})"
) -> str:
    """``a (7), b (2), c and 4 more``: the number only where it is not 1."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [text.format(name=name, number=number) if number > 1 else name for name, number in ordered[:most]]
    more = [words("and {number} more", number=len(ordered) - most)] if len(ordered) > most else []
    return ", ".join([*shown, *more])


def _sum_of(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("num_tokens", "num_documents", "num_quarantined", "num_text_bytes", "num_chars", "token_share")
    found = [[each[name] for each in sources] for name in names]
    sums = {name: None if None in of else sum(of) for name, of in zip(names, found, strict=True)}
    for name, number in (("bytes_per_token", sums["num_text_bytes"]), ("chars_per_token", sums["num_chars"])):
        sums[name] = number / sums["num_tokens"] if number and sums["num_tokens"] else None
    return sums


def _edge_labels(bins: Sequence[Mapping[str, Any]], show: Callable[[float], str]) -> Labels:
    """Labels for some edges of a histogram's columns, evenly from the first on; no text twice in a row."""
    edges = [show(each["from"]) for each in bins] + [show(bins[-1]["to"])]
    every = -(-len(bins) // (_MAX_LABELS - 1))
    return [
        (number / len(bins), edges[number])
        for number in range(0, len(edges), every)
        if number == 0 or edges[number] != edges[number - every]
    ]


def _runs_of_levels(heights: Sequence[float], num_levels: int) -> dict[int, list[tuple[int, int]]]:
    """Level, 1 to ``num_levels`` -> (first step, number of steps) of each run of steps on this level."""
    found: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for level, run in itertools.groupby(-(-round(height * 1000) * num_levels // 1000) for height in heights):
        length = len(list(run))
        if level:
            found.setdefault(level, []).append((start, length))
        start += length
    return found


class TextForm:
    """Draws the parts of a report as lines of text. Its methods are the macros of page.html.j2."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def page(self, _language: str, heading: str, title: str, subtitle: str, caller: Callable[[], str]) -> str:
        self.lines += [f"{heading}: {title}", subtitle, ""]
        return caller()

    def side_by_side(self, caller: Callable[[], str]) -> str:
        return caller()

    def section(self, title: str, caller: Callable[[], str]) -> str:
        self.lines += ["", title, "-" * num_cells(title)]
        return caller()

    def warning(self, text: str) -> None:
        self.lines.append(f"! {text}")

    def note(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        self.lines += _aligned([row for row in rows if row[1]], num_names=2)

    tiles = facts

    def table(
        self, columns: list[str], rows: list[list[Any]], *, num_names: int = 1, **_shares: object
    ) -> None:
        self.lines += _aligned([columns, *rows], num_names)

    def quotes(self, rows: Sequence[tuple[str, str, str]]) -> None:
        for place, what, text in rows:
            self.lines += [f"  - {place}", f"    {what}", *([f"    | {text}"] if text else [])]

    def commands(self, lines: Sequence[str]) -> None:
        self.lines += [f"  $ {line}" for line in lines]

    def values(self, _title: str, _columns: object, _rows: object) -> None:
        """On a page alone: what is drawn here can be read."""

    def chart(self, lines: Sequence[str]) -> None:
        self.lines += lines

    def histogram(self, title: str, rows: Sequence[tuple[int, str, str]], *_of_page: object) -> None:
        highest = max(number for number, _, _ in rows) or 1  # a data set may hold no document
        bars = [(name, "#" * round(_BAR_COLUMNS * number / highest), value) for number, name, value in rows]
        cells = [(name, f"{bar:<{_BAR_COLUMNS}} {value}") for name, bar, value in bars]
        self.chart([f"  {title}:", *_aligned(cells, num_names=2)])

    def area(self, title: str, heights: Sequence[float], most: str, labels: Labels, _gaps: object) -> None:
        self.chart([f"  {title} ({most})", f"  {_sparks(heights)}", f"  {_ends(labels)}"])

    def ranges(
        self, title: str, steps: Sequence[Any], highest: float, most: str, labels: Labels, _gaps: object
    ) -> None:
        medians = [each["median"] / max(highest, 1e-3) if each else 0.0 for each in steps]
        self.area(title, medians, most, labels, _gaps)

    def nodes(
        self, title: str, rows: Sequence[tuple[str, str, Sequence[float]]], labels: Labels, _gaps: object
    ) -> None:
        cells = [(name, _sparks(steps), words) for name, words, steps in rows]
        self.chart([f"  {title}:", *_aligned([*cells, ("", _ends(labels), "")], num_names=3)])


class CardForm(TextForm):
    """The same as Markdown. Charts are lines of text in it."""

    def __init__(self, num_documents: int) -> None:
        super().__init__()
        names = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
        at = min(max(3, len(str(max(1, num_documents) - 1))) - 3, len(names))
        between = f"{names[at - 1]}<n<{names[at]}" if 0 < at < len(names) else ""
        self._size = between or ("n>1T" if at else "n<1K")

    def page(self, _language: str, heading: str, title: str, subtitle: str, caller: Callable[[], str]) -> str:
        head = ["task_categories:", "- text-generation", "tags:", "- webdataset", "- shardprep"]
        head += ["size_categories:", f"- {self._size}"]
        head += ["configs:", "- config_name: default", "  data_files: shard-*.tar"]
        self.lines += ["---", f"pretty_name: {json.dumps(title)}", *head, "---"]
        self.lines += [f"# {_escaped(title)}", "", f"{_escaped(heading)}, {_escaped(subtitle)}", ""]
        return caller()

    def section(self, title: str, caller: Callable[[], str]) -> str:
        self.lines += ["", f"## {_escaped(title)}", ""]
        return caller()

    def warning(self, text: str) -> None:
        self.lines += [f"> **{_escaped(text)}**", ""]

    def note(self, text: str) -> None:
        self.lines += [_escaped(text), ""]

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        self.lines += [*(f"- {_escaped(name)}: {_escaped(str(value))}" for name, value in rows if value), ""]

    tiles = facts

    def table(
        self, columns: list[str], rows: list[list[Any]], *, num_names: int = 1, **_shares: object
    ) -> None:
        sides = ["---" if number < num_names else "---:" for number in range(len(columns))]
        cells = [[_escaped(str(cell)) for cell in row] for row in [columns, *rows]]
        self.lines += [f"| {' | '.join(row)} |" for row in (cells[0], sides, *cells[1:])] + [""]

    def quotes(self, rows: Sequence[tuple[str, str, str]]) -> None:
        for place, what, text in rows:
            self.lines.append(f"- {_escaped(place)}: {_escaped(what)}")
            self.lines += [f"  > {_escaped(text)}"] if text else []
        self.lines += [""] if rows else []

    def commands(self, lines: Sequence[str]) -> None:
        self.lines += ["```", *lines, "```", ""]

    def chart(self, lines: Sequence[str]) -> None:
        self.commands([line.replace("`", "'") for line in lines])


def _aligned(rows: Sequence[Sequence[Any]], num_names: int) -> list[str]:
    """Cells below one another; the first ``num_names`` of a row stand left, the others right."""
    widths = [max(num_cells(str(cell)) for cell in cells) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        blanks = [" " * (width - num_cells(str(cell))) for cell, width in zip(row, widths, strict=True)]
        names = [f"{cell}{blank}" for cell, blank in zip(row, blanks, strict=True)][:num_names]
        numbers = [f"{blank}{cell}" for cell, blank in zip(row, blanks, strict=True)][num_names:]
        lines.append(f"  {'  '.join([*names, *numbers])}".rstrip())
    return lines


def _escaped(text: str) -> str:
    """A text on one line, of which Markdown changes nothing."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def _sparks(heights: Sequence[float]) -> str:
    """One line of at most 60 signs, each as high as the highest of its steps."""
    each = -(-len(heights) // _CHART_COLUMNS)
    highest = [max(heights[start : start + each]) for start in range(0, len(heights), each)]
    return "".join(_BARS[-(-round(height * 1000) * (len(_BARS) - 1) // 1000)] for height in highest)


def _ends(labels: Labels) -> str:
    """The first and the last label of an axis of 60 columns."""
    first, last = labels[0][1], labels[-1][1]
    return first + last.rjust(_CHART_COLUMNS - len(first))
