"""O/jobs/NNNN.json: one immutable file a submission, index -> shards of every array, and the job ids.

A submission is two-phased, so that no job runs unrecorded: its arrays are submitted *held*, the file is
published by link (first wins), then they are released. Killed in between, a submission leaves held jobs
that do nothing. The price is one more round trip to the controller, some 20 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from preprocess.shard_format import (
    FORMAT_VERSION,
    BrokenShard,
    CannotWrite,
    ReadWriteError,
    ShardprepError,
    parse_json,
)
from preprocess.shard_format.published_file import PublishedFile, sync_folder
from preprocess.shard_plan import Plan
from slurm.cluster_limits import minutes_of
from slurm.job_request import JobRequest
from slurm.sbatch_script import LOG_FOLDER, array_script, verify_script
from slurm.slurm_commands import slurm_output

JOBS_FOLDER = "jobs"
_FORMAT = "shardprep-submission"


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """One job array of a submission: task i makes the shards ``tasks[i]``."""

    job_id: str
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

    @property
    def job_ids(self) -> list[str]:
        return [*(array.job_id for array in self.arrays), self.verify_job_id]


def read_submissions(folder: Path) -> list[Submission]:
    """All submissions of a data set, oldest first. Raises BrokenShard for a file that is no submission."""
    found = []
    for path in sorted((folder / JOBS_FOLDER).glob("[0-9][0-9][0-9][0-9].json")):
        try:
            data = parse_json(path, path.read_bytes(), _FORMAT)
            found.append(_from_json(data))
        except OSError as error:
            raise ReadWriteError(f"{path} cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, BrokenShard) as error:
            raise BrokenShard(
                f"{path} is not a whole submission ({error}); move it away: it only records job ids"
            ) from None
    return found


def submit_arrays(
    folder: Path,
    plan: Plan,
    arrays: Sequence[tuple[JobRequest, Sequence[str]]],
    *,
    settings: Mapping[str, str],
    body: str,
    cluster: str,
    wait_for: Sequence[str] = (),
) -> Submission:
    """Submit arrays and a verify job after all of them, and after the jobs in ``wait_for``.

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
        for request, tasks in arrays:
            script = array_script(folder, tasks, request, settings=settings, body=body)
            submitted.append(_submit_held(script))
            job_arrays.append(_job_array(submitted[-1], request, tasks))
        script = verify_script(folder, arrays[0][0], settings=settings, body=body)
        submitted.append(_submit_held(script, f"--dependency=afterany:{':'.join([*submitted, *wait_for])}"))
        submission = Submission(
            number=0,
            plan_id=plan.plan_id,
            cluster=cluster,
            user=getpass.getuser(),
            submitted=round(time.time(), 3),
            arrays=job_arrays,
            verify_job_id=submitted[-1],
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
    return slurm_output("sbatch", "--parsable", "--hold", *options, text=script).strip().split(";")[0]


def ids_of_ranges(text: str) -> list[int]:
    """``0-2,5`` -> [0, 1, 2, 5]."""
    ids: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return ids


def _job_array(job_id: str, request: JobRequest, tasks: Sequence[str]) -> JobArray:
    shown = slurm_output("scontrol", "--oneliner", "show", "job", job_id)
    return JobArray(job_id=job_id, request=request, tasks=list(tasks), **granted(shown))


def granted(shown: str) -> dict[str, int | None]:
    """Memory and time of a task, as ``scontrol show job`` says them: what the site's defaults came to."""
    values = dict(re.findall(r"(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit)=(\S+)", shown))
    mem = re.match(r"([\d.]+)([KMGT]?)", values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0")
    assert mem
    mem_mb = int(float(mem[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[mem[2]])
    if "MinMemoryCPU" in values:
        mem_mb *= int(values.get("NumCPUs", "1").split("-")[0])
    return {"mem_mb": mem_mb or None, "time_min": minutes_of(values.get("TimeLimit", ""))}


def _publish(folder: Path, submission: Submission) -> Submission:
    """Give it the next free number; two who submit at once get two numbers."""
    jobs = folder / JOBS_FOLDER
    number = max((int(path.stem) for path in jobs.glob("[0-9][0-9][0-9][0-9].json")), default=-1) + 1
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


def _from_json(data: dict[str, Any]) -> Submission:
    data = {name: value for name, value in data.items() if name not in ("format", "version")}
    arrays = [JobArray(**{**item, "request": JobRequest(**item["request"])}) for item in data["arrays"]]
    return Submission(**{**data, "arrays": arrays})
