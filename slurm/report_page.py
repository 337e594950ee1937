"""The HTML page of a report."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardprep import console


def page_lines(data: Mapping[str, Any]) -> list[str]:
    """Render report.html.j2 into lines."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed for --json

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cell,
    )
    templates.filters.update(
        num="{:,}".format,
        short=console.short_number,
        bytes=console.short_bytes,
        time=console.short_time,
        clock=_clock,
        moment=lambda text: _clock(datetime.datetime.fromisoformat(text).timestamp()),
        counted=console.counted,
        percent=_percent,
        by_flags=_by_flags,
        decades=_decades,
        quoted=shlex.quote,
        ids=_short_ids,
        log_share=_log_share,
    )
    return templates.get_template("report.html.j2").render(data).strip().split("\n")


def _cell(value: object) -> object:
    if value is None:
        return "-"
    return console.printable(value) if type(value) is str else value


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _percent(share: float) -> str:
    """Format with two digits: ``100 %``, ``33 %``, ``1.1 %``, ``0.052 %``."""
    percent = 100 * share
    if percent >= 99.5:
        return f"{percent:.0f} %"
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2g} %"


def _by_flags(command: str) -> list[str]:
    """Return the lines of a command, a flag on each, so that no flag is broken at the end of a line."""
    lines: list[str] = []
    for word in shlex.split(command):
        quoted = shlex.quote(word)
        if not lines:
            lines.append(quoted)
        elif word.startswith("--"):
            lines[-1] += " \\"
            lines.append(f"    {quoted}")
        else:
            lines[-1] += f" {quoted}"
    return lines


def _short_ids(ids: str) -> str:
    """Format ids such as ``0-2,5`` for the page: ``0-2, 5``, with long lists cut."""
    shown = ids if len(ids) <= 150 else ids[: ids.rindex(",", 0, 150)] + ",..."
    return shown.replace(",", ", ")


def _log_share(value: float, longest: float) -> str:
    """Return where a length stands on a logarithmic scale from 1 to ``longest``, in percent."""
    return f"{100 * math.log(max(value, 1)) / math.log(max(longest, 2)):.2f}"


def _decades(longest: float) -> list[tuple[str, str]]:
    """Return the powers of 10 on that scale: the place of each in percent, and its name, such as ``10 k``."""
    found = []
    for power in range(int(math.log10(max(longest, 1))) + 1):
        thousands, rest = divmod(power, 3)
        unit = ("", " k", " M", " G")[thousands]
        found.append((_log_share(10**power, longest), f"{10**rest}{unit}"))
    return found
