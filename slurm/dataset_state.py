"""Where every shard of a data set stands, and why the ones that are missing were not made.

Manifests say what is done (``preprocess.done_shards``). Of the other shards the attempts' records say who
tried and how it ended, and Slurm says what waits and runs. Slurm is not asked where no job has anything to
do with the data set and none of its commands is installed.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from preprocess.attempts import Attempt, Attempts, folder_identity, read_attempts
from preprocess.done_shards import MadeShards, find_made_shards, is_verified
from preprocess.plan import Plan
from shardprep.errors import ReadWriteError
from shardprep.format.names import id_ranges
from slurm.failure_causes import BAD_INPUT, cause_of, cause_of_task
from slurm.job_records import JOBS_FOLDER, JobArray, Submission, read_submissions
from slurm.job_script import LOG_FOLDER
from slurm.shown_jobs import ShownJobs, TaskKey, find_shown_jobs, nothing_shown
from slurm.slurm_commands import SlurmAway
from slurm.slurm_queries import TaskAttempt

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

    @property
    def wrong(self) -> list[int]:
        """The shards that verify found wrong."""
        return sorted(self.made.wrong)

    @property
    def task_attempts(self) -> Mapping[TaskKey, Sequence[TaskAttempt]]:
        """Of every task of a submission that Slurm shows, oldest first."""
        return self.shown.attempts

    def ids(self, *states: StateName) -> list[int]:
        """The shards in one of these states, ascending."""
        return [shard.shard_id for shard in self.shards if shard.state in states]

    def causes_of(self, submission: Submission) -> dict[str, dict[str, Any]]:
        """Why the shards of a new submission are sent again: cause -> shards, and how often on which node."""
        sent = {
            shard_id for array in submission.arrays for ids in array.shards_of_tasks() for shard_id in ids
        }
        found: dict[str, list[ShardState]] = {}
        for shard in self.shards:
            if shard.shard_id in sent and shard.cause:
                found.setdefault(shard.cause, []).append(shard)
        return {
            cause: {
                "shards": id_ranges(each.shard_id for each in shards),
                "nodes": dict(Counter(each.attempts[-1].node for each in shards if each.attempts[-1].node)),
            }
            for cause, shards in found.items()
        }

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
            for (number, job_id, _), attempts in self.task_attempts.items()
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
    made = made or find_made_shards(folder, plan)
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


def done_shards(folder: Path, plan: Plan) -> set[int]:
    """The shards that are done."""
    return set(find_made_shards(folder, plan).done)


def _shard_states(
    folder: Path,
    num_shards: int,
    made: MadeShards,
    submissions: Sequence[Submission],
    attempts: Attempts,
    shown: ShownJobs,
) -> list[ShardState]:
    found: list[list[ShardAttempt]] = [[] for _ in range(num_shards)]
    not_begun: set[int] = set()
    arrays = {array.job_id: array for submission in submissions for array in submission.arrays}
    seen = {record.key for record in attempts.own}
    seen_restarts = {(*record.key, record.num_restarts) for record in attempts.own}

    def is_told(task: TaskAttempt | None, key: tuple[str, int]) -> bool:
        """Whether a record tells of this start of the task."""
        return (*key, task.num_restarts) in seen_restarts if task and task.is_live else key in seen

    def add(shard_ids: Sequence[int], attempt: ShardAttempt | Callable[[int], ShardAttempt]) -> None:
        for shard_id in shard_ids:
            if shard_id < num_shards and shard_id not in made.done:
                found[shard_id].append(attempt if isinstance(attempt, ShardAttempt) else attempt(shard_id))

    for record in attempts.own:
        task, array = shown.task_of(record), arrays.get(record.job_id)
        add(record.shards, _of_record(record, task, array, is_away=bool(shown.away)))
    tasks = [
        (ids, _of_submitted(folder, submission, array, index, shown))
        for submission, array, index, ids in _tasks(submissions)
        if not is_told(shown.last_task(submission.number, array.job_id, index), (array.job_id, index))
    ]
    tasks += [
        ([task.index], _of_task(task, None, ""))
        for task in shown.plain
        if task.is_live and not is_told(task, task.key)
    ]
    for shard_ids, attempt in tasks:
        if attempt is None:
            not_begun.update(shard_ids)
        else:
            add(shard_ids, attempt)
    return [
        ShardState(shard_id=shard_id, state="done")
        if shard_id in made.done
        else _state_of(
            shard_id, found[shard_id], is_cut=shard_id in not_begun, is_known=not attempts.unreadable
        )
        for shard_id in range(num_shards)
    ]


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
    is_running = record.ended is None and (task is not None and task.is_running)
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
            is_suspended=bool(is_running and task and task.is_suspended),
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
        is_suspended=task.is_suspended,
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
