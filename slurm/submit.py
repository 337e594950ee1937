"""``submit DATA``: send the missing shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import lustre
from shardprep.command_line import given_of
from shardprep.console import print_lines, say, shards_text
from shardprep.errors import UsageError
from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.jobs import JobRequest
from shardprep.format.names import chosen_shards, id_ranges
from slurm.checks import check_folder, check_queue
from slurm.commands import REQUEST_VARIABLES, SlurmMissing, megabytes_of, minutes_of
from slurm.controller import submit_controller
from slurm.send import send_groups
from slurm.state import DatasetState, find_state
from slurm.status import wait_for_jobs


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
        error.remedy = commands.run(args.output_dir)
        raise
    print_lines(f"nothing to submit: {state.summary}")
    if args.until_done and not args.dry_run:
        submit_controller(args, state, request)
    return wait_for_jobs(args.output_dir) if args.wait and not args.dry_run else 0


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that flags give, or else variables of sbatch and prep_array.sh."""
    found: dict[str, Any] = {}
    for name, variable in REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        such_as = ""
        if name == "time_min":
            value, such_as = minutes_of(text), "60 or 2:00:00"
        elif name in job_files.MEMORY_FIELDS:
            value, such_as = (megabytes_of(text) or 0) / 1024, "4000 or 4G"
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
    state = find_state(args.output_dir, plan, needs_slurm=not args.dry_run)
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
