"""A report's data as a page: sections.j2 says what, page.html.j2 draws it."""

from __future__ import annotations

import datetime
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardprep.console import printable, short_bytes, short_number, short_time

_LIMITS = {"MAX_ROWS": 20, "MAX_NODES": 5, "MAX_NAMES": 5}  # that are shown
_MAX_IDS = 150  # characters of a list of shards
_MAX_LABELS = 7  # of a histogram
REASONS = {  # why a document was left out, as its quarantine file says -> as people read it
    "undecodable": "cannot be decoded",
    "uncuttable": "too long, and cannot be cut for the tokenizer",
    "too_long": "too long",
    "bad_json": "no JSON",
    "surrogate": "half of a surrogate pair",
    "no_field": "without the text field",
    "null_field": "the text field is null",
    "wrong_type": "the text field is no string",
    "mojibake": "decoded with a wrong encoding, cannot be restored",
}

Labels = Sequence[tuple[float, str]]  # (place on the axis, 0 to 1; text)


def page_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of one HTML file, which needs no network and no scripts."""
    templates = _environment()
    form = templates.get_template("page.html.j2").module
    return templates.get_template("sections.j2").render(data, form=form).strip().split("\n")


def _environment() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
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
        "time": short_time,
        "clock": _clock,
        "seconds": lambda text: datetime.datetime.fromisoformat(text).timestamp(),
        "ratio": lambda value: "-" if value is None else f"{value:.2f}",
        "percent": lambda share: (
            "-" if share is None else "<0.01%" if 0 < share < 5e-5 else f"{share:.{2 if share < 0.1 else 1}%}"
        ),
        "length_in_tokens": lambda number: f"{number:,}" if number < 100_000 else short_number(number),
        "ids": _short_ids,
        "quoted": shlex.quote,
        "filled": lambda bins: list(itertools.dropwhile(lambda each: not each["num_documents"], bins)),
        "shares": lambda values, whole: [value / (whole or 1) for value in values],
        "without": lambda counts, names: {name: counts[name] for name in counts if name not in names},
        "most_frequent": _most_frequent,
        "edge_labels": lambda bins, form: _edge_labels(bins, filters[form]),
        "clock_labels": lambda ticks, form: [(tick["at"], _clock(tick["time"], form)) for tick in ticks],
        "runs_of_levels": _runs_of_levels,
    }
    templates.filters.update(filters)
    templates.globals.update(_LIMITS, w=words_of, REASONS=REASONS, sum_of=_sum_of)
    return templates


def words_of(text: str, /, **values: object) -> str:
    """Put values into a text. One with ``|`` has two forms: the first is for a ``number`` of 1."""
    if "number" in values and "|" in text:
        text = text.split("|")[str(values["number"]) != "1"]
    return text.format(**values) if values else text


def _clock(seconds: float, form: str) -> str:
    """A time, given in seconds since 1970, in the time zone of who writes the report."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime(form)


def _short_ids(ids: str) -> str:
    """A list of ids such as ``0-2, 5``, cut where it is long."""
    shown = ids if len(ids) <= _MAX_IDS else ids[: ids.rindex(",", 0, _MAX_IDS)] + ",..."
    return shown.replace(",", ", ")


def _most_frequent(counts: Mapping[str, int], most: int, text: str = "{name} ({number})") -> str:
    """``a (7), b (2), c and 4 more``: the number only where it is not 1."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [text.format(name=name, number=number) if number > 1 else name for name, number in ordered[:most]]
    more = [f"and {len(ordered) - most} more"] if len(ordered) > most else []
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
