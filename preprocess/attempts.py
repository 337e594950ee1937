"""Attempt records: one file in DATA/jobs/attempts for each attempt that runs, or that left a shard unmade.

``slurm/prep_array.sh`` writes the record of a job's task, ``run`` its own: what began, each shard that
failed, and how it ended, which is missing while the attempt runs or where it was killed. These events are
JSON lines; those of the script are a word and NAME=VALUE lines. An attempt that made all its shards removes
its file, so a finished data set has none. A record names the folder that it was written in, see
``folder_identity``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardprep.errors import CannotWrite, ReadWriteError, ShardprepError
from shardprep.files import append_bytes, make_subfolder, names_in, read_with_status
from shardprep.format.json_files import load_json
from shardprep.format.names import MAX_SHARDS, id_ranges, ids_of_ranges

ATTEMPTS_FOLDER = "jobs/attempts"
LOGS_FOLDER = "jobs/logs"
HISTORY_NAME = "history.jsonl"  # in jobs/
RECORD_VARIABLE = "SHARDPREP_ATTEMPT"  # the path of this process's record
_VERSION = 1
_MAX_BYTES = 64 << 20
_MOST_REASON_CHARS = 2000
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999: a date can be written
_SLURM_NAME = re.compile(r"[0-9]{1,10}_[0-9]{1,10}\.r[0-9]{1,6}")
_RUN_NAME = re.compile(r".+-[0-9]{1,10}\.[0-9]{1,16}")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A shard that was not made."""

    shard_id: int
    exit_code: int  # of shardprep.errors; 128 + N where signal N killed the process
    reason: str

    @staticmethod
    def of(shard_id: int, error: ShardprepError) -> Failure:
        """The shard that an error stopped."""
        return Failure(shard_id=shard_id, exit_code=error.exit_code, reason=str(error))


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt at some shards, as its record says. What was not measured is None."""

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
    log: str = ""
    pid: int = 0  # of ``run``
    pid_began: int = 0  # in clock ticks since the host's boot
    failures: Mapping[int, Failure] = field(default_factory=dict)
    ended: float | None = None
    exit_code: int | None = None
    killed_by: int | None = None  # the signal that ended the worker
    stage: str = ""  # at which it ended: set-up, start, work
    signal: str = ""  # that it was told to stop by
    stopped_by: str = ""  # of a log: time limit, node failure, preemption, cancel, cancelled step; or a state
    stopped: int = 0  # when it was told so
    end_time: int = 0  # of its time limit; 0 where Slurm does not say it
    limit: str = ""  # where ``end_time`` is 0: its time limit, as squeue shows it
    partition: str = ""
    account: str = ""
    qos: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Job and index, as Slurm's queue names the task."""
        return self.job_id, self.index

    @property
    def is_out_of_memory(self) -> bool:
        """Whether Slurm said so, or its log."""
        return self.stopped_by == "OUT_OF_MEMORY"

    @property
    def left_s(self) -> float | None:
        """Seconds until its time limit when it was told to stop, as far as Slurm said its limit."""
        return self.end_time - self.stopped if self.end_time and self.stopped else None

    @property
    def time_min(self) -> int | None:
        """Its time limit."""
        return round((self.end_time - self.began) / 60) if self.end_time else None

    @property
    def is_unexplained(self) -> bool:
        """Whether the record of a task does not say why it ended: it was stopped or killed.

        What a wrapper of Python, or a container, ends with when its process is killed may be any code. Only
        a code of shardprep's own, but for 75, says why.
        """
        was_killed = any("was killed by signal" in each.reason for each in self.failures.values())
        is_bare = not self.failures and self.exit_code not in (0, 2, 65, 66, 73, 74, 78)
        return bool(self.job_id and not self.stopped_by and (is_bare or was_killed))

    def is_alive(self) -> bool | None:
        """Whether the process of a ``run`` still lives; None where that cannot be seen from this host."""
        if not self.pid or self.node != socket.gethostname():
            return None
        return _ticks_of(self.pid) == self.pid_began


@dataclass(frozen=True, kw_only=True)
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
    own: list[AttemptRecord] = []
    foreign: list[AttemptRecord] = []
    unreadable: list[str] = []
    try:
        names = names_in(folder / ATTEMPTS_FOLDER)
    except ShardprepError as error:
        return AttemptRecords(own=[], foreign=[], unreadable=[str(error)])
    for name in names:
        if not (_SLURM_NAME.fullmatch(name) or _RUN_NAME.fullmatch(name)):
            continue
        path = folder / ATTEMPTS_FOLDER / name
        try:
            content, status = read_with_status(path, max_bytes=_MAX_BYTES)
            attempt = _attempt_of(path, content)
            if attempt and status.st_uid != os.geteuid() and not _is_log_of(folder, attempt.log):
                attempt = replace(attempt, log="")  # of another user: it may name any file of this one's
        except FileNotFoundError:  # it made its shards since the folder was listed
            continue
        except ShardprepError as error:
            unreadable.append(str(error))
            continue
        if attempt is not None:
            is_own = attempt.plan_id == plan_id and attempt.identity == identity
            (own if is_own else foreign).append(attempt)
    own.sort(key=lambda each: (each.began, each.path.name))
    return AttemptRecords(own=own, foreign=foreign, unreadable=unreadable)


def _is_log_of(folder: Path, log: str) -> bool:
    """Whether a log lies in DATA/jobs/logs, and is no link that leads elsewhere."""
    if "\0" in log:
        return False
    logs = os.path.join(os.path.realpath(folder), LOGS_FOLDER)  # noqa: PTH118 - Path.resolve may raise
    return os.path.dirname(os.path.realpath(log)) == logs  # noqa: PTH120


def _whole_of(value: Any) -> int:
    """A number that a job or a process can have; -1 is a process that has gone. Raises ValueError."""
    found = int(value)
    if not -1 <= found < 1 << 63:
        raise ValueError(f"the number {found}")
    return found


# Of the first and the last line, what is kept as it is said.
_FACTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("node", "user", "job_id", "log", "stage", "signal", "stopped_by"), str),
    **dict.fromkeys(("limit", "partition", "account", "qos"), str),
    **dict.fromkeys(("index", "num_restarts", "pid", "pid_began", "num_cpus", "mem_mb"), _whole_of),
    **dict.fromkeys(("exit_code", "killed_by", "stopped", "end_time"), _whole_of),
}


def _events_of(content: bytes) -> list[Any]:
    """Return the events of a record; a line that is cut short is left out."""
    events: list[Any] = []
    for line in content.decode("utf-8", "replace").split("\n"):
        name, equals, value = line.partition("=")
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                events.append(load_json(line.encode()))
        elif line in ("begin", "end"):
            events.append({"event": line})
        elif equals and value and events and isinstance(events[-1], dict):
            events[-1].setdefault(name, value)
    return events


def _attempt_of(path: Path, content: bytes) -> AttemptRecord | None:
    """The attempt; None without a first line. Where a job's number came again, the last counts."""
    begin: dict[str, Any] = {}
    end: dict[str, Any] = {}
    failures: dict[int, Failure] = {}
    for data in _events_of(content):
        try:
            event = data.pop("event")
            if event == "begin":
                begin, end, failures = data, {}, {}
            elif event == "end":
                end = data | end  # the first counts: append_end, and a script that lived on
            elif event == "failure":
                number = int(data["shard"])
                failures[number] = Failure(
                    shard_id=number, exit_code=int(data["exit_code"]), reason=str(data["reason"])
                )
        except (ValueError, OverflowError, AttributeError, LookupError, TypeError):
            continue
    facts = {**end, **begin}
    if str(facts.get("mem_mb")) == "0":  # Slurm limits nothing
        del facts["mem_mb"]
    try:
        return AttemptRecord(
            path=path,
            plan_id=str(begin["plan_id"]),
            identity=str(begin["identity"]),
            shards=ids_of_ranges(text, end=MAX_SHARDS + 1) if (text := str(begin.get("shards", ""))) else [],
            started_by=str(begin["by"]),
            began=_time_of(begin),
            failures=failures,
            ended=_time_of(end) if "time" in end else None,
            **{name: kind(facts[name]) for name, kind in _FACTS.items() if name in facts},
        )
    except (ValueError, OverflowError, LookupError, TypeError):
        return None


def _time_of(line: Mapping[str, Any]) -> float:
    """Seconds since 1970. Raises ValueError for a time that is none."""
    found = float(line["time"])
    if not 0 <= found <= _MAX_TIME_S:
        raise ValueError(f"the time {found}")
    return found


def remove_finished(attempts: Iterable[AttemptRecord], is_done: Sequence[bool]) -> None:
    """Remove the records of ended attempts whose shards are all made by now; what fails is left."""
    for attempt in attempts:
        if attempt.ended is not None and all(is_done[each] for each in attempt.shards if each < len(is_done)):
            with contextlib.suppress(OSError):
                attempt.path.unlink()


def append_failure(failure: Failure) -> None:
    """Write a failed shard into the record of this process, where it has one; what fails is left out."""
    if path := os.environ.get(RECORD_VARIABLE):
        reason = failure.reason[:_MOST_REASON_CHARS]
        line = {"event": "failure", "shard": failure.shard_id, "exit_code": failure.exit_code}
        append_line(Path(path), {**line, "reason": reason})


def append_end(attempt: AttemptRecord) -> None:
    """Write how Slurm says that an attempt ended, before Slurm forgets it; what fails is left out."""
    end = {"event": "end", "time": attempt.ended, "stopped_by": attempt.stopped_by}
    append_line(attempt.path, end)


def append_line(path: Path, content: dict[str, Any]) -> bool:
    """Append a JSON object by one write, so that lines of several processes do not mix; whether it could."""
    try:
        append_bytes(path, json.dumps(content).encode() + b"\n")
    except OSError:
        return False
    return True


class RunRecord:
    """The record of a ``run``; within ``with``. It does nothing where a job's script keeps one already."""

    def __init__(self, folder: Path, plan_id: str, shard_ids: Iterable[int], *, num_cpus: int) -> None:
        self._path: Path | None = None
        self.exit_code = 0
        if os.environ.get(RECORD_VARIABLE):
            return
        now, environ = time.time(), os.environ
        begin: dict[str, Any] = {
            "event": "begin",
            "version": _VERSION,
            "by": "run",
            "plan_id": plan_id,
            "identity": folder_identity(folder),
            "shards": id_ranges(shard_ids),
            "time": round(now, 3),
            "node": socket.gethostname(),
            "user": environ.get("USER", ""),
            "num_cpus": num_cpus,
            "pid": os.getpid(),
            "pid_began": _ticks_of(os.getpid()),
        }
        name = f"{begin['node']}-{os.getpid()}.{int(now * 1000)}"  # a process may run twice in a second
        job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", "")
        if job_id.isdigit():
            begin |= {
                "by": "submitit" if "SUBMITIT_EXECUTOR" in environ else "run",
                "node": environ.get("SLURMD_NODENAME", begin["node"]),
                "user": environ.get("SLURM_JOB_USER", begin["user"]),
                "job_id": job_id,
                "index": environ.get("SLURM_ARRAY_TASK_ID") or "0",
                "num_restarts": environ.get("SLURM_RESTART_COUNT") or "0",
                "pid": 0,
            }
            name = f"{job_id}_{begin['index']}.r{begin['num_restarts']}"
        path = folder / ATTEMPTS_FOLDER / name
        for _ in range(2):  # another run may remove the empty folder in between
            with contextlib.suppress(CannotWrite):
                make_subfolder(folder, ATTEMPTS_FOLDER)
                if not append_line(path, begin):
                    continue
                self._path = path
                os.environ[RECORD_VARIABLE] = str(path)
                return

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._path is None:
            return
        del os.environ[RECORD_VARIABLE]
        code = self.exit_code if error is None else int(getattr(error, "exit_code", 1))
        if code == 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # the folders, where nothing else is in them
                self._path.parent.parent.rmdir()
            return
        end = {"event": "end", "time": round(time.time(), 3), "exit_code": code, "stage": "work"}
        append_line(self._path, end | ({"signal": "stop"} if code == 75 else {}))


def _ticks_of(pid: int) -> int:
    """When a process began, in clock ticks since boot; -1 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
