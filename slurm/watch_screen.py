"""``status --watch``: what a person reads at a glance, on 80 columns, in tmux, over a slow link.

A screen is lines of text, made of the report of ``status_report``. ``changes`` are the bytes that turn one
screen into the next: only the lines that differ, so nothing flickers, and a look at which little happened is
some 100 bytes.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shardprep.console import counted, num_cells, printable, short_number, short_time
from shardprep.format.names import ids_of_ranges
from slurm.status_text import next_line, notes

_BAR = ("█", "▓", "░", "×", "?", "·")
_ASCII_BAR = ("#", "=", "-", "x", "?", ".")
_COLUMN = 13  # where what is said of a kind begins
_MOST_LINES = 23  # a terminal has 24, and the cursor is in the last
_MOST_ROWS = 4  # of one kind: causes, reasons, nodes
_COUNTS = ("done", "running", "pending", "failed", "not visible", "not submitted")


def screen_lines(
    data: dict[str, Any], *, width: int = 80, now: float | None = None, ascii_only: bool = False
) -> list[str]:
    """The report as a screen of at most 23 lines, none of them longer than ``width``."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    counts = _counts(data)
    signs = _ASCII_BAR if ascii_only else _BAR
    named = zip(signs, _COUNTS, strict=True)
    words = [f"{sign} {counts[name]:,} {name}" for sign, name in named if counts[name]]
    top = [
        _both_ends(f"shardprep {data['folder']}", clock, width),
        bar(counts, data["num_shards"], width, ascii_only=ascii_only),
        _both_ends("  ".join(words), f"{data['num_done'] / data['num_shards']:.1%}", width),
        "",
        *_speed_lines(data),
    ]
    goes_on = data["running"] or data["pending"] or (data["slurm_away"] and data["not_visible"])
    end = ["", "Ctrl-C ends this look, the jobs go on"] if goes_on else ["", next_line(data)]
    end = [*_last_failure_lines(data, width), *end]
    rows: list[str] = []
    for most in range(_MOST_ROWS, 0, -1):  # fewer of each kind, until all kinds have room
        rows = _kinds(data, width, most)
        if len(top) + len(rows) + len(end) <= _MOST_LINES:
            break
    return [
        part
        for line in (*top, *rows, *end)
        for part in (_wrapped(line, width) if line.startswith("next: ") else [cut(line, width)])
    ]


def _kinds(data: dict[str, Any], width: int, most: int) -> list[str]:
    """What waits, what failed, and what somebody should look at; ``most`` rows of each kind."""
    slow = [f"{item['node']} at {item['speed']:.0%} of the others' speed" for item in data["slow_nodes"]]
    unseen = [f"{data['not_visible']} ({data['why_not_visible']})"] if data["not_visible"] else []
    away = textwrap.wrap(data["slurm_away"], max(width - _COLUMN, 20))[:2]
    return [
        *_rows("Slurm", away, 2),
        *_rows("not visible", unseen, most),
        *_rows("note", notes(data), most),
        *_rows("waits for", [_waits(item) for item in data["waits_for"]], most),
        *_rows("failed", [f"{_number(ids)} {cause}: {ids}" for cause, ids in data["causes"].items()], most),
        *_rows(
            "restarted",
            [f"{counted(number, 'task')} after {how}" for how, number in data["restarts"].items()],
            most,
        ),
        *_rows("slow nodes", slow, most),
    ]


def bar(counts: Mapping[str, int], total: int, width: int, *, ascii_only: bool = False) -> str:
    """One line of ``width`` cells; each kind has its share, and at least a cell where it has a shard."""
    signs = _ASCII_BAR if ascii_only else _BAR
    cells = {name: max(width * counts[name] // total, min(1, counts[name])) for name in _COUNTS}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += width - sum(cells.values())
    return "".join(sign * cells[name] for sign, name in zip(signs, _COUNTS, strict=True))


def changes(before: Sequence[str], after: Sequence[str]) -> str:
    """What a terminal gets to show ``after`` where it shows ``before``; all of it where that is nothing."""
    out = [] if before else ["\033[H\033[2J"]
    for row in range(max(len(before), len(after))):
        line = after[row] if row < len(after) else ""
        if row >= len(before) or before[row] != line:
            out.append(f"\033[{row + 1};1H{line}\033[K")
    return "".join([*out, f"\033[{len(after) + 1};1H"])


def cut(line: str, width: int) -> str:
    """A line that fits into ``width`` cells (a Korean letter takes two), control characters as escapes."""
    clean = printable(line)
    if num_cells(clean) <= width:
        return clean
    while num_cells(clean) > max(width - 3, 0):
        clean = clean[:-1]
    return (clean + "...")[:width]


def _wrapped(line: str, width: int) -> list[str]:
    """A command whole, over as many lines as it takes."""
    clean, lines = printable(line), [""]
    for char in clean:
        if num_cells(lines[-1] + char) > width:
            lines.append("")
        lines[-1] += char
    return lines


def _counts(data: dict[str, Any]) -> dict[str, int]:
    return {name: data[f"num_{name.replace(' ', '_')}"] for name in _COUNTS}


def _both_ends(left: str, right: str, width: int) -> str:
    left = cut(left, width - len(right) - 1)
    return left + " " * (width - num_cells(left) - len(right)) + right


def _speed_lines(data: dict[str, Any]) -> list[str]:
    speed = f"{short_number(data['tokens_per_s'])} tokens/s" if data["tokens_per_s"] else "no speed yet"
    left = f"about {short_time(data['left_s'])} left" if data["left_s"] is not None else ""
    return ["   ".join(filter(None, (f"{short_number(data['num_tokens'])} tokens", speed, left)))]


def _number(ids: str) -> int:
    return len(ids_of_ranges(ids))


def _waits(item: dict[str, Any]) -> str:
    starts = f"expected at {item['starts'][11:16]}; " if item["starts"] else ""
    return f"{item['shards']}: {starts}{item['means'] or item['reason']}"


def _rows(name: str, texts: Sequence[str], most: int) -> list[str]:
    shown = list(texts[:most])
    if len(texts) > most > 1:
        shown[-1] = f"and {len(texts) - most + 1} more"
    elif len(texts) > most:
        shown[-1] = f"{shown[-1]}, and {len(texts) - 1} more"
    return [f"{name if row == 0 else '':<{_COLUMN}}{text}" for row, text in enumerate(shown)]


def _last_failure_lines(data: dict[str, Any], width: int) -> list[str]:
    """The failure of the attempt that ended last, with the last line of its log."""
    if not data["failures"]:
        return []
    last = max(data["failures"], key=lambda item: (item["ended"], item["shard"]))
    where = f" on {last['node']}" if last["node"] else ""
    lines = ["", *_rows("last failed", [f"shard {last['shard']:05d}{where}: {last['cause']}"], 1)]
    said = last["last_lines"][-1:]
    return [*lines, *(" " * _COLUMN + _both_parts(line, width - _COLUMN) for line in said)]


def _both_parts(line: str, width: int) -> str:
    """A long line's beginning, which says who, and its end, which says why."""
    if num_cells(line) <= width:
        return line
    head = cut(line, width // 3)
    while num_cells(line) > width - num_cells(head) - 1:
        line = line[1:]
    return f"{head} {line}"
