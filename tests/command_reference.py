"""``python -m tests.command_reference`` writes docs/commands.md of what the commands declare."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from shardprep.__main__ import COMMANDS
from shardprep.errors import EXIT_CODES
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "commands.md"
HEAD = """\
# Commands

On this page you can look up each flag of each command, with its default, and the exit codes.
`shardprep help plan` shows the same in a terminal. [reference.md](reference.md) says which page explains
which command. `python -m tests.command_reference` writes this page.

## Exit codes

All commands use these, and so do the tasks of a job array:

| code | meaning |
|---|---|
"""


def page() -> str:
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    return HEAD + codes + "".join(f"\n## {title}\n\n```text\n{text}```\n" for title, text in helps())


def helps() -> Iterator[tuple[str, str]]:
    """The help of each command, under its name."""
    for command, package in COMMANDS.items():
        program = importlib.import_module(f"{package}.__main__").PROGRAM
        if package == command:
            for word in program.commands:
                yield f"{command} {word}", program.help_of(word, name=f"shardprep {command}")
        else:
            yield command, program.help_of(command, name="shardprep")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
