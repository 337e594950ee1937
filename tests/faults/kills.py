"""SIGKILL just before the k-th call to the operating system: either it is done, or nothing of it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.faults.disturbed_files import spread
from tests.faults.injected_errors import Hit, counted, struck
from tests.faults.os_calls import OsCalls
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("json", "best_fit")
QUICK_FORMS = ("best_fit",)
HITS = (
    Hit("plan", "raw", "plan", 2),
    Hit("shard", "planned", "shard", 5),
    Hit("verify", "made", "verify", 2),
    Hit("stage", "verified", "stage", 2),
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each call of the commands that write; the command is run again each time."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in HITS:
            expected, made = counted(data_set, calls, hit)
            for at in spread(len(made), hit.number(num_faults)):
                yield struck("kills", data_set, calls, hit, expected, at=at, mode="die")
