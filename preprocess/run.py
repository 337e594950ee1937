"""``run DATA``: make the missing shards, on this machine or as one of several processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lustre import released_lines
from preprocess.make import resources
from preprocess.make.attempt import clean_done_shards
from preprocess.make.log_lines import amounts_line
from preprocess.make.many import run_shards
from preprocess.make.parts import Part, PartQueue, ShardQueue, find_part, time_of_file_system
from preprocess.make.settings import WorkerSettings, environment_number, worker_settings
from shardprep.console import Progress, counted, print_exactly, say, shards_text
from shardprep.errors import CannotWrite, UsageError
from shardprep.format import commands
from shardprep.format.attempts import RECORD_VARIABLE, Failure, RunRecord, append_shards
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest
from shardprep.format.names import chosen_shards, id_ranges
from shardprep.format.plan import Plan, need_plan
from shardprep.option_flags import given_of

_ENCODER_BYTES = 100 << 20  # of a process, beside what each needs


def run(args: argparse.Namespace) -> int:
    """Make the missing shards, or this process's part of them."""
    resources.check_address_space()
    folder = DataFolder(args.output_dir)
    plan = need_plan(folder)
    part = find_part(args.part, os.environ, shares_array=args.array)
    chosen = chosen_shards(plan.num_shards, args.shards)
    wanted = list(range(plan.num_shards)) if chosen is None else sorted(chosen)
    given = given_of(args, WorkerSettings)
    settings = worker_settings(given)
    if settings.again and chosen is None:
        raise UsageError(found="--again", expected="--shards, too", remedy="--shards IDS")
    # Of several processes with one output the first one speaks for all.
    speaks = part.is_first
    todo, num_missing = _shards_to_make(folder, plan, wanted, part, makes_again=settings.again)
    if num_missing < len(wanted) and speaks:
        say(f"{len(wanted) - num_missing} of {len(wanted)} shards are done already")
    if not num_missing:
        if args.json:
            print_exactly(json.dumps(_facts(folder, plan, len(wanted), [], [], 0.0)))
        return 0
    if not os.access(folder, os.W_OK | os.X_OK):
        found = "a folder that you cannot write to"
        advice = "its owner can make the shards"
        raise CannotWrite(path=folder, found=found, expected="write permission", advice=advice)
    if speaks:
        for line in released_lines(plan.input_dir, [plan.input_dir / item.path for item in plan.inputs]):
            say(line)

    own = list(todo.known_left())
    place = part.place
    offset = place.rank if place.num_processes > 1 else min(own, default=0)
    cpus = resources.allowed_cpus(offset=offset, num_processes=place.num_processes)
    assert settings.memory_gb is not None  # worker_settings sets it
    memory_gb = settings.memory_gb
    if "memory_gb" not in given:
        memory_gb /= place.num_processes
    num_proc = _num_processes(args.num_proc, memory_gb, len(cpus))
    num_proc = min(num_proc, max(len(own), -(-num_missing // part.num_parts)))
    settings = dataclasses.replace(settings, memory_gb=memory_gb / num_proc)
    note = resources.memory_note(settings.memory_gb, num_proc)
    if note and speaks:
        say(f"note: {note}")
    if not part.is_alone and speaks:
        say(_part_line(part, num_missing, len(own), num_proc))

    sizes = plan.shard_bytes()
    name = "" if part.is_alone else f"part {part.number} of {part.num_parts}: "
    num_bytes = sum(sizes[shard_id] for shard_id in own)
    progress = Progress(name, num_bytes, is_shown=speaks, num_shards=len(own))
    cpus_of = [cpus[number::num_proc] or cpus for number in range(num_proc)]  # all, if they are too few
    make = partial(
        run_shards, folder, plan, settings, cpus_of=cpus_of, progress=progress, is_verbose=args.verbose
    )
    number = None if part.is_alone else part.number
    with RunRecord(folder, plan.plan_id, own, num_cpus=len(cpus), part=number) as record:
        if isinstance(todo, PartQueue):
            # First, because adding to the record changes its time.
            todo.begins_at(time_of_file_system(os.environ.get(RECORD_VARIABLE)))
            if part.is_first:
                append_shards(wanted)
        made, failures = _make_all(todo, make)
        record.exit_code = failures[0].exit_code if failures else 0
    amount = f"{len(made)} of {counted(len(own), 'shard')}" if part.is_alone else counted(len(made), "shard")
    say(f"{name}{amount} made by {counted(num_proc, 'process')}: {_total(made, progress.elapsed_s)}")
    if args.json:
        num_done = len(wanted) - num_missing
        print_exactly(json.dumps(_facts(folder, plan, num_done, made, failures, progress.elapsed_s)))
    if failures:
        ids = id_ranges(_ids(failures))
        say(f"error: failed: {shards_text(ids)}; fix the errors above, then run: {commands.run(folder, ids)}")
        return failures[0].exit_code
    return 0


def _shards_to_make(
    folder: DataFolder, plan: Plan, wanted: list[int], part: Part, *, makes_again: bool
) -> tuple[ShardQueue, int]:
    """Return the queue of this process, and how many shards all parts have to make."""
    if makes_again:
        return ShardQueue(wanted[part.number :: part.num_parts]), len(wanted)
    if part.is_alone:
        missing = clean_done_shards(folder, plan.plan_id, wanted)
        return ShardQueue(missing), len(missing)
    queue = PartQueue(folder, plan, wanted, part)
    return queue, max(queue.num_missing, len(queue.known_left()))


def _make_all(
    todo: ShardQueue, make: Callable[[ShardQueue], tuple[list[Manifest], list[Failure]]]
) -> tuple[list[Manifest], list[Failure]]:
    """Make the shards of a queue, and of a part those that the other parts leave. Returns made and failed."""
    if not isinstance(todo, PartQueue):
        return make(todo)
    made: list[Manifest] = []
    failures: list[Failure] = []
    queue: ShardQueue | None = todo
    while queue is not None:
        some, failed = make(queue)
        made += some
        failures += failed
        queue = todo.rest(made, _ids(failures))
    failures += [each for shard_id, each in todo.bad.items() if shard_id not in _ids(failures)]
    return made, failures


def _total(made: list[Manifest], elapsed_s: float) -> str:
    """Return the amounts, with the rates that ``status`` shows: without the start of the processes."""
    counts = [manifest.counts for manifest in made]
    began = min((manifest.run.began for manifest in made), default=0.0)
    ended = max((manifest.run.ended for manifest in made), default=0.0)
    amounts = amounts_line(
        sum(each.input_bytes for each in counts),
        sum(each.num_documents for each in counts),
        sum(each.num_tokens for each in counts),
        ended - began,
    )
    return f"{amounts}; {elapsed_s:.1f} s with start and end"


def _facts(
    folder: DataFolder,
    plan: Plan,
    num_done_before: int,
    made: list[Manifest],
    failures: list[Failure],
    wall_s: float,
) -> dict[str, Any]:
    """Return what ``--json`` prints: the sums are of the shards that this process made."""
    counts = [manifest.counts for manifest in made]
    facts: dict[str, Any] = {
        "output_dir": str(folder),
        "plan_id": plan.plan_id,
        "num_shards": plan.num_shards,
        "num_done_before": num_done_before,
        "num_made": len(made),
        "num_failed": len(failures),
        "made": id_ranges(manifest.shard_id for manifest in made),
        "num_documents": sum(each.num_documents for each in counts),
        "num_left_out": sum(sum(each.quarantined.values()) for each in counts),
        "num_tokens": sum(each.num_tokens for each in counts),
        "input_bytes": sum(each.input_bytes for each in counts),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(sum(manifest.run.cpu_s for manifest in made), 1),
        "problems": {},
    }
    for failure in sorted(failures, key=lambda each: each.shard_id):
        of_shard = {"exit_code": failure.exit_code, "message": failure.reason}
        facts["problems"][str(failure.shard_id)] = of_shard
    return facts


def _ids(failures: list[Failure]) -> set[int]:
    return {failure.shard_id for failure in failures}


def _num_processes(given: int | None, memory_gb: float, num_cpus: int) -> int:
    """Return the number of worker processes: as given, or one per CPU, if there is enough memory."""
    num_proc = given
    if num_proc is None:
        num_proc = environment_number("DATASET_NUM_PROC")
    if num_proc is None:
        fitting = int(memory_gb * 2**30) // (resources.PROCESS_BYTES + _ENCODER_BYTES)
        num_proc = max(1, min(num_cpus, fitting))
    if num_proc < 1:
        raise UsageError.of_value("--num_proc", num_proc, "1 or more")
    return num_proc


def _part_line(part: Part, num_missing: int, num_own: int, num_proc: int) -> str:
    """Return the line that says who works."""
    shards = counted(num_missing, "shard")
    if part.said_by == "--part":
        return (
            f"part {part.number} of {part.num_parts}: {num_own} of {shards} first, then those that no other "
            f"part has begun, by {counted(num_proc, 'process')}"
        )
    where = f"on {counted(part.place.num_nodes, 'node')}"
    if part.is_of_array:
        where = "of a job array"
    each = f"up to {counted(num_proc, 'process')} each"
    return f"{part.num_parts} tasks {where} share {shards} ({part.said_by}), with {each}"
