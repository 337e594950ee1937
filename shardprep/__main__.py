"""``shardprep``, the one command: every command of every package under one name.

The table below is the only place that knows all packages, as strings. Each package's ``__main__`` has a
``PROGRAM`` with its commands, and imports nothing large (no numpy, no torch).
"""

from __future__ import annotations

if __name__ == "__main__":
    from shardprep import begin_command

    begin_command()

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardprep import __version__, check_not_hidden
from shardprep.command_line import Command, Program, given_words, show_commands, unknown_command
from shardprep.console import guard_streams, print_exactly, print_lines, say
from shardprep.errors import UsageError
from shardprep.processes import die_with_parent

# Command -> its package, in the order in which a user meets them.
COMMANDS = {
    **dict.fromkeys(("doctor", "plan", "run", "shard", "verify", "peek", "export", "blank"), "preprocess"),
    **dict.fromkeys(("overlap", "duplicates", "clean", "train_tokenizer"), "preprocess"),
    **dict.fromkeys(("submit", "status", "retry", "report", "cancel", "logs"), "slurm"),
    **dict.fromkeys(("stage", "where", "forecast"), "loader"),
    "lustre": "lustre",  # with commands of its own: show, apply
    "completion": "shardprep",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without a command, ``--shard_id N`` makes a shard."""
    words = given_words(argv)
    guard_streams()
    try:
        if words[:1] in (["--version"], ["-V"]):
            print_lines(f"shardprep {__version__}")
            return 0
        if not words or words[0] in ("-h", "--help") or words == ["help"]:
            end = "shardprep COMMAND --help shows its flags, --version the version."
            what = "Raw text -> token shards -> batches."
            show_commands("shardprep", what, _summaries(), end, is_asked_for=bool(words))
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


def run_for_parent() -> int:
    """Run a command, in a process that ends with the one whose id is the first argument."""
    die_with_parent(int(sys.argv.pop(1)))
    return main()


def _program(package: str) -> Program:
    check_not_hidden(package.partition(".")[0])
    program: Program = importlib.import_module(f"{package}.__main__").PROGRAM
    return program


def _summaries() -> dict[str, str]:
    found = {}
    for command, package in COMMANDS.items():
        program = _program(package)
        found[command] = program.description[0].lower() + program.description[1:].rstrip(".")
        if command in program.commands:
            found[command] = program.commands[command].summary
    return found


def _completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


def _completion(args: argparse.Namespace) -> int:
    """Print the completion script that shtab builds from the parsers of all commands."""
    import shtab

    def add(commands: Any, word: str, program: Program) -> None:
        flags = program.parser_of(word, name=program.name)
        for action in flags._actions:  # noqa: SLF001  argparse has no other list
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # for shtab
        commands.add_parser(word, help=program.commands[word].summary, parents=[flags], add_help=False)

    parser = argparse.ArgumentParser(prog="shardprep")
    commands = parser.add_subparsers()
    for word, package in COMMANDS.items():
        program = _program(package)
        if package == word:  # it has commands of its own
            subcommands = commands.add_parser(word, help=program.description).add_subparsers()
            for each in program.commands:
                add(subcommands, each, program)
        else:
            add(commands, word, program)
    print_exactly(*shtab.complete(parser, args.shell).split("\n"))
    return 0


_SUMMARY = "print a shell script that completes commands and flags; needs shtab"
PROGRAM = Program(
    name="shardprep",
    description="Completion of commands and flags.",
    commands={"completion": Command(_SUMMARY, _completion_flags, _completion)},
)

if __name__ == "__main__":
    sys.exit(main())
