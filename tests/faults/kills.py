"""SIGKILL just before the k-th call to the operating system.

Either it is done, or nothing of it counts, and the command run again gives equal bytes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from tests.faults.commands import EXPORTS
from tests.faults.disturbed_files import spread
from tests.faults.injected_errors import Hit, OsFault, counted, hits_of, struck
from tests.faults.os_calls import OsCalls
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("json", "best_fit", "formats")
QUICK_FORMS = ("best_fit", "formats")
HITS = (
    Hit("plan", "raw", "plan", 1),
    Hit("shard", "planned", "shard", 2),
    Hit("shard", "verified", "shard, done", 0.5),
    Hit("run", "planned", "run", 0.5),
    Hit("verify", "made", "verify", 1),
    Hit("stage", "verified", "stage", 1),
    Hit("submit", "planned", "submit", 0.5),
    Hit("report", "verified", "report", 0.5),
    Hit("clean", "littered", "clean", 0.5),
    *(Hit(name, "verified", name, 0.12) for name in EXPORTS),
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """A kill at each call of the commands that write."""
    return at_calls("kills", data_sets, (signal.SIGKILL,), num_faults)


def at_calls(
    campaign: str, data_sets: Sequence[SmallDataSet], signals: Sequence[signal.Signals], num_faults: int
) -> Iterator[Outcome]:
    """Each call of the commands that write, with the signals in turn."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in hits_of(data_set, HITS, num_faults):
            expected, made = counted(data_set, calls, hit)
            for number, at in enumerate(spread(len(made), hit.number(num_faults))):
                fault = OsFault(at=at, mode="signal", error=signals[number % len(signals)])
                yield struck(campaign, data_set, calls, hit, expected, fault)
