"""The files DATA/jobs/NNNN.json, one for each submission, and the history of what was done, history.jsonl.

A submission names its job ids and the shards of every task. It is written once and never changed. Its number
is the next one after those that its writer had read, taken by link: of two who submit at once one gets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import re
import shlex
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from shardprep.command_line import option
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    ReadWriteError,
    ShardprepError,
    UnknownVersion,
    UsageError,
)
from shardprep.files import (
    NOT_THERE,
    PublishedFile,
    append_bytes,
    is_folder,
    make_subfolder,
    names_in,
    read_regular,
    read_with_status,
    size_of_file,
    sync_folder,
)
from shardprep.format.json_files import Count, Text, as_type, checked_object, load_json, with_content_hash
from shardprep.format.names import MAX_SHARDS, ids_of_ranges

JOBS_FOLDER = "jobs"
HISTORY_NAME = "history.jsonl"  # in jobs/
_FORMAT = "shardprep-submission"
_MAX_BYTES = 64 << 20  # the record of 99,999 shards has 2 MB
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999: a date can be written
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

WHOLE_NODE = "node"  # as --cpus_per_task
MEMORY_FIELDS = ("mem_gb", "mem_per_cpu_gb")  # they exclude each other
_SET_BY_SUBMIT = {"--job-name", "--array", "--output", "--wrap", "--parsable", "--hold"}  # of sbatch
_MOST = 10**9  # of CPUs, GB, minutes, tasks
_NODES = "partition, account and nodes"
_RESOURCES = "resources of a task"
_RUNS = "set-up, container and more options"
FLAG_GROUPS = (_NODES, _RESOURCES, _RUNS)
# Fields that name commands, or that may hold options which do.
COMMANDS = ("setup", "container", "srun_args", "notify", "sbatch_args", "worker_args")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one task, and how many run at once. None leaves it to the site."""

    partition: str | None = option(None, "partition (default: the site's)", group=_NODES)
    cpus_per_task: int | str = option(
        1,
        "CPUs of a task (default: 1; more tasks are faster than more CPUs); node: all of a node that no "
        "other job is on",
        group=_RESOURCES,
    )
    mem_gb: float | None = option(None, "memory of a task (default: the site's)", group=_RESOURCES)
    mem_per_cpu_gb: float | None = option(
        None, "memory per CPU of a task, for sites that require it", group=_RESOURCES
    )
    time_min: int | None = option(None, "time limit of a task (default: the partition's)", group=_RESOURCES)
    max_parallel: int = option(50, "tasks that run at once (default: 50)", group=_RESOURCES)
    account: str | None = option(None, "account to charge (default: the site's)", group=_NODES)
    qos: str | None = option(None)  # this and the next two: by SBATCH_QOS and so on
    constraint: str | None = option(None)
    exclude: str | None = option(None)
    setup: str | None = option(
        None,
        "a file that tasks source first: modules, conda, a virtual environment; with more than some hundred "
        "tasks, examples/environment_on_node.sh",
        group=_RUNS,
    )
    container: str | None = option(None, "put before Python, such as 'apptainer exec image.sif'", group=_RUNS)
    srun_args: str | None = option(
        None, "more options of srun, such as --container-image=... (pyxis)", group=_RUNS
    )
    notify: str | None = option(
        None, "a command that the verify job runs at its end; SHARDPREP_RESULT says how it ended", group=_RUNS
    )
    sbatch_args: str = option("", "more options of sbatch, quoted as one word", group=_RUNS)
    worker_args: str = option("", "more flags of the worker, such as '--max_bad_fraction 0.05'", group=_RUNS)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 < value <= _MOST:
                raise UsageError.of_value(f"--{name}", value, f"more than 0 and at most {_MOST}")
            if isinstance(value, str) and (found := re.search(r"[\x00-\x1f\x7f]|[\ud800-\udfff]", value)):
                raise UsageError(
                    f"--{name} is {value!r:.200}, and {found[0]!r} cannot stand in a job script; leave it out"
                )
        if self.num_cpus is None and self.cpus_per_task != WHOLE_NODE:
            raise UsageError.of_value("--cpus_per_task", self.cpus_per_task, f"a number, or: {WHOLE_NODE}")
        if self.mem_gb is not None and self.mem_per_cpu_gb is not None:
            raise UsageError(found="--mem_gb and --mem_per_cpu_gb", expected="one of them")
        for name in ("sbatch_args", "worker_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise UsageError(f"--{name} {getattr(self, name)!r} cannot be split: {error}") from None
        for word in shlex.split(self.sbatch_args):
            has = f"--sbatch_args has {word}"
            if re.match("--clusters|-M", word):
                raise UsageError(f"{has}; for another cluster: SLURM_CLUSTERS=NAME before submit")
            if word.partition("=")[0] in _SET_BY_SUBMIT or re.match(r"-[JaoH]", word):
                found_words = f"--sbatch_args {word}"
                raise UsageError(f"{has}, which submit sets itself; leave it out", found=found_words)

    def sbatch_options(self) -> list[str]:
        """Return the options of sbatch. Later ones win: retry must be able to raise memory."""
        options = [*shlex.split(self.sbatch_args), "--nodes=1", "--ntasks=1"]
        options.append("--exclusive" if self.num_cpus is None else f"--cpus-per-task={self.num_cpus}")
        if self.mem_gb is not None:
            options.append(f"--mem={round(self.mem_gb * 1024)}M")
        elif self.mem_per_cpu_gb is not None:
            options.append(f"--mem-per-cpu={round(self.mem_per_cpu_gb * 1024)}M")
        elif self.num_cpus is None:
            options.append("--mem=0")  # all of the node's
        if self.time_min is not None:
            options.append(f"--time={self.time_min}")
        names = ("partition", "account", "qos", "constraint", "exclude")
        return [*options, *(f"--{name}={getattr(self, name)}" for name in names if getattr(self, name))]

    @property
    def num_cpus(self) -> int | None:
        """Return the CPUs of a task, or None for those of a whole node, however many it has."""
        return self.cpus_per_task if isinstance(self.cpus_per_task, int) else None

    @property
    def least_mem_gb(self) -> float:
        """Return what a node must have for one task, as far as the request says it."""
        return self.mem_gb or (self.mem_per_cpu_gb or 0) * (self.num_cpus or 1)

    def changed(self, **changes: Any) -> JobRequest:
        """Return a copy with other values. Memory of one kind replaces memory of the other kind."""
        return JobRequest(**with_changes(dataclasses.asdict(self), changes))


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a request with changes. Memory of one kind replaces memory of the other kind."""
    replaced = MEMORY_FIELDS if any(changes.get(name) is not None for name in MEMORY_FIELDS) else ()
    return {**{name: value for name, value in values.items() if name not in replaced}, **changes}


class SubmittedMeanwhile(ReadWriteError):
    """Another submission of the same data set was recorded first."""


@dataclass(frozen=True, kw_only=True)
class SentJob:
    """A job as Slurm showed it when it took it; a controller that lost its state gives ids a second time."""

    job_id: Annotated[str, Meta(pattern=r"\A[0-9]{1,10}\Z")]
    name: Text
    submit_time: Text  # of the controller's clock, UTC, 2026-11-22T01:52:04


@dataclass(frozen=True, kw_only=True)
class JobArray(SentJob):
    """A job array of a submission: task i makes the shards ``tasks[i]``."""

    request: JobRequest
    tasks: Annotated[list[str], Meta(min_length=1)]
    mem_mb: Count | None  # what Slurm made of the request; None where it limits nothing
    time_min: Count | None

    def __post_init__(self) -> None:
        if sum(map(len, self.shards_of_tasks())) > MAX_SHARDS:
            raise ValueError(f"at most {MAX_SHARDS} shards")

    def shards_of_tasks(self) -> list[list[int]]:
        """Return the shard ids of every task."""
        return [ids_of_ranges(word, end=MAX_SHARDS + 1) for word in self.tasks]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What one ``submit`` or ``retry`` sent to Slurm."""

    number: Count
    plan_id: Text
    cluster: Text
    user: Text
    submitted: Annotated[float, Meta(ge=0, le=_MAX_TIME_S)]  # seconds since 1970
    arrays: Annotated[list[JobArray], Meta(min_length=1)]
    verify: SentJob
    identity: Text  # of the folder, see ``folder_identity``
    # Whether this user wrote the record, and nobody else can write to it. It is not in the file.
    is_own: bool = field(default=True, compare=False)

    @property
    def jobs(self) -> list[SentJob]:
        """Return its jobs, verify last."""
        return [*self.arrays, self.verify]


def read_submissions(folder: Path) -> list[Submission]:
    """Return all submissions of a data set, oldest first.

    Raises BrokenShard or ReadWriteError for one that cannot be read: were it left out, its shards would be
    made a second time.
    """
    jobs = folder / JOBS_FOLDER
    names = names_in(jobs)
    if not names and size_of_file(jobs) is not None and not is_folder(jobs):
        raise ReadWriteError(path=jobs, found="no folder", expected="the folder of what was submitted")
    found = []
    for name in names:
        if not re.fullmatch(r"[0-9]{4}\.json", name):
            continue
        path = jobs / name
        try:
            raw, status = read_with_status(path, max_bytes=_MAX_BYTES)
            submission = as_type(path, checked_object(path, raw, _FORMAT), Submission)
        except NOT_THERE as error:  # a link to nothing, or taken away since it was listed
            raise ReadWriteError(path=path, found=error.strerror, expected="a submission") from None
        except (BrokenShard, UnknownVersion, UsageError) as error:  # UsageError: of a request
            what = f"no whole submission of this version: {error}"
            todo = "one; move it away: it only records job ids"
            raise BrokenShard(path=path, found=what, expected=todo) from None
        is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
        found.append(dataclasses.replace(submission, is_own=is_own))
    return found


def user_name() -> str:
    """Return the name of who runs this, as Slurm tells it: a number where the machine has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no variable and no passwd entry, as in many containers; 3.13 raises OSError
        return str(os.getuid())


def append_event(folder: Path, kind: str, **facts: Any) -> None:
    """Append what a command did to DATA/jobs/history.jsonl. What fails is left out."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind, "user": user_name(), **facts})
    with contextlib.suppress(CannotWrite, OSError):
        append_bytes(make_subfolder(folder, JOBS_FOLDER) / HISTORY_NAME, f"{line}\n".encode())


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return what happened to a data set, oldest first, without lines that are cut short or not ours."""
    try:
        lines = read_regular(folder / JOBS_FOLDER / HISTORY_NAME, max_bytes=_MAX_BYTES).split(b"\n")
    except (*NOT_THERE, ShardprepError):
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, BrokenShard, LookupError, TypeError):
            event = load_json(line)
            if 0 <= event["time"] <= _MAX_TIME_S and type(event["event"]) is str:
                events.append(event)
    return events


def publish_submission(folder: Path, submission: Submission) -> None:
    """Write it under its number. Raises SubmittedMeanwhile, CannotWrite or ReadWriteError."""
    jobs = folder / JOBS_FOLDER
    content = dataclasses.asdict(submission)
    del content["is_own"]
    with PublishedFile(jobs / f"{submission.number:04d}.json") as file:
        file.write(json.dumps(with_content_hash(_FORMAT, content), indent=2).encode() + b"\n")
        file.sync()
        with contextlib.suppress(OSError):  # whatever the umask: it names commands that a retry runs
            file.temporary.chmod(stat.S_IMODE(file.temporary.stat().st_mode) & ~_OTHERS_WRITE)
        if not file.publish_first():
            raise SubmittedMeanwhile(
                f"{file.path} was written meanwhile, as somebody else submitted at the same time; what this "
                "one sent was cancelled before it began"
            )
    sync_folder(jobs)
