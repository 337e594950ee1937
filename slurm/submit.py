"""``submit DATA``: send the missing shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import lustre
from shardprep.console import print_lines, say, shards_text, shards_to_type
from shardprep.format import commands
from shardprep.format.names import chosen_shards, id_ranges
from slurm.checks import check_folder, check_queue
from slurm.commands import REQUEST_VARIABLES, SlurmMissing
from slurm.controller import submit_controller
from slurm.request import JobRequest, SendOptions, with_variables
from slurm.send import send_groups
from slurm.state import DatasetState, find_state
from slurm.status import wait_for_jobs
from slurm.submission import Group


def submit(folder: Path, options: SendOptions, flags: Mapping[str, object]) -> int:
    """Submit the missing shards as a job array, and a verify job after it: ``submit DATA``."""
    given = with_variables(flags)
    request = JobRequest(**given)
    if options.dry_run:
        for name, value in given.items():
            say(f"{name} is {value!r} ({'flag' if name in flags else REQUEST_VARIABLES[name]})")
    try:
        state, missing = _missing_shards(folder, options, request)
        if missing:
            return send_groups(options, state, [Group(request=request, shard_ids=missing)])
    except SlurmMissing as error:
        error.remedy = commands.run(folder)
        raise
    print_lines(f"nothing to submit: {state.summary}")
    if options.until_done and not options.dry_run:
        submit_controller(options, state, request)
    return wait_for_jobs(folder) if options.wait and not options.dry_run else 0


def _missing_shards(
    folder: Path, options: SendOptions, request: JobRequest
) -> tuple[DatasetState, list[int]]:
    """Check the folder, and return its state and the missing shards that are not queued.

    Shards named by --shards are included even if it is not visible whether they run.
    """
    plan = check_folder(folder, request)
    wanted = chosen_shards(plan.num_shards, options.shards)
    state = find_state(folder, plan, needs_slurm=not options.dry_run)
    if state.queue.away:
        say(f"warning: {state.queue.away}. The queue and the site's limits are not taken into account")
    check_queue(state, wanted)
    missing = state.ids("failed", "not submitted")
    not_visible = state.ids("not visible")
    if wanted is not None or state.queue.away:
        missing = sorted([*missing, *not_visible])
    elif not_visible:
        why = state.why_not_visible()
        ids = id_ranges(not_visible)
        say(f"left out: {shards_text(ids)} may be running ({why}); if not: --shards {shards_to_type(ids)}")
    if wanted is not None:
        missing = [shard_id for shard_id in missing if shard_id in wanted]
    if missing:
        _say_what_space_is_left(state, missing)
    return state, missing


def _say_what_space_is_left(state: DatasetState, missing: Sequence[int]) -> None:
    """Print what missing shards need and what is left, on Lustre. Tars are estimated by finished ones."""
    if lustre.why_not_usable(state.folder):
        return
    done = state.made.done.values()
    sizes = state.plan.shard_bytes()
    num_bytes = sum(sizes[shard_id] for shard_id in missing)
    input_bytes = sum(each.counts.input_bytes for each in done)
    if input_bytes:
        num_bytes = round(num_bytes * sum(each.tar.num_bytes for each in done) / input_bytes)
    need = lustre.Need(num_bytes=num_bytes, num_shards=len(missing))
    for line in lustre.space_lines(state.folder, need):
        say(line)
