"""``submit`` and ``retry``: which shards go to Slurm, with which resources, and in which order of steps.

First everything is checked and every script is rendered, once (``prepare_submit``, ``prepare_retry``): what
``--dry_run`` prints is what ``Sending.send`` sends. A submission has two phases, so that no job runs
unrecorded: its arrays are submitted held, their record is written to O/jobs, then they are released. If it
is killed in between, there are held jobs that do nothing. The price is one more round trip to the
controller, some 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lustre
from preprocess.cost_estimate import estimate_of
from shardprep.errors import CannotWrite, NotFound, ReadWriteError, ShardprepError, UsageError
from shardprep.format.names import id_ranges
from slurm.cluster_limits import (
    ClusterLimits,
    check_folder,
    check_request,
    find_limits,
    find_partition_limits,
    minutes_of,
    tasks_of_shards,
)
from slurm.dataset_state import (
    BAD_INPUT,
    NODE_FAIL,
    OUT_OF_MEMORY,
    TIMEOUT,
    DatasetState,
    ShardState,
    find_state,
)
from slurm.job_records import JOBS_FOLDER, JobArray, Submission, publish_submission
from slurm.job_script import LOG_FOLDER, JobRequest, array_script, prep_script, settings_of, verify_script
from slurm.slurm_queries import SlurmAway, slurm_answer, slurm_output

Group = tuple[JobRequest, list[int]]  # shards that are asked for in the same way
_MEM_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True, kw_only=True)
class ArrayToSend:
    """A job array before it is submitted, its script as sbatch will get it."""

    request: JobRequest
    tasks: list[str]
    script: str


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What one command is about to send: its scripts, rendered once, are shown or sent as they are."""

    state: DatasetState
    arrays: list[ArrayToSend]
    verify: str  # script of the verify job
    cluster: str

    @property
    def scripts(self) -> list[str]:
        return [*(array.script for array in self.arrays), self.verify]

    def send(self) -> Submission:
        """Submit the arrays held, and a verify job after them and after all jobs that are queued already.

        Then the record is written and all are released. If a step fails, what was submitted is cancelled
        again. Raises CannotWrite, ReadWriteError, and what ``slurm_output`` raises.
        """
        folder = self.state.folder
        try:
            (folder / JOBS_FOLDER / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{folder / JOBS_FOLDER} cannot be made: {error.strerror}") from None
        job_ids: list[str] = []
        try:
            submission = publish_submission(folder, self._submit_all(job_ids))
        except BaseException:
            with contextlib.suppress(ShardprepError):
                slurm_output("scancel", *job_ids)
            raise
        slurm_output("scontrol", "release", ",".join(job_ids))
        return submission

    def _submit_all(self, job_ids: list[str]) -> Submission:
        """Submit everything held; each id is appended to ``job_ids`` as soon as it is known."""
        arrays = []
        for array in self.arrays:
            job_ids.append(_submit_held(array.script))
            shown = _show(job_ids[-1])
            arrays.append(
                JobArray(
                    job_id=job_ids[-1],
                    name=shown.name,
                    request=array.request,
                    tasks=array.tasks,
                    mem_mb=shown.mem_mb,
                    time_min=shown.time_min,
                )
            )
        verify_ids = {submission.verify_job_id for submission in self.state.submissions}
        queued = [job_id for job_id in self.state.live_job_ids() if job_id not in verify_ids]
        job_ids.append(_submit_held(self.verify, f"--dependency=afterany:{':'.join([*job_ids, *queued])}"))
        shown = _show(job_ids[-1])
        return Submission(
            number=0,
            plan_id=self.state.plan.plan_id,
            cluster=self.cluster,
            user=shown.user,
            submitted=round(time.time(), 3),
            arrays=arrays,
            verify_job_id=job_ids[-1],
            verify_name=shown.name,
        )


def prepare_submit(
    folder: Path,
    request: JobRequest,
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> tuple[DatasetState, Sending | None]:
    """Check everything and choose the missing shards that are not queued; None where there are none.

    A dry run only says so where Slurm gives no answer, and goes on without what Slurm would know.
    """
    plan = check_folder(folder, request, say)
    state = find_state(folder, plan, if_away=_warn(say) if dry_run else None)
    if queued := state.ids("running", "pending"):
        say(f"{len(queued)} shards wait or run already: {id_ranges(queued)}")
    missing = state.ids("failed", "not submitted")
    if not missing:
        return state, None
    for line in room_lines(state, missing):
        say(line)
    return state, prepare(state, [(request, missing)], shards_per_task, say, dry_run=dry_run)


def room_lines(state: DatasetState, shard_ids: Sequence[int]) -> list[str]:
    """Whether these shards will fit where their data set stands; empty off Lustre. Never raises."""
    if not lustre.is_usable(state.folder):
        return []
    try:
        whole = estimate_of(state.plan, state.folder).output_bytes
    except (ShardprepError, OSError) as error:
        return [f"note: whether the shards will fit cannot be told: {error}"]
    sizes = state.plan.shard_bytes()
    part = sum(sizes[shard_id] for shard_id in shard_ids) / max(1, sum(sizes))
    need = lustre.Need(num_bytes=round(whole * part), num_files=3 * len(shard_ids))
    return lustre.space_lines(state.folder, need)


def prepare(
    state: DatasetState,
    groups: Sequence[Group],
    shards_per_task: int | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> Sending:
    """Preflight of every group against the site. Writes and submits nothing."""
    if_away = _warn(say) if dry_run else None
    body, plan_id = prep_script(), state.plan.plan_id
    arrays: list[ArrayToSend] = []
    cluster = ""
    for request, shard_ids in groups:
        limits = _limits(request, if_away)
        tasks = _tasks(shard_ids, limits, len(groups), shards_per_task, say)
        settings = settings_of(request, os.environ, sys.executable)
        script = array_script(state.folder, plan_id, tasks, request, settings=settings, body=body)
        if limits:
            cluster = limits.cluster
            check_request(request, script)
        arrays.append(ArrayToSend(request=request, tasks=tasks, script=script))
    first = groups[0][0]
    settings = settings_of(first, os.environ, sys.executable)
    verify = verify_script(state.folder, plan_id, first, settings=settings, body=body)
    return Sending(state=state, arrays=arrays, verify=verify, cluster=cluster)


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


def prepare_retry(
    state: DatasetState,
    changes: dict[str, Any],
    *,
    max_attempts: int,
    shards_per_task: int | None,
    say: Callable[[str], None],
) -> tuple[list[ShardState], Sending | None]:
    """What is missing and not queued, each as its failure asks; returns the shards left, too.

    ``changes`` are the request's fields that the user gave; they win over what a cause would change.
    """
    if not state.submissions:
        raise NotFound(
            f"nothing was submitted for {state.folder} yet; run: python -m slurm submit {state.folder}"
        )
    if max_attempts < 1:
        raise UsageError(f"--max_attempts is {max_attempts}, expected 1 or more")
    base = state.submissions[-1].arrays[0].request
    limits = find_partition_limits(base.changed(**changes))
    nodes = failing_nodes(state)
    groups: dict[JobRequest, list[int]] = {}
    left = []
    for shard in state.shards:
        if shard.state not in ("failed", "not submitted"):
            continue
        if reason_to_leave(shard, max_attempts, changes):
            left.append(shard)
            continue
        request = retry_request(shard, base, limits.max_mem_mb if limits else 0, nodes).changed(**changes)
        groups.setdefault(request, []).append(shard.shard_id)
    if not groups:
        return left, None
    for request in groups:
        check_folder(state.folder, request, say)
    return left, prepare(state, list(groups.items()), shards_per_task, say)


def reason_to_leave(shard: ShardState, max_attempts: int, changes: dict[str, Any]) -> str | None:
    """Why a shard is not tried again: it failed the same way too often, or must fail the same way."""
    if not shard.attempts:
        return None
    cause, last = shard.cause, shard.attempts[-1].array.request
    same = 0
    for attempt in reversed(shard.attempts):
        if attempt.cause != cause:
            break
        same += 1
    if cause == BAD_INPUT and changes.get("worker_args", last.worker_args) == last.worker_args:
        return "the same input fails in the same way"
    return f"failed the same way {same} times" if same >= max_attempts else None


def retry_request(
    shard: ShardState, base: JobRequest, max_mem_mb: int, failing: Sequence[str] = ()
) -> JobRequest:
    """The last attempt's request, with what its failure asks for.

    Memory is doubled after OUT_OF_MEMORY, up to ``max_mem_mb`` (of the largest node; 0 if not known), time
    is doubled after TIMEOUT, and the nodes in ``failing`` are excluded.
    """
    request = base
    if shard.attempts:
        last = shard.attempts[-1]
        request = last.array.request
        if last.cause == OUT_OF_MEMORY and last.array.mem_mb:
            mem_mb = min(2 * last.array.mem_mb, max_mem_mb or 2 * last.array.mem_mb)
            request = request.changed(mem_gb=round(mem_mb / 1024, 3))
        if last.cause == TIMEOUT and last.array.time_min:
            request = request.changed(time_min=2 * last.array.time_min)
    if failing:
        kept = (request.exclude or "").split(",") if "[" not in (request.exclude or "") else [request.exclude]
        names = dict.fromkeys(str(name) for name in [*kept, *failing] if name)
        request = request.changed(exclude=",".join(names))
    return request


def failing_nodes(state: DatasetState, at_least: int = 2) -> list[str]:
    """Nodes that took ``at_least`` tasks of this data set down with them."""
    counts = Counter(
        attempt.node
        for attempts in state.task_attempts.values()
        for attempt in attempts
        if attempt.state == NODE_FAIL and attempt.node
    )
    return sorted(node for node, number in counts.items() if number >= at_least)


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
