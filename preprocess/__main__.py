"""``python -m preprocess``: plan, run, verify, train_tokenizer, or one shard by ``--shard_id N``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from shardprep.id_ranges import id_ranges

from preprocess.command_line import (
    given_options,
    num_processes,
    parse,
    parse_ids,
    worker_settings,
)
from preprocess.options import PrepConfig
from shardprep.command_line import parse_size
from shardprep.console import Progress, outlast_readers, raise_on_stop_signals, say
from shardprep.errors import ShardprepError, Stopped


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    outlast_readers()
    try:
        raise_on_stop_signals()
        args = parse(sys.argv[1:] if argv is None else argv)
        code = _COMMANDS[args.command](args)
        sys.stdout.flush()
    except (ShardprepError, Stopped) as error:
        if str(error):
            say(f"error: {error}")
        return error.exit_code
    return code


def make_shard(args: argparse.Namespace) -> int:
    """``--shard_id N``: the command of a job array's task."""
    from preprocess.resources import bind_to_task_cpus, memory_note
    from preprocess.task_plan import array_note, check_task_shard, plan_of_task
    from preprocess.worker import done_manifest, load_worker
    from shardprep.format.names import quarantine_path

    given = given_options(args)
    given.setdefault("output_dir", PrepConfig().output_dir)
    folder = given["output_dir"]
    plan = plan_of_task(given)
    if note := array_note(os.environ, plan.num_shards, folder):
        say(f"note: {note}")
    shard_id: int = args.shard_id
    check_task_shard(plan, shard_id)
    if done_manifest(plan, folder, shard_id):
        say(f"shard {shard_id:05d} is done already")
        return 0
    num_cpus = bind_to_task_cpus(offset=shard_id)
    settings = worker_settings(args)
    if settings.memory_gb is not None and (note := memory_note(settings.memory_gb)):
        say(f"note: {note}")
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=say)
    with Progress(f"shard {shard_id:05d}", plan.shard_bytes()[shard_id]) as progress:
        counts = worker.run_shard(shard_id, progress.add).counts
    say(f"shard {shard_id:05d} is done: {counts.num_documents} documents, {counts.num_tokens} tokens")
    if counts.quarantined:
        say(
            f"{sum(counts.quarantined.values())} documents were left out: {quarantine_path(folder, shard_id)}"
        )
    return 0


def make_plan(args: argparse.Namespace) -> int:
    """``plan``: freeze which bytes are which shard, and say what it will cost."""
    from preprocess.planning import LONG_SHARD_S, Sharding, small_shards_note
    from preprocess.planning import make_plan as make

    config = PrepConfig(**given_options(args))
    shard_bytes = parse_size(args.shard_bytes, "--shard_bytes") if args.shard_bytes else None
    sharding = Sharding(num_shards=args.num_shards, shard_bytes=shard_bytes)
    plan, cost = make(config, sharding, stripe=args.stripe, dry_run=args.dry_run, say=say)
    last = plan.num_shards - 1
    sizes = plan.shard_bytes()
    print(f"plan {plan.plan_id[:12]}: {plan.num_shards} shards of {min(sizes)} to {max(sizes)} input bytes")
    print(
        f"about {cost.num_tokens:.3g} tokens, {cost.output_bytes / 1e9:.3g} GB on disk, "
        f"{cost.core_hours:.2g} core hours, the longest shard {cost.longest_shard_s:.0f} s on one core"
    )
    print(f"a task uses up to {cost.num_useful_cores} cores well: --cpus-per-task={cost.num_useful_cores}")
    if cost.longest_shard_s > LONG_SHARD_S:
        more = round(plan.num_shards * cost.longest_shard_s / LONG_SHARD_S) + 1
        minutes = cost.longest_shard_s / 60
        print(f"warning: a shard will take {minutes:.0f} minutes on one core; --num_shards {more}?")
    if note := small_shards_note(plan, sharding):
        print(f"warning: {note}")
    if empty := sizes.count(0):
        print(f"warning: {empty} shards are empty; fewer would do")
    print(f"next: sbatch --array=0-{last} slurm/prep_array.sh {config.output_dir}")
    print(f"  or: python -m slurm submit {config.output_dir}  # within the site's limits, verify included")
    print(f"  or: python -m preprocess run {config.output_dir}  # here, without a cluster")
    return 0


def run(args: argparse.Namespace) -> int:
    """``run O``: the missing shards on this machine."""
    from preprocess.local_run import run_shards
    from preprocess.plan import need_plan
    from preprocess.resources import allowed_cpus, memory_note
    from preprocess.worker import done_manifest

    folder = args.output_dir
    plan = need_plan(folder)
    wanted = parse_ids(args.shards, plan.num_shards) if args.shards else range(plan.num_shards)
    todo = [shard_id for shard_id in wanted if not done_manifest(plan, folder, shard_id)]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} shards are done already")
    if not todo:
        return 0
    cpus = allowed_cpus(os.environ, os.sched_getaffinity(0), offset=todo[0])
    settings = worker_settings(args)
    assert settings.memory_gb is not None
    num_proc = num_processes(args, len(cpus), settings.memory_gb)
    num_proc = min(num_proc, len(todo))
    settings = dataclasses.replace(settings, memory_gb=settings.memory_gb / num_proc)
    if note := memory_note(settings.memory_gb or 0, num_proc):
        say(f"note: {note}")
    cpus_of = [cpus[number::num_proc] or cpus for number in range(num_proc)]
    sizes = plan.shard_bytes()
    with Progress(f"{len(todo)} shards", sum(sizes[shard_id] for shard_id in todo)) as progress:
        failures = run_shards(folder, settings, todo, cpus_of, progress)
    say(f"{len(todo) - len(failures)} of {len(todo)} shards made by {num_proc} process(es)")
    if failures:
        ids = id_ranges(failure.shard_id for failure in failures)
        say(f"error: failed: {ids}; run again: python -m preprocess run {folder} --shards {ids}")
        return failures[0].exit_code
    return 0


def verify(args: argparse.Namespace) -> int:
    """``verify O``: prove the shards whole and write index.json."""
    from preprocess.plan import need_plan
    from preprocess.verify import publish_osts, verify_dataset
    from shardprep.format.names import INDEX_NAME

    folder = args.output_dir
    plan = need_plan(folder)
    with Progress("verifying", plan.num_shards, unit="shards") as progress:
        problems, index = verify_dataset(folder, plan, fast=args.fast, progress=lambda _: progress.add(1))
    for problem in problems:
        say(f"error: shard {problem.shard_id:05d}: {problem.error}")
    if index is None:
        ids = id_ranges(problem.shard_id for problem in problems)
        say(f"{len(problems)} of {plan.num_shards} shards are not right: {ids}; the lines above mend them")
        return problems[0].error.exit_code
    samples, tokens = int(index.column("num_samples").sum()), int(index.column("num_tokens").sum())
    print(
        f"{plan.num_shards} shards are whole: {samples} samples, {tokens} tokens; wrote {folder / INDEX_NAME}"
    )
    if note := publish_osts(folder, plan.num_shards):
        say(note)
    return 0


def train_tokenizer(args: argparse.Namespace) -> int:
    """``train_tokenizer``: a tokenizer of one's own."""
    from preprocess import train_tokenizer as training

    return training.main(args)


_COMMANDS = {
    "shard": make_shard,
    "plan": make_plan,
    "run": run,
    "verify": verify,
    "train_tokenizer": train_tokenizer,
}

if __name__ == "__main__":
    sys.exit(main())
