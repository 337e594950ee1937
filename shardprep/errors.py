"""What can go wrong: one class per kind of violation, each with the exit code that it ends a command with.

Catch ``ShardprepError`` for all of them; ``Stopped`` is no error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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
    """Base of every error a user can cause or must act on."""

    exit_code = 74


class UsageError(ShardprepError):
    """A flag, or a combination of flags, that cannot work."""

    exit_code = 2


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

    exit_code = 74


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


class LustreUsageError(LustreError, UsageError):
    """A value that no Lustre could accept; nothing was run."""

    exit_code = 2


_MARK = "shardprep-failure "


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A shard that was not made."""

    shard_id: int
    exit_code: int  # one of the above; 128 + N where signal N killed the process
    reason: str


def failure_line(shard_id: int, exit_code: int, message: str) -> str:
    """Return a line of a task's log, in ASCII and without its line end, that ``slurm status`` reads.

    ``run`` makes several shards in one process, whose exit code cannot say which of them failed, nor why.
    """
    return _MARK + json.dumps(asdict(Failure(shard_id=shard_id, exit_code=exit_code, reason=message)))


def parse_failure_line(line: str) -> Failure | None:
    """What ``failure_line`` wrote; None for any other line, also for one that was cut short."""
    if not line.startswith(_MARK):
        return None
    try:
        data = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    match data:
        case {"shard_id": int(shard_id), "exit_code": int(exit_code), "reason": str(reason)}:
            return Failure(shard_id=shard_id, exit_code=exit_code, reason=reason)
    return None
