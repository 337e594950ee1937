"""What Slurm shows of the jobs that make a data set: its submissions', those of attempts, and plain sbatch's.

A job is a submission's if its id, user and time of submission are those of the record in DATA/jobs: a
controller that lost its state gives old ids to other jobs. One that Slurm started again has a later time,
and then the name decides; else a person may have changed the name. ``sbatch slurm/prep_array.sh DATA`` is
known by what was typed, and, once it runs, by its attempt's record. What cannot be seen is said to be so:
the jobs of another cluster, of another user where the site keeps jobs private, and all of them while Slurm
gives no answer. Nothing may be concluded from their absence.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from preprocess.attempts import Attempt
from slurm.job_records import JobIdentity, Submission
from slurm.job_script import CONTROLLER_SUFFIX, JOB_NAME, names_begin
from slurm.slurm_commands import SlurmAway, read_config
from slurm.slurm_queries import (
    TaskAttempt,
    accounted_attempts,
    attempts_by_task,
    own_live_attempts,
    queued_attempts,
)

TaskKey = tuple[int, str, int]  # number of the submission, job id, index in the array
_DEFAULT_FOLDER = "/data/processed"  # of prep_array.sh


@dataclass(frozen=True, kw_only=True)
class ShownJobs:
    """What Slurm shows of a data set's jobs."""

    attempts: dict[TaskKey, list[TaskAttempt]] = field(default_factory=dict)  # of a task, oldest first
    plain: list[TaskAttempt] = field(default_factory=list)  # index N makes shard N
    hidden: dict[int, str] = field(default_factory=dict)  # number of a submission -> why it is not shown
    controllers: list[str] = field(default_factory=list)  # jobs of submit --until_done
    strays: list[str] = field(default_factory=list)  # held jobs of ours that no record names
    unrecorded: list[str] = field(default_factory=list)  # others, which wait or run
    away: str = ""  # why Slurm gave no answer
    accounts_away: str = ""  # why its accounts gave none, where there are any
    cluster: str = ""  # which one answered

    @cached_property
    def _by_key(self) -> dict[tuple[str, int], list[TaskAttempt]]:
        found = {(job_id, index): tasks for (_, job_id, index), tasks in self.attempts.items()}
        for task in self.plain:
            found.setdefault(task.key, []).append(task)
        return found

    def last_task(self, number: int, job_id: str, index: int) -> TaskAttempt | None:
        """What Slurm says of a submission's task; None where it shows none."""
        tasks = self.attempts.get((number, job_id, index))
        return tasks[-1] if tasks else None

    def task_of(self, attempt: Attempt) -> TaskAttempt | None:
        """What Slurm says of the task of an attempt, in whatever way the task was submitted."""
        tasks = self._by_key.get(attempt.key)
        return _of_restart(tasks, attempt.num_restarts) if tasks else None


def _of_restart(tasks: Sequence[TaskAttempt], num_restarts: int) -> TaskAttempt | None:
    """The attempt of this restart. The accounts do not number them; squeue numbers the last."""
    last = tasks[-1]
    if last.num_restarts == num_restarts:
        return last
    return tasks[num_restarts] if num_restarts < len(tasks) - 1 else None


def find_shown_jobs(
    folder: Path, plan_id: str, submissions: Sequence[Submission], open_attempts: Sequence[Attempt]
) -> ShownJobs:
    """Ask squeue what waits and runs, and the accounts of what it no longer shows and no record ends.

    A held job whose name is this data set's, and that no record names, is of a command that sends it just
    now, or was cut short. Raises SlurmAway.
    """
    user, begin = getpass.getuser(), names_begin(folder, plan_id)
    recorded = {job.job_id for submission in submissions for job in submission.jobs}
    others = {each.job_id: each for each in open_attempts if each.job_id and each.job_id not in recorded}
    with ThreadPoolExecutor(3) as pool:
        queue = pool.submit(queued_attempts, [*recorded, *others])
        mine = pool.submit(own_live_attempts, user)
        config = pool.submit(read_config).result() if submissions else {}
        queued, own = queue.result(), mine.result()
    shown = _shown(submissions, queued, config.get("ClusterName", ""), open_attempts)
    hidden = {**shown.hidden, **_private(submissions, shown, config.get("PrivateData", ""), user)}
    known = {(each.job_id, each.index): each.user for each in open_attempts}
    plain = [each for each in queued if each.job_id in others and known.get(each.key) == each.user]
    seen = {each.key for each in plain}
    accounts_away = ""
    try:
        forgotten = {each.job_id for each in others.values() if each.key not in seen}
        ended = accounted_attempts(forgotten)
        plain += [each for each in ended if known.get(each.key) == each.user and not each.is_live]
    except SlurmAway as error:
        accounts_away = str(error)
    plain += [
        each
        for each in own
        if each.key not in seen and each.job_id not in recorded and _is_plain(each, folder)
    ]
    plain_ids = {each.job_id for each in plain}
    unnamed = [
        each
        for each in own
        if each.name.startswith(begin) and each.job_id not in recorded and each.job_id not in plain_ids
    ]
    controllers = {each.job_id for each in unnamed if each.name.endswith(CONTROLLER_SUFFIX)}
    unnamed = [each for each in unnamed if each.job_id not in controllers]
    strays = {each.job_id for each in unnamed if "JobHeldUser" in each.reason}
    return replace(
        shown,
        plain=plain,
        hidden=hidden,
        controllers=sorted(controllers, key=int),
        strays=sorted(strays, key=int),
        unrecorded=sorted({each.job_id for each in unnamed} - strays, key=int),
        accounts_away=shown.accounts_away or accounts_away,
    )


def _is_plain(task: TaskAttempt, folder: Path) -> bool:
    """Whether it is a task of ``sbatch slurm/prep_array.sh FOLDER``. squeue joins the words by blanks."""
    script, _, words = task.command.partition(" ")
    if Path(script).name != "prep_array.sh" and task.name != JOB_NAME:
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


def nothing_shown(submissions: Sequence[Submission], why: SlurmAway) -> ShownJobs:
    """Where Slurm gave no answer."""
    return ShownJobs(hidden={each.number: "Slurm gives no answer" for each in submissions}, away=str(why))


def _shown(
    submissions: Sequence[Submission],
    queue: Sequence[TaskAttempt],
    cluster: str,
    open_attempts: Sequence[Attempt],
) -> ShownJobs:
    found: dict[TaskKey, list[TaskAttempt]] = {}
    hidden: dict[int, str] = {}
    accounts_away = ""
    for name in sorted({each.cluster for each in submissions}):
        there = [each for each in submissions if each.cluster == name]
        asked, queue_there = None, queue
        if name not in ("", cluster):
            asked = name
            ids = [job.job_id for submission in there for job in submission.jobs]
            try:
                queue_there = queued_attempts(ids, name)
            except SlurmAway:
                hidden |= {each.number: f"cluster {name} cannot be seen from {cluster}" for each in there}
                continue
        ids = _unexplained(there, queue_there, open_attempts)
        try:
            accounts = accounted_attempts(ids, asked)
        except SlurmAway as error:
            accounts, accounts_away = [], str(error)
        found |= _owned(there, accounts, queue_there)
    return ShownJobs(attempts=found, hidden=hidden, cluster=cluster, accounts_away=accounts_away)


def _unexplained(
    submissions: Sequence[Submission], queue: Sequence[TaskAttempt], open_attempts: Sequence[Attempt]
) -> list[str]:
    """Arrays with an attempt that has no end in its record and does not run: the accounts may know why."""
    live = {each.key for each in queue if each.is_live}
    arrays = {array.job_id for submission in submissions for array in submission.arrays}
    return sorted({each.job_id for each in open_attempts if each.key not in live and each.job_id in arrays})


def _owned(
    submissions: Sequence[Submission], accounts: Iterable[TaskAttempt], queue: Iterable[TaskAttempt]
) -> dict[TaskKey, list[TaskAttempt]]:
    """The attempts of these submissions' jobs on one cluster."""
    jobs = [(each.number, job) for each in submissions for job in each.jobs]
    by_id: dict[str, list[tuple[int, JobIdentity]]] = {}
    for number, job in jobs:
        by_id.setdefault(job.job_id, []).append((number, job))
    ended: dict[int, list[TaskAttempt]] = {number: [] for number, _ in jobs}
    queued: dict[int, list[TaskAttempt]] = {number: [] for number, _ in jobs}
    for attempt in accounts:
        for number, job in reversed(by_id.get(attempt.job_id, [])):
            if _is_of(job, attempt, is_later=attempt.submit_time > job.submit_time):
                ended[number].append(attempt)
                break
    for attempt in queue:
        for number, job in reversed(by_id.get(attempt.job_id, [])):
            if _is_of(job, attempt, is_later=attempt.num_restarts > 0):
                queued[number].append(attempt)
                break
    return {
        (number, *key): attempts
        for number in ended
        for key, attempts in attempts_by_task(ended[number], queued[number]).items()
    }


def _is_of(job: JobIdentity, attempt: TaskAttempt, *, is_later: bool) -> bool:
    """Whether Slurm shows this job, whose id is the same."""
    if attempt.user != job.user:
        return False
    if attempt.name == job.name:
        return is_later or attempt.submit_time == job.submit_time
    is_of_another_submission = attempt.name.startswith(f"{JOB_NAME}-")  # no person calls a job so
    return attempt.submit_time == job.submit_time and not is_of_another_submission


def _private(
    submissions: Sequence[Submission], shown: ShownJobs, private_data: str, user: str
) -> dict[int, str]:
    """Submissions of others that a site with PrivateData=jobs does not show."""
    if not re.search(r"\b(jobs|all)\b", private_data):
        return {}
    seen: Collection[int] = {number for number, _, _ in shown.attempts}
    return {
        each.number: f"this site shows the jobs of {each.user} to {each.user} alone"
        for each in submissions
        if each.user != user and each.number not in seen
    }
