"""Flags of ``python -m slurm``, made from JobRequest's fields."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, get_type_hints

from preprocess.flags import check_command, parse_command, underscored
from slurm.job_request import HELP, JobRequest
from slurm.slurm_commands import REQUEST_VARIABLES


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
