"""SIGTERM, SIGINT or SIGUSR1 just before the k-th call to the operating system.

The command ends with 75, or with 0 as it is done, and leaves no temporary; run again it gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardprep.signals import STOP_SIGNALS
from tests.faults.kills import FORMS, QUICK_FORMS, at_calls
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

__all__ = ["FORMS", "QUICK_FORMS", "outcomes"]


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """A stop signal at each call of the commands that write."""
    return at_calls("stop_signals", data_sets, STOP_SIGNALS, num_faults)
