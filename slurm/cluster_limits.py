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

from preprocess.plan import Plan, need_plan
from preprocess.tokenizer_files import check_tokenizer_files
from shardprep.errors import CannotWrite, ShardprepError, UsageError
from shardprep.format.names import id_ranges
from slurm.job_records import JOBS_FOLDER
from slurm.job_script import LOG_FOLDER, JobRequest
from slurm.slurm_queries import SlurmRefused, slurm_answer, slurm_output


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
    config = slurm_answer(_parse_config, "scontrol", "show", "config")
    has_accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    submit_limits: list[tuple[int, str]] = []
    if has_accounting and re.search("limits|qos|safe|all", config.get("AccountingStorageEnforce", "")):
        with contextlib.suppress(ShardprepError):  # the accounts may be down; sbatch itself still decides
            submit_limits = _submit_limits(request)
    return limits_of(config, submit_limits, has_accounting=has_accounting)


def _parse_config(text: str) -> dict[str, str]:
    """Raises ValueError where it is cut short before what is needed of it."""
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
    if not re.fullmatch(r"[0-9]{1,10}", config.get("MaxArraySize", "")):
        raise ValueError("no MaxArraySize")
    return config


def limits_of(
    config: dict[str, str], submit_limits: Sequence[tuple[int, str]], *, has_accounting: bool
) -> ClusterLimits:
    """The smallest of MaxArraySize, max_array_tasks, MaxJobCount and the accounts' submit limits.

    MaxArraySize bounds the *index*. One job is kept back for ``verify``. Raises SlurmRefused where no
    array fits at all.
    """
    found = [(int(config["MaxArraySize"]), "MaxArraySize")]
    if match := re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        found.append((int(match[1]), "max_array_tasks"))
    if config.get("MaxJobCount", "").isdigit():
        found.append((int(config["MaxJobCount"]) - 1, "MaxJobCount"))
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
    """How many jobs this user may still submit, by every limit that the accounts name."""
    user = getpass.getuser()
    now = slurm_output("squeue", "--noheader", "--array", f"--user={user}", "--format=%i").count("\n")
    rows = _accounts("assoc", "account,defaultqos,qos,maxsubmitjobs,grpsubmitjobs", "where", f"user={user}")
    rows = [row for row in rows if request.account in (None, row[0])] or rows
    limits = [(row[3], f"MaxSubmitJobs of account {row[0]}") for row in rows[:1]]
    limits += [(row[4], f"GrpSubmitJobs of account {row[0]}") for row in rows[:1]]
    names = [request.qos] if request.qos else [rows[0][1] or rows[0][2]] if rows else []
    for name, *numbers in _accounts("qos", "name,maxsubmitjobspu,maxsubmitjobspa,grpsubmitjobs"):
        if name in names:
            limits += [(number, f"submit limit of QOS {name}") for number in numbers]
    return [
        (int(number) - now, f"{why} ({number}, {now} in use)") for number, why in limits if number.isdecimal()
    ]


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


def check_request(request: JobRequest, script: str) -> None:
    """Have Slurm test the script, and refuse what it would leave pending for ever. Raises SlurmRefused."""
    limits = find_partition_limits(request)
    if limits is not None:
        check_partition(request, limits)
    try:
        slurm_output("sbatch", "--test-only", text=script)
    except SlurmRefused as error:
        asked = shlex.join(request.sbatch_options())
        has = "" if limits is None else f"; a node of {limits.name} has up to {_has(limits)}"
        raise SlurmRefused(f"{error}. Asked for: {asked}{has}. Nothing was written or submitted") from None


def check_partition(request: JobRequest, limits: PartitionLimits) -> None:
    """Raises SlurmRefused where no node of the partition could ever run a task."""
    asked: Sequence[tuple[str, float | None, float | None, str]] = (
        ("--cpus_per_task", request.cpus_per_task, limits.max_cpus or None, "CPUs"),
        ("--mem_gb", request.mem_gb, limits.max_mem_mb / 1024 if limits.max_mem_mb else None, "GB"),
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
            return PartitionLimits(
                name=values["PartitionName"],
                max_time_min=minutes_of(values.get("MaxTime", "")),
                max_mem_mb=max((mem for mem, _ in numbers), default=0),
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
