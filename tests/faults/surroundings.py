"""The disk is full, or the clock is wrong: two campaigns.

- full_disks: a tmpfs with few free pages, or without root a limit on the size of a file.
- clocks: the clock is off or jumps, and files are from the future: no command notices, every byte is equal.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.at_calls import Fault, tried
from tests.faults.judging import Outcome, spread
from tests.faults.small_data_sets import Hit, SmallDataSet

_DISK_HITS = {"plan": 0.5, "shard": 1, "run": 0.2, "verify": 0.5, "stage": 1}
_CLOCK_HITS = dict.fromkeys(
    ("plan", "shard", "shard, done", "verify", "load", "stage", "status", "submit"), 1
)
_PAGE_BYTES = 4096
_MANY_PAGES = (64 << 20) // _PAGE_BYTES
_MOST_FILE_BYTES = 16_384
_YEAR_S = 365 * 24 * 3600
_TEMPORARY = ".shard-00000.tar.other-1-0000.tmp"


def full_disks(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each command with less space than it needs, then again with enough."""
    for data_set in data_sets:
        is_mounted = not os.geteuid() and _mount("-t", "tmpfs", "-o", "size=64m", "faults", data_set.place)
        try:
            faults_of = _few_pages if is_mounted else _short_files
            yield from tried("full_disks", _DISK_HITS, faults_of, [data_set], num_faults=num_faults)
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", data_set.place], check=False)


def _few_pages(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    data_set.reset(hit.stage)
    used = _used_pages(data_set.place)
    data_set.run(hit.command)
    needed = 2 * (_used_pages(data_set.place) - used) + 2  # temporaries are gone by now
    for pages in spread(needed, number):
        before, behind = partial(_leave_free, max(1, pages)), partial(_leave_free, _MANY_PAGES)
        yield Fault(words=f"{pages} free pages", file="the disk", before=before, behind=behind)


def _short_files(_: SmallDataSet, __: Hit, number: int) -> Iterator[Fault]:
    for size in spread(_MOST_FILE_BYTES, number):
        limit = partial(_limit_files, size)
        yield Fault(words=f"no file beyond {size} bytes", file="any file", inside=limit)


def _limit_files(num_bytes: int) -> None:
    """The soft limit: the harness raises it again to say how the run ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def _used_pages(place: Path) -> int:
    now = os.statvfs(place)
    return (now.f_blocks - now.f_bfree) * now.f_frsize // _PAGE_BYTES


def _leave_free(num_pages: int, place: Path) -> None:
    size = (_used_pages(place) + num_pages) * _PAGE_BYTES
    if not _mount("-o", f"remount,size={size}", place):
        message = f"{place} cannot be given {size} bytes"
        raise RuntimeError(message)


def _mount(*args: object) -> bool:
    return not subprocess.run(["mount", *map(str, args)], check=False, capture_output=True).returncode


def clocks(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each command under each clock, and among files of each age; of few faults they take turns."""
    turns = itertools.cycle(_CLOCKS)

    def faults_of(_: SmallDataSet, __: Hit, number: int) -> Iterator[Fault]:
        yield from _CLOCKS if number > len(_CLOCKS) else [next(turns)]

    return tried("clocks", _CLOCK_HITS, faults_of, data_sets, num_faults=num_faults)


def _shifted(words: str, shifts: Iterator[float]) -> Fault:
    """Each look at the clock finds it shifted by the next of some seconds."""

    def shift() -> None:
        right = time.time
        time.time = lambda: right() + next(shifts)

    return Fault(words=words, file="the clock", inside=shift, may_refuse=False)


def _aged(words: str, shift_s: float) -> Fault:
    """All files of the data set and a temporary of another attempt; inputs keep the times of the plan."""

    def age(place: Path) -> None:
        (place / "data").mkdir(exist_ok=True)
        (place / "data" / _TEMPORARY).write_bytes(b"another attempt's")
        then = time.time() + shift_s
        for path in (place / "data").rglob("*"):
            os.utime(path, (then, then))

    return Fault(words=words, file="all", before=age, may_refuse=False)


_CLOCKS = [
    _shifted("ten years ahead", itertools.repeat(10.0 * _YEAR_S)),
    _shifted("ten years behind", itertools.repeat(-10.0 * _YEAR_S)),
    _shifted("back an hour at each look", itertools.count(0.0, -3600.0)),
    _shifted("to and fro by a day", itertools.cycle([0.0, 86_400.0, -86_400.0])),
    _aged("files of next year", _YEAR_S),
    _aged("files of 1971", _YEAR_S - time.time()),
]
