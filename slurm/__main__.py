"""``python -m slurm``: submit, status, retry, cancel."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.command_line import Command, Program, add_flags_of, given_of
from shardprep.console import Progress, output_is_read, say
from shardprep.errors import ReadWriteError
from shardprep.format.names import INDEX_NAME, id_ranges
from shardprep.regular_files import size_of_file
from slurm.job_script import JobRequest

if TYPE_CHECKING:
    from slurm.dataset_state import DatasetState
    from slurm.submitting import Sending

_POLL_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    return PROGRAM.run(sys.argv[1:] if argv is None else argv)


def given_request(args: argparse.Namespace) -> dict[str, Any]:
    """The request's fields that the user gave, by flag, or by sbatch's own variables (SBATCH_PARTITION)."""
    from slurm.slurm_queries import REQUEST_VARIABLES

    given = {
        name: os.environ[variable] for name, variable in REQUEST_VARIABLES.items() if variable in os.environ
    }
    return {**given, **given_of(args, JobRequest)}


def submit(args: argparse.Namespace) -> int:
    """``submit O``: the missing shards as a job array, and a verify job after it."""
    from slurm.submitting import prepare_submit

    request = JobRequest(**given_request(args))
    state, sending = prepare_submit(args.output_dir, request, args.shards_per_task, say, dry_run=args.dry_run)
    if sending is None:
        print(f"nothing to submit: {_summary(state)}")
        return _wait(args) if args.wait and not args.dry_run else 0
    return _send(args, sending)


def retry(args: argparse.Namespace) -> int:
    """``retry O``: what failed, each as its failure asks."""
    from preprocess.plan import need_plan
    from slurm.dataset_state import find_state
    from slurm.submitting import prepare_retry, reason_to_leave

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
    from preprocess.plan import need_plan
    from slurm.dataset_state import find_state

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
    whole = (
        len(state.ids("done")) == plan.num_shards and size_of_file(args.output_dir / INDEX_NAME) is not None
    )
    return 0 if whole else ReadWriteError.exit_code


def status(args: argparse.Namespace) -> int:
    """``status O``: where every shard is, and why what failed did."""
    from preprocess.plan import need_plan
    from slurm.dataset_state import find_state

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
    from slurm.status_report import read_makings, report, report_text

    data = report(state, read_makings(state.folder, state.ids("done")))
    print(json.dumps(data) if as_json else report_text(data), flush=True)


def cancel(args: argparse.Namespace) -> int:
    """``cancel O``: every job of this data set that waits or runs. Shards that are done stay done."""
    from preprocess.plan import need_plan
    from slurm.dataset_state import find_state
    from slurm.slurm_queries import slurm_output

    state = find_state(args.output_dir, need_plan(args.output_dir))
    live = state.live_job_ids()
    if live:
        slurm_output("scancel", *live)
    print(f"cancelled: {', '.join(live)}" if live else f"nothing is queued; {_summary(state)}")
    return 0


def _summary(state: DatasetState) -> str:
    return f"{len(state.ids('done'))} of {state.plan.num_shards} shards are done"


def _folder_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=_real_path, help="folder of the data set")


def _real_path(text: str) -> Path:
    return Path(os.path.realpath(text))  # Path.resolve raises where links go round


def _submit_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    add_flags_of(parser, JobRequest, show_defaults=False)
    parser.add_argument(
        "--shards_per_task", type=int, help="shards of a task (default 1, more where the site's limits ask)"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the job scripts, submit nothing")
    parser.add_argument("--wait", action="store_true", help="show progress until all jobs have ended")


def _retry_flags(parser: argparse.ArgumentParser) -> None:
    _submit_flags(parser)
    parser.add_argument(
        "--max_attempts",
        type=int,
        default=3,
        help="leave a shard that failed the same way so often (default 3)",
    )


def _status_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until nothing is queued")
    parser.add_argument("--json", action="store_true", help="for programs")


PROGRAM = Program(
    name="python -m slurm",
    description="Make a planned data set's shards with a Slurm job array.",
    dashed_values=("--sbatch_args", "--worker_args"),
    commands={
        "submit": Command(
            summary="submit the missing shards, and a verify job after them",
            add_flags=_submit_flags,
            run=submit,
        ),
        "retry": Command(
            summary="submit again what failed, each as its failure asks", add_flags=_retry_flags, run=retry
        ),
        "status": Command(
            summary="say where every shard is, and why what failed did", add_flags=_status_flags, run=status
        ),
        "cancel": Command(
            summary="cancel every job of this data set that waits or runs", add_flags=_folder_flag, run=cancel
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
