"""``python -m slurm``: submit, status, retry, cancel."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from preprocess.progress import Progress, say
from preprocess.shard_format import INDEX_NAME, ReadWriteError, ShardprepError, Stopped, id_ranges
from preprocess.shard_plan import need_plan
from preprocess.standard_streams import outlast_readers, output_is_read
from preprocess.stop_signals import raise_on_stop_signals
from slurm.command_line import given_request, parse
from slurm.dataset_state import DatasetState, find_state
from slurm.job_request import JobRequest
from slurm.shard_runs import read_shard_runs
from slurm.slurm_commands import slurm_output
from slurm.status_report import report, report_text
from slurm.submitting import Sending, prepare_retry, prepare_submit, reason_to_leave

_POLL_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    outlast_readers()
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        args.output_dir = Path(os.path.realpath(args.output_dir))  # resolve() raises where links go round
        raise_on_stop_signals()
        code = _COMMANDS[args.command](args)
        sys.stdout.flush()
    except (ShardprepError, Stopped) as error:
        say(f"error: {error}")
        return error.exit_code
    return code


def submit(args: argparse.Namespace) -> int:
    """``submit O``: the missing shards as a job array, and a verify job after it."""
    request = JobRequest(**given_request(args))
    state, sending = prepare_submit(args.output_dir, request, args.shards_per_task, say, dry_run=args.dry_run)
    if sending is None:
        print(f"nothing to submit: {_summary(state)}")
        return _wait(args) if args.wait and not args.dry_run else 0
    return _send(args, sending)


def retry(args: argparse.Namespace) -> int:
    """``retry O``: what failed, each as its failure asks."""
    changes = given_request(args)
    state = find_state(args.output_dir, need_plan(args.output_dir))
    left, sending = prepare_retry(
        state, changes, max_attempts=args.max_attempts, shards_per_task=args.shards_per_task, say=say
    )
    for shard in left:
        why = reason_to_leave(shard, args.max_attempts, changes)
        say(f"left: shard {shard.shard_id:05d}: {shard.cause}; {why}; {shard.attempts[-1].log}")
    if sending is None:
        print(f"nothing to retry: {len(left)} shards are left as they are, {_summary(state)}")
        if args.wait and not args.dry_run:
            return _wait(args)
        return ReadWriteError.exit_code if left else 0
    return _send(args, sending)


def _send(args: argparse.Namespace, sending: Sending) -> int:
    if args.dry_run:
        print("\n".join(sending.scripts))
        return 0
    submission = sending.send()
    for array in submission.arrays:
        mem = "no memory limit" if array.mem_mb is None else f"{array.mem_mb} MB"
        limit = "no time limit" if array.time_min is None else f"{array.time_min} min"
        shards = id_ranges(shard_id for ids in array.shards_of_tasks() for shard_id in ids)
        print(f"job {array.job_id}: {len(array.tasks)} task(s) of {mem}, {limit}, for shards {shards}")
    print(f"job {submission.verify_job_id}: verify, when they have ended")
    if args.wait:
        return _wait(args)
    print(f"next: python -m slurm status {args.output_dir} --watch")
    return 0


def _wait(args: argparse.Namespace) -> int:
    """One bar over the whole data set until no job of it is queued; 0 only where it is verified then."""
    plan = need_plan(args.output_dir)
    sizes, counted = plan.shard_bytes(), set[int]()
    with Progress(f"{plan.num_shards} shards", sum(sizes)) as progress:
        while True:
            state = find_state(args.output_dir, plan)
            fresh = set(state.ids("done")) - counted
            counted |= fresh
            progress.add(sum(sizes[shard_id] for shard_id in fresh))
            if not state.live_job_ids():
                break
            time.sleep(_POLL_S)
    _print_status(state)
    whole = len(state.ids("done")) == plan.num_shards and (args.output_dir / INDEX_NAME).exists()
    return 0 if whole else ReadWriteError.exit_code


def status(args: argparse.Namespace) -> int:
    """``status O``: where every shard is, and why what failed did."""
    plan = need_plan(args.output_dir)
    while True:
        state = find_state(args.output_dir, plan)
        if args.watch and not args.json and sys.stdout.isatty():
            sys.stdout.write("\033[H\033[2J")
        _print_status(state, as_json=args.json)
        if not args.watch or not state.live_job_ids() or not output_is_read():
            return 0
        time.sleep(_POLL_S)


def _print_status(state: DatasetState, *, as_json: bool = False) -> None:
    data = report(state, read_shard_runs(state.folder, state.ids("done")))
    print(json.dumps(data) if as_json else report_text(data), flush=True)


def cancel(args: argparse.Namespace) -> int:
    """``cancel O``: every job of this data set that waits or runs. Shards that are done stay done."""
    state = find_state(args.output_dir, need_plan(args.output_dir))
    live = state.live_job_ids()
    if live:
        slurm_output("scancel", *live)
    print(f"cancelled: {', '.join(live)}" if live else f"nothing is queued; {_summary(state)}")
    return 0


def _summary(state: DatasetState) -> str:
    return f"{len(state.ids('done'))} of {state.plan.num_shards} shards are done"


_COMMANDS = {"submit": submit, "status": status, "retry": retry, "cancel": cancel}

if __name__ == "__main__":
    sys.exit(main())
