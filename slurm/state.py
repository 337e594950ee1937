"""Where every shard of a data set stands, why the missing ones were not made, and what to do about it.

Manifests say what is done (``preprocess.done_shards``). Of the other shards the attempts' records say who
tried and how it ended, and Slurm says what waits and runs. Slurm is believed of an end where the record has
none, or where Slurm alone can know: memory, the time limit, a node, a preemption. It is not asked where no
job has anything to do with the data set and none of its commands is installed.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from preprocess.attempts import Attempt, Attempts, append_end, folder_identity, read_attempts
from preprocess.done_shards import MadeShards, find_made_shards, is_verified
from preprocess.plan.plan_file import Plan
from shardprep.errors import ReadWriteError, ShardprepError
from shardprep.files import open_regular
from shardprep.format.names import id_ranges
from slurm.commands import SlurmAway
from slurm.queue import LOG_NOT_OPENED, SUSPENDED, ShownJobs, TaskAttempt, find_shown_jobs, nothing_shown
from slurm.script import LOG_FOLDER
from slurm.submissions import JOBS_FOLDER, JobArray, Submission, read_submissions

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
CANCELLED = "CANCELLED"
BAD_INPUT = "bad input (65)"
REFUSED = "refused: plan, options or tokenizer differ (78)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
_NO_INPUT, _CANNOT_WRITE, _READ_WRITE = (
    "no such input or shard (66)",
    "cannot write the output (73)",
    "read or write error (74)",
)
_AGAIN = "retry sends it again"

# Cause -> what to do. Only people can help where retry alone would fail the same way.
REMEDIES = {
    OUT_OF_MEMORY: "retry asks for twice the memory",
    TIMEOUT: "retry asks for twice the time",
    NODE_FAIL: f"{_AGAIN}, and leaves out a node that failed twice",
    CANCELLED: _AGAIN,
    "PREEMPTED": _AGAIN,
    "DEADLINE": _AGAIN,
    STOPPED: _AGAIN,
    STEP_STOPPED: _AGAIN,
    VANISHED: _AGAIN,
    NO_MANIFEST: _AGAIN,
    _READ_WRITE: f"{_AGAIN}; where it fails again, look at the file system that its message names",
    SRUN_FAILED: f"{_AGAIN}; where it fails again, look at --srun_args and at srun's words in the log",
    BAD_INPUT: "retry does not send it again: correct the input and plan anew, or accept what is left out: "
    "--worker_args '--max_bad_fraction 0.05'",
    REFUSED: "bring back what its message names, or plan into a new folder; then retry",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    _NO_INPUT: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _CANNOT_WRITE: "look at permissions, quota and free space of the folder (df, lfs quota); then retry",
    NO_LOG: "look at the folder of its log (permissions, quota); then retry",
}
NEEDS_PEOPLE = (BAD_INPUT, REFUSED, SETUP, SETUP_ENDED, _NO_INPUT, _CANNOT_WRITE, NO_LOG)

_EXIT_CAUSES = {2: SETUP, 65: BAD_INPUT, 66: _NO_INPUT, 73: _CANNOT_WRITE, 74: _READ_WRITE, 75: STOPPED}
_EXIT_CAUSES |= {78: REFUSED}
_STATES = {
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "TIMEOUT": TIMEOUT,
    "NODE_FAIL": NODE_FAIL,
    "BOOT_FAIL": NODE_FAIL,
    "PREEMPTED": "PREEMPTED",
    "DEADLINE": "DEADLINE",
}
_STOPPED_BY = {
    "time limit": TIMEOUT,
    "node failure": NODE_FAIL,
    "preemption": "PREEMPTED",
    "cancel": CANCELLED,
    "cancelled step": STEP_STOPPED,
}
_WARNED_S = 900  # before its time limit a task is warned by USR1, where sbatch --signal asked for it
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """What to do about a cause, in a sentence without an end."""
    if cause.startswith("killed by signal 9"):
        return f"{_AGAIN}; it is often memory: retry --mem_gb"
    return REMEDIES.get(cause, f"look at its log; {_AGAIN}")


def cause_of(attempt: Attempt, task: TaskAttempt | None, shard_id: int, *, is_warned: bool = False) -> str:
    """Why an attempt that has ended, or was killed, did not make ``shard_id``.

    ``task``: what Slurm says of it. ``is_warned``: its request has sbatch's --signal, so USR1 is of a time
    limit.
    """
    failure = attempt.failures.get(shard_id)
    if task is not None and task.state in _STATES and (failure is None or task.state == "OUT_OF_MEMORY"):
        return _STATES[task.state]
    is_killed = failure is None or "killed by signal" in failure.reason
    if attempt.is_out_of_memory and is_killed:
        return OUT_OF_MEMORY
    if failure is not None:
        killed = re.search(r"was killed by signal (\d+)", failure.reason)
        return f"killed by signal {killed[1]}" if killed else exit_cause(failure.exit_code)
    if attempt.ended is None:
        return CANCELLED if task is not None and task.state == "CANCELLED" else VANISHED
    if attempt.stopped_by:
        return _STOPPED_BY.get(attempt.stopped_by) or _STATES.get(attempt.stopped_by, STOPPED)
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


def cause_of_task(task: TaskAttempt) -> str | None:
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
    if not code:
        return NO_MANIFEST
    return f"killed by signal {code - 128}" if code > 128 else _EXIT_CAUSES.get(code, f"exit code {code}")


def log_tail(path: Path) -> str:
    """The last 16 KiB of what a log's last attempt wrote; empty where there is no such file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return _BEGINS.split(file.read().decode("utf-8", "replace"))[-1]
    except (OSError, ShardprepError):
        return ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """The last lines of a log that say something to a person; srun's only where srun itself failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    others = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (others if others and "srun failed" not in log else lines)[-number:]


StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]


@dataclass(frozen=True, kw_only=True)
class ShardAttempt:
    """One attempt at a shard that is not done, or a task that waits to try it; no cause while it goes on."""

    state: StateName
    task: str  # JOB_INDEX, as Slurm writes it, or HOST-PID of a run
    array: JobArray | None = None  # of the submission; None for plain sbatch and run
    record: Attempt | None = None
    cause: str | None = None
    message: str = ""  # the worker's own words of this shard
    reason: str = ""  # why it waits, in Slurm's word
    start_time: str = ""  # when Slurm expects it to start, "" where it does not say
    node: str = ""
    log: str = ""
    is_suspended: bool = False
    elapsed_s: int = 0  # as far as it is known


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """Where a shard stands, and the attempts at it, oldest first."""

    shard_id: int
    state: StateName
    attempts: list[ShardAttempt] = field(default_factory=list)
    has_not_begun: bool = False  # a task was to make it, and ended before it began

    @property
    def cause(self) -> str | None:
        """Why the last attempt failed."""
        return self.attempts[-1].cause if self.state == "failed" else None


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """A data set between plan and verify."""

    folder: Path
    plan: Plan
    submissions: list[Submission]
    foreign: list[Submission]  # of the folder that this one was copied from
    attempts: Attempts
    made: MadeShards
    is_verified: bool
    shards: list[ShardState]  # shard N at N
    shown: ShownJobs
    held: list[str]  # job ids that wait for `scontrol release`: a submission was cut short
    verify: str  # state of the last verify job, or ""

    @property
    def next_number(self) -> int:
        """Of the next submission."""
        return max((submission.number for submission in [*self.submissions, *self.foreign]), default=-1) + 1

    @cached_property
    def _ids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for shard in self.shards:
            found.setdefault(shard.state, []).append(shard.shard_id)
        return found

    def ids(self, *states: StateName) -> list[int]:
        """The shards in one of these states, ascending."""
        return sorted(shard_id for state in states for shard_id in self._ids.get(state, []))

    def failed_by_cause(self) -> dict[str, list[ShardState]]:
        """Cause -> the shards whose last attempt ended so, the most frequent first."""
        found: dict[str, list[ShardState]] = {}
        for shard in self.shards:
            if shard.state == "failed":
                found.setdefault(shard.cause or "", []).append(shard)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def causes_of(self, submission: Submission) -> dict[str, dict[str, Any]]:
        """Why the shards of a new submission are sent again: cause -> shards, and how often on which node."""
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
        """Why it cannot be seen what some jobs do."""
        runs = {
            f"a run on {each.node} (process {each.pid}) has not said that it ended; look there"
            for each in self.attempts.own
            if each.ended is None and each.pid and each.is_alive() is None
        }
        return "; ".join(sorted({*self.shown.hidden.values(), *runs, *self.attempts.unreadable}))

    def live_job_ids(self) -> list[str]:
        """Jobs of ours that wait or run, verify jobs included."""
        return sorted({job_id for job_ids in self.live_jobs().values() for job_id in job_ids}, key=int)

    def jobs_to_wait_for(self) -> list[str]:
        """Jobs after which nothing changes any more: not the verify jobs of earlier submissions.

        One of these may wait for nodes that are gone.
        """
        obsolete = {each.verify_job_id for each in self.submissions[:-1]}
        return [
            each
            for each in (*self.live_job_ids(), *self.shown.unrecorded, *self.shown.controllers)
            if each not in obsolete
        ]

    def live_jobs(self) -> dict[str, list[str]]:
        """Cluster -> its jobs of ours that wait or run, verify jobs included."""
        clusters = {submission.number: submission.cluster for submission in self.submissions}
        live = {
            (clusters[number], job_id)
            for (number, job_id, _), attempts in self.shown.attempts.items()
            if attempts[-1].is_live
        }
        live |= {(self.shown.cluster, each.job_id) for each in self.shown.plain if each.is_live}
        found: dict[str, list[str]] = {}
        for cluster, job_id in sorted(live, key=lambda item: (item[0], int(item[1]))):
            found.setdefault(cluster, []).append(job_id)
        return found


def find_state(
    folder: Path,
    plan: Plan,
    *,
    if_away: Callable[[SlurmAway], None] | None = None,
    made: MadeShards | None = None,
) -> DatasetState:
    """Join manifests, records and what Slurm shows. Raises what reading them gives reason for.

    With ``if_away`` nothing is raised where Slurm gives no answer: it is told, and what no manifest or record
    proves is ``not visible``. ``made``: what the manifests say, where somebody has read them already.
    """
    identity, unreadable = folder_identity(folder), list[str]()
    try:
        recorded = read_submissions(folder)
    except ReadWriteError as error:
        if if_away is None or "Permission denied" not in str(error):
            raise
        recorded, unreadable = [], [str(error)]
    foreign = [each for each in recorded if each.identity not in (None, identity)]
    submissions = [each for each in recorded if each not in foreign]
    attempts = read_attempts(folder, plan.plan_id)
    open_attempts = [each for each in attempts.own if each.ended is None and each.job_id]
    has_jobs = bool(submissions or open_attempts)
    first = made if has_jobs else made or find_made_shards(folder, plan)
    if first and not has_jobs and (len(first.done) == plan.num_shards or shutil.which("squeue") is None):
        shown, made = ShownJobs(), first
    else:
        shown = _shown(folder, plan, submissions, open_attempts, if_away)
    # Looked at last: what Slurm says has ended has its manifest, or the end of its record, by then.
    ended = {each.path: each for each in read_attempts(folder, plan.plan_id).own}
    attempts = Attempts(
        own=[ended[each.path] for each in attempts.own if each.path in ended],
        foreign=attempts.foreign,
        unreadable=[*unreadable, *attempts.unreadable],
    )
    for number, each in enumerate(attempts.own):
        task = None if each.stopped_by else shown.task_of(each)
        if task and task.state in _STATES:
            ended_s = each.began + task.elapsed_s if each.ended is None else each.ended
            attempts.own[number] = replace(each, stopped_by=task.state, ended=ended_s)
            if task.user == getpass.getuser():
                append_end(attempts.own[number])
    made = made or (first if first and not shown.plain else find_made_shards(folder, plan))
    return DatasetState(
        folder=folder,
        plan=plan,
        submissions=submissions,
        foreign=foreign,
        attempts=attempts,
        made=made,
        is_verified=is_verified(folder, plan, made),
        shards=_shard_states(folder, plan.num_shards, made, submissions, attempts, shown),
        shown=shown,
        held=sorted(
            {job for (_, job, _), each in shown.attempts.items() if "JobHeldUser" in each[-1].reason}
        ),
        verify=_verify_state(submissions, shown),
    )


def _shown(
    folder: Path,
    plan: Plan,
    submissions: list[Submission],
    open_attempts: list[Attempt],
    if_away: Callable[[SlurmAway], None] | None,
) -> ShownJobs:
    try:
        return find_shown_jobs(folder, plan.plan_id, submissions, open_attempts)
    except SlurmAway as error:
        if if_away is None:
            raise
        if_away(error)
        return nothing_shown(submissions, error)


def _shard_states(
    folder: Path,
    num_shards: int,
    made: MadeShards,
    submissions: Sequence[Submission],
    attempts: Attempts,
    shown: ShownJobs,
) -> list[ShardState]:
    found: list[list[tuple[float, ShardAttempt]]] = [[] for _ in range(num_shards)]
    not_begun: set[int] = set()
    for when, shard_ids, attempt in _all_attempts(folder, submissions, attempts.own, shown):
        missing = [each for each in shard_ids if each < num_shards and each not in made.done]
        if attempt is None:
            not_begun.update(missing)
            continue
        for shard_id in missing:
            found[shard_id].append((when, attempt(shard_id) if callable(attempt) else attempt))
    states = []
    for shard_id, tried in enumerate(found):
        if shard_id in made.done:
            states.append(ShardState(shard_id=shard_id, state="done"))
            continue
        ordered = [each for _, each in sorted(tried, key=lambda pair: pair[0])]
        is_cut, is_known = shard_id in not_begun, not attempts.unreadable
        states.append(_state_of(shard_id, ordered, is_cut=is_cut, is_known=is_known))
    return states


def _all_attempts(
    folder: Path, submissions: Sequence[Submission], records: Sequence[Attempt], shown: ShownJobs
) -> Iterator[tuple[float, Sequence[int], Callable[[int], ShardAttempt] | ShardAttempt | None]]:
    """(when, shards, the attempt at one of them); None for a task that ended before it began.

    A submission is later than the one before, whatever the nodes' clocks say.
    """
    arrays = {array.job_id: (each.submitted, array) for each in submissions for array in each.arrays}
    seen = {record.key for record in records}
    seen_restarts = {(*record.key, record.num_restarts) for record in records}

    def is_told(task: TaskAttempt | None, key: tuple[str, int]) -> bool:
        """Whether a record tells of this start of the task."""
        return (*key, task.num_restarts) in seen_restarts if task and task.is_live else key in seen

    for record in records:
        when, array = arrays.get(record.job_id, (record.began, None))
        yield when, record.shards, _of_record(record, shown.task_of(record), array, is_away=bool(shown.away))
    for submission, array, index, shard_ids in _tasks(submissions):
        task = shown.last_task(submission.number, array.job_id, index)
        if not is_told(task, (array.job_id, index)):
            attempt = _of_submitted(folder, submission, array, index, shown)
            yield submission.submitted, shard_ids, attempt
    for task in shown.plain:
        if task.is_live and not is_told(task, task.key):
            yield math.inf, [task.index], _of_task(task, None, "")


def _of_submitted(
    folder: Path, submission: Submission, array: JobArray, index: int, shown: ShownJobs
) -> ShardAttempt | None:
    """A submitted task of which no record tells; None where it ended before it began."""
    task = shown.last_task(submission.number, array.job_id, index)
    if task is None and submission.number in shown.hidden:
        return ShardAttempt(state="not visible", task=f"{array.job_id}_{index}", array=array)
    if task is None or not (task.is_live or cause_of_task(task)):
        return None
    return _of_task(task, array, str(folder / JOBS_FOLDER / LOG_FOLDER / f"{array.job_id}_{index}.log"))


def _of_record(
    record: Attempt, task: TaskAttempt | None, array: JobArray | None, *, is_away: bool
) -> Callable[[int], ShardAttempt]:
    """What a record says of each of its shards."""
    is_warned = array is not None and "--signal" in array.request.sbatch_args
    is_running = record.ended is None and task is not None and task.is_live and not task.is_waiting
    if record.ended is None and record.pid:
        is_running = record.is_alive() is True
    is_unknown = record.ended is None and (
        record.is_alive() is None if record.pid else task is None and is_away
    )
    state: StateName = "running" if is_running else "not visible" if is_unknown else "failed"
    ended = task if task is not None and not task.is_live else None

    def attempt_at(shard_id: int) -> ShardAttempt:
        failure = record.failures.get(shard_id)
        elapsed_s = task.elapsed_s if is_running and task else 0
        if record.ended is not None:
            elapsed_s = round(record.ended - record.began)
        return ShardAttempt(
            state=state,
            task=f"{record.job_id}_{record.index}" if record.job_id else f"{record.node}-{record.pid}",
            array=array,
            record=record,
            cause=cause_of(record, ended, shard_id, is_warned=is_warned) if state == "failed" else None,
            message=failure.reason if failure else "",
            node=record.node,
            log=record.log,
            is_suspended=bool(is_running and task and task.state in SUSPENDED),
            elapsed_s=elapsed_s,
        )

    return attempt_at


def _of_task(task: TaskAttempt, array: JobArray | None, log: str) -> ShardAttempt:
    """What Slurm alone says: of a task that waits, that has just begun, or that never could begin."""
    is_waiting = task.is_live and task.is_waiting
    return ShardAttempt(
        state="pending" if is_waiting else "running" if task.is_live else "failed",
        task=f"{task.job_id}_{task.index}",
        array=array,
        cause=None if task.is_live else cause_of_task(task),
        reason=task.reason if is_waiting else "",
        start_time=task.start_time if is_waiting else "",
        node="" if task.node.startswith("None") else task.node,
        log=log,
        is_suspended=task.state in SUSPENDED,
        elapsed_s=task.elapsed_s,
    )


def _state_of(shard_id: int, attempts: list[ShardAttempt], *, is_cut: bool, is_known: bool) -> ShardState:
    states = {attempt.state for attempt in attempts}
    order: tuple[StateName, ...] = ("running", "pending", "not visible", "failed")
    nothing: StateName = "not submitted" if is_known else "not visible"
    state: StateName = next((state for state in order if state in states), nothing)
    return ShardState(
        shard_id=shard_id,
        state=state,
        attempts=attempts,
        has_not_begun=is_cut and state == "not submitted",
    )


def _tasks(submissions: Sequence[Submission]) -> Iterator[tuple[Submission, JobArray, int, list[int]]]:
    for submission in submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                yield submission, array, index, shard_ids


def _verify_state(submissions: Sequence[Submission], shown: ShownJobs) -> str:
    if not submissions:
        return ""
    last = submissions[-1]
    attempts = shown.attempts.get((last.number, last.verify_job_id, 0))
    return attempts[-1].state if attempts else "not visible" if last.number in shown.hidden else "unknown"


def can_retry(state: DatasetState, max_attempts: int = 3) -> list[int]:
    """The failed shards that ``retry`` without flags would send."""
    return [
        shard.shard_id
        for shard in state.shards
        if shard.state == "failed" and not reason_to_leave(shard, max_attempts, {})
    ]


def reason_to_leave(shard: ShardState, max_attempts: int, changes: dict[str, Any]) -> str | None:
    """Why a shard is not tried again: it failed the same way too often, or must fail the same way."""
    if shard.state != "failed":
        return None
    cause, last = shard.cause, shard.attempts[-1].array
    same = 0
    for attempt in reversed(shard.attempts):
        if attempt.cause != cause:
            break
        same += 1
    before = last.request.worker_args if last else ""
    if cause == BAD_INPUT and changes.get("worker_args", before) == before:
        return "the same input fails in the same way"
    return f"failed the same way {same} times" if same >= max_attempts else None
