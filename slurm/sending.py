"""One submission on its way: its scripts, rendered once, are shown or sent as they are.

A submission has two phases, so that no job runs unrecorded: its arrays are submitted held, their record is
written to O/jobs, then they are released. If it is killed in between, there are held jobs that do nothing.
The price is one more round trip to the controller, some 20 ms. Of two submissions at once only one gets its
record written; the other one cancels its jobs, which have not begun.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from preprocess.attempts import folder_identity
from shardprep.atomic_files import publish_bytes
from shardprep.errors import CannotWrite, ReadWriteError, ShardprepError
from slurm.cluster_limits import minutes_of
from slurm.dataset_state import DatasetState
from slurm.job_records import JOBS_FOLDER, JobArray, Submission, publish_submission
from slurm.job_script import LOG_FOLDER, JobRequest
from slurm.slurm_commands import SlurmAway, SlurmRefused, is_federated, slurm_answer, slurm_output

_MEM_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_RELEASE_DELAYS_S = (2, 5, 15)  # a controller that restarts is back in seconds


@dataclass(frozen=True, kw_only=True)
class ArrayToSend:
    """A job array before it is submitted, its script as sbatch will get it."""

    request: JobRequest
    tasks: list[str]
    script: str


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What one command is about to send."""

    state: DatasetState
    arrays: list[ArrayToSend]
    verify: str  # script of the verify job
    cluster: str
    sources: dict[str, str] = field(default_factory=dict)  # of the request's values

    @property
    def scripts(self) -> list[str]:
        return [*(array.script for array in self.arrays), self.verify]

    def send(self) -> Submission:
        """Submit the arrays held, and a verify job after them and after all jobs that are queued already.

        Then the record is written and all are released. If a step before the record fails, what was submitted
        is cancelled again. Raises SubmittedMeanwhile, CannotWrite, ReadWriteError, and what ``slurm_output``
        raises.
        """
        folder = self.state.folder
        try:
            (folder / JOBS_FOLDER / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{folder / JOBS_FOLDER} cannot be made: {error.strerror}") from None
        job_ids: list[str] = []
        try:
            submission = self._submit_all(job_ids)
            publish_submission(folder, submission)
        except BaseException:
            if job_ids:
                with contextlib.suppress(ShardprepError):
                    slurm_output("scancel", *job_ids)
            raise
        _keep_scripts(folder, submission, self.scripts)
        _release(job_ids)
        return submission

    def _submit_all(self, job_ids: list[str]) -> Submission:
        """Submit everything held; each id is appended to ``job_ids`` as soon as it is known."""
        # A federation would give the verify job to any of its clusters, and on another one than the array's
        # it does not wait for the array once it is released (seen on 22.05).
        here = [f"--clusters={self.cluster}"] if self.cluster and is_federated() else []
        arrays = []
        for array in self.arrays:
            job_ids.append(_submit_held(array.script, *here))
            shown = _show(job_ids[-1])
            arrays.append(
                JobArray(
                    job_id=job_ids[-1],
                    name=shown.name,
                    submit_time=shown.submit_time,
                    request=array.request,
                    tasks=array.tasks,
                    mem_mb=shown.mem_mb,
                    time_min=shown.time_min,
                )
            )
        verify_ids = {submission.verify_job_id for submission in self.state.submissions}
        live = self.state.live_jobs().get(self.cluster, [])
        queued = [job_id for job_id in live if job_id not in verify_ids]
        after = f"--dependency=afterany:{':'.join([*job_ids, *queued])}"
        job_ids.append(_submit_held(self.verify, *here, after))
        shown = _show(job_ids[-1])
        return Submission(
            number=self.state.next_number,
            plan_id=self.state.plan.plan_id,
            cluster=self.cluster,
            user=shown.user,
            submitted=round(time.time(), 3),
            arrays=arrays,
            verify_job_id=job_ids[-1],
            verify_name=shown.name,
            verify_submit_time=shown.submit_time,
            sources=self.sources,
            identity=folder_identity(self.state.folder),
        )


def _keep_scripts(folder: Path, submission: Submission, scripts: Sequence[str]) -> None:
    """O/jobs/0000-JOB.sh, for people: Slurm has copies of its own, and forgets them."""
    for job, script in zip(submission.jobs, scripts, strict=True):
        with contextlib.suppress(ShardprepError):
            publish_bytes(
                folder / JOBS_FOLDER / f"{submission.number:04d}-{job.job_id}.sh", script.encode("utf-8")
            )


def _release(job_ids: Sequence[str]) -> None:
    """Let recorded jobs begin; a controller that gives no answer is asked again."""
    ids = ",".join(job_ids)
    for delay_s in (*_RELEASE_DELAYS_S, None):
        try:
            slurm_output("scontrol", "release", ids)
        except (SlurmAway, SlurmRefused) as error:
            if re.search("already finished|Invalid job id", str(error)):
                raise SlurmRefused(
                    f"{error}. Somebody cancelled the jobs before they began; look at the status, then "
                    "submit again"
                ) from None
            if delay_s is None or isinstance(error, SlurmRefused):
                raise type(error)(
                    f"{error}. The jobs are recorded and wait, held; when the cause is mended: "
                    f"scontrol release {ids}"
                ) from None
            time.sleep(delay_s)
        else:
            return


def _submit_held(script: str, *options: str) -> str:
    """The id of a job that waits for its release."""
    try:
        said = slurm_output("sbatch", "--parsable", "--hold", *options, text=script)
    except SlurmAway as error:
        raise SlurmAway(
            f"{error}. Nothing was recorded. If Slurm took the job all the same, it waits, held, and does "
            "nothing: status names it, cancel ends it"
        ) from None
    job_id = said.strip().split(";")[0]  # ID, or ID;CLUSTER
    if not re.fullmatch(r"[0-9]{1,10}", job_id):
        raise ReadWriteError(
            f"sbatch answered {said[:80]!r}, expected a job id; the job waits, held, and does nothing: "
            "status names it, cancel ends it"
        )
    return job_id


@dataclass(frozen=True, kw_only=True)
class ShownJob:
    """What Slurm made of a job: its name, user and time of submission, a task's memory and time limit."""

    name: str
    user: str
    submit_time: str
    mem_mb: int | None
    time_min: int | None


def _show(job_id: str) -> ShownJob:
    return slurm_answer(parse_job, "scontrol", "--oneliner", "show", "job", job_id)


def parse_job(text: str) -> ShownJob:
    """``scontrol --oneliner show job`` -> the job. Raises ValueError where it is cut short or no job."""
    named = re.search(r"\bJobName=(.*?) UserId=([^\s(]+)\(", text)
    fields = r"\b(MinMemoryNode|MinMemoryCPU|NumCPUs|TimeLimit|SubmitTime)=(\S+)"
    values = dict(re.findall(fields, text))
    mem = re.fullmatch(
        r"(\d+(?:\.\d+)?)([KMGT]?)", values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0"
    )
    if not named or not mem or "SubmitTime" not in values:
        raise ValueError("no job's name, user, time of submission and memory")
    mem_mb = int(float(mem[1]) * _MEM_UNITS[mem[2]])
    if "MinMemoryCPU" in values:
        mem_mb *= int(values.get("NumCPUs", "1").split("-")[0])
    return ShownJob(
        name=named[1],
        user=named[2],
        submit_time=values["SubmitTime"],
        mem_mb=mem_mb or None,
        time_min=minutes_of(values.get("TimeLimit", "")),
    )
