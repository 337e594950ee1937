"""The files DATA/jobs/NNNN.json: one for each submission, with its job ids and the shards of every task.

A file is written once and never changed. Its number is the next one after those that its writer had read,
taken by link: of two who submit at the same time only one gets it, and the other one withdraws. It is read by
``status``, ``retry`` and ``cancel``: a job that no file names is not known to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.attempts import HISTORY_NAME, append_line
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
    make_subfolder,
    read_regular,
    read_with_status,
    sync_folder,
)
from shardprep.format.checked_json import Fields, checked_fields, load_json, with_content_hash
from shardprep.format.manifest import ShardMaking
from shardprep.format.names import FORMAT_VERSION, MAX_SHARDS, ids_of_ranges
from slurm.commands import user_name
from slurm.request import JobRequest

JOBS_FOLDER = "jobs"
_FORMAT = "shardprep-submission"
_MAX_BYTES = 64 << 20  # the record of 99,999 shards has 2 MB
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999: a date can be written
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SubmittedMeanwhile(ReadWriteError):
    """Another submission of the same data set was recorded first."""


class SentJob(NamedTuple):
    """What makes a job this one: a controller that lost its state gives old ids to other jobs.

    Name and time of submission are those that Slurm showed when it took the job, so that a site which renames
    jobs is followed.
    """

    job_id: str
    name: str
    submit_time: str  # of the controller's clock, UTC, 2026-11-22T01:52:04


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """One job array of a submission: task i makes the shards ``tasks[i]``."""

    job_id: str
    name: str
    submit_time: str
    request: JobRequest
    tasks: list[str]
    mem_mb: int | None  # what Slurm made of the request; None where it limits nothing
    time_min: int | None

    def shards_of_tasks(self) -> list[list[int]]:
        """The shard ids of every task."""
        return [ids_of_ranges(word, end=MAX_SHARDS + 1) for word in self.tasks]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What one ``submit`` or ``retry`` sent to Slurm."""

    number: int
    plan_id: str
    cluster: str
    user: str
    submitted: float  # seconds since 1970
    arrays: list[JobArray]
    verify_job_id: str
    verify_name: str
    verify_submit_time: str
    identity: str  # of the folder, see ``folder_identity``
    # Whether this user wrote the record, and nobody else can write to it. It is not in the file.
    is_own: bool = field(default=True, compare=False)

    @property
    def jobs(self) -> list[SentJob]:
        """Its jobs, verify last."""
        jobs = [SentJob(each.job_id, each.name, each.submit_time) for each in self.arrays]
        return [*jobs, SentJob(self.verify_job_id, self.verify_name, self.verify_submit_time)]

    def made(self, shard: ShardMaking) -> bool:
        """Whether one of its jobs made it, by the job's number: the nodes' clocks may be wrong."""
        return any(array.job_id == shard.job_id for array in self.arrays)


def read_submissions(folder: Path) -> list[Submission]:
    """All submissions of a data set, oldest first.

    Raises BrokenShard for a file that is no submission of this version, ReadWriteError for what cannot
    be read: were it left out, its shards would be made a second time.
    """
    jobs = folder / JOBS_FOLDER
    try:
        names = os.listdir(jobs)  # noqa: PTH208 - glob() would say nothing of a folder that it may not read
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReadWriteError(
            f"{jobs} cannot be listed ({error.strerror}), so what was submitted is not known; it must be a "
            "folder that you can read"
        ) from None
    return [_read_submission(jobs / name) for name in sorted(names) if re.fullmatch(r"[0-9]{4}\.json", name)]


def append_event(folder: Path, kind: str, **facts: Any) -> None:
    """Append what a command did to DATA/jobs/history.jsonl; what fails is left out."""
    line = {"time": round(time.time(), 3), "event": kind, "user": user_name(), **facts}
    with contextlib.suppress(CannotWrite):
        append_line(make_subfolder(folder, JOBS_FOLDER) / HISTORY_NAME, line)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What happened to a data set, oldest first; a line that is none of ours, or cut short, is left out."""
    path = folder / JOBS_FOLDER / HISTORY_NAME
    try:
        lines = read_regular(path, max_bytes=_MAX_BYTES).split(b"\n")
    except (*NOT_THERE, ShardprepError):
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, BrokenShard):
            event = load_json(line)
            if isinstance(event, dict):
                _check_event(Fields(path, event))
                events.append(event)
    return events


def _check_event(fields: Fields) -> None:
    """Check the types of an event's values. Raises BrokenShard, or ValueError for shards that are none."""

    def is_str(value: object) -> bool:
        return isinstance(value, str)

    fields.number("time", _MAX_TIME_S)
    fields.right("event", is_str, "a text")
    for name in ("user", "why", "report"):
        if fields.has(name):
            fields.right(name, is_str, "a text")
    for name in ("round", "number", "failed_core_s"):
        if fields.has(name):
            fields.number(name)
    if fields.has("jobs"):
        fields.list_of("jobs", is_str, "a job's number")
    for found in fields.each("causes", Fields.fields).values() if fields.has("causes") else ():
        ids_of_ranges(found.text("shards"), end=MAX_SHARDS + 1)
        found.each("nodes", Fields.whole)


def event_line(event: dict[str, Any]) -> str:
    """A line of the history for people."""
    causes = event.get("causes")
    words = [str(event["event"])]
    if isinstance(event.get("round"), int):
        words.append(f"round {event['round']}")
    if isinstance(causes, dict) and causes:
        words.append("after " + "; ".join(f"{cause}: {found['shards']}" for cause, found in causes.items()))
    words += [str(event[name]) for name in ("why", "report") if name in event]
    jobs = event.get("jobs")
    return ", ".join([*words, *([f"jobs {' '.join(map(str, jobs))}"] if isinstance(jobs, list) else [])])


def publish_submission(folder: Path, submission: Submission) -> None:
    """Write it under its number.

    Raises SubmittedMeanwhile where that is taken, CannotWrite or ReadWriteError.
    """
    jobs = folder / JOBS_FOLDER
    content = dataclasses.asdict(submission)
    del content["is_own"]
    file = PublishedFile(jobs / f"{submission.number:04d}.json")
    try:
        file.write(json.dumps(with_content_hash(_FORMAT, content), indent=2).encode() + b"\n")
        file.sync()
        with contextlib.suppress(OSError):  # whatever the umask: it names commands that a retry runs
            file.temporary.chmod(stat.S_IMODE(file.temporary.stat().st_mode) & ~_OTHERS_WRITE)
        if not file.publish_first():
            raise SubmittedMeanwhile(
                f"{file.path} was written meanwhile: somebody else submitted at the same time; what this one "
                "sent was cancelled before it began. Look at the status, then run this again if it is needed"
            )
    finally:
        file.discard()
    sync_folder(jobs)


def _read_submission(path: Path) -> Submission:
    remedy = "move it away: it only records job ids"
    try:
        raw, status = read_with_status(path, max_bytes=_MAX_BYTES)
        fields = checked_fields(path, raw, _FORMAT)
        submission = fields.all_of(
            Submission,
            arrays=[_array_of(each) for each in fields.objects("arrays")],
            is_own=status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE,
        )
        if not submission.arrays:
            raise fields.wrong("arrays", [], "one job array or more")
        for job in submission.jobs:
            if not re.fullmatch(r"[0-9]{1,10}", job.job_id):
                key = "verify_job_id" if job.job_id == submission.verify_job_id else "arrays.job_id"
                raise fields.wrong(key, job.job_id, "a job's number")
    except NOT_THERE as error:  # a link to nothing, or taken away since it was listed
        raise ReadWriteError(f"{path} cannot be read: {error.strerror}") from None
    except UnknownVersion:
        expected = f"expected version {FORMAT_VERSION}"
        raise BrokenShard(f"{path} is a submission of another version, {expected}; {remedy}") from None
    except (UsageError, ValueError) as error:  # of a request, of a task's shards
        raise BrokenShard(f"{path}: {error}; {remedy}") from None
    except BrokenShard as error:
        raise BrokenShard(f"{error}: it is not a whole submission; {remedy}") from None
    return submission


def _array_of(fields: Fields) -> JobArray:
    given = fields.fields("request")
    request = JobRequest(**{item.name: given.take(item.name) for item in dataclasses.fields(JobRequest)})
    given.end()
    array = fields.all_of(JobArray, request=request)
    if not array.tasks:
        raise fields.wrong("tasks", [], "one task or more")
    if (num_shards := sum(map(len, array.shards_of_tasks()))) > MAX_SHARDS:
        raise fields.wrong("tasks", num_shards, f"at most {MAX_SHARDS} shards")
    return array
