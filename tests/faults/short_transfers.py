"""A read or a write moves half of the bytes, at one call or at all of them: the command must go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.faults.disturbed_files import spread
from tests.faults.injected_errors import Hit, OsFault, counted, struck
from tests.faults.os_calls import OsCalls
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("json", "npy", "best_fit")
QUICK_FORMS = ("best_fit",)
HITS = (
    Hit("plan", "raw", "plan", 1.5),
    Hit("shard", "planned", "shard", 1.5),
    Hit("verify", "made", "verify", 1.5),
    Hit("load", "verified", "load", 1.5),
    Hit("load tars", "made", "load tars", 1),
    Hit("stage", "verified", "stage", 1.5),
    Hit("status", "made", "status", 0.5),
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """All calls of each command at once, then one by one."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in HITS:
            expected, made = counted(data_set, calls, hit)
            moving = [at for at, call in enumerate(made) if call.op in ("read", "write")]
            name = "short_transfers"
            chosen = [moving[place] for place in spread(len(moving), hit.number(num_faults))]
            for fault in (
                OsFault(at=moving[0], mode="all short"),
                *(OsFault(at=at, mode="short") for at in chosen),
            ):
                yield struck(name, data_set, calls, hit, expected, fault)
