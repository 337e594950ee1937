"""What a site allows: what can be known to go wrong is refused before anything is written or submitted.

``check_folder`` looks at the data set, ``find_limits`` and ``tasks_of_shards`` fit the shards into one array,
``check_request`` asks whether any node could ever run such a task.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preprocess.plan.plan_file import Plan, need_plan
from preprocess.plan.tokenizer_files import check_tokenizer_files
from shardprep.errors import CannotWrite, ShardprepError, UsageError
from shardprep.format.names import id_ranges
from slurm.job_records import JOBS_FOLDER
from slurm.job_script import LOG_FOLDER, JobRequest
from slurm.slurm_commands import SlurmRefused, read_config, slurm_answer, slurm_output

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
    """What one partition's nodes have."""

    name: str
    max_time_min: int | None
    max_mem_mb: int  # of its largest node
    max_cpus: int


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
    if request.setup and not os.path.isfile(request.setup):  # noqa: PTH113 - is_file() may raise OSError
        raise UsageError(f"--setup {request.setup} is no file (seen from {Path.cwd()})")
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
    has_accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    submit_limits: list[tuple[int, str]] = []
    if has_accounting and re.search("limits|qos|safe|all", config.get("AccountingStorageEnforce", "")):
        with contextlib.suppress(ShardprepError):  # the accounts may be down; sbatch itself still decides
            submit_limits = _submit_limits(request)
    return limits_of(config, submit_limits, has_accounting=has_accounting, num_queued=_num_queued())


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
            "--qos or --account, or run in a job of your own: python -m preprocess run O"
        )
    return ClusterLimits(
        cluster=config.get("ClusterName", ""), max_tasks=max_tasks, why=why, has_accounting=has_accounting
    )


def _submit_limits(request: JobRequest) -> list[tuple[int, str]]:
    """How many jobs this user may still submit, by every limit that the accounts name.

    A user's row in the accounts counts the jobs of this user under this account, the rows of the account and
    of those above it count everybody's, a QOS counts the user's or the account's jobs in it.
    """
    user = getpass.getuser()
    columns = "account,defaultqos,qos,maxsubmitjobs,grpsubmitjobs"
    rows = _accounts("assoc", columns, "where", f"user={user}")
    rows = [row for row in rows if request.account in (None, row[0])] or rows
    if not rows:
        return []
    account, default_qos, qos, most, most_of_group = rows[0]
    num_own = _num_jobs(f"--user={user}", f"--account={account}")
    limits = [
        (most, num_own, f"MaxSubmitJobs of account {account}"),
        (most_of_group, num_own, f"GrpSubmitJobs of account {account}"),
    ]
    above = account
    while above:  # up to root, whose own parent is nothing
        parent, most_of_group = _account_row(above)
        if most_of_group.isdecimal():
            limits.append(
                (most_of_group, _num_jobs(f"--account={above}"), f"GrpSubmitJobs of account {above}")
            )
        above = parent
    name = request.qos or default_qos or qos.partition(",")[0]
    for row in _accounts(
        "qos", "name,maxsubmitjobspu,maxsubmitjobspa,grpsubmitjobs", "where", f"name={name}"
    ):
        whose: tuple[list[str], ...] = ([f"--user={user}"], [f"--account={account}"], [])
        for number, options in zip(row[1:], whose, strict=True):
            if number.isdecimal():
                limits.append((number, _num_jobs(f"--qos={name}", *options), f"submit limit of QOS {name}"))
    return [
        (int(number) - in_use, f"{why} ({number}, {in_use} in use)")
        for number, in_use, why in limits
        if number.isdecimal()
    ]


def _num_jobs(*options: str) -> int:
    return slurm_output("squeue", "--noheader", "--array", *options, "--format=%i").count("\n")


def _account_row(account: str) -> tuple[str, str]:
    """The account above an account ("" above root), and the account's own GrpSubmitJobs."""
    for row in _accounts("assoc", "user,parentname,grpsubmitjobs", "where", f"account={account}"):
        if not row[0]:
            return row[1], row[2]
    return "", ""


def _accounts(what: str, fields: str, *where: str) -> list[list[str]]:
    """Rows of ``sacctmgr show``, one text per field."""

    def parse(text: str) -> list[list[str]]:
        rows = [line.split("|") for line in text.splitlines()]
        if any(len(row) != fields.count(",") + 1 for row in rows):
            raise ValueError(f"a line without {fields}")
        return rows

    command = ("sacctmgr", "--noheader", "--parsable2", "show", what, *where)
    return slurm_answer(parse, *command, f"format={fields}")


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
    """Raises SlurmRefused where no node of the partition could ever run a task."""
    mem_flag = "--mem_gb" if request.mem_per_cpu_gb is None else "--mem_per_cpu_gb of all CPUs"
    asked: Sequence[tuple[str, float | None, float | None, str]] = (
        ("--cpus_per_task", request.num_cpus, limits.max_cpus or None, "CPUs"),
        (
            mem_flag,
            request.least_mem_gb or None,
            limits.max_mem_mb / 1024 if limits.max_mem_mb else None,
            "GB",
        ),
        ("--time_min", request.time_min, limits.max_time_min, "minutes"),
    )
    for flag, wanted, most, unit in asked:
        if wanted is not None and most is not None and wanted > most:
            raise SlurmRefused(
                f"{flag} is {wanted:g}, partition {limits.name} allows at most {most:g} {unit}: the job "
                "would stay pending for ever; ask for less, or for another --partition (sinfo)"
            )


def _has(limits: PartitionLimits) -> str:
    return f"{limits.max_cpus} CPUs and {limits.max_mem_mb} MB"


def find_partition_limits(request: JobRequest) -> PartitionLimits | None:
    """Ask for the limits of the partition that a request names."""
    partitions = slurm_output("scontrol", "--oneliner", "show", "partition")

    def parse(nodes: str) -> PartitionLimits | None:
        return partition_limits(request.partition, partitions, nodes)

    return slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%R|%m|%c")


def partition_limits(name: str | None, partitions: str, nodes: str) -> PartitionLimits | None:
    """Limits of a partition (None: the default one) from ``scontrol -o show partition`` and ``sinfo``."""
    for line in partitions.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if values.get("PartitionName") == name or (name is None and values.get("Default") == "YES"):
            rows = [
                row.split("|") for row in nodes.splitlines() if row.startswith(values["PartitionName"] + "|")
            ]
            numbers = [[int(re.sub(r"\D.*", "", item) or 0) for item in row[1:]] for row in rows]
            most_mem = [mem for mem, _ in numbers]
            if values.get("MaxMemPerNode", "").isdecimal():
                most_mem = [min(mem, int(values["MaxMemPerNode"])) for mem in most_mem]
            return PartitionLimits(
                name=values["PartitionName"],
                max_time_min=minutes_of(values.get("MaxTime", "")),
                max_mem_mb=max(most_mem, default=0),
                max_cpus=max((cpus for _, cpus in numbers), default=0),
            )
    return None


def minutes_of(text: str) -> int | None:
    """Slurm's ``1-02:03:04`` -> minutes; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", text)
    if not match:
        return None
    days, first, second, third = (int(item or 0) for item in match.groups())
    if match[4] is None and match[1] is None:
        return first  # minutes:seconds
    return (days * 24 + first) * 60 + second + (third > 0)
