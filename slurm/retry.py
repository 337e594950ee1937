"""``retry``: which of the missing shards are sent again, and what each failure asks for; and ``cancel``.

``submit --until_done`` leaves a small job on the cluster. When the arrays and their verify job have ended, it
runs ``retry --until_done``: that writes the report of a verified data set; or it sends what failed, with a
controller of its own behind it; or it stops with a sentence where only people can help.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from functools import partial
from typing import Any

from shardprep import HOME
from shardprep.command_line import given_of
from shardprep.console import counted, print_lines, quoted, say, shards_text
from shardprep.errors import NotFound, ReadWriteError, Refused, ShardprepError, UsageError
from shardprep.format.jobs import COMMANDS, JOBS_FOLDER, JobRequest, append_event, user_name
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.format.plan import need_plan
from slurm.queue import SlurmRefused, ask_patiently, minutes_of, slurm_output
from slurm.send import (
    Groups,
    check_folder,
    check_queue,
    find_site,
    leave_controller,
    send_groups,
    with_variables,
)
from slurm.state import OUT_OF_MEMORY, TIMEOUT, DatasetState, Shard, find_state, reason_to_leave, remedy_of
from slurm.status import wait_for_jobs

_MOST_ROUNDS = 5  # of --until_done: times that what failed is sent again
_LATE_KILL_MIN = 2  # Slurm looks at limits every half minute, and then waits for the task to end


def retry(args: argparse.Namespace) -> int:
    """Send again what failed, each as its failure asks: ``retry DATA``."""
    try:
        return _retry(args)
    except ShardprepError as error:
        if args.until_done and not args.dry_run:
            append_event(args.output_dir, "stopped", why=str(error))
        raise


def _retry(args: argparse.Namespace) -> int:
    changes = with_variables(given_of(args, JobRequest))
    find = partial(find_state, args.output_dir, need_plan(args.output_dir))
    state = ask_patiently(find) if args.until_done else find()  # nobody else would ask again
    groups = shards_to_retry(args, state, changes)
    if args.until_done and not args.dry_run:
        request = _trusted(state, _base_request(state), changes)
        if not groups and not state.ids("running", "pending"):
            return _end(state, _why_not_verified(args, state), request)
        if args.round > _MOST_ROUNDS:
            missing = shards_text(id_ranges(state.ids("failed", "not submitted")))
            rounds = counted(_MOST_ROUNDS, "round")
            return _end(state, f"not made after {rounds}: {missing}", request)
        if not groups:
            leave_controller(args, state, request)
            return 0
    if groups:
        return send_groups(args, state, groups)
    num_left = len(state.ids("failed"))
    left_words = f"{counted(num_left, 'shard')} left as {'it is' if num_left == 1 else 'they are'}, "
    print_lines(f"nothing to retry: {left_words if num_left else ''}{state.summary}")
    if args.wait and not args.dry_run:
        return wait_for_jobs(args.output_dir)
    return ReadWriteError.exit_code if num_left else 0


def shards_to_retry(args: argparse.Namespace, state: DatasetState, changes: dict[str, Any]) -> Groups:
    """Return what is missing and not queued, by what its failures ask for. The user's ``changes`` win."""
    shard_ids = chosen_shards(state.plan.num_shards, args.shards)
    check_queue(state, shard_ids)
    is_tried = state.submissions or any(shard.attempts for shard in state.shards)
    if not is_tried and state.ids("not submitted", "not visible"):
        raise NotFound(
            f"nothing was submitted for {state.folder} yet",
            path=state.folder,
            remedy=f"shardprep submit {quoted(state.folder)}",
        )
    wanted = [shard for shard in state.shards if shard_ids is None or shard.shard_id in shard_ids]
    again = []
    for shard in wanted:
        # A controller has the shards of the first submission, which nobody names anew.
        if why := reason_to_leave(shard, changes, is_named=shard_ids is not None and not args.until_done):
            say(f"left: shard {shard.shard_id:05d}: {shard.cause}; {why}; {remedy_of(shard.cause or '')}")
        elif shard.state in ("failed", "not submitted"):
            again.append(shard)
    if not again:
        return []
    base = _base_request(state)
    max_mem_mb = find_site(_trusted(state, base, changes).partition).max_mem_mb
    groups: dict[JobRequest, list[int]] = {}
    for shard in again:
        request = _trusted(state, _request_after(shard, base, max_mem_mb), changes)
        groups.setdefault(request, []).append(shard.shard_id)
    for request in groups:
        check_folder(state.folder, request)
    return list(groups.items())


def _base_request(state: DatasetState) -> JobRequest:
    """Return the newest submission's request, or else what a plain task had."""
    if state.submissions:
        return _without_dependency(state.submissions[-1].arrays[0].request)
    plain = [each for each in state.records.own if each.job_id and each.num_cpus]
    if not plain:
        return JobRequest()
    had = plain[-1]
    return JobRequest(
        partition=had.partition or None,
        account=had.account or None,
        qos=had.qos or None,
        cpus_per_task=had.num_cpus or 1,
        mem_gb=round(had.mem_mb / 1024, 3) if had.mem_mb else None,
        time_min=minutes_of(had.time_limit),
    )


def _without_dependency(request: JobRequest) -> JobRequest:
    """Return a request that waits for no job of its user's own: Slurm may have forgotten it."""
    words = [each for each in shlex.split(request.sbatch_args) if not each.startswith("--dependency=")]
    return request.changed(sbatch_args=shlex.join(words))


def _trusted(state: DatasetState, request: JobRequest, changes: dict[str, Any]) -> JobRequest:
    """Return a recorded request with the user's changes.

    Raises Refused for a command that only a record of somebody else names: it would run as the user's.
    """
    own = [array.request for each in state.submissions if each.is_own for array in each.arrays]
    foreign = {}
    for name in COMMANDS:
        value = getattr(request, name)
        if value and name not in changes and value not in [getattr(each, name) for each in own]:
            foreign[name] = value
    if foreign:
        numbers = ", ".join(f"{each.number:04d}.json" for each in state.submissions if not each.is_own)
        words = shlex.join(f"--{name}={value}" for name, value in foreign.items())
        raise Refused(
            f"{state.folder / JOBS_FOLDER} has records that another user wrote, or that others can write to "
            f"({numbers}), and the commands in them would run as yours. Read them; if they are right, type: "
            f"shardprep retry {quoted(state.folder)} {words}. Leave one out by an empty value, such as "
            f"--{next(iter(foreign))}=''"
        )
    return request.changed(**changes)


def _request_after(shard: Shard, base: JobRequest, max_mem_mb: int | None) -> JobRequest:
    """Return the last attempt's request with what its failure asks for: twice the memory, or twice the time.

    ``max_mem_mb``: of the largest node; None if not known.
    """
    last = shard.attempts[-1] if shard.attempts else None
    array, record, cause = (last.array, last.record, shard.cause) if last else (None, None, None)
    request = _without_dependency(array.request) if array else base
    mem_mb = array.mem_mb if array else record.mem_mb if record else None
    if cause == OUT_OF_MEMORY and mem_mb:
        mem_gb = min(2 * mem_mb, max_mem_mb or 2 * mem_mb) / 1024
        if request.mem_per_cpu_gb is None:
            request = request.changed(mem_gb=round(mem_gb, 3))
        else:
            request = request.changed(mem_per_cpu_gb=round(mem_gb / (request.num_cpus or 1), 3))
    if cause == TIMEOUT and last:
        # Somebody may have given it more meanwhile (scontrol update timelimit=); a plain task told no limit.
        given, had = (array and array.time_min) or 0, round(last.elapsed_s / 60)
        if had - given <= _LATE_KILL_MIN:
            had = given or had
        request = request.changed(time_min=max(2 * had, 2))
    return request


def _why_not_verified(args: argparse.Namespace, state: DatasetState) -> str:
    """Verify if all shards are made, and return why the data set is not verified, or ""."""
    if state.is_verified:
        return ""
    missing = set(range(state.plan.num_shards)) - state.made.done.keys()
    if not missing:
        command = [sys.executable, "-m", "preprocess", "verify", str(state.folder)]
        # From a folder of ours: Python imports modules of the current one, which may be the data set.
        code = subprocess.run(command, cwd=HOME, check=False).returncode
        return "verify fails, its words are in this log" if code else ""
    words = []
    for cause, shards in state.failed_by_cause().items():
        why = reason_to_leave(shards[0], {}) or "left out"
        ids = id_ranges(each.shard_id for each in shards)
        words.append(f"{shards_text(ids)}: {cause}, {why}; {remedy_of(cause)}")
    wanted = chosen_shards(state.plan.num_shards, args.shards)
    if wanted is not None and not missing & wanted:
        others = shards_text(id_ranges(missing))
        words.append(f"made are {shards_text(args.shards)}, as asked for; {others} are not")
    return "; ".join(words) or "shards are missing that may run where it cannot be seen"


def _end(state: DatasetState, why: str, request: JobRequest) -> int:
    """End --until_done: write the report, or say why only a person can go on, and run --notify."""
    folder, code = state.folder, ReadWriteError.exit_code if why else 0
    if why:
        append_event(folder, "stopped", why=why)
        say(f"error: only a person can help now: {why}")
    else:
        output = folder / "report.html"
        command = [sys.executable, "-m", "slurm", "report", str(folder), "--output", str(output)]
        subprocess.run(command, cwd=HOME, check=False)
        append_event(folder, "finished", report=str(output))
        say(f"{counted(state.plan.num_shards, 'shard')} verified; wrote {output}")
    if request.notify:
        result = {"SHARDPREP_RESULT": "not verified" if why else "verified", "SHARDPREP_EXIT_CODE": str(code)}
        subprocess.run(["bash", "-c", request.notify], env={**os.environ, **result}, check=False)
    return code


def cancel(args: argparse.Namespace) -> int:
    """Cancel every job of a data set that waits or runs: ``cancel DATA``. Shards that are done stay done."""
    state = find_state(args.output_dir, need_plan(args.output_dir))
    queue = state.queue
    if args.shards is None:
        # Controllers first, as one would send again what is cancelled.
        jobs = [*queue.controllers, *queue.unrecorded, *state.live_job_ids()]
    else:
        jobs = _tasks_of_shards(args, state)
    if jobs:
        # Said before scancel ends this process, too, and with it whatever it would still print.
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
        task = f"{job_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
        if here := next((each for each in (job_id, task) if each in jobs), None):
            say(f"warning: this runs in job {here}, which is one of {', '.join(jobs)}, and ends with it")
        try:
            slurm_output("scancel", *jobs)
        except SlurmRefused as error:
            if "denied" not in str(error):
                raise
            # scancel has ended this user's jobs all the same. Controllers and unrecorded jobs are theirs.
            user_of = {job.job_id: job.user for job in queue.jobs.values()}
            owners = {each: user_of.get(each.partition("_")[0], user_name()) for each in jobs}
            if own := [each for each in jobs if owners[each] == user_name()]:
                append_event(args.output_dir, "cancel", jobs=own, shards=args.shards)
            whose = ", ".join(sorted({*owners.values()} - {user_name()})) or "another user"
            raise SlurmRefused(
                f"{whose} submitted jobs of this data set, and only that user or an administrator can cancel "
                f"them; cancelled: {', '.join(own) or 'none'}; {error}"
            ) from None
        append_event(args.output_dir, "cancel", jobs=jobs, shards=args.shards)
    if queue.foreign and args.shards is None:
        ids = " ".join(queue.foreign)
        say(f"left alone: jobs of the folder that this one was copied from; to end them: scancel {ids}")
    nothing = "nothing is queued" if args.shards is None else "none of them is queued"
    print_lines(f"cancelled: {', '.join(jobs)}" if jobs else f"{nothing}; {state.summary}")
    if unseen := state.ids("not visible"):
        named_ids = shards_text(id_ranges(unseen))
        say(f"warning: {state.why_not_visible()}; {named_ids} may wait or run all the same")
    return 0


def _tasks_of_shards(args: argparse.Namespace, state: DatasetState) -> list[str]:
    """Return the tasks that make the shards of --shards, and no others in them. Raises UsageError."""
    wanted = chosen_shards(state.plan.num_shards, args.shards) or set()
    chosen = set()
    for shard_id in wanted:
        for each in state.shards[shard_id].attempts:
            if each.state not in ("running", "pending") or each.job is None:
                continue
            if not wanted.issuperset(each.shards):
                all_shards = shards_text(id_ranges(each.shards))
                raise UsageError(
                    f"--shards {args.shards} names a part of a task: task {each.task} makes {all_shards}; "
                    "name all of its shards"
                )
            chosen.add(each.task)
    return sorted(chosen, key=lambda task: tuple(map(int, task.split("_"))))
