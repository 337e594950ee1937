"""Runs Slurm's own commands, and reads what Slurm knows of our jobs. No other module starts them.

squeue says what waits and runs, ``sacct -D`` says what has ended. Both print lines; each line becomes one
TaskAttempt per task. ``attempts_by_task`` joins the two. squeue must answer; the accounts may be missing,
and then what ended some minutes ago is not known here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardprep.errors import NotFound, ReadWriteError, ShardprepError, UsageError
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from slurm.job_records import JobIdentity

T = TypeVar("T")

# sbatch's variables beat the script's own #SBATCH lines; JobRequest has read those that users set.
_DROPPED = (
    "SQUEUE_",
    "SBATCH_JOB_NAME",
    "SACCT_",
    "SBATCH_ARRAY",
    "SBATCH_OUTPUT",
    "SBATCH_WAIT",
    "SBATCH_TIMELIMIT",
    "SBATCH_MEM",
)
# Inside an allocation Slurm has set some 50 SLURM_* that describe it; sbatch and srun read several of them as
# options (SLURM_MEM_PER_CPU excludes --mem, SLURM_CPU_BIND breaks a step). These say how Slurm is reached.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
REQUEST_VARIABLES = {
    name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")
}
# Slurm's own words for a controller that is down, too slow, or not configured here.
_AWAY = re.compile(
    r"contact slurm controller|timed out|configuration source|Zero Bytes|connection fail|"
    r"Munge|authentication",
    re.IGNORECASE,
)


class SlurmRefused(UsageError):
    """Slurm will not run this as it was asked for; its own words are in the message."""


class SlurmAway(ReadWriteError):
    """Slurm gives no answer: its controller is down or slow, or cannot be reached from here."""


class SlurmMissing(SlurmAway):
    """Slurm's commands are not installed here."""

    exit_code = NotFound.exit_code


def slurm_answer(parse: Callable[[str], T], *command: str) -> T:
    """What ``parse`` makes of a Slurm command's output.

    Raises what ``slurm_output`` raises, and ReadWriteError where the output is cut short or unknown to it.
    """
    text = slurm_output(*command)
    try:
        return parse(text)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ReadWriteError(
            f"{' '.join(command[:3])} answered what cannot be read ({error}), beginning with "
            f"{text[:80]!r}; try again, and see whether {command[0]} itself answers: {command[0]} --version"
        ) from None


def slurm_output(*command: str, text: str | None = None) -> str:
    """Standard output of a Slurm command; ``text`` is its input.

    Raises SlurmRefused with Slurm's words where it ends with an error, SlurmMissing where it is not
    installed, SlurmAway where the controller cannot be reached or does not answer within two minutes.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=120,
            env=_environ(),
        )
    except OSError as error:
        raise SlurmMissing(
            f"{command[0]} cannot be run here ({error.strerror}); run this on a login node of the cluster, "
            "or without one: python -m preprocess run O"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(
            f"{command[0]} did not answer within 120 s; is the controller up? scontrol ping"
        ) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        if _AWAY.search(words):
            raise SlurmAway(f"{command[0]} gets no answer: {words}; is the controller up? scontrol ping")
        raise SlurmRefused(f"{command[0]} refuses: {words}")
    return done.stdout


def _environ() -> dict[str, str]:
    """What Slurm's commands, and by sbatch the jobs, get of this process's variables.

    Left out are those that would change what is asked for or how it is printed, and those of the allocation
    that this process may run in. Lists of indices come whole, times in one form.
    """
    dropped = (*_DROPPED, *REQUEST_VARIABLES.values(), "SLURM_")
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(dropped)
    }
    return {**kept, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}


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
    "UserName",
    "Name",  # last: it alone may hold a "|"
)
_ACCOUNT_FIELDS = (
    "JobID",
    "State",
    "ExitCode",
    "NodeList",
    "ElapsedRaw",
    "TotalCPU",
    "AllocCPUS",
    "MaxRSS",
    "User",
    "JobName",  # last: it alone may hold a "|"
)


@dataclass(frozen=True, kw_only=True)
class TaskAttempt:
    """One start of one array task by Slurm. A task that Slurm requeues has several."""

    identity: JobIdentity
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
    def job_id(self) -> str:
        return self.identity.job_id

    @property
    def key(self) -> tuple[str, int]:
        return self.job_id, self.index


def queued_attempts(jobs: Iterable[JobIdentity]) -> list[TaskAttempt]:
    """What squeue still shows of these jobs: what waits and runs, and what ended some minutes ago.

    Only jobs with the recorded name and user count: a controller that was set up anew gives old ids to other
    jobs.
    Raises what ``slurm_answer`` raises.
    """
    wanted = set(jobs)
    if not wanted:
        return []
    job_ids = sorted({job.job_id for job in wanted}, key=int)
    fields = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
    try:
        # Two ids at least: asked for a single one that it has forgotten, squeue ends with an error.
        ids = ",".join(job_ids if len(job_ids) > 1 else [*job_ids, "1"])
        options = ("--noheader", "--array", "--states=all", f"--jobs={ids}", "--Format", fields)
        attempts = slurm_answer(parse_queue, "squeue", *options)
    except ShardprepError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return [attempt for attempt in attempts if attempt.identity in wanted]


def accounted_attempts(jobs: Iterable[JobIdentity]) -> list[TaskAttempt]:
    """What the accounts keep of these jobs, a requeued task's earlier attempts first. [] without accounts."""
    wanted = set(jobs)
    if not wanted:
        return []
    job_ids = ",".join(sorted({job.job_id for job in wanted}, key=int))
    options = ("--duplicates", "--noheader", "--parsable2", f"--jobs={job_ids}")
    try:
        attempts = slurm_answer(parse_accounts, "sacct", *options, f"--format={','.join(_ACCOUNT_FIELDS)}")
    except ShardprepError:  # 'Slurm accounting storage is disabled', or its server is away
        return []
    return [attempt for attempt in attempts if attempt.identity in wanted]


def attempts_by_task(
    accounts: Iterable[TaskAttempt], queue: Sequence[TaskAttempt]
) -> dict[tuple[str, int], list[TaskAttempt]]:
    """(job, index) -> its attempts, oldest first; what squeue says of the last one is the newer truth.

    Only squeue can say that a task waits or runs: the accounts lag, and where they missed the end of a job
    they show it as running for ever.
    """
    found: dict[tuple[str, int], list[TaskAttempt]] = {}
    for attempt in accounts:
        found.setdefault(attempt.key, []).append(attempt)
    for attempt in queue:
        attempts = found.setdefault(attempt.key, [])
        if attempt.state in WAITING or attempt.state in RUNNING:
            # The accounts have this attempt as well unless it waits again after a requeue.
            if attempts and attempts[-1].state in (WAITING | RUNNING) - {"REQUEUED"}:
                attempts.pop()
            attempts.append(attempt)
        elif not attempts or attempts[-1].state in WAITING | RUNNING:
            attempts[-1:] = [attempt]
    queued = {attempt.key for attempt in queue}
    for key in found.keys() - queued:
        if found[key][-1].state in WAITING | RUNNING:
            del found[key][-1]
    return {key: attempts for key, attempts in found.items() if attempts}


def parse_queue(text: str) -> list[TaskAttempt]:
    """squeue's lines -> attempts; a line of tasks that wait together becomes one each.

    Raises ValueError for a line that is cut short or no such line.
    """
    attempts = []
    for line in text.splitlines():
        values = _values(_QUEUE_FIELDS, line.removesuffix("|"))
        job_id = values["JobID"] if values["ArrayTaskID"] == "N/A" else values["ArrayJobID"]
        attempt = TaskAttempt(
            identity=JobIdentity(job_id=_job_id(job_id), name=values["Name"], user=values["UserName"]),
            index=0,
            state=values["State"],
            reason=values["Reason"],
            exit_code=_exit_code(values["exit_code"]),
            node=values["NodeList"],
            elapsed_s=seconds_of(values["TimeUsed"]),
        )
        attempts += [dataclasses.replace(attempt, index=index) for index in _indices(values["ArrayTaskID"])]
    return attempts


def parse_accounts(text: str) -> list[TaskAttempt]:
    """sacct's lines -> attempts. Steps come after their job: they add memory, and the truth of an OOM.

    A step that ran out of memory under a script that went on leaves the job FAILED, even COMPLETED.
    Raises ValueError for a line that is cut short or no such line.
    """
    attempts: list[TaskAttempt] = []
    for line in text.splitlines():
        values = _values(_ACCOUNT_FIELDS, line)
        job, _, step = values["JobID"].partition(".")
        state = values["State"].split(" ")[0]
        rss = bytes_of(values["MaxRSS"])
        if step:
            if attempts and rss > attempts[-1].max_rss_bytes:
                attempts[-1] = dataclasses.replace(attempts[-1], max_rss_bytes=rss)
            if attempts and state == "OUT_OF_MEMORY" and attempts[-1].state in ("FAILED", "COMPLETED"):
                attempts[-1] = dataclasses.replace(attempts[-1], state=state)
            continue
        job_id, _, indices = job.partition("_")
        attempt = TaskAttempt(
            identity=JobIdentity(job_id=_job_id(job_id), name=values["JobName"], user=values["User"]),
            index=0,
            state=state,
            exit_code=_exit_code(values["ExitCode"]),
            node=values["NodeList"],
            elapsed_s=int(values["ElapsedRaw"] or 0),
            cpu_s=float(seconds_of(values["TotalCPU"])),
            num_cpus=int(values["AllocCPUS"] or 0),
            max_rss_bytes=rss,
        )
        attempts += [dataclasses.replace(attempt, index=index) for index in _indices(indices)]
    return attempts


def _indices(text: str) -> list[int]:
    """``[3-5,9%2]`` -> [3, 4, 5, 9]; [0] for a job that is no array. What Slurm cut short ends early."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    whole = [
        part for part in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", part)
    ]  # none of ours is longer
    return ids_of_ranges(",".join(whole), end=MAX_SHARDS + 1) if whole else []


def _values(names: Sequence[str], line: str) -> dict[str, str]:
    values = line.split("|", len(names) - 1)
    if len(values) != len(names):
        raise ValueError(f"{len(values)} of {len(names)} fields in {line[:200]!r}")
    return dict(zip(names, values, strict=True))


def _job_id(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ValueError(f"a job id of {text[:40]!r}")
    return text


def _exit_code(text: str) -> int:
    """A shell's exit code, of ``65:0`` (squeue from 23.02 on, and sacct) or ``16640`` (as wait() has it)."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"an exit code of {text[:40]!r}")
    code, killed_by = int(match[1] or 0), int(match[2] or 0)
    if match[2] is None:
        code, killed_by = code >> 8, code & 0x7F
    return code or (128 + killed_by if killed_by else 0)


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
