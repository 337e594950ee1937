"""The limits of one job: numbers, and whose limits they are."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A number, and whose limit it is."""

    number: int
    of: str  # such as: MaxWall of QOS long


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one job may ask for. None: no limit, or none that can be read."""

    cluster: str = ""
    max_array_size: int | None = None  # bounds the index, so our arrays begin at 0
    nodes: list[tuple[str, int, int]] = field(default_factory=list)  # (state, MB, CPUs), of the partition
    larger_nodes: dict[str, int] = field(default_factory=dict)  # other partition -> MB of its largest node
    is_exclusive: bool = False  # the partition gives whole nodes only
    time_min: Limit | None = None
    mem_mb: Limit | None = None
    num_cpus: Limit | None = None
    min_cpus: Limit | None = None
    min_nodes: Limit | None = None
    max_nodes: Limit | None = None
    default_mem_mb: int | None = None  # of a task with one CPU
    # Without the limits of the default partition, where a job_submit plugin may choose another one.
    elsewhere: Limits | None = None

    @property
    def max_mem_mb(self) -> int | None:
        """Return the largest memory of a task: of a node, or what a limit leaves."""
        sizes = [mem_mb for _, mem_mb, _ in self.nodes]
        known = [max(sizes)] if sizes else []
        known += [self.mem_mb.number] if self.mem_mb else []
        return min(known, default=None)

    @property
    def min_cpus_of_nodes(self) -> int | None:
        """Return the CPUs of the smallest node."""
        return min((num_cpus for _, _, num_cpus in self.nodes), default=None)

    @property
    def max_cpus(self) -> int | None:
        """Return the CPUs of the largest node."""
        return max((num_cpus for _, _, num_cpus in self.nodes), default=None)

    @property
    def most_cpus(self) -> int | None:
        """Return the most CPUs of a job on one node: of the largest node, or what a limit leaves."""
        known = [self.max_cpus] if self.max_cpus else []
        known += [self.num_cpus.number] if self.num_cpus else []
        return min(known, default=None)


def least(limits: list[Limit]) -> Limit | None:
    return min(limits, key=lambda each: each.number, default=None)
