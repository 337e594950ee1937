"""The records by which a command may act: those that this user wrote, and nobody else can change.

Whoever can write to DATA/jobs can put a record there that names any job, cause, resource or command.
``status``, ``logs`` and ``report`` show such records and say whose they are. ``submit``, ``retry``,
``cancel`` and the controller of ``--until_done`` get records from here alone. So another user's record can
only hold them back, while Slurm shows a live job of that user for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardprep.format.attempts import AttemptRecord
from shardprep.format.jobs import Submission, user_name
from slurm.attempts import Attempt, Shard
from slurm.queue import job_ids_of
from slurm.request import JobRequest, request_of
from slurm.squeue import Job
from slurm.state import DatasetState


@dataclass(frozen=True, kw_only=True)
class OwnRecords:
    """This user's own records of a data set."""

    submissions: list[Submission]  # oldest first
    newest_request: JobRequest | None  # of the newest submission
    newest_of_others: Submission | None  # only for messages
    plain_attempts: list[AttemptRecord]  # at shards, by tasks of plain sbatch; oldest first
    jobs: list[Job]  # recorded ones that wait or run
    controllers: list[str]  # ids of this user's live jobs of --until_done, by name or by own records
    unrecorded: list[str]  # ids of live jobs with a name that only this data set's jobs have

    def live_job_ids(self) -> list[str]:
        """Return the recorded jobs that wait or run, verify jobs included."""
        return sorted({job.job_id for job in self.jobs}, key=int)


def own_records(state: DatasetState) -> OwnRecords:
    """Return the records of a data set that this user owns."""
    me = user_name()
    sent = [each for each in state.submissions if each.is_own]
    recorded = job_ids_of(sent)
    written = [each for each in state.records.of_this_folder if each.is_own]
    plain = [each for each in written if each.job_id not in ("", *recorded)]
    return OwnRecords(
        submissions=sent,
        newest_request=request_of(sent[-1].arrays[0]) if sent else None,
        newest_of_others=next((each for each in reversed(state.submissions) if not each.is_own), None),
        plain_attempts=[each for each in plain if each.num_cpus],
        # A job of this user is in the queue only by an own record, see ``find_queue``.
        jobs=[job for job in state.queue.jobs.values() if job.is_live and job.user == me],
        controllers=state.queue.controllers,
        unrecorded=state.queue.unrecorded,
    )


def own_attempts(shard: Shard) -> list[Attempt]:
    """Return the attempts at a shard by this user, oldest first."""
    return [each for each in shard.attempts if not each.owner]


def live_attempts(shard: Shard) -> list[Attempt]:
    """Return the attempts at a shard whose job waits or runs, of any user: Slurm shows it."""
    return [each for each in shard.attempts if each.job and each.state in ("running", "pending")]


def others_with_jobs(state: DatasetState) -> dict[str, str]:
    """Return job id -> user, for live jobs of the data set that another user submitted."""
    me = user_name()
    return {job.job_id: job.user for job in state.queue.jobs.values() if job.is_live and job.user != me}
