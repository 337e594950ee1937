"""``retry DATA``: send failed shards again. The controller of ``--until_done`` runs it, too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardprep.console import counted, print_lines, say, shards_text
from shardprep.errors import NotFound, ReadWriteError, Refused, ShardprepError
from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import Submission
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.format.plan import need_plan
from slurm.attempts import Shard
from slurm.causes import OUT_OF_MEMORY, TIMEOUT, remedy_of
from slurm.checks import check_folder, check_queue
from slurm.commands import REQUEST_VARIABLES, ask_patiently, minutes_of
from slurm.controller import finish, submit_controller, why_not_verified
from slurm.fit import NUM_PROC, more_memory, more_time
from slurm.own import OwnRecords, own_attempts, own_records
from slurm.request import MEMORY_FIELDS, JobRequest, SendOptions, request_of, with_variables
from slurm.retry_rules import why_not_retried
from slurm.send import send_groups
from slurm.site import Site
from slurm.state import DatasetState, find_state
from slurm.status import wait_for_jobs
from slurm.submission import Group

_MAX_ROUNDS = 5  # times that --until_done sends failed shards again
_LATE_KILL_MIN = 2  # Slurm checks time limits every 30 s, and then waits for the task to end


def retry(folder: Path, options: SendOptions, flags: Mapping[str, object]) -> int:
    """Send failed shards again, with more memory or time if that ran out: ``retry DATA``."""
    try:
        return _retry(folder, options, with_variables(flags))
    except ShardprepError as error:
        if options.until_done and not options.dry_run:
            job_files.append_event(DataFolder(folder), "stopped", why=str(error))
        raise


def _retry(folder: Path, options: SendOptions, changes: dict[str, object]) -> int:
    plan = need_plan(DataFolder(folder))
    find = partial(find_state, folder, plan, needs_slurm=not options.dry_run)
    state = ask_patiently(find) if options.until_done else find()  # no person is there to ask again
    site = Site(state.queue.config, is_needed=not options.dry_run)
    groups = _groups_to_retry(options, state, changes, site)
    if options.until_done and not options.dry_run:
        request = _base_request(state, changes)
        if not groups and not state.ids("running", "pending"):
            return finish(state, why_not_verified(options, state), request)
        if (options.round or 1) > _MAX_ROUNDS:
            missing = shards_text(id_ranges(state.ids("failed", "not submitted")))
            return finish(state, f"not made after {counted(_MAX_ROUNDS, 'round')}: {missing}", request)
        if not groups:
            submit_controller(options, state, request)
            return 0
    if groups:
        return send_groups(options, state, groups, site)
    num_left = len(state.ids("failed"))
    left = f"{counted(num_left, 'failed shard')} left out, " if num_left else ""
    print_lines(f"nothing to retry: {left}{state.summary}")
    if options.wait and not options.dry_run:
        return wait_for_jobs(folder)
    return ReadWriteError.exit_code if num_left else 0


def _groups_to_retry(
    options: SendOptions, state: DatasetState, changes: dict[str, object], site: Site
) -> list[Group]:
    """Return the missing shards that are not queued, grouped by request. The user's ``changes`` win."""
    wanted = chosen_shards(state.plan.num_shards, options.shards)
    check_queue(state, wanted)
    if not state.is_tried and state.ids("not submitted", "not visible"):
        remedy = commands.submit(state.folder)
        raise NotFound(path=state.folder, found="nothing was submitted yet", remedy=remedy)
    # A person who names shards, or wants all to be done, has corrected the cause. Controllers pass --round.
    is_named = options.round is None and (wanted is not None or options.until_done)
    again = []
    left_out: dict[str, list[int]] = {}
    for shard in state.shards:
        if wanted is not None and shard.shard_id not in wanted:
            continue
        why = why_not_retried(shard, changes, is_named=is_named)
        if why:
            remedy = remedy_of(shard.cause or "")
            left_out.setdefault(f"{shard.cause}; {why}; {remedy}", []).append(shard.shard_id)
        elif shard.state in ("failed", "not submitted"):
            again.append(shard)
    for words, ids in left_out.items():
        say(f"left out: {shards_text(id_ranges(ids))}: {words}")
    if not again:
        return []
    base = _base_request(state, changes)
    groups: dict[JobRequest, list[int]] = {}
    notes: dict[str, list[int]] = {}
    for shard in again:
        request, note = _request_after(shard, base, changes, site)
        groups.setdefault(request, []).append(shard.shard_id)
        if note:
            notes.setdefault(note, []).append(shard.shard_id)
    for note, noted in notes.items():
        say(f"{shards_text(id_ranges(noted))}: {note}")
    for request in groups:
        check_folder(state.folder, request)
    return [Group(request=request, shard_ids=ids) for request, ids in groups.items()]


def _base_request(state: DatasetState, changes: dict[str, object]) -> JobRequest:
    """Return the request of the user's newest submission, or of plain sbatch tasks, with the user's changes.

    Raises Refused if only another user submitted: the values of that record would run and be charged as this
    user's, so the user has to name them.
    """
    own = own_records(state)
    if own.newest_request:
        return _without_dependency(own.newest_request).changed(**changes)
    if own.newest_of_others:
        _refuse_values_of_others(state, own.newest_of_others, changes)
    return _request_of_plain_tasks(own).changed(**changes)


def _request_of_plain_tasks(own: OwnRecords) -> JobRequest:
    """Return a request for what the newest task of plain sbatch had."""
    if not own.plain_attempts:
        return JobRequest()
    had = own.plain_attempts[-1]
    request = JobRequest(
        partition=had.partition or None,
        account=had.account or None,
        qos=had.qos or None,
        mem_gb=round(had.mem_mb / 1024, 3) if had.mem_mb else None,
        time_min=minutes_of(had.time_limit),
    )
    if had.num_nodes > 1:
        return replace(request, nodes=had.num_nodes)
    return replace(request, cpus_per_task=had.num_cpus or 1)


def _without_dependency(request: JobRequest) -> JobRequest:
    """Remove the user's own --dependency from a request: Slurm may have forgotten that job."""
    words = [each for each in shlex.split(request.sbatch_args) if not each.startswith("--dependency=")]
    return request.changed(sbatch_args=shlex.join(words))


def _refuse_values_of_others(state: DatasetState, sent: Submission, changes: dict[str, object]) -> None:
    """Raise Refused for values of another user's record that this user has not named."""
    variables = []
    flags = []
    for name, value in vars(request_of(sent.arrays[0])).items():
        if value == getattr(JobRequest(), name) or name in changes:
            continue
        if name in ("qos", "constraint", "exclude"):  # have no flag
            variables.append(f"{REQUEST_VARIABLES[name]}={shlex.quote(value)}")
        else:
            flags.append(f"--{name}={value}")
    if not (flags or variables):
        return
    found = f"values in a record in jobs/ that another user wrote, or can write to ({sent.number:04d}.json)"
    expected = "that you read them and name them yourself, because they run as you; omit one with --NAME=''"
    remedy = " ".join([*variables, commands.on("retry", state.folder, *flags)])
    raise Refused(path=state.folder, found=found, expected=expected, remedy=remedy)


def _request_after(
    shard: Shard, base: JobRequest, changes: dict[str, object], site: Site
) -> tuple[JobRequest, str]:
    """Return the request of the last attempt, with more of what ran out, and what to say about it, or "".

    The user's ``changes``, which ``base`` has already, are made first: another partition has other limits,
    and ``more_memory`` adds to the user's worker_args.
    """
    attempts = own_attempts(shard)
    if not attempts:
        return base, ""
    last = attempts[-1]
    array = last.array
    request = base
    if last.request:
        request = _without_dependency(last.request).changed(**changes)
    cause = last.cause(shard.shard_id)
    note = ""
    has_answer = any(name in changes for name in MEMORY_FIELDS)
    has_answer |= bool(re.search(NUM_PROC, str(changes.get("worker_args"))))
    if cause == OUT_OF_MEMORY and not has_answer:
        known = array or last.record
        had_mb = known.mem_mb if known else None
        limits = site.limits(request, for_memory=True)
        request, note = more_memory(request, had_mb, len(last.shards), limits)
    elif cause == TIMEOUT and "time_min" not in changes:
        # `scontrol update timelimit=` may have raised the limit. A plain sbatch task's is not recorded.
        limit_min = (array.time_min if array else None) or request.time_min or 0
        ran_min = round(last.elapsed_s / 60)
        if ran_min - limit_min <= _LATE_KILL_MIN:
            ran_min = limit_min or ran_min
        request, note = more_time(request, ran_min, site.limits(request))
    return request, note
