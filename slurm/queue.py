"""What Slurm shows of the jobs that make a data set: its submissions', those of attempts, and plain sbatch's.

squeue says what waits and runs. ``sacct -D`` is asked only how an attempt ended whose record has no end;
where there are no accounts, that is not known some minutes later. Times are UTC: a colleague's shell may have
another zone.

A job is a submission's if its id, user and time of submission are those of the record in DATA/jobs: a
controller that lost its state gives old ids to other jobs. One that Slurm started again has a later time,
and then the name decides; else a person may have changed the name. ``sbatch slurm/prep_array.sh DATA`` is
known by what was typed, and, once it runs, by its attempt's record. What cannot be seen is said to be so:
the jobs of another cluster, of another user where the site keeps jobs private, and all of them while Slurm
gives no answer. Nothing may be concluded from their absence.
"""

from __future__ import annotations

import contextlib
import getpass
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from preprocess.attempts import Attempt
from shardprep.errors import ShardprepError
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.commands import SlurmAway, SlurmMissing, SlurmRefused, read_config, seconds_of, slurm_answer
from slurm.script import CONTROL, JOB_NAME, names_begin
from slurm.submissions import JobIdentity, Submission

_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All others run: what a later Slurm calls by a new word must not be taken for an end, and sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # Slurm's own number for a task whose log could not be opened; no such signal
# StartTime: of what waits, the scheduler's estimate.
_QUEUE_FIELDS = [
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
    "StartTime",
    "EndTime",
    "RestartCnt",
    "Name",
]
_QUEUE_FORMAT = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
# JobName stands last: it alone may hold a "|".
_ACCOUNT_FIELDS = ["JobID", "State", "ExitCode", "NodeList", "ElapsedRaw", "User", "Submit", "End", "JobName"]


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
    options = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}")
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
        if not attempt.is_live or attempt.state == "REQUEUED":
            found.setdefault(attempt.key, []).append(attempt)
    queued = {attempt.key for attempt in queue}
    for key in found.keys() - queued:
        while found[key] and found[key][-1].is_live:
            found[key].pop()
    for attempt in queue:
        attempts = found.setdefault(attempt.key, [])
        if attempt.is_live or not attempts or attempts[-1].is_live:
            attempts.append(attempt)
    return {key: attempts for key, attempts in found.items() if attempts}


def parse_queue(text: str) -> list[TaskAttempt]:
    """squeue's lines -> attempts; a line of tasks that wait together becomes one each.

    Raises ValueError for a line that is cut short or no such line.
    """
    attempts = []
    for line in text.splitlines():
        values = _values((*_QUEUE_FIELDS, "WorkDir", "Command"), line, least=len(_QUEUE_FIELDS))
        indices = values["ArrayTaskID"]
        attempts += _attempts(
            values["JobID"] if indices == "N/A" else values["ArrayJobID"],
            indices,
            name=values["Name"],
            user=values["UserName"],
            submit_time=values["SubmitTime"],
            state=values["State"],
            num_restarts=int(values["RestartCnt"]),
            reason=values["Reason"],
            start_time=_local_time(values["StartTime"]),
            exit_code=_exit_code(values["exit_code"]),
            node=values["NodeList"],
            elapsed_s=seconds_of(values["TimeUsed"]) or 0,
            work_dir=values.get("WorkDir", ""),
            command=values.get("Command", "").removesuffix("|"),
        )
    return attempts


def parse_accounts(text: str) -> list[TaskAttempt]:
    """sacct's lines of allocations -> attempts. Raises ValueError for a line that is no such line."""
    attempts = []
    for line in text.splitlines():
        values = _values(_ACCOUNT_FIELDS, line)
        job_id, _, indices = values["JobID"].partition("_")
        attempts += _attempts(
            job_id,
            indices,
            name=values["JobName"],
            user=values["User"],
            submit_time=values["Submit"],
            state=values["State"].split(" ")[0],
            exit_code=_exit_code(values["ExitCode"]),
            node=values["NodeList"],
            elapsed_s=int(values["ElapsedRaw"] or 0),
        )
    return attempts


def _attempts(job_id: str, indices: str, **facts: Any) -> list[TaskAttempt]:
    if not re.fullmatch(r"[0-9]{1,10}", job_id):
        raise ValueError(f"a job id of {job_id[:40]!r}")
    return [TaskAttempt(job_id=job_id, index=index, **facts) for index in _indices(indices)]


def _indices(text: str) -> list[int]:
    """``[3-5,9%2]`` -> [3, 4, 5, 9]; [0] for a job that is no array. What Slurm cut short ends early."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    whole = [each for each in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", each)]  # ours are short
    return ids_of_ranges(",".join(whole), end=MAX_SHARDS + 1) if whole else []


def _values(names: Sequence[str], line: str, *, least: int = 0) -> dict[str, str]:
    """Name -> value; the names from ``least`` on may be missing."""
    values = line.split("|", len(names) - 1)
    if len(values) < (least or len(names)):
        raise ValueError(f"{len(values)} of {least or len(names)} fields in {line[:200]!r}")
    return dict(zip(names, values, strict=False))


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
    accounts_away: str = ""  # why its accounts gave none, where there are any
    cluster: str = ""  # which one answered

    def last_task(self, key: TaskKey) -> TaskAttempt | None:
        """What Slurm says of a task; None where it shows none."""
        return self.attempts[key][-1] if key in self.attempts else None

    @cached_property
    def _by_job(self) -> dict[tuple[str, int], list[TaskAttempt]]:
        return {(job_id, index): tasks for (_, job_id, index), tasks in self.attempts.items()}

    def task_of(self, attempt: Attempt) -> TaskAttempt | None:
        """What Slurm says of the task of an attempt, in whatever way the task was submitted.

        The accounts do not number restarts; squeue numbers the last.
        """
        tasks, number = self._by_job.get(attempt.key, []), attempt.num_restarts
        if tasks and tasks[-1].num_restarts == number:
            return tasks[-1]
        return tasks[number] if number < len(tasks) - 1 else None


def find_shown_jobs(
    folder: Path, plan_id: str, submissions: Sequence[Submission], open_attempts: Sequence[Attempt]
) -> ShownJobs:
    """Ask squeue what waits and runs, and the accounts of what it no longer shows and no record ends.

    A held job whose name is this data set's, and that no record names, is of a command that sends it just
    now, or was cut short. Raises SlurmAway.
    """
    user, begin = getpass.getuser(), names_begin(folder, plan_id)
    recorded = {job.job_id for submission in submissions for job in submission.jobs}
    plain = {each.key: each.user for each in open_attempts if each.job_id not in recorded}
    with ThreadPoolExecutor(3) as pool:
        queue = pool.submit(queued_attempts, [*recorded, *(job_id for job_id, _ in plain)])
        mine = pool.submit(own_live_attempts, user)
        config = pool.submit(read_config).result() if submissions else {}
        queued, own = queue.result(), mine.result()
    shown = ShownJobs(cluster=config.get("ClusterName", ""))
    for cluster in sorted({each.cluster for each in submissions}):
        there = [each for each in submissions if each.cluster == cluster]
        _add_submitted(shown, cluster, there, queued, open_attempts)
    if re.search(r"\b(jobs|all)\b", config.get("PrivateData", "")):
        seen = {number for number, _, _ in shown.attempts}
        for sent in submissions:
            if sent.user != user and sent.number not in seen:
                shown.hidden[sent.number] = f"this site shows the jobs of {sent.user} to {sent.user} alone"
    own = _with_typed_words(own, recorded)
    began = {(each.job_id, each.user): each.began for each in open_attempts if each.job_id not in recorded}
    tasks = [each for each in queued if plain.get(each.key) == each.user]
    keys = {each.key for each in tasks}
    ended = _accounted(shown, {job_id for job_id, index in plain if (job_id, index) not in keys})
    tasks += [
        each
        for each in ended
        if each.key not in keys and plain.get(each.key) == each.user and not each.is_live
    ]
    tasks += [
        each
        for each in own
        if each.key not in keys
        and each.job_id not in recorded
        and (_is_same_array(each, began) or _is_plain(each, folder))
    ]
    for each in tasks:
        shown.attempts.setdefault((PLAIN, *each.key), []).append(each)
    known = recorded | {each.job_id for each in tasks}
    for each in sorted(own, key=lambda each: int(each.job_id)):
        if each.name.startswith(begin) and each.job_id not in known:
            known.add(each.job_id)
            is_held = "JobHeldUser" in each.reason
            others = shown.strays if is_held else shown.unrecorded
            (shown.controllers if each.name.endswith(CONTROL) else others).append(each.job_id)
    return shown


def find_live_jobs(submissions: Sequence[Submission]) -> list[str]:
    """The jobs of submissions that wait or run; all of a cluster that gives no answer."""
    live = set[str]()
    for cluster in {each.cluster for each in submissions}:
        jobs = {job.job_id: job for each in submissions if each.cluster == cluster for job in each.jobs}
        try:
            is_here = cluster in ("", read_config().get("ClusterName"))
            queued = queued_attempts(jobs, None if is_here else cluster)
        except SlurmAway:
            live |= jobs.keys()
            continue
        live |= {
            each.job_id
            for each in queued
            if each.is_live and _is_of(jobs.get(each.job_id), each, is_later=each.num_restarts > 0)
        }
    return sorted(live, key=int)


def _accounted(shown: ShownJobs, job_ids: Iterable[str], cluster: str | None = None) -> list[TaskAttempt]:
    """What the accounts keep of these jobs; where they are away, that is noted."""
    try:
        return accounted_attempts(job_ids, cluster)
    except SlurmAway as error:
        shown.accounts_away = str(error)
        return []


def _with_typed_words(own: Sequence[TaskAttempt], recorded: set[str]) -> list[TaskAttempt]:
    """The tasks with all that was typed: a newer squeue shows the script alone, the accounts keep the line.

    Where neither says it, there is no command.
    """
    bare = {each.job_id for each in own if each.command.endswith(_SCRIPT) and each.job_id not in recorded}
    if not bare:
        return [*own]
    options = ("--allocations", "--noheader", "--parsable2", f"--jobs={','.join(sorted(bare, key=int))}")
    typed: dict[str, str] = {}
    with contextlib.suppress(ShardprepError):  # no accounts, or they are away
        lines = slurm_answer(str.splitlines, "sacct", *options, "--format=JobID,SubmitLine")
        typed = {re.split("[_|]", line)[0]: f"{_SCRIPT}{line.partition(_SCRIPT)[2]}" for line in lines}
    if bare - typed.keys() and int(read_config().get("SLURM_VERSION", "0").partition(".")[0]) < 23:
        return [*own]  # this squeue shows arguments, where there are any
    return [
        replace(each, command=typed.get(each.job_id, "")) if each.job_id in bare else each for each in own
    ]


def _is_same_array(task: TaskAttempt, began: Mapping[tuple[str, str], float]) -> bool:
    """Whether other tasks of its array have begun for this data set, after it was submitted.

    A later submission of the same id is of a controller that lost its state. Clocks may differ by minutes.
    """
    moment = began.get((task.job_id, task.user), 0) + _CLOCKS_DIFFER_S
    return task.submit_time <= datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _is_plain(task: TaskAttempt, folder: Path) -> bool:
    """Whether it is a task of ``sbatch slurm/prep_array.sh FOLDER``. squeue joins the words by blanks."""
    script, _, words = task.command.partition(" ")
    if not script or (Path(script).name != _SCRIPT and task.name != JOB_NAME):
        return False
    if not words or words.startswith("-"):
        named = re.search(r"--output_dir[ =](\S+)", words)
        return _is_same(Path(task.work_dir, named[1] if named else _DEFAULT_FOLDER), folder)
    parts = words.split(" ")
    return any(
        _is_same(Path(task.work_dir, " ".join(parts[:end])), folder) for end in range(1, len(parts) + 1)
    )


def _is_same(path: Path, folder: Path) -> bool:
    try:
        return path.samefile(folder)
    except OSError:
        return False


def _add_submitted(
    shown: ShownJobs,
    cluster: str,
    submissions: Sequence[Submission],
    queue: Sequence[TaskAttempt],
    open_attempts: Sequence[Attempt],
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
    # Of an attempt that has no end in its record and does not run, the accounts may know why.
    live = {each.key for each in queue if each.is_live}
    arrays = {array.job_id for each in submissions for array in each.arrays}
    unexplained = {each.job_id for each in open_attempts if each.key not in live} & arrays
    accounts = _accounted(shown, unexplained, asked)
    for submission in submissions:
        jobs = {job.job_id: job for job in submission.jobs}
        ended = [each for each in accounts if _is_of(jobs.get(each.job_id), each, is_later=True)]
        queued = [
            each for each in queue if _is_of(jobs.get(each.job_id), each, is_later=each.num_restarts > 0)
        ]
        for (job_id, index), attempts in attempts_by_task(ended, queued).items():
            shown.attempts[submission.number, job_id, index] = attempts


def _is_of(job: JobIdentity | None, attempt: TaskAttempt, *, is_later: bool) -> bool:
    """Whether Slurm shows this job; one that was started again has a later time."""
    if job is None or attempt.user != job.user:
        return False
    if attempt.name == job.name:
        return attempt.submit_time == job.submit_time or (is_later and attempt.submit_time > job.submit_time)
    # A person may have changed the name, but calls no job as another submission's.
    return attempt.submit_time == job.submit_time and not attempt.name.startswith(f"{JOB_NAME}-")
