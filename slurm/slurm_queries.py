"""Reads what Slurm knows of our jobs.

squeue says what waits and runs, ``sacct -D`` says what has ended. Both print lines; each line becomes one
TaskAttempt per task. ``attempts_by_task`` joins the two. squeue must answer; the accounts may be missing,
and then what ended some minutes ago is not known here. Times are UTC: a colleague's shell may have another
zone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.slurm_commands import SlurmAway, SlurmMissing, SlurmRefused, slurm_answer

_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All others run: what a later Slurm calls by a new word must not be taken for an end, and sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # Slurm's own number for a task whose log could not be opened; no such signal
_QUEUE_FIELDS = (
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "Reason",
    "exit_code",
    "NodeList",
    "TimeUsed",
    "JobID",
    "UserName",
    "SubmitTime",
    "StartTime",  # of what waits: the scheduler's estimate
    "EndTime",
    "RestartCnt",
    "Name",
)
_QUEUE_FORMAT = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
_ACCOUNT_FIELDS = (
    "JobID",
    "State",
    "ExitCode",
    "NodeList",
    "ElapsedRaw",
    "TotalCPU",
    "AllocCPUS",
    "MaxRSS",
    "User",
    "Submit",
    "End",
    "JobName",  # last: it alone may hold a "|"
)


@dataclass(frozen=True, kw_only=True)
class TaskAttempt:
    """One start of one array task by Slurm. A task that Slurm requeues has several."""

    job_id: str
    name: str  # of the job
    user: str
    submit_time: str  # of the controller's clock, UTC, 2026-11-22T01:52:04; a requeue makes it later
    index: int  # 0 for a job that is no array
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    num_restarts: int = 0
    reason: str = ""
    start_time: str = ""  # local; where it waits: when the scheduler expects it to start, if it says so
    end_time: str = ""
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0
    cpu_s: float = 0.0
    num_cpus: int = 0
    max_rss_bytes: int = 0
    work_dir: str = ""
    command: str = ""  # the script and its arguments, joined by blanks

    @property
    def key(self) -> tuple[str, int]:
        return self.job_id, self.index

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def is_running(self) -> bool:
        """It has begun and not ended; suspended, too."""
        return self.state not in _WAITING | _ENDED

    @property
    def is_suspended(self) -> bool:
        return self.state in _SUSPENDED

    @property
    def is_live(self) -> bool:
        """It waits or runs."""
        return self.state not in _ENDED


def queued_attempts(job_ids: Iterable[str], cluster: str | None = None) -> list[TaskAttempt]:
    """What squeue still shows of these jobs: what waits and runs, and what ended some minutes ago.

    Raises SlurmAway: a question has no wrong form, so whatever squeue refuses may be answered later.
    """
    ids = sorted(set(job_ids), key=int)
    if not ids:
        return []
    # Two ids at least: asked for a single one that it has forgotten, squeue ends with an error.
    listed = ",".join(ids if len(ids) > 1 else [*ids, "1"])
    options = ("--noheader", "--array", "--states=all", f"--jobs={listed}", "--Format", _QUEUE_FORMAT)
    try:
        return slurm_answer(parse_queue, "squeue", *options, cluster=cluster)
    except SlurmRefused as error:
        if "Invalid job id" in str(error):
            return []
        raise SlurmAway(str(error)) from None


def own_live_attempts(user: str) -> list[TaskAttempt]:
    """All jobs of a user that wait or run, with what was typed to submit them. Raises SlurmAway."""
    options = ("--noheader", f"--user={user}", "--Format", f"{_QUEUE_FORMAT},WorkDir:|,Command:|")
    try:
        return [each for each in slurm_answer(parse_queue, "squeue", *options) if each.is_live]
    except SlurmRefused as error:
        raise SlurmAway(str(error)) from None


def accounted_attempts(job_ids: Iterable[str], cluster: str | None = None) -> list[TaskAttempt]:
    """What the accounts keep of these jobs, a requeued task's earlier attempts first; [] without accounts.

    Raises SlurmAway where there are accounts and their server gives no answer.
    """
    ids = sorted(set(job_ids), key=int)
    if not ids:
        return []
    options = ("--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}")
    fields = f"--format={','.join(_ACCOUNT_FIELDS)}"
    try:
        return slurm_answer(parse_accounts, "sacct", *options, fields, cluster=cluster)
    except SlurmMissing:
        return []
    except SlurmRefused as error:
        if "is disabled" in str(error):  # 'Slurm accounting storage is disabled'
            return []
        raise SlurmAway(str(error)) from None


def attempts_by_task(
    accounts: Iterable[TaskAttempt], queue: Sequence[TaskAttempt]
) -> dict[tuple[str, int], list[TaskAttempt]]:
    """(job, index) -> its attempts, oldest first; what squeue says of the last one is the newer truth.

    Only squeue can say that a task waits or runs: the accounts lag, and where they missed the end of a job
    they show it as running for ever.
    """
    found: dict[tuple[str, int], list[TaskAttempt]] = {}
    for attempt in accounts:
        found.setdefault(attempt.key, []).append(attempt)
    for attempt in queue:
        attempts = found.setdefault(attempt.key, [])
        if attempt.is_live:
            # The accounts have this attempt as well unless it waits again after a requeue.
            if attempts and attempts[-1].is_live and attempts[-1].state != "REQUEUED":
                attempts.pop()
            attempts.append(attempt)
        elif not attempts or attempts[-1].is_live:
            attempts[-1:] = [attempt]
    queued = {attempt.key for attempt in queue}
    for key in found.keys() - queued:
        if found[key][-1].is_live:
            del found[key][-1]
    return {key: attempts for key, attempts in found.items() if attempts}


def parse_queue(text: str) -> list[TaskAttempt]:
    """squeue's lines -> attempts; a line of tasks that wait together becomes one each.

    Raises ValueError for a line that is cut short or no such line.
    """
    attempts = []
    for line in text.splitlines():
        values = _values((*_QUEUE_FIELDS, "WorkDir", "Command"), line, least=len(_QUEUE_FIELDS))
        job_id = values["JobID"] if values["ArrayTaskID"] == "N/A" else values["ArrayJobID"]
        attempt = TaskAttempt(
            job_id=_job_id(job_id),
            name=values["Name"],
            user=values["UserName"],
            submit_time=values["SubmitTime"],
            index=0,
            state=values["State"],
            num_restarts=int(values["RestartCnt"]),
            reason=values["Reason"],
            start_time=_local_time(values["StartTime"]),
            end_time=values["EndTime"],
            exit_code=_exit_code(values["exit_code"]),
            node=values["NodeList"],
            elapsed_s=seconds_of(values["TimeUsed"]),
            work_dir=values.get("WorkDir", ""),
            command=values.get("Command", "").removesuffix("|"),
        )
        attempts += [dataclasses.replace(attempt, index=index) for index in _indices(values["ArrayTaskID"])]
    return attempts


def parse_accounts(text: str) -> list[TaskAttempt]:
    """sacct's lines -> attempts. Steps come after their job: they add memory, and the truth of an OOM.

    A step that ran out of memory under a script that went on leaves the job FAILED, even COMPLETED.
    Raises ValueError for a line that is cut short or no such line.
    """
    attempts: list[TaskAttempt] = []
    for line in text.splitlines():
        values = _values(_ACCOUNT_FIELDS, line)
        job, _, step = values["JobID"].partition(".")
        state = values["State"].split(" ")[0]
        rss = bytes_of(values["MaxRSS"])
        if step:
            if attempts and rss > attempts[-1].max_rss_bytes:
                attempts[-1] = dataclasses.replace(attempts[-1], max_rss_bytes=rss)
            if attempts and state == "OUT_OF_MEMORY" and attempts[-1].state in ("FAILED", "COMPLETED"):
                attempts[-1] = dataclasses.replace(attempts[-1], state=state)
            continue
        job_id, _, indices = job.partition("_")
        attempt = TaskAttempt(
            job_id=_job_id(job_id),
            name=values["JobName"],
            user=values["User"],
            submit_time=values["Submit"],
            index=0,
            state=state,
            end_time=values["End"],
            exit_code=_exit_code(values["ExitCode"]),
            node=values["NodeList"],
            elapsed_s=int(values["ElapsedRaw"] or 0),
            cpu_s=float(seconds_of(values["TotalCPU"])),
            num_cpus=int(values["AllocCPUS"] or 0),
            max_rss_bytes=rss,
        )
        attempts += [dataclasses.replace(attempt, index=index) for index in _indices(indices)]
    return attempts


def _indices(text: str) -> list[int]:
    """``[3-5,9%2]`` -> [3, 4, 5, 9]; [0] for a job that is no array. What Slurm cut short ends early."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    whole = [
        part for part in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", part)
    ]  # none of ours is longer
    return ids_of_ranges(",".join(whole), end=MAX_SHARDS + 1) if whole else []


def _values(names: Sequence[str], line: str, *, least: int = 0) -> dict[str, str]:
    """Name -> value; the names from ``least`` on may be missing."""
    values = line.split("|", len(names) - 1)
    if len(values) < (least or len(names)):
        raise ValueError(f"{len(values)} of {least or len(names)} fields in {line[:200]!r}")
    return dict(zip(names, values, strict=False))


def _job_id(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ValueError(f"a job id of {text[:40]!r}")
    return text


def _exit_code(text: str) -> int:
    """A shell's exit code, of ``65:0`` (squeue from 23.02 on, and sacct) or ``16640`` (as wait() has it)."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"an exit code of {text[:40]!r}")
    code, killed_by = int(match[1] or 0), int(match[2] or 0)
    if match[2] is None:
        code, killed_by = code >> 8, code & 0x7F
    if killed_by == LOG_NOT_OPENED - 128:
        return LOG_NOT_OPENED
    return code or (128 + killed_by if killed_by else 0)


def _local_time(text: str) -> str:
    """Slurm's ``2026-11-22T01:52:04`` in UTC, as this machine's people write it; "" where it is no time."""
    try:
        moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return ""
    return moment.astimezone().strftime("%Y-%m-%dT%H:%M:%S")


def seconds_of(text: str) -> int:
    """``1-02:03:04``, ``02:03:04``, ``02:03`` or ``00:00.931`` -> whole seconds; 0 for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text)
    if not match:
        return 0
    days, hours, minutes, seconds = (int(item or 0) for item in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def bytes_of(text: str) -> int:
    """sacct's ``298188K`` -> bytes."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    if not match:
        return 0
    return int(float(match[1]) * 1024 ** (" KMGT".index(match[2] or " ")))
