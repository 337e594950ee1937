"""What one job of this user may ask for, by partition, QOS and association.

Where Slurm enforces no limits of accounts, these are not asked for. What cannot be read (job_submit plugins,
a QOS that is hidden) is tried by ``sbatch --test-only``, see ``slurm.fit``.

Price: two calls of Slurm; one more for a request that names memory, or at a site with limits of accounts.
These cost one call themselves, one with the account's default QOS, and one for the flags of the QOS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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


def find_limits(request: JobRequest, config: Mapping[str, str], *, has_memory: bool) -> Limits:
    """Ask Slurm for the limits of jobs with the account, QOS and partition of a request.

    ``config``: of the controller, or {}. ``has_memory``: whether the jobs name memory, which a partition may
    limit. Raises as ``slurm_answer`` does.
    """
    if not config:
        config = read_config()
    asked = _options(request)
    has_accounts = bool(re.search("limits|safe|all", config.get("AccountingStorageEnforce", "")))
    nodes = _read_nodes(asked.get("partition"))
    partitions = _read_partitions() if has_accounts or has_memory else {}
    # Of several partitions a job gets any, so their own limits are left to Slurm.
    partition: Mapping[str, str] = {}
    if len(nodes.partitions) == 1:
        partition = partitions.get(nodes.partitions[0], {})

    of_accounts = _OfAccounts()
    if has_accounts:
        of_accounts = _read_limits_of_accounts(asked, partition.get("QoS", ""), has_limit=nodes.has_limit())
    of_partition: dict[str, list[Limit]] = {"time_min": [], "mem_mb": []}
    time_min = nodes.longest_min()
    if time_min is not None and "PartitionTimeLimit" not in of_accounts.flags:
        name = ", ".join(nodes.partitions)
        of_partition["time_min"].append(Limit(number=time_min, of=f"MaxTime of partition {name}"))
    of_partition["mem_mb"] += _max_mem(partition, f"partition {partition.get('PartitionName')}")
    of_all = {name: list(limits) for name, limits in of_accounts.limits.items()}
    of_all.setdefault("mem_mb", []).extend(_max_mem(config, "the cluster"))

    default_mb = megabytes_of(config.get("DefMemPerCPU") or config.get("DefMemPerNode") or "")
    limits = Limits(
        cluster=config.get("ClusterName", ""),
        max_array_size=int(config["MaxArraySize"]),
        nodes=nodes.nodes,
        larger_nodes=_open_partitions(nodes.larger_elsewhere(), partitions, asked),
        is_exclusive=bool(nodes.sharing) and all(each.startswith("EXCLUSIVE") for each in nodes.sharing),
        time_min=_least([*of_partition["time_min"], *of_all.get("time_min", [])]),
        mem_mb=_least([*of_partition["mem_mb"], *of_all["mem_mb"]]),
        num_cpus=_least(of_all.get("num_cpus", [])),
        min_cpus=max(of_all.get("min_cpus", []), key=lambda each: each.number, default=None),
        min_nodes=nodes.nodes_limit("MinNodes"),
        max_nodes=nodes.nodes_limit("MaxNodes"),
        default_mem_mb=round(default_mb) if default_mb else None,
    )
    if "partition" in asked or not _may_choose_partitions(config):
        return limits
    without = replace(limits, time_min=_least(of_all.get("time_min", [])), mem_mb=_least(of_all["mem_mb"]))
    return replace(limits, elsewhere=without)


def _max_mem(facts: Mapping[str, str], owner: str) -> list[Limit]:
    """Return the MaxMemPerNode of the cluster or a partition, if it has one."""
    mem_mb = megabytes_of(facts.get("MaxMemPerNode", ""))
    return [Limit(number=math.floor(mem_mb), of=f"MaxMemPerNode of {owner}")] if mem_mb else []


_KEEP_PARTITIONS = {"", "(null)", "require_timelimit", "throttle", "logging"}  # plugins of Slurm's own


def _may_choose_partitions(config: Mapping[str, str]) -> bool:
    """Return whether a job_submit plugin may choose a partition for jobs that name none."""
    plugins = config.get("JobSubmitPlugins", "").split(",")
    return not _KEEP_PARTITIONS.issuperset(plugins)


def _open_partitions(
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


@dataclass(kw_only=True)
class _Nodes:
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
            found.num_nodes.append(rest[1] if len(rest) > 1 else "")
        return found

    return slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%P|%T|%m|%c|%l|%h|%s")


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


@dataclass(frozen=True, kw_only=True)
class _OfAccounts:
    """What QOS, association and accounts allow."""

    limits: dict[str, list[Limit]] = field(default_factory=dict)  # field of Limits -> its limits
    flags: set[str] = field(default_factory=set)  # of the job's QOS


def _read_limits_of_accounts(asked: Mapping[str, str], partition_qos: str, *, has_limit: bool) -> _OfAccounts:
    """Return the limits of the QOS and the association. Of several limits of a kind the first applies.

    Slurm's order: the QOS of the partition, the QOS of the job, the association, its parents. A flag of the
    job's QOS puts it before that of the partition. ``has_limit``: the partition limits the time.
    """
    me = user_name()

    def parse(text: str) -> list[dict[str, str]]:
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]

    command = ("scontrol", "--oneliner", "show", "assoc_mgr", f"users={me}", "flags=assoc,qos")
    try:
        lines = slurm_answer(parse, *command)
    except (SlurmAway, SlurmRefused):
        return _OfAccounts()  # hidden from users; --test-only says what it can
    of_qos = {facts["QOS"].partition("(")[0]: facts for facts in lines if "QOS" in facts}
    associations = {}
    accounts = {}
    partitions = ("", *asked.get("partition", "").split(","))
    for facts in lines:
        place = facts.get("Partition", "")
        if facts.get("UserName", "").partition("(")[0] == me:
            # One that holds for this partition alone comes before one for all.
            if place in partitions and (place or facts["Account"] not in associations):
                associations[facts.get("Account", "")] = facts
        elif "Account" in facts and not facts.get("UserName"):
            accounts[facts["Account"]] = facts
    default = [name for name, facts in associations.items() if facts.get("DefAssoc") == "Yes"]
    account = asked.get("account") or (default[0] if default else "")
    qos = asked.get("qos") or _default_qos(me, account)
    flags = _flags_of_qos(qos) if qos in of_qos and (has_limit or partition_qos in of_qos) else set()
    names = [partition_qos, qos]
    if "OverPartQOS" in flags:
        names.reverse()
    ordered = [(f"QOS {name}", of_qos[name]) for name in names if name in of_qos]
    if account in associations:
        ordered.append((f"your association with account {account}", associations[account]))
    for _ in range(len(accounts)):  # parents, of which a damaged answer could make a circle
        facts = accounts.get(account, {})
        ordered.append((f"account {account}", facts))
        account = facts.get("ParentAccount", "").partition("(")[0]
    first: dict[tuple[str, str], Limit] = {}
    for of, facts in ordered:
        for (name, word), number in _limits_of(facts).items():
            first.setdefault((name, word), Limit(number=number, of=f"{word} of {of}"))
    limits: dict[str, list[Limit]] = {}
    for (name, _), limit in first.items():
        limits.setdefault(name, []).append(limit)
    return _OfAccounts(limits=limits, flags=flags)


def _limits_of(facts: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return (field of Limits, Slurm's word) -> number, by one line of ``scontrol show assoc_mgr``."""
    limits = {}
    if facts.get("MaxWallPJ", "").isdecimal():
        limits["time_min", "MaxWall"] = int(facts["MaxWallPJ"])
    # Jobs of a group or a user together: more than this one job alone never gets, either.
    for key, word in (("MaxTRESPJ", "MaxTRES"), ("MaxTRESPN", "MaxTRESPerNode"), ("GrpTRES", "GrpTRES")):
        most = dict(re.findall(r"(\w+)=(\d+)", facts.get(key, "")))  # N is no limit
        for name, unit in (("mem_mb", "mem"), ("num_cpus", "cpu")):
            if unit in most:
                limits[name, f"{word} {unit}"] = int(most[unit])
    least = dict(re.findall(r"(\w+)=(\d+)", facts.get("MinTRESPJ", "")))
    if "cpu" in least:
        limits["min_cpus", "MinTRES cpu"] = int(least["cpu"])
    return limits


def _flags_of_qos(name: str) -> set[str]:
    """Return the flags of a QOS, or none if the accounts do not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "where", f"name={name}")
    try:
        return slurm_answer(lambda text: set(text.strip().split(",")), *command, "format=Flags")
    except (SlurmAway, SlurmRefused):
        return set()


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
