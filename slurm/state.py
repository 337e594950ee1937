"""Where every shard of a data set stands, who tried to make it, and how that ended: the one gatherer.

Manifests say what is done. Of the other shards the attempts' records say who tried and how it ended, and
Slurm says what waits and runs. Slurm is believed of an end where the record has none, or where Slurm alone
can know: memory, the time limit, a node, a preemption. Who looks first writes into the record what squeue
(for some minutes) or the log knows.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardprep.errors import ReadWriteError, ShardprepError
from shardprep.files import open_regular
from shardprep.format.jobs import (
    LOGS_FOLDER,
    AttemptRecord,
    AttemptRecords,
    JobArray,
    JobRequest,
    Submission,
    append_end,
    folder_identity,
    read_attempts,
    read_submissions,
    user_name,
)
from shardprep.format.manifest import MadeShards, Manifest, find_made_shards, is_verified
from shardprep.format.plan import Plan
from slurm.queue import LOG_NOT_OPENED, PLAIN, Job, Queue, SlurmAway, find_queue, seconds_of

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
PREEMPTED = "PREEMPTED"
CANCELLED = "CANCELLED"
REQUEUED = "requeued (scontrol requeue)"
BAD_INPUT = "bad input (65)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"

_OF_EXIT_CODE = {
    0: NO_MANIFEST,
    2: SETUP,
    65: BAD_INPUT,
    66: "no such input or shard (66)",
    73: "cannot write the output (73)",
    74: "read or write error (74)",
    75: STOPPED,
    78: "refused: plan, options or tokenizer differ (78)",
}
# States of Slurm that tell more than the worker or the script can know.
OF_STATE = {name: name for name in (OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, PREEMPTED, "DEADLINE")}
OF_STATE["BOOT_FAIL"] = NODE_FAIL
# What Slurm writes into a task's log about its end -> the cause. Slurm itself forgets it sooner.
_OF_LOG = (
    (r"oom[-_]kill|: Out Of Memory|exceeded (job )?memory limit", OUT_OF_MEMORY),
    ("DUE TO TIME LIMIT", TIMEOUT),
    ("DUE TO NODE FAILURE|srun: error: Node failure", NODE_FAIL),
    ("DUE TO PREEMPTION", PREEMPTED),
    ("DUE TO JOB REQUEUE", REQUEUED),
    (r"\*\*\* JOB .* CANCELLED AT", CANCELLED),
    (r"\*\*\* STEP .* CANCELLED AT", STEP_STOPPED),
    ("srun: error: Unable to (confirm allocation|create step)", SRUN_FAILED),  # with exit code 1
)
_AGAIN = "retry sends it again"
# Cause -> what to do. Only people can help where retry alone would fail the same way.
_REMEDIES = {
    **dict.fromkeys(
        (CANCELLED, PREEMPTED, REQUEUED, "DEADLINE", STOPPED, STEP_STOPPED, VANISHED, NO_MANIFEST), _AGAIN
    ),
    OUT_OF_MEMORY: "retry asks for twice the memory",
    TIMEOUT: "retry asks for twice the time",
    NODE_FAIL: f"{_AGAIN}; to leave out a node: export SBATCH_EXCLUDE=NODE",
    SRUN_FAILED: f"{_AGAIN}; where it fails again, look at --srun_args and at srun's words in the log",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    BAD_INPUT: "retry does not send it again: correct the input and plan anew, or accept what is left out",
    _OF_EXIT_CODE[66]: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _OF_EXIT_CODE[73]: "look at permissions, quota and free space of the folder (df, lfs quota); then retry",
    _OF_EXIT_CODE[74]: f"{_AGAIN}; where it fails again, look at the file system that its message names",
    _OF_EXIT_CODE[78]: "bring back what its message names, or plan into a new folder; then retry",
    NO_LOG: "look at the folder of its log (permissions, quota); then retry",
}
_WARNED_S = 900  # so long before its time limit a USR1 is the warning that sbatch --signal asked for
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """Return what to do about a cause, in a sentence without an end."""
    if cause.startswith("killed by signal 9"):
        return f"{_AGAIN}; it is often memory: retry --mem_gb"
    return _REMEDIES.get(cause, f"look at its log; {_AGAIN}")


def cause_of_record(record: AttemptRecord, shard_id: int) -> str:
    """Return why an attempt that has ended, or was killed, did not make a shard."""
    if failure := record.failures.get(shard_id):
        killed = re.search(r"was killed by signal (\d+)", failure.reason)
        if killed and record.stopped_by == OUT_OF_MEMORY:
            return OUT_OF_MEMORY
        return f"killed by signal {killed[1]}" if killed else cause_of_exit(failure.exit_code)
    if record.stopped_by:
        return record.stopped_by
    if record.ended is None:
        return VANISHED
    if record.killed_by:
        return f"killed by signal {record.killed_by}"
    limit_s = seconds_of(record.time_limit)
    left_s = record.began + (limit_s or 0) - (record.stopped or 0)
    if record.signal == "USR1" and record.stopped and limit_s and left_s <= _WARNED_S:
        return TIMEOUT
    if record.stage == "set-up" and record.exit_code not in (2, 75):
        return SETUP_ENDED
    if record.stage == "start":
        return SRUN_FAILED
    return cause_of_exit(record.exit_code)


def cause_of_job(job: Job) -> str | None:
    """Return why a task without a record ended, or None if it was cancelled or Slurm does not say."""
    if job.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    if job.state in ("FAILED", "COMPLETED"):
        return cause_of_exit(job.exit_code)
    return OF_STATE.get(job.state)


def cause_of_exit(code: int) -> str:
    """Return what an exit code says."""
    if code > 128:
        return f"killed by signal {code - 128}"
    return _OF_EXIT_CODE.get(code, f"exit code {code}")


def is_unexplained(record: AttemptRecord) -> bool:
    """Return whether the record of a task does not say why it ended: it was stopped or killed.

    A wrapper of Python, or a container, whose process is killed may end with any code: only one of
    shardprep's own, but for 75, says why.
    """
    if not record.job_id or record.stopped_by:
        return False
    if any("was killed by signal" in each.reason for each in record.failures.values()):
        return True
    says_why = record.ended is not None and record.exit_code in (0, 2, 65, 66, 73, 74, 78)
    return not record.failures and not says_why


def cause_in_log(record: AttemptRecord, num_later: int) -> str:
    """Return what Slurm did to an attempt by its log, or "". ``num_later``: how many starts came after it.

    A log goes on when Slurm starts a task again, or prep_array.sh moves it away.
    """
    path = Path(record.log)
    moved = path.with_name(f"{path.stem}.before-restart-{record.num_restarts + 1}.log")
    log = log_tail(moved) or log_tail(path, num_later)
    return next((cause for words, cause in _OF_LOG if re.search(words, log)), "")


def log_tail(path: Path, num_later: int = 0) -> str:
    """Return what an attempt wrote to a log, or "". ``num_later``: how many starts came after it."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            parts = _BEGINS.split(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, ShardprepError):  # ValueError: a NUL in its name
        return ""
    return parts[-1 - num_later] if num_later < len(parts) else ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """Return the last lines of a log that tell a person something. Those of srun count only if it failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    others = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (others if others and "srun failed" not in log else lines)[-number:]


_MOST_ATTEMPTS = 3  # that end in the same way
StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]
_LIVE: tuple[StateName, ...] = ("running", "pending", "not visible", "failed")  # which wins over which


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at some shards: a task of Slurm that waits, runs or ended, or a run on a machine."""

    state: StateName
    task: str  # JOB_INDEX, as Slurm writes it, or HOST-PID of a run
    shards: Sequence[int]
    submitted: float  # seconds since 1970; where no submission sent it, when it began
    log: str = ""
    record: AttemptRecord | None = None
    job: Job | None = None  # the same start of the same task, as Slurm shows it
    array: JobArray | None = None  # of the submission; None for plain sbatch and run

    def cause(self, shard_id: int) -> str | None:
        """Return why it did not make a shard, or None while it goes on."""
        if self.state != "failed":
            return None
        if self.record:
            return cause_of_record(self.record, shard_id)
        return cause_of_job(self.job) if self.job else None

    def message(self, shard_id: int) -> str:
        """Return the worker's own words of a shard."""
        failure = self.record.failures.get(shard_id) if self.record else None
        return failure.reason if failure else ""

    @property
    def node(self) -> str:
        return self.record.node if self.record else self.job.node if self.job else ""

    @property
    def ended(self) -> float:
        """Return when it ended, or else began, or 0 if that is not known."""
        return (self.record.ended or self.record.began) if self.record else 0.0

    @property
    def elapsed_s(self) -> int:
        """Return for how long it ran, as far as it is known."""
        if self.record and self.record.ended is not None:
            return round(self.record.ended - self.record.began)
        return self.job.elapsed_s if self.job else 0


@dataclass(kw_only=True)
class Shard:
    """Where a shard stands, and the attempts at it, oldest first."""

    shard_id: int
    state: StateName
    attempts: list[Attempt] = field(default_factory=list)
    without_record: str = ""  # a task that was to make it, ended, and left no record: JOB_INDEX

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
    records: AttemptRecords
    made: MadeShards
    is_verified: bool
    shards: list[Shard]  # shard N at N
    queue: Queue

    @property
    def summary(self) -> str:
        return f"{len(self.made.done)} of {self.plan.num_shards} shards are done"

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
        """Return why it cannot be seen what some jobs do."""
        runs = {
            f"a run on {each.node} (process {each.pid}) has not said that it ended; look there"
            for each in self.records.own
            if each.ended is None and each.pid and each.is_alive() is None
        }
        return "; ".join(sorted({*self.queue.hidden.values(), *runs, *self.records.unreadable}))

    def live_job_ids(self) -> list[str]:
        """Return the jobs of ours that wait or run, verify jobs included."""
        return sorted({job_id for (_, job_id, _), job in self.queue.jobs.items() if job.is_live}, key=int)

    def jobs_to_wait_for(self) -> list[str]:
        """Return the jobs after which nothing changes: not the verify jobs of earlier submissions."""
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
    """Join manifests, records and what Slurm shows. Raises SlurmAway, unless ``needs_slurm`` is False.

    What no manifest or record proves is ``not visible`` then. ``before``: what was found a moment ago; what
    was done then is not read again. ``see``: as for ``find_made_shards``. Raises BrokenShard and
    ReadWriteError of files, too.
    """
    identity, unreadable = folder_identity(folder), list[str]()
    try:
        sent = read_submissions(folder)
    except ReadWriteError as error:
        if needs_slurm or "Permission denied" not in str(error):
            raise
        sent, unreadable = [], [str(error)]
    submissions = [each for each in sent if each.identity == identity]
    copied = [each for each in sent if each.identity != identity]  # with the folder, from another one

    known = before.made if before else None
    records = read_attempts(folder, plan.plan_id, identity)
    open_records = [each for each in records.own if each.ended is None and each.job_id]
    found, queue = None, Queue()
    asks = bool(sent or open_records)
    if not asks:  # tasks of plain sbatch may wait, unless all is done
        found = find_made_shards(folder, plan.spec, known=known, see=see)
        asks = len(found.done) < plan.num_shards and shutil.which("squeue") is not None
    if asks:
        config = before.queue.config if before else {}
        try:
            queue = find_queue(folder, plan.plan_id, submissions, copied, open_records, config)
        except SlurmAway as error:
            if needs_slurm:
                raise
            ids = {job.job_id for it in submissions for job in it.jobs} | {it.job_id for it in open_records}
            queue = Queue(hidden=dict.fromkeys(ids, "Slurm gives no answer"), away=str(error))
    # Looked at last: what Slurm says has ended has its manifest, or the end of its record, by then.
    listed = {each.path for each in records.own}
    now = read_attempts(folder, plan.plan_id, identity)
    records.own = [each for each in now.own if each.path in listed]
    records.unreadable = [*unreadable, *now.unreadable]
    _add_ends(records.own, queue)
    if found is None or queue.jobs:
        found = find_made_shards(folder, plan.spec, known=known, see=see)

    nothing: StateName = "not visible" if records.unreadable else "not submitted"
    shards = [
        Shard(shard_id=shard_id, state="done" if shard_id in found.done else nothing)
        for shard_id in range(plan.num_shards)
    ]
    _add_attempts(shards, submissions, records.own, queue, folder)
    return DatasetState(
        folder=folder,
        plan=plan,
        submissions=submissions,
        next_number=max((each.number for each in sent), default=-1) + 1,
        records=records,
        made=found,
        is_verified=is_verified(folder, plan.spec, found),
        shards=shards,
        queue=queue,
    )


def _add_ends(records: Sequence[AttemptRecord], queue: Queue) -> None:
    """Add what Slurm alone knows of an end: squeue tells it for some minutes, the log's last lines later."""
    tasks = queue.tasks()
    last_restart: dict[tuple[str, int], int] = {}
    for record in records:
        last_restart[record.key] = max(record.num_restarts, last_restart.get(record.key, 0))
    for record in records:
        job = _job_of(record, tasks)
        stopped_by, ended = "", record.began
        if record.stopped_by:
            continue
        if job and (job.state in OF_STATE or (job.state == CANCELLED and record.ended is None)):
            stopped_by, ended = OF_STATE.get(job.state, CANCELLED), record.began + job.elapsed_s
        elif is_unexplained(record) and record.log and not queue.away and not (job and job.is_live):
            stopped_by = cause_in_log(record, last_restart[record.key] - record.num_restarts)
        if stopped_by:
            record.stopped_by = stopped_by
            record.ended = record.ended or ended
            if record.user == user_name():
                append_end(record)


def _job_of(record: AttemptRecord, tasks: dict[tuple[str, int], Job]) -> Job | None:
    """Return what Slurm says of an attempt: squeue shows the last start of a task alone."""
    job = tasks.get(record.key)
    return job if job and job.num_restarts == record.num_restarts else None


def _add_attempts(
    shards: Sequence[Shard],
    submissions: Sequence[Submission],
    records: Sequence[AttemptRecord],
    queue: Queue,
    folder: Path,
) -> None:
    """Add the attempts at each shard that is not done, oldest first, and what they make of its state."""
    tasks = queue.tasks()
    arrays = {array.job_id: (each.submitted, array) for each in submissions for array in each.arrays}
    found: list[Attempt] = []
    for record in records:
        job = _job_of(record, tasks)
        # A submission is later than the one before, whatever the nodes' clocks say.
        submitted, array = arrays.get(record.job_id, (record.began, None))
        found.append(
            Attempt(
                state=_state_of_record(record, job, is_hidden=record.job_id in queue.hidden),
                task=f"{record.job_id}_{record.index}" if record.job_id else f"{record.node}-{record.pid}",
                shards=record.shards,
                submitted=submitted,
                log=record.log,
                record=record,
                job=job,
                array=array,
            )
        )

    # Tasks of which no record tells: they wait, have just begun, or never could begin.
    told = {record.key for record in records}
    starts_told = {(*record.key, record.num_restarts) for record in records}

    def is_told(job: Job | None, key: tuple[str, int]) -> bool:
        return (*key, job.num_restarts) in starts_told if job and job.is_live else key in told

    for submission in submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                job = queue.jobs.get((submission.number, array.job_id, index))
                if is_told(job, (array.job_id, index)):
                    continue
                task = f"{array.job_id}_{index}"
                if job and (job.is_live or cause_of_job(job)):
                    state = _state_of_job(job)
                elif job is None and array.job_id in queue.hidden:
                    state = "not visible"
                else:
                    for shard_id in shard_ids:
                        if shard_id < len(shards):
                            shards[shard_id].without_record = task
                    continue
                found.append(
                    Attempt(
                        state=state,
                        task=task,
                        shards=shard_ids,
                        submitted=submission.submitted,
                        log=f"{folder}/{LOGS_FOLDER}/{task}.log",
                        job=job,
                        array=array,
                    )
                )
    for (number, job_id, index), job in queue.jobs.items():
        if number == PLAIN and job.is_live and not is_told(job, job.key):
            task, state = f"{job_id}_{index}", _state_of_job(job)
            found.append(Attempt(state=state, task=task, shards=[index], submitted=math.inf, job=job))

    for attempt in sorted(found, key=lambda each: each.submitted):
        for shard_id in attempt.shards:
            if shard_id < len(shards) and shards[shard_id].state != "done":
                shards[shard_id].attempts.append(attempt)
    for shard in shards:
        states = {each.state for each in shard.attempts}
        shard.state = next((state for state in _LIVE if state in states), shard.state)
        if shard.state != "not submitted":
            shard.without_record = ""


def _state_of_record(record: AttemptRecord, job: Job | None, *, is_hidden: bool) -> StateName:
    if record.ended is not None:
        return "failed"
    if record.pid:  # of ``run``
        is_alive = record.is_alive()
        return "not visible" if is_alive is None else "running" if is_alive else "failed"
    if job is None:
        return "not visible" if is_hidden else "failed"
    return "running" if job.is_live and not job.is_waiting else "failed"


def _state_of_job(job: Job) -> StateName:
    if not job.is_live:
        return "failed"
    return "pending" if job.is_waiting else "running"


def reason_to_leave(shard: Shard, changes: dict[str, Any], *, is_named: bool = False) -> str | None:
    """Return why a shard is not tried again: it failed the same way too often, or must fail the same way.

    ``changes`` of the request make it another way; one that a person named is tried however often it failed.
    """
    if shard.state != "failed":
        return None
    cause, array = shard.cause, shard.attempts[-1].array
    causes = [each.cause(shard.shard_id) for each in reversed(shard.attempts)]
    same = len(list(itertools.takewhile(lambda each: each == cause, causes)))
    before = array.request if array else JobRequest()
    changed = {name for name, value in changes.items() if getattr(before, name) != value}
    if cause == BAD_INPUT and "worker_args" not in changed:
        return "the same input fails in the same way"
    if same >= _MOST_ATTEMPTS and not changed and not is_named:
        return f"failed the same way {same} times"
    return None
