"""Why an attempt failed, and what to do about it.

The record of an attempt says how it ended. Slurm's reason counts if the record has none, or if only Slurm can
know it: memory, time limit, node failure, preemption. The log keeps it after squeue has forgotten the job.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardprep.format.attempts import AttemptRecord
from slurm.commands import seconds_of
from slurm.log_ends import log_tail
from slurm.squeue import LOG_NOT_OPENED, Job

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
PREEMPTED = "PREEMPTED"
CANCELLED = "CANCELLED"
COMPLETED = "COMPLETED"
REQUEUED = "requeued (scontrol requeue)"
BAD_INPUT = "bad input (65)"
SETUP = "set-up or usage (2)"
SETUP_ENDED = "the set-up file ended the task"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a record (killed, or its node failed)"
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STOPPED = "stopped by a signal (75)"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
_CAUSE_OF_CODE = {
    0: NO_MANIFEST,
    2: SETUP,
    65: BAD_INPUT,
    66: "no such input or shard (66)",
    73: "cannot write the output (73)",
    74: "read or write error (74)",
    75: STOPPED,
    78: "refused: plan, options or tokenizer differ (78)",
}
# States of Slurm that say more than the worker or the script can know.
CAUSE_OF_STATE = {name: name for name in (OUT_OF_MEMORY, TIMEOUT, NODE_FAIL, PREEMPTED, "DEADLINE")}
CAUSE_OF_STATE["BOOT_FAIL"] = NODE_FAIL
# Slurm's lines in a task's log about its end -> the cause. They can be read after squeue forgets the job.
_CAUSES_IN_LOG = (
    (r"oom[-_]kill|: Out Of Memory|exceeded (job )?memory limit", OUT_OF_MEMORY),
    ("DUE TO TIME LIMIT", TIMEOUT),
    ("DUE TO NODE FAILURE|srun: error: Node failure", NODE_FAIL),
    ("DUE TO PREEMPTION", PREEMPTED),
    ("DUE TO JOB REQUEUE", REQUEUED),
    (r"\*\*\* JOB .* CANCELLED AT", CANCELLED),
    (r"\*\*\* STEP .* CANCELLED AT", STEP_STOPPED),
    ("srun: error: Unable to (confirm allocation|create step)", SRUN_FAILED),  # srun exits with 1
    # A container that did nothing.
    (r"^shardprep: node \S+: shards? \S+ ended with exit code 0$", NO_MANIFEST),
)
_RESENT = "retry sends it again"
# Cause -> what to do. A person must help first if retry alone would fail in the same way.
_REMEDIES = {
    **dict.fromkeys(
        (CANCELLED, PREEMPTED, REQUEUED, "DEADLINE", STOPPED, STEP_STOPPED, VANISHED, NO_MANIFEST), _RESENT
    ),
    OUT_OF_MEMORY: "retry asks for twice the memory, or starts fewer processes where a node has no more",
    TIMEOUT: "retry asks for twice the time, as far as the site's limits allow",
    NODE_FAIL: f"{_RESENT}; to leave out a node: export SBATCH_EXCLUDE=NODE",
    SRUN_FAILED: f"{_RESENT}; if it fails again, look at --srun_args and at srun's messages in the log",
    SETUP: "correct what its message names (--setup, --worker_args); then retry",
    SETUP_ENDED: "correct the file of --setup (SHARDPREP_SETUP), which must not exit; then retry",
    BAD_INPUT: "retry does not send it again: correct the input and plan again, or accept the loss",
    _CAUSE_OF_CODE[66]: "bring the input back, or name its new folder: --worker_args '--input_dir RAW'",
    _CAUSE_OF_CODE[73]: "check permissions, quota and free space of the folder (df, lfs quota); then retry",
    _CAUSE_OF_CODE[74]: f"{_RESENT}; if it fails again, check the file system that its message names",
    _CAUSE_OF_CODE[78]: "bring back what its message names, or plan into a new folder; then retry",
    "killed by signal 9": f"{_RESENT}; it is often memory: retry --mem_gb",
    NO_LOG: "check permissions and quota of the folder of its log; then retry",
}
_WARNED_S = 900  # a USR1 in the last 15 min before the time limit is the warning of sbatch --signal


def remedy_of(cause: str) -> str:
    """Return what to do about a cause, as a clause without a full stop."""
    return _REMEDIES.get(cause, f"look at its log; {_RESENT}")


def cause_of_record(record: AttemptRecord, shard_id: int) -> str:
    """Return why an attempt that ended or was killed did not make a shard."""
    failure = record.failures.get(shard_id)
    if failure:
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
    """Return why a task without a record ended, or None if it was cancelled or Slurm does not know."""
    if job.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    if job.state in ("FAILED", "COMPLETED"):
        return cause_of_exit(job.exit_code)
    return CAUSE_OF_STATE.get(job.state)


def cause_of_exit(code: int) -> str:
    """Return the cause that an exit code stands for."""
    if code > 128:
        return f"killed by signal {code - 128}"
    return _CAUSE_OF_CODE.get(code, f"exit code {code}")


def is_unexplained(record: AttemptRecord) -> bool:
    """Return whether a task's record leaves open why it ended, because it was stopped or killed.

    A container or a wrapper of Python may exit with any code when its process is killed. So only shardprep's
    own codes except 75 explain an end.
    """
    if not record.job_id or record.stopped_by:
        return False
    if any("was killed by signal" in each.reason for each in record.failures.values()):
        return True
    says_why = record.ended is not None and record.exit_code in (0, 2, 65, 66, 73, 74, 78)
    return not record.failures and not says_why


def cause_in_log(record: AttemptRecord, num_later: int) -> str:
    """Return the cause that Slurm wrote into an attempt's log, or "".

    Later starts of the task, ``num_later`` of them, append to the same log, unless prep_array.sh moved it.
    """
    path = Path(record.log)
    moved = path.with_name(f"{path.stem}.before-restart-{record.num_restarts + 1}.log")
    log = log_tail(moved) or log_tail(path, num_later)
    for words, cause in _CAUSES_IN_LOG:
        if re.search(words, log, re.MULTILINE):
            return cause
    return ""
