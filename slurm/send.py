"""Send tasks to Slurm: held, then recorded, then released.

All checks are made and all scripts are rendered before anything is sent, so ``--dry_run`` prints exactly what
would be sent. A submission has two phases, so that no job runs without a record: the jobs are submitted held,
their record is written to DATA/jobs, and then they are released. A kill in between leaves held jobs, which do
nothing. Of two submissions at once only one can write its record; the other one cancels its jobs and fails.
If Slurm refuses the number of tasks, half as many are tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardprep.console import counted, print_lines, say, shards_text
from shardprep.errors import ShardprepError
from shardprep.format import attempts, commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.jobs import JobArray, SentJob, Submission
from shardprep.format.names import id_ranges, ids_of_ranges
from slurm.commands import SlurmAway, SlurmFull, SlurmRefused, ask_patiently, run_slurm
from slurm.controller import CONTROLLER_TEXT, controller_job, other_controllers, record_controller
from slurm.fit import request_of_small_jobs, verify_request
from slurm.job_names import VERIFY, job_name_prefix
from slurm.limits import Limits
from slurm.nodes import node_hours, nodes_note, on_whole_nodes
from slurm.refusals import CONTROLLER_JOB, TASKS, VERIFY_JOB, Tester, check_nodes, check_request
from slurm.request import JobRequest, SendOptions, request_of
from slurm.sbatch import SubmittedJob, show_job, submit_script
from slurm.scripts import array_script, tasks_of_shards, verify_script
from slurm.site import Site
from slurm.state import DatasetState
from slurm.status import wait_for_jobs

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
class _Array:
    """A job array that would be sent."""

    request: JobRequest
    tasks: list[str]  # task i makes the shards tasks[i], such as 17 or 0-5
    script: str


@dataclass(frozen=True, kw_only=True)
class _Jobs:
    """Everything that would be sent: arrays, the verify job behind them, and the controller."""

    arrays: list[_Array]
    verify_script: str
    controller_script: str | None  # with --until_done
    cluster: str

    def scripts(self) -> list[str]:
        """Return all scripts in the order of submission."""
        last = [] if self.controller_script is None else [self.controller_script]
        return [*(array.script for array in self.arrays), self.verify_script, *last]


def send_groups(
    options: SendOptions, state: DatasetState, groups: Sequence[Group], site: Site | None = None
) -> int:
    """Submit, record and release jobs. Raises ReadWriteError, SlurmRefused, SlurmAway."""
    site = site or Site(state.queue.config, is_needed=not options.dry_run)
    made = list(state.made.done.values())
    sizes = state.plan.shard_bytes()
    fitted = []
    for group in groups:
        limits = site.limits(group.request)
        request = on_whole_nodes(group.request, limits, sizes, group.shard_ids, made)
        fitted.append(Group(request=request, shard_ids=group.shard_ids))
    groups = fitted
    send = partial(_send_or_show, options, state, groups, site)
    # With --until_done no person is there to submit again.
    sent = ask_patiently(send, only=SlurmFull) if options.until_done else send()
    if sent is None:
        return 0
    submission, controller = sent
    _release(state, submission)
    _announce(options, state, submission, controller)
    return wait_for_jobs(state.folder) if options.wait else 0


def _send_or_show(
    options: SendOptions, state: DatasetState, groups: Sequence[Group], site: Site
) -> tuple[Submission, str] | None:
    """Submit all jobs held, with half as many tasks as long as Slurm refuses their number.

    Returns the record and the controller's job id. --dry_run prints the scripts and returns None.
    """
    most_tasks = max(len(group.shard_ids) for group in groups)
    max_tasks = most_tasks
    while True:
        try:
            jobs = _render(options, state, groups, max_tasks, site)
            _say_what_nodes_save(state, jobs, site, is_cut=max_tasks < most_tasks)
            if options.dry_run:
                print_lines(*_summary_lines(jobs), *"\n".join(jobs.scripts()).split("\n"))
                return None
            return _send_held(options, state, jobs)
        except (SlurmRefused, SlurmFull) as error:
            if max_tasks == 1 or not _is_too_many(error):
                raise
            max_tasks //= 2


def _render(
    options: SendOptions, state: DatasetState, groups: Sequence[Group], max_tasks: int, site: Site
) -> _Jobs:
    """Render all scripts, and check every request. Each array has at most ``max_tasks`` tasks.

    A group that is refused is left out with a message, if others are not. Raises SlurmRefused.
    """
    name = f"{job_name_prefix(state.folder, state.plan.plan_id)}{state.next_number}"
    tester = Tester()
    arrays: list[_Array] = []
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
            if len(groups) == 1 or (max_tasks > 1 and _is_too_many(error)):
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
    if limits.cluster:
        tester.check(VERIFY_JOB, verify, script, limits)
    last = None
    if options.until_done:
        small, last = controller_job(options, state, request, limits)
        if limits.cluster:
            tester.check(CONTROLLER_JOB, small, last, limits)
    return _Jobs(arrays=arrays, verify_script=script, controller_script=last, cluster=limits.cluster)


def _render_array(
    options: SendOptions, state: DatasetState, group: Group, name: str, max_tasks: int, limits: Limits
) -> _Array:
    num_allowed = min(max_tasks, limits.max_array_size or max_tasks)
    per_task = options.shards_per_task
    if per_task is None and group.request.num_cpus is None:
        per_task = limits.max_cpus  # a process on each of the node's CPUs
        if group.request.nodes is not None:
            per_task = len(group.shard_ids)
    tasks = tasks_of_shards(group.shard_ids, num_allowed, per_task)
    script = array_script(state.folder, name, tasks, group.request)
    return _Array(request=group.request, tasks=tasks, script=script)


def _is_too_many(error: ShardprepError) -> bool:
    """Return whether fewer tasks may be accepted."""
    text = str(error)
    return bool(_TOO_MANY.search(text)) and not _TOO_LARGE.search(text)


def _send_held(options: SendOptions, state: DatasetState, jobs: _Jobs) -> tuple[Submission, str]:
    """Submit all jobs held, and return the written record and the controller's job id ("" without one).

    If a step before the record fails, the submitted jobs are cancelled. Raises ReadWriteError, SlurmRefused,
    SlurmAway.
    """
    folder = DataFolder(state.folder)
    folder.make_subfolder(LOGS_FOLDER)
    job_ids: list[str] = []

    def submit_held(script: str, *words: str) -> SubmittedJob:
        job_ids.append(submit_script(script, "--hold", *words))
        return show_job(job_ids[-1])

    try:
        arrays = []
        for array in jobs.arrays:
            shown = submit_held(array.script)
            sent = JobArray(
                job_id=shown.job_id,
                name=shown.name,
                submit_time=shown.submit_time,
                request=dataclasses.asdict(array.request),
                tasks=array.tasks,
                mem_mb=shown.mem_mb,
                time_min=shown.time_min,
            )
            arrays.append(sent)
        # The verify job also waits for arrays of earlier submissions, but not for their verify jobs.
        after = [*job_ids, *state.jobs_that_make_shards()]
        shown = submit_held(jobs.verify_script, f"--dependency=afterany:{':'.join(after)}")
        submission = Submission(
            number=state.next_number,
            plan_id=state.plan.plan_id,
            cluster=jobs.cluster,
            user=shown.user,
            submitted=round(time.time(), 3),
            arrays=arrays,
            verify=SentJob(job_id=shown.job_id, name=shown.name, submit_time=shown.submit_time),
            identity=attempts.folder_identity(folder),
            is_typed=options.is_typed,
        )
        controller = ""
        if jobs.controller_script is not None:
            # Submitted before the release, so that a limit on jobs is noticed before any shard is made.
            controller = submit_script(jobs.controller_script, f"--dependency=afterany:{':'.join(job_ids)}")
            job_ids.append(controller)
            record_controller(state.folder, controller)
        job_files.publish_submission(folder, submission)
    except BaseException:
        if job_ids:
            with contextlib.suppress(ShardprepError):
                run_slurm("scancel", *job_ids)
        raise
    # Kept for people to read: Slurm deletes its own copies.
    for job_id, script in zip(job_ids, jobs.scripts(), strict=True):
        with contextlib.suppress(ShardprepError):
            folder.publish(f"{JOBS_FOLDER}/{submission.number:04d}-{job_id}.sh", script.encode())
    return submission, controller


def _release(state: DatasetState, submission: Submission) -> None:
    """Let the jobs begin, now that they are recorded. If slurmctld does not answer, it is asked again."""
    ids = ",".join(job.job_id for job in submission.jobs)
    try:
        try:
            ask_patiently(partial(run_slurm, "scontrol", "release", ids))
        except SlurmRefused:  # only some may be released; a release once more changes nothing
            for job in submission.jobs:
                ask_patiently(partial(run_slurm, "scontrol", "release", job.job_id))
    except (SlurmAway, SlurmRefused) as error:
        advice = "The jobs are recorded and held; fix the cause, then release them"
        remedy = f"scontrol release {ids}"
        if re.search("already finished|Invalid job id", str(error)):
            advice = "Somebody cancelled the jobs before they began; look at the status, then submit again"
            remedy = commands.on("status", state.folder)
        raise type(error)(path=error.path, found=f"{error.found}. {advice}", remedy=remedy) from None


def _announce(options: SendOptions, state: DatasetState, submission: Submission, controller: str) -> None:
    """Append the submission to the history, and print its jobs."""
    shards_of = {each.job_id: list(itertools.chain(*each.shards_of_tasks())) for each in submission.arrays}
    sent = set(itertools.chain(*shards_of.values()))
    causes = {}
    for cause, failed in state.failed_by_cause().items():
        again = sent.intersection(each.shard_id for each in failed)
        if again:
            causes[cause] = id_ranges(again)
    facts: dict[str, Any] = {"jobs": [job.job_id for job in submission.jobs], "causes": causes}
    if controller:
        facts["controller"] = controller
        if options.command == "retry":
            facts["round"] = options.round or 1
    job_files.append_event(DataFolder(state.folder), options.command, **facts)
    for array in submission.arrays:
        mem = "no memory limit" if array.mem_mb is None else f"{array.mem_mb} MB"
        limit = "no time limit" if array.time_min is None else f"{array.time_min} min"
        ids = shards_of[array.job_id]
        tasks = counted(len(array.tasks), "task")
        if len(ids) > len(array.tasks):
            tasks += f" of up to {math.ceil(len(ids) / len(array.tasks))} shards"
        limit += _node_hours_text(array)
        print_lines(f"job {array.job_id}: {tasks}, {mem}, {limit}, for {shards_text(id_ranges(ids))}")
    print_lines(f"job {submission.verify.job_id}: verify, when they have ended")
    if controller:
        before = other_controllers(state)
        if before:  # two controllers would send failed shards twice
            with contextlib.suppress(ShardprepError):
                run_slurm("scancel", *before)
        print_lines(f"job {controller}: {CONTROLLER_TEXT}")
    if not options.wait:
        print_lines(f"next: {commands.on('status', state.folder, '--watch')}")


def _node_hours_text(array: JobArray) -> str:
    """Return what tasks on whole nodes are billed at most, with a comma before it, or ""."""
    request = request_of(array)
    if request.num_cpus is not None or array.time_min is None:
        return ""
    hours = node_hours(request, len(array.tasks), array.time_min)
    return f", at most {hours:,.1f} node-hours"


def _say_what_nodes_save(state: DatasetState, jobs: _Jobs, site: Site, *, is_cut: bool) -> None:
    sizes = state.plan.shard_bytes()
    for array in jobs.arrays:
        tasks = [ids_of_ranges(task) for task in array.tasks]
        limits = site.limits(array.request)
        note = nodes_note(array.request, limits, sizes, tasks, state.made.done.values(), is_cut=is_cut)
        if note:
            say(note)


def _summary_lines(jobs: _Jobs) -> list[str]:
    """Return comments above the scripts of a dry run: jobs, tasks at once, and the most that they may use."""
    num_jobs = counted(len(jobs.scripts()), "job")
    lines = [f"# {num_jobs}, not submitted: arrays of tasks, then verify"]
    for array in jobs.arrays:
        request = array.request
        num_tasks = len(array.tasks)
        at_once = min(request.max_parallel, num_tasks)
        words = [f"# {counted(num_tasks, 'task')}, {at_once} at once"]
        unit = "CPU"
        if request.num_cpus is None:
            unit = "node"
            nodes = "a whole node"
            if request.nodes is not None:
                nodes = counted(request.nodes, "whole node")
            words.append(f"{nodes} each")
        else:
            words.append(f"{counted(request.num_cpus, 'CPU')} each")
        if request.time_min is None:
            words.append("no time limit named")
        else:
            unit_hours = node_hours(request, num_tasks, request.time_min) * (request.num_cpus or 1)
            hours = math.ceil(num_tasks / at_once) * request.time_min / 60
            words.append(f"at most {request.time_min} min each")
            words.append(f"at most {unit_hours:,.1f} {unit}-hours and {hours:,.1f} hours in all")
        lines.append(", ".join(words))
    return lines
