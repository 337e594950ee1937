"""Which failed shards are not tried again."""

from __future__ import annotations

from collections.abc import Sequence

from slurm.attempts import Attempt, Shard
from slurm.causes import BAD_INPUT
from slurm.own import own_attempts
from slurm.request import JobRequest

_MAX_ATTEMPTS = 3  # that fail in the same way


def why_not_retried(shard: Shard, changes: dict[str, object], *, is_named: bool = False) -> str | None:
    """Return why a shard is not tried again, or None if it is.

    A shard of bad input is tried again only if ``changes`` have other worker_args, and one that failed three
    times in the same way only if ``changes`` differ from its request or a person named it.
    """
    attempts = own_attempts(shard)
    if shard.state != "failed" or not attempts:
        return None
    before = attempts[-1].request or JobRequest()
    changed = {name for name, value in changes.items() if getattr(before, name) != value}
    if attempts[-1].cause(shard.shard_id) == BAD_INPUT and "worker_args" not in changed:
        return "the same input fails in the same way"
    num_same = _num_same_failures(attempts, shard.shard_id)
    if num_same >= _MAX_ATTEMPTS and not changed and not is_named:
        return f"failed in the same way {num_same} times"
    return None


def _num_same_failures(attempts: Sequence[Attempt], shard_id: int) -> int:
    """Return how often a shard failed as it did last, since a person typed ``submit`` or ``retry``."""
    cause = attempts[-1].cause(shard_id)
    num_same = 0
    typed_job = ""
    for attempt in reversed(attempts):
        job_id = attempt.task.partition("_")[0]
        if attempt.cause(shard_id) != cause or typed_job not in ("", job_id):
            break
        num_same += 1
        if attempt.is_typed:
            typed_job = job_id
    return num_same
