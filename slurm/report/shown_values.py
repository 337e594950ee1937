"""Numbers, times and lists of shards as the report writes them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

_MOST_IDS = 150  # characters of a list of shards

TimeForm = Literal["date", "minutes", "seconds", "seconds and zone"]
_FORMS: dict[TimeForm, str] = {
    "date": "%m-%d %H:%M",
    "minutes": "%H:%M",
    "seconds": "%H:%M:%S",
    "seconds and zone": "%Y-%m-%d %H:%M:%S %z",
}


def heights(numbers: Sequence[float]) -> list[float]:
    """Each as a share of the largest: 0 to 1."""
    most = max(numbers, default=0) or 1
    return [number / most for number in numbers]


def edge_labels(edges: Sequence[str], most: int = 7) -> list[tuple[float, str]]:
    """Labels of some edges of a histogram's columns, evenly, the first and the last among them."""
    steps = len(edges) - 1
    every = -(-steps // (most - 1))
    return [(number / steps, edges[number]) for number in range(0, steps + 1, every)]


def short_ids(ids: str) -> str:
    """A list of ids such as ``0-2, 5``, cut where it is long."""
    if len(ids) <= _MOST_IDS:
        return ids.replace(",", ", ")
    return ids[: ids.rindex(",", 0, _MOST_IDS)].replace(",", ", ") + ", ..."


def percent(share: float) -> str:
    """``0.0123`` -> ``1.23%``."""
    if 0 < share < 0.00005:
        return "<0.01%"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def ratio(value: float | None) -> str:
    """Three digits behind the point; a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def time_text(seconds: float, form: TimeForm) -> str:
    """A time, given in seconds since 1970, in the time zone of who writes the report."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime(_FORMS[form])


def core_hours_text(hours: float) -> str:
    """Three digits at least: ``0.0123``, ``12.3``, ``14,018``."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
