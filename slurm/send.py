"""``submit``: which shards go to Slurm, in which tasks, with which resources; and their way there.

First everything is checked and every script is rendered, once: what ``--dry_run`` prints is what
``Sending.send`` sends. A submission has two phases, so that no job runs unrecorded: its arrays are submitted
held, their record is written to O/jobs, then they are released. If it is killed in between, there are held
jobs that do nothing. The price is one more round trip to the controller, some 20 ms. Of two submissions at
once only one gets its record written; the other one cancels its jobs, which have not begun.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lustre
from preprocess.attempts import folder_identity
from preprocess.done_shards import find_made_shards
from preprocess.plan.cost_estimate import estimate_of
from shardprep.console import counted, quoted
from shardprep.errors import CannotWrite, ShardprepError
from shardprep.files import publish_bytes
from shardprep.format.names import id_ranges
from slurm.commands import (
    SlurmAway,
    SlurmRefused,
    is_federated,
    megabytes_of,
    minutes_of,
    slurm_answer,
    slurm_output,
)
from slurm.request import JobRequest
from slurm.resource_use import advice_of_makings, advice_of_plan, within
from slurm.script import (
    LOG_FOLDER,
    VERIFY,
    array_script,
    job_name,
    prep_script,
    settings_of,
    verify_script,
)
from slurm.site import (
    ClusterLimits,
    check_folder,
    check_request,
    find_limits,
    find_partition_limits,
    tasks_of_shards,
)
from slurm.state import DatasetState, find_state
from slurm.submissions import JOBS_FOLDER, JobArray, Submission, publish_submission

_RELEASE_DELAYS_S = (2, 5, 15)  # a controller that restarts is back in seconds
Group = tuple[JobRequest, list[int]]  # shards that are asked for in the same way


def prepare_submit(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    shard_ids: Container[int] | None = None,
    sources: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> tuple[DatasetState, Sending | None]:
    """Check everything and choose the missing shards that are not queued; None where there are none.

    ``shard_ids``: no others, and these also where it cannot be seen whether they run. A dry run only says so
    where Slurm gives no answer, and goes on without what Slurm would know.
    """
    plan = check_folder(folder, request, say)
    state = find_state(folder, plan, if_away=_warn(say) if dry_run else None)
    check_recorded(state)
    if queued := state.ids("running", "pending"):
        say(f"{counted(len(queued), 'shard')} wait or run already: {id_ranges(queued)}")
    missing = state.ids("failed", "not submitted")
    unseen = state.ids("not visible")
    if shard_ids is not None or (dry_run and state.shown.away):
        missing, unseen = sorted([*missing, *unseen]), []
    if unseen:
        say(
            f"left out: {len(unseen)} shards may wait or run where it cannot be seen from here "
            f"({state.why_not_visible()}); if they do not: --shards {id_ranges(unseen)}"
        )
    if shard_ids is not None:
        missing = [shard_id for shard_id in missing if shard_id in shard_ids]
    if not missing:
        return state, None
    for line in _room_lines(state, missing):
        say(line)
    groups = [(request, missing)]
    return state, prepare(state, groups, shards_per_task, say, sources=sources, dry_run=dry_run)


def _room_lines(state: DatasetState, shard_ids: Sequence[int]) -> list[str]:
    """What these shards need against quotas and free space; empty off Lustre, where nothing is asked.

    The need is measured on a sample of the input, as planning did: a second or two of CPU. Never raises.
    """
    if lustre.why_not_usable(state.folder):
        return []
    try:
        whole = estimate_of(state.plan, state.folder).output_bytes
    except (ShardprepError, OSError) as error:
        return [f"note: whether the shards will fit cannot be told: {error}"]
    sizes = state.plan.shard_bytes()
    part = sum(sizes[shard_id] for shard_id in shard_ids) / max(1, sum(sizes))
    need = lustre.Need(num_bytes=round(whole * part), num_shards=len(shard_ids))
    return lustre.space_lines(state.folder, need)


def check_recorded(state: DatasetState) -> None:
    """Raises SlurmRefused where jobs run of which nobody can say what they make: it would be made twice."""
    if state.shown.unrecorded:
        raise SlurmRefused(
            f"jobs {', '.join(state.shown.unrecorded)} of this data set wait or run, and no file in "
            f"{state.folder / JOBS_FOLDER} says which shards they make (was it emptied?); wait until they "
            f"have ended, or end them: shardprep cancel {quoted(state.folder)}"
        )


def prepare(
    state: DatasetState,
    groups: Sequence[Group],
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    sources: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Sending:
    """Preflight of every group against the site. Writes and submits nothing."""
    if_away = _warn(say) if dry_run else None
    body, folder = prep_script(), state.folder
    name = job_name(folder, state.plan.plan_id, state.next_number)
    arrays: list[ArrayToSend] = []
    cluster = ""
    for request, shard_ids in groups:
        limits = _limits(request, if_away)
        per_task = shards_per_task
        if request.num_cpus is None and limits and per_task is None:  # a process on each of the node's CPUs
            partition = find_partition_limits(request)
            per_task = partition.max_cpus if partition else None
        tasks = _tasks(shard_ids, limits, len(groups), per_task, say)
        settings = settings_of(request, os.environ, sys.executable)
        script = array_script(folder, name, tasks, request, settings=settings, body=body)
        if limits:
            cluster = limits.cluster
            check_request(request, script, say)
        arrays.append(ArrayToSend(request=request, tasks=tasks, script=script))
    first = groups[0][0]
    settings = settings_of(first, os.environ, sys.executable)
    num_shards = state.plan.num_shards
    verify = verify_script(folder, name + VERIFY, num_shards, first, settings=settings, body=body)
    return Sending(state=state, arrays=arrays, verify=verify, cluster=cluster, sources=dict(sources or {}))


def advised(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    has_cpus: bool,
) -> tuple[dict[str, Any], str]:
    """What ``--auto`` asks for: CPUs, memory and time of a task, and what that was taken from.

    ``has_cpus``: the request's CPUs were given; memory and time are then what a task of these needs.
    """
    plan = check_folder(folder, request, say)
    made = find_made_shards(folder, plan).done
    limits = _limits(request, _warn(say))
    num_left = plan.num_shards - len(made)
    most = limits.max_tasks if limits else num_left
    partition = find_partition_limits(request) if limits else None
    num_cpus = None
    if has_cpus:
        num_cpus = request.num_cpus or (partition.max_cpus if partition else None)
        if request.num_cpus is None:  # a whole node, which makes a shard on each of its CPUs
            shards_per_task = shards_per_task or num_cpus
    per_task = max(shards_per_task or 1, -(-num_left // max(1, most)), 1)
    if made:
        advice = advice_of_makings(list(made.values()), per_task, num_cpus, partition)
        return within(advice, partition), f"auto: {counted(len(made), 'finished shard')}"
    try:
        advice = advice_of_plan(plan, folder, per_task, num_cpus, partition)
        return within(advice, partition), "auto: a sample of the input"
    except (ShardprepError, OSError) as error:
        say(f"warning: --auto cannot measure the input from here ({error}); the defaults are taken")
        return {}, ""


def most_cpus(request: JobRequest) -> tuple[int, str] | None:
    """Return fewer CPUs than the default, and whose limit asks for them; None where the default fits."""
    try:
        limits = find_partition_limits(request)
    except SlurmAway:  # a dry run goes on without the site; a submission ends with this error later
        return None
    if (
        limits is None
        or not limits.max_cpus
        or request.num_cpus is None
        or limits.max_cpus >= request.num_cpus
    ):
        return None
    return limits.max_cpus, f"the most of {limits.whose('max_cpus')}"


def _limits(request: JobRequest, if_away: Callable[[SlurmAway], None] | None) -> ClusterLimits | None:
    """The site's limits; None where Slurm gives no answer and ``if_away`` was told so."""
    try:
        return find_limits(request)
    except SlurmAway as error:
        if if_away is None:
            raise
        if_away(error)
        return None


def _warn(say: Callable[[str], None]) -> Callable[[SlurmAway], None]:
    return lambda error: say(
        f"warning: {error}. What is queued, and what this site allows, is left out of this dry run"
    )


def _tasks(
    shard_ids: Sequence[int],
    limits: ClusterLimits | None,
    num_groups: int,
    shards_per_task: int | None,
    say: Callable[[str], None],
) -> list[str]:
    if limits is None:
        return tasks_of_shards(shard_ids, len(shard_ids), shards_per_task)
    # MaxArraySize bounds each array, every other limit all of them together
    most = limits.max_tasks if limits.why == "MaxArraySize" else limits.max_tasks // num_groups
    tasks = tasks_of_shards(shard_ids, max(1, most), shards_per_task)
    if len(tasks) < -(-len(shard_ids) // (shards_per_task or 1)):
        say(
            f"{len(shard_ids)} shards become {len(tasks)} tasks of up to "
            f"{-(-len(shard_ids) // len(tasks))} shards each, because of {limits.why}"
        )
    return tasks


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
            job_ids.append(submit_script(array.script, "--hold", *here, known=job_ids))
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
        job_ids.append(submit_script(self.verify, "--hold", *here, after, known=job_ids))
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


def submit_script(script: str, *options: str, known: Sequence[str] = ()) -> str:
    """Return the id of a new job; ``known``: the ids of this submission's other jobs.

    A site's sbatch may print a banner, so the id is looked for on the last line. Where it is not there, or no
    answer came, a job that Slurm took all the same is found by its name and cancelled.
    """
    try:
        said = slurm_output("sbatch", "--parsable", *options, text=script)
        last = (said.split("\n") if (said := said.strip()) else [""])[-1].strip()
        if found := re.fullmatch(r"([0-9]{1,10})(?:;\S+)?", last):  # ID, or ID;CLUSTER
            return found[1]
        why = f"sbatch answered {last[:80]!r}, expected a job id on the last line (--parsable)"
    except SlurmAway as error:
        why = str(error)
    raise SlurmAway(f"{why}. Nothing was recorded. {_cancel_by_name(script, known)}")


def _cancel_by_name(script: str, known: Sequence[str]) -> str:
    """Cancel this user's waiting job of the script's name, and say what was done."""
    name = re.findall(r"^#SBATCH --job-name=(.*)$", script, re.MULTILINE)[0]
    user = getpass.getuser()
    try:
        said = slurm_output(
            "squeue", "--noheader", f"--user={user}", f"--name={name}", "--states=PENDING", "--format=%A"
        )
        job_ids = sorted({*re.findall(r"^\s*([0-9]+)\s*$", said, re.MULTILINE)} - {*known})
        if job_ids:
            slurm_output("scancel", *job_ids)
            return f"{' and '.join(f'job {job_id}' for job_id in job_ids)} was cancelled before it began"
    except ShardprepError as error:
        return (
            f"Whether a job is left could not be seen ({error}); if there is one it waits, held, and does "
            f"nothing: squeue --me --name={name}, then scancel its number"
        )
    return (
        f"No job of the name {name} is there; if the site renames jobs, one may wait, held: squeue --me, "
        "then scancel its number"
    )


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
    mem_mb = megabytes_of(values.get("MinMemoryNode") or values.get("MinMemoryCPU") or "0")
    if not named or mem_mb is None or "SubmitTime" not in values:
        raise ValueError("no job's name, user, time of submission and memory")
    if "MinMemoryCPU" in values:
        mem_mb = int(mem_mb) * int(values.get("NumCPUs", "1").split("-")[0])
    return ShownJob(
        name=named[1],
        user=named[2],
        submit_time=values["SubmitTime"],
        mem_mb=int(mem_mb) or None,
        time_min=minutes_of(values.get("TimeLimit", "")),
    )
