"""Where every shard of a data set stands, why the missing ones were not made, and what to do about it.

Manifests say what is done (``shardprep.format.done``). Of the other shards the attempts' records say who
tried and how it ended, and Slurm says what waits and runs. Slurm is believed of an end where the record has
none, or where Slurm alone can know: memory, the time limit, a node, a preemption. It is not asked where no
job has anything to do with the data set and none of its commands is installed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from preprocess.attempts import AttemptRecord, AttemptRecords, append_end, folder_identity, read_attempts
from shardprep.errors import ReadWriteError, ShardprepError, UsageError
from shardprep.files import open_regular
from shardprep.format.done import MadeShards, find_made_shards, is_verified
from shardprep.format.names import id_ranges, ids_of_ranges
from shardprep.format.plan import Plan, need_plan
from slurm.commands import SlurmAway, user_name
from slurm.queue import LOG_NOT_OPENED, PLAIN, SUSPENDED, Job, Queue, find_queue, meaning_of
from slurm.request import JobRequest
from slurm.script import LOG_FOLDER
from slurm.submissions import JOBS_FOLDER, JobArray, Submission, read_submissions

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
CANCELLED = "CANCELLED"
BAD_INPUT = "bad input (65)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
_STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
_AGAIN = "retry sends it again"

_EXIT_CAUSES = {
    2: SETUP,
    65: BAD_INPUT,
    66: "no such input or shard (66)",
    73: "cannot write the output (73)",
    74: "read or write error (74)",
    75: STOPPED,
    78: "refused: plan, options or tokenizer differ (78)",
}
# Cause -> what to do. Only people can help where retry alone would fail the same way.
_REMEDIES = {
    **dict.fromkeys((CANCELLED, "PREEMPTED", "DEADLINE", STOPPED, _STEP_STOPPED), _AGAIN),
    **dict.fromkeys((VANISHED, NO_MANIFEST), _AGAIN),
    OUT_OF_MEMORY: "retry asks for twice the memory",
    TIMEOUT: "retry asks for twice the time",
    NODE_FAIL: f"{_AGAIN}, and leaves out a node that failed twice",
    SRUN_FAILED: f"{_AGAIN}; where it fails again, look at --srun_args and at srun's words in the log",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    BAD_INPUT: "retry does not send it again: correct the input and plan anew, or accept what is left out: "
    "--worker_args '--max_bad_fraction 0.05'",
    _EXIT_CAUSES[66]: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _EXIT_CAUSES[73]: "look at permissions, quota and free space of the folder (df, lfs quota); then retry",
    _EXIT_CAUSES[74]: f"{_AGAIN}; where it fails again, look at the file system that its message names",
    _EXIT_CAUSES[78]: "bring back what its message names, or plan into a new folder; then retry",
    NO_LOG: "look at the folder of its log (permissions, quota); then retry",
}
_STATES = {name: name for name in (OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, "PREEMPTED", "DEADLINE")}
_STATES["BOOT_FAIL"] = NODE_FAIL
_STOPPED_BY = {
    **_STATES,
    "time limit": TIMEOUT,
    "node failure": NODE_FAIL,
    "preemption": "PREEMPTED",
    "cancel": CANCELLED,
    "cancelled step": _STEP_STOPPED,
}
# What Slurm writes into a task's log about its end -> ``stopped_by`` of a record. Slurm forgets it sooner.
_WORDS_OF_LOGS = (
    (r"oom[-_]kill|: Out Of Memory|exceeded (job )?memory limit", OUT_OF_MEMORY),
    ("DUE TO TIME LIMIT", "time limit"),
    ("DUE TO NODE FAILURE|srun: error: Node failure", "node failure"),
    ("DUE TO PREEMPTION", "preemption"),
    (r"\*\*\* JOB .* CANCELLED AT", "cancel"),
    (r"\*\*\* STEP .* CANCELLED AT", "cancelled step"),
)
_WARNED_S = 900  # before its time limit a task is warned by USR1, where sbatch --signal asked for it
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """What to do about a cause, in a sentence without an end."""
    if cause.startswith("killed by signal 9"):
        return f"{_AGAIN}; it is often memory: retry --mem_gb"
    return _REMEDIES.get(cause, f"look at its log; {_AGAIN}")


def cause_of(attempt: AttemptRecord, task: Job | None, shard_id: int, *, is_warned: bool = False) -> str:
    """Why an attempt that has ended, or was killed, did not make ``shard_id``.

    ``task``: what Slurm says of it. ``is_warned``: its request has sbatch's --signal, so USR1 is of a time
    limit.
    """
    failure = attempt.failures.get(shard_id)
    if task is not None and task.state in _STATES and (failure is None or task.state == OUT_OF_MEMORY):
        return _STATES[task.state]
    killed = re.search(r"was killed by signal (\d+)", failure.reason) if failure else None
    if attempt.is_out_of_memory and (failure is None or killed):
        return OUT_OF_MEMORY
    if failure is not None:
        return f"killed by signal {killed[1]}" if killed else exit_cause(failure.exit_code)
    if attempt.ended is None:
        return CANCELLED if task is not None and task.state == "CANCELLED" else VANISHED
    if attempt.stopped_by:
        return _STOPPED_BY.get(attempt.stopped_by, STOPPED)
    if attempt.killed_by:
        return f"killed by signal {attempt.killed_by}"
    is_late = attempt.left_s is not None and attempt.left_s <= _WARNED_S
    if attempt.signal == "USR1" and (is_warned or is_late):
        return TIMEOUT
    if attempt.stage == "set-up" and attempt.exit_code != 75:
        return SETUP_ENDED if attempt.exit_code != 2 else SETUP
    if attempt.stage == "start":
        return SRUN_FAILED
    return exit_cause(attempt.exit_code or 0)


def cause_of_task(task: Job) -> str | None:
    """Why a task without a record ended; None where it was cancelled, or Slurm does not say."""
    if task.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    if task.state in _STATES:
        return _STATES[task.state]
    if task.state == "FAILED":
        return exit_cause(task.exit_code)
    return NO_MANIFEST if task.state == "COMPLETED" else None


def exit_cause(code: int) -> str:
    """What an exit code says."""
    if code > 128:
        return f"killed by signal {code - 128}"
    return _EXIT_CAUSES.get(code, f"exit code {code}") if code else NO_MANIFEST


def log_tail(path: Path, num_later: int = 0) -> str:
    """Return what a log's last attempt wrote, or one with so many behind it, of its last 16 KiB.

    Empty where there is no such file.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            parts = _BEGINS.split(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, ShardprepError):  # ValueError: a NUL in its name
        return ""
    return parts[-1 - num_later] if num_later < len(parts) else ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """The last lines of a log that say something to a person; srun's only where srun itself failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    others = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (others if others and "srun failed" not in log else lines)[-number:]


StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]
_LIVE: tuple[StateName, ...] = ("running", "pending", "not visible", "failed")  # which wins over which


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a shard that is not done, or a task that waits to try it; no cause while it goes on."""

    state: StateName
    task: str  # JOB_INDEX, as Slurm writes it, or HOST-PID of a run
    array: JobArray | None = None  # of the submission; None for plain sbatch and run
    record: AttemptRecord | None = None
    cause: str | None = None
    message: str = ""  # the worker's own words of this shard
    reason: str = ""  # why it waits, in Slurm's word
    start_time: str = ""  # when Slurm expects it to start, "" where it does not say
    node: str = ""
    log: str = ""
    is_suspended: bool = False
    elapsed_s: int = 0  # as far as it is known


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
        return self.attempts[-1].cause if self.state == "failed" else None


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """A data set between plan and verify."""

    folder: Path
    plan: Plan
    submissions: list[Submission]
    foreign: list[Submission]  # of the folder that this one was copied from
    records: AttemptRecords
    made: MadeShards
    is_verified: bool
    shards: list[Shard]  # shard N at N
    queue: Queue

    @property
    def next_number(self) -> int:
        """Return the number of the next submission."""
        return max((sent.number for sent in [*self.submissions, *self.foreign]), default=-1) + 1

    @property
    def summary(self) -> str:
        """Return how many shards are done, in words."""
        return f"{len(self.made.done)} of {self.plan.num_shards} shards are done"

    @property
    def verify(self) -> str:
        """Return the state of the last verify job, or ""."""
        if not self.submissions:
            return ""
        last = self.submissions[-1]
        job = self.queue.jobs.get((last.number, last.verify_job_id, 0))
        return job.state if job else "not visible" if last.number in self.queue.hidden else "unknown"

    @cached_property
    def _ids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for shard in self.shards:
            found.setdefault(shard.state, []).append(shard.shard_id)
        return found

    def ids(self, *states: StateName) -> list[int]:
        """Return the shards in one of these states, ascending."""
        return sorted(shard_id for state in states for shard_id in self._ids.get(state, []))

    def failed_by_cause(self) -> dict[str, list[Shard]]:
        """Return cause -> the shards whose last attempt ended so, the most frequent first."""
        found: dict[str, list[Shard]] = {}
        for shard_id in self.ids("failed"):
            found.setdefault(self.shards[shard_id].cause or "", []).append(self.shards[shard_id])
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def causes_of(self, submission: Submission) -> dict[str, dict[str, Any]]:
        """Return why shards of a submission are sent again: cause -> shards, and how often on which node."""
        sent = {
            shard_id for array in submission.arrays for ids in array.shards_of_tasks() for shard_id in ids
        }
        found = {}
        for cause, shards in self.failed_by_cause().items():
            if again := [each for each in shards if each.shard_id in sent]:
                nodes = Counter(each.attempts[-1].node for each in again if each.attempts[-1].node)
                found[cause] = {"shards": id_ranges(each.shard_id for each in again), "nodes": dict(nodes)}
        return found

    def why_not_visible(self) -> str:
        """Return why it cannot be seen what some jobs do."""
        runs = {
            f"a run on {each.node} (process {each.pid}) has not said that it ended; look there"
            for each in self.records.own
            if each.ended is None and each.pid and each.is_alive() is None
        }
        return "; ".join(sorted({*self.queue.hidden.values(), *runs, *self.records.unreadable}))

    def live_jobs(self) -> dict[str, list[str]]:
        """Return cluster -> its jobs of ours that wait or run, verify jobs included."""
        clusters = {sent.number: sent.cluster for sent in self.submissions}
        found: dict[str, set[str]] = {}
        for (number, job_id, _), job in self.queue.jobs.items():
            if job.is_live:
                found.setdefault(clusters.get(number, self.queue.cluster), set()).add(job_id)
        return {cluster: sorted(found[cluster], key=int) for cluster in sorted(found)}

    def live_job_ids(self) -> list[str]:
        """Return the jobs of ours that wait or run."""
        return sorted({job_id for job_ids in self.live_jobs().values() for job_id in job_ids}, key=int)

    def held_jobs(self) -> dict[str, str]:
        """Return the jobs of submissions that wait for ``scontrol release``, and why."""
        return {
            job.job_id: job.reason
            for (number, *_), job in self.queue.jobs.items()
            if number != PLAIN and job.is_waiting and meaning_of(job.reason)[1] == "release"
        }

    def waits_for_a_person(self) -> bool:
        """Whether jobs wait that never begin by themselves, and no other goes on."""
        waiting = [job.reason for job in self.queue.jobs.values() if job.is_waiting]
        is_running = any(job.is_live and not job.is_waiting for job in self.queue.jobs.values())
        # Verify jobs and controllers wait for the others.
        others = [meaning_of(reason)[1] for reason in waiting if not re.match("Dependency$|None$", reason)]
        return bool(others) and all(others) and not is_running

    def jobs_to_wait_for(self) -> list[str]:
        """Return the jobs after which nothing changes any more: not the verify jobs of earlier submissions.

        One of these may wait for nodes that are gone.
        """
        obsolete = {each.verify_job_id for each in self.submissions[:-1]}
        live = (*self.live_job_ids(), *self.queue.unrecorded, *self.queue.controllers)
        return [each for each in live if each not in obsolete]


def chosen_shards(folder: Path, text: str | None) -> set[int] | None:
    """Return the shards of --shards; None for all. Raises UsageError."""
    if text is None:
        return None
    num_shards = need_plan(folder).num_shards
    try:
        return set(ids_of_ranges(text, end=num_shards))
    except ValueError:
        expected = f"ids of 0 to {num_shards - 1}, such as {num_shards - 1}"
        raise UsageError.of_value("--shards", text, expected) from None


def find_state(
    folder: Path,
    plan: Plan,
    *,
    if_away: Callable[[SlurmAway], None] | None = None,
    made: MadeShards | None = None,
    before: DatasetState | None = None,
) -> DatasetState:
    """Join manifests, records and what Slurm shows. Raises what reading them gives reason for.

    With ``if_away`` nothing is raised where Slurm gives no answer: it is told, and what no manifest or record
    proves is ``not visible``. ``made``: what the manifests say, where somebody has read them already.
    ``before``: what was found a moment ago; what was done then is not read again.
    """
    identity, unreadable = folder_identity(folder), list[str]()
    try:
        sent = read_submissions(folder)
    except ReadWriteError as error:
        if if_away is None or "Permission denied" not in str(error):
            raise
        sent, unreadable = [], [str(error)]
    submissions = [each for each in sent if each.identity == identity]
    foreign = [each for each in sent if each.identity != identity]

    def look_at_manifests() -> MadeShards:
        return made or find_made_shards(folder, plan.spec, known=before.made if before else None)

    records = read_attempts(folder, plan.plan_id)
    open_records = [each for each in records.own if each.ended is None and each.job_id]
    has_jobs = bool(sent or open_records)
    first = None if has_jobs else look_at_manifests()
    queue = Queue()
    if has_jobs or (first and len(first.done) < plan.num_shards and shutil.which("squeue")):
        config = before.queue.config if before else {}
        try:
            queue = find_queue(folder, plan.plan_id, submissions, foreign, open_records, config)
        except SlurmAway as error:
            if if_away is None:
                raise
            if_away(error)
            hidden = {each.number: "Slurm gives no answer" for each in submissions}
            queue = Queue(hidden=hidden, away=str(error))
    # Looked at last: what Slurm says has ended has its manifest, or the end of its record, by then.
    now = {each.path: each for each in read_attempts(folder, plan.plan_id).own}
    own = _with_ends([now[each.path] for each in records.own if each.path in now], queue)
    records = AttemptRecords(own=own, foreign=records.foreign, unreadable=[*unreadable, *records.unreadable])
    found = first if first and not queue.jobs else look_at_manifests()
    nothing: StateName = "not visible" if records.unreadable else "not submitted"
    shards = [
        Shard(shard_id=shard_id, state="done" if shard_id in found.done else nothing)
        for shard_id in range(plan.num_shards)
    ]
    _add_attempts(shards, submissions, own, queue, folder)
    return DatasetState(
        folder=folder,
        plan=plan,
        submissions=submissions,
        foreign=foreign,
        records=records,
        made=found,
        is_verified=is_verified(folder, plan.spec, found),
        shards=shards,
        queue=queue,
    )


def _with_ends(records: Sequence[AttemptRecord], queue: Queue) -> list[AttemptRecord]:
    """Add what Slurm alone knows of an end; it is recorded before Slurm forgets it.

    squeue tells it for some minutes. Later the last lines of the log do, where the record has no cause.
    """
    last_restart: dict[tuple[str, int], int] = {}
    for each in records:
        last_restart[each.key] = max(each.num_restarts, last_restart.get(each.key, 0))
    found = []
    for each in records:
        job = queue.job_of(each)
        stopped_by, ended = "", each.ended
        if not each.stopped_by and job is not None and job.state in _STATES:
            stopped_by, ended = job.state, ended or each.began + job.elapsed_s
        elif each.is_unexplained and each.log and not (queue.away or (job and job.is_live)):
            path = Path(each.log)  # prep_array.sh moves it away when the task is started again
            moved = path.with_name(f"{path.stem}.before-restart-{each.num_restarts + 1}.log")
            log = log_tail(moved) or log_tail(path, last_restart[each.key] - each.num_restarts)
            stopped_by = next((name for words, name in _WORDS_OF_LOGS if re.search(words, log)), "")
        if stopped_by:
            each = replace(each, stopped_by=stopped_by, ended=ended or each.began)
            if each.user == user_name():
                append_end(each)
        found.append(each)
    return found


def _add_attempts(
    shards: Sequence[Shard],
    submissions: Sequence[Submission],
    records: Sequence[AttemptRecord],
    queue: Queue,
    folder: Path,
) -> None:
    """Add the attempts at each shard that is not done, oldest first, and what they make of its state.

    A submission is later than the one before, whatever the nodes' clocks say.
    """
    arrays = {array.job_id: (each.submitted, array) for each in submissions for array in each.arrays}
    found: list[tuple[float, int, Attempt]] = []
    for record in records:
        when, array = arrays.get(record.job_id, (record.began, None))
        job = queue.job_of(record)
        for shard_id in record.shards:
            if shard_id < len(shards) and shards[shard_id].state != "done":
                attempt = _of_record(record, shard_id, job, array, is_away=bool(queue.away))
                found.append((when, shard_id, attempt))

    # Tasks of which no record tells: they wait, have just begun, or never could begin.
    tasks_told = {record.key for record in records}
    starts_told = {(*record.key, record.num_restarts) for record in records}

    def is_told(job: Job | None, key: tuple[str, int]) -> bool:
        return (*key, job.num_restarts) in starts_told if job and job.is_live else key in tasks_told

    for submission in submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                shard_ids = [
                    each for each in shard_ids if each < len(shards) and shards[each].state != "done"
                ]
                job = queue.jobs.get((submission.number, array.job_id, index))
                if not shard_ids or is_told(job, (array.job_id, index)):
                    continue
                task = f"{array.job_id}_{index}"
                if job and (job.is_live or cause_of_task(job)):
                    attempt = _of_task(job, array, f"{folder}/{JOBS_FOLDER}/{LOG_FOLDER}/{task}.log")
                elif job is None and submission.number in queue.hidden:
                    attempt = Attempt(state="not visible", task=task, array=array)
                else:
                    for shard_id in shard_ids:
                        shards[shard_id].without_record = task
                    continue
                found += [(submission.submitted, shard_id, attempt) for shard_id in shard_ids]
    for (number, *_), job in queue.jobs.items():
        is_ours = number == PLAIN and job.is_live and job.index < len(shards)
        if is_ours and shards[job.index].state != "done" and not is_told(job, job.key):
            found.append((math.inf, job.index, _of_task(job, None, "")))

    for _, shard_id, attempt in sorted(found, key=lambda each: each[0]):
        shards[shard_id].attempts.append(attempt)
    for shard in shards:
        kinds = {each.state for each in shard.attempts}
        shard.state = next((state for state in _LIVE if state in kinds), shard.state)
        if shard.state != "not submitted":
            shard.without_record = ""


def _of_record(
    record: AttemptRecord, shard_id: int, job: Job | None, array: JobArray | None, *, is_away: bool
) -> Attempt:
    """What a record says of one of its shards. ``job``: what Slurm says of the same attempt."""
    state: StateName = "failed"
    if record.ended is None and record.pid:  # of ``run``
        is_alive = record.is_alive()
        state = "not visible" if is_alive is None else "running" if is_alive else "failed"
    elif record.ended is None and job is None:
        state = "not visible" if is_away else "failed"
    elif record.ended is None and job and job.is_live and not job.is_waiting:
        state = "running"
    cause = None
    if state == "failed":
        is_warned = array is not None and "--signal" in array.request.sbatch_args
        cause = cause_of(record, job if job and not job.is_live else None, shard_id, is_warned=is_warned)
    failure = record.failures.get(shard_id)
    running = job if state == "running" else None
    elapsed_s = running.elapsed_s if running else 0
    return Attempt(
        state=state,
        task=f"{record.job_id}_{record.index}" if record.job_id else f"{record.node}-{record.pid}",
        array=array,
        record=record,
        cause=cause,
        message=failure.reason if failure else "",
        node=record.node,
        log=record.log,
        is_suspended=running is not None and running.state in SUSPENDED,
        elapsed_s=elapsed_s if record.ended is None else round(record.ended - record.began),
    )


def _of_task(job: Job, array: JobArray | None, log: str) -> Attempt:
    """What Slurm alone says: of a task that waits, that has just begun, or that never could begin."""
    is_waiting = job.is_live and job.is_waiting
    return Attempt(
        state="pending" if is_waiting else "running" if job.is_live else "failed",
        task=f"{job.job_id}_{job.index}",
        array=array,
        cause=None if job.is_live else cause_of_task(job),
        reason=job.reason if is_waiting else "",
        start_time=job.start_time if is_waiting else "",
        node="" if job.node.startswith("None") else job.node,
        log=log,
        is_suspended=job.state in SUSPENDED,
        elapsed_s=job.elapsed_s,
    )


def reason_to_leave(shard: Shard, max_attempts: int, changes: dict[str, Any]) -> str | None:
    """Return why a shard is not tried again: it failed the same way too often, or must fail the same way.

    ``changes`` of the request by a person make it another way.
    """
    if shard.state != "failed":
        return None
    cause, array = shard.cause, shard.attempts[-1].array
    same = sum(1 for _ in itertools.takewhile(lambda each: each.cause == cause, reversed(shard.attempts)))
    before = array.request if array else JobRequest()
    changed = {name for name, value in changes.items() if getattr(before, name) != value}
    if cause == BAD_INPUT and "worker_args" not in changed:
        return "the same input fails in the same way"
    return f"failed the same way {same} times" if same >= max_attempts and not changed else None
