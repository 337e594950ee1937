"""Everything that a submission would send: arrays, the verify job and the controller, all checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardprep.console import say, shards_text
from shardprep.errors import ShardprepError
from shardprep.format.names import id_ranges
from slurm.commands import SlurmRefused
from slurm.controller import controller_job
from slurm.fit import request_of_small_jobs, verify_request
from slurm.job_names import CONTROL, VERIFY, job_name_prefix
from slurm.limits import Limits
from slurm.refusals import (
    CONTROLLER_JOB,
    TASKS,
    VERIFY_JOB,
    Tester,
    about_refused,
    check_nodes,
    check_request,
)
from slurm.request import JobRequest, SendOptions
from slurm.sbatch import submit_script
from slurm.scripts import array_script, tasks_of_shards, verify_script
from slurm.site import Site
from slurm.state import DatasetState

# Slurm's messages for more jobs than MaxArraySize, a QOS or an account allows. A QOS that forbids the size or
# time of a job gives the same message, and mostly names its limit before.
_TOO_MANY = re.compile(r"accounting/QOS policy|array specification|submit limit|SubmitJob", re.IGNORECASE)
_TOO_LARGE = re.compile(r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|NotSatisfied)")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Shards to send whose tasks have the same request."""

    request: JobRequest
    shard_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class ArrayToSend:
    """A job array that would be sent."""

    request: JobRequest
    tasks: list[str]  # task i makes the shards tasks[i], such as 17 or 0-5
    script: str


@dataclass(frozen=True, kw_only=True)
class SmallJob:
    """The verify job or the controller that would be sent."""

    what: str
    name: str
    request: JobRequest
    script: str
    limits: Limits

    def submit(self, *options: str) -> str:
        """Submit it and return its id. Raises as ``submit_script`` does. A refusal names the job."""
        try:
            return submit_script(self.script, *options)
        except SlurmRefused as error:
            words = about_refused(error, self.what, self.request, self.limits)
            raise SlurmRefused(found=f"{words}. All jobs of this submission were cancelled") from None


@dataclass(frozen=True, kw_only=True)
class JobsToSend:
    """Everything that would be sent: arrays, the verify job behind them, and the controller."""

    arrays: list[ArrayToSend]
    verify: SmallJob
    controller: SmallJob | None  # with --until_done
    cluster: str

    def scripts(self) -> list[str]:
        """Return all scripts in the order of submission."""
        last = [] if self.controller is None else [self.controller.script]
        return [*(array.script for array in self.arrays), self.verify.script, *last]


def render_jobs(
    options: SendOptions, state: DatasetState, groups: Sequence[Group], max_tasks: int, site: Site
) -> JobsToSend:
    """Render all scripts, and check every request. Each array has at most ``max_tasks`` tasks.

    A group that is refused is left out with a message, if others are not. Raises SlurmRefused.
    """
    name = f"{job_name_prefix(state.folder, state.plan.plan_id)}{state.next_number}"
    tester = Tester()
    arrays: list[ArrayToSend] = []
    refusals: list[SlurmRefused] = []
    for group in groups:
        limits = site.limits(group.request)
        array = _render_array(options, state, group, name, max_tasks, limits)
        try:
            check_request(group.request, limits, TASKS)
            if limits.cluster:
                tester.check(TASKS, group.request, array.script, limits)
        except SlurmRefused as error:
            # Shards of other causes are sent nevertheless.
            if len(groups) == 1 or (max_tasks > 1 and is_too_many(error)):
                raise
            say(f"left out: {shards_text(id_ranges(group.shard_ids))}: {error}")
            refusals.append(error)
        else:
            arrays.append(array)
    if not arrays:
        raise refusals[0]

    request = request_of_small_jobs(arrays[0].request)
    limits = site.limits(request)
    # The controller notifies at the very end, so the verify job does not.
    quiet = request.changed(notify=None) if options.until_done else request
    verify = verify_request(quiet, limits, sum(state.plan.shard_bytes()))
    script = verify_script(state.folder, name + VERIFY, state.plan.num_shards, verify)
    if not request.controller_args:  # which may name another partition
        check_nodes(verify, limits, VERIFY_JOB)
    verify_job = SmallJob(what=VERIFY_JOB, name=name + VERIFY, request=verify, script=script, limits=limits)
    controller = None
    if options.until_done:
        small, script = controller_job(options, state, request, limits)
        controller = SmallJob(
            what=CONTROLLER_JOB, name=name + CONTROL, request=small, script=script, limits=limits
        )
    for job in (verify_job, controller):
        if job is not None and limits.cluster:
            tester.check(job.what, job.request, job.script, limits)
    return JobsToSend(arrays=arrays, verify=verify_job, controller=controller, cluster=limits.cluster)


def _render_array(
    options: SendOptions, state: DatasetState, group: Group, name: str, max_tasks: int, limits: Limits
) -> ArrayToSend:
    num_allowed = min(max_tasks, limits.max_array_size or max_tasks)
    per_task = options.shards_per_task
    if per_task is None and group.request.num_cpus is None:
        per_task = limits.max_cpus  # a process on each of the node's CPUs
        if group.request.nodes is not None:
            per_task = len(group.shard_ids)
    tasks = tasks_of_shards(group.shard_ids, num_allowed, per_task)
    script = array_script(state.folder, name, tasks, group.request)
    return ArrayToSend(request=group.request, tasks=tasks, script=script)


def is_too_many(error: ShardprepError) -> bool:
    """Return whether fewer tasks may be accepted."""
    text = str(error)
    return bool(_TOO_MANY.search(text)) and not _TOO_LARGE.search(text)
