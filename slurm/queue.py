"""Which jobs in the queue belong to a data set.

A job belongs to a submission if its id, user and submit time are in the record: a slurmctld that lost its
state gives old ids to other jobs. A requeued job has a later submit time, and must have the same name;
otherwise a user may have renamed it. Jobs of plain ``sbatch slurm/prep_array.sh DATA`` are known from the
records of their tasks, once one has begun. The absence of a job proves nothing if jobs may be hidden.

A job of this user belongs to the data set only by an own record or by its name. Records that other users
wrote name jobs of these users.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from shardprep.format import attempts, commands
from shardprep.format import jobs as job_files
from shardprep.format.attempts import AttemptRecord
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import Submission, user_name
from slurm.commands import read_config
from slurm.job_names import CONTROL, JOB_NAME, OUR_NAME, job_name_prefix
from slurm.squeue import TIME_FORMAT, Job, jobs_of_user, jobs_of_user_for_certain

PLAIN = -1  # in place of a submission's number, for plain sbatch: index N makes shard N
_CLOCKS_DIFFER_S = 600
_USER = re.compile(r"[\w.@$+\\-]{1,256}")
_MAX_OTHER_USERS = 20


@dataclass(kw_only=True)
class Queue:
    """The jobs of a data set, as Slurm shows them."""

    # (number of the submission or PLAIN, job id, index in the array) -> job
    jobs: dict[tuple[int, str, int], Job] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)  # id of a job that is not visible -> why not
    controllers: list[str] = field(default_factory=list)  # ids of jobs of --until_done
    controllers_wait: dict[str, str] = field(default_factory=dict)  # id of one that waits -> Slurm's reason
    unrecorded: list[str] = field(default_factory=list)  # ids of this user's live jobs without a record
    foreign: list[str] = field(default_factory=list)  # live jobs of the folder that this one was copied from
    away: str = ""  # why Slurm did not answer
    config: dict[str, str] = field(default_factory=dict)  # of slurmctld
    is_empty: bool = False  # squeue showed no job of any user who may have one

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

    ``copied``: submissions of the folder that this one was copied from. ``config``: of slurmctld, or {}.
    """
    me = user_name()
    plain = _plain_records(submissions, open_records)
    users = {me}
    users.update(each.user for each in (*submissions, *copied))
    users.update(each.user for each in plain.values())
    asked = _users_to_ask(users, me)
    shown: list[Job] = []
    for user in asked:
        has_running = user == me and any(each.user == me for each in open_records)
        shown += jobs_of_user_for_certain(user) if has_running else jobs_of_user(user)
    if not config and (submissions or copied or users - {me}):
        config = read_config()

    queue = Queue(config=config, is_empty=not shown)
    for sent in submissions:
        queue.jobs |= {(sent.number, *each.key): each for each in _jobs_of(sent, shown, me)}
    for sent in copied:
        queue.foreign += [job.job_id for job in _jobs_of(sent, shown, me) if job.is_live]
    recorded = job_ids_of(each for each in submissions if each.is_own)
    live = [each for each in shown if each.user == me and each.is_live and each.job_id not in recorded]
    _add_plain_tasks(queue, shown, plain, live, me)
    _add_hidden_jobs(queue, folder, submissions, plain.values(), {me, *(job.user for job in shown)}, asked)
    _add_jobs_without_record(queue, folder, plan_id, copied, live)
    queue.foreign = sorted(set(queue.foreign), key=int)
    return queue


def job_ids_of(submissions: Iterable[Submission]) -> set[str]:
    """Return the ids of all jobs of some submissions."""
    ids: set[str] = set()
    for sent in submissions:
        ids.update(job.job_id for job in sent.jobs)
    return ids


def _users_to_ask(users: Iterable[str], me: str) -> list[str]:
    """Return the users whose jobs Slurm is asked for, one call each. Records of others may name many."""
    named = sorted(each for each in users if each != me and _USER.fullmatch(each))
    return sorted([me, *named[:_MAX_OTHER_USERS]])


def _plain_records(
    submissions: Sequence[Submission], open_records: Sequence[AttemptRecord]
) -> dict[tuple[str, int], AttemptRecord]:
    """Return the open records of tasks that no submission names, which are of plain sbatch."""
    of_all = job_ids_of(submissions)
    own = job_ids_of(each for each in submissions if each.is_own)
    records = {}
    for each in open_records:
        submitted = own if each.is_own else of_all
        if each.job_id not in submitted:
            records[each.key] = each
    return records


def _add_plain_tasks(
    queue: Queue,
    shown: Sequence[Job],
    plain: Mapping[tuple[str, int], AttemptRecord],
    live: Sequence[Job],
    me: str,
) -> None:
    """Add tasks of plain sbatch: with an open record, or of this user in the same arrays."""
    began = {(each.job_id, each.user): each.began for each in plain.values() if each.is_own}
    live_keys = {each.key for each in live}
    for job in shown:
        record = plain.get(job.key)
        is_plain = record is not None and _is_start_of(record, job, me)
        if not is_plain and job.key in live_keys:
            # A task of this array must have begun for this data set after the array was submitted.
            is_plain = job.submit_time <= _latest_submit_time(began.get((job.job_id, job.user), 0))
        if is_plain:
            queue.jobs[PLAIN, job.job_id, job.index] = job


def _add_hidden_jobs(
    queue: Queue,
    folder: Path,
    submissions: Sequence[Submission],
    plain: Iterable[AttemptRecord],
    seen_users: set[str],
    asked: Collection[str],
) -> None:
    """Add the jobs that are not visible from here, so that their end is unknown."""
    hides_users = re.search(r"\b(jobs|all)\b", queue.config.get("PrivateData", ""))
    jobs: list[tuple[str, str, str]] = []
    for sent in submissions:
        jobs += [(job.job_id, sent.user, sent.cluster) for job in sent.jobs]
    jobs += [(each.job_id, each.user, "") for each in plain]
    for job_id, user, cluster in jobs:
        if cluster not in ("", queue.config.get("ClusterName", "")):
            command = f"SLURM_CLUSTERS={shlex.quote(cluster)} {commands.on('status', folder)}"
            queue.hidden[job_id] = f"for jobs of cluster {cluster}, type: {command}"
        elif user and user not in asked:
            queue.hidden[job_id] = f"Slurm was not asked for the jobs of {user!r}"
        elif hides_users and user not in seen_users:
            queue.hidden[job_id] = f"this site shows the jobs of {user} only to {user}"


def _add_jobs_without_record(
    queue: Queue, folder: Path, plan_id: str, copied: Sequence[Submission], live: Sequence[Job]
) -> None:
    """Add live jobs of this user that no submission names. Names tell them, and records of controllers."""
    plain_ids = {job_id for number, job_id, _ in queue.jobs if number == PLAIN}
    jobs = {each.job_id: each for each in live if each.job_id not in plain_ids}
    if not jobs:
        return
    prefix = job_name_prefix(folder, plan_id)
    copied_prefixes = tuple(f"{JOB_NAME}-{plan_id[:12]}-{each.identity}-" for each in copied)
    identity = attempts.folder_identity(DataFolder(folder))
    controllers = {}
    for each in job_files.read_own_controllers(DataFolder(folder)):
        if each.identity == identity:
            controllers[each.job_id] = each
    for job_id in sorted(jobs, key=int):
        job = jobs[job_id]
        is_named_controller = job.name.endswith(CONTROL)
        recorded = controllers.get(job_id)
        is_ours = job.name.startswith(prefix)
        if (recorded and _is_controller(job, recorded)) or (is_ours and is_named_controller):
            queue.controllers.append(job_id)
            if job.is_waiting:
                queue.controllers_wait[job_id] = job.reason
        elif is_ours:
            queue.unrecorded.append(job_id)
        elif is_named_controller and job.name.startswith(copied_prefixes):
            queue.foreign.append(job_id)


def _jobs_of(submission: Submission, jobs: Iterable[Job], me: str) -> list[Job]:
    """Return the jobs that belong to a submission. A record of another user names no job of this one."""
    sent_by_id = {job.job_id: job for job in submission.jobs}
    found = []
    for job in jobs:
        sent = sent_by_id.get(job.job_id)
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
    is_renamed = is_same_time and not OUR_NAME.fullmatch(job.name)
    return (job.name == sent.name and (is_same_time or is_later)) or is_renamed


def _is_controller(job: Job, sent: job_files.Controller) -> bool:
    """Return whether a job with a recorded id is that controller.

    The record may have the time of the job that was submitted just before it.
    """
    try:
        sent_s = datetime.strptime(f"{sent.submit_time}+0000", f"{TIME_FORMAT}%z").timestamp()
    except ValueError:  # a damaged record
        return False
    is_in_time = sent.submit_time <= job.submit_time <= _latest_submit_time(sent_s)
    submit_time = job.submit_time if is_in_time else sent.submit_time
    known = job_files.SentJob(job_id=sent.job_id, name=sent.name, submit_time=submit_time)
    return _is_sent_as(job, known)


def _is_start_of(record: AttemptRecord, job: Job, me: str) -> bool:
    """Return whether a task with the id of an open record is the recorded one, or a later start of it.

    A record of another user names no job of this one.
    """
    if record.user != job.user or (job.user == me and not record.is_own):
        return False
    return job.num_restarts > record.num_restarts or job.submit_time <= _latest_submit_time(record.began)


def _latest_submit_time(began: float) -> str:
    """Return the latest time, as Slurm writes it, at which a job that began then was submitted."""
    return datetime.fromtimestamp(began + _CLOCKS_DIFFER_S, timezone.utc).strftime(TIME_FORMAT)
