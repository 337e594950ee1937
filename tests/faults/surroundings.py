"""The disk is full, or the clock is wrong: two campaigns.

- full_disks: a tmpfs with few free pages, or without root a limit on the size of a file.
- clocks: the clock is off or jumps, and files are from the future: no command notices, every byte is equal.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.at_calls import Fault, struck
from tests.faults.judging import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet, hits

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
        with _small_disk(data_set.place) as has_pages:
            for hit, number in hits(_DISK_HITS, num_faults):
                if not has_pages:
                    for size in spread(_MOST_FILE_BYTES, number):
                        words, limit = f"no file beyond {size} bytes", partial(_limit_files, size)
                        fault = Fault(words=words, file="any file", inside=limit)
                        yield struck("full_disks", data_set, hit, fault)
                    continue
                data_set.reset(hit.stage)
                used = _used_pages(data_set.place)
                data_set.run(hit.command)
                needed = 2 * (_used_pages(data_set.place) - used) + 2  # temporaries are gone by now
                for pages in spread(needed, number):
                    fault = Fault(
                        words=f"{pages} free pages",
                        file="the disk",
                        before=partial(_leave_free, max(1, pages)),
                        behind=partial(_leave_free, _MANY_PAGES, data_set.place),
                    )
                    yield struck("full_disks", data_set, hit, fault)


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


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[bool]:
    """A tmpfs at ``place``; False where none can be mounted."""
    is_mounted = not os.geteuid() and _mount("-t", "tmpfs", "-o", "size=64m", "faults", place)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", place], check=False)


def _mount(*args: object) -> bool:
    return not subprocess.run(["mount", *map(str, args)], check=False, capture_output=True).returncode


def clocks(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each command under each clock, and among files of each age; of few faults they take turns."""
    kinds = [
        *(
            Fault(words=each, file="the clock", inside=shift, may_refuse=False)
            for each, shift in _CLOCKS.items()
        ),
        *(
            Fault(words=each, file="all", before=partial(_give_age, shift_s), may_refuse=False)
            for each, shift_s in _AGES.items()
        ),
    ]
    for data_set in data_sets:
        for number, (hit, most) in enumerate(hits(_CLOCK_HITS, num_faults)):
            for fault in kinds if most > len(kinds) else [kinds[number % len(kinds)]]:
                yield struck("clocks", data_set, hit, fault)


def _shifted(shifts: Iterator[float]) -> Callable[[], None]:
    """From now on each look at the clock finds it shifted by the next of some seconds."""

    def apply() -> None:
        right = time.time
        time.time = lambda: right() + next(shifts)

    return apply


_CLOCKS: dict[str, Callable[[], None]] = {
    "ten years ahead": _shifted(itertools.repeat(10.0 * _YEAR_S)),
    "ten years behind": _shifted(itertools.repeat(-10.0 * _YEAR_S)),
    "back an hour at each look": _shifted(itertools.count(0.0, -3600.0)),
    "to and fro by a day": _shifted(itertools.cycle([0.0, 86_400.0, -86_400.0])),
}
_AGES: dict[str, float] = {"files of next year": _YEAR_S, "files of 1971": 1.0 * _YEAR_S - time.time()}


def _give_age(shift_s: float, place: Path) -> None:
    """All files of the data set and a temporary of another attempt; inputs keep the times of the plan."""
    (place / "data").mkdir(exist_ok=True)
    (place / "data" / _TEMPORARY).write_bytes(b"another attempt's")
    then = time.time() + shift_s
    for path in (place / "data").rglob("*"):
        os.utime(path, (then, then))
