"""What a site allows: what can be known to go wrong is refused before anything is written or submitted.

``check_folder`` looks at the data set, ``find_limits`` asks what the controller, the partition, the accounts
and the QOS allow, ``tasks_of_shards`` fits the shards into one array, and ``check_request`` asks whether any
node could ever run such a task.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from preprocess.plan.plan_file import Plan, need_plan
from preprocess.plan.tokenizer_files import check_tokenizer_files
from shardprep.console import quoted, say
from shardprep.errors import CannotWrite, ShardprepError, UsageError
from shardprep.files import is_link
from shardprep.format.names import id_ranges
from slurm.commands import (
    SlurmRefused,
    megabytes_of,
    minutes_of,
    read_config,
    slurm_answer,
    slurm_output,
    user_name,
)
from slurm.request import JobRequest
from slurm.script import LOG_FOLDER
from slurm.submissions import JOBS_FOLDER

_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)


def check_folder(folder: Path, request: JobRequest) -> Plan:
    """The plan, once folder, tokenizer, set-up file and input are as the tasks need them.

    Raises NotFound, CannotWrite, OtherTokenizer, UsageError, each with what to do. Writes nothing.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    jobs = folder / JOBS_FOLDER
    for place in (folder, jobs, jobs / LOG_FOLDER):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
            if place != folder and is_link(place):  # records, and Slurm's logs, would go where it leads
                raise CannotWrite(f"{place} is a link; put a folder in its place")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CannotWrite(
                f"{place} cannot be looked at ({error.strerror}); it must be a folder you can write to"
            ) from None
        if not (is_folder and os.access(place, os.W_OK | os.X_OK)):
            raise CannotWrite(
                f"{place} is no folder that you can write to; for a group's data set its owner can type: "
                f"chmod -R g+rwX {quoted(folder)}"
            )
    if request.setup and not (os.path.isabs(request.setup) and os.path.isfile(request.setup)):  # noqa: PTH113, PTH117 - Path's may raise OSError
        raise UsageError(
            f"--setup {request.setup} is no file; give the path of the file that tasks shall source",
            path=request.setup,
            expected="file that tasks shall source",
        )
    if not os.path.isdir(plan.input_dir) and "--input_dir" not in request.worker_args:  # noqa: PTH112 - as above
        say(
            f"warning: {plan.input_dir} cannot be seen from here; if the nodes cannot see it either, "
            "tasks end with 66. Has the input moved? --worker_args '--input_dir NEW'"
        )
    return plan


@dataclass(kw_only=True)
class SiteLimits:
    """The most that a submission and each of its tasks can get; None where not known or limited."""

    cluster: str
    max_tasks: int  # of one array; below 1 there is room for none
    partition: str = ""  # the named or the default one; "" where there is none of that name
    max_time_min: int | None = None
    max_mem_mb: int | None = None  # of the largest node
    max_cpus: int | None = None
    default_mem_per_cpu_mb: float = 0  # what a task gets that asks for no memory; 0 where not known
    why: dict[str, str] = field(default_factory=dict)  # field -> its limit's name, if not the partition's

    def whose(self, name: str) -> str:
        """Whose limit a field is."""
        return self.why.get(name, f"partition {self.partition}")

    def lower(self, name: str, number: float, why: str) -> None:
        """Take a limit of this name, if it is the smallest so far."""
        most = getattr(self, name)
        if most is None or number < most:
            setattr(self, name, int(number))
            self.why[name] = why


def find_limits(request: JobRequest) -> SiteLimits:
    """Ask the controller, and the accounts where there are any. Raises what ``slurm_answer`` raises."""
    config = read_config()
    partition: dict[str, str] = {}  # the named or the default one
    for line in slurm_output("scontrol", "--oneliner", "show", "partition").splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        is_default = request.partition is None and values.get("Default") == "YES"
        if not partition and (is_default or values.get("PartitionName") == request.partition):
            partition = values
    limits = _limits_of_config(config)
    if partition:
        nodes = ("sinfo", "--noheader", "--exact", "--format=%R|%m|%c")
        slurm_answer(lambda text: _add_partition(limits, partition, text), *nodes)
    default = megabytes_of(partition.get("DefMemPerCPU", "")) or megabytes_of(config.get("DefMemPerCPU", ""))
    limits.default_mem_per_cpu_mb = default or 0
    enforced = config.get("AccountingStorageEnforce", "")
    if "slurmdbd" in config.get("AccountingStorageType", "") and re.search("limits|qos|safe|all", enforced):
        with contextlib.suppress(ShardprepError):  # the accounts may be down; sbatch itself still decides
            rules = _find_rules(request, limits, partition.get("QoS", ""))
            for number, why in rules.submit_limits():
                limits.lower("max_tasks", number - 1, why)
            if re.search("limits|safe|all", enforced):
                for name, most, why in rules.task_limits():
                    limits.lower(name, most, why)
    return limits


def _limits_of_config(config: dict[str, str]) -> SiteLimits:
    """The smallest of MaxArraySize, which bounds the *index*, max_array_tasks and MaxJobCount.

    One job is kept back for ``verify``.
    """
    limits = SiteLimits(
        cluster=config.get("ClusterName", ""),
        max_tasks=int(config["MaxArraySize"]),
        why={"max_tasks": "MaxArraySize"},
    )
    if match := re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        limits.lower("max_tasks", int(match[1]), "max_array_tasks")
    num_queued = 0  # jobs of all users, as far as that is known
    with contextlib.suppress(ShardprepError):
        found = re.findall(r"^Jobs (?:pending|running):\s+([0-9]{1,9})$", slurm_output("sdiag"), re.MULTILINE)
        num_queued = sum(map(int, found))
    if config.get("MaxJobCount", "").isdigit():
        in_use = f" ({config['MaxJobCount']}, {num_queued} in use)" if num_queued else ""
        limits.lower("max_tasks", int(config["MaxJobCount"]) - num_queued - 1, f"MaxJobCount{in_use}")
    return limits


def _add_partition(limits: SiteLimits, partition: dict[str, str], nodes: str) -> None:
    """Add the limits of a partition, and of its nodes by ``sinfo``."""
    limits.partition = partition["PartitionName"]
    rows = [row.split("|")[1:] for row in nodes.splitlines() if row.startswith(f"{limits.partition}|")]
    numbers = [[int(re.sub(r"\D.*", "", item) or 0) for item in row] for row in rows]
    limits.max_time_min = minutes_of(partition.get("MaxTime", ""))
    limits.max_mem_mb = max((mem for mem, _ in numbers), default=0) or None
    limits.max_cpus = max((cpus for _, cpus in numbers), default=0) or None
    if limits.max_mem_mb and partition.get("MaxMemPerNode", "").isdecimal():
        limits.max_mem_mb = min(limits.max_mem_mb, int(partition["MaxMemPerNode"]))


# Column of sacctmgr -> its name in Slurm's manual.
_TASK_LIMITS = {"maxtres": "MaxTRES", "maxtrespernode": "MaxTRESPerNode", "grptres": "GrpTRES"}
_TASK_LIMITS |= {"maxwall": "MaxWall", "maxtrespu": "MaxTRESPU", "maxtrespa": "MaxTRESPA"}
_QOS_COLUMNS = ("name", "flags", "maxsubmitjobspu", "maxsubmitjobspa", "grpsubmitjobs", *_TASK_LIMITS)
_ACCOUNT_COLUMNS = ("cluster", "account", "user", "partition", "parentname", "defaultqos", "qos")
_ACCOUNT_LIMITS = ("maxsubmitjobs", "grpsubmitjobs", "maxtres", "maxtrespernode", "grptres", "maxwall")
_Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The rows of Slurm's accounts that limit a job, by column."""

    qos: list[_Row]  # the partition's and the job's, in the order in which Slurm asks them
    account: list[_Row]  # the user's own row, that of the account, and those above it

    def submit_limits(self) -> Iterator[tuple[int, str]]:
        """How many jobs this user may still submit, by each limit.

        A user's row counts the jobs of this user under this account, the rows of the account and of those
        above it count everybody's, a QOS counts the user's or the account's jobs in it.
        """
        if not self.account:
            return
        user, own = [f"--user={user_name()}"], [f"--account={self.account[0]['account']}"]
        limits = [(self.account[0], "maxsubmitjobs", "MaxSubmitJobs", [*user, *own])]
        for row in self.account:
            whose = [*user, *own] if row["user"] else [f"--account={row['account']}"]
            limits.append((row, "grpsubmitjobs", "GrpSubmitJobs", whose))
        for row in self.qos:
            for column, whose in (("maxsubmitjobspu", user), ("maxsubmitjobspa", own), ("grpsubmitjobs", [])):
                limits.append((row, column, "submit limit", [f"--qos={row['name']}", *whose]))
        for row, column, what, options in limits:
            if row[column].isdecimal():
                in_use = slurm_output("squeue", "--noheader", "--array", *options, "--format=%i").count("\n")
                yield int(row[column]) - in_use, f"{what} of {_whose(row)} ({row[column]}, {in_use} in use)"

    def task_limits(self) -> Iterator[tuple[str, float, str]]:
        """The most CPUs, MB and minutes of a job, by field of SiteLimits, with the name of each limit.

        Of several rows that set the same limit Slurm takes the first one, except that each of the accounts
        above has its own limits for all its jobs together.
        """
        for column, manual_name in _TASK_LIMITS.items():
            decided = set[str]()
            for row in [*self.qos, *(self.account if column == "grptres" else self.account[:1])]:
                found = _task_limits(column, row.get(column, ""))
                for name in found.keys() - decided:
                    yield name, found[name], f"{manual_name} of {_whose(row)}"
                if row in self.qos or column != "grptres":
                    decided |= found.keys()


def _whose(row: _Row) -> str:
    return f"QOS {row['name']}" if "name" in row else f"account {row['account']}"


def _task_limits(column: str, text: str) -> dict[str, float]:
    """``cpu=2,mem=1G``, or the time of ``maxwall`` -> field of SiteLimits -> number."""
    found: dict[str, float | None] = {"max_time_min": minutes_of(text)} if column == "maxwall" else {}
    names = {"cpu": "max_cpus", "mem": "max_mem_mb"}
    for what, number in re.findall(r"\b(cpu|mem)=([^,]+)", text):
        found[names[what]] = megabytes_of(number)
    return {name: number for name, number in found.items() if number is not None}


def _find_rules(request: JobRequest, limits: SiteLimits, partition_qos: str) -> _Rules:
    """Ask for the rows that limit a job of this user; without --account it runs under the default account."""
    user, account = user_name(), request.account
    if account is None:
        rows = _accounts("user", ("user", "defaultaccount"), f"name={user}")
        account = rows[0]["defaultaccount"] if rows else ""
    places = ("", limits.cluster.lower())

    def account_rows(*where: str) -> list[_Row]:
        rows = _accounts("assoc", (*_ACCOUNT_COLUMNS, *_ACCOUNT_LIMITS), *where)
        return [row for row in rows if row["cluster"].lower() in places]

    own = account_rows(f"user={user}", f"account={account}") if account else []
    own = [row for row in own if row["partition"] in ("", limits.partition)]
    if not own:
        return _Rules(qos=[], account=[])
    chain = [max(own, key=lambda row: row["partition"])]  # a row of the partition wins
    above = account
    while above:  # up to root, whose own parent is nothing
        rows = [row for row in account_rows(f"account={above}") if not row["user"]]
        chain += rows[:1]
        above = rows[0]["parentname"] if rows else ""
    choices = chain[0]["qos"].split(",")
    default = chain[0]["defaultqos"] or ("normal" if "normal" in choices else choices[0])
    known = {row["name"]: row for row in _accounts("qos", _QOS_COLUMNS)}
    qos = [known[name] for name in (partition_qos, request.qos or default) if name in known]
    if qos and "OverPartQOS" in qos[-1]["flags"]:
        qos.reverse()
    return _Rules(qos=qos, account=chain)


def _accounts(what: str, columns: Sequence[str], *where: str) -> list[_Row]:
    def parse(text: str) -> list[_Row]:
        return [dict(zip(columns, line.split("|"), strict=True)) for line in text.splitlines()]

    command = ("sacctmgr", "--noheader", "--parsable2", "show", what, *(("where", *where) if where else ()))
    return slurm_answer(parse, *command, f"format={','.join(columns)}")


def tasks_of_shards(shard_ids: Sequence[int], max_tasks: int, shards_per_task: int | None) -> list[str]:
    """Shards as the words of an array's table: task i makes ``result[i]``, such as ``17`` or ``0-5``.

    ``shards_per_task`` (default: 1) is raised until the tasks fit; each takes neighbours, evenly.
    """
    wanted = -(-len(shard_ids) // (shards_per_task or 1))
    num_tasks = max(1, min(wanted, max_tasks))
    bounds = [len(shard_ids) * number // num_tasks for number in range(num_tasks + 1)]
    return [id_ranges(shard_ids[start:end]) for start, end in itertools.pairwise(bounds)]


def check_request(request: JobRequest, script: str, limits: SiteLimits) -> None:
    """Have Slurm test the script, and refuse what it would leave pending for ever. Raises SlurmRefused.

    Nodes that are drained or down come back: of these it is only said that jobs wait for them.
    """
    _check_amounts(request, limits)
    try:
        slurm_output("sbatch", "--test-only", text=script)
    except SlurmRefused as error:
        if _fits_nodes_away(request, limits.partition):
            say(
                f"warning: {error}; the jobs wait until such nodes are back (sinfo -R says why they are away)"
            )
            return
        has = f"; a node of {limits.partition} has up to {limits.max_cpus} CPUs and {limits.max_mem_mb} MB"
        raise SlurmRefused(
            f"{error}. Asked for: {shlex.join(request.sbatch_options())}{has if limits.partition else ''}. "
            "Nothing was written or submitted"
        ) from None


def _fits_nodes_away(request: JobRequest, name: str) -> bool:
    """Whether a partition has nodes that are large enough, and all of them are drained or down."""

    def parse(text: str) -> list[str]:
        rows = [line.split("|") for line in text.splitlines()]
        return [
            state
            for partition, state, mem, cpus in rows
            if partition == name
            and int(mem.rstrip("+")) >= request.least_mem_gb * 1024
            and int(cpus.rstrip("+")) >= (request.num_cpus or 1)
        ]

    states = slurm_answer(parse, "sinfo", "--noheader", "--exact", "--Node", "--format=%R|%T|%m|%c")
    return bool(states) and all(_NODES_AWAY.search(state) for state in states)


def _check_amounts(request: JobRequest, limits: SiteLimits) -> None:
    """Raises SlurmRefused where no task of this request could ever run in the partition."""
    memory = "--mem_gb" if request.mem_per_cpu_gb is None else "--mem_per_cpu_gb of all CPUs"
    memory_gb = request.least_mem_gb
    if not memory_gb and "max_mem_mb" in limits.why:
        memory = "the memory of the site's default (no --mem_gb is given)"
        memory_gb = (request.num_cpus or 1) * limits.default_mem_per_cpu_mb / 1024
    for flag, name, wanted, most, unit in (
        ("--cpus_per_task", "max_cpus", request.num_cpus, limits.max_cpus, "CPU"),
        (memory, "max_mem_mb", memory_gb, (limits.max_mem_mb or 0) / 1024, "GB"),
        ("--time_min", "max_time_min", request.time_min, limits.max_time_min, "minute"),
    ):
        if wanted and most and wanted > most:
            unit += "" if unit == "GB" or most == 1 else "s"
            flags = "--qos, --account or --partition" if name in limits.why else "--partition (sinfo)"
            raise SlurmRefused(
                f"{flag} is {wanted:g}, {limits.whose(name)} allows at most {most:g} {unit}: the job "
                f"would stay pending for ever; ask for less, or for another {flags}"
            )
