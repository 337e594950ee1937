"""What squeue shows of the jobs of a user.

squeue is asked for the jobs of a user, because slurmctld answers a list of ids with its whole job table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from time import sleep
from typing import Any, Literal

from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.commands import SlurmAway, SlurmRefused, seconds_of, slurm_answer

StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All other states count as running: a new state of a later Slurm must not cause shards to be sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # a task whose log could not be opened; Slurm reports "signal" 53
ASK_AGAIN_S = 0.5  # after an empty answer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or the last start of an array's task, as squeue shows it."""

    job_id: str
    index: int  # 0 for a job that is not an array
    name: str
    user: str
    submit_time: str  # by slurmctld's clock, in UTC: 2026-11-22T01:52:04
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
        if self.is_waiting:
            return "pending"
        return "running" if self.is_live else "failed"


# Field of squeue --Format -> field of Job.
_FIELDS = {
    "ArrayJobID": "job_id", "ArrayTaskID": "index", "State": "state", "Reason": "reason",
    "exit_code": "exit_code", "NodeList": "node", "TimeUsed": "elapsed_s", "JobID": "", "UserName": "user",
    "SubmitTime": "submit_time", "StartTime": "start_time", "TimeLimit": "time_limit",
    "RestartCnt": "num_restarts", "Name": "name",
}  # fmt: skip


def jobs_of_user(user: str) -> list[Job]:
    """Return a user's jobs as squeue shows them. Raises SlurmAway, also if squeue refuses to answer."""
    layout = ",".join(f"{name}:|" for name in _FIELDS)
    command = ("squeue", "--noheader", f"--user={user}", "--states=all", "--Format", layout)
    try:
        jobs = slurm_answer(parse_queue, *command)
    except SlurmRefused as error:
        if "Invalid user" in str(error):  # the user's account was deleted
            return []
        raise SlurmAway(found=error.found) from None
    # A job's name may contain the end of a line, and then what looks like the job of another user.
    return [job for job in jobs if job.user == user]


def jobs_of_user_for_certain(user: str) -> list[Job]:
    """Return the jobs of a user whose tasks should be running.

    A busy slurmctld may answer with nothing for a moment, so an empty answer is asked for once more.
    """
    jobs = jobs_of_user(user)
    if jobs:
        return jobs
    sleep(ASK_AGAIN_S)
    return jobs_of_user(user)


def parse_queue(text: str) -> list[Job]:
    """Parse squeue's lines into jobs, one for each waiting task. Raises ValueError."""
    jobs = []
    for line in text.split("\n"):
        if not line:
            continue
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


def _exit_code(text: str) -> int:
    """Parse ``65:0`` (squeue from 23.02 on) or the wait status ``16640`` into a shell's exit code."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"exit code {text[:40]!r}")
    code = int(match[1] or 0)
    killed_by = int(match[2] or 0)
    if match[2] is None:
        killed_by = code & 0x7F
        code >>= 8
    if killed_by == LOG_NOT_OPENED - 128:
        return LOG_NOT_OPENED
    if code or not killed_by:
        return code
    return 128 + killed_by


def _local_time(text: str) -> str:
    """Convert a time of Slurm in UTC, ``2026-11-22T01:52:04``, to the local time zone, or return ""."""
    try:
        return datetime.strptime(f"{text}+0000", f"{TIME_FORMAT}%z").astimezone().strftime(TIME_FORMAT)
    except ValueError:
        return ""
