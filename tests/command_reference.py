"""``python -m tests.command_reference`` writes docs/commands.md of what the commands declare."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator

from shardprep.__main__ import COMMANDS
from shardprep.errors import EXIT_CODES
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "commands.md"
HEAD = """\
# Commands

On this page you can look up each flag of each command, with its default, and the exit codes.
A flag that several commands have is explained once. A flag without a default is off, or has no value.
`shardprep help plan` shows all flags of a command in a terminal. [reference.md](reference.md) says which page
explains which command. `python -m tests.command_reference` writes this page.

## Exit codes

All commands use these, and so do the tasks of a job array:

| code | meaning |
|---|---|
"""


def page() -> str:
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    explained: dict[str, str] = {}  # a flag with its help -> the command under which it stands
    sections = [section_of(title, text, explained) for title, text in helps()]
    return HEAD + codes + "".join(sections)


def helps() -> Iterator[tuple[str, str]]:
    """The help of each command, under its name."""
    for command, package in COMMANDS.items():
        program = importlib.import_module(f"{package}.__main__").PROGRAM
        if package == command:
            for word in program.commands:
                yield f"{command} {word}", program.parser_of(word, name=f"shardprep {command}").format_help()
        else:
            yield command, program.parser_of(command, name="shardprep").format_help()


def section_of(title: str, text: str, explained: dict[str, str]) -> str:
    """A command's help, without what stands under an earlier command, and defaults that say nothing."""
    text = re.sub(r"\s+\(default:\s+(off|none)\)", "", text)
    kept: list[str] = []
    repeated: dict[str, list[str]] = defaultdict(list)
    for block in re.split(r"\n(?=\n)", text.rstrip("\n")):  # each begins with an empty line but the first
        entries = re.split(r"\n(?=  (?! ))", block)
        shown = entries[:1]
        for entry in entries[1:]:
            words = " ".join(entry.split())
            if words.startswith("-h, --help"):
                continue
            if words not in explained:
                explained[words] = title
                shown.append(entry)
            elif words.startswith("-"):
                repeated[explained[words]].append(name_of(words))
        if len(shown) > 1 or len(entries) == 1:
            kept.append("\n".join(shown))
    also = ""
    for other, flags in repeated.items():
        missing = [
            name_of(words)
            for words, command in explained.items()
            if command == other and words.startswith("-") and name_of(words) not in flags
        ]
        listed = ", ".join(flags)
        if len(missing) < len(flags):
            listed = f"all flags but {', '.join(missing)}" if missing else "all flags"
        also += f"\nExplained under `{other}`: {listed}.\n"
    return f"\n## {title}\n\n```text\n" + "\n".join(kept) + f"\n```\n{also}"


def name_of(words: str) -> str:
    """The long name of a flag, of its entry in a help."""
    return f"`{re.findall(r'--[a-z_]+', words)[0]}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
