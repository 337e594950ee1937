"""Why an attempt did not make a shard, by what is left of it, and what to do about that.

The cause stands in the attempt's record: the worker's own word of a shard, what Slurm did to the task, or
how the script ended. Who looks first writes into the record what squeue (for some minutes) or the log knows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardprep.errors import ShardprepError
from shardprep.files import open_regular
from shardprep.format.jobs import AttemptRecord
from slurm.commands import seconds_of
from slurm.queue import LOG_NOT_OPENED, Job

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
PREEMPTED = "PREEMPTED"
CANCELLED = "CANCELLED"
REQUEUED = "requeued (scontrol requeue)"
BAD_INPUT = "bad input (65)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"

_OF_EXIT_CODE = {
    0: NO_MANIFEST,
    2: SETUP,
    65: BAD_INPUT,
    66: "no such input or shard (66)",
    73: "cannot write the output (73)",
    74: "read or write error (74)",
    75: STOPPED,
    78: "refused: plan, options or tokenizer differ (78)",
}
# States of Slurm that tell more than the worker or the script can know.
OF_STATE = {name: name for name in (OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, PREEMPTED, "DEADLINE")}
OF_STATE["BOOT_FAIL"] = NODE_FAIL
# What Slurm writes into a task's log about its end -> the cause. Slurm itself forgets it sooner.
_OF_LOG = (
    (r"oom[-_]kill|: Out Of Memory|exceeded (job )?memory limit", OUT_OF_MEMORY),
    ("DUE TO TIME LIMIT", TIMEOUT),
    ("DUE TO NODE FAILURE|srun: error: Node failure", NODE_FAIL),
    ("DUE TO PREEMPTION", PREEMPTED),
    ("DUE TO JOB REQUEUE", REQUEUED),
    (r"\*\*\* JOB .* CANCELLED AT", CANCELLED),
    (r"\*\*\* STEP .* CANCELLED AT", STEP_STOPPED),
    ("srun: error: Unable to (confirm allocation|create step)", SRUN_FAILED),  # with exit code 1
)
_AGAIN = "retry sends it again"
# Cause -> what to do. Only people can help where retry alone would fail the same way.
_REMEDIES = {
    **dict.fromkeys(
        (CANCELLED, PREEMPTED, REQUEUED, "DEADLINE", STOPPED, STEP_STOPPED, VANISHED, NO_MANIFEST), _AGAIN
    ),
    OUT_OF_MEMORY: "retry asks for twice the memory",
    TIMEOUT: "retry asks for twice the time",
    NODE_FAIL: f"{_AGAIN}; to leave out a node: export SBATCH_EXCLUDE=NODE",
    SRUN_FAILED: f"{_AGAIN}; where it fails again, look at --srun_args and at srun's words in the log",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    BAD_INPUT: "retry does not send it again: correct the input and plan anew, or accept what is left out",
    _OF_EXIT_CODE[66]: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _OF_EXIT_CODE[73]: "look at permissions, quota and free space of the folder (df, lfs quota); then retry",
    _OF_EXIT_CODE[74]: f"{_AGAIN}; where it fails again, look at the file system that its message names",
    _OF_EXIT_CODE[78]: "bring back what its message names, or plan into a new folder; then retry",
    NO_LOG: "look at the folder of its log (permissions, quota); then retry",
}
_WARNED_S = 900  # so long before its time limit a USR1 is the warning that sbatch --signal asked for
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """Return what to do about a cause, in a sentence without an end."""
    if cause.startswith("killed by signal 9"):
        return f"{_AGAIN}; it is often memory: retry --mem_gb"
    return _REMEDIES.get(cause, f"look at its log; {_AGAIN}")


def cause_of_record(record: AttemptRecord, shard_id: int) -> str:
    """Return why an attempt that has ended, or was killed, did not make a shard."""
    if failure := record.failures.get(shard_id):
        killed = re.search(r"was killed by signal (\d+)", failure.reason)
        if killed and record.stopped_by == OUT_OF_MEMORY:
            return OUT_OF_MEMORY
        return f"killed by signal {killed[1]}" if killed else cause_of_exit(failure.exit_code)
    if record.stopped_by:
        return record.stopped_by
    if record.ended is None:
        return VANISHED
    if record.killed_by:
        return f"killed by signal {record.killed_by}"
    limit_s = seconds_of(record.time_limit)
    left_s = record.began + (limit_s or 0) - (record.stopped or 0)
    if record.signal == "USR1" and record.stopped and limit_s and left_s <= _WARNED_S:
        return TIMEOUT
    if record.stage == "set-up" and record.exit_code not in (2, 75):
        return SETUP_ENDED
    if record.stage == "start":
        return SRUN_FAILED
    return cause_of_exit(record.exit_code)


def cause_of_job(job: Job) -> str | None:
    """Return why a task without a record ended, or None if it was cancelled or Slurm does not say."""
    if job.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    if job.state in ("FAILED", "COMPLETED"):
        return cause_of_exit(job.exit_code)
    return OF_STATE.get(job.state)


def cause_of_exit(code: int) -> str:
    """Return what an exit code says."""
    if code > 128:
        return f"killed by signal {code - 128}"
    return _OF_EXIT_CODE.get(code, f"exit code {code}")


def is_unexplained(record: AttemptRecord) -> bool:
    """Return whether the record of a task does not say why it ended: it was stopped or killed.

    A wrapper of Python, or a container, whose process is killed may end with any code: only one of
    shardprep's own, but for 75, says why.
    """
    if not record.job_id or record.stopped_by:
        return False
    if any("was killed by signal" in each.reason for each in record.failures.values()):
        return True
    says_why = record.ended is not None and record.exit_code in (0, 2, 65, 66, 73, 74, 78)
    return not record.failures and not says_why


def cause_in_log(record: AttemptRecord, num_later: int) -> str:
    """Return what Slurm did to an attempt by its log, or "". ``num_later``: how many starts came after it.

    A log goes on when Slurm starts a task again, or prep_array.sh moves it away.
    """
    path = Path(record.log)
    moved = path.with_name(f"{path.stem}.before-restart-{record.num_restarts + 1}.log")
    log = log_tail(moved) or log_tail(path, num_later)
    return next((cause for words, cause in _OF_LOG if re.search(words, log)), "")


def log_tail(path: Path, num_later: int = 0) -> str:
    """Return what an attempt wrote to a log, or "". ``num_later``: how many starts came after it."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            parts = _BEGINS.split(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, ShardprepError):  # ValueError: a NUL in its name
        return ""
    return parts[-1 - num_later] if num_later < len(parts) else ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """Return the last lines of a log that tell a person something. Those of srun count only if it failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    others = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (others if others and "srun failed" not in log else lines)[-number:]
