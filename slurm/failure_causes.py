"""Why a task's run ended without its shards: from Slurm's state, the exit code, and the task's log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from slurm.sbatch_script import LOG_FOLDER
from slurm.squeue_sacct import TaskRun
from slurm.submission import JOBS_FOLDER

OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
NODE_FAIL = "NODE_FAIL"
BAD_INPUT = "bad input (65)"
NO_MANIFEST = "finished without a manifest"
VANISHED = "ended without a word (node failure?)"
UNKNOWN = "unknown: no log, and Slurm has forgotten it"

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
    (re.compile(r"DUE TO NODE FAILURE"), NODE_FAIL),
    (re.compile(r"DUE TO PREEMPTION"), "PREEMPTED"),
    (re.compile(r"CANCELLED AT"), "CANCELLED"),
)
_KILLED = re.compile(r"was killed by signal (\d+)")
_ENDED = re.compile(r"^shardprep: node (\S+): .* ended with exit code (\d+)$", re.MULTILINE)
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)
_SHARD_FAILED = re.compile(r"^shard (\d{5}) failed \((\d+)\): (.*)$", re.MULTILINE)
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")


def log_path(folder: Path, job_id: str, index: int) -> Path:
    return folder / JOBS_FOLDER / LOG_FOLDER / f"{job_id}_{index}.log"


def log_tail(folder: Path, job_id: str, index: int) -> str:
    """The last 16 KiB of what a task's last run wrote; empty where there is no log."""
    try:
        with log_path(folder, job_id, index).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return _BEGINS.split(file.read().decode("utf-8", "replace"))[-1]
    except OSError:
        return ""


def cause_of(run: TaskRun | None, log: str, shard_id: int) -> str:
    """Why ``shard_id`` was not made by a run that has ended.

    Slurm's state comes first, then what the log says of this shard, of the job, and of the exit code.
    COMPLETED proves nothing: only a manifest does.
    """
    state = run.state if run else ""
    if state in _STATES:
        return _STATES[state]
    if found := next((cause for pattern, cause in _LOG_CAUSES if pattern.search(log)), None):
        return found
    for match in _SHARD_FAILED.finditer(log):
        if int(match[1]) == shard_id and "was killed by signal" not in match[3]:
            return _EXIT_CAUSES.get(int(match[2]), f"exit code {match[2]}")
    if killed := _KILLED.search(log):
        return f"killed by signal {killed[1]}"
    ended = _ENDED.findall(log)
    code = run.exit_code if run and state == "FAILED" else int(ended[-1][1]) if ended else None
    if code:
        return f"killed by signal {code - 128}" if code > 128 else _EXIT_CAUSES.get(code, f"exit code {code}")
    if state == "COMPLETED" or ended:
        return NO_MANIFEST
    if state == "FAILED":
        return "FAILED before the script began"
    return VANISHED if log else UNKNOWN


def node_of(run: TaskRun | None, log: str) -> str:
    """Where a run was, as Slurm or its log says."""
    if run and run.node and not run.node.startswith("None"):
        return run.node
    found = re.findall(r"^(?:shardprep: node (\S+):|slurmstepd-?(\S*?): error)", log, re.MULTILINE)
    return next((name for pair in reversed(found) for name in pair if name), "")


def last_lines(log: str, number: int = 3) -> list[str]:
    """The last lines of a log that say something, progress bars left out."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    return [line for line in lines if not _NOISE.match(line)][-number:]
