"""Which of the jobs that Slurm shows are ours, and of which submissions it shows nothing.

A job is ours if its id, user and time of submission are those of a record in O/jobs: a controller that lost
its state gives old ids to other jobs. One that Slurm started again has a later time, and then the name
decides; else a person may have changed the name. What cannot be seen is said to be so: the jobs of another
cluster, of another user where the site keeps jobs private, and all of them while Slurm gives no answer.
Nothing may be concluded from their absence.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from slurm.commands import SlurmAway, read_config
from slurm.job_records import JobIdentity, Submission
from slurm.script import JOB_NAME
from slurm.slurm_queries import (
    TaskAttempt,
    accounted_attempts,
    attempts_by_task,
    named_attempts,
    queued_attempts,
)

TaskKey = tuple[int, str, int]  # number of the submission, job id, index in the array


@dataclass(frozen=True, kw_only=True)
class ShownJobs:
    """What Slurm shows of a data set's submissions."""

    attempts: dict[TaskKey, list[TaskAttempt]] = field(default_factory=dict)  # of a task, oldest first
    hidden: dict[int, str] = field(default_factory=dict)  # number of a submission -> why it is not shown
    strays: list[str] = field(default_factory=list)  # held jobs of ours that no record names
    unrecorded: list[str] = field(default_factory=list)  # others, which wait or run
    away: str = ""  # why Slurm gave no answer
    accounts_away: str = ""  # why its accounts gave none, where there are any
    cluster: str = ""  # which one answered


def find_shown_jobs(submissions: Sequence[Submission], names: Sequence[str]) -> ShownJobs:
    """Ask Slurm about all submissions; ``names``: what this data set's jobs are called.

    A held job of such a name that no record names is of a command that sends it just now, or was cut short.
    Others' records are gone.
    Raises SlurmAway.
    """
    user = getpass.getuser()
    own_ids = [job.job_id for submission in submissions for job in submission.jobs]
    with ThreadPoolExecutor(4) as pool:  # two servers of Slurm's, asked at once
        accounts = pool.submit(_accounted, own_ids, None)
        queue = pool.submit(queued_attempts, own_ids)
        named = pool.submit(named_attempts, user, names)
        config = pool.submit(read_config).result() if submissions else {}
        ended, accounts_away = accounts.result()
        shown = _shown(submissions, ended, queue.result(), config.get("ClusterName", ""))
        hidden = {**shown.hidden, **_private(submissions, shown, config.get("PrivateData", ""), user)}
        recorded = {job.job_id for submission in submissions for job in submission.jobs}
        unnamed = [attempt for attempt in named.result() if attempt.job_id not in recorded]
    strays = {attempt.job_id for attempt in unnamed if "JobHeldUser" in attempt.reason}
    return replace(
        shown,
        hidden=hidden,
        strays=sorted(strays, key=int),
        unrecorded=sorted({attempt.job_id for attempt in unnamed} - strays, key=int),
        accounts_away=shown.accounts_away or accounts_away,
    )


def _accounted(job_ids: Sequence[str], cluster: str | None) -> tuple[list[TaskAttempt], str]:
    """What the accounts keep, and why they gave no answer."""
    try:
        return accounted_attempts(job_ids, cluster), ""
    except SlurmAway as error:
        return [], str(error)


def nothing_shown(submissions: Sequence[Submission], why: SlurmAway) -> ShownJobs:
    """Where Slurm gave no answer."""
    return ShownJobs(hidden={each.number: "Slurm gives no answer" for each in submissions}, away=str(why))


def _shown(
    submissions: Sequence[Submission],
    accounts: Sequence[TaskAttempt],
    queue: Sequence[TaskAttempt],
    cluster: str,
) -> ShownJobs:
    found: dict[TaskKey, list[TaskAttempt]] = {}
    hidden: dict[int, str] = {}
    accounts_away = ""
    for name in sorted({each.cluster for each in submissions}):
        there = [each for each in submissions if each.cluster == name]
        if name in ("", cluster):
            found |= _owned(there, accounts, queue)
            continue
        ids = [job.job_id for submission in there for job in submission.jobs]
        try:
            queue_there = queued_attempts(ids, name)
        except SlurmAway:
            hidden |= {each.number: f"cluster {name} cannot be seen from {cluster}" for each in there}
            continue
        accounts_there, accounts_away = _accounted(ids, name)
        found |= _owned(there, accounts_there, queue_there)
    return ShownJobs(attempts=found, hidden=hidden, cluster=cluster, accounts_away=accounts_away)


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
    seen = {number for number, _, _ in shown.attempts}
    return {
        each.number: f"this site shows the jobs of {each.user} to {each.user} alone"
        for each in submissions
        if each.user != user and each.number not in seen
    }
