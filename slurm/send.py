"""Send tasks to Slurm: held, then recorded, then released.

All checks are made and all scripts are rendered before anything is sent, so ``--dry_run`` prints exactly what
would be sent. If Slurm refuses the number of tasks, half are tried. No job runs without a record. What is
left if the process dies after a step, and what to type then:

1. The arrays are submitted, held. They do nothing: ``cancel DATA``, then the command again.
2. The verify job is submitted, which waits for them: as after 1.
3. With --until_done the controller is submitted, which waits for both, and recorded: as after 1.
4. The files that Slurm will open as logs are checked: as after 1.
5. The record is written to DATA/jobs. Of two submissions at once only one can; the other one cancels its jobs
   and fails. The arrays are held: ``scontrol release`` their ids, or ``cancel DATA`` and the command again.
6. The scripts are copied to DATA/jobs, for people to read: as after 5.
7. An earlier controller is cancelled: as after 5. The new one waits for the arrays.
8. The arrays are released. Nothing to type: all goes on.
9. The submission is added to the history, and its jobs are printed: nothing to type.

An error in steps 1 to 5 cancels the jobs that were submitted. One in step 8 says what to type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardprep.console import print_exactly, print_lines, say
from shardprep.errors import ShardprepError
from shardprep.format import attempts, commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.jobs import JobArray, SentJob, Submission
from shardprep.format.names import id_ranges
from slurm.announce import announce, say_what_nodes_save, summary_lines
from slurm.checks import check_logs
from slurm.commands import SlurmAway, SlurmFull, SlurmRefused, ask_patiently, run_slurm
from slurm.controller import other_controllers, record_controller
from slurm.nodes import on_whole_nodes
from slurm.request import SendOptions
from slurm.sbatch import show_job, submit_script
from slurm.site import Site
from slurm.state import DatasetState
from slurm.status import wait_for_jobs
from slurm.submission import Group, JobsToSend, is_too_many, render_jobs


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
    if controller:
        _cancel_earlier_controllers(state)
    _release(state, submission)
    _append_to_history(options, state, submission, controller)
    announce(options, state, submission, controller)
    return wait_for_jobs(state.folder) if options.wait else 0


def _send_or_show(
    options: SendOptions, state: DatasetState, groups: Sequence[Group], site: Site
) -> tuple[Submission, str] | None:
    """Submit all jobs, the arrays held, with half as many tasks as long as Slurm refuses their number.

    Returns the record and the controller's job id. --dry_run prints the scripts and returns None.
    """
    most_tasks = max(len(group.shard_ids) for group in groups)
    max_tasks = most_tasks
    while True:
        try:
            jobs = render_jobs(options, state, groups, max_tasks, site)
            is_cut = max_tasks < most_tasks
            if options.dry_run:
                say_what_nodes_save(state, jobs, site, is_cut=is_cut)
                print_lines(*summary_lines(jobs))
                print_exactly(*"\n".join(jobs.scripts()).split("\n"))
                return None
            sent = _send_and_record(options, state, jobs)
        except (SlurmRefused, SlurmFull) as error:
            if max_tasks == 1 or not is_too_many(error):
                raise
            max_tasks //= 2
        else:
            say_what_nodes_save(state, jobs, site, is_cut=is_cut)  # now Slurm took this number of them
            return sent


def _send_and_record(options: SendOptions, state: DatasetState, jobs: JobsToSend) -> tuple[Submission, str]:
    """Submit the arrays held, and the jobs that wait for them.

    Returns the written record and the controller's job id ("" without one). If a step before the record
    fails, the submitted jobs are cancelled. Raises ReadWriteError, SlurmRefused, SlurmAway.
    """
    folder = DataFolder(state.folder)
    folder.make_subfolder(LOGS_FOLDER)
    job_ids: list[str] = []

    try:
        arrays = []
        for array in jobs.arrays:
            job_ids.append(submit_script(array.script, "--hold"))
            shown = show_job(job_ids[-1])
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
        job_ids.append(jobs.verify.submit(f"--dependency=afterany:{':'.join(after)}"))
        shown = show_job(job_ids[-1])
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
        if jobs.controller is not None:
            # Submitted before the release, so that a limit on jobs is noticed before any shard is made.
            controller = jobs.controller.submit(f"--dependency=afterany:{':'.join(job_ids)}")
            job_ids.append(controller)
            record_controller(state.folder, controller, jobs.controller.name, shown.submit_time)
        check_logs(folder, job_ids)
        job_files.publish_submission(folder, submission)
    except BaseException:
        num_arrays = len(jobs.arrays)
        with contextlib.suppress(ShardprepError):
            # First those that wait for the arrays: they would begin as soon as these are gone. If Slurm does
            # not answer, the arrays stay held, and nothing begins.
            for ids in (job_ids[num_arrays:], job_ids[:num_arrays]):
                if ids:
                    run_slurm("scancel", *ids)
        raise
    # Kept for people to read: Slurm deletes its own copies.
    for job_id, script in zip(job_ids, jobs.scripts(), strict=True):
        with contextlib.suppress(ShardprepError):
            folder.publish(f"{JOBS_FOLDER}/{submission.number:04d}-{job_id}.sh", script.encode())
    return submission, controller


def _cancel_earlier_controllers(state: DatasetState) -> None:
    """Cancel those that the new one replaces: two would send failed shards twice.

    After the record, because a submission that fails must not have cancelled the only one. Before the
    release, so that the arrays never run under two, wherever this process dies.
    """
    before = other_controllers(state)
    if not before:
        return
    try:
        run_slurm("scancel", *before)
    except ShardprepError as error:  # it may have ended just now; the jobs are sent in any case
        say(f"warning: {error}; if squeue --me shows it, type: scancel {' '.join(before)}")


def _release(state: DatasetState, submission: Submission) -> None:
    """Let the arrays begin, now that they are recorded. If slurmctld does not answer, it is asked again."""
    ids = ",".join(array.job_id for array in submission.arrays)
    try:
        try:
            ask_patiently(partial(run_slurm, "scontrol", "release", ids))
        except SlurmRefused:  # only some may be released; a release once more changes nothing
            for array in submission.arrays:
                ask_patiently(partial(run_slurm, "scontrol", "release", array.job_id))
    except (SlurmAway, SlurmRefused) as error:
        advice = "The jobs are recorded and held; fix the cause, then release them"
        remedy = f"scontrol release {ids}"
        if re.search("already finished|Invalid job id", str(error)):
            advice = "Somebody cancelled the jobs before they began; look at the status, then submit again"
            remedy = commands.on("status", state.folder)
        raise type(error)(path=error.path, found=f"{error.found}. {advice}", remedy=remedy) from None


def _append_to_history(
    options: SendOptions, state: DatasetState, submission: Submission, controller: str
) -> None:
    """Add the submission to the history, with the causes of the failed shards that it sends again."""
    sent: set[int] = set()
    for array in submission.arrays:
        sent.update(*array.shards_of_tasks())
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
