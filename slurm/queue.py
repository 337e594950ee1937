"""Slurm's own commands, which no other module starts, and what squeue shows of a data set's jobs.

squeue says what waits and runs, and for some minutes (MinJobAge) how a job ended. It is asked for the jobs of
a user: asked for ids, slurmctld sends all that it has. Times are in UTC.

A job is a submission's if id, user and time of submission are those of the record: a controller that lost its
state gives old ids to other jobs. A job that Slurm started again has a later time, and then the name decides;
else a person may have renamed it. ``sbatch slurm/prep_array.sh DATA`` is known by the records of its tasks,
once one has begun. Nothing may be concluded from the absence of jobs that cannot be seen.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from shardprep.console import say
from shardprep.errors import NotFound, ReadWriteError, UsageError, quoted
from shardprep.format.jobs import AttemptRecord, Submission, folder_identity, user_name
from shardprep.format.names import MAX_SHARDS, ids_of_ranges

T = TypeVar("T")

# sbatch's variables beat the script's own #SBATCH lines; JobRequest has read those that users set.
_DROPPED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY", "SBATCH_OUTPUT", "SBATCH_WAIT")
# Inside an allocation Slurm has set some 50 SLURM_* that describe it; sbatch and srun read several of them as
# options (SLURM_MEM_PER_CPU excludes --mem, SLURM_CPU_BIND breaks a step). These say how Slurm is reached.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# Field of a JobRequest -> the variable of sbatch, or of prep_array.sh, that sets it.
REQUEST_VARIABLES = {
    **{name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")},
    "time_min": "SBATCH_TIMELIMIT",
    "mem_gb": "SBATCH_MEM_PER_NODE",
    "mem_per_cpu_gb": "SBATCH_MEM_PER_CPU",
    "setup": "SHARDPREP_SETUP",
    "container": "SHARDPREP_EXEC",
    "srun_args": "SHARDPREP_SRUN_ARGS",
}
# Slurm's own words for a controller that is down, too slow or not configured, or whose accounts are slow.
_AWAY = re.compile(
    r"contact slurm controller|timed out|configuration source|Zero Bytes|connection fail|"
    r"can't be reached now|Munge|authentication|not available right now",
    re.IGNORECASE,
)
_IS_IT_UP = "is the controller up? scontrol ping"
# What munge takes for an expired credential, a client is told in the words "Zero Bytes" alone.
_CLOCKS_DIFFER = "does it restart (scontrol ping), or is the clock of this host more than 5 min off (date)?"
_DELAYS_S = (5, 10, 20, 40, *[60] * 56)  # about an hour


class SlurmRefused(UsageError):
    """Slurm will not run this as it was asked for. Its own words are in the message."""


class SlurmAway(ReadWriteError):
    """Slurm gives no answer: its controller is down or slow, or cannot be reached from here."""


class SlurmMissing(SlurmAway):
    """Slurm's commands are not installed here."""

    exit_code = NotFound.exit_code


def slurm_answer(parse: Callable[[str], T], *command: str) -> T:
    """Return what ``parse`` makes of the output of a command that only asks.

    Raises what ``slurm_output`` raises, and SlurmAway where the output is cut short or one of several servers
    gave no answer.
    """
    done = _run(command, None)
    if _AWAY.search(done.stderr):
        raise SlurmAway(f"{' '.join(command[:3])} answered in part: {' '.join(done.stderr.split())}")
    try:
        return parse(done.stdout)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise SlurmAway(
            f"{' '.join(command[:3])} answered what cannot be read ({error}), beginning with "
            f"{done.stdout[:80]!r}; try again, and see whether it answers: {command[0]} --version"
        ) from None


def slurm_output(*command: str, text: str | None = None) -> str:
    """Return the standard output of a Slurm command whose input is ``text``.

    Raises SlurmRefused with Slurm's words, SlurmMissing where it is not installed, SlurmAway where the
    controller does not answer.
    """
    return _run(command, text).stdout


def _run(command: tuple[str, ...], text: str | None) -> subprocess.CompletedProcess[str]:
    clusters = os.environ.get("SLURM_CLUSTERS", "")
    if "," in clusters or clusters == "all":
        raise UsageError(
            f"SLURM_CLUSTERS is {clusters!r}, expected one cluster, to which a submission goes and where "
            "status looks"
        )
    # Without what changes a question or its answer's form, and what describes an allocation. Times come in
    # UTC, as two who look may be in two time zones; jobs keep the zone of who submits.
    dropped = (*_DROPPED, "SBATCH_MEM", *REQUEST_VARIABLES.values(), "SLURM_")
    kept = (name for name in os.environ if name in _KEPT or not name.startswith(dropped))
    environ = {name: os.environ[name] for name in kept}
    environ |= {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    environ |= {} if command[0] == "sbatch" else {"TZ": "UTC0"}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=120,
            env=environ,
        )
    except OSError as error:
        raise SlurmMissing(
            f"{command[0]} cannot be run here ({error.strerror}); run this on a login node of the cluster, "
            "or make the shards on this machine",
            path=command[0],
            found=error.strerror,
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{command[0]} did not answer in 120 s; {_IS_IT_UP}") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        if _AWAY.search(words) and "known by database" not in words:  # that is a wrong SLURM_CLUSTERS
            hint = _CLOCKS_DIFFER if "Zero Bytes" in words else _IS_IT_UP
            raise SlurmAway(f"{command[0]} gets no answer: {words}; {hint}")
        raise SlurmRefused(f"{command[0]} refuses: {words}")
    return done


def seconds_of(text: str) -> int | None:
    """Return the seconds of a time of Slurm's (``60`` minutes, ``2:03``, ``1-02:03:04``), or None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text)
    if not match:
        return None
    days, first, second, third = (int(item or 0) for item in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


def minutes_of(text: str) -> int | None:
    """Return the minutes of a time of Slurm's, rounded up as Slurm does, or None for UNLIMITED."""
    seconds = seconds_of(text)
    return None if seconds is None else math.ceil(seconds / 60)


def megabytes_of(text: str) -> float | None:
    """Return the MB of a size of Slurm's, such as ``300`` or ``1.50G``, or None for UNLIMITED."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text, re.IGNORECASE)
    return float(match[1]) * 1024.0 ** "KMGTP".index(match[2].upper() or "M") / 1024 if match else None


def read_config() -> dict[str, str]:
    """Return ``scontrol show config`` as name -> value. Raises what ``slurm_answer`` raises."""

    def parse(text: str) -> dict[str, str]:
        config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
        if not re.fullmatch(r"[0-9]{1,10}", config.get("MaxArraySize", "")):  # cut short before it
            raise ValueError("no MaxArraySize")
        return config

    return slurm_answer(parse, "scontrol", "show", "config")


def ask_patiently(question: Callable[[], T]) -> T:
    """Return the answer, asking again while Slurm gives none: a controller that restarts is back in a minute.

    Raises SlurmAway after about an hour.
    """
    for delay_s in _DELAYS_S:
        try:
            return question()
        except SlurmMissing:
            raise
        except SlurmAway as error:
            say(f"{error}; asking again in {delay_s} s. What runs goes on meanwhile")
            sleep(delay_s)
    return question()


JOB_NAME = "shardprep"
VERIFY, CONTROL = "-verify", "-control"  # end the names of such jobs
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All others run: what a later Slurm calls by a new word must not be taken for an end, and sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
_TIME = "%Y-%m-%dT%H:%M:%S"
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # Slurm's own number for a task whose log could not be opened; no such signal
PLAIN = -1  # number of no submission: index N makes shard N
_CLOCKS_DIFFER_S = 600

# Slurm's reason -> what it means, and what only a person can do: let it go on (release), send it anew, as it
# never runs as it is (cancel), or ask an administrator (ask). The first that fits counts.
_LESS = "cancel, and ask for less"
_REASONS = (
    ("Resources", "the next free nodes are for it", ""),
    ("Priority", "other jobs go before it", ""),
    ("JobArrayTaskLimit", "as many run at once as --max_parallel allows", ""),
    ("JobHeldAdmin", "held by an administrator; ask them", "ask"),
    ("launch failed requeued held", "held, as its node could not start it (a prolog failed?)", "release"),
    ("JobHeld|job requeued in held|JobHoldMax|ReservationDel", "held until it is released", "release"),
    ("suspended", "an administrator stopped it, or Slurm did for other jobs; ask if it lasts", "ask"),
    ("BeginTime", "its start time has not come; one that was started again waits a little", ""),
    ("DependencyNever", "the job that it waits for failed: cancel, and submit anew", "cancel"),
    ("Dependency", "it waits for another job", ""),
    ("ReqNodeNotAvail|Nodes required", "the nodes that it needs are down, drained or reserved; sinfo -R", ""),
    ("PartitionDown|PartitionInactive", "the partition is down or inactive; ask an administrator", ""),
    ("PartitionTimeLimit", f"the partition allows no job so long: {_LESS} --time_min", "cancel"),
    ("PartitionNodeLimit|PartitionConfig", f"no node of the partition is so large: {_LESS}", "cancel"),
    ("BadConstraints", "no node has what is asked for: cancel, and change SBATCH_CONSTRAINT", "cancel"),
    ("Reservation", "its reservation has not begun", ""),
    ("Invalid(Account|QOS)|(Account|QOS)NotAllowed", "change --account or SBATCH_QOS", "cancel"),
    (r"(Assoc|QOS)\w*(PerJob|MaxWall)", f"the account or QOS allows no job so large: {_LESS}", "cancel"),
    (r"(Assoc|QOS)Grp\w*RunMin", "the account or QOS has as much running as it allows", ""),
    (r"(Assoc|QOS)Grp\w*Minutes", "no hours are left: cancel, and change --account or SBATCH_QOS", "cancel"),
    ("Assoc|QOS|MaxMem", "a limit of the account, the QOS or of memory is reached", ""),
)


def meaning_of(reason: str) -> tuple[str, str]:
    """Return what a reason means, and ``release``, ``cancel`` or ``ask`` if it needs a person."""
    return next(((means, who) for words, means, who in _REASONS if re.match(words, reason)), ("", ""))


def names_begin(folder: Path, plan_id: str) -> str:
    """Return what the names of all jobs of a data set begin with, before the number of the submission."""
    return f"{JOB_NAME}-{plan_id[:12]}-{folder_identity(folder)}-"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or the last start of a task of an array, as squeue shows it."""

    job_id: str
    index: int  # 0 for a job that is no array
    name: str
    user: str
    submit_time: str  # of the controller's clock, UTC, 2026-11-22T01:52:04
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    num_restarts: int = 0
    reason: str = ""
    start_time: str = ""  # local; where it waits: when the scheduler expects it to start, if it says so
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, as a record names the task."""
        return self.job_id, self.index

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def waits_for(self) -> str:
        """Return Slurm's reason for which it waits, or "suspended", or ""."""
        return self.reason if self.is_waiting else "suspended" if self.state in _SUSPENDED else ""

    @property
    def is_live(self) -> bool:
        """Return whether it waits, runs or is suspended."""
        return self.state not in _ENDED


def _exit_code(text: str) -> int:
    """Return a shell's exit code, of ``65:0`` (squeue from 23.02 on) or ``16640`` (as wait() has it)."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"an exit code of {text[:40]!r}")
    code, killed_by = int(match[1] or 0), int(match[2] or 0)
    if match[2] is None:
        code, killed_by = code >> 8, code & 0x7F
    if killed_by == LOG_NOT_OPENED - 128:
        return LOG_NOT_OPENED
    return code or (128 + killed_by if killed_by else 0)


def _local_time(text: str) -> str:
    """Return a time of Slurm's, ``2026-11-22T01:52:04`` in UTC, in the local time zone, or ""."""
    try:
        return datetime.strptime(f"{text}+0000", f"{_TIME}%z").astimezone().strftime(_TIME)
    except ValueError:
        return ""


# What squeue is asked for -> the field of Job.
_FIELDS = {
    "ArrayJobID": "job_id", "ArrayTaskID": "index", "State": "state", "Reason": "reason",
    "exit_code": "exit_code", "NodeList": "node", "TimeUsed": "elapsed_s", "JobID": "", "UserName": "user",
    "SubmitTime": "submit_time", "StartTime": "start_time", "EndTime": "", "RestartCnt": "num_restarts",
    "Name": "name",
}  # fmt: skip


def parse_queue(text: str) -> list[Job]:
    """Return the jobs of squeue's lines, one for each task that waits. Raises ValueError."""
    jobs = []
    for line in text.splitlines():
        values = line.split("|", len(_FIELDS))
        if len(values) <= len(_FIELDS):
            raise ValueError(f"{len(values) - 1} of {len(_FIELDS)} fields in {line[:200]!r}")
        facts: dict[str, Any] = dict(zip(_FIELDS.values(), values, strict=False))
        del facts[""]
        if not re.fullmatch(r"[0-9]{1,10}", facts["job_id"]):
            raise ValueError(f"a job id of {facts['job_id'][:40]!r}")
        facts["state"] = facts["state"].split(" ")[0]  # CANCELLED by 0
        facts["num_restarts"] = int(facts["num_restarts"])
        facts["start_time"] = _local_time(facts["start_time"])
        facts["exit_code"] = _exit_code(facts["exit_code"])
        facts["elapsed_s"] = seconds_of(facts["elapsed_s"]) or 0
        facts["node"] = "" if facts["node"].startswith("None") else facts["node"]
        jobs += [Job(**{**facts, "index": index}) for index in _indices(facts["index"])]
    return jobs


def _indices(text: str) -> list[int]:
    """Return [3, 4, 5, 9] of ``[3-5,9%2]``, [0] for a job that is no array."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    whole = [each for each in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", each)]  # ours are short
    return ids_of_ranges(",".join(whole), end=MAX_SHARDS + 1) if whole else []


def jobs_of_user(user: str) -> list[Job]:
    """Return what squeue shows of a user's jobs. Raises SlurmAway, also where it refuses to answer."""
    layout = ",".join(f"{name}:|" for name in _FIELDS)
    command = ("squeue", "--noheader", f"--user={user}", "--states=all", "--Format", layout)
    try:
        return slurm_answer(parse_queue, *command)
    except SlurmRefused as error:
        if "Invalid user" in str(error):  # who submitted has left
            return []
        raise SlurmAway(str(error)) from None


@dataclass(kw_only=True)
class Queue:
    """What Slurm shows of a data set's jobs."""

    # By number of the submission (or PLAIN), job id and index in the array.
    jobs: dict[tuple[int, str, int], Job] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)  # id of a job that is not shown -> why not
    controllers: list[str] = field(default_factory=list)  # jobs of submit --until_done
    unrecorded: list[str] = field(default_factory=list)  # jobs of ours that wait or run, and no record names
    foreign: list[str] = field(default_factory=list)  # live ones of the folder that this was copied from
    away: str = ""  # why Slurm gave no answer
    config: dict[str, str] = field(default_factory=dict)  # of the controller

    def tasks(self) -> dict[tuple[str, int], Job]:
        """Return job and index, as a record names its task -> the last start of the task."""
        return {job.key: job for job in self.jobs.values()}


def find_queue(
    folder: Path,
    plan_id: str,
    submissions: Sequence[Submission],
    copied: Sequence[Submission],
    open_records: Sequence[AttemptRecord],
    config: dict[str, str],
) -> Queue:
    """Ask squeue once for each user whose jobs may be the data set's. ``config``: as read before, or {}.

    ``copied``: submissions of the folder that this one was copied from. Raises SlurmAway.
    """
    me = user_name()
    recorded = {job.job_id for sent in submissions for job in sent.jobs}
    plain = {each.key: each for each in open_records if each.job_id not in recorded}
    users = {me, *(each.user for each in (*submissions, *copied)), *(each.user for each in plain.values())}
    shown = [job for user in sorted(users - {""}) for job in jobs_of_user(user)]
    own = [each for each in shown if each.user == me and each.is_live and each.job_id not in recorded]
    if not config and (submissions or copied or users - {me, ""}):
        config = read_config()
    queue = Queue(config=config)

    for sent in submissions:
        queue.jobs |= {(sent.number, *each.key): each for each in _jobs_of(sent, shown)}
    for sent in copied:
        queue.foreign += [job.job_id for job in _jobs_of(sent, shown) if job.is_live]

    # Tasks of plain sbatch: those of records without an end, and this user's others of an array that began.
    began = {(each.job_id, each.user): each.began for each in plain.values()}
    own_keys = {each.key for each in own}
    for job in shown:
        record = plain.get(job.key)
        is_plain = record is not None and record.user == job.user
        if not is_plain and job.key in own_keys:
            # Whether tasks of the same array have begun for this data set, after it was submitted.
            moment = began.get((job.job_id, job.user), 0) + _CLOCKS_DIFFER_S
            is_plain = job.submit_time <= datetime.fromtimestamp(moment, timezone.utc).strftime(_TIME)
        if is_plain:
            queue.jobs[PLAIN, job.job_id, job.index] = job

    # Jobs that cannot be seen from here, whatever has become of them.
    hides_users = re.search(r"\b(jobs|all)\b", config.get("PrivateData", ""))
    seen_users = {me, *(job.user for job in shown)}
    sent_jobs = [(job.job_id, sent.user, sent.cluster) for sent in submissions for job in sent.jobs]
    for job_id, user, cluster in [*sent_jobs, *((each.job_id, each.user, "") for each in plain.values())]:
        if cluster not in ("", config.get("ClusterName", "")):
            queue.hidden[job_id] = (
                f"jobs of cluster {cluster} are seen by: SLURM_CLUSTERS={cluster} "
                f"shardprep status {quoted(folder)}"
            )
        elif hides_users and user not in seen_users:
            queue.hidden[job_id] = f"this site shows the jobs of {user} to {user} alone"

    # Jobs of ours that no record names, by their names.
    known = {job_id for number, job_id, _ in queue.jobs if number == PLAIN}
    begin = names_begin(folder, plan_id)
    of_original = tuple(f"{JOB_NAME}-{plan_id[:12]}-{each.identity}-" for each in copied)
    for job in sorted(own, key=lambda each: int(each.job_id)):
        if job.job_id in known:
            continue
        known.add(job.job_id)
        is_controller = job.name.endswith(CONTROL)
        if job.name.startswith(begin):
            (queue.controllers if is_controller else queue.unrecorded).append(job.job_id)
        elif is_controller and job.name.startswith(of_original):
            queue.foreign.append(job.job_id)
    queue.foreign = sorted(set(queue.foreign), key=int)
    return queue


def _jobs_of(submission: Submission, jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that are of a submission."""
    own = {job.job_id: job for job in submission.jobs}
    found = []
    for job in jobs:
        sent = own.get(job.job_id)
        if sent is None or job.user != submission.user:
            continue
        is_same_time = job.submit_time == sent.submit_time
        is_later = job.num_restarts > 0 and job.submit_time > sent.submit_time
        # A person may have changed the name, but calls no job as another submission's.
        is_renamed = is_same_time and not job.name.startswith(f"{JOB_NAME}-")
        if (job.name == sent.name and (is_same_time or is_later)) or is_renamed:
            found.append(job)
    return found
