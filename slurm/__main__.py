"""Flags of ``python -m slurm``, made from JobRequest's fields.

``python -m slurm``: submit, status, retry, cancel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

from shardprep.id_ranges import id_ranges

from preprocess.plan import need_plan
from shardprep.command_line import check_command, parse_command, underscored
from shardprep.console import Progress, outlast_readers, output_is_read, raise_on_stop_signals, say
from shardprep.errors import ReadWriteError, ShardprepError, Stopped
from shardprep.format.names import INDEX_NAME
from shardprep.regular_files import size_of_file
from slurm.dataset_state import DatasetState, find_state
from slurm.job_script import HELP, JobRequest
from slurm.slurm_commands import REQUEST_VARIABLES, slurm_output
from slurm.status_report import read_shard_runs, report, report_text
from slurm.submitting import Sending, prepare_retry, prepare_submit, reason_to_leave


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed command line. A request's flags are absent unless given.

    Raises UsageError for an unknown command.
    """
    parser = argparse.ArgumentParser(
        prog="python -m slurm", description="Make a planned data set's shards with a Slurm job array."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text)
        command.add_argument("output_dir", type=Path, help="folder of the data set")
        return command

    submit = add("submit", "submit the missing shards, and a verify job after them")
    retry = add("retry", "submit again what failed, each as its failure asks")
    for command in (submit, retry):
        _add_request(command)
        command.add_argument(
            "--shards_per_task",
            type=int,
            help="shards of a task (default 1, more where the site's limits ask)",
        )
        command.add_argument("--dry_run", action="store_true", help="print the job scripts, submit nothing")
        command.add_argument("--wait", action="store_true", help="show progress until all jobs have ended")
    retry.add_argument(
        "--max_attempts",
        type=int,
        default=3,
        help="leave a shard that failed the same way so often (default 3)",
    )
    status = add("status", "say where every shard is, and why what failed did")
    status.add_argument("--watch", action="store_true", help="repeat until nothing is queued")
    status.add_argument("--json", action="store_true", help="for programs")
    add("cancel", "cancel every job of this data set that waits or runs")
    words = _words(argv)
    if words and not words[0].startswith("-"):
        check_command(words[0], list(commands.choices))
    return parse_command(parser, commands, words)


def _words(argv: list[str]) -> list[str]:
    """Flags with underscores; ``--sbatch_args --no-requeue`` as one word, else argparse finds two flags."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--sbatch_args", "--worker_args"):
            words[-1] += f"={word}"
        else:
            words.append(underscored(word))
    return words


def given_request(args: argparse.Namespace) -> dict[str, Any]:
    """The request's fields that the user gave, by flag, or by sbatch's own variables (SBATCH_PARTITION)."""
    given = {
        name: os.environ[variable] for name, variable in REQUEST_VARIABLES.items() if variable in os.environ
    }
    names = {item.name for item in dataclasses.fields(JobRequest)}
    return {**given, **{name: value for name, value in vars(args).items() if name in names}}


def _add_request(parser: argparse.ArgumentParser) -> None:
    kinds = {int: int, int | None: int, float | None: float}
    hints = get_type_hints(JobRequest)
    for item in dataclasses.fields(JobRequest):
        parser.add_argument(
            f"--{item.name}",
            type=kinds.get(hints[item.name], str),
            default=argparse.SUPPRESS,
            help=HELP[item.name],
        )


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
    whole = (
        len(state.ids("done")) == plan.num_shards and size_of_file(args.output_dir / INDEX_NAME) is not None
    )
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
