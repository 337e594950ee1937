"""What the partitions of a site give: their nodes, and the limits of one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm.commands import SlurmAway, SlurmRefused, minutes_of, slurm_answer
from slurm.limits import Limit


@dataclass(kw_only=True)
class Nodes:
    """What sinfo shows: a line for each partition and kind of node."""

    partitions: list[str] = field(default_factory=list)  # that a job may use
    nodes: list[tuple[str, int, int]] = field(default_factory=list)  # (state, MB, CPUs), of these
    times_min: list[int | None] = field(default_factory=list)  # their limits; None: none
    sharing: list[str] = field(default_factory=list)  # OverSubscribe
    num_nodes: list[str] = field(default_factory=list)  # of one job, such as 1-infinite
    others_mb: dict[str, int] = field(default_factory=dict)  # other partition -> MB of its largest node

    def longest_min(self) -> int | None:
        """Return the longest time limit, or None if a partition has none."""
        known = [each for each in self.times_min if each is not None]
        return max(known) if known and len(known) == len(self.times_min) else None

    def has_limit(self) -> bool:
        """Return whether a partition limits the time."""
        return any(each is not None for each in self.times_min)

    def gives_whole_nodes(self) -> bool:
        """Return whether the nodes of all partitions are given whole."""
        return bool(self.sharing) and all(each.startswith("EXCLUSIVE") for each in self.sharing)

    def nodes_limit(self, name: str) -> Limit | None:
        """Return MinNodes or MaxNodes of the only partition, or None without one."""
        if len(self.partitions) != 1:
            return None
        shown = self.num_nodes[0].split("-")  # 2-4, 2-infinite, or 2 for both
        number = shown[0] if name == "MinNodes" else shown[-1]
        if not number.isdecimal() or int(number) == 0:
            return None
        return Limit(number=int(number), of=f"{name} of partition {self.partitions[0]}")

    def larger_elsewhere(self) -> dict[str, int]:
        """Return the other partitions with more memory on a node than these have."""
        largest_mb = max((mem_mb for _, mem_mb, _ in self.nodes), default=0)
        return {name: mem_mb for name, mem_mb in self.others_mb.items() if mem_mb > largest_mb}


def read_nodes(partition: str | None) -> Nodes:
    """Ask sinfo. ``partition``: names, separated by commas, or None for the default one."""

    def parse(text: str) -> Nodes:
        found = Nodes()
        for line in text.splitlines():
            name, state, mem, cpus, max_time, *rest = line.split("|")
            mem_mb = int(mem.rstrip("+"))
            # sinfo marks the default partition with "*".
            plain = name.removesuffix("*")
            is_asked = name.endswith("*") if partition is None else plain in partition.split(",")
            if not is_asked:
                found.others_mb[plain] = max(mem_mb, found.others_mb.get(plain, 0))
                continue
            if plain not in found.partitions:
                found.partitions.append(plain)
            found.nodes.append((state, mem_mb, int(cpus.rstrip("+"))))
            found.times_min.append(minutes_of(max_time))
            found.sharing.append(rest[0] if rest else "")
            found.num_nodes.append(rest[1] if len(rest) > 1 else "")
        return found

    return slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%P|%T|%m|%c|%l|%h|%s")


def read_partitions() -> dict[str, dict[str, str]]:
    """Return partition -> what ``scontrol show partition`` says, or {} if it does not."""

    def parse(text: str) -> dict[str, dict[str, str]]:
        partitions = {}
        for line in text.splitlines():
            facts = dict(re.findall(r"(\w+)=(\S*)", line))
            partitions[facts.get("PartitionName", "")] = facts
        return partitions

    try:
        return slurm_answer(parse, "scontrol", "--oneliner", "show", "partition")
    except (SlurmAway, SlurmRefused):
        return {}


def open_partitions(
    sizes_mb: Mapping[str, int], partitions: Mapping[str, Mapping[str, str]], asked: Mapping[str, str]
) -> dict[str, int]:
    """Return the partitions that this user's jobs may be sent to, as far as Slurm says it."""
    allowed = {}
    for name, mem_mb in sizes_mb.items():
        facts = partitions.get(name, {})
        is_open = facts.get("State", "UP") == "UP" and facts.get("RootOnly", "NO") == "NO"
        for kind, key in (("account", "Accounts"), ("qos", "Qos")):
            value = asked.get(kind, "")
            names = facts.get(f"Allow{key}", "ALL")
            is_denied = value in facts.get(f"Deny{key}", "").split(",") and value != ""
            if is_denied or (names != "ALL" and value not in names.split(",")):
                is_open = False
        if is_open:
            allowed[name] = mem_mb
    return allowed
