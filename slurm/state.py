"""Find the state of every shard of a data set, and the attempts at it.

Manifests say which shards are done. For the others, the records of attempts say who tried and how it ended,
and Slurm says which jobs wait and run. squeue shows Slurm's reason for an end for some minutes (MinJobAge),
and the first command that sees it writes it into the record. ``slurm.own`` keeps records of other users out
of everything that a command does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from shardprep.errors import BrokenShard, ReadWriteError, UsageError
from shardprep.format import attempts
from shardprep.format import jobs as job_files
from shardprep.format.attempts import AttemptRecord
from shardprep.format.data_folder import JOBS_FOLDER, DataFolder
from shardprep.format.done import MadeShards, find_made_shards, is_verified
from shardprep.format.jobs import Submission, user_name
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan
from slurm.attempts import Shard, add_attempts, job_of
from slurm.causes import (
    CANCELLED,
    CAUSE_OF_STATE,
    COMPLETED,
    NO_MANIFEST,
    cause_in_log,
    is_unexplained,
)
from slurm.commands import SlurmAway
from slurm.queue import Queue, find_queue, job_ids_of
from slurm.request import request_of
from slurm.squeue import ASK_AGAIN_S, StateName


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """A data set between plan and verify."""

    folder: Path
    plan: Plan
    submissions: list[Submission]
    next_number: int  # of a submission
    records: attempts.AttemptRecords
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
            for each in self.records.of_this_folder
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
    identity = attempts.folder_identity(data_dir)
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
    of_jobs = job_ids_of(each for each in submissions if each.is_own)
    records = attempts.read_attempts(data_dir, plan.plan_id, identity, of_jobs=of_jobs)
    open_records = [each for each in records.of_this_folder if each.ended is None and each.job_id]
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
            ids = job_ids_of(submissions)
            ids |= {record.job_id for record in open_records}
            queue = Queue(hidden=dict.fromkeys(ids, "Slurm does not answer"), away=str(error))
        # Read records and manifests after asking Slurm: a task that it shows as ended has written them.
        listed = {each.path for each in records.of_this_folder}
        records.of_this_folder.clear()  # their memory is free for the same records
        now = attempts.read_attempts(data_dir, plan.plan_id, identity, of_jobs=of_jobs)
        records.of_this_folder = [each for each in now.of_this_folder if each.path in listed]
        records.unreadable = now.unreadable
    records.unreadable = [*unreadable, *records.unreadable]
    if found is None or queue.jobs:
        found = find_made_shards(data_dir, plan.spec, known=known, see=see)
    _add_ends(records.of_this_folder, queue, found)

    undone: StateName = "not visible" if records.unreadable else "not submitted"
    every = range(plan.num_shards)
    shards = [Shard(shard_id=each, state="done" if each in found.done else undone) for each in every]
    add_attempts(shards, submissions, records.of_this_folder, queue, folder)
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
        job = job_of(record, tasks)
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
            if record.is_own and record.user == user_name():
                attempts.append_end(record)


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
