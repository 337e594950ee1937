"""DATA/jobs/attempts: a record of each attempt that is running or that left a shard unmade.

``slurm/prep_array.sh`` writes the record of a job's task, ``run`` its own. It is text::

    begin               what the attempt was given: NAME=VALUE lines, including Slurm's variables
    {"shard": 3, ...}   a shard that failed, written by the worker
    end                 how it ended; missing while the attempt is running, or if it was killed

An attempt that made all its shards removes its record, so a finished data set has none. A record names the
folder that it was written in, so that records in a copy of the folder are ignored.

The file is long as its readers and writers stand together: both must agree on each line of a record.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pwd
import re
import time
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from shardprep import errors
from shardprep.errors import ShardprepError
from shardprep.folders import Folder
from shardprep.format import json_files, names
from shardprep.format.data_folder import ATTEMPTS_FOLDER, JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.jobs import TimeStamp, is_own_file

RECORD_VARIABLE = "SHARDPREP_ATTEMPT"  # contains the path of this process's record
_MAX_REASON_CHARS = 2000
_MAX_RECORD_BYTES = 64 << 20  # of a record with a message for each shard
_MAX_LINES = 2 * names.MAX_SHARDS  # of a record
_MAX_LINE_BYTES = 1 << 20
# Of all records of this user, and of all those of other users.
_MAX_ALL_BYTES = 192 << 20  # in memory, about
_MAX_ALL_LINES = 20_000_000  # which take some 20 s
MAX_FILES = 100_000  # which take some 5 s; an array has as many tasks at most
# What is kept of a record takes about as many bytes in memory.
_BYTES_OF_RECORD = 1024
_BYTES_OF_SHARD = 12  # its id, and the attempt in the list of the shard
_BYTES_OF_FAILURE = 250  # without its message
_Number = Annotated[int, Meta(ge=-1, le=json_files.MAX_INT64)]
# JOB_INDEX.rRESTART, of a ``run`` of several processes with .partI
_SLURM_NAME = re.compile(r"[0-9]{1,10}_[0-9]{1,10}\.r[0-9]{1,6}(?:\.part[0-9]{1,9})?")
_RUN_NAME = re.compile(r".+-[0-9]{1,10}\.[0-9]{1,16}")  # HOST-PID.TIME


class Failure(Struct, frozen=True, kw_only=True):
    """A shard that could not be made."""

    shard_id: _Number = field(name="shard")
    exit_code: _Number  # of shardprep.errors, or 128 + N if signal N killed the process
    reason: str

    @staticmethod
    def of(shard_id: int, error: ShardprepError) -> Failure:
        return Failure(shard_id=shard_id, exit_code=error.exit_code, reason=str(error))


class AttemptRecord(Struct, kw_only=True):
    """One attempt at some shards, from its record. Missing values are None, 0 or ""."""

    path: str = ""
    name: str = ""  # in the folder of the data set
    is_own: bool = False  # this user owns the file, and nobody else can write to it
    owner: str = ""  # of the file
    shards: Sequence[int] = field(name="shard_ids", default_factory=list)  # empty for a verify job
    failures: dict[int, Failure] = field(default_factory=dict)
    # begin
    plan_id: str
    identity: str
    began: TimeStamp = field(name="time")  # seconds since 1970, by the node's clock
    shard_ranges: str = field(name="shards", default="")
    log: str = ""
    node: str = field(name="SLURMD_NODENAME", default="")
    user: str = field(name="SLURM_JOB_USER", default="")
    array_job_id: str = field(name="SLURM_ARRAY_JOB_ID", default="")
    plain_job_id: str = field(name="SLURM_JOB_ID", default="")
    index: _Number = field(name="SLURM_ARRAY_TASK_ID", default=0)
    num_restarts: _Number = field(name="SLURM_RESTART_COUNT", default=0)
    num_cpus: _Number = field(name="SLURM_CPUS_PER_TASK", default=0)
    num_nodes: _Number = field(name="SLURM_JOB_NUM_NODES", default=0)
    mem_per_node_mb: _Number = field(name="SLURM_MEM_PER_NODE", default=0)
    mem_per_cpu_mb: _Number = field(name="SLURM_MEM_PER_CPU", default=0)
    end_time: _Number = field(name="SLURM_JOB_END_TIME", default=0)  # set from Slurm 24.11 on
    partition: str = field(name="SLURM_JOB_PARTITION", default="")
    account: str = field(name="SLURM_JOB_ACCOUNT", default="")
    qos: str = field(name="SLURM_JOB_QOS", default="")
    pid: _Number = 0  # of a ``run`` outside Slurm
    pid_began: _Number = 0  # in clock ticks since the host's boot
    # end
    ended: TimeStamp | None = field(name="end_time", default=None)
    exit_code: _Number = field(name="end_exit_code", default=0)
    killed_by: _Number = field(name="end_killed_by", default=0)  # the signal that ended the worker
    stage: str = field(name="end_stage", default="")  # in which it ended: set-up, start, work
    signal: str = field(name="end_signal", default="")  # that asked it to stop
    stopped: TimeStamp | None = field(name="end_stopped", default=None)  # when that signal came
    shown_limit: str = field(name="end_limit", default="")  # time limit as squeue shows it, such as 1:00:00
    stopped_by: str = field(name="end_stopped_by", default="")  # what Slurm did to it, see ``slurm.state``

    @property
    def job_id(self) -> str:
        """Return the id of the job or its array, or "" for a ``run`` outside Slurm."""
        return self.array_job_id or self.plain_job_id

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, which identify the task in Slurm's queue."""
        return self.job_id, self.index

    @property
    def mem_mb(self) -> int | None:
        """Return the memory of the task, or None without a limit."""
        return self.mem_per_cpu_mb * (self.num_cpus or 1) or self.mem_per_node_mb or None

    @property
    def time_limit(self) -> str:
        """Return the time limit as Slurm writes it: ``1:00:00``, or ``60`` in minutes."""
        return str(round((self.end_time - self.began) / 60)) if self.end_time else self.shown_limit

    def is_alive(self) -> bool | None:
        """Return whether the process of a ``run`` is alive, or None if it is not on this host."""
        if not self.pid or self.node != os.uname().nodename:
            return None
        return start_ticks(self.pid) == self.pid_began


_NAMES = frozenset(each.encode_name.encode() for each in msgspec.structs.fields(AttemptRecord))


@dataclass(kw_only=True)
class _Allowance:
    """What the records of this user, or those of all others, may still take."""

    num_files: int
    num_bytes: int = _MAX_ALL_BYTES
    num_lines: int = _MAX_ALL_LINES

    @property
    def is_used_up(self) -> bool:
        return min(self.num_files, self.num_bytes, self.num_lines) <= 0

    def takes(self, failure: Failure) -> bool:
        """Subtract a failure. Return whether it may be kept."""
        bytes_per_char = 1 if failure.reason.isascii() else 4
        self.num_bytes -= _BYTES_OF_FAILURE + bytes_per_char * len(failure.reason)
        return not self.is_used_up


@dataclass(kw_only=True)
class AttemptRecords:
    """The records of a data set, without those of another plan or of a folder that it was copied from."""

    of_this_folder: list[AttemptRecord]  # of all users; oldest first
    unreadable: list[str]  # messages about records that could not be read


def folder_identity(folder: DataFolder) -> str:
    """Return an id that copies of the folder do not share: inode and file system, as ``stat`` prints them."""
    # It survives a move within the file system and is equal on all nodes. Roots of file systems share inodes.
    try:
        number = os.statvfs(folder).f_fsid
        return f"{folder.path.stat().st_ino}.{(number & 0xFFFFFFFF) << 32 | number >> 32:x}"
    except OSError as error:
        raise errors.ReadWriteError(f"{folder} cannot be read: {error.strerror}", path=folder) from None


def read_attempts(
    folder: DataFolder,
    plan_id: str,
    identity: str = "",
    *,
    of_jobs: Collection[str] = (),
    prefix: str = "",
) -> AttemptRecords:
    """Read the records, one file per attempt that is running or failed. Invalid lines are ignored.

    Of this user's records, all of the jobs ``of_jobs`` count and the newest MAX_FILES others; of those of
    all other users the newest MAX_FILES. ``prefix``: of the names of the records to read.
    """
    identity = identity or folder_identity(folder)
    logs = os.path.join(os.path.realpath(folder), LOGS_FOLDER)  # noqa: PTH118 - Path.resolve may raise
    records = AttemptRecords(of_this_folder=[], unreadable=[])
    own = _Allowance(num_files=MAX_FILES)
    others = _Allowance(num_files=MAX_FILES)
    attempts = folder.subfolder(ATTEMPTS_FOLDER)
    try:
        listed = attempts.names()
    except ShardprepError as error:
        records.unreadable.append(str(error))
        return records
    listed = [name for name in listed if name.startswith(prefix)]
    if len(listed) > MAX_FILES:
        listed = _newest_first(listed, frozenset(of_jobs))
    for name in listed:
        if not (_SLURM_NAME.fullmatch(name) or _RUN_NAME.fullmatch(name)):
            continue
        is_wanted = name.partition("_")[0] in of_jobs
        try:
            if _is_beyond(attempts, name, own, others, is_wanted=is_wanted):
                continue
            content, status = attempts.read_with_status(name, max_bytes=_MAX_RECORD_BYTES)
        except FileNotFoundError:  # all its shards were made since the listing
            continue
        except ShardprepError as error:
            records.unreadable.append(str(error))
            continue
        is_own = is_own_file(status)
        allowance = own if is_own else others
        if not (is_own and is_wanted):
            allowance.num_files -= 1
        allowance.num_lines -= content.count(b"\n")
        record = _record_of(content, allowance)
        if record is None or record.plan_id != plan_id or record.identity != identity:
            continue
        allowance.num_bytes -= _BYTES_OF_RECORD + _BYTES_OF_SHARD * len(record.shards)
        record.name = f"{ATTEMPTS_FOLDER}/{name}"
        record.path = str(folder.path_of(record.name))
        record.is_own = is_own
        record.owner = _owner_name(status.st_uid)
        if status.st_uid != os.geteuid():  # another user may name any file as the log
            log = "" if "\0" in record.log else os.path.realpath(record.log)
            record.log = log if os.path.dirname(log) == logs else ""  # noqa: PTH120
        records.of_this_folder.append(record)
    if own.is_used_up or others.is_used_up:
        found = f"more than {_MAX_ALL_BYTES >> 20} MiB, {_MAX_ALL_LINES} lines or {MAX_FILES} files"
        found += ", of which the newest count"
        expected = "less; move records of old attempts away"
        path = folder.path_of(ATTEMPTS_FOLDER)
        records.unreadable.append(str(errors.BrokenShard(path=path, found=found, expected=expected)))
    records.of_this_folder.sort(key=lambda each: (each.began, each.path))
    return records


def _newest_first(listed: list[str], of_jobs: Collection[str]) -> list[str]:
    """Return names of records, those of some jobs first, then by number of the job or time of ``run``."""
    wanted: list[str] = []
    numbered: list[tuple[int, str]] = []
    for name in listed:
        job, _, _ = name.partition("_")
        if job in of_jobs:
            wanted.append(name)
        else:
            # Of a ``run`` it is in ms since 1970: such records come first.
            number = job if job.isdecimal() else name.rpartition(".")[2]
            numbered.append((int(number) if number.isdecimal() else 0, name))
    numbered.sort(reverse=True)
    return wanted + [name for _, name in numbered]


def _is_beyond(attempts: Folder, name: str, own: _Allowance, others: _Allowance, *, is_wanted: bool) -> bool:
    """Return whether a record is one too many: of this user, or of all others. Raises as ``Folder``."""
    if not own.is_used_up and not others.is_used_up:
        return False
    if own.is_used_up and others.is_used_up and not is_wanted:
        return True  # whoever owns it
    status = attempts.status_of(name)
    if status is None:
        return True
    if is_own_file(status):
        is_only_many = own.num_files <= 0 and min(own.num_bytes, own.num_lines) > 0
        return own.is_used_up and not (is_wanted and is_only_many)
    return others.is_used_up


def _record_of(content: bytes, allowance: _Allowance) -> AttemptRecord | None:
    """Parse a record, or return None. If a job id was reused, the last "begin" counts."""
    facts: dict[str, object] = {}
    failures: dict[int, Failure] = {}
    prefix = b""
    # Line by line: a list of all lines would take 50 times the memory of the file.
    for line in itertools.islice(io.BytesIO(content), _MAX_LINES):
        name, equals, value = line.rstrip(b"\n").partition(b"=")
        if name == b"begin" and not equals:
            facts = {}
            failures = {}
            prefix = b""
        elif name == b"end" and not equals:
            prefix = b"end_"
        elif len(line) > _MAX_LINE_BYTES:
            continue
        elif line.startswith(b"{"):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                failure = msgspec.json.decode(line.decode("utf-8", "replace"), type=Failure)
                if failure.shard_id < names.MAX_SHARDS and allowance.takes(failure):
                    failures[failure.shard_id] = failure
        elif value and prefix + name in _NAMES:
            # The first value counts: ``append_end`` may precede the end that a surviving script writes.
            facts.setdefault((prefix + name).decode(), value.decode("utf-8", "replace"))
    try:
        record = msgspec.convert(facts, AttemptRecord, strict=False)
        if record.shard_ranges:
            record.shards = array("I", names.ids_of_ranges(record.shard_ranges))
    except (msgspec.MsgspecError, ValueError):
        return None
    record.failures = failures
    return record


@functools.lru_cache(maxsize=256)  # a look-up may ask a server, and there are thousands of records
def _owner_name(uid: int) -> str:
    """Return the name of the user with this id, or the id."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def append_failure(failure: Failure) -> None:
    """Append a failed shard to the record of this process, if it has one. Errors are ignored."""
    record = _own_record()
    if record is not None:
        folder, name = record
        reason = failure.reason[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode()
        line = msgspec.json.encode(msgspec.structs.replace(failure, reason=reason))
        with contextlib.suppress(ShardprepError, OSError):
            folder.append(name, line + b"\n")


def append_shards(shard_ids: Iterable[int]) -> None:
    """Add shards to the record of this process, if it has one that names none. Errors are ignored."""
    record = _own_record()
    if record is not None:
        folder, name = record
        with contextlib.suppress(ShardprepError, OSError):
            folder.append(name, f"shards={names.id_ranges(shard_ids)}\n".encode())


def bad_inputs_of_job(folder: DataFolder, plan_id: str) -> dict[int, Failure]:
    """Return the shards that failed by bad input in this start of this process's job, in any of its tasks."""
    record = _own_record()
    if record is None:
        return {}
    start = re.match(r"[0-9]+_[0-9]+\.r[0-9]+", record[1].rpartition("/")[2])
    found: dict[int, Failure] = {}
    if start is None:
        return found
    for each in read_attempts(folder, plan_id, prefix=start[0]).of_this_folder:
        bad = [
            failure for failure in each.failures.values() if failure.exit_code == errors.BadInput.exit_code
        ]
        found.update((failure.shard_id, failure) for failure in bad)
    return found


def remove_own_record() -> None:
    """Remove the record of this process, which made its shards, if it has one. Errors are ignored."""
    record = _own_record()
    if record is not None:
        folder, name = record
        with contextlib.suppress(ShardprepError, OSError):
            folder.remove(name)


def _own_record() -> tuple[DataFolder, str] | None:
    """Return the data set of this process's record, and the record's name in it, or None without a record."""
    path = os.environ.get(RECORD_VARIABLE, "")
    folder, _, name = path.rpartition(f"/{ATTEMPTS_FOLDER}/")
    return (DataFolder(folder), f"{ATTEMPTS_FOLDER}/{name}") if folder and "/" not in name else None


def append_end(record: AttemptRecord) -> None:
    """Append how an attempt ended according to Slurm, before Slurm forgets it. Errors are ignored."""
    facts: dict[str, object] = {"time": record.ended, "stopped_by": record.stopped_by}
    if record.shown_limit:
        facts["limit"] = record.shown_limit
    folder = DataFolder(record.path.removesuffix(record.name))
    with contextlib.suppress(ShardprepError, OSError):
        folder.append(record.name, _section("end", **facts))


def _section(name: str, **facts: object) -> bytes:
    """Return a section of a record, to be written at once so that processes do not mix their lines."""
    lines = [f"{key}={value}" for key, value in facts.items()]
    return "\n".join([name, *(line.replace("\n", "?") for line in lines), ""]).encode("utf-8", "replace")


class RunRecord:
    """Keeps the record of a ``run`` within ``with``, unless a job's script keeps one already."""

    def __init__(
        self,
        folder: DataFolder,
        plan_id: str,
        shard_ids: Iterable[int],
        *,
        num_cpus: int,
        part: int | None = None,
    ) -> None:
        """``part``: the number of this process, if several share the shards."""
        self._folder = folder
        self._name = ""
        self.exit_code = 0
        if os.environ.get(RECORD_VARIABLE):
            return
        now = time.time()
        host = os.uname().nodename
        facts: dict[str, object] = {"plan_id": plan_id, "identity": folder_identity(folder)}
        facts |= {"shards": names.id_ranges(shard_ids), "time": round(now, 3)}
        facts |= {"SLURMD_NODENAME": host, "SLURM_CPUS_PER_TASK": num_cpus}
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        if job_id.isdigit():
            facts |= {name: value for name, value in os.environ.items() if re.match("SLURMD?_", name)}
            index = os.environ.get("SLURM_ARRAY_TASK_ID")
            restarts = os.environ.get("SLURM_RESTART_COUNT")
            name = f"{job_id}_{index or 0}.r{restarts or 0}"
            if part is not None:
                name += f".part{part}"
        else:
            facts |= {"pid": os.getpid(), "pid_began": start_ticks(os.getpid())}
            name = f"{host}-{os.getpid()}.{int(now * 1000)}"  # one process may call run twice in a second
        place = f"{ATTEMPTS_FOLDER}/{name}"
        for _ in range(2):  # another run may remove the empty folder in between
            with contextlib.suppress(ShardprepError, OSError):
                folder.make_subfolder(ATTEMPTS_FOLDER)
                # Nobody else may write to it: commands act on what it says.
                folder.append(place, _section("begin", **facts), mode=0o644)
                self._name = place
                os.environ[RECORD_VARIABLE] = os.path.abspath(folder.path_of(place))  # noqa: PTH100
                return

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._name:
            return
        del os.environ[RECORD_VARIABLE]
        code = self.exit_code if error is None else int(getattr(error, "exit_code", 1))
        with contextlib.suppress(ShardprepError, OSError):
            if code:
                signal = "stop" if code == 75 else ""
                end = _section("end", time=round(time.time(), 3), exit_code=code, stage="work", signal=signal)
                self._folder.append(self._name, end)
                return
            self._folder.remove(self._name)
            self._folder.remove_subfolder(ATTEMPTS_FOLDER)  # if it is empty
            self._folder.remove_subfolder(JOBS_FOLDER)


def start_ticks(pid: int) -> int:
    """Return when a process began, in clock ticks since boot, or -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
