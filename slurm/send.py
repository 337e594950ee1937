"""``submit``: which shards go to Slurm, in which tasks, with which resources, and their way there.

First everything is checked and every script is rendered: what ``--dry_run`` prints is what ``Sending.send``
sends. A submission has two phases, so that no job runs unrecorded: its jobs are submitted held, their record
is written to DATA/jobs, then they are released. If it is killed in between, there are held jobs that do
nothing. Of two submissions at once only one gets its record written; the other one cancels its jobs and says
so. Where Slurm takes no more tasks at once, it is tried again with half as many.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lustre
from shardprep.command_line import given_of
from shardprep.console import counted, print_lines, quoted, say, shards_text
from shardprep.errors import ShardprepError, UsageError
from shardprep.files import make_subfolder, publish_bytes
from shardprep.format.jobs import (
    JOBS_FOLDER,
    LOGS_FOLDER,
    MEMORY_FIELDS,
    JobArray,
    JobRequest,
    SentJob,
    Submission,
    append_event,
    folder_identity,
    publish_submission,
    with_changes,
)
from shardprep.format.names import chosen_shards, id_ranges
from slurm.commands import (
    REQUEST_VARIABLES,
    SlurmAway,
    SlurmMissing,
    SlurmRefused,
    ask_patiently,
    megabytes_of,
    minutes_of,
    slurm_answer,
    slurm_output,
)
from slurm.script import (
    CONTROL,
    VERIFY,
    Site,
    array_script,
    check_folder,
    check_script,
    controller_script,
    find_site,
    names_begin,
    tasks_of_shards,
    verify_script,
)
from slurm.state import DatasetState, find_state
from slurm.status import wait_for_jobs

Groups = list[tuple[JobRequest, list[int]]]
"""Shards that are to be sent, by what their tasks ask for."""

# Slurm's words for more jobs than MaxArraySize, a QOS or an account allows, and for a size or time that a QOS
# forbids: then fewer tasks are refused, too, and its words are shown.
_TOO_MANY = re.compile(r"accounting/QOS policy|array specification|submit limit|SubmitJob", re.IGNORECASE)
_VERIFIED_BYTES_PER_S = 5e6  # of the input, on one slow core


def submit(args: argparse.Namespace) -> int:
    """Submit the missing shards as a job array, and a verify job after it: ``submit DATA``."""
    flags = given_of(args, JobRequest)
    given = with_variables(flags)
    request = JobRequest(**given)
    if args.dry_run:
        for name, value in given.items():
            say(f"{name} is {value!r} ({'flag' if name in flags else REQUEST_VARIABLES[name]})")
    try:
        state, missing = _missing_shards(args, request)
        if missing:
            return send_groups(args, state, [(request, missing)])
    except SlurmMissing as error:
        error.remedy = f"shardprep run {quoted(args.output_dir)}"
        raise
    print_lines(f"nothing to submit: {state.summary}")
    if args.until_done and not args.dry_run:
        leave_controller(args, state, request)
    return wait_for_jobs(args.output_dir) if args.wait and not args.dry_run else 0


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the user gave by flags, or else by variables of sbatch and prep_array.sh.

    Raises UsageError for a time or memory that cannot be read.
    """
    found: dict[str, Any] = {}
    for name, variable in REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        if name in ("time_min", *MEMORY_FIELDS):
            value = minutes_of(text) if name == "time_min" else (megabytes_of(text) or 0) / 1024
            if not value:
                expected = "60 or 2:00:00" if name == "time_min" else "4000 or 4G"
                raise UsageError(
                    f"{variable} is {text!r:.60}, expected a value such as {expected}; "
                    f"unset it, or give the flag --{name} too"
                )
        found[name] = value
    given = with_changes(found, flags)
    if given.get("setup"):
        given["setup"] = os.path.abspath(os.path.expanduser(given["setup"]))  # noqa: PTH100, PTH111 - text
    return given


def _missing_shards(args: argparse.Namespace, request: JobRequest) -> tuple[DatasetState, list[int]]:
    """Check the folder, and choose the missing shards that are not queued.

    Shards that --shards names are sent also where it cannot be seen whether they run.
    """
    plan = check_folder(args.output_dir, request)
    wanted = chosen_shards(plan.num_shards, args.shards)
    state = find_state(args.output_dir, plan, needs_slurm=not args.dry_run)
    if state.queue.away:
        say(f"warning: {state.queue.away}. What is queued, and what this site allows, is left out")
    check_queue(state, wanted)
    missing = state.ids("failed", "not submitted")
    unseen = state.ids("not visible")
    if wanted is not None or state.queue.away:
        missing, unseen = sorted([*missing, *unseen]), []
    if unseen:
        say(
            f"left out: {len(unseen)} shards may wait or run where it cannot be seen from here "
            f"({state.why_not_visible()}); if they do not: --shards {id_ranges(unseen)}"
        )
    if wanted is not None:
        missing = [shard_id for shard_id in missing if shard_id in wanted]
    if missing:
        _tell_room(state, missing)
    return state, missing


def _tell_room(state: DatasetState, shard_ids: Sequence[int]) -> None:
    """Say what these shards need, by those that are done, and what is left on a Lustre."""
    if lustre.why_not_usable(state.folder):
        return
    done = state.made.done.values()
    input_bytes = sum(each.input_bytes for each in done)
    sizes = state.plan.shard_bytes()
    num_bytes = sum(sizes[shard_id] for shard_id in shard_ids)
    if input_bytes:
        num_bytes = round(num_bytes * sum(each.tar_bytes for each in done) / input_bytes)
    for line in lustre.space_lines(state.folder, lustre.Need(num_bytes=num_bytes, num_shards=len(shard_ids))):
        say(line)


def check_queue(state: DatasetState, wanted: set[int] | None) -> None:
    """Say which of the wanted shards (None: all) are queued already, and are not sent again.

    Raises SlurmRefused for jobs of which nobody can say what they make: it would be made twice.
    """
    if state.queue.unrecorded:
        raise SlurmRefused(
            f"jobs {', '.join(state.queue.unrecorded)} of this data set wait or run, and no file in "
            f"{state.folder / JOBS_FOLDER} says which shards they make: another command sends them just now, "
            "or was cut short, or the folder was emptied; wait until they have ended, or end them: "
            f"shardprep cancel {quoted(state.folder)}"
        )
    if queued := [each for each in state.ids("running", "pending") if wanted is None or each in wanted]:
        named = shards_text(id_ranges(queued))
        say(f"left out, as they wait or run (one that was cancelled may end just now): {named}")


@dataclass(kw_only=True)
class Sending:
    """What one command is about to send, checked and rendered as sbatch will get it."""

    state: DatasetState
    arrays: list[tuple[JobRequest, list[str], str]]  # request, tasks, script
    verify: str  # script of the verify job
    controller: str  # script of the job of --until_done, or ""
    cluster: str

    @property
    def scripts(self) -> list[str]:
        """Return the scripts in the order in which they are sent."""
        return [*(script for _, _, script in self.arrays), self.verify, *filter(None, [self.controller])]

    def send(self) -> tuple[Submission, str]:
        """Submit all, held, write the record, and return it and the controller's id.

        If a step before the record fails, what was submitted is cancelled again. Raises SubmittedMeanwhile.
        """
        state, job_ids = self.state, list[str]()
        make_subfolder(state.folder, LOGS_FOLDER)

        def submitted(script: str, *options: str) -> dict[str, Any]:
            job_ids.append(submit_script(script, "--hold", *options))
            return slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_ids[-1])

        try:
            arrays = []
            for request, tasks, script in self.arrays:
                shown = submitted(script)
                del shown["user"]
                arrays.append(JobArray(job_id=job_ids[-1], request=request, tasks=tasks, **shown))
            before = {sent.verify.job_id for sent in state.submissions}
            queued = [each for each in state.live_job_ids() if each not in before]
            shown = submitted(self.verify, f"--dependency=afterany:{':'.join([*job_ids, *queued])}")
            submission = Submission(
                number=state.next_number,
                plan_id=state.plan.plan_id,
                cluster=self.cluster,
                user=shown["user"],
                submitted=round(time.time(), 3),
                arrays=arrays,
                verify=SentJob(job_id=job_ids[-1], name=shown["name"], submit_time=shown["submit_time"]),
                identity=folder_identity(state.folder),
            )
            controller = ""
            if self.controller:
                # Before the release: a limit of jobs that leaves no room for it is met in time.
                controller = submit_script(self.controller, f"--dependency=afterany:{':'.join(job_ids)}")
                job_ids.append(controller)
            publish_submission(state.folder, submission)
        except BaseException:
            if job_ids:
                with contextlib.suppress(ShardprepError):
                    slurm_output("scancel", *job_ids)
            raise
        # For people: Slurm has copies of its own, and forgets them.
        for job_id, script in zip(job_ids, self.scripts, strict=True):
            path = state.folder / JOBS_FOLDER / f"{submission.number:04d}-{job_id}.sh"
            with contextlib.suppress(ShardprepError):
                publish_bytes(path, script.encode("utf-8"))
        return submission, controller


def prepare(args: argparse.Namespace, state: DatasetState, groups: Groups, most_tasks: int) -> Sending:
    """Have Slurm test all scripts, of ``most_tasks`` tasks at most. Raises SlurmRefused, SlurmAway."""
    folder, request = state.folder, groups[0][0]
    name = f"{names_begin(folder, state.plan.plan_id)}{state.next_number}"
    arrays, site = [], None
    for asked, shard_ids in groups:
        per_task, most = args.shards_per_task, most_tasks
        try:
            site = find_site(asked.partition)
            most = min(most, site.max_array_size)
        except SlurmAway:
            if not args.dry_run:
                raise
        if asked.num_cpus is None and site and per_task is None:
            per_task = site.max_cpus  # a process on each of the node's CPUs
        tasks = tasks_of_shards(shard_ids, most, per_task)
        script = array_script(folder, name, tasks, asked)
        if site:
            check_script(asked, script, site)
        arrays.append((asked, tasks, script))
    # The controller notifies, when all is over.
    quiet = request.changed(notify=None) if args.until_done else request
    last_request = _with_time_of_verify(state, quiet, site)
    return Sending(
        state=state,
        arrays=arrays,
        verify=verify_script(folder, name + VERIFY, state.plan.num_shards, last_request),
        controller=_controller(args, state, request, site) if args.until_done else "",
        cluster=site.cluster if site else "",
    )


def _with_time_of_verify(state: DatasetState, request: JobRequest, site: Site | None) -> JobRequest:
    """Return a request with the time limit of a verify job: of all bytes, where a task's is for a shard."""
    if request.time_min is None:
        return request
    wanted = request.time_min + math.ceil(sum(state.plan.shard_bytes()) / _VERIFIED_BYTES_PER_S / 60)
    return request.changed(time_min=min(wanted, (site.max_time_min if site else None) or wanted))


def send_groups(args: argparse.Namespace, state: DatasetState, groups: Groups) -> int:
    """Send shards, in as many tasks as Slurm takes. Raises SubmittedMeanwhile, SlurmRefused, SlurmAway."""
    most_tasks = max(len(shard_ids) for _, shard_ids in groups)
    while True:
        try:
            sending = prepare(args, state, groups, most_tasks)
            if args.dry_run:
                print_lines(*"\n".join(sending.scripts).split("\n"))
                return 0
            submission, controller = sending.send()
            break
        except SlurmRefused as error:
            if most_tasks == 1 or not _TOO_MANY.search(str(error)):
                raise
            most_tasks //= 2
    # Only now that they are recorded the jobs may begin; a slurmctld that gives no answer is asked again.
    ids = ",".join(job.job_id for job in submission.jobs)
    try:
        for job in submission.jobs:  # one by one: of several some may be released, and begin
            ask_patiently(partial(slurm_output, "scontrol", "release", job.job_id))
    except (SlurmAway, SlurmRefused) as error:
        way_on = f"The jobs are recorded and wait, held; when the cause is mended: scontrol release {ids}"
        if re.search("already finished|Invalid job id", str(error)):
            way_on = "Somebody cancelled the jobs before they began; look at the status, then submit again"
        raise type(error)(f"{error}. {way_on}") from None
    _tell(args, state, submission, controller)
    return wait_for_jobs(args.output_dir) if args.wait else 0


def _tell(args: argparse.Namespace, state: DatasetState, submission: Submission, controller: str) -> None:
    """Write what was sent into the history, and say it."""
    sent = {shard_id for array in submission.arrays for ids in array.shards_of_tasks() for shard_id in ids}
    causes = {}
    for cause, failed in state.failed_by_cause().items():
        if again := [each.shard_id for each in failed if each.shard_id in sent]:
            causes[cause] = id_ranges(again)
    facts: dict[str, Any] = {"jobs": [job.job_id for job in submission.jobs], "causes": causes}
    if controller:
        facts["controller"] = controller
        if args.command == "retry":
            facts["round"] = args.round
    append_event(args.output_dir, args.command, **facts)
    for array in submission.arrays:
        mem = "no memory limit" if array.mem_mb is None else f"{array.mem_mb} MB"
        limit = "no time limit" if array.time_min is None else f"{array.time_min} min"
        ids = [shard_id for of_task in array.shards_of_tasks() for shard_id in of_task]
        tasks = counted(len(array.tasks), "task")
        if len(ids) > len(array.tasks):
            tasks += f" of up to {-(-len(ids) // len(array.tasks))} shards"
        print_lines(f"job {array.job_id}: {tasks}, {mem}, {limit}, for {shards_text(id_ranges(ids))}")
    print_lines(f"job {submission.verify.job_id}: verify, when they have ended")
    if controller:
        _tell_controller(state, controller)
    if not args.wait:
        print_lines(f"next: shardprep status {quoted(args.output_dir)} --watch")


def _controller(args: argparse.Namespace, state: DatasetState, request: JobRequest, site: Site | None) -> str:
    """Return the script of the job that looks at what became of the others, and goes on: --until_done."""
    flags = ["--round", args.round + 1 if args.command == "retry" else 1]
    for name in ("shards", "shards_per_task"):
        if getattr(args, name, None) is not None:
            flags += [f"--{name}", getattr(args, name)]
    command = [sys.executable, "-m", "slurm", "retry", state.folder, "--until_done", *flags]
    name = f"{names_begin(state.folder, state.plan.plan_id)}{state.next_number}{CONTROL}"
    request = _with_time_of_verify(state, request, site)  # it may verify, too
    return controller_script(state.folder, name, shlex.join(map(str, command)), request)


def leave_controller(args: argparse.Namespace, state: DatasetState, request: JobRequest) -> None:
    """Leave a controller behind the jobs that wait or run, where there is none."""
    if others := _other_controllers(state):
        print_lines(f"job {others[0]} waits already to send again what fails (--until_done)")
        return
    job_ids = [each for each in state.jobs_to_wait_for() if each not in state.queue.controllers]
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    job_id = submit_script(_controller(args, state, request, find_site(request.partition)), *after)
    append_event(state.folder, args.command, jobs=job_ids, controller=job_id)
    _tell_controller(state, job_id)


def _other_controllers(state: DatasetState) -> list[str]:
    own = os.environ.get("SLURM_JOB_ID")
    return [each for each in state.queue.controllers if each != own]


def _tell_controller(state: DatasetState, job_id: str) -> None:
    """Say what a new controller does, and cancel those before it: two would both send what fails."""
    if before := _other_controllers(state):
        with contextlib.suppress(ShardprepError):
            slurm_output("scancel", *before)
    print_lines(f"job {job_id}: sends again what fails, until all is verified (--until_done)")


def submit_script(script: str, *options: str) -> str:
    """Return the id of a new job, on the last line: a site's sbatch may print a banner before it.

    Where none is there, Slurm may have taken the job all the same: it waits, held, and cancel finds its name.
    """
    try:
        said = slurm_output("sbatch", "--parsable", *options, text=script)
        last = said.strip().rpartition("\n")[2].strip()
        if found := re.fullmatch(r"([0-9]{1,10})(?:;\S+)?", last):  # ID, or ID;CLUSTER
            return found[1]
        why = f"sbatch answered {last[:80]!r}, expected a job id on the last line (--parsable)"
    except SlurmAway as error:
        why = str(error)
    name = re.findall(r"^#SBATCH --job-name=(.*)$", script, re.MULTILINE)[0]
    raise SlurmAway(
        f"{why}. Nothing was recorded. If Slurm took the job it waits, held, and does nothing: squeue --me "
        f"--name={name}, then scancel its number"
    )


def parse_job(text: str) -> dict[str, Any]:
    """Return the fields of JobArray, and the user, of ``scontrol --oneliner show job``. Raises ValueError."""
    named = re.search(r"\bJobName=(.*?) UserId=([^\s(]+)\(", text)
    fields = r"\b(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit|SubmitTime)=(\S+)"
    values = dict(re.findall(fields, text))
    mem_mb = megabytes_of(values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0")
    if not named or mem_mb is None or "SubmitTime" not in values:
        raise ValueError("no job's name, user, time of submission and memory")
    if "MinMemoryCPU" in values:
        mem_mb = int(mem_mb) * int(values.get("NumCPUs", "1").split("-")[0])
    return {
        "name": named[1],
        "user": named[2],
        "submit_time": values["SubmitTime"],
        "mem_mb": int(mem_mb) or None,
        "time_min": minutes_of(values.get("TimeLimit", "")),
    }
