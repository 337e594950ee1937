"""``completion``: a script with which a shell completes the commands and their flags; shtab writes it."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import shtab

from shardprep.command_line import Program
from shardprep.console import print_lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


def completion(args: argparse.Namespace) -> int:
    """Print the script."""
    from shardprep.__main__ import COMMANDS

    parser = argparse.ArgumentParser(prog="shardprep")
    commands = parser.add_subparsers()
    for word, package in COMMANDS.items():
        program: Program = importlib.import_module(f"{package}.__main__").PROGRAM
        if package != word:
            _add(commands, word, program)
            continue
        below = commands.add_parser(word, help=program.description).add_subparsers()  # it has commands itself
        for each in program.commands:
            _add(below, each, program)
    print_lines(*shtab.complete(parser, args.shell).split("\n"))
    return 0


def _add(commands: Any, word: str, program: Program) -> None:
    flags = program.parser_of(word, name=program.name)
    for action in flags._actions:  # noqa: SLF001  argparse has no other list
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # for shtab
    commands.add_parser(word, help=program.commands[word].summary, parents=[flags], add_help=False)
