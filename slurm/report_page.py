"""The HTML page of a report."""

from __future__ import annotations

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
        clock=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        percent="{:.2%}".format,
        quoted=shlex.quote,
        ids=_short_ids,
        log_share=_log_share,
    )
    return templates.get_template("report.html.j2").render(data).strip().split("\n")


def _cell(value: object) -> object:
    if value is None:
        return "-"
    return console.printable(value) if type(value) is str else value


def _short_ids(ids: str) -> str:
    """Format ids such as ``0-2,5`` for the page: ``0-2, 5``, with long lists cut."""
    shown = ids if len(ids) <= 150 else ids[: ids.rindex(",", 0, 150)] + ",..."
    return shown.replace(",", ", ")


def _log_share(value: float, longest: float) -> str:
    """Return where a length stands on a logarithmic scale from 1 to ``longest``, in percent."""
    return f"{100 * math.log(max(value, 1)) / math.log(max(longest, 2)):.2f}"
