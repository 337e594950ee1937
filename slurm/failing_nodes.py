"""Which nodes a retry leaves out: those that failed again and again, each by itself.

A node that goes down takes all its tasks with it: that is one incident, however many tasks it had. A power
cut takes many nodes at once: that is nobody's fault, and to leave them all out would leave none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from slurm.failure_causes import NODE_FAIL
from slurm.slurm_queries import TaskAttempt

_TOGETHER_S = 600.0  # Slurm finds nodes of one power cut up to SlurmdTimeout (300 s) apart


def failing_nodes(attempts: Iterable[TaskAttempt], at_least: int = 2) -> list[str]:
    """Nodes that went down alone ``at_least`` times, with tasks of this data set on them."""
    counts = Counter(next(iter(nodes)) for nodes in _incidents(attempts) if len(nodes) == 1)
    return sorted(node for node, number in counts.items() if number >= at_least)


def _incidents(attempts: Iterable[TaskAttempt]) -> list[set[str]]:
    """The nodes of each incident: what ended with NODE_FAIL within ten minutes of the one before."""
    failed = [each for each in attempts if each.state == NODE_FAIL and each.node]
    incidents: list[set[str]] = []
    last_s = float("-inf")
    for end_s, node in sorted((_seconds(each.end_time), each.node) for each in failed):
        if end_s - last_s > _TOGETHER_S or not incidents:
            incidents.append(set())
        incidents[-1].add(node)
        last_s = end_s
    return incidents


def _seconds(text: str) -> float:
    """Of Slurm's local time; all unknown times are one."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").timestamp()  # noqa: DTZ007 - one zone for all
    except ValueError:
        return 0.0
