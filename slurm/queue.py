"""The jobs of a data set, as squeue shows them.

squeue is asked for the jobs of a user, because slurmctld answers a list of ids with its whole job table. A
job belongs to a submission if its id, user and submit time are in the record: a controller that lost its
state gives old ids to other jobs. A requeued job has a later submit time, and must have the same name;
otherwise a user may have renamed it. Jobs of plain ``sbatch slurm/prep_array.sh DATA`` are known from the
records of their tasks, once one has begun. The absence of a job proves nothing if jobs may be hidden.

A job of this user belongs to the data set only by an own record or by its name. Records that other users
wrote name jobs of these users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from time import sleep
from typing import Any, Literal

from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import AttemptRecord, Submission, user_name
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.commands import SlurmAway, SlurmRefused, read_config, seconds_of, slurm_answer

StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]
JOB_NAME = "shardprep"
VERIFY, CONTROL = "-verify", "-control"  # suffixes of the names of such jobs
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All other states count as running: a new state of a later Slurm must not cause shards to be sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
_TIME = "%Y-%m-%dT%H:%M:%S"
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # a task whose log could not be opened; Slurm reports "signal" 53
PLAIN = -1  # in place of a submission's number, for plain sbatch: index N makes shard N
_CLOCKS_DIFFER_S = 600
_ASK_AGAIN_S = 0.5  # after an empty answer


def job_name_prefix(folder: Path, plan_id: str) -> str:
    """Return the prefix of the names of a data set's jobs; the number of the submission follows it."""
    return f"{JOB_NAME}-{plan_id[:12]}-{job_files.folder_identity(DataFolder(folder))}-"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or the last start of an array's task, as squeue shows it."""

    job_id: str
    index: int  # 0 for a job that is not an array
    name: str
    user: str
    submit_time: str  # by the controller's clock, in UTC: 2026-11-22T01:52:04
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    num_restarts: int = 0
    reason: str = ""
    start_time: str = ""  # local; while the job waits, when the scheduler expects it to start, or ""
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0
    time_limit: str = ""  # as Slurm writes it, such as 1:00:00; "" without a limit

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, as a record names the task."""
        return self.job_id, self.index

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def waits_for(self) -> str:
        """Return Slurm's reason for waiting, or "suspended", or ""."""
        other = "suspended" if self.state in _SUSPENDED else ""
        return self.reason if self.is_waiting else other

    @property
    def is_live(self) -> bool:
        """Return whether it waits, runs or is suspended."""
        return self.state not in _ENDED

    @property
    def state_of_shards(self) -> StateName:
        return "pending" if self.is_waiting else "running" if self.is_live else "failed"


def _exit_code(text: str) -> int:
    """Parse ``65:0`` (squeue from 23.02 on) or the wait status ``16640`` into a shell's exit code."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"exit code {text[:40]!r}")
    code, killed_by = int(match[1] or 0), int(match[2] or 0)
    if match[2] is None:
        code, killed_by = code >> 8, code & 0x7F
    if killed_by == LOG_NOT_OPENED - 128:
        return LOG_NOT_OPENED
    return code or (128 + killed_by if killed_by else 0)


def _local_time(text: str) -> str:
    """Convert a time of Slurm in UTC, ``2026-11-22T01:52:04``, to the local time zone, or return ""."""
    try:
        return datetime.strptime(f"{text}+0000", f"{_TIME}%z").astimezone().strftime(_TIME)
    except ValueError:
        return ""


# Field of squeue --Format -> field of Job.
_FIELDS = {
    "ArrayJobID": "job_id", "ArrayTaskID": "index", "State": "state", "Reason": "reason",
    "exit_code": "exit_code", "NodeList": "node", "TimeUsed": "elapsed_s", "JobID": "", "UserName": "user",
    "SubmitTime": "submit_time", "StartTime": "start_time", "TimeLimit": "time_limit",
    "RestartCnt": "num_restarts", "Name": "name",
}  # fmt: skip


def parse_queue(text: str) -> list[Job]:
    """Parse squeue's lines into jobs, one for each waiting task. Raises ValueError."""
    jobs = []
    for line in text.splitlines():
        values = line.split("|", len(_FIELDS))
        if len(values) <= len(_FIELDS):
            raise ValueError(f"{len(values) - 1} of {len(_FIELDS)} fields in {line[:200]!r}")
        facts: dict[str, Any] = dict(zip(_FIELDS.values(), values, strict=False))
        del facts[""]
        if not re.fullmatch(r"[0-9]{1,10}", facts["job_id"]):
            raise ValueError(f"job id {facts['job_id'][:40]!r}")
        facts["state"] = facts["state"].split(" ")[0]  # CANCELLED by 0
        facts["num_restarts"] = int(facts["num_restarts"])
        facts["start_time"] = _local_time(facts["start_time"])
        facts["exit_code"] = _exit_code(facts["exit_code"])
        facts["elapsed_s"] = seconds_of(facts["elapsed_s"]) or 0
        facts["time_limit"] = facts["time_limit"] if seconds_of(facts["time_limit"]) else ""
        facts["node"] = "" if facts["node"].startswith("None") else facts["node"]
        jobs += [Job(**{**facts, "index": index}) for index in _indices(facts["index"])]
    return jobs


def _indices(text: str) -> list[int]:
    """Parse ``[3-5,9%2]`` into [3, 4, 5, 9]. A job that is not an array gives [0]."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    own = [each for each in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", each)]  # longer: not ours
    return ids_of_ranges(",".join(own), end=MAX_SHARDS + 1) if own else []


def jobs_of_user(user: str) -> list[Job]:
    """Return a user's jobs as squeue shows them. Raises SlurmAway, also if squeue refuses to answer."""
    layout = ",".join(f"{name}:|" for name in _FIELDS)
    command = ("squeue", "--noheader", f"--user={user}", "--states=all", "--Format", layout)
    try:
        return slurm_answer(parse_queue, *command)
    except SlurmRefused as error:
        if "Invalid user" in str(error):  # the user's account was deleted
            return []
        raise SlurmAway(found=error.found) from None


@dataclass(kw_only=True)
class Queue:
    """The jobs of a data set, as Slurm shows them."""

    # (number of the submission or PLAIN, job id, index in the array) -> job
    jobs: dict[tuple[int, str, int], Job] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)  # id of a job that is not visible -> why not
    controllers: list[str] = field(default_factory=list)  # ids of jobs of --until_done
    unrecorded: list[str] = field(default_factory=list)  # ids of this user's live jobs without a record
    foreign: list[str] = field(default_factory=list)  # live jobs of the folder that this one was copied from
    away: str = ""  # why Slurm did not answer
    config: dict[str, str] = field(default_factory=dict)  # of the controller

    def tasks(self) -> dict[tuple[str, int], Job]:
        """Return (job id, index), the key of a record, -> the last start of the task."""
        return {job.key: job for job in self.jobs.values()}


def find_queue(
    folder: Path,
    plan_id: str,
    submissions: Sequence[Submission],
    copied: Sequence[Submission],
    open_records: Sequence[AttemptRecord],
    config: dict[str, str],
) -> Queue:
    """Ask squeue for the jobs of each user who may have jobs for the data set. Raises SlurmAway.

    ``copied``: submissions of the folder that this one was copied from. ``config``: of the controller, or {}.
    """
    me = user_name()
    recorded = {job.job_id for sent in submissions for job in sent.jobs if sent.is_own}
    of_all = {job.job_id for sent in submissions for job in sent.jobs}
    plain = {
        each.key: each for each in open_records if each.job_id not in (recorded if each.is_own else of_all)
    }
    users = {me, *(each.user for each in (*submissions, *copied)), *(each.user for each in plain.values())}
    is_expected = any(each.user == me for each in open_records)
    shown: list[Job] = []
    for user in sorted(users - {""}):
        jobs_shown = jobs_of_user(user)
        if not jobs_shown and user == me and is_expected:
            # A busy slurmctld may answer with nothing for a moment, and tasks should be running.
            sleep(_ASK_AGAIN_S)
            jobs_shown = jobs_of_user(user)
        shown += jobs_shown
    own = [each for each in shown if each.user == me and each.is_live and each.job_id not in recorded]
    if not config and (submissions or copied or users - {me, ""}):
        config = read_config()
    queue = Queue(config=config)

    for sent in submissions:
        queue.jobs |= {(sent.number, *each.key): each for each in _jobs_of(sent, shown, me)}
    for sent in copied:
        queue.foreign += [job.job_id for job in _jobs_of(sent, shown, me) if job.is_live]

    # Tasks of plain sbatch: those with an open record, and this user's other tasks of the same arrays.
    began = {(each.job_id, each.user): each.began for each in plain.values() if each.is_own}
    own_keys = {each.key for each in own}
    for job in shown:
        record = plain.get(job.key)
        is_plain = record is not None and _is_start_of(record, job, me)
        if not is_plain and job.key in own_keys:
            # A task of this array must have begun for this data set after the array was submitted.
            is_plain = job.submit_time <= _latest_submit_time(began.get((job.job_id, job.user), 0))
        if is_plain:
            queue.jobs[PLAIN, job.job_id, job.index] = job

    # Jobs that are not visible from here, so that their end is unknown.
    hides_users = re.search(r"\b(jobs|all)\b", config.get("PrivateData", ""))
    seen_users = {me, *(job.user for job in shown)}
    sent_jobs = [(job.job_id, sent.user, sent.cluster) for sent in submissions for job in sent.jobs]
    for job_id, user, cluster in [*sent_jobs, *((each.job_id, each.user, "") for each in plain.values())]:
        if cluster not in ("", config.get("ClusterName", "")):
            command = f"SLURM_CLUSTERS={cluster} {commands.on('status', folder)}"
            queue.hidden[job_id] = f"for jobs of cluster {cluster}, type: {command}"
        elif hides_users and user not in seen_users:
            queue.hidden[job_id] = f"this site shows the jobs of {user} only to {user}"

    # Jobs without a record are recognized by their names, and controllers by their records, too.
    known = {job_id for number, job_id, _ in queue.jobs if number == PLAIN}
    prefix = job_name_prefix(folder, plan_id)
    copied_prefixes = tuple(f"{JOB_NAME}-{plan_id[:12]}-{each.identity}-" for each in copied)
    jobs = {each.job_id: each for each in own if each.job_id not in known}
    identity = job_files.folder_identity(DataFolder(folder))
    sent_controllers = {}
    if jobs:
        for each in job_files.read_own_controllers(DataFolder(folder)):
            if each.identity == identity:
                sent_controllers[each.job_id] = each
    for job_id in sorted(jobs, key=int):
        job = jobs[job_id]
        is_controller = job.name.endswith(CONTROL)
        controller = sent_controllers.get(job_id)
        if controller and _is_sent_as(job, controller):
            queue.controllers.append(job_id)
        elif job.name.startswith(prefix):
            (queue.controllers if is_controller else queue.unrecorded).append(job_id)
        elif is_controller and job.name.startswith(copied_prefixes):
            queue.foreign.append(job_id)
    queue.foreign = sorted(set(queue.foreign), key=int)
    return queue


def _jobs_of(submission: Submission, jobs: Iterable[Job], me: str) -> list[Job]:
    """Return the jobs that belong to a submission. A record of another user names no job of this one."""
    own = {job.job_id: job for job in submission.jobs}
    found = []
    for job in jobs:
        sent = own.get(job.job_id)
        if sent is None or job.user != submission.user or (job.user == me and not submission.is_own):
            continue
        if _is_sent_as(job, sent):
            found.append(job)
    return found


def _is_sent_as(job: Job, sent: job_files.SentJob) -> bool:
    """Return whether a job with a recorded id is the recorded one: Slurm may use an id again."""
    is_same_time = job.submit_time == sent.submit_time
    is_later = job.num_restarts > 0 and job.submit_time > sent.submit_time
    # A user may have renamed the job, but not to a name of another submission.
    is_renamed = is_same_time and not job.name.startswith(f"{JOB_NAME}-")
    return (job.name == sent.name and (is_same_time or is_later)) or is_renamed


def _is_start_of(record: AttemptRecord, job: Job, me: str) -> bool:
    """Return whether a task with the id of an open record is the recorded one, or a later start of it.

    A record of another user names no job of this one.
    """
    if record.user != job.user or (job.user == me and not record.is_own):
        return False
    return job.num_restarts > record.num_restarts or job.submit_time <= _latest_submit_time(record.began)


def _latest_submit_time(began: float) -> str:
    """Return the latest time, as Slurm writes it, at which a job that began then was submitted."""
    return datetime.fromtimestamp(began + _CLOCKS_DIFFER_S, timezone.utc).strftime(_TIME)
