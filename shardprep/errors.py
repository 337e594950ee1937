"""What can go wrong: one class per kind of violation, each with the exit code that it ends a command with.

Catch ``ShardprepError`` for all of them; ``Stopped`` is no error.
"""

from __future__ import annotations

import os
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


class ShardprepError(Exception):
    """Base of every error a user can cause or must act on.

    Args:
        message: what is wrong, as a whole sentence; without one it is made of the fields.
        path: the file or folder at fault.
        found: what was found, a flag or an argument as it was given: ``--seq_len 7``, ``seq_len=7``.
        expected: what was expected in its place.
        remedy: the command, flag or argument to type, exactly as the message says it. A command that
            ``message`` does not hold ends it: ``str(error)`` is ``"...; run: shardprep verify DATA"``.

    A program that catches the error reads the fields; they are None where there is nothing to say. They go
    with the error into other processes.
    """

    exit_code = 74

    def __init__(
        self,
        message: str = "",
        *,
        path: str | os.PathLike[str] | None = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        if not message and self.found is not None:
            message = self.found if self.path is None else f"{self.path}: {self.found}"
            if self.expected is not None:
                message += f", expected {self.expected}"
        if self.remedy is None or self.remedy in message:
            return message
        return f"{message}; run: {self.remedy}"

    def advise(self, advice: str) -> None:
        """Add to the message what to do. The fields stay."""
        self.args = (f"{self}; {advice}",)


def quoted(path: str | os.PathLike[str]) -> str:
    """Return a path as a command to type needs it: quoted, and the same from any folder."""
    return shlex.quote(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


class UsageError(ShardprepError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = 2

    @classmethod
    def of_value(cls, name: str, value: object, expected: str) -> UsageError:
        """Return the error of a flag (``--seq_len``) or an argument (``seq_len``) that has a wrong value."""
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
    """A read or a write failed on the way."""


class Stopped(BaseException):
    """A signal ended the work before it was done; running it again goes on.

    No ShardprepError, nor even an Exception: it can be raised anywhere, and an ``except Exception``
    around a library's call must not take it for that library's failure and go on.
    """

    exit_code = 75


class Refused(ShardprepError):
    """Plan, options, tokenizer or version differ from what is on disk; a model does not suit the data."""

    exit_code = 78


class UnknownVersion(Refused):
    """Written by a version of the format that this one does not know."""


class OtherPlan(Refused):
    """Belongs to another plan than the one at hand."""


class OtherTokenizer(Refused):
    """Made with another tokenizer than the one at hand."""


class MissingShard(NotFound):
    """A shard has no manifest, no tar or no idx."""


class BrokenShard(BadInput):
    """A shard's file is cut short, altered, or not what its manifest says."""


class UnknownMember(BrokenShard):
    """A tar member that this version does not know; skipping it could change the training."""


class LustreError(ShardprepError):
    """``lfs`` refused, failed, did not answer, or did something else than asked."""

    exit_code = 73
