"""What Slurm knows of job arrays: squeue for what waits and runs, ``sacct -D`` for what has ended."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preprocess.shard_format import ShardprepError
from slurm.sbatch_script import JOB_NAME
from slurm.slurm_commands import slurm_output
from slurm.submission import ids_of_ranges

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "RESIZING", "SIGNALING"})
_QUEUE_FIELDS = (
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "Reason",
    "exit_code",
    "NodeList",
    "TimeUsed",
    "JobID",
    "Name",
)
_ACCOUNT_FIELDS = (
    "JobID,State,ExitCode,DerivedExitCode,NodeList,ElapsedRaw,TotalCPU,AllocCPUS,MaxRSS,ReqMem,TimelimitRaw"
)


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """One run of one array task. A requeued task has several."""

    job_id: str
    index: int  # 0 for a job that is no array
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    reason: str = ""
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0
    cpu_s: float = 0.0
    num_cpus: int = 0
    max_rss_bytes: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.job_id, self.index


def queued_runs(job_ids: Sequence[str]) -> list[TaskRun]:
    """What squeue still shows of these jobs: what waits and runs, and what ended some minutes ago.

    Only jobs of our name: a controller that was set up anew gives old numbers to other people's jobs.
    """
    if not job_ids:
        return []
    fields = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
    try:
        # Two ids at least: asked for a single one that it has forgotten, squeue ends with an error.
        ids = ",".join(job_ids if len(job_ids) > 1 else [*job_ids, "1"])
        text = slurm_output(
            "squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--Format", fields
        )
    except ShardprepError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    wanted = set(job_ids)
    return [run for run in parse_queue(text) if run.job_id in wanted]


def parse_queue(text: str) -> list[TaskRun]:
    """squeue's lines -> runs; a line of tasks that wait together becomes one each."""
    runs = []
    for line in text.splitlines():
        values = dict(zip(_QUEUE_FIELDS, line.split("|"), strict=False))
        if not values["Name"].startswith(JOB_NAME):
            continue
        status = int(values["exit_code"] or 0)  # as wait() gives it
        run = TaskRun(
            job_id=values["JobID"] if values["ArrayTaskID"] == "N/A" else values["ArrayJobID"],
            index=0,
            state=values["State"],
            reason=values["Reason"],
            exit_code=(status >> 8) or (status & 0x7F and 128 + (status & 0x7F)),
            node=values["NodeList"],
            elapsed_s=seconds_of(values["TimeUsed"]),
        )
        runs += [dataclasses.replace(run, index=index) for index in _indices(values["ArrayTaskID"])]
    return runs


def account_runs(job_ids: Sequence[str]) -> list[TaskRun]:
    """What the accounts keep of these jobs, earlier runs of requeued tasks first. [] without accounting."""
    if not job_ids:
        return []
    command = ("sacct", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(job_ids)}")
    try:
        return parse_accounts(slurm_output(*command, f"--format={_ACCOUNT_FIELDS}"))
    except ShardprepError:  # 'Slurm accounting storage is disabled', or its server is away
        return []


def parse_accounts(text: str) -> list[TaskRun]:
    """sacct's lines -> runs. Steps come after their job: they add memory, and the truth of an OOM.

    A step that ran out of memory under a script that went on leaves the job FAILED, even COMPLETED.
    """
    runs: list[TaskRun] = []
    for line in text.splitlines():
        values = dict(zip(_ACCOUNT_FIELDS.split(","), line.split("|"), strict=False))
        job, _, step = values["JobID"].partition(".")
        state = values["State"].split(" ")[0]
        rss = bytes_of(values["MaxRSS"])
        if step:
            if runs and rss > runs[-1].max_rss_bytes:
                runs[-1] = dataclasses.replace(runs[-1], max_rss_bytes=rss)
            if runs and state == "OUT_OF_MEMORY" and runs[-1].state in ("FAILED", "COMPLETED"):
                runs[-1] = dataclasses.replace(runs[-1], state=state)
            continue
        job_id, _, indices = job.partition("_")
        first, _, killed_by = values["ExitCode"].partition(":")
        run = TaskRun(
            job_id=job_id,
            index=0,
            state=state,
            exit_code=int(first or 0) or (128 + int(killed_by) if killed_by not in ("", "0") else 0),
            node=values["NodeList"],
            elapsed_s=int(values["ElapsedRaw"] or 0),
            cpu_s=float(seconds_of(values["TotalCPU"])),
            num_cpus=int(values["AllocCPUS"] or 0),
            max_rss_bytes=rss,
        )
        runs += [dataclasses.replace(run, index=index) for index in _indices(indices)]
    return runs


def runs_by_task(
    accounts: Iterable[TaskRun], queue: Sequence[TaskRun]
) -> dict[tuple[str, int], list[TaskRun]]:
    """(job, index) -> its runs, oldest first; what squeue says of the last one is the newer truth.

    Only squeue can say that a task waits or runs: the accounts lag, and keep runaway jobs for ever.
    """
    found: dict[tuple[str, int], list[TaskRun]] = {}
    for run in accounts:
        found.setdefault(run.key, []).append(run)
    for run in queue:
        runs = found.setdefault(run.key, [])
        if run.state in WAITING or run.state in RUNNING:
            # The accounts have this run as well unless it waits again after a requeue.
            if runs and runs[-1].state in (WAITING | RUNNING) - {"REQUEUED"}:
                runs.pop()
            runs.append(run)
        elif not runs or runs[-1].state in WAITING | RUNNING:
            runs[-1:] = [run]
    queued = {run.key for run in queue}
    for key in found.keys() - queued:
        if found[key][-1].state in WAITING | RUNNING:
            del found[key][-1]
    return {key: runs for key, runs in found.items() if runs}


def _indices(text: str) -> list[int]:
    """``[3-5,9%2]`` -> [3, 4, 5, 9]; [0] for a job that is no array. What Slurm cut short ends early."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    return [index for part in parts if re.fullmatch(r"\d+(-\d+)?", part) for index in ids_of_ranges(part)]


def seconds_of(text: str) -> int:
    """``1-02:03:04``, ``02:03:04``, ``02:03`` or ``00:00.931`` -> whole seconds; 0 for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text)
    if not match:
        return 0
    days, hours, minutes, seconds = (int(item or 0) for item in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def bytes_of(text: str) -> int:
    """sacct's ``298188K`` -> bytes."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    if not match:
        return 0
    return int(float(match[1]) * 1024 ** (" KMGT".index(match[2] or " ")))
