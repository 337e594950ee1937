"""Find the state of every shard of a data set, and the attempts at it.

Manifests say which shards are done. For the others, the records of attempts say who tried and how it ended,
and Slurm says which jobs wait and run. squeue shows Slurm's reason for an end for some minutes (MinJobAge),
and the first command that sees it writes it into the record. ``slurm.own`` keeps records of other users out
of everything that a command does.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

from shardprep.errors import BrokenShard, ReadWriteError, UsageError
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.done import MadeShards, find_made_shards, is_verified
from shardprep.format.jobs import AttemptRecord, JobArray, Submission, user_name
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan
from slurm.causes import (
    CANCELLED,
    CAUSE_OF_STATE,
    COMPLETED,
    NO_MANIFEST,
    cause_in_log,
    cause_of_job,
    cause_of_record,
    is_unexplained,
)
from slurm.commands import SlurmAway
from slurm.queue import ASK_AGAIN_S, PLAIN, Job, Queue, StateName, find_queue
from slurm.request import JobRequest, request_of

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
    is_typed: bool = False  # a person's ``retry`` sent it
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


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """A data set between plan and verify."""

    folder: Path
    plan: Plan
    submissions: list[Submission]
    next_number: int  # of a submission
    records: job_files.AttemptRecords
    made: MadeShards
    is_verified: bool
    shards: list[Shard]  # shard N at N
    queue: Queue

    @property
    def summary(self) -> str:
        return f"{len(self.made.done)} of {self.plan.num_shards} shards are done"

    @property
    def is_tried(self) -> bool:
        """Return whether anybody submitted jobs, or tried to make a shard that is not done."""
        return bool(self.submissions) or any(shard.attempts for shard in self.shards)

    def ids(self, *states: StateName) -> list[int]:
        """Return the shards in one of these states, ascending."""
        return [shard.shard_id for shard in self.shards if shard.state in states]

    def failed_by_cause(self) -> dict[str, list[Shard]]:
        """Return cause -> the shards whose last attempt ended so, the most frequent first."""
        found: dict[str, list[Shard]] = {}
        for shard_id in self.ids("failed"):
            found.setdefault(self.shards[shard_id].cause or "", []).append(self.shards[shard_id])
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def why_not_visible(self) -> str:
        """Return why the state of some jobs or runs is not known here."""
        runs = {
            f"a run on {each.node} (process {each.pid}) may still be running; look there"
            for each in self.records.own
            if each.ended is None and each.pid and each.is_alive() is None
        }
        return "; ".join(sorted({*self.queue.hidden.values(), *runs, *self.records.unreadable}))

    def live_job_ids(self) -> list[str]:
        """Return the recorded jobs that wait or run, verify jobs included."""
        return sorted({job_id for (_, job_id, _), job in self.queue.jobs.items() if job.is_live}, key=int)

    def jobs_that_make_shards(self) -> list[str]:
        """Return the recorded jobs that wait or run, without verify jobs."""
        verify_ids = {sent.verify.job_id for sent in self.submissions}
        return [each for each in self.live_job_ids() if each not in verify_ids]

    def jobs_to_wait_for(self) -> list[str]:
        """Return all live jobs except the verify jobs of earlier submissions, which change nothing."""
        obsolete = {each.verify.job_id for each in self.submissions[:-1]}
        live = (*self.live_job_ids(), *self.queue.unrecorded, *self.queue.controllers)
        return [each for each in live if each not in obsolete]


def find_state(
    folder: Path,
    plan: Plan,
    *,
    needs_slurm: bool = True,
    before: DatasetState | None = None,
    see: Callable[[Manifest], None] | None = None,
) -> DatasetState:
    """Combine manifests, records and Slurm's queue. Raises BrokenShard, ReadWriteError, SlurmAway.

    If Slurm does not answer and ``needs_slurm`` is False, shards that may be in a job are ``not visible``.
    Shards done in an earlier state ``before`` are not read again. ``see`` is passed to ``find_made_shards``.
    """
    state = _find_state(folder, plan, needs_slurm=needs_slurm, before=before, see=see)
    if needs_slurm and state.queue.is_empty and any(shard.without_record for shard in state.shards):
        # A busy slurmctld may answer with nothing for a moment. Tasks that wait have no record, and a command
        # that acts would send their shards again.
        sleep(ASK_AGAIN_S)
        state = _find_state(folder, plan, needs_slurm=needs_slurm, before=state, see=see)
    return state


def _find_state(
    folder: Path,
    plan: Plan,
    *,
    needs_slurm: bool,
    before: DatasetState | None,
    see: Callable[[Manifest], None] | None,
) -> DatasetState:
    data_dir = DataFolder(folder)
    identity = job_files.folder_identity(data_dir)
    sent: list[Submission] = []
    unreadable = []
    try:
        sent = _read_submissions(data_dir)
    except ReadWriteError as error:
        if needs_slurm or "Permission denied" not in str(error):
            raise
        unreadable.append(str(error))
    submissions = [each for each in sent if each.identity == identity]
    copied = [each for each in sent if each.identity != identity]  # this folder is a copy of another one

    known = before.made if before else None
    records = job_files.read_attempts(data_dir, plan.plan_id, identity)
    open_records = [each for each in records.own if each.ended is None and each.job_id]
    found = None
    queue = Queue()
    asks_slurm = bool(sent or open_records)
    if not asks_slurm:  # tasks of plain sbatch may wait, unless all shards are done
        found = find_made_shards(data_dir, plan.spec, known=known, see=see)
        asks_slurm = len(found.done) < plan.num_shards and shutil.which("squeue") is not None
    if asks_slurm:
        config = before.queue.config if before else {}
        try:
            queue = find_queue(folder, plan.plan_id, submissions, copied, open_records, config)
        except SlurmAway as error:
            if needs_slurm:
                raise
            ids = {job.job_id for each in submissions for job in each.jobs}
            ids |= {record.job_id for record in open_records}
            queue = Queue(hidden=dict.fromkeys(ids, "Slurm does not answer"), away=str(error))
    # Read records and manifests after asking Slurm: a task that it shows as ended has written them by then.
    listed = {each.path for each in records.own}
    now = job_files.read_attempts(data_dir, plan.plan_id, identity)
    records.own = [each for each in now.own if each.path in listed]
    records.unreadable = [*unreadable, *now.unreadable]
    if found is None or queue.jobs:
        found = find_made_shards(data_dir, plan.spec, known=known, see=see)
    _add_ends(records.own, queue, found)

    undone: StateName = "not visible" if records.unreadable else "not submitted"
    every = range(plan.num_shards)
    shards = [Shard(shard_id=each, state="done" if each in found.done else undone) for each in every]
    _add_attempts(shards, submissions, records.own, queue, folder)
    return DatasetState(
        folder=folder,
        plan=plan,
        submissions=submissions,
        next_number=max((each.number for each in sent), default=-1) + 1,
        records=records,
        made=found,
        is_verified=is_verified(data_dir, plan.spec, found),
        shards=shards,
        queue=queue,
    )


def _read_submissions(folder: DataFolder) -> list[Submission]:
    """Return all submissions, oldest first. Raises BrokenShard or ReadWriteError."""
    submissions = job_files.read_submissions(folder)
    for each in submissions:
        try:
            for array in each.arrays:
                request_of(array)
        except (BrokenShard, UsageError) as error:
            path = folder.path_of(f"{JOBS_FOLDER}/{each.number:04d}.json")
            found = f"not a valid submission: {error}"
            raise BrokenShard(path=path, found=found, expected="one; move it away") from None
    return submissions


def _add_ends(records: Sequence[AttemptRecord], queue: Queue, made: MadeShards) -> None:
    """Add ends that only Slurm knows, from squeue for some minutes, and later from the end of the log."""
    tasks = queue.tasks()
    last_restart = _last_restarts(records, made)
    for record in records:
        if record.stopped_by:
            continue
        job = _job_of(record, tasks)
        task = tasks.get(record.key)
        if task and not record.time_limit:  # a task that is killed cannot write it
            record.shown_limit = task.time_limit
        stopped_by = ""
        ended = record.began
        if job and (job.state in CAUSE_OF_STATE or (job.state == CANCELLED and record.ended is None)):
            stopped_by = CAUSE_OF_STATE.get(job.state, CANCELLED)
            ended += job.elapsed_s
        elif is_unexplained(record) and record.log and not queue.away and not (job and job.is_live):
            stopped_by = cause_in_log(record, last_restart[record.key] - record.num_restarts)
        if not stopped_by and job and job.state == COMPLETED and job.exit_code == 0 and record.ended is None:
            stopped_by = NO_MANIFEST
            ended += job.elapsed_s
        if stopped_by:
            record.stopped_by = stopped_by
            record.ended = record.ended or ended
            if record.user == user_name():
                job_files.append_end(record)


def _last_restarts(records: Iterable[AttemptRecord], made: MadeShards) -> dict[tuple[str, int], int]:
    """Return the number of the last start of each task: of its records, or the one that made a shard."""
    last: dict[tuple[str, int], int] = {}
    for record in records:
        last[record.key] = max(record.num_restarts, last.get(record.key, 0))
    for manifest in made.done.values():
        slurm = manifest.run.slurm
        key = manifest.run.job_id, _number_of(slurm.get("SLURM_ARRAY_TASK_ID", ""))
        if key in last:  # that start removed its own record
            last[key] = max(_number_of(slurm.get("SLURM_RESTART_COUNT", "")), last[key])
    return last


def _number_of(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _job_of(record: AttemptRecord, tasks: dict[tuple[str, int], Job]) -> Job | None:
    """Return an attempt's job. squeue shows only the last start of a task, so earlier ones have none."""
    job = tasks.get(record.key)
    return job if job and job.num_restarts == record.num_restarts else None


def _add_attempts(
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
        job = _job_of(record, tasks)
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
    recorded = {record.key for record in records}
    recorded_starts = {(*record.key, record.num_restarts) for record in records}

    def has_record(job: Job | None, key: tuple[str, int]) -> bool:
        if job and job.is_live:
            return (*key, job.num_restarts) in recorded_starts
        return key in recorded

    attempts = []
    for submission in submissions:
        for array in submission.arrays:
            request = request_of(array) if submission.is_own else None
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                job = queue.jobs.get((submission.number, array.job_id, index))
                if has_record(job, (array.job_id, index)):
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
        if number == PLAIN and job.is_live and not has_record(job, job.key):
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
