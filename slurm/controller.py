"""The controller of ``--until_done``, a small job that goes on where a person would.

When the arrays and their verify job have ended, it runs ``retry --until_done``. This writes the report of
a verified data set, or sends failed shards again with another controller behind them, or stops and says what
only a person can fix.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from shardprep.console import counted, print_lines, say, shards_text
from shardprep.errors import ReadWriteError
from shardprep.format import attempts
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.processes import run_shardprep, shardprep_command
from slurm.causes import remedy_of
from slurm.commands import SlurmFull, ask_patiently
from slurm.fit import controller_request, request_of_small_jobs
from slurm.job_names import CONTROL, job_name_prefix
from slurm.limits import Limits
from slurm.own import own_records
from slurm.refusals import CONTROLLER_JOB, Tester, options_of
from slurm.request import JobRequest, SendOptions
from slurm.retry_rules import why_not_retried
from slurm.sbatch import show_job, submit_script
from slurm.scripts import script_head
from slurm.site import Site
from slurm.state import DatasetState

CONTROLLER_TEXT = "sends failed shards again until the data set is verified (--until_done)"


def controller_job(
    options: SendOptions, state: DatasetState, request: JobRequest, limits: Limits
) -> tuple[JobRequest, str]:
    """Return the request and the script of the controller behind tasks with a request. ``limits``: its own.

    It runs outside of any container, because it needs Slurm's commands.
    """
    flags: list[object] = ["--round", options.next_round]
    if options.shards is not None:
        flags += ["--shards", options.shards]
    if options.shards_per_task is not None:
        flags += ["--shards_per_task", options.shards_per_task]
    words = shlex.join(shardprep_command("retry", state.folder, "--until_done", *flags))
    small = controller_request(
        request_of_small_jobs(request), limits, sum(state.plan.shard_bytes())
    )  # it may verify, too
    name = f"{job_name_prefix(state.folder, state.plan.plan_id)}{state.next_number}{CONTROL}"
    lines = script_head(state.folder, name, "control-%j", options_of(CONTROLLER_JOB, small))
    if request.setup:
        lines.append(f"source {shlex.quote(request.setup)}")
    return small, "\n".join([*lines, f"exec {words}", ""])


def submit_controller(options: SendOptions, state: DatasetState, request: JobRequest) -> None:
    """Submit a controller that starts after the queued jobs, unless there is one already."""
    others = other_controllers(state)
    if others:
        print_lines(f"job {others[0]} already waits to send failed shards again (--until_done)")
        return
    controllers = own_records(state).controllers
    job_ids = [each for each in state.jobs_to_wait_for() if each not in controllers]
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    limits = Site(state.queue.config, is_needed=True).limits(request_of_small_jobs(request))
    small, script = controller_job(options, state, request, limits)

    def submit_it() -> str:
        Tester().check(CONTROLLER_JOB, small, script, limits)
        return submit_script(script, *after)

    job_id = ask_patiently(submit_it, only=SlurmFull)
    shown = show_job(job_id)
    record_controller(state.folder, job_id, shown.name, shown.submit_time)
    job_files.append_event(DataFolder(state.folder), options.command, jobs=job_ids, controller=job_id)
    print_lines(f"job {job_id}: {CONTROLLER_TEXT}")


def record_controller(folder: Path, job_id: str, name: str, submit_time: str) -> None:
    """Record a controller, so that it is found after somebody renamed it.

    ``submit_time``: of the controller, or of the job that was submitted just before it.
    """
    data_dir = DataFolder(folder)
    record = job_files.Controller(
        job_id=job_id,
        name=name,
        submit_time=submit_time,
        identity=attempts.folder_identity(data_dir),
    )
    job_files.publish_controller(data_dir, record)


def other_controllers(state: DatasetState) -> list[str]:
    this_job = os.environ.get("SLURM_JOB_ID")
    return [each for each in own_records(state).controllers if each != this_job]


def why_not_verified(options: SendOptions, state: DatasetState) -> str:
    """Verify the data set if all its shards are made. Return why it is not verified, or ""."""
    if state.is_verified:
        return ""
    missing = set(range(state.plan.num_shards)) - state.made.done.keys()
    if not missing:
        code = run_shardprep("verify", state.folder)
        return "verify failed; its messages are in this log" if code else ""
    words = []
    for cause, shards in state.failed_by_cause().items():
        why = why_not_retried(shards[0], {}) or "left out"
        ids = id_ranges(each.shard_id for each in shards)
        words.append(f"{shards_text(ids)}: {cause}, {why}; {remedy_of(cause)}")
    wanted = chosen_shards(state.plan.num_shards, options.shards)
    if options.shards is not None and wanted is not None and not missing & wanted:
        others = shards_text(id_ranges(missing))
        words.append(f"{shards_text(options.shards)} are made, as asked for; {others} are not")
    return "; ".join(words) or "shards are missing, and jobs that are not visible here may be making them"


def finish(state: DatasetState, why: str, request: JobRequest) -> int:
    """End --until_done: write the report or say why a person must help, and run --notify."""
    folder = state.folder
    code = 0
    if why:
        code = ReadWriteError.exit_code
        job_files.append_event(DataFolder(folder), "stopped", why=why)
        say(f"error: only a person can help now: {why}")
    else:
        output = folder / "report.html"
        run_shardprep("report", folder, "--output", output)
        job_files.append_event(DataFolder(folder), "finished", report=str(output))
        say(f"{counted(state.plan.num_shards, 'shard')} verified; wrote {output}")
    if request.notify:
        result = {"SHARDPREP_RESULT": "not verified" if why else "verified", "SHARDPREP_EXIT_CODE": str(code)}
        subprocess.run(["bash", "-c", request.notify], env={**os.environ, **result}, check=False)
    return code
