"""``submit``, ``retry`` and ``cancel``: choose shards, divide them into tasks, and send these to Slurm.

All checks are made and all scripts are rendered before anything is sent, so ``--dry_run`` prints exactly what
would be sent. A submission has two phases, so that no job runs without a record: the jobs are submitted held,
their record is written to DATA/jobs, and then they are released. A kill in between leaves held jobs, which do
nothing. Of two submissions at once only one can write its record; the other one cancels its jobs and fails.
If Slurm refuses the number of tasks, half as many are tried.

A script is ``prep_array.sh`` with another head, which contains the table array index -> shards. Slurm keeps a
copy of the script from submission on, so later changes of files do not affect waiting tasks. Every request
passes the limits of ``slurm.request``.

``submit --until_done`` leaves a small job, the controller, on the cluster. When the arrays and their verify
job have ended, it runs ``retry --until_done``. This writes the report of a verified data set, or sends failed
shards again with another controller behind them, or stops and says what only a person can fix.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lustre
from shardprep.command_line import given_of
from shardprep.console import counted, print_lines, quoted, say, shards_text
from shardprep.errors import CannotWrite, NotFound, ReadWriteError, Refused, ShardprepError, UsageError
from shardprep.files import is_link
from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.jobs import JobArray, JobRequest, Submission
from shardprep.format.manifest import Manifest, find_made_shards, read_manifest
from shardprep.format.names import MAX_SHARDS, chosen_shards, id_ranges, ids_of_ranges
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan
from shardprep.processes import run_shardprep, shardprep_command, start_python
from slurm import own as owns
from slurm import state as states
from slurm.own import OwnRecords, own_records
from slurm.request import (
    CONTROLLER_JOB,
    NUM_PROC,
    TASKS,
    VERIFY_JOB,
    Limits,
    Tester,
    check_request,
    controller_request,
    find_limits,
    more_memory,
    more_time,
    options_of,
    verify_request,
)
from slurm.state import DatasetState, Shard, SlurmAway, SlurmFull, SlurmMissing, SlurmRefused, run_slurm
from slurm.status import wait_for_jobs

Groups = list[tuple[JobRequest, list[int]]]  # shards to send, grouped by the request of their tasks

# Slurm's messages for more jobs than MaxArraySize, a QOS or an account allows. A QOS that forbids the size or
# time of a job gives the same message, and mostly names its limit before.
_TOO_MANY = re.compile(r"accounting/QOS policy|array specification|submit limit|SubmitJob", re.IGNORECASE)
_TOO_LARGE = re.compile(r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|NotSatisfied)")
_CONTROLLER_TEXT = "sends failed shards again until the data set is verified (--until_done)"


def submit(args: argparse.Namespace) -> int:
    """Submit the missing shards as a job array, and a verify job after it: ``submit DATA``."""
    flags = given_of(args, JobRequest)
    given = with_variables(flags)
    request = JobRequest(**given)
    if args.dry_run:
        for name, value in given.items():
            say(f"{name} is {value!r} ({'flag' if name in flags else states.REQUEST_VARIABLES[name]})")
    try:
        state, missing = _missing_shards(args, request)
        if missing:
            return send_groups(args, state, [(request, missing)])
    except SlurmMissing as error:
        error.remedy = commands.run(args.output_dir)
        raise
    print_lines(f"nothing to submit: {state.summary}")
    if args.until_done and not args.dry_run:
        submit_controller(args, state, request)
    return wait_for_jobs(args.output_dir) if args.wait and not args.dry_run else 0


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that flags give, or else variables of sbatch and prep_array.sh."""
    found: dict[str, Any] = {}
    for name, variable in states.REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        such_as = ""
        if name == "time_min":
            value, such_as = states.minutes_of(text), "60 or 2:00:00"
        elif name in job_files.MEMORY_FIELDS:
            value, such_as = (states.megabytes_of(text) or 0) / 1024, "4000 or 4G"
        if not value:
            expected = f"a value such as {such_as}; unset it, or give the flag --{name} too"
            raise UsageError.of_value(variable, text[:60], expected)
        found[name] = value
    given = job_files.with_changes(found, flags)
    if given.get("setup"):
        given["setup"] = os.path.abspath(os.path.expanduser(given["setup"]))  # noqa: PTH100, PTH111 - text
    return given


def _missing_shards(args: argparse.Namespace, request: JobRequest) -> tuple[DatasetState, list[int]]:
    """Check the folder, and return its state and the missing shards that are not queued.

    Shards named by --shards are included even if it is not visible whether they run.
    """
    plan = check_folder(args.output_dir, request)
    wanted = chosen_shards(plan.num_shards, args.shards)
    state = states.find_state(args.output_dir, plan, needs_slurm=not args.dry_run)
    if state.queue.away:
        say(f"warning: {state.queue.away}. The queue and the site's limits are not taken into account")
    check_queue(state, wanted)
    missing = state.ids("failed", "not submitted")
    not_visible = state.ids("not visible")
    if wanted is not None or state.queue.away:
        missing, not_visible = sorted([*missing, *not_visible]), []
    if not_visible:
        why = state.why_not_visible()
        ids = id_ranges(not_visible)
        say(f"left out: {shards_text(ids)} may be running ({why}); if not: --shards {ids}")
    if wanted is not None:
        missing = [shard_id for shard_id in missing if shard_id in wanted]
    if missing and not lustre.why_not_usable(state.folder):
        # Estimate the size of the tars from that of finished ones.
        done, sizes = state.made.done.values(), plan.shard_bytes()
        num_bytes = sum(sizes[shard_id] for shard_id in missing)
        if input_bytes := sum(each.counts.input_bytes for each in done):
            num_bytes = round(num_bytes * sum(each.tar.num_bytes for each in done) / input_bytes)
        need = lustre.Need(num_bytes=num_bytes, num_shards=len(missing))
        for line in lustre.space_lines(state.folder, need):
            say(line)
    return state, missing


def check_queue(state: DatasetState, wanted: set[int] | None) -> None:
    """Report which of the wanted shards (None: all) are not sent because they are queued already.

    Raises SlurmRefused if jobs without a record are queued: their shards would be made twice.
    """
    unrecorded = own_records(state).unrecorded
    if unrecorded:
        jobs = ", ".join(unrecorded)
        found = f"jobs {jobs} wait or run, but no record in {JOBS_FOLDER}/ names their shards"
        expected = "no such jobs; another command may be sending them now: wait, or end them"
        remedy = commands.on("cancel", state.folder)
        raise SlurmRefused(path=state.folder, found=found, expected=expected, remedy=remedy)
    if queued := [each for each in state.ids("running", "pending") if wanted is None or each in wanted]:
        named = shards_text(id_ranges(queued))
        say(f"left out, because they wait or run (or are just being cancelled): {named}")


def _send_held(
    args: argparse.Namespace, state: DatasetState, groups: Groups, max_tasks: int, site: Site
) -> tuple[Submission, str] | None:
    """Submit all jobs held, and return the written record and the controller's job id ("" without one).

    Each array has at most ``max_tasks`` tasks. --dry_run prints the scripts and returns None. If a step
    before the record fails, the submitted jobs are cancelled. Raises ReadWriteError, SlurmRefused, SlurmAway.
    """
    folder, request = state.folder, groups[0][0]
    name = f"{states.job_name_prefix(folder, state.plan.plan_id)}{state.next_number}"
    input_bytes = sum(state.plan.shard_bytes())
    tester = Tester()
    rendered: list[tuple[JobRequest, list[str], str]] = []  # (request, tasks, script)
    refusals: list[SlurmRefused] = []
    limits = Limits()
    for group_request, shard_ids in groups:
        limits = site.limits(group_request)
        num_allowed = min(max_tasks, limits.max_array_size or max_tasks)
        per_task = args.shards_per_task
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
    quiet = request.changed(notify=None) if args.until_done else request
    verify = verify_request(quiet, limits, input_bytes)
    scripts = [script for _, _, script in rendered]
    scripts.append(verify_script(folder, name + states.VERIFY, state.plan.num_shards, verify))
    if args.until_done:
        scripts.append(_controller(args, state, request, limits))
    if limits.cluster:
        tester.check(VERIFY_JOB, verify, scripts[len(rendered)], limits)
        if args.until_done:
            tester.check(
                CONTROLLER_JOB, controller_request(request, limits, input_bytes), scripts[-1], limits
            )
    if args.dry_run:
        print_lines(*_summary_lines(rendered, len(scripts)), *"\n".join(scripts).split("\n"))
        return None

    DataFolder(folder).make_subfolder(LOGS_FOLDER)
    job_ids: list[str] = []

    def submit_held(script: str, *options: str) -> dict[str, Any]:
        job_ids.append(submit_script(script, "--hold", *options))
        return states.slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_ids[-1])

    try:
        arrays = []
        for group_request, tasks, script in rendered:
            shown = submit_held(script)
            del shown["user"]
            arrays.append(JobArray(job_id=job_ids[-1], request=group_request, tasks=tasks, **shown))
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
            is_typed=args.command == "retry" and args.round is None,
        )
        controller = ""
        if args.until_done:
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


class Site:
    """The limits of each request, asked for once. A dry run without Slurm has none."""

    def __init__(self, state: DatasetState, *, is_needed: bool) -> None:
        self._config = state.queue.config
        self._is_needed = is_needed
        self._known: dict[tuple[str, ...], Limits] = {}

    def limits(self, request: JobRequest) -> Limits:
        """Return the limits for a request's partition, account and QOS. Raises as ``slurm_answer`` does."""
        key = tuple(options_of(TASKS, request.changed(**_NO_SIZES)))
        if key not in self._known:
            try:
                self._known[key] = find_limits(request, self._config)
            except SlurmAway:
                if self._is_needed:
                    raise
                self._known[key] = Limits()
        return self._known[key]


_NO_SIZES: dict[str, Any] = {"cpus_per_task": 1, "mem_gb": None, "mem_per_cpu_gb": None, "time_min": None}


def send_groups(
    args: argparse.Namespace, state: DatasetState, groups: Groups, site: Site | None = None
) -> int:
    """Submit, record and release jobs. Raises ReadWriteError, SlurmRefused, SlurmAway."""
    site = site or Site(state, is_needed=not args.dry_run)
    max_tasks = max(len(shard_ids) for _, shard_ids in groups)
    warn_of_whole_nodes(groups[0][0], site)
    while True:
        send = partial(_send_held, args, state, groups, max_tasks, site)
        try:
            # No person is there to submit again.
            sent = states.ask_patiently(send, only=SlurmFull) if args.until_done else send()
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
            states.ask_patiently(partial(run_slurm, "scontrol", "release", job.job_id))
    except (SlurmAway, SlurmRefused) as error:
        advice = "The jobs are recorded and held; fix the cause, then release them"
        remedy = f"scontrol release {ids}"
        if re.search("already finished|Invalid job id", str(error)):
            advice = "Somebody cancelled the jobs before they began; look at the status, then submit again"
            remedy = commands.on("status", state.folder)
        raise type(error)(path=error.path, found=f"{error.found}. {advice}", remedy=remedy) from None
    _announce(args, state, submission, controller)
    return wait_for_jobs(args.output_dir) if args.wait else 0


def _announce(args: argparse.Namespace, state: DatasetState, submission: Submission, controller: str) -> None:
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
        if args.command == "retry":
            facts["round"] = args.round or 1
    job_files.append_event(DataFolder(args.output_dir), args.command, **facts)
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
        before = _other_controllers(state)
        if before:  # two controllers would send failed shards twice
            with contextlib.suppress(ShardprepError):
                run_slurm("scancel", *before)
        print_lines(f"job {controller}: {_CONTROLLER_TEXT}")
    if not args.wait:
        print_lines(f"next: {commands.on('status', args.output_dir, '--watch')}")


def _controller(args: argparse.Namespace, state: DatasetState, request: JobRequest, limits: Limits) -> str:
    """Render the controller's script. It runs outside of any container, because it needs Slurm's commands."""
    flags: list[object] = ["--round", (args.round or 1) + 1 if args.command == "retry" else 1]
    for name in ("shards", "shards_per_task"):
        if getattr(args, name, None) is not None:
            flags += [f"--{name}", getattr(args, name)]
    words = shlex.join(shardprep_command("retry", state.folder, "--until_done", *flags))
    small = controller_request(request, limits, sum(state.plan.shard_bytes()))  # it may verify, too
    name = f"{states.job_name_prefix(state.folder, state.plan.plan_id)}{state.next_number}{states.CONTROL}"
    lines = _head(state.folder, name, "control-%j", options_of(CONTROLLER_JOB, small))
    lines += [f"source {shlex.quote(request.setup)}"] if request.setup else []
    return "\n".join([*lines, f"exec {words}", ""])


def submit_controller(args: argparse.Namespace, state: DatasetState, request: JobRequest) -> None:
    """Submit a controller that starts after the queued jobs, unless there is one already."""
    if others := _other_controllers(state):
        print_lines(f"job {others[0]} already waits to send failed shards again (--until_done)")
        return
    controllers = own_records(state).controllers
    job_ids = [each for each in state.jobs_to_wait_for() if each not in controllers]
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    limits = Site(state, is_needed=True).limits(request)
    script = _controller(args, state, request, limits)
    small = controller_request(request, limits, sum(state.plan.shard_bytes()))

    def submit_it() -> str:
        Tester().check(CONTROLLER_JOB, small, script, limits)
        return submit_script(script, *after)

    job_id = states.ask_patiently(submit_it, only=SlurmFull)
    record_controller(state.folder, job_id)
    job_files.append_event(DataFolder(state.folder), args.command, jobs=job_ids, controller=job_id)
    print_lines(f"job {job_id}: {_CONTROLLER_TEXT}")


def record_controller(folder: Path, job_id: str) -> None:
    """Record a controller, so that it is found after somebody renamed it."""
    shown = states.slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_id)
    facts = {name: shown[name] for name in ("name", "submit_time")}
    identity = job_files.folder_identity(DataFolder(folder))
    job_files.publish_controller(
        DataFolder(folder), job_files.Controller(job_id=job_id, identity=identity, **facts)
    )


def _other_controllers(state: DatasetState) -> list[str]:
    this_job = os.environ.get("SLURM_JOB_ID")
    return [each for each in own_records(state).controllers if each != this_job]


def submit_script(script: str, *options: str) -> str:
    """Submit a script and return its job id, from the last line: a site's sbatch may print a banner first.

    Raises SlurmAway without an id. Slurm may still have taken the job, which can be found by its name.
    """
    try:
        said = run_slurm("sbatch", "--parsable", *options, text=script).stdout
        last = said.strip().rpartition("\n")[2].strip()
        if found := re.fullmatch(r"([0-9]{1,10})(?:;\S+)?", last):  # ID, or ID;CLUSTER
            return found[1]
        why = f"sbatch answered {last[:80]!r}"
    except SlurmAway as error:
        why = str(error.found)
    name = re.findall(r"^#SBATCH --job-name=(.*)$", script, re.MULTILINE)[0]
    expected = "a job id. Nothing was recorded; if Slurm took the job, cancel it: scancel its id"
    raise SlurmAway(found=why, expected=expected, remedy=f"squeue --me --name={name}")


def parse_job(text: str) -> dict[str, Any]:
    """Return the user and the JobArray fields from ``scontrol --oneliner show job``. Raises ValueError."""
    named = re.search(r"\bJobName=(.*?) UserId=([^\s(]+)\(", text)
    fields = r"\b(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit|SubmitTime)=(\S+)"
    values = dict(re.findall(fields, text))
    mem_mb = states.megabytes_of(values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0")
    if not named or mem_mb is None or "SubmitTime" not in values:
        raise ValueError("no job name, user, submit time or memory")
    if "MinMemoryCPU" in values:
        mem_mb = int(mem_mb) * int(values.get("NumCPUs", "1").split("-")[0])
    return {
        "name": named[1],
        "user": named[2],
        "submit_time": values["SubmitTime"],
        "mem_mb": int(mem_mb) or None,
        "time_min": states.minutes_of(values.get("TimeLimit", "")),
    }


# Checks and scripts. -----------------------------------------------------------------------------------


def check_folder(folder: Path, request: JobRequest) -> Plan:
    """Check folder, tokenizer, set-up file and input as tasks need them, and return the plan."""
    plan = need_plan(DataFolder(folder))
    check_tokenizer_files(DataFolder(folder), plan.tokenizer_files)
    for place in (folder, folder / JOBS_FOLDER, folder / LOGS_FOLDER):
        if place != folder and is_link(place):  # records and Slurm's logs would go to its target
            raise CannotWrite(path=place, found="a link", expected="a folder in its place")
        if os.path.lexists(place) and not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):  # noqa: PTH112 - Path's may raise
            todo = f"to share it with your group, its owner can type: chmod -R g+rwX {quoted(folder)}"
            raise CannotWrite(path=place, found="not a folder that you can write to", expected=f"one; {todo}")
    if request.setup and not (os.path.isabs(request.setup) and os.path.isfile(request.setup)):  # noqa: PTH113, PTH117 - Path's may raise OSError
        expected = "the path of a file for tasks to source"
        raise UsageError(path=request.setup, found=f"--setup {request.setup}", expected=expected)
    if plan.options.transform_sha256 and "--transform" not in request.worker_args:
        found = "a plan with a function for documents, and no file with it for the tasks"
        expected, remedy = "--worker_args with --transform", commands.submit(folder)
        raise UsageError(path=folder, found=found, expected=expected, remedy=remedy)
    if not os.path.isdir(plan.input_dir) and "--input_dir" not in request.worker_args:  # noqa: PTH112 - as above
        todo = "Has the input moved? --worker_args '--input_dir NEW'"
        say(f"warning: no {plan.input_dir} on this host; tasks on nodes without it exit with 66. {todo}")
    return plan


def warn_of_whole_nodes(request: JobRequest, site: Site) -> None:
    """Say that a task of few CPUs takes a whole node, in a partition that gives whole nodes only."""
    limits = site.limits(request)
    if limits.is_exclusive and request.num_cpus and request.num_cpus < (limits.max_cpus or 1):
        say(
            f"warning: the partition gives whole nodes only, so each task uses {request.num_cpus} of "
            f"{limits.max_cpus} CPUs, and all are charged; to use a node's CPUs: --cpus_per_task node"
        )


def tasks_of_shards(shard_ids: Sequence[int], max_tasks: int, shards_per_task: int | None) -> list[str]:
    """Divide shards into tasks of at least ``shards_per_task`` (1) shards, such as ``17`` or ``0-5``."""
    wanted = -(-len(shard_ids) // (shards_per_task or 1))
    num_tasks = max(1, min(wanted, max_tasks))
    bounds = [len(shard_ids) * number // num_tasks for number in range(num_tasks + 1)]
    return [id_ranges(shard_ids[start:end]) for start, end in itertools.pairwise(bounds)]


def array_script(folder: Path, name: str, tasks: Sequence[str], request: JobRequest) -> str:
    """Render the script of an array whose task i makes the shards ``tasks[i]``, such as ``17`` or ``0-5``."""
    array = f"--array=0-{len(tasks) - 1}%{min(request.max_parallel, len(tasks))}"
    place, flags = shlex.quote(str(folder)), shlex.join(shlex.split(request.worker_args))
    several = "*" if re.search(NUM_PROC, request.worker_args) else "*[-,]*"  # only `run` has this flag
    lines = [
        f"shardprep_folder={place}",
        f"shardprep_identity={job_files.folder_identity(DataFolder(folder))}",  # as this host sees the folder
        f"shards_of=({' '.join(tasks)})",
        "# An index is evaluated: other text than a number could run a command.",
        "[[ ${SLURM_ARRAY_TASK_ID:-0} =~ ^(0|[1-9][0-9]*)$ ]] || exit 2",
        "shards=${shards_of[${SLURM_ARRAY_TASK_ID:-0}]}",
        f'if [[ $shards = {several} ]]; then shardprep_what="shards $shards"',
        f'  shardprep_command=(run {place} --shards "$shards" {flags})',
        'else shardprep_what="shard $shards"',
        f'  shardprep_command=(--shard_id "$shards" --planned --output_dir {place} {flags}); fi',
        "# Array indices are not shard numbers, so the worker must not compare them.",
        "unset SLURM_ARRAY_TASK_COUNT",
    ]
    if request.num_cpus is None:
        lines.append("export SLURM_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE")
    return _script(_head(folder, name, "%A_%a", [array, *options_of(TASKS, request)]), request, lines)


def verify_script(folder: Path, name: str, num_shards: int, request: JobRequest) -> str:
    """Render the script of the job that runs ``verify DATA`` after the arrays, whether they failed or not."""
    place = shlex.quote(str(folder))
    lines = [
        f"shardprep_folder={place}",
        f"shardprep_what=verify shardprep_command=(verify {place})",
        f"shardprep_verified={shlex.quote(f'{num_shards} shards of {folder}')}",
    ]
    lines += [f"shardprep_notify={shlex.quote(request.notify)}"] if request.notify else []
    head = _head(folder, name, "verify-%j", options_of(VERIFY_JOB, request))
    return _script(head, request, [*lines, _VERIFY_END])


# prep_array.sh calls this at its end. It prints a line to grep for, and runs --notify.
_VERIFY_END = """shardprep_end() {
  export SHARDPREP_RESULT=verified SHARDPREP_EXIT_CODE=$1
  if (($1)); then SHARDPREP_RESULT="not verified"; fi
  echo "shardprep: ${SHARDPREP_RESULT/not verified/not verified:} $shardprep_verified" >&2
  [[ -z ${shardprep_notify:-} ]] || bash -c "$shardprep_notify" || say "--notify ended with exit code $?"
}"""


def _head(folder: Path, name: str, log: str, options: Sequence[str]) -> list[str]:
    """Render the first lines of a script: the shell and the options of sbatch."""
    if "\\" in str(folder):
        expected = "none: Slurm would not put the job id into log names; rename the folder"
        raise UsageError(path=folder, found="a backslash in its name", expected=expected)
    output = f"--output={str(folder).replace('%', '%%')}/{LOGS_FOLDER}/{log}.log"
    options = ("--open-mode=append", f"--job-name={name}", output, *options)
    return ["#!/bin/bash", *(f"#SBATCH {_quoted_for_sbatch(each)}" for each in options)]


def _script(head: Sequence[str], request: JobRequest, body: Sequence[str]) -> str:
    """Render ``prep_array.sh`` with another head."""
    prep_array = (Path(__file__).parent / "prep_array.sh").read_text(encoding="utf-8")
    first = "set -euo pipefail\n"
    names = {field: name for field, name in states.REQUEST_VARIABLES.items() if name.startswith("SHARDPREP_")}
    settings = {name: getattr(request, field) or "" for field, name in names.items()}
    # A container or a set-up file has its own Python.
    python = os.environ.get("SHARDPREP_PYTHON") or ("" if any(settings.values()) else sys.executable)
    settings = {"SHARDPREP_PYTHON": python, **settings}
    lines = [
        *head,
        "# Made by `python -m slurm submit`: slurm/prep_array.sh with another head.",
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        *body,
        'echo "shardprep: node ${SLURMD_NODENAME:-}: $shardprep_what begins" >&2',
    ]
    text = "\n".join(lines) + "\n" + first + prep_array.partition(f"\n{first}")[2]
    if found := re.search(r"^.*[\ud800-\udfff].*$", text, re.MULTILINE):
        raise UsageError(found=repr(found[0]), expected="UTF-8 in a job script; rename the folder or file")
    return text


def _quoted_for_sbatch(option: str) -> str:
    """Quote an option for an #SBATCH line, where quotes cannot be joined as in a shell. Raises UsageError."""
    if found := re.search(r"[\x00-\x1f\x7f]", option):
        expected = f"no {found[0]!r}, which is not possible in an #SBATCH line; rename the folder"
        raise UsageError(found=repr(option), expected=expected)
    if not re.search(r"[\s'\"#\\]", option):
        return option
    name, equals, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value if equals else name)
    return f'{name}="{escaped}"' if equals else f'"{escaped}"'


# Jobs by submitit. ``result()`` of a job returns the manifests of its shards, or raises if one was not made.
# Before a time limit or a preemption submitit calls ``checkpoint()``: the worker stops and cleans up, and the
# same shards are sent again. Finished ones are skipped.
_STOP_S = 60.0  # a worker's time to remove unfinished files; submitit kills the job 90 s after its signal


class ShardsFailed(ReadWriteError):
    """A job's worker exited with an error. Its messages are in the job's log."""


def submit_with_submitit(
    output_dir: str | Path, executor: Any, *, shards_per_task: int | None = None
) -> list[Any]:
    """Submit the missing shards to a submitit executor as one ``map_array``, and return its jobs.

    ``shards_per_task`` (default 1) is increased if Slurm's MaxArraySize requires it. ``result()`` of a job
    returns the manifests of its shards, or raises ShardsFailed. Run ``verify`` yourself afterwards. Raises
    NotFound, UsageError or ReadWriteError.
    """
    if shards_per_task is not None and shards_per_task < 1:
        raise UsageError.of_value("shards_per_task", shards_per_task, "1 or more")
    folder = Path(output_dir).resolve()
    plan = need_plan(DataFolder(folder))
    missing = sorted(
        set(range(plan.num_shards)) - find_made_shards(DataFolder(folder), plan.spec).done.keys()
    )
    if not missing:
        return []
    max_tasks = len(missing)
    if "slurm" in getattr(executor, "cluster", type(executor).__name__).lower():
        with contextlib.suppress(SlurmAway):  # no Slurm here: sbatch itself will check the size
            max_tasks = int(states.read_config()["MaxArraySize"])
    parts = tasks_of_shards(missing, max_tasks, shards_per_task)
    jobs: list[Any] = executor.map_array(MakeShards(), [str(folder)] * len(parts), parts)
    return jobs


class MakeShards:
    """The body of a job. It runs the worker as a process, separate from submitit."""

    _worker: subprocess.Popen[bytes] | None = None  # only while it runs, because it cannot be pickled

    def __call__(self, folder: str, shards: str) -> list[Manifest]:
        """Make these shards and return their manifests. Raises ShardsFailed."""
        # Slurm sends submitit's USR2 to all processes of a step, and it would kill the worker.
        words = ["preprocess.__main__:main", "run", folder, "--shards", shards]
        self._worker = start_python(*words, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
        try:
            code = self._worker.wait()
        except BaseException:
            self._stop()
            raise
        finally:
            self._worker = None
        if code:
            found = f"shards {shards} were not all made: the worker ended with exit code {code}"
            expected = "0; see its messages in the job's log, then submit the missing shards again"
            raise ShardsFailed(path=folder, found=found, expected=expected)
        return [
            read_manifest(DataFolder(folder), shard_id) for shard_id in ids_of_ranges(shards, end=MAX_SHARDS)
        ]

    def checkpoint(self, folder: str, shards: str) -> Any:
        """Stop the worker, and return the same call for submitit to submit again."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        return DelayedSubmission(MakeShards(), folder, shards)

    def _stop(self) -> None:
        """Send the worker SIGTERM, as Slurm would, and wait until it has cleaned up.

        A signal handler calls this while ``__call__`` holds Popen's lock, so it uses no method of Popen.
        """
        if self._worker is None:
            return
        deadline = time.monotonic() + _STOP_S
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._worker.pid, signal.SIGTERM)
            while not os.waitid(os.P_PID, self._worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if time.monotonic() > deadline:
                    os.kill(self._worker.pid, signal.SIGKILL)
                    return
                time.sleep(0.05)


# retry, also run by the controller of --until_done. -----------------------------------------------------

_MAX_ROUNDS = 5  # times that --until_done sends failed shards again
_LATE_KILL_MIN = 2  # Slurm checks time limits every 30 s, and then waits for the task to end


def retry(args: argparse.Namespace) -> int:
    """Send failed shards again, with more memory or time if that ran out: ``retry DATA``."""
    try:
        return _retry(args)
    except ShardprepError as error:
        if args.until_done and not args.dry_run:
            job_files.append_event(DataFolder(args.output_dir), "stopped", why=str(error))
        raise


def _retry(args: argparse.Namespace) -> int:
    changes = with_variables(given_of(args, JobRequest))
    plan = need_plan(DataFolder(args.output_dir))
    find = partial(states.find_state, args.output_dir, plan, needs_slurm=not args.dry_run)
    state = states.ask_patiently(find) if args.until_done else find()  # no person is there to ask again
    site = Site(state, is_needed=not args.dry_run)
    groups = shards_to_retry(args, state, changes, site)
    if args.until_done and not args.dry_run:
        request = _base_request(state, changes)
        if not groups and not state.ids("running", "pending"):
            return _finish(state, _run_verify(args, state), request)
        if (args.round or 1) > _MAX_ROUNDS:
            missing = shards_text(id_ranges(state.ids("failed", "not submitted")))
            return _finish(state, f"not made after {counted(_MAX_ROUNDS, 'round')}: {missing}", request)
        if not groups:
            submit_controller(args, state, request)
            return 0
    if groups:
        return send_groups(args, state, groups, site)
    num_left = len(state.ids("failed"))
    left = f"{counted(num_left, 'failed shard')} left out, " if num_left else ""
    print_lines(f"nothing to retry: {left}{state.summary}")
    if args.wait and not args.dry_run:
        return wait_for_jobs(args.output_dir)
    return ReadWriteError.exit_code if num_left else 0


def shards_to_retry(
    args: argparse.Namespace, state: DatasetState, changes: dict[str, Any], site: Site
) -> Groups:
    """Return the missing shards that are not queued, grouped by request. The user's ``changes`` win."""
    shard_ids = chosen_shards(state.plan.num_shards, args.shards)
    check_queue(state, shard_ids)
    if not state.is_tried and state.ids("not submitted", "not visible"):
        remedy = commands.submit(state.folder)
        raise NotFound(path=state.folder, found="nothing was submitted yet", remedy=remedy)
    wanted = [shard for shard in state.shards if shard_ids is None or shard.shard_id in shard_ids]
    # A person who names shards, or wants all to be done, has corrected the cause. Controllers pass --round.
    is_named = args.round is None and (shard_ids is not None or args.until_done)
    again = []
    for shard in wanted:
        why = owns.why_not_retried(shard, changes, is_named=is_named)
        if why:
            remedy = states.remedy_of(shard.cause or "")
            say(f"left out: shard {shard.shard_id:05d}: {shard.cause}; {why}; {remedy}")
        elif shard.state in ("failed", "not submitted"):
            again.append(shard)
    if not again:
        return []
    base = _base_request(state, changes)
    groups: dict[JobRequest, list[int]] = {}
    notes: dict[str, list[int]] = {}
    for shard in again:
        request, note = _request_after(shard, base, site)
        groups.setdefault(request.changed(**changes), []).append(shard.shard_id)
        if note:
            notes.setdefault(note, []).append(shard.shard_id)
    for note, noted in notes.items():
        say(f"{shards_text(id_ranges(noted))}: {note}")
    for request in groups:
        check_folder(state.folder, request)
    return list(groups.items())


def _base_request(state: DatasetState, changes: dict[str, Any]) -> JobRequest:
    """Return the request of the user's newest submission, or of plain sbatch tasks, with the user's changes.

    Raises Refused if only another user submitted: the values of that record would run and be charged as this
    user's, so the user has to name them.
    """
    own = own_records(state)
    if own.submissions:
        return _without_dependency(own.submissions[-1].arrays[0].request).changed(**changes)
    if own.newest_of_others:
        _refuse_values_of_others(state, own.newest_of_others, changes)
    return _request_of_plain_tasks(own).changed(**changes)


def _request_of_plain_tasks(own: OwnRecords) -> JobRequest:
    """Return a request for what the newest task of plain sbatch had."""
    if not own.plain_attempts:
        return JobRequest()
    had = own.plain_attempts[-1]
    return JobRequest(
        partition=had.partition or None,
        account=had.account or None,
        qos=had.qos or None,
        cpus_per_task=had.num_cpus or 1,
        mem_gb=round(had.mem_mb / 1024, 3) if had.mem_mb else None,
        time_min=states.minutes_of(had.time_limit),
    )


def _without_dependency(request: JobRequest) -> JobRequest:
    """Remove the user's own --dependency from a request: Slurm may have forgotten that job."""
    words = [each for each in shlex.split(request.sbatch_args) if not each.startswith("--dependency=")]
    return request.changed(sbatch_args=shlex.join(words))


def _refuse_values_of_others(state: DatasetState, sent: Submission, changes: dict[str, Any]) -> None:
    """Raise Refused for values of another user's record that this user has not named."""
    variables = []
    flags = []
    for name, value in vars(sent.arrays[0].request).items():
        if value == getattr(JobRequest(), name) or name in changes:
            continue
        if name in ("qos", "constraint", "exclude"):  # have no flag
            variables.append(f"{states.REQUEST_VARIABLES[name]}={shlex.quote(value)}")
        else:
            flags.append(f"--{name}={value}")
    if not (flags or variables):
        return
    found = f"values in a record in jobs/ that another user wrote, or can write to ({sent.number:04d}.json)"
    expected = "that you read them and name them yourself, because they run as you; omit one with --NAME=''"
    remedy = " ".join([*variables, commands.on("retry", state.folder, *flags)])
    raise Refused(path=state.folder, found=found, expected=expected, remedy=remedy)


def _request_after(shard: Shard, base: JobRequest, site: Site) -> tuple[JobRequest, str]:
    """Return the request of the last attempt, with more of what ran out, and what to say about it, or ""."""
    attempts = owns.own_attempts(shard)
    if not attempts:
        return base, ""
    last = attempts[-1]
    array = last.array
    request = _without_dependency(array.request) if array else base
    cause = last.cause(shard.shard_id)
    if cause == states.OUT_OF_MEMORY:
        known = array or last.record
        had_mb = known.mem_mb if known else None
        return more_memory(request, had_mb, len(last.shards), site.limits(request))
    if cause == states.TIMEOUT:
        # `scontrol update timelimit=` may have raised the limit. A plain sbatch task's is not recorded.
        limit_min = (array.time_min if array else None) or request.time_min or 0
        ran_min = round(last.elapsed_s / 60)
        if ran_min - limit_min <= _LATE_KILL_MIN:
            ran_min = limit_min or ran_min
        return more_time(request, ran_min, site.limits(request))
    return request, ""


def _run_verify(args: argparse.Namespace, state: DatasetState) -> str:
    """Verify the data set if all its shards are made. Return why it is not verified, or ""."""
    if state.is_verified:
        return ""
    missing = set(range(state.plan.num_shards)) - state.made.done.keys()
    if not missing:
        code = run_shardprep("verify", state.folder)
        return "verify failed; its messages are in this log" if code else ""
    words = []
    for cause, shards in state.failed_by_cause().items():
        why = owns.why_not_retried(shards[0], {}) or "left out"
        ids = id_ranges(each.shard_id for each in shards)
        words.append(f"{shards_text(ids)}: {cause}, {why}; {states.remedy_of(cause)}")
    wanted = chosen_shards(state.plan.num_shards, args.shards)
    if wanted is not None and not missing & wanted:
        others = shards_text(id_ranges(missing))
        words.append(f"{shards_text(args.shards)} are made, as asked for; {others} are not")
    return "; ".join(words) or "shards are missing, and jobs that are not visible here may be making them"


def _finish(state: DatasetState, why: str, request: JobRequest) -> int:
    """End --until_done: write the report, or say why a person must help; then run --notify."""
    folder, code = state.folder, ReadWriteError.exit_code if why else 0
    if why:
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


# cancel. -----------------------------------------------------------------------------------------------


def cancel(args: argparse.Namespace) -> int:
    """Cancel every waiting or running job of a data set: ``cancel DATA``. Finished shards stay.

    Only jobs of this user's own records, or with a name that only this data set's jobs have.
    """
    state = states.find_state(args.output_dir, need_plan(DataFolder(args.output_dir)))
    own = own_records(state)
    others = owns.others_with_jobs(state)
    if args.shards is None:
        # Controllers first: one that runs would send the cancelled shards again.
        jobs = [*own.controllers, *own.unrecorded, *own.live_job_ids()]
    else:
        chosen = _tasks_of_shards(args, state)
        jobs = [task for task in chosen if task.partition("_")[0] not in others]
        others = {task: others[task.partition("_")[0]] for task in chosen if task not in jobs}
    if jobs:
        # Printed first, because scancel may end this process, too.
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
        if here := next((each for each in (job_id, task) if each in jobs), None):
            say(f"warning: this command runs in job {here}, which it cancels, too: {', '.join(jobs)}")
        run_slurm("scancel", *jobs)
        job_files.append_event(DataFolder(args.output_dir), "cancel", jobs=jobs, shards=args.shards)
    if state.queue.foreign and args.shards is None:
        ids = " ".join(state.queue.foreign)
        say(f"not cancelled: jobs of the folder that this one was copied from; for them type: scancel {ids}")
    if others:
        whose = ", ".join(sorted(set(others.values())))
        found = f"{whose} submitted jobs {', '.join(sorted(others))} of this data set"
        done = f"cancelled: {', '.join(jobs) or 'none'}"
        expected = "that user or an administrator to cancel them"
        raise SlurmRefused(found=f"{found}; {done}", expected=expected)
    nothing = "nothing is queued" if args.shards is None else "none of these shards is queued"
    print_lines(f"cancelled: {', '.join(jobs)}" if jobs else f"{nothing}; {state.summary}")
    if not_visible := state.ids("not visible"):
        named_ids = shards_text(id_ranges(not_visible))
        say(f"warning: {state.why_not_visible()}; {named_ids} may still wait or run")
    return 0


def _tasks_of_shards(args: argparse.Namespace, state: DatasetState) -> list[str]:
    """Return the tasks that make the shards of --shards. Raises UsageError if a task makes others, too."""
    wanted = chosen_shards(state.plan.num_shards, args.shards) or set()
    chosen = {}
    for shard_id in wanted:
        for each in owns.live_attempts(state.shards[shard_id]):
            chosen[each.task] = each
    for task, each in chosen.items():
        if not wanted.issuperset(each.shards):
            expected = f"all shards of task {task}: {shards_text(id_ranges(each.shards))}"
            raise UsageError(found=f"--shards {args.shards}", expected=expected)
    return sorted(chosen, key=lambda task: tuple(map(int, task.split("_"))))
