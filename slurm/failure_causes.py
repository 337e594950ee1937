"""Why an attempt did not make a shard, and what to do about it.

The attempt's record says why. Slurm is believed where the record has no end, or where Slurm alone can know:
memory, the time limit, a node, a preemption. A log is read for its last lines, and only to show them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from preprocess.attempts import Attempt
from shardprep.errors import ShardprepError
from shardprep.regular_files import open_regular
from slurm.slurm_queries import LOG_NOT_OPENED, TaskAttempt

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
CANCELLED = "CANCELLED"
BAD_INPUT = "bad input (65)"
REFUSED = "refused: plan, options or tokenizer differ (78)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
_NO_INPUT, _CANNOT_WRITE, _READ_WRITE = (
    "no such input or shard (66)",
    "cannot write the output (73)",
    "read or write error (74)",
)
_AGAIN = "retry sends it again"

# Cause -> what to do. Only people can help where retry alone would fail the same way.
REMEDIES = {
    OUT_OF_MEMORY: "retry asks for twice the memory",
    TIMEOUT: "retry asks for twice the time",
    NODE_FAIL: f"{_AGAIN}, and leaves out a node that failed twice",
    CANCELLED: _AGAIN,
    "PREEMPTED": _AGAIN,
    "DEADLINE": _AGAIN,
    STOPPED: _AGAIN,
    STEP_STOPPED: _AGAIN,
    VANISHED: _AGAIN,
    NO_MANIFEST: _AGAIN,
    _READ_WRITE: f"{_AGAIN}; where it fails again, look at the file system that its message names",
    SRUN_FAILED: f"{_AGAIN}; where it fails again, look at --srun_args and at srun's words in the log",
    BAD_INPUT: "retry does not send it again: correct the input and plan anew, or accept what is left out: "
    "--worker_args '--max_bad_fraction 0.05'",
    REFUSED: "bring back what its message names, or plan into a new folder; then retry",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    _NO_INPUT: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _CANNOT_WRITE: "look at permissions, quota and free space of the folder (df, lfs quota); then retry",
    NO_LOG: "look at the folder of its log (permissions, quota); then retry",
}
NEEDS_PEOPLE = (BAD_INPUT, REFUSED, SETUP, SETUP_ENDED, _NO_INPUT, _CANNOT_WRITE, NO_LOG)

_EXIT_CAUSES = {2: SETUP, 65: BAD_INPUT, 66: _NO_INPUT, 73: _CANNOT_WRITE, 74: _READ_WRITE, 75: STOPPED}
_EXIT_CAUSES |= {78: REFUSED}
_STATES = {
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "TIMEOUT": TIMEOUT,
    "NODE_FAIL": NODE_FAIL,
    "BOOT_FAIL": NODE_FAIL,
    "PREEMPTED": "PREEMPTED",
    "DEADLINE": "DEADLINE",
}
_STOPPED_BY = {
    "time limit": TIMEOUT,
    "node failure": NODE_FAIL,
    "preemption": "PREEMPTED",
    "cancel": CANCELLED,
    "cancelled step": STEP_STOPPED,
}
_WARNED_S = 900  # before its time limit a task is warned by USR1, where sbatch --signal asked for it
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """What to do about a cause, in a sentence without an end."""
    if cause.startswith("killed by signal 9"):
        return f"{_AGAIN}; it is often memory: retry --mem_gb"
    return REMEDIES.get(cause, f"look at its log; {_AGAIN}")


def cause_of(attempt: Attempt, task: TaskAttempt | None, shard_id: int, *, is_warned: bool = False) -> str:
    """Why an attempt that has ended, or was killed, did not make ``shard_id``.

    ``task``: what Slurm says of it. ``is_warned``: its request has sbatch's --signal, so USR1 is of a time
    limit.
    """
    failure = attempt.failures.get(shard_id)
    if task is not None and task.state in _STATES and (failure is None or task.state == "OUT_OF_MEMORY"):
        return _STATES[task.state]
    is_killed = failure is None or "killed by signal" in failure.reason
    if attempt.is_out_of_memory and is_killed:
        return OUT_OF_MEMORY
    if failure is not None:
        killed = re.search(r"was killed by signal (\d+)", failure.reason)
        return f"killed by signal {killed[1]}" if killed else exit_cause(failure.exit_code)
    if attempt.ended is None:
        return CANCELLED if task is not None and task.state == "CANCELLED" else VANISHED
    if attempt.stopped_by:
        return _STOPPED_BY.get(attempt.stopped_by, STOPPED)
    if attempt.killed_by:
        return f"killed by signal {attempt.killed_by}"
    is_late = attempt.left_s is not None and attempt.left_s <= _WARNED_S
    if attempt.signal == "USR1" and (is_warned or is_late):
        return TIMEOUT
    if attempt.stage == "set-up" and attempt.exit_code != 75:
        return SETUP_ENDED if attempt.exit_code != 2 else SETUP
    if attempt.stage == "start":
        return SRUN_FAILED
    return exit_cause(attempt.exit_code or 0)


def cause_of_task(task: TaskAttempt) -> str | None:
    """Why a task without a record ended; None where it was cancelled, or Slurm does not say."""
    if task.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    if task.state in _STATES:
        return _STATES[task.state]
    if task.state == "FAILED":
        return exit_cause(task.exit_code)
    return NO_MANIFEST if task.state == "COMPLETED" else None


def exit_cause(code: int) -> str:
    """What an exit code says."""
    if not code:
        return NO_MANIFEST
    return f"killed by signal {code - 128}" if code > 128 else _EXIT_CAUSES.get(code, f"exit code {code}")


def log_tail(path: Path) -> str:
    """The last 16 KiB of what a log's last attempt wrote; empty where there is no such file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return _BEGINS.split(file.read().decode("utf-8", "replace"))[-1]
    except (OSError, ShardprepError):
        return ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """The last lines of a log that say something to a person; srun's only where srun itself failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    others = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (others if others and "srun failed" not in log else lines)[-number:]
