"""What this user may ask for, and requests that fit it: of tasks, retries, the verify job and the controller.

Every request passes ``Limits``, which are read from the partition, the QOS and the association. Where Slurm
enforces no limits of accounts, these are not asked for. What cannot be read (job_submit plugins, a QOS that
is hidden) is tried by ``sbatch --test-only``, once for each set of options. A refusal names the job, the
limit and the flag.

Price: three calls of Slurm, four with limits of accounts, five with the account's default QOS.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardprep.console import say
from shardprep.format.jobs import JobRequest, user_name
from slurm import state as states
from slurm.state import SlurmAway, SlurmRefused, run_slurm

CONTROLLER_MEM_GB = 1.0
_VERIFIED_BYTES_PER_S = 5e6  # bytes of input, on one slow core
_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)


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
    default_mem_mb: int | None = None  # of a task with one CPU

    @property
    def max_mem_mb(self) -> int | None:
        """Return the largest memory of a task: of a node, or what a limit leaves."""
        sizes = [mem_mb for _, mem_mb, _ in self.nodes]
        known = [max(sizes)] if sizes else []
        known += [self.mem_mb.number] if self.mem_mb else []
        return min(known, default=None)

    @property
    def max_cpus(self) -> int | None:
        """Return the CPUs of the largest node."""
        return max((num_cpus for _, _, num_cpus in self.nodes), default=None)


def find_limits(request: JobRequest, config: Mapping[str, str]) -> Limits:
    """Ask Slurm for the limits of jobs with the account, QOS and partition of a request.

    ``config``: of the controller, or {}. Raises as ``slurm_answer`` does.
    """
    if not config:
        config = states.read_config()
    asked = _options(request)
    partition = asked.get("partition")
    nodes: list[tuple[str, int, int]] = []
    limits_min: list[int | None] = []
    sharing: list[str] = []
    largest: dict[str, int] = {}
    names: list[str] = []

    def parse(text: str) -> None:
        for line in text.splitlines():
            name, state, mem, cpus, max_time, *rest = line.split("|")
            mem_mb = int(mem.rstrip("+"))
            # sinfo marks the default partition with "*". A request may name several, separated by commas.
            plain = name.removesuffix("*")
            is_asked = name.endswith("*") if partition is None else plain in partition.split(",")
            if not is_asked:
                largest[plain] = max(mem_mb, largest.get(plain, 0))
                continue
            names.append(plain)
            nodes.append((state, mem_mb, int(cpus.rstrip("+"))))
            limits_min.append(states.minutes_of(max_time))
            sharing.append(rest[0] if rest else "")

    states.slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%P|%T|%m|%c|%l|%h")
    partitions = _read_partitions()
    found: dict[str, list[Limit]] = {"time_min": [], "mem_mb": [], "num_cpus": [], "min_cpus": []}
    known_limits = [each for each in limits_min if each is not None]
    if known_limits and len(known_limits) == len(limits_min):
        found["time_min"].append(Limit(number=max(known_limits), of=f"MaxTime of partition {names[0]}"))
    own = [partitions[name] for name in dict.fromkeys(names) if name in partitions]
    for facts in [config, *(own if len(own) == 1 else [])]:
        mem_mb = states.megabytes_of(facts.get("MaxMemPerNode", ""))
        if mem_mb:
            of = f"partition {facts['PartitionName']}" if "PartitionName" in facts else "the cluster"
            found["mem_mb"].append(Limit(number=math.floor(mem_mb), of=f"MaxMemPerNode of {of}"))
    if re.search("limits|safe|all", config.get("AccountingStorageEnforce", "")):
        partition_qos = own[0].get("QoS", "") if len(own) == 1 else ""
        for name, limit in _limits_of_accounts(asked, partition_qos).items():
            found[name].append(limit)
    largest_mem_mb = max((mem_mb for _, mem_mb, _ in nodes), default=0)
    default = config.get("DefMemPerCPU") or config.get("DefMemPerNode") or ""
    default_mb = states.megabytes_of(default)
    return Limits(
        cluster=config.get("ClusterName", ""),
        max_array_size=int(config["MaxArraySize"]),
        nodes=nodes,
        larger_nodes={name: mem_mb for name, mem_mb in largest.items() if mem_mb > largest_mem_mb},
        is_exclusive=bool(sharing) and all(each.startswith("EXCLUSIVE") for each in sharing),
        time_min=_least(found["time_min"]),
        mem_mb=_least(found["mem_mb"]),
        num_cpus=_least(found["num_cpus"]),
        min_cpus=max(found["min_cpus"], key=lambda each: each.number, default=None),
        default_mem_mb=round(default_mb) if default_mb else None,
    )


def _least(limits: list[Limit]) -> Limit | None:
    return min(limits, key=lambda each: each.number, default=None)


def _options(request: JobRequest) -> dict[str, str]:
    """Return partition, account and QOS, also if they are given as options of sbatch."""
    asked = {}
    for word in request.sbatch_options():
        match = re.fullmatch(r"--(partition|account|qos)=(.+)", word)
        if match:
            asked[match[1]] = match[2]
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
        return states.slurm_answer(parse, "scontrol", "--oneliner", "show", "partition")
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
        lines = states.slurm_answer(parse, *command)
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
        return states.slurm_answer(parse, *command, "format=Account,DefaultQOS,QOS")
    except (SlurmAway, SlurmRefused):
        return ""


# Requests that fit. ------------------------------------------------------------------------------------


def check_request(request: JobRequest, limits: Limits, what: str) -> None:
    """Refuse a request that would wait for ever. ``what``: whose request it is. Raises SlurmRefused."""
    num_cpus = request.num_cpus or 1
    mem_mb = memory_mb(request)
    checks: list[tuple[str, float | None, Limit | None, Callable[[int], float]]] = [
        ("--time_min", request.time_min, limits.time_min, float),
        ("--mem_gb", mem_mb if request.mem_gb else None, limits.mem_mb, lambda mb: mb / 1024),
        ("--mem_per_cpu_gb", mem_mb if request.mem_per_cpu_gb else None, limits.mem_mb,
         lambda mb: mb / num_cpus / 1024),
        ("--cpus_per_task", request.num_cpus, limits.num_cpus, float),
    ]  # fmt: skip
    for flag, asked, limit, shown in checks:
        if asked is None or limit is None or asked <= limit.number:
            continue
        found = (
            f"{flag} {_short(shown(round(asked)))} of {what}, above {limit.of}: such a job would never start"
        )
        most = math.floor(shown(limit.number) * 1000) / 1000
        raise SlurmRefused(
            found=found, expected=f"at most {flag} {_short(most)}, or another partition or QOS"
        )
    if request.num_cpus and limits.min_cpus and request.num_cpus < limits.min_cpus.number:
        least = limits.min_cpus
        found = f"--cpus_per_task {num_cpus} of {what}, below {least.of}: such jobs would never start"
        raise SlurmRefused(found=found, expected=f"--cpus_per_task {least.number} or more, or another QOS")


def _short(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


def memory_mb(request: JobRequest) -> float:
    """Return the memory that a request names for a task, or 0."""
    return 1024 * (request.mem_gb or (request.mem_per_cpu_gb or 0) * (request.num_cpus or 1))


def verify_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a job that verifies all bytes, as much of it as the limits allow."""
    num_cpus = min(4, request.num_cpus or 4)
    num_cpus = max(num_cpus, limits.min_cpus.number if limits.min_cpus else 1)
    small = request.changed(cpus_per_task=num_cpus, max_parallel=1)
    if request.time_min is None:
        return small
    wanted_min = request.time_min + math.ceil(input_bytes / _VERIFIED_BYTES_PER_S / 60)
    most_min = limits.time_min.number if limits.time_min else wanted_min
    return small.changed(time_min=max(min(wanted_min, most_min), 1))


def controller_request(request: JobRequest, limits: Limits, input_bytes: int) -> JobRequest:
    """Return the request of a controller: one CPU and 1 GB, in the form that the user's request has.

    Without memory in the request there is none here, unless the site's default is less. A task's own smaller
    memory is not exceeded where a limit says so.
    """
    num_cpus = limits.min_cpus.number if limits.min_cpus else 1
    small = verify_request(request, limits, input_bytes).changed(cpus_per_task=num_cpus)
    mem_gb = CONTROLLER_MEM_GB
    if limits.mem_mb:
        mem_gb = min(mem_gb, math.floor(limits.mem_mb.number * 1000 / 1024) / 1000)
    has_less = limits.default_mem_mb is not None and limits.default_mem_mb * num_cpus < 1024 * mem_gb
    if request.mem_per_cpu_gb is not None:
        return small.changed(mem_per_cpu_gb=mem_gb / num_cpus)
    if request.mem_gb is not None or request.num_cpus is None or has_less:
        return small.changed(mem_gb=mem_gb)
    return small


def more_time(request: JobRequest, ran_min: int, limits: Limits) -> tuple[JobRequest, str]:
    """Return a request with twice the time, or as much as the limits allow, and what to say then, or ""."""
    wanted_min = max(2 * ran_min, 2)
    most = limits.time_min
    if most is None or wanted_min <= most.number:
        return request.changed(time_min=wanted_min), ""
    note = f"asks for {most.number} min, the most that {most.of} allows"
    if ran_min >= most.number:
        note += (
            ", which was too little before: send fewer shards per task (--shards_per_task 1), name another "
        )
        note += "partition or QOS, or make smaller shards"
    return request.changed(time_min=most.number), note


NUM_PROC = r"--num[_-]proc[= ](\d+)"  # in worker_args
_WORTHWHILE = 1.25  # times the memory; with less, a task would fail again


def more_memory(
    request: JobRequest, had_mb: int | None, num_shards: int, limits: Limits
) -> tuple[JobRequest, str]:
    """Return a request with twice the memory, and what to say if it cannot be twice, or "".

    Where a node has no more, tasks of several processes start half as many. A task of ``num_shards`` shards
    has a process for each, up to its CPUs.
    """
    has_all = request.num_cpus is None and not memory_mb(request)  # --mem=0
    most_mb = limits.max_mem_mb
    wanted_mb = 2 * had_mb if had_mb and not has_all else None
    note = ""
    if wanted_mb and most_mb and wanted_mb > most_mb:
        wanted_mb = max(most_mb, had_mb or 0)
        note = f"asks for {wanted_mb:,} MB, the most that a task can have here"
    if wanted_mb and wanted_mb != had_mb:
        if request.mem_per_cpu_gb is None:
            request = request.changed(mem_gb=round(wanted_mb / 1024, 3))
        else:
            request = request.changed(mem_per_cpu_gb=round(wanted_mb / 1024 / (request.num_cpus or 1), 3))
    if had_mb and wanted_mb and wanted_mb >= _WORTHWHILE * had_mb:
        return request, note
    if not (has_all or had_mb):
        return request, "Slurm names no memory limit of this task: --mem_gb asks for more"
    given = re.findall(NUM_PROC, request.worker_args)
    num_processes = min(num_shards, request.num_cpus or limits.max_cpus or 1)
    if given:
        num_processes = int(given[-1])
    size = f"a node has no more than {most_mb:,} MB" if most_mb else "the task has all memory of its node"
    if num_processes > 1:
        fewer = num_processes // 2
        others = re.sub(NUM_PROC, "", request.worker_args).strip()
        request = request.changed(worker_args=f"{others} --num_proc {fewer}".strip())
        return request, f"{size}: starts {fewer} processes in place of {num_processes}"
    larger = sorted(limits.larger_nodes.items(), key=lambda item: -item[1])
    where = (
        f"--partition {larger[0][0]} has nodes of {larger[0][1]:,} MB" if larger else "name another partition"
    )
    return request, f"{size}, and it was too little: {where}, or make smaller shards"


VERIFY_JOB = "the verify job"
CONTROLLER_JOB = "the controller of --until_done"
TASKS = "the tasks"
_MEMORY_OPTIONS = ("--mem", "--mem-per-cpu")  # sbatch takes one of them


def options_of(what: str, request: JobRequest) -> list[str]:
    """Return the options of sbatch for a job. --controller_args replace those of verify and controller."""
    options = request.sbatch_options()
    if what == TASKS:
        return options
    words = shlex.split(request.controller_args)
    replaced = {word.partition("=")[0] for word in words}
    if replaced.intersection(_MEMORY_OPTIONS):
        replaced.update(_MEMORY_OPTIONS)
    return [*(each for each in options if each.partition("=")[0] not in replaced), *words]


class Tester:
    """Tries jobs with ``sbatch --test-only``, once for each set of options."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, ...]] = set()

    def check(self, what: str, request: JobRequest, script: str, limits: Limits) -> None:
        """Raise SlurmRefused if Slurm would refuse the script of a job, and name the job and what it asks."""
        options = tuple(options_of(what, request))
        if options in self._passed:
            return
        try:
            run_slurm("sbatch", "--test-only", text=script)
        except SlurmRefused as error:
            fitting = []
            for state, node_mb, node_cpus in limits.nodes:
                if node_mb >= memory_mb(request) and node_cpus >= (request.num_cpus or 1):
                    fitting.append(state)
            is_about_nodes = "node" in str(error).lower()
            if fitting and all(map(_NODES_AWAY.search, fitting)) and is_about_nodes:
                say(f"warning: {error}; the jobs wait until such nodes are back: sinfo -R")
                return
            words = f"{error}. It is {what}, which asks for: {shlex.join(options)}"
            if limits.nodes:
                words += f"; a node has up to {limits.max_cpus} CPUs and {limits.max_mem_mb} MB"
            if what in (VERIFY_JOB, CONTROLLER_JOB):
                words += "; for other options of this job: --controller_args"
            raise SlurmRefused(found=f"{words}. Nothing was written or submitted") from None
        self._passed.add(options)
