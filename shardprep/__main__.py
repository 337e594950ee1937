"""``shardprep``, the one command: every command of every package under one name.

The table below is the one place that knows the packages, and it knows them as strings. Each ``__main__`` has
a ``PROGRAM`` whose commands these are; importing it imports nothing large (no numpy, no torch).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from shardprep import __version__
from shardprep.command_line import Command, Program, given_words, unknown_command
from shardprep.console import guard_streams, print_lines, say
from shardprep.errors import UsageError
from shardprep.own_packages import check_not_hidden

# Command -> the package whose command it is, in the order in which a user meets them.
COMMANDS = {
    "doctor": "preprocess",
    "plan": "preprocess",
    "run": "preprocess",
    "shard": "preprocess",
    "verify": "preprocess",
    "peek": "preprocess",
    "export": "preprocess",
    "blank": "preprocess",
    "overlap": "preprocess.overlap",
    "clean": "preprocess",
    "train_tokenizer": "preprocess",
    "submit": "slurm",
    "status": "slurm",
    "retry": "slurm",
    "report": "slurm",
    "cancel": "slurm",
    "logs": "slurm",
    "stage": "loader",
    "where": "loader",
    "lustre": "lustre",  # with commands of its own: show, apply
    "completion": "shardprep",
}
PROGRAM = Program(
    name="shardprep",
    description="Completion of commands and flags.",
    commands={
        "completion": Command(
            "print a script with which a shell completes commands and flags; needs shtab",
            "shardprep.completion:add_flags",
            "shardprep.completion:completion",
        )
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Without a command, ``--shard_id N`` makes a shard."""
    words = given_words(argv)
    guard_streams()
    try:
        if words[:1] in (["-h"], ["--help"]) or words == ["help"]:
            print_lines(*_help())
            return 0
        if words[:1] == ["--version"]:
            print_lines(f"shardprep {__version__}")
            return 0
        if not words:
            for line in _help():
                say(line)
            return UsageError.exit_code
        if words[0] == "help":
            words = [*words[1:], "--help"]
        if words[0].startswith("-"):
            return _program("preprocess").run(["shard", *words], name="shardprep")
        command = words[0].replace("-", "_")
        if command not in COMMANDS:
            say(f"error: {unknown_command(words[0], list(COMMANDS))}")
            return UsageError.exit_code
        package = COMMANDS[command]
        if package == command:
            return _program(package).run(words[1:], name=f"shardprep {command}")
        return _program(package).run([command, *words[1:]], name="shardprep")
    except ImportError as error:
        if error.name not in COMMANDS.values():
            raise
        say(f"error: {error}")
        return UsageError.exit_code


def _program(package: str) -> Program:
    check_not_hidden(package.partition(".")[0])
    program: Program = importlib.import_module(f"{package}.__main__").PROGRAM
    return program


def _help() -> list[str]:
    lines = ["usage: shardprep COMMAND [flags]", "", "Raw text -> token shards -> batches.", "", "commands:"]
    for command, package in COMMANDS.items():
        program = _program(package)
        summary = program.description[0].lower() + program.description[1:].rstrip(".")
        if command in program.commands:
            summary = program.commands[command].summary
        lines.append(f"  {command:<17}{summary}")
    return [*lines, "", "shardprep COMMAND --help shows its flags; --version the version."]


if __name__ == "__main__":
    sys.exit(main())
