"""Errors: one class per kind, each with the exit code of a command that it ends.

Catch ``ShardprepError`` to catch all of them. ``Stopped`` is not an error.
"""

from __future__ import annotations

import os
import re
import shlex

EXIT_CODES = {  # below 128: Slurm mangles others
    0: "done, or done already",
    2: "usage: an unknown flag, or flags that do not go together",
    65: "bad input data over the limit, or a broken shard",
    66: "no such input, model or shard",
    73: "cannot write the output",
    74: "read or write error, a full disk",
    75: "stopped by a signal: run it again",
    78: "refused: plan, options, tokenizer or input differ",
}


# C0 except the line feed, DEL and C1; marks that change the direction of text; separators of lines and
# paragraphs; lone surrogates, which names of files may contain. Joiners and other zero-width marks are not
# escaped: scripts and emoji need them, and terminals do not act on them.
_CONTROLS = "\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
CONTROL_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_CONTROL_IN_LINE = re.compile(f"[\n{_CONTROLS}]")


def printable(line: str) -> str:
    r"""Replace each control character of a line by its Python escape: ``\x1b``, ``\n``, ``\u202e``."""
    return _CONTROL_IN_LINE.sub(escape, line)


def escape(match: re.Match[str]) -> str:
    """Return the Python escape of the character that was found."""
    return match[0].encode("unicode_escape").decode("ascii")


class ShardprepError(Exception):
    """Base of every error a user can cause or must act on.

    Args:
        message: what is wrong, as a whole sentence (default: built from the fields).
        path: the file or folder at fault.
        found: what was found. A flag or an argument is shown as given: ``--seq_len 7``, ``seq_len=7``.
        expected: what was expected instead.
        advice: what to do, in words. Unless the message contains it, it is appended.
        remedy: the command, flag or argument to type. Unless the message contains it, it is appended:
            ``str(error)`` is ``"...; run: shardprep verify DATA"``.

    Names and texts from files may be in the message, so ``str(error)`` has control characters as escapes.
    Programs can read the fields, which are as they were found. Those that do not apply are None. Pickling
    keeps them.
    """

    exit_code = 74

    def __init__(
        self,
        message: str = "",
        *,
        path: str | os.PathLike[str] | None = None,
        found: object = None,
        expected: object = None,
        advice: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        self.advice = advice
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        if not message and self.found is not None:
            message = self.found if self.path is None else f"{self.path}: {self.found}"
            if self.expected is not None:
                message += f", expected {self.expected}"
        if self.advice is not None and self.advice not in message:
            message = f"{message}; {self.advice}" if message else self.advice
        if self.remedy is not None and self.remedy not in message:
            message = f"{message}; run: {self.remedy}"
        return printable(message)

    def advise(self, advice: str) -> None:
        """Add advice, after that which the error has."""
        self.advice = advice if self.advice is None else f"{self.advice}; {advice}"


def quoted(path: str | os.PathLike[str]) -> str:
    """Return the absolute path, quoted for a shell."""
    return shell_word(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def shell_word(text: str) -> str:
    """Return a text as a word of a shell that can be pasted, with control characters as escapes."""
    if not _CONTROL_IN_LINE.search(text):
        return shlex.quote(text)
    escaped = re.sub(r"[\\']", r"\\\g<0>", text)
    return f"$'{_CONTROL_IN_LINE.sub(_bytes_of, escaped)}'"


def _bytes_of(match: re.Match[str]) -> str:
    """Return the bytes of a character as escapes of a shell."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(match[0]))


class UsageError(ShardprepError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = 2

    @classmethod
    def of_value(cls, name: str, value: object, expected: str) -> UsageError:
        """Build the error for a wrong value of a flag (``--seq_len``) or an argument (``seq_len``)."""
        found = f"{name} {value}" if name.startswith("--") else f"{name}={value!r}"
        return cls(f"{name} is {value!r}, expected {expected}", found=found, expected=expected)


class BadInput(ShardprepError):
    """Input data that cannot be used: more bad documents than allowed, an impossible size."""

    exit_code = 65


class NotFound(ShardprepError):
    """No such input, model, data set or shard."""

    exit_code = 66


class CannotWrite(ShardprepError):
    """The output folder or file cannot be created."""

    exit_code = 73


class ReadWriteError(ShardprepError):
    """A read or a write failed."""


class Stopped(BaseException):
    """A signal ended the work before it was done. Running the command again continues it.

    It is not an Exception: it can be raised anywhere, and an ``except Exception`` around a call into a
    library must not mistake it for an error of that library.
    """

    exit_code = 75


class Refused(ShardprepError):
    """Plan, options, tokenizer or version differ from what is on disk, or a model does not fit the data."""

    exit_code = 78


class UnknownVersion(Refused):
    """A file has a format version that this shardprep does not read."""


class OtherPlan(Refused):
    """A file belongs to another plan."""


class OtherTokenizer(Refused):
    """Data or a model belongs to another tokenizer."""


class MissingShard(NotFound):
    """A shard has no manifest, no tar or no idx."""


class BrokenShard(BadInput):
    """A file is cut short, altered, or not what its manifest says."""


class UnknownMember(BrokenShard):
    """A tar member that this version does not know; skipping it could change the training."""


class LustreError(ShardprepError):
    """``lfs`` refused, failed, did not answer, or did not do what it was told."""

    exit_code = 73
