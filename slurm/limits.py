"""What one job of this user may ask for, by partition, QOS and association.

Where Slurm enforces no limits of accounts, these are not asked for. What cannot be read (job_submit plugins,
a QOS that is hidden) is tried by ``sbatch --test-only``, see ``slurm.fit``.

Price: three calls of Slurm, four with limits of accounts, five with the account's default QOS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardprep.format.jobs import user_name
from slurm.commands import SlurmAway, SlurmRefused, megabytes_of, minutes_of, read_config, slurm_answer
from slurm.request import JobRequest


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


def find_limits(request: JobRequest, config: Mapping[str, str]) -> Limits:
    """Ask Slurm for the limits of jobs with the account, QOS and partition of a request.

    ``config``: of the controller, or {}. Raises as ``slurm_answer`` does.
    """
    if not config:
        config = read_config()
    asked = _options(request)
    nodes = _read_nodes(asked.get("partition"))
    partitions = _read_partitions()
    # Of several partitions a job gets any, so their own limits are left to Slurm.
    partition: Mapping[str, str] = {}
    if len(nodes.partitions) == 1:
        partition = partitions.get(nodes.partitions[0], {})

    limits: dict[str, list[Limit]] = {"time_min": [], "mem_mb": [], "num_cpus": [], "min_cpus": []}
    time_min = nodes.longest_min()
    if time_min is not None:
        limits["time_min"].append(Limit(number=time_min, of=f"MaxTime of partition {nodes.partitions[0]}"))
    for facts, owner in ((config, "the cluster"), (partition, f"partition {partition.get('PartitionName')}")):
        mem_mb = megabytes_of(facts.get("MaxMemPerNode", ""))
        if mem_mb:
            limits["mem_mb"].append(Limit(number=math.floor(mem_mb), of=f"MaxMemPerNode of {owner}"))
    if re.search("limits|safe|all", config.get("AccountingStorageEnforce", "")):
        for name, limit in _limits_of_accounts(asked, partition.get("QoS", "")).items():
            limits[name].append(limit)
    default_mb = megabytes_of(config.get("DefMemPerCPU") or config.get("DefMemPerNode") or "")
    return Limits(
        cluster=config.get("ClusterName", ""),
        max_array_size=int(config["MaxArraySize"]),
        nodes=nodes.nodes,
        larger_nodes=nodes.larger_elsewhere(),
        is_exclusive=bool(nodes.sharing) and all(each.startswith("EXCLUSIVE") for each in nodes.sharing),
        time_min=_least(limits["time_min"]),
        mem_mb=_least(limits["mem_mb"]),
        num_cpus=_least(limits["num_cpus"]),
        min_cpus=max(limits["min_cpus"], key=lambda each: each.number, default=None),
        min_nodes=_nodes_limit(partition, "MinNodes"),
        max_nodes=_nodes_limit(partition, "MaxNodes"),
        default_mem_mb=round(default_mb) if default_mb else None,
    )


@dataclass(kw_only=True)
class _Nodes:
    """What sinfo shows: a line for each partition and kind of node."""

    partitions: list[str] = field(default_factory=list)  # that a job may use
    nodes: list[tuple[str, int, int]] = field(default_factory=list)  # (state, MB, CPUs), of these
    times_min: list[int | None] = field(default_factory=list)  # their limits; None: none
    sharing: list[str] = field(default_factory=list)  # OverSubscribe
    others_mb: dict[str, int] = field(default_factory=dict)  # other partition -> MB of its largest node

    def longest_min(self) -> int | None:
        """Return the longest time limit, or None if a partition has none."""
        known = [each for each in self.times_min if each is not None]
        return max(known) if known and len(known) == len(self.times_min) else None

    def larger_elsewhere(self) -> dict[str, int]:
        """Return the other partitions with more memory on a node than these have."""
        largest_mb = max((mem_mb for _, mem_mb, _ in self.nodes), default=0)
        return {name: mem_mb for name, mem_mb in self.others_mb.items() if mem_mb > largest_mb}


def _read_nodes(partition: str | None) -> _Nodes:
    """Ask sinfo. ``partition``: names, separated by commas, or None for the default one."""

    def parse(text: str) -> _Nodes:
        found = _Nodes()
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
        return found

    return slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%P|%T|%m|%c|%l|%h")


def _nodes_limit(partition: Mapping[str, str], name: str) -> Limit | None:
    """Return a partition's MinNodes or MaxNodes, or None without one."""
    number = partition.get(name, "")
    if not number.isdecimal() or int(number) == 0:
        return None
    return Limit(number=int(number), of=f"{name} of partition {partition.get('PartitionName')}")


def _least(limits: list[Limit]) -> Limit | None:
    return min(limits, key=lambda each: each.number, default=None)


_SHORT_OPTIONS = {"p": "partition", "A": "account", "q": "qos"}


def _options(request: JobRequest) -> dict[str, str]:
    """Return partition, account and QOS, also if they are given as options of sbatch."""
    asked = {}
    for word in request.sbatch_options():
        match = re.fullmatch(r"(?:--(partition|account|qos)=|-([pAq]))(.+)", word)
        if match:
            name = match[1] or _SHORT_OPTIONS[match[2]]
            asked[name] = match[3]
    return asked


def _read_partitions() -> dict[str, dict[str, str]]:
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


def _limits_of_accounts(asked: Mapping[str, str], partition_qos: str) -> dict[str, Limit]:
    """Return the limits of the QOS and the association. Of several limits of a kind the first applies.

    Slurm's order: the QOS of the partition, the QOS of the job, the association, its parents.
    """
    me = user_name()

    def parse(text: str) -> list[dict[str, str]]:
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]

    command = ("scontrol", "--oneliner", "show", "assoc_mgr", f"users={me}", "flags=assoc,qos")
    try:
        lines = slurm_answer(parse, *command)
    except (SlurmAway, SlurmRefused):
        return {}  # hidden from users; --test-only says what it can
    of_qos = {facts["QOS"].partition("(")[0]: facts for facts in lines if "QOS" in facts}
    associations = {}
    accounts = {}
    for facts in lines:
        if facts.get("UserName", "").partition("(")[0] == me:
            associations[facts.get("Account", "")] = facts
        elif "Account" in facts and not facts.get("UserName"):
            accounts[facts["Account"]] = facts
    default = [name for name, facts in associations.items() if facts.get("DefAssoc") == "Yes"]
    account = asked.get("account") or (default[0] if default else "")
    qos = asked.get("qos") or _default_qos(me, account)
    ordered = [(f"QOS {name}", of_qos[name]) for name in (partition_qos, qos) if name in of_qos]
    if account in associations:
        ordered.append((f"your association with account {account}", associations[account]))
    for _ in range(len(accounts)):  # parents, of which a damaged answer could make a circle
        facts = accounts.get(account, {})
        ordered.append((f"account {account}", facts))
        account = facts.get("ParentAccount", "").partition("(")[0]
    limits: dict[str, Limit] = {}
    for of, facts in ordered:
        for name, limit in _limits_of(of, facts).items():
            limits.setdefault(name, limit)
    return limits


def _limits_of(of: str, facts: Mapping[str, str]) -> dict[str, Limit]:
    """Return the limits in one line of ``scontrol show assoc_mgr``."""
    most = dict(re.findall(r"(\w+)=(\d+)", facts.get("MaxTRESPJ", "").replace("=N(0)", "")))
    most |= dict(re.findall(r"(\w+)=(\d+)", facts.get("MaxTRESPN", "")))
    least = dict(re.findall(r"(\w+)=(\d+)", facts.get("MinTRESPJ", "")))
    numbers = {
        "time_min": ("MaxWall", facts.get("MaxWallPJ", "")),
        "mem_mb": ("MaxTRES mem", most.get("mem", "")),
        "num_cpus": ("MaxTRES cpu", most.get("cpu", "")),
        "min_cpus": ("MinTRES cpu", least.get("cpu", "")),
    }
    limits = {}
    for name, (word, number) in numbers.items():
        if number.isdecimal():
            limits[name] = Limit(number=int(number), of=f"{word} of {of}")
    return limits


def _default_qos(user: str, account: str) -> str:
    """Return the QOS of jobs that name none, or "" if the accounts do not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "where", f"user={user}")

    def parse(text: str) -> str:
        for line in text.splitlines():
            name, default, allowed = line.split("|")
            if name == account:
                return default or ("" if "," in allowed else allowed)
        return ""

    try:
        return slurm_answer(parse, *command, "format=Account,DefaultQOS,QOS")
    except (SlurmAway, SlurmRefused):
        return ""
