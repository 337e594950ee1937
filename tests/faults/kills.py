"""A signal just before the k-th call to the operating system.

SIGKILL: either it is done, or nothing of it counts. SIGTERM, SIGINT and SIGUSR1: likewise, and the command
ends with 75 and leaves no temporary. In both cases the command run again gives equal bytes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from shardprep.console import STOP_SIGNALS
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
    Hit("verify --crcs", "made", "verify --crcs", 0.5),
    Hit("stage", "verified", "stage", 1),
    Hit("submit", "planned", "submit", 0.5),
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each call of the commands that write, twice: a kill, and one of the stop signals in turn."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in hits_of(data_set, HITS):
            expected, made = counted(data_set, calls, hit)
            for number, at in enumerate(spread(len(made), hit.number(num_faults))):
                stop = STOP_SIGNALS[number % len(STOP_SIGNALS)]
                for campaign, each in (("kills", signal.SIGKILL), ("stop_signals", stop)):
                    fault = OsFault(at=at, mode="signal", error=each)
                    yield struck(campaign, data_set, calls, hit, expected, fault)
