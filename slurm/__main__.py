"""``python -m slurm``: submit, status, retry, report, cancel, logs."""

from __future__ import annotations

if __name__ == "__main__":
    from shardprep import begin_command

    begin_command()

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from shardprep.command_line import Command, Program, given_words
from shardprep.local_paths import real_path
from shardprep.option_flags import add_flags_of, given_of
from slurm.commands import megabytes_of, minutes_of
from slurm.request import JobRequest, SendOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are a line on standard error, never a traceback."""
    return PROGRAM.run(given_words(argv))


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="DATA", type=real_path, help="folder of the data set")


def _add_cancel(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--shards", help="only the tasks of these shards, such as 0-9,12 (default: all)")


def _add_logs(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("shard_id", type=int, help="number of the shard, from 0")


def minutes(text: str) -> int:
    """Parse minutes, or a time as Slurm writes it."""
    with contextlib.suppress(ValueError):
        return int(text)
    number = None if "." in text else minutes_of(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected minutes, or Slurm's form: 90, 1:30:00, 1-12")
    return number


def gigabytes(text: str) -> float:
    """Parse GB, or a size as Slurm writes it, such as 4000M or 4G."""
    try:
        return float(text)
    except ValueError:
        number_mb = megabytes_of(text)
    if number_mb is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected GB, or Slurm's form with a unit: 4, 4G, 4000M")
    return number_mb / 1024


_SLURMS_FORMS = {"time_min": minutes, "mem_gb": gigabytes, "mem_per_cpu_gb": gigabytes}


def _add_submit(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    add_flags_of(parser, JobRequest)
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list
        action.type = _SLURMS_FORMS.get(action.dest, action.type)
    shards = "shards per task (default: 1, more if the site's limits require it)"
    parser.add_argument("--shards_per_task", type=int, help=shards)
    text = "submit only these shards, such as 0-9,12, however often they failed (default: all)"
    parser.add_argument("--shards", help=text)
    parser.add_argument("--dry_run", action="store_true", help="print the job scripts and submit nothing")
    parser.add_argument("--wait", action="store_true", help="show progress until all jobs have ended")
    text = "leave a small job on the cluster that submits failed shards again and then writes a report"
    parser.add_argument("--until_done", action="store_true", help=text)


def _add_retry(parser: argparse.ArgumentParser) -> None:
    _add_submit(parser)
    # Given by controllers of --until_done alone, so that without it a person has typed the command.
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until nothing is queued")
    parser.add_argument("--json", action="store_true", help="JSON for programs, see docs/json.md")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write an HTML page: what a data set contains, how it was made, and how to make it again. The page "
        "has no scripts and needs no network. Reads every manifest, but no shard."
    )
    parser.add_argument("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    text = "write this file (default: report.html in the current folder; with --json: print)"
    parser.add_argument("--output", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="JSON for programs, see docs/json.md")


# Each command imports only what it needs.


def _submit(args: argparse.Namespace) -> int:
    from slurm.submit import submit

    return submit(args.output_dir, _send_options(args), given_of(args, JobRequest))


def _retry(args: argparse.Namespace) -> int:
    from slurm.retry import retry

    return retry(args.output_dir, _send_options(args), given_of(args, JobRequest))


def _send_options(args: argparse.Namespace) -> SendOptions:
    return SendOptions(**given_of(args, SendOptions))


def _status(args: argparse.Namespace) -> int:
    from slurm.status import status

    return status(args.output_dir, watches=args.watch, is_json=args.json)


def _report(args: argparse.Namespace) -> int:
    from slurm.report import report

    return report(args.output_dir, args.output, is_json=args.json)


def _cancel(args: argparse.Namespace) -> int:
    from slurm.cancel import cancel

    return cancel(args.output_dir, args.shards)


def _logs(args: argparse.Namespace) -> int:
    from slurm.logs import logs

    return logs(args.output_dir, args.shard_id)


_COMMANDS = (
    ("submit", "submit the missing shards, and a verify job after them", _add_submit, _submit),
    ("retry", "submit failed shards again, with more memory or time if it was short", _add_retry, _retry),
    ("status", "show the state of every shard, and why shards failed", _add_status, _status),
    ("report", "write an HTML page: what the data set contains, how to make it again", _add_report, _report),
    ("cancel", "cancel every job of this data set that waits or runs", _add_cancel, _cancel),
    ("logs", "show the attempts at one shard and the ends of their logs", _add_logs, _logs),
)
PROGRAM = Program(
    name="python -m slurm",
    description="Make a planned data set's shards with a Slurm job array.",
    dashed_values=("--sbatch_args", "--controller_args", "--worker_args", "--srun_args"),
    commands={
        name: Command(summary=summary, add_flags=add_flags, run=run)
        for name, summary, add_flags, run in _COMMANDS
    },
)

if __name__ == "__main__":
    sys.exit(main())
