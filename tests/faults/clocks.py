"""The clock is wrong or jumps, and files are from the future: no command notices, and every byte is equal."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.at_calls import Hit, hits, judged
from tests.faults.judging import Undisturbed, shape
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

HITS = hits(dict.fromkeys(("plan", "shard", "shard, done", "verify", "load", "stage", "status", "submit"), 1))
_QUICK_FAULTS = 8  # so few, and the kinds take turns
_YEAR_S = 365 * 24 * 3600
_TEMPORARY = ".shard-00000.tar.other-1-0000.tmp"


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each command under each clock, and among files of each age."""
    for data_set in data_sets:
        for number, hit in enumerate(HITS):
            data_set.reset(hit.stage)
            ended = data_set.run(hit.command)
            expected = Undisturbed(ended.value, data_set.published())
            kinds = [*CLOCKS, *AGES]
            for kind in [kinds[number % len(kinds)]] if num_faults <= _QUICK_FAULTS else kinds:
                yield _outcome(data_set, hit, expected, kind)


def _outcome(data_set: SmallDataSet, hit: Hit, expected: Undisturbed, kind: str) -> Outcome:
    data_set.reset(hit.stage)
    if kind in AGES:
        _give_age(data_set.place, AGES[kind])
    ended = data_set.run(hit.command, CLOCKS.get(kind, lambda: None))
    found, what = judged(data_set, hit, expected, ended)
    if found == "refused":
        found, what = "wrong", f"refused for the time alone: {shape(what)}"
    file = "the clock" if kind in CLOCKS else "all"
    return Outcome("clocks", data_set.form, file, hit.name, kind, found, what)


def _shifted(shifts: Iterator[float]) -> Callable[[], None]:
    """From now on each look at the clock finds it shifted by the next of some seconds."""

    def apply() -> None:
        right = time.time
        time.time = lambda: right() + next(shifts)

    return apply


CLOCKS: dict[str, Callable[[], None]] = {
    "ten years ahead": _shifted(itertools.repeat(10.0 * _YEAR_S)),
    "ten years behind": _shifted(itertools.repeat(-10.0 * _YEAR_S)),
    "back an hour at each look": _shifted(itertools.count(0.0, -3600.0)),
    "to and fro by a day": _shifted(itertools.cycle([0.0, 86_400.0, -86_400.0])),
}
AGES: dict[str, float] = {"files of next year": _YEAR_S, "files of 1971": 1.0 * _YEAR_S - time.time()}


def _give_age(place: Path, shift_s: float) -> None:
    """All files of the data set and a temporary of another attempt; inputs keep the times of the plan."""
    (place / "data").mkdir(exist_ok=True)
    (place / "data" / _TEMPORARY).write_bytes(b"another attempt's")
    then = time.time() + shift_s
    for path in (place / "data").rglob("*"):
        os.utime(path, (then, then))
