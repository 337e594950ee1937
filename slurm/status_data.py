"""The facts about a data set between plan and verify, as ``status`` shows them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

from shardprep.format.attempts import AttemptRecord
from shardprep.format.data_folder import DataFolder
from shardprep.format.jobs import read_events
from shardprep.format.manifest import Manifest, sum_of_sources
from shardprep.format.names import id_ranges
from slurm.attempts import Shard
from slurm.causes import BAD_INPUT, NODE_FAIL, VANISHED, cause_of_record, remedy_of
from slurm.log_ends import last_lines, log_tail
from slurm.retry_rules import why_not_retried
from slurm.speed import speed_of
from slurm.squeue import StateName
from slurm.state import DatasetState
from slurm.waits import Wait, controller_trouble, lost_controller, verify_trouble, waits_of

T = TypeVar("T")
STATUS_VERSION = 4  # of --json: increased when a field is removed or changes its meaning
_NEEDED_BAD_FRACTION = r"--max_bad_fraction ([0-9.]+)"  # in the message about too many bad documents
MAX_FAILURES = 8  # shown with the last lines of their logs


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The last attempt at a failed shard."""

    task: str
    node: str
    log: str
    ended: float  # seconds since 1970, 0 if unknown
    shard: int
    cause: str | None
    message: str  # of the worker, or ""
    owner: str  # the user of the task, if that is another one
    num_attempts: int
    last_lines: list[str]  # of the log, for the newest few


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything that ``status`` prints: the fields of ``status --json``, see docs/json.md.

    Shards are written as ranges, such as ``0-2,5``.
    """

    format: str = "shardprep-status"
    version: int = STATUS_VERSION
    folder: str
    num_shards: int
    # Each shard is in one of these.
    done: str
    running: str
    pending: str
    failed: str
    not_submitted: str
    not_visible: str
    num_done: int
    num_running: int
    num_pending: int
    num_failed: int
    num_not_submitted: int
    num_not_visible: int
    # Failures.
    causes: dict[str, str]  # cause -> shards
    remedies: dict[str, str]  # cause -> what to do
    can_retry: str  # what ``retry`` without flags sends
    not_begun: str  # of not_submitted: their task ended before it began
    failures: list[Failure]
    restarts: dict[str, int]  # how an attempt ended, after which Slurm started the task again -> tasks
    unexplained: str  # a sacct command for tasks whose end is in no record, or ""
    # Files.
    other_plan: str
    broken: dict[str, str]  # shard -> what its files lack
    wrong: str
    findings: dict[str, str]  # shard -> what verify found
    verify_trouble: str  # why the newest verify job did not verify, or ""
    verified: bool
    can_write: bool
    accepting_args: str  # worker_args that accept all shards of bad input, or ""
    unreadable: list[str]
    # Jobs.
    has_slurm: bool
    has_jobs: bool
    waits_for: list[Wait]
    unrecorded_jobs: list[str]
    foreign_jobs: list[str]
    controller_jobs: list[str]
    controller_trouble: str  # why a controller never begins by itself, or ""
    controller_lost: str
    slurm_away: str  # why Slurm did not answer, or ""
    why_not_visible: str
    history: list[dict[str, object]]  # events, see shardprep/format/jobs.py
    # Amounts.
    sources: dict[str, dict[str, int]]  # source -> its counts
    num_tokens: int
    tokens_per_s: int | None  # since the newest submission
    left_s: int | None  # until queued shards are made


def status_of(state: DatasetState) -> Status:
    """Return everything that ``status`` prints about a state."""
    ids: dict[str, list[int]] = {name: [] for name in get_args(StateName)}
    for shard in state.shards:
        ids[shard.state].append(shard.shard_id)
    failed = [state.shards[shard_id] for shard_id in ids["failed"]]
    by_cause = state.failed_by_cause()
    queue = state.queue
    history = read_events(DataFolder(state.folder))
    waits = waits_of(state)
    made = list(state.made.done.values())
    sources = sum_of_sources(each.counts.sources for each in made)
    tokens_per_s, left_s = speed_of(state, waits)
    return Status(
        folder=str(state.folder),
        num_shards=state.plan.num_shards,
        done=id_ranges(ids["done"]),
        running=id_ranges(ids["running"]),
        pending=id_ranges(ids["pending"]),
        failed=id_ranges(ids["failed"]),
        not_submitted=id_ranges(ids["not submitted"]),
        not_visible=id_ranges(ids["not visible"]),
        num_done=len(ids["done"]),
        num_running=len(ids["running"]),
        num_pending=len(ids["pending"]),
        num_failed=len(ids["failed"]),
        num_not_submitted=len(ids["not submitted"]),
        num_not_visible=len(ids["not visible"]),
        causes={cause: id_ranges(each.shard_id for each in shards) for cause, shards in by_cause.items()},
        remedies={cause: remedy_of(cause) for cause in by_cause},
        can_retry=id_ranges(each.shard_id for each in failed if not why_not_retried(each, {})),
        not_begun=id_ranges(shard.shard_id for shard in state.shards if shard.without_record),
        failures=_failures(failed),
        restarts=_restarts(state),
        unexplained=_unexplained(state),
        other_plan=id_ranges(state.made.other_plan),
        broken={str(shard_id): why for shard_id, why in state.made.broken.items()},
        wrong=id_ranges(state.made.wrong),
        findings={str(number): each.message for number, each in state.made.wrong.items()},
        verify_trouble=verify_trouble(state),
        verified=state.is_verified,
        can_write=os.access(state.folder, os.W_OK),
        accepting_args=_accepting_args(by_cause.get(BAD_INPUT, [])),
        unreadable=state.records.unreadable,
        has_slurm=shutil.which("sbatch") is not None,
        has_jobs=bool(state.submissions or any(each.job_id for each in state.records.of_this_folder)),
        waits_for=waits,
        unrecorded_jobs=queue.unrecorded,
        foreign_jobs=queue.foreign,
        controller_jobs=queue.controllers,
        controller_trouble=controller_trouble(state),
        controller_lost=lost_controller(state, history),
        slurm_away=queue.away,
        why_not_visible=state.why_not_visible(),
        history=history,
        sources={name: source.to_dict() for name, source in sources.items()},
        num_tokens=sum(each.counts.num_tokens for each in made),
        tokens_per_s=tokens_per_s,
        left_s=left_s,
    )


def _failures(failed: Sequence[Shard]) -> list[Failure]:
    """Return the last attempt at each failed shard. The newest few include the end of their log."""
    newest = {id(shard) for shard in newest_failures(failed, lambda shard: shard.attempts[-1].ended)}
    failures = []
    for shard in failed:
        last = shard.attempts[-1]
        message = last.message(shard.shard_id)
        lines = [message] if message else []
        if not message and last.log and id(shard) in newest:
            lines = last_lines(log_tail(Path(last.log)))
        failure = Failure(
            task=last.task,
            node=last.node,
            log=last.log,
            ended=last.ended,
            shard=shard.shard_id,
            cause=shard.cause,
            message=message,
            owner=last.owner,
            num_attempts=sum(attempt.state == "failed" for attempt in shard.attempts),
            last_lines=lines,
        )
        failures.append(failure)
    return failures


def newest_failures(failed: Sequence[T], ended: Callable[[T], float]) -> list[T]:
    """Return the few failures that ended last, which people are shown, in the given order."""
    places = sorted(range(len(failed)), key=lambda place: ended(failed[place]), reverse=True)
    return [failed[place] for place in sorted(places[:MAX_FAILURES])]


def _restarts(state: DatasetState) -> dict[str, int]:
    """Count the attempts after which Slurm started the task again, by how they ended."""
    attempts = [each for each in state.records.of_this_folder if each.job_id and each.shards]
    last = {each.key: each for each in attempts}
    restarts: Counter[str] = Counter()
    for each in attempts:
        # A later attempt has a record, or it made the shards and removed its record.
        if last[each.key] is each and not _was_made_by_its_job(each, state.made.done):
            continue
        cause = cause_of_record(each, each.shards[0])
        restarts[f"{cause} on {each.node}" if cause == NODE_FAIL else cause] += 1
    return dict(restarts)


def _was_made_by_its_job(attempt: AttemptRecord, done: Mapping[int, Manifest]) -> bool:
    """Return whether a later start of the task made all shards of an attempt."""
    for shard_id in attempt.shards:
        manifest = done.get(shard_id)
        if manifest is None or manifest.run.job_id != attempt.job_id:
            return False
    return True


def _unexplained(state: DatasetState) -> str:
    """Return a sacct command for tasks whose end is not in any record, or ""."""
    tasks = set()
    for shard in state.shards:
        if shard.without_record:
            tasks.add(shard.without_record)
        elif shard.state == "failed" and shard.cause == VANISHED:
            last = shard.attempts[-1]
            if last.record and last.record.job_id:
                tasks.add(last.task)
    if not tasks:
        return ""
    listed = shlex.quote(",".join(sorted(tasks)[:MAX_FAILURES]))
    return f"sacct -D -j {listed} --format=JobID,State,ExitCode,NodeList,Elapsed,MaxRSS"


def _accepting_args(failed: Sequence[Shard]) -> str:
    """Return worker_args with a --max_bad_fraction that accepts all these shards of bad input, or ""."""
    needed: list[float] = []
    for shard in failed:
        message = shard.attempts[-1].message(shard.shard_id)
        needed += map(float, re.findall(_NEEDED_BAD_FRACTION, message))
    if not needed or max(needed) >= 1:
        return ""  # the input is bad in another way, or nothing would be left
    request = failed[0].attempts[-1].request
    args = request.worker_args if request else ""  # if it has this flag, too, the later one counts
    return f"{args} --max_bad_fraction {max(needed):g}".strip()
