"""Attempts at shards, by their records and by Slurm's queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.format.attempts import AttemptRecord
from shardprep.format.data_folder import LOGS_FOLDER
from shardprep.format.jobs import JobArray, Submission, user_name
from slurm.causes import (
    cause_of_job,
    cause_of_record,
)
from slurm.queue import PLAIN, Queue
from slurm.request import JobRequest, request_of
from slurm.squeue import Job, StateName

_PRECEDENCE: tuple[StateName, ...] = ("running", "pending", "not visible", "failed")  # if attempts differ


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at some shards: a task of Slurm that waits, runs or ended, or a ``run`` on one machine."""

    state: StateName
    task: str  # JOB_INDEX, as Slurm writes it, or HOST-PID of a run
    shards: Sequence[int]
    submitted: float  # seconds since 1970; without a submission, when the attempt began
    log: str = ""
    record: AttemptRecord | None = None
    job: Job | None = None  # the same start of the same task, as Slurm shows it
    array: JobArray | None = None  # of an own submission; None for plain sbatch and run
    request: JobRequest | None = None  # of that array
    is_typed: bool = False  # a person sent it
    owner: str = ""  # the user who wrote its record, if that is not this user

    def cause(self, shard_id: int) -> str | None:
        """Return why it did not make a shard, or None if it has not failed."""
        if self.state != "failed":
            return None
        if self.record:
            return cause_of_record(self.record, shard_id)
        return cause_of_job(self.job) if self.job else None

    def message(self, shard_id: int) -> str:
        """Return the worker's error message for a shard, or ""."""
        failure = self.record.failures.get(shard_id) if self.record else None
        return failure.reason if failure else ""

    @property
    def node(self) -> str:
        known = self.record or self.job
        return known.node if known else ""

    @property
    def ended(self) -> float:
        """Return when it ended, or else began, or 0 if neither is known."""
        return (self.record.ended or self.record.began) if self.record else 0.0

    @property
    def elapsed_s(self) -> int:
        """Return how long it has run, or 0 if that is not known."""
        if self.record and self.record.ended is not None:
            return round(self.record.ended - self.record.began)
        return self.job.elapsed_s if self.job else 0


@dataclass(kw_only=True)
class Shard:
    """The state of a shard, and the attempts at it, oldest first."""

    shard_id: int
    state: StateName
    attempts: list[Attempt] = field(default_factory=list)
    without_record: str = ""  # JOB_INDEX of a task for it that ended and left no record

    @property
    def cause(self) -> str | None:
        """Return why the last attempt failed."""
        return self.attempts[-1].cause(self.shard_id) if self.state == "failed" else None


def job_of(record: AttemptRecord, tasks: dict[tuple[str, int], Job]) -> Job | None:
    """Return an attempt's job. squeue shows only the last start of a task, so earlier ones have none.

    A record of another user says nothing about a job of this one.
    """
    job = tasks.get(record.key)
    if job is None or (job.user == user_name() and not record.is_own):
        return None
    return job if job.num_restarts == record.num_restarts else None


def add_attempts(
    shards: Sequence[Shard],
    submissions: Sequence[Submission],
    records: Sequence[AttemptRecord],
    queue: Queue,
    folder: Path,
) -> None:
    """Add the attempts at each shard that is not done, oldest first, and set its state by them."""
    attempts = _recorded_attempts(submissions, records, queue)
    attempts += _attempts_without_record(shards, submissions, records, queue, folder)
    for attempt in sorted(attempts, key=lambda each: each.submitted):
        for shard_id in attempt.shards:
            if shard_id < len(shards) and shards[shard_id].state != "done":
                shards[shard_id].attempts.append(attempt)
    for shard in shards:
        states = {each.state for each in shard.attempts}
        shard.state = next((state for state in _PRECEDENCE if state in states), shard.state)
        if shard.state != "not submitted":
            shard.without_record = ""


def _recorded_attempts(
    submissions: Sequence[Submission], records: Sequence[AttemptRecord], queue: Queue
) -> list[Attempt]:
    """Return the attempts that left a record."""
    tasks = queue.tasks()
    own: dict[str, _OwnArray] = {}
    submitted_at: dict[str, float] = {}
    for each in submissions:
        for sent in each.arrays:
            submitted_at[sent.job_id] = each.submitted
            if each.is_own:
                own[sent.job_id] = _OwnArray.of(each, sent)
    attempts = []
    for record in records:
        job = job_of(record, tasks)
        array = own.get(record.job_id) if record.is_own else None
        # Order attempts by submission, because the clocks of nodes may differ.
        submitted = array.submitted if array else submitted_at.get(record.job_id, record.began)
        attempt = Attempt(
            state=_state_of_record(record, job, is_hidden=record.job_id in queue.hidden),
            task=f"{record.job_id}_{record.index}" if record.job_id else f"{record.node}-{record.pid}",
            shards=record.shards,
            submitted=submitted,
            log=record.log,
            record=record,
            job=job,
            array=array.array if array else None,
            request=array.request if array else None,
            is_typed=array is not None and array.is_typed,
            owner="" if record.is_own else record.owner,
        )
        attempts.append(attempt)
    return attempts


@dataclass(frozen=True, kw_only=True)
class _OwnArray:
    """A job array that this user submitted."""

    array: JobArray
    request: JobRequest
    submitted: float
    is_typed: bool

    @staticmethod
    def of(submission: Submission, array: JobArray) -> _OwnArray:
        return _OwnArray(
            array=array,
            request=request_of(array),
            submitted=submission.submitted,
            is_typed=submission.is_typed,
        )


class _Recorded:
    """The tasks that left a record."""

    def __init__(self, records: Sequence[AttemptRecord]) -> None:
        self._tasks = {record.key for record in records}
        self._starts = {(*record.key, record.num_restarts) for record in records}

    def has(self, job: Job | None, key: tuple[str, int]) -> bool:
        """Return whether a task has a record, or if it is live, whether this start of it has."""
        if job and job.is_live:
            return (*key, job.num_restarts) in self._starts
        return key in self._tasks


def _attempts_without_record(
    shards: Sequence[Shard],
    submissions: Sequence[Submission],
    records: Sequence[AttemptRecord],
    queue: Queue,
    folder: Path,
) -> list[Attempt]:
    """Return the attempts of tasks that wait, have just begun, or could not begin.

    Where a task ended without a record and Slurm does not know why, its shards get ``without_record``.
    """
    all_records = _Recorded(records)
    own_records = _Recorded([each for each in records if each.is_own])

    attempts = []
    for submission in submissions:
        for array in submission.arrays:
            request = request_of(array) if submission.is_own else None
            recorded = own_records if submission.is_own else all_records
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                job = queue.jobs.get((submission.number, array.job_id, index))
                if recorded.has(job, (array.job_id, index)):
                    continue
                task = f"{array.job_id}_{index}"
                state: StateName
                if job and (job.is_live or cause_of_job(job)):
                    state = job.state_of_shards
                elif job is None and array.job_id in queue.hidden:
                    state = "not visible"
                else:
                    for shard_id in shard_ids:
                        if shard_id < len(shards):
                            shards[shard_id].without_record = task
                    continue
                attempt = Attempt(
                    state=state,
                    task=task,
                    shards=shard_ids,
                    submitted=submission.submitted,
                    log=f"{folder}/{LOGS_FOLDER}/{task}.log",
                    job=job,
                    array=array if submission.is_own else None,
                    request=request,
                    is_typed=submission.is_own and submission.is_typed,
                    owner="" if submission.is_own else submission.user,
                )
                attempts.append(attempt)
    for (number, job_id, index), job in queue.jobs.items():
        if number == PLAIN and job.is_live and not own_records.has(job, job.key):
            attempt = Attempt(
                state=job.state_of_shards,
                task=f"{job_id}_{index}",
                shards=[index],
                submitted=math.inf,
                job=job,
            )
            attempts.append(attempt)
    return attempts


def _state_of_record(record: AttemptRecord, job: Job | None, *, is_hidden: bool) -> StateName:
    if record.ended is not None:
        return "failed"
    if record.pid:  # a ``run`` on one machine
        is_alive = record.is_alive()
        if is_alive is None:
            return "not visible"
        return "running" if is_alive else "failed"
    if job is None:
        return "not visible" if is_hidden else "failed"
    return "running" if job.state_of_shards == "running" else "failed"
