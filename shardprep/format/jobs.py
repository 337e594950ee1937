"""DATA/jobs: submissions and controllers, and the history of commands.

``jobs/NNNN.json`` is a submission: its job ids and the shards of every task. It is written once and never
changed. Its number is the next one after those that its writer found, and a hard link claims it: of two
simultaneous submissions, one fails. ``jobs/control-ID.json`` is a controller of ``--until_done``.
``jobs/history.jsonl`` lists what commands did.

Several users may write to DATA/jobs. A record is a user's *own* if it is in a file that this user owns and
nobody else can write to. Commands act on own records alone, see ``slurm.own``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import re
import stat
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardprep import errors, files
from shardprep.errors import ShardprepError
from shardprep.format import json_files, names
from shardprep.format.data_folder import JOBS_FOLDER, DataFolder
from shardprep.format.json_files import Count, Text

HISTORY_NAME = "history.jsonl"  # in jobs/
_FORMAT = "shardprep-submission"
_CONTROLLER_FORMAT = "shardprep-controller"
_CONTROLLER_NAME = re.compile(r"control-[0-9]{1,10}\.json")
_MAX_CONTROLLER_BYTES = 1 << 16
_MAX_SUBMISSION_BYTES = 16 << 20  # the submission of 99,999 shards has 2 MB
_MAX_ALL_SUBMISSIONS_BYTES = 128 << 20  # of a data set; decoded, they take some three times as much
_MAX_TASK_SHARDS = 5_000_000  # in all submissions
# Of the history, only the newest events are read. Decoded, it may take 30 times as much memory.
_MAX_HISTORY_BYTES = 4 << 20
_MAX_EVENTS = 10_000
_MAX_TIME_S = 253_402_128_000  # two days before the end of 9999, which datetime supports in any time zone
TimeStamp = Annotated[float, Meta(ge=0, le=_MAX_TIME_S)]  # seconds since 1970
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class SentJob:
    """A job as Slurm showed it after submission. A slurmctld that lost its state may reuse ids."""

    job_id: Annotated[str, Meta(pattern=r"\A[0-9]{1,10}\Z")]
    name: Text
    submit_time: Text  # by slurmctld's clock, in UTC: 2026-11-22T01:52:04


@dataclass(frozen=True, kw_only=True)
class JobArray(SentJob):
    """A job array of a submission. Task i makes the shards ``tasks[i]``."""

    # Fields of the request, see ``slurm.request``.
    request: Annotated[dict[str, str | int | float | None], Meta(max_length=100)]
    tasks: Annotated[list[str], Meta(min_length=1)]
    mem_mb: Count | None  # the limit that Slurm derived from the request, or None
    time_min: Count | None

    def shards_of_tasks(self) -> list[Sequence[int]]:
        # Arrays, because an int object takes 9 times as much memory.
        return [array("I", names.ids_of_ranges(word)) for word in self.tasks]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The jobs that one ``submit`` or ``retry`` sent to Slurm: jobs/NNNN.json."""

    number: Count
    plan_id: Text
    cluster: Text
    user: Text
    submitted: TimeStamp
    arrays: Annotated[list[JobArray], Meta(min_length=1)]
    verify: SentJob
    identity: Text  # of the folder, see ``folder_identity``
    is_typed: bool = False  # a person sent it: failures count anew from here
    # Whether this user wrote the file and no one else can write to it. Not stored in the file.
    is_own: bool = dataclasses.field(default=True, compare=False)

    @property
    def jobs(self) -> list[SentJob]:
        """Return its jobs, the verify job last."""
        return [*self.arrays, self.verify]

    def num_shards(self) -> int:
        """Return how many shards its tasks make. Raises ValueError if they are too many, or are none."""
        tasks: list[str] = []
        for sent in self.arrays:
            tasks += sent.tasks
        return len(names.ids_of_ranges(",".join(tasks)))


def read_submissions(folder: DataFolder) -> list[Submission]:
    """Return all submissions of a data set, oldest first. Raises BrokenShard or ReadWriteError."""
    listed = folder.names(JOBS_FOLDER)
    if not listed and folder.status_of(JOBS_FOLDER) is not None and not folder.is_subfolder(JOBS_FOLDER):
        path = folder.path_of(JOBS_FOLDER)
        raise errors.ReadWriteError(path=path, found="not a folder", expected="a folder of submissions")
    submissions = []
    num_bytes = 0
    num_shards = 0
    for name in listed:
        if not re.fullmatch(r"[0-9]{4}\.json", name):
            continue
        place = f"{JOBS_FOLDER}/{name}"
        path = folder.path_of(place)
        try:
            raw, status = folder.read_with_status(place, max_bytes=_MAX_SUBMISSION_BYTES)
            num_bytes += len(raw)
            if num_bytes > _MAX_ALL_SUBMISSIONS_BYTES:
                raise _too_much(path, f"{num_bytes} bytes", _MAX_ALL_SUBMISSIONS_BYTES)
            submission = json_files.as_type(path, json_files.checked_object(path, raw, _FORMAT), Submission)
            num_shards += submission.num_shards()
            if num_shards > _MAX_TASK_SHARDS:
                raise _too_much(path, f"{num_shards} shards", _MAX_TASK_SHARDS)
        # Raise for every file that cannot be read: if it were skipped, its shards would be made twice.
        except files.NOT_THERE as error:  # a dangling link, or removed since the listing
            raise errors.ReadWriteError(path=path, found=error.strerror, expected="a submission") from None
        except (ValueError, errors.BrokenShard, errors.UnknownVersion, errors.UsageError) as error:
            problem = f"not a valid submission: {error}"
            raise errors.BrokenShard(
                path=path, found=problem, expected="one", advice="move it away"
            ) from None
        submissions.append(dataclasses.replace(submission, is_own=is_own_file(status)))
    return submissions


def _too_much(path: Path, found: str, most: int) -> errors.BrokenShard:
    return errors.BrokenShard(
        path=path, found=f"{found} in the submissions up to it", expected=f"at most {most}"
    )


def is_own_file(status: os.stat_result) -> bool:
    """Return whether this user owns the file and nobody else can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


@dataclass(frozen=True, kw_only=True)
class Controller(SentJob):
    """A job of ``--until_done``: jobs/control-ID.json. Its owner may rename it."""

    identity: Text  # of the folder


def read_own_controllers(folder: DataFolder) -> list[Controller]:
    """Return the controllers that this user submitted. Other users' and damaged files are ignored."""
    controllers = []
    for name in folder.names(JOBS_FOLDER):
        if not _CONTROLLER_NAME.fullmatch(name):
            continue
        place = f"{JOBS_FOLDER}/{name}"
        path = folder.path_of(place)
        with contextlib.suppress(*files.NOT_THERE, ShardprepError):
            raw, status = folder.read_with_status(place, max_bytes=_MAX_CONTROLLER_BYTES)
            if is_own_file(status):
                content = json_files.checked_object(path, raw, _CONTROLLER_FORMAT)
                controllers.append(json_files.as_type(path, content, Controller))
    return controllers


def publish_controller(folder: DataFolder, controller: Controller) -> None:
    """Write the record of a controller. Raises CannotWrite or ReadWriteError."""
    content = json_files.with_content_hash(_CONTROLLER_FORMAT, dataclasses.asdict(controller))
    with folder.new_file(f"{JOBS_FOLDER}/control-{controller.job_id}.json") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        file.deny_others_writing()  # commands act on what it says
        file.sync()
        file.rename_into_place()


def user_name() -> str:
    """Return the user's name as Slurm shows it: the uid if the machine has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # without a passwd entry, as in many containers; OSError since 3.13
        return str(os.getuid())


def append_event(folder: DataFolder, kind: str, **facts: object) -> None:
    """Append what a command did to DATA/jobs/history.jsonl. Errors are ignored."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind, "user": user_name(), **facts})
    with contextlib.suppress(ShardprepError, OSError):
        folder.make_subfolder(JOBS_FOLDER)
        folder.append(f"{JOBS_FOLDER}/{HISTORY_NAME}", f"{line}\n".encode())


def read_events(folder: DataFolder) -> list[dict[str, object]]:
    """Return the newest events of a data set, oldest first, without invalid lines."""
    try:
        raw = folder.read_end(f"{JOBS_FOLDER}/{HISTORY_NAME}", _MAX_HISTORY_BYTES)
    except ShardprepError:
        return []
    lines = raw.rsplit(b"\n", _MAX_EVENTS + 1)
    if len(raw) == _MAX_HISTORY_BYTES or len(lines) > _MAX_EVENTS + 1:
        del lines[0]  # earlier events, or the end of one
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, errors.BrokenShard, LookupError, TypeError):
            event = json_files.load_json(line)
            if 0 <= event["time"] <= _MAX_TIME_S and type(event["event"]) is str:
                events.append(event)
    return events


def publish_submission(folder: DataFolder, submission: Submission) -> None:
    """Write a submission. Raises ReadWriteError if its number is taken, and CannotWrite."""
    content = dataclasses.asdict(submission)
    del content["is_own"]
    with folder.new_file(f"{JOBS_FOLDER}/{submission.number:04d}.json") as file:
        file.write(json.dumps(json_files.with_content_hash(_FORMAT, content), indent=2).encode() + b"\n")
        file.deny_others_writing()  # retry runs commands from it
        file.sync()
        if not file.publish_first():
            why = "there was another submission at the same time; the jobs of this one were cancelled"
            raise errors.ReadWriteError(f"{file.path} exists by now: {why}", path=file.path)
    folder.sync(JOBS_FOLDER)
