"""Records of attempts: a file in DATA/jobs/attempts for each one that runs, or that left a shard unmade.

``slurm/prep_array.sh`` writes the record of a job's task, ``run`` its own. It is text::

    begin               what the attempt was given, as NAME=VALUE lines, Slurm's own variables among them
    {"shard": 3, ...}   a shard that failed, written by the worker
    end                 how it ended; missing while the attempt runs, or where it was killed

An attempt that made all its shards removes its file, so a finished data set has none. A record names the
folder that it was written in: that of a copied folder is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from shardprep.errors import CannotWrite, ReadWriteError, ShardprepError
from shardprep.files import append_bytes, make_subfolder, names_in, read_with_status
from shardprep.format.json_files import MOST
from shardprep.format.names import MAX_SHARDS, id_ranges, ids_of_ranges

ATTEMPTS_FOLDER = "jobs/attempts"
LOGS_FOLDER = "jobs/logs"
RECORD_VARIABLE = "SHARDPREP_ATTEMPT"  # the path of this process's record
_MAX_BYTES = 64 << 20
_MOST_REASON_CHARS = 2000
_Time = Annotated[float, Meta(ge=0, le=253_402_300_799)]  # up to the year 9999: a date can be written
_Number = Annotated[int, Meta(ge=-1, le=MOST)]
_SLURM_NAME = re.compile(r"[0-9]{1,10}_[0-9]{1,10}\.r[0-9]{1,6}")  # JOB_INDEX.rRESTART
_RUN_NAME = re.compile(r".+-[0-9]{1,10}\.[0-9]{1,16}")  # HOST-PID.TIME


class Failure(Struct, frozen=True, kw_only=True):
    """A shard that was not made."""

    shard_id: _Number = field(name="shard")
    exit_code: _Number  # of shardprep.errors; 128 + N where signal N killed the process
    reason: str

    @staticmethod
    def of(shard_id: int, error: ShardprepError) -> Failure:
        """Return the shard that an error stopped."""
        return Failure(shard_id=shard_id, exit_code=error.exit_code, reason=str(error))


class AttemptRecord(Struct, kw_only=True):
    """One attempt at some shards: the lines of its record by their names, those of its end as ``end_``NAME.

    What was not measured is None, 0 or "".
    """

    path: str = ""
    shards: list[int] = field(name="shard_ids", default_factory=list)  # none for a verify job
    failures: dict[int, Failure] = field(default_factory=dict)
    # begin
    plan_id: str
    identity: str
    began: _Time = field(name="time")  # seconds since 1970, by the node's clock
    shard_ranges: str = field(name="shards", default="")
    log: str = ""
    node: str = field(name="SLURMD_NODENAME", default="")
    user: str = field(name="SLURM_JOB_USER", default="")
    array_job_id: str = field(name="SLURM_ARRAY_JOB_ID", default="")
    plain_job_id: str = field(name="SLURM_JOB_ID", default="")
    index: _Number = field(name="SLURM_ARRAY_TASK_ID", default=0)
    num_restarts: _Number = field(name="SLURM_RESTART_COUNT", default=0)
    num_cpus: _Number = field(name="SLURM_CPUS_PER_TASK", default=0)
    mem_per_node_mb: _Number = field(name="SLURM_MEM_PER_NODE", default=0)
    mem_per_cpu_mb: _Number = field(name="SLURM_MEM_PER_CPU", default=0)
    end_time: _Number = field(name="SLURM_JOB_END_TIME", default=0)  # told to a task from Slurm 24.11 on
    partition: str = field(name="SLURM_JOB_PARTITION", default="")
    account: str = field(name="SLURM_JOB_ACCOUNT", default="")
    qos: str = field(name="SLURM_JOB_QOS", default="")
    pid: _Number = 0  # of a ``run`` outside of Slurm
    pid_began: _Number = 0  # in clock ticks since the host's boot
    # end
    ended: _Time | None = field(name="end_time", default=None)
    exit_code: _Number = field(name="end_exit_code", default=0)
    killed_by: _Number = field(name="end_killed_by", default=0)  # the signal that ended the worker
    stage: str = field(name="end_stage", default="")  # at which it ended: set-up, start, work
    signal: str = field(name="end_signal", default="")  # that it was told to stop by
    stopped: _Time | None = field(name="end_stopped", default=None)  # when it was told so
    shown_limit: str = field(name="end_limit", default="")  # time limit as squeue shows it, such as 1:00:00
    stopped_by: str = field(name="end_stopped_by", default="")  # what Slurm did to it, see ``slurm.causes``

    @property
    def job_id(self) -> str:
        """Return the job, of the array where it is one, or "" for a ``run`` outside of Slurm."""
        return self.array_job_id or self.plain_job_id

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, as Slurm's queue names the task."""
        return self.job_id, self.index

    @property
    def mem_mb(self) -> int | None:
        """Return the memory of the task, or None where Slurm limits nothing."""
        return self.mem_per_cpu_mb * (self.num_cpus or 1) or self.mem_per_node_mb or None

    @property
    def time_limit(self) -> str:
        """Return the time limit as Slurm writes it: ``1:00:00`` or, in minutes, ``60``."""
        return str(round((self.end_time - self.began) / 60)) if self.end_time else self.shown_limit

    def is_alive(self) -> bool | None:
        """Return whether the process of a ``run`` still lives, or None where this host cannot see it."""
        if not self.pid or self.node != os.uname().nodename:
            return None
        return _ticks_of(self.pid) == self.pid_began


@dataclass(kw_only=True)
class AttemptRecords:
    """The records of a data set, those of other plans and of the folder that it was copied from left out."""

    own: list[AttemptRecord]  # oldest first
    unreadable: list[str]  # what could not be read, and why


def folder_identity(folder: Path) -> str:
    """Return what tells a folder from its copies: its inode and its file system, as ``stat`` prints them.

    A move within the file system keeps it, and all nodes see the same. Roots of file systems share inodes.
    """
    try:
        number = os.statvfs(folder).f_fsid
        return f"{folder.stat().st_ino}.{(number & 0xFFFFFFFF) << 32 | number >> 32:x}"
    except OSError as error:
        raise ReadWriteError(f"{folder} cannot be looked at: {error.strerror}") from None


def read_attempts(folder: Path, plan_id: str, identity: str = "") -> AttemptRecords:
    """Read all records: one open for each attempt that runs or failed. Broken lines are left out."""
    identity = identity or folder_identity(folder)
    logs = os.path.join(os.path.realpath(folder), LOGS_FOLDER)  # noqa: PTH118 - Path.resolve may raise
    records = AttemptRecords(own=[], unreadable=[])
    try:
        names = names_in(folder / ATTEMPTS_FOLDER)
    except ShardprepError as error:
        records.unreadable.append(str(error))
        return records
    for name in names:
        if not (_SLURM_NAME.fullmatch(name) or _RUN_NAME.fullmatch(name)):
            continue
        path = folder / ATTEMPTS_FOLDER / name
        try:
            content, status = read_with_status(path, max_bytes=_MAX_BYTES)
        except FileNotFoundError:  # it made its shards since the folder was listed
            continue
        except ShardprepError as error:
            records.unreadable.append(str(error))
            continue
        record = _record_of(path, content)
        if record is None or record.plan_id != plan_id or record.identity != identity:
            continue
        if status.st_uid != os.geteuid():  # it may name any file of this user's
            log = "" if "\0" in record.log else os.path.realpath(record.log)
            if os.path.dirname(log) != logs:  # noqa: PTH120
                record.log = ""
        records.own.append(record)
    records.own.sort(key=lambda each: (each.began, each.path))
    return records


def _record_of(path: Path, content: bytes) -> AttemptRecord | None:
    """Return what a record says, or None. Where a job's number came again, its last beginning counts."""
    facts: dict[str, Any] = {}
    failures: dict[int, Failure] = {}
    prefix = ""
    for line in content.decode("utf-8", "replace").split("\n"):
        name, equals, value = line.partition("=")
        if line == "begin":
            facts, failures, prefix = {}, {}, ""
        elif line == "end":
            prefix = "end_"
        elif line.startswith("{"):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                failure = msgspec.json.decode(line, type=Failure)
                failures[failure.shard_id] = failure
        elif equals and value:
            # The first value counts: who looked at an end while Slurm knew it, before a script that lived on.
            facts.setdefault(prefix + name, value)
    try:
        record = msgspec.convert(facts, AttemptRecord, strict=False)
        record.shards = ids_of_ranges(record.shard_ranges, end=MAX_SHARDS + 1) if record.shard_ranges else []
    except (msgspec.MsgspecError, ValueError):
        return None
    record.path, record.failures = str(path), failures
    return record


def remove_finished(records: Iterable[AttemptRecord], is_done: Sequence[bool]) -> None:
    """Remove the records of ended attempts whose shards are all made. What fails is left."""
    for record in records:
        if record.ended is not None and all(is_done[each] for each in record.shards if each < len(is_done)):
            with contextlib.suppress(OSError):
                os.unlink(record.path)  # noqa: PTH108


def append_failure(failure: Failure) -> None:
    """Write a failed shard into the record of this process, where it has one. What fails is left out."""
    if path := os.environ.get(RECORD_VARIABLE):
        reason = failure.reason[:_MOST_REASON_CHARS].encode("utf-8", "replace").decode()
        line = msgspec.json.encode(msgspec.structs.replace(failure, reason=reason))
        with contextlib.suppress(OSError):
            append_bytes(Path(path), line + b"\n")


def append_end(record: AttemptRecord) -> None:
    """Write how Slurm says that an attempt ended, before Slurm forgets it. What fails is left out."""
    with contextlib.suppress(OSError):
        append_bytes(Path(record.path), _section("end", time=record.ended, stopped_by=record.stopped_by))


def _section(name: str, **facts: object) -> bytes:
    """Return a section of a record: written at once, so that lines of several processes do not mix."""
    lines = [f"{key}={value}" for key, value in facts.items()]
    return "\n".join([name, *(line.replace("\n", "?") for line in lines), ""]).encode("utf-8", "replace")


class RunRecord:
    """The record of a ``run``; within ``with``. It does nothing where a job's script keeps one already."""

    def __init__(self, folder: Path, plan_id: str, shard_ids: Iterable[int], *, num_cpus: int) -> None:
        self._path: Path | None = None
        self.exit_code = 0
        environ = os.environ
        if environ.get(RECORD_VARIABLE):
            return
        now, host = time.time(), os.uname().nodename
        facts: dict[str, object] = {
            "plan_id": plan_id,
            "identity": folder_identity(folder),
            "shards": id_ranges(shard_ids),
            "time": round(now, 3),
            "SLURMD_NODENAME": host,
            "SLURM_CPUS_PER_TASK": num_cpus,
        }
        job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", "")
        if job_id.isdigit():
            facts |= {name: value for name, value in environ.items() if re.match("SLURMD?_", name)}
            index, restarts = environ.get("SLURM_ARRAY_TASK_ID"), environ.get("SLURM_RESTART_COUNT")
            name = f"{job_id}_{index or 0}.r{restarts or 0}"
        else:
            facts |= {"pid": os.getpid(), "pid_began": _ticks_of(os.getpid())}
            name = f"{host}-{os.getpid()}.{int(now * 1000)}"  # a process may run twice in a second
        path = folder / ATTEMPTS_FOLDER / name
        for _ in range(2):  # another run may remove the empty folder in between
            with contextlib.suppress(CannotWrite, OSError):
                make_subfolder(folder, ATTEMPTS_FOLDER)
                append_bytes(path, _section("begin", **facts))
                self._path = path
                environ[RECORD_VARIABLE] = str(path)
                return

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._path is None:
            return
        del os.environ[RECORD_VARIABLE]
        code = self.exit_code if error is None else int(getattr(error, "exit_code", 1))
        with contextlib.suppress(OSError):
            if code:
                signal = "stop" if code == 75 else ""
                end = _section("end", time=round(time.time(), 3), exit_code=code, stage="work", signal=signal)
                append_bytes(self._path, end)
                return
            self._path.unlink()
            self._path.parent.rmdir()  # the folders, where nothing else is in them
            self._path.parent.parent.rmdir()


def _ticks_of(pid: int) -> int:
    """Return when a process began, in clock ticks since boot, or -1 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
