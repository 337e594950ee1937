"""What Slurm shows of the jobs that make a data set: its submissions', those of attempts, and plain sbatch's.

squeue says what waits and runs, and how a job ended for some minutes more (MinJobAge). Times are UTC: a
colleague's shell may have another zone.

A job is a submission's if its id, user and time of submission are those of the record in DATA/jobs: a
controller that lost its state gives old ids to other jobs. One that Slurm started again has a later time,
and then the name decides; else a person may have changed the name. ``sbatch slurm/prep_array.sh DATA`` is
known by what was typed, and, once it runs, by its attempt's record. What cannot be seen is said to be so:
the jobs of another cluster, of another user where the site keeps jobs private, and all of them while Slurm
gives no answer. Nothing may be concluded from their absence.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from preprocess.attempts import Attempt
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.commands import (
    SlurmAway,
    SlurmRefused,
    read_config,
    seconds_of,
    slurm_answer,
    user_name,
)
from slurm.script import CONTROL, JOB_NAME, names_begin
from slurm.submissions import JobIdentity, Submission

_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All others run: what a later Slurm calls by a new word must not be taken for an end, and sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
_TIME = "%Y-%m-%dT%H:%M:%S"
SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # Slurm's own number for a task whose log could not be opened; no such signal


@dataclass(frozen=True, kw_only=True)
class TaskAttempt(JobIdentity):
    """One start of one array task by Slurm. A task that Slurm requeues has several, each submitted later."""

    index: int  # 0 for a job that is no array
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    num_restarts: int = 0
    reason: str = ""
    start_time: str = ""  # local; where it waits: when the scheduler expects it to start, if it says so
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0
    work_dir: str = ""
    command: str = ""  # the script and its arguments, joined by blanks

    @property
    def key(self) -> tuple[str, int]:
        return self.job_id, self.index

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def is_live(self) -> bool:
        """It waits or runs; suspended, too."""
        return self.state not in _ENDED


def _exit_code(text: str) -> int:
    """A shell's exit code, of ``65:0`` (squeue from 23.02 on) or ``16640`` (as wait() has it)."""
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
        return datetime.strptime(f"{text}+0000", f"{_TIME}%z").astimezone().strftime(_TIME)
    except ValueError:
        return ""


# What squeue is asked for -> the field of TaskAttempt. A command may hold a "|", so it stands last.
# StartTime: of what waits, the scheduler's estimate.
_QUEUE_FIELDS = {
    "ArrayJobID": "job_id", "ArrayTaskID": "index", "State": "state", "Reason": "reason",
    "exit_code": "exit_code", "NodeList": "node", "TimeUsed": "elapsed_s", "JobID": "", "UserName": "user",
    "SubmitTime": "submit_time", "StartTime": "start_time", "EndTime": "", "RestartCnt": "num_restarts",
    "Name": "name",
}  # fmt: skip
_TYPED_FIELDS = {"WorkDir": "work_dir", "Command": "command"}
_READERS: dict[str, Callable[[str], Any]] = {  # of the fields that are no plain texts
    "state": lambda text: text.split(" ")[0],  # CANCELLED by 0
    "num_restarts": int,
    "start_time": _local_time,
    "exit_code": _exit_code,
    "elapsed_s": lambda text: int(text) if text.isdecimal() else seconds_of(text) or 0,
    "command": lambda text: text.removesuffix("|"),
}


def parse_queue(text: str) -> list[TaskAttempt]:
    """squeue's lines -> attempts; a line of tasks that wait together becomes one each.

    Raises ValueError for a line that is cut short or no such line.
    """
    fields, least = _QUEUE_FIELDS | _TYPED_FIELDS, len(_QUEUE_FIELDS)
    attempts = []
    for line in text.splitlines():
        values = line.split("|", len(fields) - 1)
        if len(values) < least:
            raise ValueError(f"{len(values)} of {least} fields in {line[:200]!r}")
        named = zip(fields.values(), values, strict=False)
        facts = {name: _READERS.get(name, str)(value) for name, value in named if name}
        job_id, index = facts.pop("job_id"), facts.pop("index")
        if not re.fullmatch(r"[0-9]{1,10}", job_id):
            raise ValueError(f"a job id of {job_id[:40]!r}")
        attempts += [TaskAttempt(job_id=job_id, index=each, **facts) for each in _indices(index)]
    return attempts


def _indices(text: str) -> list[int]:
    """``[3-5,9%2]`` -> [3, 4, 5, 9]; [0] for a job that is no array. What Slurm cut short ends early."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    whole = [each for each in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", each)]  # ours are short
    return ids_of_ranges(",".join(whole), end=MAX_SHARDS + 1) if whole else []


def _ask(
    parse: Callable[[str], list[TaskAttempt]], nothing: str, *command: str, cluster: str | None = None
) -> list[TaskAttempt]:
    """What a command shows; [] where it refuses with the words ``nothing``.

    Raises SlurmAway: a question has no wrong form, so whatever else is refused may be answered later.
    """
    try:
        return slurm_answer(parse, *command, cluster=cluster)
    except SlurmRefused as error:
        if nothing in str(error):
            return []
        raise SlurmAway(str(error)) from None


def _queued(*options: str, typed: bool = False, cluster: str | None = None) -> list[TaskAttempt]:
    names = _QUEUE_FIELDS | (_TYPED_FIELDS if typed else {})
    layout = ",".join(f"{name}:|" for name in names)
    command = ("squeue", "--noheader", *options, "--Format", layout)
    return _ask(parse_queue, "Invalid job id", *command, cluster=cluster)


def queued_attempts(job_ids: Iterable[str], cluster: str | None = None) -> list[TaskAttempt]:
    """What squeue still shows of these jobs: what waits and runs, and what ended some minutes ago.

    Raises SlurmAway.
    """
    ids = sorted(set(job_ids), key=int)
    if not ids:
        return []
    # Two ids at least: asked for a single one that it has forgotten, squeue ends with an error.
    listed = ",".join(ids if len(ids) > 1 else [*ids, "1"])
    return _queued("--array", "--states=all", f"--jobs={listed}", cluster=cluster)


TaskKey = tuple[int, str, int]  # number of the submission (PLAIN: of none), job id, index in the array
PLAIN = -1  # index N makes shard N
_SCRIPT = "prep_array.sh"
_DEFAULT_FOLDER = "/data/processed"  # of that script
_CLOCKS_DIFFER_S = 600


@dataclass(kw_only=True)
class ShownJobs:
    """What Slurm shows of a data set's jobs."""

    attempts: dict[TaskKey, list[TaskAttempt]] = field(default_factory=dict)  # of a task, oldest first
    hidden: dict[int, str] = field(default_factory=dict)  # number of a submission -> why it is not shown
    controllers: list[str] = field(default_factory=list)  # jobs of submit --until_done
    strays: list[str] = field(default_factory=list)  # held jobs of ours that no record names
    unrecorded: list[str] = field(default_factory=list)  # others, which wait or run
    away: str = ""  # why Slurm gave no answer
    cluster: str = ""  # which one answered

    def last_task(self, key: TaskKey) -> TaskAttempt | None:
        """What Slurm says of a task; None where it shows none."""
        return self.attempts[key][-1] if key in self.attempts else None

    @cached_property
    def _by_job(self) -> dict[tuple[str, int], list[TaskAttempt]]:
        return {(job_id, index): tasks for (_, job_id, index), tasks in self.attempts.items()}

    def task_of(self, attempt: Attempt) -> TaskAttempt | None:
        """What Slurm says of the task of an attempt, in whatever way the task was submitted.

        squeue shows the last start of a task alone.
        """
        tasks = self._by_job.get(attempt.key, [])
        return tasks[-1] if tasks and tasks[-1].num_restarts == attempt.num_restarts else None


def find_shown_jobs(
    folder: Path, plan_id: str, submissions: Sequence[Submission], open_attempts: Sequence[Attempt]
) -> ShownJobs:
    """Ask squeue what waits and runs.

    A held job whose name is this data set's, and that no record names, is of a command that sends it just
    now, or was cut short. Raises SlurmAway.
    """
    user = user_name()
    recorded = {job.job_id for submission in submissions for job in submission.jobs}
    plain = {each.key: each for each in open_attempts if each.job_id not in recorded}
    with ThreadPoolExecutor(3) as pool:
        queue = pool.submit(queued_attempts, [*recorded, *(job_id for job_id, _ in plain)])
        mine = pool.submit(_queued, f"--user={user}", typed=True)
        asked = pool.submit(read_config) if submissions else None
        queued = queue.result()
        own = [each for each in mine.result() if each.is_live and each.job_id not in recorded]
        is_plain = any(each.command.endswith(_SCRIPT) for each in own)
        config = asked.result() if asked else read_config() if is_plain else {}
    shown = ShownJobs(cluster=config.get("ClusterName", ""))
    for cluster in sorted({each.cluster for each in submissions}):
        there = [each for each in submissions if each.cluster == cluster]
        _add_submitted(shown, cluster, there, queued)
    if re.search(r"\b(jobs|all)\b", config.get("PrivateData", "")):
        seen = {number for number, _, _ in shown.attempts}
        for sent in submissions:
            if sent.user != user and sent.number not in seen:
                shown.hidden[sent.number] = f"this site shows the jobs of {sent.user} to {sent.user} alone"
    tasks = _plain_tasks(folder, plain, queued, own, config.get("SLURM_VERSION", "0"))
    for each in tasks:
        shown.attempts.setdefault((PLAIN, *each.key), []).append(each)
    known, begin = {each.job_id for each in tasks}, names_begin(folder, plan_id)
    for each in sorted(own, key=lambda each: int(each.job_id)):
        if each.name.startswith(begin) and each.job_id not in known:
            known.add(each.job_id)
            others = shown.strays if "JobHeldUser" in each.reason else shown.unrecorded
            (shown.controllers if each.name.endswith(CONTROL) else others).append(each.job_id)
    return shown


def _plain_tasks(
    folder: Path,
    attempts: Mapping[tuple[str, int], Attempt],
    queued: Iterable[TaskAttempt],
    own: Sequence[TaskAttempt],
    version: str,
) -> list[TaskAttempt]:
    """The tasks of plain sbatch: those of attempts without an end, and this user's own that make a shard."""

    def has_record(task: TaskAttempt) -> bool:
        return task.key in attempts and task.user == attempts[task.key].user

    tasks = [each for each in queued if has_record(each)]
    keys = {each.key for each in tasks}
    began = {(each.job_id, each.user): each.began for each in attempts.values()}
    # squeue from 23 on shows the script without its arguments: a task is known once one of its array began.
    has_words = int(version.partition(".")[0]) < 23
    others = [each for each in own if each.key not in keys]
    return tasks + [
        each
        for each in others
        if _is_same_array(each, began)
        or ((has_words or " " in each.command) and _makes_shard_of(each, folder))
    ]


def find_live_jobs(submissions: Sequence[Submission]) -> list[str]:
    """The jobs of submissions that wait or run; all of a cluster that gives no answer."""
    live = set[str]()
    for cluster in {each.cluster for each in submissions}:
        there = [each for each in submissions if each.cluster == cluster]
        job_ids = {job.job_id for each in there for job in each.jobs}
        try:
            is_here = cluster in ("", read_config().get("ClusterName"))
            queued = queued_attempts(job_ids, None if is_here else cluster)
        except SlurmAway:
            live |= job_ids
            continue
        live |= {each.job_id for sent in there for each in _jobs_of(sent, queued) if each.is_live}
    return sorted(live, key=int)


def _is_same_array(task: TaskAttempt, began: Mapping[tuple[str, str], float]) -> bool:
    """Whether other tasks of its array have begun for this data set, after it was submitted.

    A later submission of the same id is of a controller that lost its state. Clocks may differ by minutes.
    """
    moment = began.get((task.job_id, task.user), 0) + _CLOCKS_DIFFER_S
    return task.submit_time <= datetime.fromtimestamp(moment, timezone.utc).strftime(_TIME)


def _makes_shard_of(task: TaskAttempt, folder: Path) -> bool:
    """Whether it is a task of ``sbatch slurm/prep_array.sh FOLDER``. squeue joins the words by blanks."""
    script, _, words = task.command.partition(" ")
    if not script or (Path(script).name != _SCRIPT and task.name != JOB_NAME):
        return False
    if not words or words.startswith("-"):
        named = re.search(r"--output_dir[ =](\S+)", words)
        places = [named[1] if named else _DEFAULT_FOLDER]
    else:
        parts = words.split(" ")
        places = [" ".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for place in places:
        with contextlib.suppress(OSError):
            if Path(task.work_dir, place).samefile(folder):
                return True
    return False


def _add_submitted(
    shown: ShownJobs,
    cluster: str,
    submissions: Sequence[Submission],
    queue: Sequence[TaskAttempt],
) -> None:
    """Add the tasks of the submissions to one cluster. ``queue``: what this host's cluster shows."""
    asked = None
    if cluster not in ("", shown.cluster):
        asked = cluster
        try:
            queue = queued_attempts([job.job_id for each in submissions for job in each.jobs], asked)
        except SlurmAway:
            why = f"cluster {cluster} cannot be seen from {shown.cluster}"
            shown.hidden |= {each.number: why for each in submissions}
            return
    for sent in submissions:
        for each in _jobs_of(sent, queue):
            shown.attempts.setdefault((sent.number, *each.key), []).append(each)


def _jobs_of(submission: Submission, attempts: Iterable[TaskAttempt]) -> list[TaskAttempt]:
    """Those of the attempts that are of its jobs. One that was started again has a later time."""
    jobs = {job.job_id: job for job in submission.jobs}

    def is_own(attempt: TaskAttempt) -> bool:
        job = jobs.get(attempt.job_id)
        if job is None or attempt.user != job.user:
            return False
        if attempt.name == job.name:
            return attempt.submit_time == job.submit_time or (
                attempt.num_restarts > 0 and attempt.submit_time > job.submit_time
            )
        # A person may have changed the name, but calls no job as another submission's.
        return attempt.submit_time == job.submit_time and not attempt.name.startswith(f"{JOB_NAME}-")

    return [each for each in attempts if is_own(each)]
