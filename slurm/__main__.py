"""``python -m slurm``: submit, status, retry, report, cancel, logs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardprep.command_line import Command, Program, add_flags_of, given_words
from shardprep.format.submissions import FLAG_GROUPS, JobRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    return PROGRAM.run(given_words(argv))


def _folder_flag(parser: argparse.ArgumentParser) -> None:
    def real_path(text: str) -> Path:
        return Path(os.path.realpath(text))  # Path.resolve raises where links go round

    parser.add_argument("output_dir", type=real_path, help="folder of the data set")


def _cancel_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("--shards", help="only the tasks of these, such as 0-9,12 (default: all)")


def _logs_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("shard_id", type=int, help="which shard, from 0")


def _sending_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    add_flags_of(parser, JobRequest, groups=FLAG_GROUPS)
    shards = "shards per task (default: 1, more if the site's limits require it)"
    parser.add_argument("--shards_per_task", type=int, help=shards)
    text = "only these, such as 0-9,12, however often they failed (default: all)"
    parser.add_argument("--shards", help=text)
    parser.add_argument("--dry_run", action="store_true", help="print the job scripts, submit nothing")
    parser.add_argument("--wait", action="store_true", help="show progress until all jobs have ended")
    parser.add_argument(
        "--until_done",
        action="store_true",
        help="leave a small job on the cluster that submits failed shards again and then writes a report",
    )


def _retry_flags(parser: argparse.ArgumentParser) -> None:
    _sending_flags(parser)
    parser.add_argument("--round", type=int, default=1, help=argparse.SUPPRESS)


def _status_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until nothing is queued")
    parser.add_argument(
        "--json", action="store_true", help="print JSON for programs, see docs/status_json.md"
    )


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What a data set holds, how it was made and how to make it again: a page for a browser, without "
        "scripts or network. Reads every manifest, and no shard."
    )
    parser.add_argument("output_dir", type=Path, help="folder of the data set")
    text = "write this file (default: report.html in the current folder; with --json: print)"
    parser.add_argument("--output", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="JSON for programs, see docs/report_json.md")


# Modules are named, not imported: what a command needs is loaded when it is called.
PROGRAM = Program(
    name="python -m slurm",
    description="Make a planned data set's shards with a Slurm job array.",
    dashed_values=("--sbatch_args", "--worker_args", "--srun_args"),
    commands={
        "submit": Command(
            summary="submit the missing shards, and a verify job after them",
            add_flags=_sending_flags,
            run="slurm.send:submit",
        ),
        "retry": Command(
            summary="submit failed shards again, with more memory or time where they ran out of it",
            add_flags=_retry_flags,
            run="slurm.retry:retry",
        ),
        "status": Command(
            summary="show the state of every shard, and why shards failed",
            add_flags=_status_flags,
            run="slurm.status:status",
        ),
        "report": Command(
            summary="one page of the data set: what it holds, how it was made, how to make it again",
            add_flags=_report_flags,
            run="slurm.report:report",
        ),
        "cancel": Command(
            summary="cancel every job of this data set that waits or runs",
            add_flags=_cancel_flags,
            run="slurm.cancel:cancel",
        ),
        "logs": Command(
            summary="show the attempts at one shard and the ends of their logs",
            add_flags=_logs_flags,
            run="slurm.status:logs",
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
