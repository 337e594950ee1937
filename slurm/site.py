"""What a site allows: what can be known to go wrong is refused before anything is written or submitted.

``check_folder`` looks at the data set, ``find_limits`` and ``tasks_of_shards`` fit the shards into one array,
``check_request`` asks whether any node could ever run such a task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import itertools
import math
import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preprocess.plan.plan_file import Plan, need_plan
from preprocess.plan.tokenizer_files import check_tokenizer_files
from shardprep.errors import CannotWrite, ShardprepError, UsageError
from shardprep.format.names import id_ranges
from slurm.commands import (
    SlurmRefused,
    megabytes_of,
    minutes_of,
    read_config,
    slurm_answer,
    slurm_output,
)
from slurm.request import JobRequest
from slurm.script import LOG_FOLDER
from slurm.submissions import JOBS_FOLDER

_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """The limits that a submission meets, each with where it was found."""

    cluster: str
    max_tasks: int  # of one array
    why: str  # what set max_tasks
    has_accounting: bool


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """The most that a task in one partition can get: of its largest node, and within accounts and QOS."""

    name: str
    max_time_min: int | None
    max_mem_mb: int
    max_cpus: int
    default_mem_per_cpu_mb: float = 0  # what a task gets that asks for no memory; 0 if not known
    why: dict[str, str] = field(default_factory=dict)  # field above -> the limit of an account or QOS

    def whose(self, name: str) -> str:
        """Whose limit one of the fields above is."""
        return self.why.get(name, f"partition {self.name}")


def check_folder(folder: Path, request: JobRequest, say: Callable[[str], None]) -> Plan:
    """The plan, once folder, tokenizer, set-up file and input are as the tasks need them.

    Raises NotFound, CannotWrite, OtherTokenizer, UsageError, each with what to do. Writes nothing.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    jobs = folder / JOBS_FOLDER
    for place in (folder, jobs, jobs / LOG_FOLDER):
        found = _found(place)
        if found and not (stat.S_ISDIR(found.st_mode) and os.access(place, os.W_OK | os.X_OK)):
            raise CannotWrite(
                f"{place} is no folder you can write to; for a group's data set: chmod -R g+rwX {folder}"
            )
    if request.setup and not (os.path.isabs(request.setup) and os.path.isfile(request.setup)):  # noqa: PTH113, PTH117 - Path's may raise OSError
        raise UsageError(
            f"--setup {request.setup} is no file; give the path of the file that tasks shall source"
        )
    if not os.path.isdir(plan.input_dir) and "--input_dir" not in request.worker_args:  # noqa: PTH112 - as above
        say(
            f"warning: {plan.input_dir} cannot be seen from here; if the nodes cannot see it either, "
            "tasks end with 66. Has the input moved? --worker_args '--input_dir NEW'"
        )
    return plan


def _found(place: Path) -> os.stat_result | None:
    """None where it is not there. Raises CannotWrite where that cannot be known."""
    try:
        return place.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotWrite(
            f"{place} cannot be looked at ({error.strerror}); it must be a folder you can write to"
        ) from None


def find_limits(request: JobRequest) -> ClusterLimits:
    """Ask the controller, and the accounts where there are any. Raises what ``slurm_answer`` raises."""
    config = read_config()
    submit_limits: list[tuple[int, str]] = []
    if _enforces(config, "limits|qos|safe|all"):
        with contextlib.suppress(ShardprepError):  # the accounts may be down; sbatch itself still decides
            submit_limits = _rules_of(
                request, config.get("ClusterName", "").lower(), request.partition, ""
            ).submit_limits()
    has_accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    return limits_of(config, submit_limits, has_accounting=has_accounting, num_queued=_num_queued())


def _enforces(config: dict[str, str], what: str) -> bool:
    """Whether there are accounts, and jobs are held to what they say."""
    has_accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    return has_accounting and bool(re.search(what, config.get("AccountingStorageEnforce", "")))


def _num_queued() -> int:
    """Jobs of all users that wait or run, which count against MaxJobCount; 0 where that is not known."""
    with contextlib.suppress(ShardprepError):
        found = re.findall(r"^Jobs (?:pending|running):\s+([0-9]{1,9})$", slurm_output("sdiag"), re.MULTILINE)
        return sum(map(int, found))
    return 0


def limits_of(
    config: dict[str, str],
    submit_limits: Sequence[tuple[int, str]],
    *,
    has_accounting: bool,
    num_queued: int = 0,
) -> ClusterLimits:
    """The smallest of MaxArraySize, max_array_tasks, MaxJobCount and the accounts' submit limits.

    MaxArraySize bounds the *index*. One job is kept back for ``verify``. Raises SlurmRefused where no
    array fits at all.
    """
    found = [(int(config["MaxArraySize"]), "MaxArraySize")]
    if match := re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        found.append((int(match[1]), "max_array_tasks"))
    if config.get("MaxJobCount", "").isdigit():
        in_use = f" ({config['MaxJobCount']}, {num_queued} in use)" if num_queued else ""
        found.append((int(config["MaxJobCount"]) - num_queued - 1, f"MaxJobCount{in_use}"))
    found += [(limit - 1, why) for limit, why in submit_limits]
    max_tasks, why = min(found)
    if max_tasks < 1:
        raise SlurmRefused(
            f"{why} leaves no room for a job array; wait for your other jobs (squeue --me), use another "
            "--qos or --account, or run in a job of your own: shardprep run O"
        )
    return ClusterLimits(
        cluster=config.get("ClusterName", ""), max_tasks=max_tasks, why=why, has_accounting=has_accounting
    )


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The rows of Slurm's accounts that limit a job, by column."""

    qos: list[dict[str, str]]  # the partition's and the job's, in the order in which Slurm asks them
    account: list[dict[str, str]]  # the user's own row, that of the account, and those above it

    def submit_limits(self) -> list[tuple[int, str]]:
        """How many jobs this user may still submit, by each limit.

        A user's row counts the jobs of this user under this account, the rows of the account and of those
        above it count everybody's, a QOS counts the user's or the account's jobs in it.
        """
        if not self.account:
            return []
        user, own = [f"--user={getpass.getuser()}"], [f"--account={self.account[0]['account']}"]
        limits = [(self.account[0], "maxsubmitjobs", "MaxSubmitJobs", [*user, *own])]
        for row in self.account:
            whose = [*user, *own] if row["user"] else [f"--account={row['account']}"]
            limits.append((row, "grpsubmitjobs", "GrpSubmitJobs", whose))
        for row in self.qos:
            for column, whose in (("maxsubmitjobspu", user), ("maxsubmitjobspa", own), ("grpsubmitjobs", [])):
                limits.append((row, column, "submit limit", [f"--qos={row['name']}", *whose]))
        found = []
        for row, column, what, options in limits:
            if row[column].isdecimal():
                queue = slurm_output("squeue", "--noheader", "--array", *options, "--format=%i")
                in_use = queue.count("\n")
                why = f"{what} of {_whose(row)} ({row[column]}, {in_use} in use)"
                found.append((int(row[column]) - in_use, why))
        return found

    def most_of_a_task(self) -> dict[str, tuple[float, str]]:
        """The most CPUs, MB (mem) and minutes (time) of a job, each with the name of the limit.

        Of several rows that set the same limit Slurm takes the first one, except that each of the accounts
        above has its own limits for all its jobs together.
        """
        most: dict[str, tuple[float, str]] = {}
        for column, name in _TASK_LIMITS.items():
            is_set = set[str]()
            for row in [*self.qos, *(self.account if column == "grptres" else self.account[:1])]:
                text = row.get(column, "")
                found = {"time": minutes_of(text)} if column == "maxwall" else _of_tres(text)
                for what, number in found.items():
                    if number is not None and what not in is_set and number < most.get(what, (math.inf,))[0]:
                        most[what] = (number, f"{name} of {_whose(row)}")
                if row in self.qos or column != "grptres":
                    is_set |= {what for what, number in found.items() if number is not None}
        return most


# Column of sacctmgr -> its name in Slurm's manual.
_TASK_LIMITS = {
    "maxtres": "MaxTRES",
    "maxtrespernode": "MaxTRESPerNode",
    "grptres": "GrpTRES",
    "maxwall": "MaxWall",
}
_TASK_LIMITS |= {"maxtrespu": "MaxTRESPU", "maxtrespa": "MaxTRESPA"}
_QOS_COLUMNS = ("name", "flags", "maxsubmitjobspu", "maxsubmitjobspa", "grpsubmitjobs", *_TASK_LIMITS)
_ACCOUNT_COLUMNS = ("cluster", "account", "user", "partition", "parentname", "defaultqos", "qos")
_ACCOUNT_LIMITS = ("maxsubmitjobs", "grpsubmitjobs", "maxtres", "maxtrespernode", "grptres", "maxwall")


def _whose(row: dict[str, str]) -> str:
    return f"QOS {row['name']}" if "name" in row else f"account {row['account']}"


def _of_tres(text: str) -> dict[str, float | None]:
    """``cpu=2,mem=1G`` -> its CPUs and MB."""
    return {what: megabytes_of(number) for what, number in re.findall(r"\b(cpu|mem)=([^,]+)", text)}


def _rules_of(request: JobRequest, cluster: str, partition: str | None, partition_qos: str) -> _Rules:
    """Ask for the rows that limit a job of this user; without --account it runs under the default account."""
    user = getpass.getuser()
    account = request.account
    if account is None:
        rows = _accounts("user", ("user", "defaultaccount"), f"name={user}")
        account = rows[0]["defaultaccount"] if rows else ""
    own = (
        _accounts("assoc", (*_ACCOUNT_COLUMNS, *_ACCOUNT_LIMITS), f"user={user}", f"account={account}")
        if account
        else []
    )
    own = [
        row for row in own if row["cluster"].lower() in ("", cluster) and row["partition"] in ("", partition)
    ]
    if not own:
        return _Rules(qos=[], account=[])
    chain = [max(own, key=lambda row: row["partition"])]  # a row of the partition wins
    above = account
    while above:  # up to root, whose own parent is nothing
        rows = _accounts("assoc", (*_ACCOUNT_COLUMNS, *_ACCOUNT_LIMITS), f"account={above}")
        rows = [row for row in rows if not row["user"] and row["cluster"].lower() in ("", cluster)]
        chain += rows[:1]
        above = rows[0]["parentname"] if rows else ""
    choices = chain[0]["qos"].split(",")
    default = chain[0]["defaultqos"] or ("normal" if "normal" in choices else choices[0])
    known = {row["name"]: row for row in _accounts("qos", _QOS_COLUMNS)}
    qos = [known[name] for name in (partition_qos, request.qos or default) if name in known]
    if "OverPartQOS" in qos[-1]["flags"] if qos else False:
        qos.reverse()
    return _Rules(qos=qos, account=chain)


def _accounts(what: str, columns: Sequence[str], *where: str) -> list[dict[str, str]]:
    """Rows of ``sacctmgr show``, one text per column."""

    def parse(text: str) -> list[dict[str, str]]:
        return [dict(zip(columns, line.split("|"), strict=True)) for line in text.splitlines()]

    command = ("sacctmgr", "--noheader", "--parsable2", "show", what, *(("where", *where) if where else ()))
    return slurm_answer(parse, *command, f"format={','.join(columns)}")


def tasks_of_shards(shard_ids: Sequence[int], max_tasks: int, shards_per_task: int | None) -> list[str]:
    """Shards as the words of an array's table: task i makes ``result[i]``, such as ``17`` or ``0-5``.

    ``shards_per_task`` (default 1) is raised until the tasks fit; each takes neighbours, evenly.
    """
    wanted = -(-len(shard_ids) // (shards_per_task or 1))
    num_tasks = max(1, min(wanted, max_tasks))
    bounds = [len(shard_ids) * number // num_tasks for number in range(num_tasks + 1)]
    return [id_ranges(shard_ids[start:end]) for start, end in itertools.pairwise(bounds)]


def check_request(request: JobRequest, script: str, say: Callable[[str], None]) -> None:
    """Have Slurm test the script, and refuse what it would leave pending for ever. Raises SlurmRefused.

    Nodes that are drained or down come back: of these it is only said that jobs wait for them.
    """
    limits = find_partition_limits(request)
    if limits is not None:
        check_partition(request, limits)
    try:
        slurm_output("sbatch", "--test-only", text=script)
    except SlurmRefused as error:
        if _fits_nodes_away(request, limits):
            say(
                f"warning: {error}; the jobs wait until such nodes are back (sinfo -R says why they are away)"
            )
            return
        asked = shlex.join(request.sbatch_options())
        has = "" if limits is None else f"; a node of {limits.name} has up to {_has(limits)}"
        raise SlurmRefused(f"{error}. Asked for: {asked}{has}. Nothing was written or submitted") from None


def _fits_nodes_away(request: JobRequest, limits: PartitionLimits | None) -> bool:
    """Whether all nodes that are large enough are drained or down, and there are such nodes."""
    if limits is None:
        return False

    def parse(text: str) -> list[str]:
        states = []
        for line in text.splitlines():
            partition, state, mem, cpus = line.split("|")
            is_large = int(mem.rstrip("+")) >= request.least_mem_gb * 1024
            if partition == limits.name and is_large and int(cpus.rstrip("+")) >= (request.num_cpus or 1):
                states.append(state)
        return states

    states = slurm_answer(parse, "sinfo", "--noheader", "--exact", "--Node", "--format=%R|%T|%m|%c")
    return bool(states) and all(_NODES_AWAY.search(state) for state in states)


def check_partition(request: JobRequest, limits: PartitionLimits) -> None:
    """Raises SlurmRefused where no task of this request could ever run in the partition."""
    memory = "--mem_gb" if request.mem_per_cpu_gb is None else "--mem_per_cpu_gb of all CPUs"
    memory_gb = request.least_mem_gb
    if not memory_gb and "max_mem_mb" in limits.why:
        memory = "the memory of the site's default (no --mem_gb is given)"
        memory_gb = (request.num_cpus or 1) * limits.default_mem_per_cpu_mb / 1024
    asked: Sequence[tuple[str, str, float | None, float | None, str]] = (
        ("--cpus_per_task", "max_cpus", request.num_cpus, limits.max_cpus, "CPU"),
        (memory, "max_mem_mb", memory_gb, limits.max_mem_mb / 1024, "GB"),
        ("--time_min", "max_time_min", request.time_min, limits.max_time_min, "minute"),
    )
    for flag, name, wanted, most, unit in asked:
        if wanted and most and wanted > most:
            unit = unit if unit == "GB" or most == 1 else f"{unit}s"
            flags = "--qos, --account or --partition" if name in limits.why else "--partition (sinfo)"
            raise SlurmRefused(
                f"{flag} is {wanted:g}, {limits.whose(name)} allows at most {most:g} {unit}: the job "
                f"would stay pending for ever; ask for less, or for another {flags}"
            )


def _has(limits: PartitionLimits) -> str:
    return f"{limits.max_cpus} CPUs and {limits.max_mem_mb} MB"


def find_partition_limits(request: JobRequest) -> PartitionLimits | None:
    """Ask for the limits of a request's partition, and of its accounts and QOS where these are enforced."""
    partitions = slurm_output("scontrol", "--oneliner", "show", "partition")

    def parse(nodes: str) -> PartitionLimits | None:
        return partition_limits(request.partition, partitions, nodes)

    limits = slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%R|%m|%c")
    config = read_config()
    if limits is None or not _enforces(config, "limits|safe|all"):
        return limits
    with contextlib.suppress(ShardprepError):  # the accounts may be down; sbatch itself still decides
        partition = _partition(limits.name, partitions)
        most = _rules_of(
            request, config.get("ClusterName", "").lower(), limits.name, partition.get("QoS", "")
        ).most_of_a_task()
        values: dict[str, Any] = {}
        fields = {"cpu": "max_cpus", "mem": "max_mem_mb", "time": "max_time_min"}
        for what, (number, why) in most.items():
            if number < (getattr(limits, fields[what]) or math.inf):
                values[fields[what]] = int(number)
                limits.why[fields[what]] = why
        default = megabytes_of(partition.get("DefMemPerCPU", "")) or megabytes_of(
            config.get("DefMemPerCPU", "")
        )
        return dataclasses.replace(limits, default_mem_per_cpu_mb=default or 0, **values)
    return limits


def _partition(name: str | None, partitions: str) -> dict[str, str]:
    """A partition (None: the default one) in ``scontrol -o show partition``; {} where it is not there."""
    for line in partitions.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if values.get("PartitionName") == name or (name is None and values.get("Default") == "YES"):
            return values
    return {}


def partition_limits(name: str | None, partitions: str, nodes: str) -> PartitionLimits | None:
    """Limits of a partition (None: the default one) from ``scontrol -o show partition`` and ``sinfo``."""
    values = _partition(name, partitions)
    if not values:
        return None
    rows = [row.split("|")[1:] for row in nodes.splitlines() if row.startswith(values["PartitionName"] + "|")]
    numbers = [[int(re.sub(r"\D.*", "", item) or 0) for item in row] for row in rows]
    max_mem_mb = max((mem for mem, _ in numbers), default=0)
    if values.get("MaxMemPerNode", "").isdecimal():
        max_mem_mb = min(max_mem_mb, int(values["MaxMemPerNode"]))
    return PartitionLimits(
        name=values["PartitionName"],
        max_time_min=minutes_of(values.get("MaxTime", "")),
        max_mem_mb=max_mem_mb,
        max_cpus=max((cpus for _, cpus in numbers), default=0),
    )
