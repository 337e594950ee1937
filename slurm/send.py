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
from functools import partial
from typing import Any

from shardprep.console import counted, print_lines, say, shards_text
from shardprep.errors import ShardprepError
from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.jobs import JobArray, Submission
from shardprep.format.names import id_ranges
from slurm.checks import warn_of_whole_nodes
from slurm.commands import SlurmAway, SlurmFull, SlurmRefused, ask_patiently, run_slurm, slurm_answer
from slurm.controller import CONTROLLER_TEXT, controller_script, other_controllers, record_controller
from slurm.fit import (
    CONTROLLER_JOB,
    TASKS,
    VERIFY_JOB,
    Site,
    Tester,
    check_request,
    controller_request,
    verify_request,
)
from slurm.limits import Limits
from slurm.queue import VERIFY, job_name_prefix
from slurm.request import JobRequest, SendOptions
from slurm.sbatch import parse_job, submit_script
from slurm.scripts import array_script, tasks_of_shards, verify_script
from slurm.state import DatasetState
from slurm.status import wait_for_jobs

Groups = list[tuple[JobRequest, list[int]]]  # shards to send, grouped by the request of their tasks

# Slurm's messages for more jobs than MaxArraySize, a QOS or an account allows. A QOS that forbids the size or
# time of a job gives the same message, and mostly names its limit before.
_TOO_MANY = re.compile(r"accounting/QOS policy|array specification|submit limit|SubmitJob", re.IGNORECASE)
_TOO_LARGE = re.compile(r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|NotSatisfied)")


def _send_held(
    options: SendOptions, state: DatasetState, groups: Groups, max_tasks: int, site: Site
) -> tuple[Submission, str] | None:
    """Submit all jobs held, and return the written record and the controller's job id ("" without one).

    Each array has at most ``max_tasks`` tasks. --dry_run prints the scripts and returns None. If a step
    before the record fails, the submitted jobs are cancelled. Raises ReadWriteError, SlurmRefused, SlurmAway.
    """
    folder, request = state.folder, groups[0][0]
    name = f"{job_name_prefix(folder, state.plan.plan_id)}{state.next_number}"
    input_bytes = sum(state.plan.shard_bytes())
    tester = Tester()
    rendered: list[tuple[JobRequest, list[str], str]] = []  # (request, tasks, script)
    refusals: list[SlurmRefused] = []
    limits = Limits()
    for group_request, shard_ids in groups:
        limits = site.limits(group_request)
        num_allowed = min(max_tasks, limits.max_array_size or max_tasks)
        per_task = options.shards_per_task
        if group_request.num_cpus is None and per_task is None:
            per_task = limits.max_cpus  # a process on each of the node's CPUs
        tasks = tasks_of_shards(shard_ids, num_allowed, per_task)
        script = array_script(folder, name, tasks, group_request)
        try:
            check_request(group_request, limits, TASKS)
            if limits.cluster:
                tester.check(TASKS, group_request, script, limits)
        except SlurmRefused as error:
            # Shards of other causes are sent nevertheless.
            if len(groups) == 1 or (max_tasks > 1 and _is_too_many(error)):
                raise
            say(f"left out: {shards_text(id_ranges(shard_ids))}: {error}")
            refusals.append(error)
            continue
        rendered.append((group_request, tasks, script))
    if not rendered:
        raise refusals[0]
    # The controller notifies at the very end, so the verify job does not.
    quiet = request.changed(notify=None) if options.until_done else request
    verify = verify_request(quiet, limits, input_bytes)
    scripts = [script for _, _, script in rendered]
    scripts.append(verify_script(folder, name + VERIFY, state.plan.num_shards, verify))
    if options.until_done:
        scripts.append(controller_script(options, state, request, limits))
    if limits.cluster:
        tester.check(VERIFY_JOB, verify, scripts[len(rendered)], limits)
        if options.until_done:
            tester.check(
                CONTROLLER_JOB, controller_request(request, limits, input_bytes), scripts[-1], limits
            )
    if options.dry_run:
        print_lines(*_summary_lines(rendered, len(scripts)), *"\n".join(scripts).split("\n"))
        return None

    DataFolder(folder).make_subfolder(LOGS_FOLDER)
    job_ids: list[str] = []

    def submit_held(script: str, *options: str) -> dict[str, Any]:
        job_ids.append(submit_script(script, "--hold", *options))
        return slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_ids[-1])

    try:
        arrays = []
        for group_request, tasks, script in rendered:
            shown = submit_held(script)
            del shown["user"]
            values = dataclasses.asdict(group_request)
            arrays.append(JobArray(job_id=job_ids[-1], request=values, tasks=tasks, **shown))
        # The verify job also waits for arrays of earlier submissions, but not for their verify jobs.
        after = [*job_ids, *state.jobs_that_make_shards()]
        shown = submit_held(scripts[len(arrays)], f"--dependency=afterany:{':'.join(after)}")
        facts = {name: shown[name] for name in ("name", "submit_time")}
        submission = Submission(
            number=state.next_number,
            plan_id=state.plan.plan_id,
            cluster=limits.cluster,
            user=shown["user"],
            submitted=round(time.time(), 3),
            arrays=arrays,
            verify=job_files.SentJob(job_id=job_ids[-1], **facts),
            identity=job_files.folder_identity(DataFolder(folder)),
            is_typed=options.is_typed_retry,
        )
        controller = ""
        if options.until_done:
            # Submitted before the release, so that a limit on jobs is noticed before any shard is made.
            controller = submit_script(scripts[-1], f"--dependency=afterany:{':'.join(job_ids)}")
            job_ids.append(controller)
            record_controller(folder, controller)
        job_files.publish_submission(DataFolder(folder), submission)
    except BaseException:
        if job_ids:
            with contextlib.suppress(ShardprepError):
                run_slurm("scancel", *job_ids)
        raise
    # Kept for people to read: Slurm deletes its own copies.
    for job_id, script in zip(job_ids, scripts, strict=True):
        with contextlib.suppress(ShardprepError):
            DataFolder(folder).publish(f"{JOBS_FOLDER}/{submission.number:04d}-{job_id}.sh", script.encode())
    return submission, controller


def _summary_lines(rendered: Sequence[tuple[JobRequest, list[str], str]], num_jobs: int) -> list[str]:
    """Return comments above the scripts of a dry run: jobs, tasks at once, and the most that they may use."""
    lines = [f"# {counted(num_jobs, 'job')}, not submitted: arrays of tasks, then verify"]
    for request, tasks, _ in rendered:
        at_once = min(request.max_parallel, len(tasks))
        words = [f"# {counted(len(tasks), 'task')}, {at_once} at once"]
        size = "a whole node each" if request.num_cpus is None else f"{counted(request.num_cpus, 'CPU')} each"
        words.append(size)
        if request.time_min is None:
            words.append("no time limit named")
        else:
            unit = "node" if request.num_cpus is None else "CPU"
            hours = len(tasks) * request.time_min * (request.num_cpus or 1) / 60
            rounds = math.ceil(len(tasks) / at_once)
            words.append(f"at most {request.time_min} min each")
            words.append(
                f"at most {hours:,.1f} {unit}-hours and {rounds * request.time_min / 60:,.1f} hours in all"
            )
        lines.append(", ".join(words))
    return lines


def _is_too_many(error: SlurmRefused) -> bool:
    """Return whether fewer tasks may be accepted."""
    text = str(error)
    return bool(_TOO_MANY.search(text)) and not _TOO_LARGE.search(text)


def send_groups(options: SendOptions, state: DatasetState, groups: Groups, site: Site | None = None) -> int:
    """Submit, record and release jobs. Raises ReadWriteError, SlurmRefused, SlurmAway."""
    site = site or Site(state, is_needed=not options.dry_run)
    max_tasks = max(len(shard_ids) for _, shard_ids in groups)
    warn_of_whole_nodes(groups[0][0], site)
    while True:
        send = partial(_send_held, options, state, groups, max_tasks, site)
        try:
            # No person is there to submit again.
            sent = ask_patiently(send, only=SlurmFull) if options.until_done else send()
            break
        except SlurmRefused as error:
            if max_tasks == 1 or not _is_too_many(error):
                raise
            max_tasks //= 2
    if sent is None:
        return 0
    submission, controller = sent
    # The jobs may begin only now that they are recorded. If slurmctld does not answer, it is asked again.
    ids = ",".join(job.job_id for job in submission.jobs)
    try:
        for job in submission.jobs:  # one by one: a call with several ids may release only some of them
            ask_patiently(partial(run_slurm, "scontrol", "release", job.job_id))
    except (SlurmAway, SlurmRefused) as error:
        advice = "The jobs are recorded and held; fix the cause, then release them"
        remedy = f"scontrol release {ids}"
        if re.search("already finished|Invalid job id", str(error)):
            advice = "Somebody cancelled the jobs before they began; look at the status, then submit again"
            remedy = commands.on("status", state.folder)
        raise type(error)(path=error.path, found=f"{error.found}. {advice}", remedy=remedy) from None
    _announce(options, state, submission, controller)
    return wait_for_jobs(state.folder) if options.wait else 0


def _announce(options: SendOptions, state: DatasetState, submission: Submission, controller: str) -> None:
    """Append the submission to the history, and print its jobs."""
    shards_of = {each.job_id: list(itertools.chain(*each.shards_of_tasks())) for each in submission.arrays}
    sent = set(itertools.chain(*shards_of.values()))
    causes = {}
    for cause, failed in state.failed_by_cause().items():
        if again := sent.intersection(each.shard_id for each in failed):
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
            tasks += f" of up to {-(-len(ids) // len(array.tasks))} shards"
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
