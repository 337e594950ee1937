"""O/jobs/NNNN.json: one immutable file a submission, index -> shards of every array, and the job ids.

A submission is two-phased, so that no job runs unrecorded: its arrays are submitted *held*, the file is
published by link (first wins), then they are released. Killed in between, a submission leaves held jobs
that do nothing. The price is one more round trip to the controller, some 20 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from preprocess.plan import Plan
from shardprep.atomic_files import PublishedFile, sync_folder
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, ShardprepError, UsageError
from shardprep.format.names import FORMAT_VERSION, MAX_SHARDS
from slurm.checked_json import Fields, read_json
from slurm.cluster_limits import minutes_of
from slurm.job_script import LOG_FOLDER, JobRequest
from slurm.slurm_commands import slurm_answer, slurm_output

JOBS_FOLDER = "jobs"
_FORMAT = "shardprep-submission"
_MEM_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What makes a job this one: a controller that lost its state gives old ids to other jobs.

    The name, which has the plan's id, and the user are those that Slurm showed when it took the job,
    so that a site which renames jobs is followed.
    """

    job_id: str
    name: str
    user: str


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """One job array of a submission: task i makes the shards ``tasks[i]``."""

    job_id: str
    name: str
    request: JobRequest
    tasks: list[str]
    mem_mb: int | None  # what Slurm made of the request; None where it limits nothing
    time_min: int | None

    def shards_of_tasks(self) -> list[list[int]]:
        """The shard ids of every task."""
        return [ids_of_ranges(word) for word in self.tasks]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What one ``submit`` or ``retry`` sent to Slurm."""

    number: int
    plan_id: str
    cluster: str
    user: str
    submitted: float  # seconds since 1970
    arrays: list[JobArray]
    verify_job_id: str
    verify_name: str

    @property
    def jobs(self) -> list[JobIdentity]:
        """Its jobs, verify last."""
        named = [(array.job_id, array.name) for array in self.arrays]
        named.append((self.verify_job_id, self.verify_name))
        return [JobIdentity(job_id=job_id, name=name, user=self.user) for job_id, name in named]


@dataclass(frozen=True, kw_only=True)
class ArrayToSend:
    """A job array before it is submitted, its script as sbatch will get it."""

    request: JobRequest
    tasks: list[str]
    script: str


def read_submissions(folder: Path) -> list[Submission]:
    """All submissions of a data set, oldest first.

    Raises BrokenShard for a file that is no submission, ReadWriteError for what cannot be read: taken for
    none, it would have shards made a second time.
    """
    return [_read_submission(path) for path in _submission_paths(folder / JOBS_FOLDER)]


def _submission_paths(jobs: Path) -> list[Path]:
    try:
        names = os.listdir(jobs)  # noqa: PTH208 - glob() would say nothing of a folder that it may not read
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReadWriteError(
            f"{jobs} cannot be listed ({error.strerror}), so what was submitted is not known; it must be a "
            "folder that you can read"
        ) from None
    return [jobs / name for name in sorted(names) if re.fullmatch(r"[0-9]{4}\.json", name)]


def _read_submission(path: Path) -> Submission:
    try:
        return _from_fields(Fields(path, read_json(path)))
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be read: {error.strerror}") from None
    except BrokenShard as error:
        raise BrokenShard(
            f"{error}: it is not a whole submission; move it away: it only records job ids"
        ) from None


def submit_arrays(
    folder: Path,
    plan: Plan,
    arrays: Sequence[ArrayToSend],
    verify: str,
    *,
    cluster: str,
    wait_for: Sequence[str] = (),
) -> Submission:
    """Submit arrays and a verify job after all of them, and after the jobs in ``wait_for``.

    ``verify`` is the verify job's script. Scripts are sent as they are.

    What was submitted is cancelled again where a later step fails. Raises what sbatch or the folder
    give reason for.
    """
    try:
        (folder / JOBS_FOLDER / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{folder / JOBS_FOLDER} cannot be made: {error.strerror}") from None
    submitted: list[str] = []  # job ids
    job_arrays: list[JobArray] = []
    try:
        for array in arrays:
            submitted.append(_submit_held(array.script))
            shown = _show(submitted[-1])
            limits = {"mem_mb": shown.mem_mb, "time_min": shown.time_min}
            job_arrays.append(
                JobArray(
                    job_id=submitted[-1], name=shown.name, request=array.request, tasks=array.tasks, **limits
                )
            )
        submitted.append(_submit_held(verify, f"--dependency=afterany:{':'.join([*submitted, *wait_for])}"))
        shown = _show(submitted[-1])
        submission = Submission(
            number=0,
            plan_id=plan.plan_id,
            cluster=cluster,
            user=shown.user,
            submitted=round(time.time(), 3),
            arrays=job_arrays,
            verify_job_id=submitted[-1],
            verify_name=shown.name,
        )
        submission = _publish(folder, submission)
    except BaseException:
        with contextlib.suppress(ShardprepError):
            slurm_output("scancel", *submitted)
        raise
    slurm_output("scontrol", "release", ",".join(submitted))
    return submission


def _submit_held(script: str, *options: str) -> str:
    """The id of a job that waits for its release."""
    said = slurm_output("sbatch", "--parsable", "--hold", *options, text=script)
    job_id = said.strip().split(";")[0]  # ID, or ID;CLUSTER
    if not re.fullmatch(r"[0-9]{1,10}", job_id):
        raise ReadWriteError(
            f"sbatch answered {said[:80]!r}, expected a job id; the job waits, held, and does nothing: "
            "find it by squeue --me, end it by scancel"
        )
    return job_id


def ids_of_ranges(text: str) -> list[int]:
    """``0-2,5`` -> [0, 1, 2, 5], each below MAX_SHARDS. Raises ValueError for anything else."""
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if not match or len(ids) > MAX_SHARDS:
            raise ValueError(f"{text[:40]!r} is no list of ids such as 0-2,5")
        ids.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ids


@dataclass(frozen=True, kw_only=True)
class ShownJob:
    """What Slurm made of a job: its name and user, and a task's memory and time with the site's defaults."""

    name: str
    user: str
    mem_mb: int | None
    time_min: int | None


def _show(job_id: str) -> ShownJob:
    return slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_id)


def parse_job(text: str) -> ShownJob:
    """``scontrol --oneliner show job`` -> the job. Raises ValueError where it is cut short or no job."""
    named = re.search(r"\bJobName=(.*?) UserId=([^\s(]+)\(", text)
    values = dict(re.findall(r"\b(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit)=(\S+)", text))
    mem = re.fullmatch(
        r"(\d+(?:\.\d+)?)([KMGT]?)", values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0"
    )
    if not named or not mem:
        raise ValueError("no job's name, user and memory")
    mem_mb = int(float(mem[1]) * _MEM_UNITS[mem[2]])
    if "MinMemoryCPU" in values:
        mem_mb *= int(values.get("NumCPUs", "1").split("-")[0])
    return ShownJob(
        name=named[1],
        user=named[2],
        mem_mb=mem_mb or None,
        time_min=minutes_of(values.get("TimeLimit", "")),
    )


def _publish(folder: Path, submission: Submission) -> Submission:
    """Give it the next free number; two who submit at once get two numbers."""
    jobs = folder / JOBS_FOLDER
    number = max((int(path.stem) for path in _submission_paths(jobs)), default=-1) + 1
    while True:
        numbered = dataclasses.replace(submission, number=number)
        file = PublishedFile(jobs / f"{number:04d}.json")
        try:
            head = {"format": _FORMAT, "version": FORMAT_VERSION}
            data = {**head, **dataclasses.asdict(numbered)}
            file.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.sync()
            if file.publish_first():
                sync_folder(jobs)
                return numbered
        finally:
            file.discard()
        number += 1


def _from_fields(fields: Fields) -> Submission:
    """Raises BrokenShard for a missing field or one of another type."""
    head = fields.text("format"), fields.integer("version")
    if head != (_FORMAT, FORMAT_VERSION):
        expected = f"{_FORMAT} version {FORMAT_VERSION}"
        raise BrokenShard(f"{fields.path} is {head[0][:40]!r} version {head[1]}, expected {expected}")
    return Submission(
        number=fields.integer("number"),
        plan_id=fields.text("plan_id"),
        cluster=fields.text("cluster"),
        user=fields.text("user"),
        submitted=fields.number("submitted"),
        arrays=[_array_from_fields(item) for item in fields.objects("arrays")],
        verify_job_id=_job_id(fields, "verify_job_id"),
        verify_name=fields.text("verify_name"),
    )


def _array_from_fields(fields: Fields) -> JobArray:
    array = JobArray(
        job_id=_job_id(fields, "job_id"),
        name=fields.text("name"),
        request=_request_from_fields(fields.inner("request")),
        tasks=fields.texts("tasks"),
        mem_mb=fields.optional_integer("mem_mb"),
        time_min=fields.optional_integer("time_min"),
    )
    try:
        num_shards = sum(map(len, array.shards_of_tasks()))
    except ValueError as error:
        raise BrokenShard(f"{fields.path}: tasks: {error}") from None
    if num_shards > MAX_SHARDS:
        raise BrokenShard(f"{fields.path}: tasks are {num_shards} shards, expected at most {MAX_SHARDS}")
    return array


def _job_id(fields: Fields, name: str) -> str:
    job_id = fields.text(name)
    if not re.fullmatch(r"[0-9]{1,10}", job_id):
        raise BrokenShard(f"{fields.path}: {name} is {job_id[:40]!r}, expected a job's number")
    return job_id


def _request_from_fields(fields: Fields) -> JobRequest:
    try:
        return JobRequest(**fields.values(item.name for item in dataclasses.fields(JobRequest)))
    except UsageError as error:
        raise BrokenShard(f"{fields.path}: request: {error}") from None
