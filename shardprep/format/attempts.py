"""Records of attempts: a file in DATA/jobs/attempts for each one that runs, or that left a shard unmade.

``slurm/prep_array.sh`` writes the record of a job's task, ``run`` its own. It is text::

    begin               what the attempt was given, as NAME=VALUE lines, Slurm's own variables among them
    {"shard": 3, ...}   a shard that failed, written by the worker
    end                 how it ended; missing while the attempt runs, or where it was killed

An attempt that made all its shards removes its file, so a finished data set has none. A record names the
folder that it was written in, see ``folder_identity``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardprep.errors import CannotWrite, ReadWriteError, ShardprepError
from shardprep.files import append_bytes, make_subfolder, names_in, read_with_status
from shardprep.format.json_files import load_json
from shardprep.format.names import MAX_SHARDS, id_ranges, ids_of_ranges

ATTEMPTS_FOLDER = "jobs/attempts"
LOGS_FOLDER = "jobs/logs"
RECORD_VARIABLE = "SHARDPREP_ATTEMPT"  # the path of this process's record
_MAX_BYTES = 64 << 20
_MOST_REASON_CHARS = 2000
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999: a date can be written
_MAX_NUMBER = 1 << 63
_SLURM_NAME = re.compile(r"[0-9]{1,10}_[0-9]{1,10}\.r[0-9]{1,6}")  # JOB_INDEX.rRESTART
_RUN_NAME = re.compile(r".+-[0-9]{1,10}\.[0-9]{1,16}")  # HOST-PID.TIME


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A shard that was not made."""

    shard_id: int
    exit_code: int  # of shardprep.errors; 128 + N where signal N killed the process
    reason: str

    @staticmethod
    def of(shard_id: int, error: ShardprepError) -> Failure:
        """Return the shard that an error stopped."""
        return Failure(shard_id=shard_id, exit_code=error.exit_code, reason=str(error))


@dataclass(kw_only=True)
class AttemptRecord:
    """One attempt at some shards, as its record says. What was not measured is None or ""."""

    path: Path
    plan_id: str
    identity: str
    shards: list[int]  # none for a verify job
    started_by: str  # submit, sbatch, run, submitit
    began: float  # seconds since 1970, by the node's clock
    node: str = ""
    user: str = ""
    job_id: str = ""  # of the array; "" for a ``run`` outside of Slurm
    index: int = 0
    num_restarts: int = 0
    num_cpus: int | None = None
    mem_mb: int | None = None
    time_limit: str = ""  # as squeue shows it
    time_min: int | None = None  # the same, where Slurm tells a task when it has to end (from 24.11 on)
    partition: str = ""
    account: str = ""
    qos: str = ""
    log: str = ""
    pid: int = 0  # of a ``run`` outside of Slurm
    pid_began: int = 0  # in clock ticks since the host's boot
    failures: dict[int, Failure] = field(default_factory=dict)
    ended: float | None = None
    exit_code: int = 0
    killed_by: int = 0  # the signal that ended the worker
    stage: str = ""  # at which it ended: set-up, start, work
    signal: str = ""  # that it was told to stop by
    left_s: float | None = None  # until its time limit when it was told to stop, where Slurm said its limit
    stopped_by: str = ""  # what Slurm did to it, a cause of ``slurm.causes``

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, as Slurm's queue names the task."""
        return self.job_id, self.index

    def is_alive(self) -> bool | None:
        """Return whether the process of a ``run`` still lives; None where this host cannot see it."""
        if not self.pid or self.node != socket.gethostname():
            return None
        return _ticks_of(self.pid) == self.pid_began


@dataclass(kw_only=True)
class AttemptRecords:
    """The records of a data set."""

    own: list[AttemptRecord]  # oldest first
    foreign: list[AttemptRecord]  # of the folder that this one was copied from
    unreadable: list[str]  # what could not be read, and why


def folder_identity(folder: Path) -> str:
    """Return what tells a folder from its copies: its inode and its file system, as ``stat`` prints them.

    A move within the file system keeps it, and all nodes that mount the file system see the same. The roots
    of two file systems may have one inode number.
    """
    try:
        number = os.statvfs(folder).f_fsid
        return f"{folder.stat().st_ino}.{(number & 0xFFFFFFFF) << 32 | number >> 32:x}"
    except OSError as error:
        raise ReadWriteError(f"{folder} cannot be looked at: {error.strerror}") from None


def read_attempts(folder: Path, plan_id: str) -> AttemptRecords:
    """Read all records: one open for each attempt that runs or failed. Broken lines are left out."""
    identity = folder_identity(folder)
    records = AttemptRecords(own=[], foreign=[], unreadable=[])
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
        if record is None:
            continue
        if status.st_uid != os.geteuid() and not _is_log_of(folder, record.log):
            record.log = ""  # of another user: it may name any file of this one's
        is_own = record.plan_id == plan_id and record.identity == identity
        (records.own if is_own else records.foreign).append(record)
    records.own.sort(key=lambda each: (each.began, each.path.name))
    return records


def _is_log_of(folder: Path, log: str) -> bool:
    """Return whether a log lies in DATA/jobs/logs, and is no link that leads elsewhere."""
    if "\0" in log:
        return False
    logs = os.path.join(os.path.realpath(folder), LOGS_FOLDER)  # noqa: PTH118 - Path.resolve may raise
    return os.path.dirname(os.path.realpath(log)) == logs  # noqa: PTH120


def _record_of(path: Path, content: bytes) -> AttemptRecord | None:
    """Return what a record says, or None. Where a job's number came again, its last beginning counts."""
    begin: dict[str, str] = {}
    end: dict[str, str] = {}
    failures: dict[int, Failure] = {}
    section = begin
    for line in content.decode("utf-8", "replace").split("\n"):
        name, equals, value = line.partition("=")
        if line == "begin":
            begin, end, failures = {}, {}, {}
            section = begin
        elif line == "end":
            section = end
        elif line.startswith("{"):
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, OverflowError):
                failure = load_json(line.encode())
                number = int(failure["shard"])
                failures[number] = Failure(
                    shard_id=number, exit_code=int(failure["exit_code"]), reason=str(failure["reason"])
                )
        elif equals and value:
            # The first value counts: who looked at an end while Slurm knew it, before a script that lived on.
            section.setdefault(name, value)
    try:
        return _interpreted(path, begin, end, failures)
    except (ValueError, LookupError, OverflowError):
        return None


def _interpreted(
    path: Path, begin: dict[str, str], end: dict[str, str], failures: dict[int, Failure]
) -> AttemptRecord:
    """Turn the lines of a record into an AttemptRecord. Raises ValueError or KeyError where they are none."""
    began = _time_of(begin["time"])
    job_id = begin.get("SLURM_ARRAY_JOB_ID") or begin.get("SLURM_JOB_ID", "")
    num_cpus = _number(begin.get("SLURM_CPUS_PER_TASK") or begin.get("num_cpus"))
    mem_mb = _number(begin.get("SLURM_MEM_PER_NODE"))
    if "SLURM_MEM_PER_CPU" in begin:
        mem_mb = _number(begin["SLURM_MEM_PER_CPU"]) * (num_cpus or 1)
    end_time, stopped = _number(begin.get("SLURM_JOB_END_TIME")), _number(end.get("stopped"))
    return AttemptRecord(
        path=path,
        plan_id=begin["plan_id"],
        identity=begin["identity"],
        shards=ids_of_ranges(begin["shards"], end=MAX_SHARDS + 1) if "shards" in begin else [],
        started_by=begin["by"],
        began=began,
        node=begin.get("SLURMD_NODENAME") or begin.get("node", ""),
        user=begin.get("SLURM_JOB_USER") or begin.get("user", ""),
        job_id=job_id,
        index=_number(begin.get("SLURM_ARRAY_TASK_ID")),
        num_restarts=_number(begin.get("SLURM_RESTART_COUNT")),
        num_cpus=num_cpus or None,
        mem_mb=mem_mb or None,  # 0: Slurm limits nothing
        time_limit=end.get("limit", ""),
        time_min=round((end_time - began) / 60) if end_time else None,
        partition=begin.get("SLURM_JOB_PARTITION", ""),
        account=begin.get("SLURM_JOB_ACCOUNT", ""),
        qos=begin.get("SLURM_JOB_QOS", ""),
        log=begin.get("log", ""),
        pid=_number(begin.get("pid")),
        pid_began=_number(begin.get("pid_began")),
        failures=failures,
        ended=_time_of(end["time"]) if "time" in end else None,
        exit_code=_number(end.get("exit_code")),
        killed_by=_number(end.get("killed_by")),
        stage=end.get("stage", ""),
        signal=end.get("signal", ""),
        left_s=end_time - stopped if end_time and stopped else None,
        stopped_by=end.get("stopped_by", ""),
    )


def _number(text: str | None) -> int:
    """Return a whole number; 0 for none. Raises ValueError for one that no record has."""
    found = int(text or 0)
    if not -1 <= found < _MAX_NUMBER:
        raise ValueError(f"the number {found}")
    return found


def _time_of(text: str) -> float:
    """Return seconds since 1970. Raises ValueError for a time that is none."""
    found = float(text)
    if not 0 <= found <= _MAX_TIME_S:
        raise ValueError(f"the time {found}")
    return found


def remove_finished(records: Iterable[AttemptRecord], is_done: Sequence[bool]) -> None:
    """Remove the records of ended attempts whose shards are all made by now; what fails is left."""
    for record in records:
        if record.ended is not None and all(is_done[each] for each in record.shards if each < len(is_done)):
            with contextlib.suppress(OSError):
                record.path.unlink()


def append_failure(failure: Failure) -> None:
    """Write a failed shard into the record of this process, where it has one; what fails is left out."""
    if path := os.environ.get(RECORD_VARIABLE):
        content = {"shard": failure.shard_id, "exit_code": failure.exit_code}
        line = json.dumps({**content, "reason": failure.reason[:_MOST_REASON_CHARS]})
        with contextlib.suppress(OSError):
            append_bytes(Path(path), f"{line}\n".encode())


def append_end(record: AttemptRecord) -> None:
    """Write how Slurm says that an attempt ended, before Slurm forgets it; what fails is left out."""
    with contextlib.suppress(OSError):
        append_bytes(record.path, _section("end", time=record.ended, stopped_by=record.stopped_by))


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
        now, host = time.time(), socket.gethostname()
        facts: dict[str, object] = {
            "by": "submitit" if "SUBMITIT_EXECUTOR" in environ else "run",
            "plan_id": plan_id,
            "identity": folder_identity(folder),
            "shards": id_ranges(shard_ids),
            "time": round(now, 3),
            "node": host,
            "user": environ.get("USER", ""),
            "num_cpus": num_cpus,
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
    """Return when a process began, in clock ticks since boot; -1 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
