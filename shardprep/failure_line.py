"""One line of a task's log for each shard that failed, for ``slurm status`` to read.

``run`` makes several shards in one process, so the exit code of the process cannot say which of them
failed, nor why. It writes this line under its message for people:

    shardprep-failure {"shard_id": 17, "exit_code": 65, "reason": "..."}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MARK = "shardprep-failure "


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A shard that was not made."""

    shard_id: int
    exit_code: int  # of shardprep.errors; 128 + N where signal N killed the process
    reason: str


def failure_line(shard_id: int, exit_code: int, message: str) -> str:
    """The line, without a line end at its end. It is ASCII, and line ends in ``message`` are escaped."""
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
