"""Why a task did not make its shard, as Slurm's state, its exit code and its log say."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path

from shardprep.errors import ShardprepError, parse_failure_line
from shardprep.files import open_regular
from shardprep.format.names import manifest_path
from shardprep.format.shard_making import read_making
from slurm.job_records import JOBS_FOLDER
from slurm.script import LOG_FOLDER
from slurm.slurm_queries import LOG_NOT_OPENED, TaskAttempt

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
BAD_INPUT = "bad input (65)"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (node failure?)"
UNKNOWN = "unknown: no log, and Slurm has forgotten it"
HAS_NO_END = (VANISHED, UNKNOWN)  # nothing says that the task has ended at all
NO_LOG = "its log could not be opened"
SRUN_FAILED = "srun failed"
STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"

_EXIT_CAUSES: Mapping[int, str] = {
    2: "set-up or usage (2)",
    65: BAD_INPUT,
    66: "no such input or shard (66)",
    73: "cannot write the output (73)",
    74: "read or write error (74)",
    75: "stopped by a signal (75)",
    78: "refused: plan, options or tokenizer differ (78)",
}
_STATES = {
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "TIMEOUT": TIMEOUT,
    "NODE_FAIL": NODE_FAIL,
    "PREEMPTED": "PREEMPTED",
    "CANCELLED": "CANCELLED",
    "BOOT_FAIL": NODE_FAIL,
    "DEADLINE": "DEADLINE",
    "REQUEUED": "REQUEUED",
}
# What Slurm itself writes into a log, and how prep_array.sh ends one.
_LOG_CAUSES = (
    (re.compile(r"oom.kill|Out Of Memory|exceeded (job )?memory limit", re.IGNORECASE), OUT_OF_MEMORY),
    (re.compile(r"DUE TO TIME LIMIT"), TIMEOUT),
    (re.compile(r"DUE TO NODE FAILURE|^srun: error: Node failure", re.MULTILINE), NODE_FAIL),
    (re.compile(r"DUE TO PREEMPTION"), "PREEMPTED"),
    (re.compile(r"\bJOB \S+ ON .*CANCELLED AT"), "CANCELLED"),
    # The step alone: so begins a preemption with GraceTime, and the job ends of it, FAILED.
    (re.compile(r"\bSTEP \S+ ON .*CANCELLED AT"), STEP_STOPPED),
    (re.compile(r"^shardprep: node \S+: .* did not start: srun failed", re.MULTILINE), SRUN_FAILED),
)
_ASKED_BY_USR1 = re.compile(r"^shardprep: node \S+: USR1, telling", re.MULTILINE)
# Not "srun: error: n1: task 0: Exited with exit code 65", which it says of every failure.
_SRUN_ERROR = re.compile(r"^srun: (fatal: |error: (?!.*\btasks? \d))", re.MULTILINE)
_KILLED = re.compile(r"was killed by signal (\d+)")
_ENDED = re.compile(r"^shardprep: node (\S+): .* ended with exit code (\d+)$", re.MULTILINE)
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)
# Of logs from before ``run`` wrote failure lines; a killed process is found by _KILLED.
_FAILED_IN_PROSE = re.compile(r"^shard (\d{5}) failed \((\d+)\): (?!.*was killed by signal)", re.MULTILINE)
_FOUND_WRONG = re.compile(r"^error: shard (\d{5}): ", re.MULTILINE)
_VERIFY_LOG_BYTES = 16 << 20  # a line for each of 99,999 shards
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")


def cause_of(attempt: TaskAttempt | None, log: str, shard_id: int, sbatch_args: str = "") -> str:
    """Why an attempt that has ended did not make ``shard_id``.

    Slurm's state comes first, then what the log says of this shard, of the job, and of the exit code.
    COMPLETED proves nothing: only a manifest does. CANCELLED is what Slurm also says of a task that it
    preempted; the log knows better. ``sbatch_args``: of the request; who asks Slurm for a signal before the
    time limit gets FAILED where the limit was met.
    """
    state = attempt.state if attempt else ""
    if state in _STATES and state != "CANCELLED":
        return _STATES[state]
    if attempt and attempt.exit_code == LOG_NOT_OPENED:
        return NO_LOG
    found = next((cause for pattern, cause in _LOG_CAUSES if pattern.search(log)), "")
    if state == "CANCELLED":
        return found if found not in ("", STEP_STOPPED) else state
    if found:
        return found
    cause = _cause_of_exit(attempt, log, shard_id)
    if cause == _EXIT_CAUSES[75] and "--signal" in sbatch_args and _ASKED_BY_USR1.search(log):
        return TIMEOUT
    return cause


def _cause_of_exit(attempt: TaskAttempt | None, log: str, shard_id: int) -> str:
    if code := _shard_exit_code(log, shard_id):
        return _exit_cause(code)
    if killed := _KILLED.search(log):
        return f"killed by signal {killed[1]}"
    state = attempt.state if attempt else ""
    ended = _ENDED.findall(log)
    task_code = attempt.exit_code if attempt and state == "FAILED" else int(ended[-1][1]) if ended else 0
    if task_code == 1 and _SRUN_ERROR.search(log):
        return SRUN_FAILED
    if task_code:
        return _exit_cause(task_code)
    if state == "COMPLETED" or ended:
        return NO_MANIFEST
    if state == "FAILED":
        return "FAILED before the script began"
    return VANISHED if log else UNKNOWN


def _shard_exit_code(log: str, shard_id: int) -> int | None:
    """What one shard of a task ended with, where its log says so: tasks of several shards go on after one."""
    for failure in map(parse_failure_line, log.split("\n")):
        if failure and failure.shard_id == shard_id:
            return failure.exit_code
    codes = (int(match[2]) for match in _FAILED_IN_PROSE.finditer(log) if int(match[1]) == shard_id)
    return next(codes, None)


def _exit_cause(code: int) -> str:
    return f"killed by signal {code - 128}" if code > 128 else _EXIT_CAUSES.get(code, f"exit code {code}")


def node_of(attempt: TaskAttempt | None, log: str) -> str:
    """Where an attempt was, as Slurm or its log says."""
    if attempt and attempt.node and not attempt.node.startswith("None"):
        return attempt.node
    found = re.findall(r"^(?:shardprep: node (\S+):|slurmstepd-?(\S*?): error)", log, re.MULTILINE)
    return next((name for pair in reversed(found) for name in pair if name), "")


def log_path(folder: Path, job_id: str, index: int) -> Path:
    """The log of one task; it has all attempts of that task, one after another."""
    return folder / JOBS_FOLDER / LOG_FOLDER / f"{job_id}_{index}.log"


def log_tail(folder: Path, job_id: str, index: int) -> str:
    """The last 16 KiB of what a task's last attempt wrote; empty where there is no such file."""
    try:
        with os.fdopen(open_regular(log_path(folder, job_id, index)), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return _BEGINS.split(file.read().decode("utf-8", "replace"))[-1]
    except (OSError, ShardprepError):
        return ""


def found_wrong(folder: Path, verify_job_id: str, job_ids: Container[str]) -> set[int]:
    """The shards that a verify job named, but for those that were made anew since.

    ``job_ids``: of the jobs that ended before it began. What another job made, or none, is compared by the
    times of manifest and log.
    """
    log = folder / JOBS_FOLDER / LOG_FOLDER / f"verify-{verify_job_id}.log"
    try:
        with os.fdopen(open_regular(log), "rb") as file:
            text = file.read(_VERIFY_LOG_BYTES).decode("utf-8", "replace")
            written_s = os.fstat(file.fileno()).st_mtime
    except (OSError, ShardprepError):
        return set()
    named = {int(match[1]) for match in _FOUND_WRONG.finditer(text)}
    return {shard_id for shard_id in named if _is_as_found(folder, shard_id, written_s, job_ids)}


def _is_as_found(folder: Path, shard_id: int, written_s: float, job_ids: Container[str]) -> bool:
    with contextlib.suppress(OSError, ShardprepError):
        if read_making(folder, shard_id).job_id in job_ids:
            return True  # whatever the clock of its node said
    with contextlib.suppress(OSError):
        return manifest_path(folder, shard_id).stat().st_mtime < written_s
    return False


def last_lines(log: str, number: int = 3) -> list[str]:
    """The last lines of a log that say something to a person, progress bars left out."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    return [line for line in lines if not _NOISE.match(line) and not parse_failure_line(line)][-number:]
