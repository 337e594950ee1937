"""Find the state of every shard of a data set, the attempts at it, and how they ended.

Manifests say which shards are done. For the others, the records of attempts say who tried and how it ended,
and Slurm says which jobs wait and run. Slurm's reason for an end counts if the record has none, or if only
Slurm can know it: memory, time limit, node failure, preemption. squeue shows it for some minutes (MinJobAge),
the log keeps it, and the first command that sees it writes it into the record.

Slurm's commands are started only here. squeue is asked for the jobs of a user, because slurmctld answers a
list of ids with its whole job table. Times are in UTC. A job belongs to a submission if its id, user and
submit time are in the record: a controller that lost its state gives old ids to other jobs. A requeued job
has a later submit time, and must have the same name; otherwise a user may have renamed it. Jobs of plain
``sbatch slurm/prep_array.sh DATA`` are known from the records of their tasks, once one has begun. The absence
of a job proves nothing if jobs may be hidden.

A job of this user belongs to the data set only by an own record or by its name. Records that other users
wrote name jobs of these users; ``slurm.own`` keeps them out of everything that a command does.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from time import sleep
from typing import Any, Literal, TypeVar

from shardprep.console import say
from shardprep.errors import NotFound, ReadWriteError, ShardprepError, UsageError
from shardprep.files import open_regular
from shardprep.format import commands
from shardprep.format import jobs as job_files
from shardprep.format.data_folder import LOGS_FOLDER, DataFolder
from shardprep.format.jobs import AttemptRecord, JobArray, Submission, user_name
from shardprep.format.manifest import MadeShards, Manifest, find_made_shards, is_verified
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from shardprep.format.plan import Plan

T = TypeVar("T")
StateName = Literal["done", "running", "pending", "failed", "not submitted", "not visible"]

# Slurm's own commands. ---------------------------------------------------------------------------------

# sbatch's variables override the #SBATCH lines of a script. A JobRequest has the values that users set.
_DROPPED = ("SQUEUE_", "SACCT_", "SBATCH_JOB_NAME", "SBATCH_ARRAY", "SBATCH_OUTPUT", "SBATCH_WAIT")
# Inside an allocation Slurm sets some 50 SLURM_* variables that describe it. sbatch and srun read several of
# them as options: SLURM_MEM_PER_CPU excludes --mem, SLURM_CPU_BIND breaks a step. These ones locate Slurm.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# Field of a JobRequest -> the variable of sbatch or prep_array.sh that sets it.
REQUEST_VARIABLES = {
    **{name: f"SBATCH_{name.upper()}" for name in ("partition", "account", "qos", "constraint", "exclude")},
    "time_min": "SBATCH_TIMELIMIT",
    "mem_gb": "SBATCH_MEM_PER_NODE",
    "mem_per_cpu_gb": "SBATCH_MEM_PER_CPU",
    "setup": "SHARDPREP_SETUP",
    "container": "SHARDPREP_EXEC",
    "srun_args": "SHARDPREP_SRUN_ARGS",
}
# Slurm's messages for a controller that is down, too slow or not configured, or whose accounting is slow.
_AWAY = re.compile(
    r"contact slurm controller|timed out|configuration source|Zero Bytes|connection fail|"
    r"can't be reached now|Munge|authentication|not available right now",
    re.IGNORECASE,
)
_FULL = re.compile("Resource temporarily unavailable|Slurm temporarily unable to accept job", re.IGNORECASE)
_IS_IT_UP = {"expected": "a controller that is up", "remedy": "scontrol ping"}
# "Zero Bytes" is the client's whole message if munge considers its credential expired.
_CLOCKS = "a controller that is up, and a clock here that is right to 5 min (date)"
_DELAYS_S = (5, 10, 20, 40, *[60] * 56)  # about an hour


class SlurmRefused(UsageError):
    """Slurm refused a request. Its own message is included."""


class SlurmAway(ReadWriteError):
    """Slurm did not answer: its controller is down, slow, or not reachable from this host."""


class SlurmFull(SlurmAway):
    """Slurm has as many jobs as its MaxJobCount allows, and takes more when some have ended."""


class SlurmMissing(SlurmAway):
    """Slurm's commands are not installed on this host."""

    exit_code = NotFound.exit_code


def slurm_answer(parse: Callable[[str], T], *command: str) -> T:
    """Run a command that changes nothing, and return its output as parsed by ``parse``.

    Raises as ``run_slurm`` does, and SlurmAway if the output is cut short or one of several servers did not
    answer.
    """
    done = run_slurm(*command)
    if _AWAY.search(done.stderr):
        found = f"{' '.join(command[:3])} gave a partial answer: {' '.join(done.stderr.split())}"
        raise SlurmAway(found=found, **_IS_IT_UP)
    try:
        return parse(done.stdout)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        found = f"{' '.join(command[:3])} answered {done.stdout[:80]!r}, which cannot be read ({error})"
        raise SlurmAway(found=found, remedy=f"{command[0]} --version") from None


def run_slurm(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command with ``text`` as its input. Raises SlurmRefused, SlurmMissing, SlurmAway."""
    clusters = os.environ.get("SLURM_CLUSTERS", "")
    if "," in clusters or clusters == "all":
        raise UsageError.of_value("SLURM_CLUSTERS", clusters, "one cluster, for submissions and for status")
    # Drop variables that change a command's options or output, or that describe an allocation. Ask for times
    # in UTC, because users may be in several time zones; jobs keep the time zone of their user.
    dropped = (*_DROPPED, "SBATCH_MEM", *REQUEST_VARIABLES.values(), "SLURM_")
    kept = (name for name in os.environ if name in _KEPT or not name.startswith(dropped))
    environ = {name: os.environ[name] for name in kept}
    environ |= {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    if command[0] != "sbatch":
        environ["TZ"] = "UTC0"
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
        found = f"cannot be run here ({error.strerror})"
        expected = "a login node of the cluster; or make the shards on this machine"
        raise SlurmMissing(path=command[0], found=found, expected=expected) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(found=f"{command[0]} did not answer in 120 s", **_IS_IT_UP) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        if _FULL.search(words):
            found = f"{command[0]} refused: {words}. Slurm's queue is full (MaxJobCount); no job is too large"
            expected = "room in the queue: try again later, or send fewer tasks: --shards_per_task"
            raise SlurmFull(found=found, expected=expected)
        if _AWAY.search(words) and "known by database" not in words:  # the latter is a wrong SLURM_CLUSTERS
            hint = {**_IS_IT_UP, "expected": _CLOCKS} if "Zero Bytes" in words else _IS_IT_UP
            raise SlurmAway(found=f"{command[0]} got no answer: {words}", **hint)
        raise SlurmRefused(found=f"{command[0]} refused: {words}")
    return done


def seconds_of(text: str) -> int | None:
    """Parse a time of Slurm (``60`` minutes, ``2:03``, ``1-02:03:04``) into seconds, or return None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text)
    if not match:
        return None
    days, first, second, third = (int(item or 0) for item in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


def minutes_of(text: str) -> int | None:
    """Parse a time of Slurm into minutes, rounded up as Slurm does, or return None for UNLIMITED."""
    seconds = seconds_of(text)
    return None if seconds is None else math.ceil(seconds / 60)


def megabytes_of(text: str) -> float | None:
    """Parse a size of Slurm, such as ``300`` or ``1.50G``, into MB, or return None for UNLIMITED."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text, re.IGNORECASE)
    return float(match[1]) * 1024.0 ** "KMGTP".index(match[2].upper() or "M") / 1024 if match else None


def read_config() -> dict[str, str]:
    """Return ``scontrol show config`` as name -> value. Raises as ``slurm_answer`` does."""

    def parse(text: str) -> dict[str, str]:
        config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
        if not re.fullmatch(r"[0-9]{1,10}", config.get("MaxArraySize", "")):  # the output was cut short
            raise ValueError("no MaxArraySize")
        return config

    return slurm_answer(parse, "scontrol", "show", "config")


def ask_patiently(question: Callable[[], T], only: type[SlurmAway] | None = None) -> T:
    """Call ``question`` until Slurm answers, for about an hour: a restarting controller takes a minute.

    ``only``: be patient with this error alone.
    """
    for delay_s in _DELAYS_S:
        try:
            return question()
        except SlurmMissing:
            raise
        except SlurmAway as error:
            if only and not isinstance(error, only):
                raise
            say(f"{error}; asking again in {delay_s} s. Running jobs are not affected")
            sleep(delay_s)
    return question()


# Jobs in squeue. ---------------------------------------------------------------------------------------

JOB_NAME = "shardprep"
VERIFY, CONTROL = "-verify", "-control"  # suffixes of the names of such jobs
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_WAITING |= {"RESV_DEL_HOLD"}
# All other states count as running: a new state of a later Slurm must not cause shards to be sent twice.
_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"}
_TIME = "%Y-%m-%dT%H:%M:%S"
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
LOG_NOT_OPENED = 128 + 53  # a task whose log could not be opened; Slurm reports "signal" 53
PLAIN = -1  # in place of a submission's number, for plain sbatch: index N makes shard N
_CLOCKS_DIFFER_S = 600
_ASK_AGAIN_S = 0.5  # after an empty answer

# Pattern of Slurm's reason, its meaning, and what a person must do: release the job, cancel it (and submit
# again, because it can never run) or ask an administrator. The first match counts.
_LESS = "cancel, and ask for less"
_REASONS = (
    ("Resources", "it gets the next free nodes", ""),
    ("Priority", "other jobs have a higher priority", ""),
    ("JobArrayTaskLimit", "as many tasks run as --max_parallel allows", ""),
    ("JobHeldAdmin", "held by an administrator; ask them", "ask"),
    ("launch failed requeued held", "held; its node could not start it (a prolog failed?)", "release"),
    ("JobHeld|job requeued in held|JobHoldMax|ReservationDel", "held until it is released", "release"),
    ("suspended", "suspended by an administrator, or by Slurm for other jobs; ask if it lasts", "ask"),
    ("BeginTime", "its start time has not come; a requeued job waits a little first", ""),
    ("DependencyNever", "the job that it waits for failed: cancel, and submit again", "cancel"),
    ("Dependency", "it waits for another job", ""),
    ("ReqNodeNotAvail|Nodes required", "the nodes that it needs are down, drained or reserved; sinfo -R", ""),
    ("PartitionDown|PartitionInactive", "the partition is down or inactive; ask an administrator", ""),
    ("PartitionTimeLimit", f"its time limit is above the partition's: {_LESS} --time_min", "cancel"),
    ("PartitionNodeLimit|PartitionConfig", f"no node of the partition is large enough: {_LESS}", "cancel"),
    ("BadConstraints", "no node meets its constraints: cancel, and change SBATCH_CONSTRAINT", "cancel"),
    ("Reservation", "its reservation has not begun", ""),
    ("Invalid(Account|QOS)|(Account|QOS)NotAllowed", "change --account or SBATCH_QOS", "cancel"),
    (r"(Assoc|QOS)\w*(PerJob|MaxWall)", f"it is above a limit of the account or QOS: {_LESS}", "cancel"),
    (r"(Assoc|QOS)Grp\w*RunMin", "the account or QOS runs as much as it allows", ""),
    (r"(Assoc|QOS)Grp\w*Minutes", "no hours are left: cancel, and change --account or SBATCH_QOS", "cancel"),
    ("Assoc|QOS|MaxMem", "a limit of the account, the QOS or of memory is reached", ""),
)


def meaning_of(reason: str) -> tuple[str, str]:
    """Return the meaning of a reason, and ``release``, ``cancel`` or ``ask`` if a person must act.

    squeue joins the reasons of an array's waiting tasks by commas, such as ``JobArrayTaskLimit,JobHeldUser``.
    """
    meanings: list[str] = []
    actions: list[str] = []
    for each in reasons_of(reason):
        for pattern, meaning, action in _REASONS:
            if re.match(pattern, each):
                meanings.append(meaning)
                actions.append(action)
                break
    shown = meanings[:1] + [f"some are {meaning}" for meaning in meanings[1:] if meaning.startswith("held")]
    action = next((action for action in actions if action), "")
    if len(actions) > 1 and action == "ask" and os.geteuid() == 0:
        action = "release"  # this user is an administrator
    return "; ".join(shown), action


def reasons_of(reason: str) -> list[str]:
    """Return the reasons that squeue joined. A comma before a blank is a part of one reason."""
    return re.split(r",(?=[A-Z][A-Za-z]+(?:,|$|\())", reason)


def job_name_prefix(folder: Path, plan_id: str) -> str:
    """Return the prefix of the names of a data set's jobs; the number of the submission follows it."""
    return f"{JOB_NAME}-{plan_id[:12]}-{job_files.folder_identity(DataFolder(folder))}-"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or the last start of an array's task, as squeue shows it."""

    job_id: str
    index: int  # 0 for a job that is not an array
    name: str
    user: str
    submit_time: str  # by the controller's clock, in UTC: 2026-11-22T01:52:04
    state: str  # Slurm's: RUNNING, FAILED, OUT_OF_MEMORY, ...
    num_restarts: int = 0
    reason: str = ""
    start_time: str = ""  # local; while the job waits, when the scheduler expects it to start, or ""
    exit_code: int = 0
    node: str = ""
    elapsed_s: int = 0
    time_limit: str = ""  # as Slurm writes it, such as 1:00:00; "" without a limit

    @property
    def key(self) -> tuple[str, int]:
        """Return job and index, as a record names the task."""
        return self.job_id, self.index

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def waits_for(self) -> str:
        """Return Slurm's reason for waiting, or "suspended", or ""."""
        other = "suspended" if self.state in _SUSPENDED else ""
        return self.reason if self.is_waiting else other

    @property
    def is_live(self) -> bool:
        """Return whether it waits, runs or is suspended."""
        return self.state not in _ENDED

    @property
    def state_of_shards(self) -> StateName:
        return "pending" if self.is_waiting else "running" if self.is_live else "failed"


def _exit_code(text: str) -> int:
    """Parse ``65:0`` (squeue from 23.02 on) or the wait status ``16640`` into a shell's exit code."""
    match = re.fullmatch(r"([0-9]{0,10})(?::([0-9]{1,3}))?", text)
    if not match:
        raise ValueError(f"exit code {text[:40]!r}")
    code, killed_by = int(match[1] or 0), int(match[2] or 0)
    if match[2] is None:
        code, killed_by = code >> 8, code & 0x7F
    if killed_by == LOG_NOT_OPENED - 128:
        return LOG_NOT_OPENED
    return code or (128 + killed_by if killed_by else 0)


def _local_time(text: str) -> str:
    """Convert a time of Slurm in UTC, ``2026-11-22T01:52:04``, to the local time zone, or return ""."""
    try:
        return datetime.strptime(f"{text}+0000", f"{_TIME}%z").astimezone().strftime(_TIME)
    except ValueError:
        return ""


# Field of squeue --Format -> field of Job.
_FIELDS = {
    "ArrayJobID": "job_id", "ArrayTaskID": "index", "State": "state", "Reason": "reason",
    "exit_code": "exit_code", "NodeList": "node", "TimeUsed": "elapsed_s", "JobID": "", "UserName": "user",
    "SubmitTime": "submit_time", "StartTime": "start_time", "TimeLimit": "time_limit",
    "RestartCnt": "num_restarts", "Name": "name",
}  # fmt: skip


def parse_queue(text: str) -> list[Job]:
    """Parse squeue's lines into jobs, one for each waiting task. Raises ValueError."""
    jobs = []
    for line in text.splitlines():
        values = line.split("|", len(_FIELDS))
        if len(values) <= len(_FIELDS):
            raise ValueError(f"{len(values) - 1} of {len(_FIELDS)} fields in {line[:200]!r}")
        facts: dict[str, Any] = dict(zip(_FIELDS.values(), values, strict=False))
        del facts[""]
        if not re.fullmatch(r"[0-9]{1,10}", facts["job_id"]):
            raise ValueError(f"job id {facts['job_id'][:40]!r}")
        facts["state"] = facts["state"].split(" ")[0]  # CANCELLED by 0
        facts["num_restarts"] = int(facts["num_restarts"])
        facts["start_time"] = _local_time(facts["start_time"])
        facts["exit_code"] = _exit_code(facts["exit_code"])
        facts["elapsed_s"] = seconds_of(facts["elapsed_s"]) or 0
        facts["time_limit"] = facts["time_limit"] if seconds_of(facts["time_limit"]) else ""
        facts["node"] = "" if facts["node"].startswith("None") else facts["node"]
        jobs += [Job(**{**facts, "index": index}) for index in _indices(facts["index"])]
    return jobs


def _indices(text: str) -> list[int]:
    """Parse ``[3-5,9%2]`` into [3, 4, 5, 9]. A job that is not an array gives [0]."""
    if text in ("", "N/A"):
        return [0]
    parts = text.strip("[]").partition("%")[0].split(",")
    own = [each for each in parts if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", each)]  # longer: not ours
    return ids_of_ranges(",".join(own), end=MAX_SHARDS + 1) if own else []


def jobs_of_user(user: str) -> list[Job]:
    """Return a user's jobs as squeue shows them. Raises SlurmAway, also if squeue refuses to answer."""
    layout = ",".join(f"{name}:|" for name in _FIELDS)
    command = ("squeue", "--noheader", f"--user={user}", "--states=all", "--Format", layout)
    try:
        return slurm_answer(parse_queue, *command)
    except SlurmRefused as error:
        if "Invalid user" in str(error):  # the user's account was deleted
            return []
        raise SlurmAway(found=error.found) from None


@dataclass(kw_only=True)
class Queue:
    """The jobs of a data set, as Slurm shows them."""

    # (number of the submission or PLAIN, job id, index in the array) -> job
    jobs: dict[tuple[int, str, int], Job] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)  # id of a job that is not visible -> why not
    controllers: list[str] = field(default_factory=list)  # ids of jobs of --until_done
    unrecorded: list[str] = field(default_factory=list)  # ids of this user's live jobs without a record
    foreign: list[str] = field(default_factory=list)  # live jobs of the folder that this one was copied from
    away: str = ""  # why Slurm did not answer
    config: dict[str, str] = field(default_factory=dict)  # of the controller

    def tasks(self) -> dict[tuple[str, int], Job]:
        """Return (job id, index), the key of a record, -> the last start of the task."""
        return {job.key: job for job in self.jobs.values()}


def find_queue(
    folder: Path,
    plan_id: str,
    submissions: Sequence[Submission],
    copied: Sequence[Submission],
    open_records: Sequence[AttemptRecord],
    config: dict[str, str],
) -> Queue:
    """Ask squeue for the jobs of each user who may have jobs for the data set. Raises SlurmAway.

    ``copied``: submissions of the folder that this one was copied from. ``config``: of the controller, or {}.
    """
    me = user_name()
    recorded = {job.job_id for sent in submissions for job in sent.jobs if sent.is_own}
    of_all = {job.job_id for sent in submissions for job in sent.jobs}
    plain = {
        each.key: each for each in open_records if each.job_id not in (recorded if each.is_own else of_all)
    }
    users = {me, *(each.user for each in (*submissions, *copied)), *(each.user for each in plain.values())}
    is_expected = any(each.user == me for each in open_records)
    shown: list[Job] = []
    for user in sorted(users - {""}):
        jobs_shown = jobs_of_user(user)
        if not jobs_shown and user == me and is_expected:
            # A busy slurmctld may answer with nothing for a moment, and tasks should be running.
            sleep(_ASK_AGAIN_S)
            jobs_shown = jobs_of_user(user)
        shown += jobs_shown
    own = [each for each in shown if each.user == me and each.is_live and each.job_id not in recorded]
    if not config and (submissions or copied or users - {me, ""}):
        config = read_config()
    queue = Queue(config=config)

    for sent in submissions:
        queue.jobs |= {(sent.number, *each.key): each for each in _jobs_of(sent, shown, me)}
    for sent in copied:
        queue.foreign += [job.job_id for job in _jobs_of(sent, shown, me) if job.is_live]

    # Tasks of plain sbatch: those with an open record, and this user's other tasks of the same arrays.
    began = {(each.job_id, each.user): each.began for each in plain.values() if each.is_own}
    own_keys = {each.key for each in own}
    for job in shown:
        record = plain.get(job.key)
        is_plain = record is not None and _is_start_of(record, job, me)
        if not is_plain and job.key in own_keys:
            # A task of this array must have begun for this data set after the array was submitted.
            is_plain = job.submit_time <= _latest_submit_time(began.get((job.job_id, job.user), 0))
        if is_plain:
            queue.jobs[PLAIN, job.job_id, job.index] = job

    # Jobs that are not visible from here, so that their end is unknown.
    hides_users = re.search(r"\b(jobs|all)\b", config.get("PrivateData", ""))
    seen_users = {me, *(job.user for job in shown)}
    sent_jobs = [(job.job_id, sent.user, sent.cluster) for sent in submissions for job in sent.jobs]
    for job_id, user, cluster in [*sent_jobs, *((each.job_id, each.user, "") for each in plain.values())]:
        if cluster not in ("", config.get("ClusterName", "")):
            command = f"SLURM_CLUSTERS={cluster} {commands.on('status', folder)}"
            queue.hidden[job_id] = f"for jobs of cluster {cluster}, type: {command}"
        elif hides_users and user not in seen_users:
            queue.hidden[job_id] = f"this site shows the jobs of {user} only to {user}"

    # Jobs without a record are recognized by their names, and controllers by their records, too.
    known = {job_id for number, job_id, _ in queue.jobs if number == PLAIN}
    prefix = job_name_prefix(folder, plan_id)
    copied_prefixes = tuple(f"{JOB_NAME}-{plan_id[:12]}-{each.identity}-" for each in copied)
    jobs = {each.job_id: each for each in own if each.job_id not in known}
    identity = job_files.folder_identity(DataFolder(folder))
    sent_controllers = {}
    if jobs:
        for each in job_files.read_own_controllers(DataFolder(folder)):
            if each.identity == identity:
                sent_controllers[each.job_id] = each
    for job_id in sorted(jobs, key=int):
        job = jobs[job_id]
        is_controller = job.name.endswith(CONTROL)
        controller = sent_controllers.get(job_id)
        if controller and _is_sent_as(job, controller):
            queue.controllers.append(job_id)
        elif job.name.startswith(prefix):
            (queue.controllers if is_controller else queue.unrecorded).append(job_id)
        elif is_controller and job.name.startswith(copied_prefixes):
            queue.foreign.append(job_id)
    queue.foreign = sorted(set(queue.foreign), key=int)
    return queue


def _jobs_of(submission: Submission, jobs: Iterable[Job], me: str) -> list[Job]:
    """Return the jobs that belong to a submission. A record of another user names no job of this one."""
    own = {job.job_id: job for job in submission.jobs}
    found = []
    for job in jobs:
        sent = own.get(job.job_id)
        if sent is None or job.user != submission.user or (job.user == me and not submission.is_own):
            continue
        if _is_sent_as(job, sent):
            found.append(job)
    return found


def _is_sent_as(job: Job, sent: job_files.SentJob) -> bool:
    """Return whether a job with a recorded id is the recorded one: Slurm may use an id again."""
    is_same_time = job.submit_time == sent.submit_time
    is_later = job.num_restarts > 0 and job.submit_time > sent.submit_time
    # A user may have renamed the job, but not to a name of another submission.
    is_renamed = is_same_time and not job.name.startswith(f"{JOB_NAME}-")
    return (job.name == sent.name and (is_same_time or is_later)) or is_renamed


def _is_start_of(record: AttemptRecord, job: Job, me: str) -> bool:
    """Return whether a task with the id of an open record is the recorded one, or a later start of it.

    A record of another user names no job of this one.
    """
    if record.user != job.user or (job.user == me and not record.is_own):
        return False
    return job.num_restarts > record.num_restarts or job.submit_time <= _latest_submit_time(record.began)


def _latest_submit_time(began: float) -> str:
    """Return the latest time, as Slurm writes it, at which a job that began then was submitted."""
    return datetime.fromtimestamp(began + _CLOCKS_DIFFER_S, timezone.utc).strftime(_TIME)


# Why an attempt failed, and what to do. ----------------------------------------------------------------

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
VANISHED = "ended without a word (killed, or its node failed)"
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
    (
        r"^shardprep: node \S+: shards? \S+ ended with exit code 0$",
        NO_MANIFEST,
    ),  # a container that did nothing
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
_TAIL_BYTES = 16 << 10
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


def remedy_of(cause: str) -> str:
    """Return what to do about a cause, as a clause without a full stop."""
    return _REMEDIES.get(cause, f"look at its log; {_RESENT}")


def cause_of_record(record: AttemptRecord, shard_id: int) -> str:
    """Return why an attempt that ended or was killed did not make a shard."""
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
    return next((cause for words, cause in _CAUSES_IN_LOG if re.search(words, log, re.MULTILINE)), "")


def log_tail(path: Path, num_later: int = 0) -> str:
    """Return the end of a log before the last ``num_later`` starts of its task, or ""."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            parts = _BEGINS.split(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, ShardprepError):  # ValueError: a NUL in the name
        return ""
    return parts[-1 - num_later] if num_later < len(parts) else ""


def last_lines(log: str, number: int = 3) -> list[str]:
    """Return the last informative lines of a log. Lines of srun are left out unless it failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    if "srun failed" not in log:
        lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))] or lines
    return lines[-number:]


# Attempts and shards. ----------------------------------------------------------------------------------

_PRECEDENCE: tuple[StateName, ...] = ("running", "pending", "not visible", "failed")  # if attempts differ


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at some shards: a task of Slurm that waits, runs or ended, or a ``run`` on one machine."""

    state: StateName
    task: str  # JOB_INDEX, as Slurm writes it, or HOST-PID of a run
    shards: Sequence[int]
    submitted: float  # seconds since 1970; without a submission, when the attempt began
    log: str = ""
    record: AttemptRecord | None = None
    job: Job | None = None  # the same start of the same task, as Slurm shows it
    array: JobArray | None = None  # of an own submission; None for plain sbatch and run
    is_typed: bool = False  # a person's ``retry`` sent it
    owner: str = ""  # the user who wrote its record, if that is not this user

    def cause(self, shard_id: int) -> str | None:
        """Return why it did not make a shard, or None if it has not failed."""
        if self.state != "failed":
            return None
        if self.record:
            return cause_of_record(self.record, shard_id)
        return cause_of_job(self.job) if self.job else None

    def message(self, shard_id: int) -> str:
        """Return the worker's error message for a shard, or ""."""
        failure = self.record.failures.get(shard_id) if self.record else None
        return failure.reason if failure else ""

    @property
    def node(self) -> str:
        known = self.record or self.job
        return known.node if known else ""

    @property
    def ended(self) -> float:
        """Return when it ended, or else began, or 0 if neither is known."""
        return (self.record.ended or self.record.began) if self.record else 0.0

    @property
    def elapsed_s(self) -> int:
        """Return how long it has run, or 0 if that is not known."""
        if self.record and self.record.ended is not None:
            return round(self.record.ended - self.record.began)
        return self.job.elapsed_s if self.job else 0


@dataclass(kw_only=True)
class Shard:
    """The state of a shard, and the attempts at it, oldest first."""

    shard_id: int
    state: StateName
    attempts: list[Attempt] = field(default_factory=list)
    without_record: str = ""  # JOB_INDEX of a task for it that ended and left no record

    @property
    def cause(self) -> str | None:
        """Return why the last attempt failed."""
        return self.attempts[-1].cause(self.shard_id) if self.state == "failed" else None


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """A data set between plan and verify."""

    folder: Path
    plan: Plan
    submissions: list[Submission]
    next_number: int  # of a submission
    records: job_files.AttemptRecords
    made: MadeShards
    is_verified: bool
    shards: list[Shard]  # shard N at N
    queue: Queue

    @property
    def summary(self) -> str:
        return f"{len(self.made.done)} of {self.plan.num_shards} shards are done"

    @property
    def is_tried(self) -> bool:
        """Return whether anybody submitted jobs, or tried to make a shard that is not done."""
        return bool(self.submissions) or any(shard.attempts for shard in self.shards)

    def ids(self, *states: StateName) -> list[int]:
        """Return the shards in one of these states, ascending."""
        return [shard.shard_id for shard in self.shards if shard.state in states]

    def failed_by_cause(self) -> dict[str, list[Shard]]:
        """Return cause -> the shards whose last attempt ended so, the most frequent first."""
        found: dict[str, list[Shard]] = {}
        for shard_id in self.ids("failed"):
            found.setdefault(self.shards[shard_id].cause or "", []).append(self.shards[shard_id])
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def why_not_visible(self) -> str:
        """Return why the state of some jobs or runs is not known here."""
        runs = {
            f"a run on {each.node} (process {each.pid}) may still be running; look there"
            for each in self.records.own
            if each.ended is None and each.pid and each.is_alive() is None
        }
        return "; ".join(sorted({*self.queue.hidden.values(), *runs, *self.records.unreadable}))

    def live_job_ids(self) -> list[str]:
        """Return the recorded jobs that wait or run, verify jobs included."""
        return sorted({job_id for (_, job_id, _), job in self.queue.jobs.items() if job.is_live}, key=int)

    def jobs_that_make_shards(self) -> list[str]:
        """Return the recorded jobs that wait or run, without verify jobs."""
        verify_ids = {sent.verify.job_id for sent in self.submissions}
        return [each for each in self.live_job_ids() if each not in verify_ids]

    def jobs_to_wait_for(self) -> list[str]:
        """Return all live jobs except the verify jobs of earlier submissions, which change nothing."""
        obsolete = {each.verify.job_id for each in self.submissions[:-1]}
        live = (*self.live_job_ids(), *self.queue.unrecorded, *self.queue.controllers)
        return [each for each in live if each not in obsolete]


def find_state(
    folder: Path,
    plan: Plan,
    *,
    needs_slurm: bool = True,
    before: DatasetState | None = None,
    see: Callable[[Manifest], None] | None = None,
) -> DatasetState:
    """Combine manifests, records and Slurm's queue. Raises BrokenShard, ReadWriteError, SlurmAway.

    If Slurm does not answer and ``needs_slurm`` is False, shards that may be in a job are ``not visible``.
    Shards done in an earlier state ``before`` are not read again. ``see`` is passed to ``find_made_shards``.
    """
    identity, unreadable = job_files.folder_identity(DataFolder(folder)), list[str]()
    try:
        sent = job_files.read_submissions(DataFolder(folder))
    except ReadWriteError as error:
        if needs_slurm or "Permission denied" not in str(error):
            raise
        sent, unreadable = [], [str(error)]
    submissions = [each for each in sent if each.identity == identity]
    copied = [each for each in sent if each.identity != identity]  # this folder is a copy of another one

    known = before.made if before else None
    records = job_files.read_attempts(DataFolder(folder), plan.plan_id, identity)
    open_records = [each for each in records.own if each.ended is None and each.job_id]
    found, queue = None, Queue()
    asks_slurm = bool(sent or open_records)
    if not asks_slurm:  # tasks of plain sbatch may wait, unless all shards are done
        found = find_made_shards(DataFolder(folder), plan.spec, known=known, see=see)
        asks_slurm = len(found.done) < plan.num_shards and shutil.which("squeue") is not None
    if asks_slurm:
        config = before.queue.config if before else {}
        try:
            queue = find_queue(folder, plan.plan_id, submissions, copied, open_records, config)
        except SlurmAway as error:
            if needs_slurm:
                raise
            ids = {job.job_id for each in submissions for job in each.jobs}
            ids |= {record.job_id for record in open_records}
            queue = Queue(hidden=dict.fromkeys(ids, "Slurm does not answer"), away=str(error))
    # Read records and manifests after asking Slurm: a task that it shows as ended has written them by then.
    listed = {each.path for each in records.own}
    now = job_files.read_attempts(DataFolder(folder), plan.plan_id, identity)
    records.own = [each for each in now.own if each.path in listed]
    records.unreadable = [*unreadable, *now.unreadable]
    if found is None or queue.jobs:
        found = find_made_shards(DataFolder(folder), plan.spec, known=known, see=see)
    _add_ends(records.own, queue, found)

    undone: StateName = "not visible" if records.unreadable else "not submitted"
    every = range(plan.num_shards)
    shards = [Shard(shard_id=each, state="done" if each in found.done else undone) for each in every]
    _add_attempts(shards, submissions, records.own, queue, folder)
    return DatasetState(
        folder=folder,
        plan=plan,
        submissions=submissions,
        next_number=max((each.number for each in sent), default=-1) + 1,
        records=records,
        made=found,
        is_verified=is_verified(DataFolder(folder), plan.spec, found),
        shards=shards,
        queue=queue,
    )


def _add_ends(records: Sequence[AttemptRecord], queue: Queue, made: MadeShards) -> None:
    """Add ends that only Slurm knows, from squeue for some minutes, and later from the end of the log."""
    tasks = queue.tasks()
    last_restart = _last_restarts(records, made)
    for record in (each for each in records if not each.stopped_by):
        job = _job_of(record, tasks)
        task = tasks.get(record.key)
        if task and not record.time_limit:  # a task that is killed cannot write it
            record.shown_limit = task.time_limit
        stopped_by, ended = "", record.began
        if job and (job.state in CAUSE_OF_STATE or (job.state == CANCELLED and record.ended is None)):
            stopped_by, ended = CAUSE_OF_STATE.get(job.state, CANCELLED), record.began + job.elapsed_s
        elif is_unexplained(record) and record.log and not queue.away and not (job and job.is_live):
            stopped_by = cause_in_log(record, last_restart[record.key] - record.num_restarts)
        if not stopped_by and job and job.state == COMPLETED and job.exit_code == 0 and record.ended is None:
            stopped_by, ended = NO_MANIFEST, record.began + job.elapsed_s
        if stopped_by:
            record.stopped_by = stopped_by
            record.ended = record.ended or ended
            if record.user == user_name():
                job_files.append_end(record)


def _last_restarts(records: Iterable[AttemptRecord], made: MadeShards) -> dict[tuple[str, int], int]:
    """Return the number of the last start of each task: of its records, or the one that made a shard."""
    last: dict[tuple[str, int], int] = {}
    for record in records:
        last[record.key] = max(record.num_restarts, last.get(record.key, 0))
    for manifest in made.done.values():
        slurm = manifest.run.slurm
        key = manifest.run.job_id, _number_of(slurm.get("SLURM_ARRAY_TASK_ID", ""))
        if key in last:  # that start removed its own record
            last[key] = max(_number_of(slurm.get("SLURM_RESTART_COUNT", "")), last[key])
    return last


def _number_of(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _job_of(record: AttemptRecord, tasks: dict[tuple[str, int], Job]) -> Job | None:
    """Return an attempt's job. squeue shows only the last start of a task, so earlier ones have none."""
    job = tasks.get(record.key)
    return job if job and job.num_restarts == record.num_restarts else None


def _add_attempts(
    shards: Sequence[Shard],
    submissions: Sequence[Submission],
    records: Sequence[AttemptRecord],
    queue: Queue,
    folder: Path,
) -> None:
    """Add the attempts at each shard that is not done, oldest first, and set its state by them."""
    tasks = queue.tasks()
    arrays = {array.job_id: (each, array) for each in submissions if each.is_own for array in each.arrays}
    submitted_at = {job.job_id: each.submitted for each in submissions for job in each.arrays}
    found: list[Attempt] = []
    for record in records:
        job = _job_of(record, tasks)
        # Order attempts by submission, because the clocks of nodes may differ.
        submitted = submitted_at.get(record.job_id, record.began)
        own_submission, array = arrays.get(record.job_id, (None, None)) if record.is_own else (None, None)
        if own_submission:
            submitted = own_submission.submitted
        found.append(
            Attempt(
                state=_state_of_record(record, job, is_hidden=record.job_id in queue.hidden),
                task=f"{record.job_id}_{record.index}" if record.job_id else f"{record.node}-{record.pid}",
                shards=record.shards,
                submitted=submitted,
                log=record.log,
                record=record,
                job=job,
                array=array,
                is_typed=own_submission is not None and own_submission.is_typed,
                owner="" if record.is_own else record.owner,
            )
        )

    # Tasks without a record wait, have just begun, or could not begin.
    recorded = {record.key for record in records}
    recorded_starts = {(*record.key, record.num_restarts) for record in records}

    def has_record(job: Job | None, key: tuple[str, int]) -> bool:
        if job and job.is_live:
            return (*key, job.num_restarts) in recorded_starts
        return key in recorded

    for submission in submissions:
        for array in submission.arrays:
            for index, shard_ids in enumerate(array.shards_of_tasks()):
                job = queue.jobs.get((submission.number, array.job_id, index))
                if has_record(job, (array.job_id, index)):
                    continue
                task = f"{array.job_id}_{index}"
                if job and (job.is_live or cause_of_job(job)):
                    state = job.state_of_shards
                elif job is None and array.job_id in queue.hidden:
                    state = "not visible"
                else:  # it ended without a record, and Slurm does not know why
                    for shard_id in shard_ids:
                        if shard_id < len(shards):
                            shards[shard_id].without_record = task
                    continue
                found.append(
                    Attempt(
                        state=state,
                        task=task,
                        shards=shard_ids,
                        submitted=submission.submitted,
                        log=f"{folder}/{LOGS_FOLDER}/{task}.log",
                        job=job,
                        array=array if submission.is_own else None,
                        is_typed=submission.is_own and submission.is_typed,
                        owner="" if submission.is_own else submission.user,
                    )
                )
    for (number, job_id, index), job in queue.jobs.items():
        if number == PLAIN and job.is_live and not has_record(job, job.key):
            task, state = f"{job_id}_{index}", job.state_of_shards
            found.append(Attempt(state=state, task=task, shards=[index], submitted=math.inf, job=job))

    for attempt in sorted(found, key=lambda each: each.submitted):
        for shard_id in attempt.shards:
            if shard_id < len(shards) and shards[shard_id].state != "done":
                shards[shard_id].attempts.append(attempt)
    for shard in shards:
        states = {each.state for each in shard.attempts}
        shard.state = next((state for state in _PRECEDENCE if state in states), shard.state)
        if shard.state != "not submitted":
            shard.without_record = ""


def _state_of_record(record: AttemptRecord, job: Job | None, *, is_hidden: bool) -> StateName:
    if record.ended is not None:
        return "failed"
    if record.pid:  # a ``run`` on one machine
        is_alive = record.is_alive()
        if is_alive is None:
            return "not visible"
        return "running" if is_alive else "failed"
    if job is None:
        return "not visible" if is_hidden else "failed"
    return "running" if job.state_of_shards == "running" else "failed"
