"""Parse command lines, run commands, and turn errors and signals into exit codes, for all packages.

A package's ``__main__`` has a ``Program``: a table of ``Command``s, each a line of help, a function that adds
its flags and a function that runs it. ``Program.run`` does the rest: dashes and underscores in a flag's name
are equal, an unknown command or flag is answered with the nearest one, and an error, a missing library or a
stop signal becomes one line on standard error and an exit code, never a traceback.

The flags of a configuration are the fields of its frozen dataclass, each declared by ``option``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardprep import __version__, given
from shardprep.console import guard_streams, print_lines, say
from shardprep.errors import ReadWriteError, ShardprepError, Stopped, UsageError
from shardprep.local_paths import check_local_path, real_path
from shardprep.meanings import meaning_of_command, meaning_of_flag
from shardprep.option_flags import shown_default
from shardprep.processes import (
    STOP_SIGNALS,
    StopSignals,
    ignore_stop_signals,
    raise_on_stop_signals,
)


def given_words(argv: Sequence[str] | None) -> list[str]:
    """Return the words of a command line: ``argv``, or the arguments of this process."""
    if argv is not None:
        return list(argv)
    # A signal during the imports waits until the command can stop cleanly.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Names of files are UTF-8 in our packages, in Rust libraries and in plans. If the locale says otherwise,
    # such as LANG=en_US, restart this process in Python's UTF-8 mode.
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Pass on the words as typed: Python cannot always encode what it decoded as EUC-KR.
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
        os.execve("/proc/self/exe", words, {**os.environb, b"PYTHONUTF8": b"1"})  # noqa: S606
    return sys.argv[1:]


def check_names_are_utf8(*paths: str) -> None:
    """Raise UsageError if this Python does not take names of files, or these ``paths``, for UTF-8."""
    encoding = sys.getfilesystemencoding()
    # ASCII names are the same in every encoding.
    if encoding == "utf-8" or (paths and "".join(paths).isascii()):
        return
    shown = next((f"{path!a} is not ASCII, and " for path in paths if not path.isascii()), "")
    found = f"{shown}names of files are {encoding} to this Python, by its locale"
    raise UsageError(found=found, expected="utf-8", advice="first type: export PYTHONUTF8=1")


@dataclass(frozen=True)
class Command:
    """One command: ``run`` gets the parsed flags and returns the exit code."""

    summary: str  # one line of help
    # A text "module:function" is imported when the command is called.
    add_flags: Callable[[argparse.ArgumentParser], None] | str
    run: Callable[[argparse.Namespace], int] | str
    is_nameless: bool = False  # runs for ``python -m PACKAGE`` without a command; not listed


@dataclass(frozen=True, kw_only=True)
class Program:
    """The commands of one package. ``name``: how a user starts it, such as ``python -m slurm``."""

    name: str
    description: str
    commands: Mapping[str, Command]
    epilog: str = "COMMAND --help shows its flags."
    # Flags whose value may begin with a dash, as in ``--sbatch_args --no-requeue``.
    dashed_values: Container[str] = ()

    def run(self, words: Sequence[str], *, name: str | None = None) -> int:
        """Run the command that ``words`` name and return its exit code. ``name``: how it was called."""
        guard_streams()
        before = StopSignals.now()
        try:
            try:
                return self._run(words, name=name)
            finally:
                # A signal that comes now would not find the command any more.
                ignore_stop_signals()
        except Stopped as error:
            say(f"error: {error}")
            return error.exit_code
        except RuntimeError as error:
            # A Stopped inside of a library that takes a lock makes it release a lock that it does not hold.
            stopped = error.__context__
            if not isinstance(stopped, Stopped):
                raise
            say(f"error: {stopped}")
            return stopped.exit_code
        finally:
            before.restore()

    def _run(self, words: Sequence[str], *, name: str | None) -> int:
        try:
            check_names_are_utf8()
            raise_on_stop_signals()
            args = self.parse(words, name=name)
            with given.flags_are(vars(args)):
                code = _resolved(self.commands[args.command].run)(args)
            sys.stdout.flush()
            return int(code)
        except ShardprepError as error:
            message = str(error)
            code = error.exit_code
        except ModuleNotFoundError as error:
            missing = missing_library(error, "this command")
            if missing is None:
                raise
            message = missing
            code = UsageError.exit_code
        except MemoryError as error:
            message = f"out of memory ({error or 'the system gives no more'}); finished work is not lost"
            code = ReadWriteError.exit_code
        except OSError as error:  # not handled by any stage
            path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            todo = "finished work is not lost: fix the cause, and run this again"
            message = f"{path}{error.strerror or error}, at {where}; {todo}"
            code = ReadWriteError.exit_code
        if message:
            say(f"error: {message}")
        return int(code)

    def parse(self, words: Sequence[str], *, name: str | None = None) -> argparse.Namespace:
        """Parse the words: flags, and ``command``. Raises UsageError, and SystemExit for wrong flags."""
        if any(word in ("--version", "-V") for word in words[:2]):
            print_lines(f"shardprep {__version__}")
            raise SystemExit(0)
        with_nul = next((each for each in words if "\0" in each), None)
        if with_nul:
            raise UsageError(f"{with_nul!r} contains a NUL, which paths and names cannot; leave it out")
        name = name or self.name
        words = self._underscored(words)
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        listed = {key: each.summary for key, each in self.commands.items() if not each.is_nameless}
        if not words or words[0] in ("-h", "--help"):
            show_commands(name, self.description, listed, self.epilog, is_asked_for=bool(words))
        command = words[0]
        if command not in self.commands:
            raise UsageError(unknown_command(command, list(listed)))
        parser = self.parser_of(command, name=name)
        typed = _with_folder_first(parser, words[1:])
        parser.hint = _hint_about_flags(parser, command, typed)
        args, unknown = parser.parse_known_args(typed)
        if unknown:
            first = unknown[0].partition("=")[0]
            parser.hint = parser.hint.removeprefix(f"{first}: ") or _hint_about_words(parser, command, first)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.command = command
        return args

    def parser_of(self, word: str, *, name: str) -> _Parser:
        """Return the parser of one command, with all its flags."""
        command = self.commands[word]
        prog = name if command.is_nameless and name == self.name else f"{name} {word}"
        parser = _Parser(prog=prog, description=f"{command.summary[:1].upper()}{command.summary[1:]}.")
        _resolved(command.add_flags)(parser)
        # The help of each flag ends with its default. The usage names only required arguments.
        words = ["%(prog)s"]
        for action in parser._actions:  # noqa: SLF001 - argparse has no other list
            value = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                if action.nargs == "+":
                    value = f"{value} ..."
                elif action.nargs in ("*", "?"):
                    value = f"[{value}]"
                words.append(value)
                continue
            if action.required:
                words.append(f"{action.option_strings[0]} {value}")
            has_value = action.nargs != 0 or action.default is False  # False is the default of a switch
            is_complete = action.help in (None, argparse.SUPPRESS) or "default" in str(action.help)
            if has_value and not is_complete and action.default not in (None, [], argparse.SUPPRESS):
                action.help = f"{action.help} (default: {shown_default(action.default)})"
        parser.usage = " ".join([*words, "[flags]"])
        return parser

    def _underscored(self, words: Sequence[str]) -> list[str]:
        """Spell names of flags with underscores, and join values that begin with a dash to their flags."""
        spelled: list[str] = []
        for word in words:
            if spelled and spelled[-1] in self.dashed_values:
                spelled[-1] += f"={word}"
            elif re.match(r"--[a-z]", word):
                flag, equals, value = word.partition("=")
                name = re.sub("^no_", "no-", flag[2:].replace("-", "_"))
                spelled.append(f"--{name}{equals}{value}")
            else:
                spelled.append(word)
        return spelled


def show_commands(
    name: str, description: str, commands: Mapping[str, str], end: str, *, is_asked_for: bool
) -> NoReturn:
    """Print the list of commands and exit: with 0 if it was asked for, else with 2."""
    lines = [f"usage: {name} COMMAND [flags]", "", description, "", "commands:"]
    lines += [f"  {word:<17}{summary}" for word, summary in commands.items()]
    lines += ["", *textwrap.wrap(end, 79)]
    if is_asked_for:
        print_lines(*lines)
        raise SystemExit(0)
    for line in lines:
        say(line)
    raise SystemExit(UsageError.exit_code)


_PATH_TYPES = (Path, real_path)  # types of flags


class _Formatter(argparse.HelpFormatter):
    """Does not break lines at hyphens, which would split flags."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Prints help in 80 columns, fewer on a narrow terminal, and three lines for a wrong flag."""

    def __init__(self, **settings: Any) -> None:
        # No abbreviations: --input is a flag of peek, not short for plan's --input_dir.
        width = 79
        if sys.stdout.isatty():
            width = min(width, shutil.get_terminal_size().columns - 1)
        formatter = functools.partial(_Formatter, max_help_position=28, width=width)
        super().__init__(**settings, formatter_class=formatter, allow_abbrev=False)

        self.hint = ""  # is added to an error

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type in _PATH_TYPES:
            name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
            check_local_path(arg_string, name)
        return super()._get_value(action, arg_string)  # argparse has no other door

    def error(self, message: str) -> NoReturn:
        if self.hint:
            message += f"; {self.hint}"
        say(f"error: {message}")
        say(self.format_usage().rstrip("\n"))
        say(f"all flags: {self.prog} --help")
        self.exit(2)


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [*parser._option_string_actions]  # noqa: SLF001 - argparse has no other list


def _positionals_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [each for each in parser._actions if not each.option_strings]  # noqa: SLF001 - as above


def _with_folder_first(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words with DATA as the first one if it was given as ``--output_dir DATA``."""
    first = [each.metavar for each in _positionals_of(parser)][:1]
    if first != ["DATA"] or "--output_dir" in _flags_of(parser):
        return list(words)
    for number, word in enumerate(words):
        if word.startswith("--output_dir="):
            return [word.partition("=")[2], *words[:number], *words[number + 1 :]]
        if word == "--output_dir" and number + 1 < len(words):
            return [words[number + 1], *words[:number], *words[number + 2 :]]
    return list(words)


def _hint_about_flags(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> str:
    """Return a hint about the first flag that a command does not have, or ""."""
    flags = _flags_of(parser)
    for word in words:
        flag = word.partition("=")[0]
        if flag in flags or not re.match("-+[A-Za-z]", flag):
            continue
        meaning = meaning_of_flag(flag, command, flags)
        if meaning:
            return f"{flag}: {meaning}"
        near = _nearest(flag, [each for each in flags if each.startswith("--")], cutoff=_NEAR_FLAG)
        return f"did you mean {near}?" if near else ""
    return ""


def _hint_about_words(parser: argparse.ArgumentParser, command: str, word: str) -> str:
    """Return a hint about a word that a command does not take, or ""."""
    flags = _flags_of(parser)
    meaning = meaning_of_flag(word, command, flags)
    if meaning:
        return meaning
    folders = [each for each in flags if each in ("--input_dir", "--output_dir")]
    if folders and not word.startswith("-") and not _positionals_of(parser):
        return f"{command} takes folders by their flags: {', '.join(folders)}"
    return ""


_EXTRAS = {
    "'shardprep[loader]'": ("braceexpand", "torch", "webdataset"),
    "'shardprep[slurm]'": ("submitit",),
    "'shardprep[columns]'": ("isal", "pyarrow", "backports.zstd"),
    "'shardprep[warc]'": ("fastwarc",),
}


def needs(what: str, library: str) -> str:
    """Build the message for a missing library that ``what`` needs."""
    package = next((extra for extra, libraries in _EXTRAS.items() if library in libraries), library)
    return f"{what} needs {library}, which is not installed; run: pip install {package}"


def missing_library(error: ModuleNotFoundError, what: str) -> str | None:
    """Build the message for a missing library, or return None if one of our own modules is missing."""
    missing = str(error.name).partition(".")[0]
    if importlib.util.find_spec(missing) is not None:  # the package exists, a module of it does not
        return None
    return needs(what, missing)


_NEAR_FLAG = 0.8  # of letters; with less, --force would be near --doc


def _nearest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str:
    import difflib  # takes 1 ms, and is rarely needed

    return next(iter(difflib.get_close_matches(word, known, 1, cutoff)), "")


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Build the message for an unknown command, with the nearest one and a list of all."""
    meant = ""
    if os.path.isdir(word):  # noqa: PTH112 - Path.is_dir() would raise
        meant = "it is a folder, so type a command before it, or --output_dir; "
    elif meaning := meaning_of_command(word.replace("-", "_")):
        meant = f"use {meaning}; "
    elif close := _nearest(word, commands):
        meant = f"did you mean {close}? "
    return f"there is no command {word[:60]!r}; {meant}commands: {', '.join(commands)}"


def _resolved(given: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # by its name
