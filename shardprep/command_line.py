"""How every command reads its words: dashes or underscores, commands by name, a usage of one's own.

Sizes as people type them.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from shardprep.errors import UsageError


def underscored(word: str) -> str:
    """``--dry-run`` -> ``--dry_run``: in a flag's name, not in its value, the two are the same."""
    if not re.match(r"--[a-z]", word):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    return (f"--no-{name[3:]}" if name.startswith("no_") else f"--{name}") + equals + value


def check_command(word: str, commands: Sequence[str]) -> None:
    """Raises UsageError for a word that is no command, with all that are and the one that was meant."""
    if word not in commands:
        close = difflib.get_close_matches(word, commands, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"there is no command {word[:60]!r}; {meant}commands: {', '.join(commands)}")


def parse_command(
    parser: argparse.ArgumentParser,
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    words: Sequence[str],
) -> argparse.Namespace:
    """Parse; a flag that is unknown to a command ends with that command's usage, not with all commands'."""
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str, flag: str) -> int:
    """``512M`` -> bytes; K, M, G and T are binary. Raises UsageError, naming the flag."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{flag} is {text!r}, expected a number of bytes such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]
