"""``retry``: which of the missing shards are sent again, and what each one's failure asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import datetime
from typing import Any

from shardprep.errors import NotFound, UsageError
from slurm.dataset_state import DatasetState, ShardState
from slurm.failure_causes import BAD_INPUT, NODE_FAIL, OUT_OF_MEMORY, TIMEOUT
from slurm.request import JobRequest
from slurm.script import quoted
from slurm.send import Sending, check_recorded, prepare
from slurm.site import check_folder, find_partition_limits
from slurm.slurm_queries import TaskAttempt

_TOGETHER_S = 600.0  # Slurm finds nodes of one power cut up to SlurmdTimeout (300 s) apart


def prepare_retry(
    state: DatasetState,
    changes: dict[str, Any],
    *,
    max_attempts: int,
    shards_per_task: int | None,
    say: Callable[[str], None],
    shard_ids: Container[int] | None = None,
) -> tuple[list[ShardState], Sending | None]:
    """What is missing and not queued, each as its failure asks; returns the shards left, too.

    What the last verify job found wrong is made anew. ``shard_ids``: no others.
    ``changes`` are the request's fields that the user gave; they win over what a cause would change.
    """
    check_recorded(state)
    if not state.submissions:
        raise NotFound(
            f"nothing was submitted for {state.folder} yet; run: shardprep submit {quoted(state.folder)}"
        )
    if max_attempts < 1:
        raise UsageError(f"--max_attempts is {max_attempts}, expected 1 or more")
    base = state.submissions[-1].arrays[0].request
    limits = find_partition_limits(base.changed(**changes))
    nodes = failing_nodes(attempt for each in state.task_attempts.values() for attempt in each)
    groups: dict[JobRequest, list[int]] = {}
    left = []
    for shard in state.shards:
        is_wanted = shard_ids is None or shard.shard_id in shard_ids
        if not is_wanted or not (shard.state in ("failed", "not submitted") or shard.shard_id in state.wrong):
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
    sources = {**state.submissions[-1].sources, **dict.fromkeys(changes, "given to retry")}
    broken = [shard_id for ids in groups.values() for shard_id in ids if shard_id in state.wrong]
    return left, prepare(state, list(groups.items()), shards_per_task, say, sources=sources, broken=broken)


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
            mem_gb = min(2 * last.array.mem_mb, max_mem_mb or 2 * last.array.mem_mb) / 1024
            if request.mem_per_cpu_gb is None:
                request = request.changed(mem_gb=round(mem_gb, 3))
            else:
                request = request.changed(mem_per_cpu_gb=round(mem_gb / (request.num_cpus or 1), 3))
        if last.cause == TIMEOUT and last.array.time_min:
            # somebody may have given it more meanwhile: scontrol update timelimit=
            request = request.changed(time_min=2 * max(last.array.time_min, round(last.elapsed_s / 60)))
    if failing:
        kept = (request.exclude or "").split(",") if "[" not in (request.exclude or "") else [request.exclude]
        names = dict.fromkeys(str(name) for name in [*kept, *failing] if name)
        request = request.changed(exclude=",".join(names))
    return request


def failing_nodes(attempts: Iterable[TaskAttempt], at_least: int = 2) -> list[str]:
    """Nodes that went down alone ``at_least`` times, with tasks of this data set: a retry leaves them out.

    A node that goes down takes all its tasks with it: that is one incident, however many tasks it had. A
    power cut takes many nodes at once: that is nobody's fault, and to leave them all out would leave none.
    """
    counts = Counter(next(iter(nodes)) for nodes in _incidents(attempts) if len(nodes) == 1)
    return sorted(node for node, number in counts.items() if number >= at_least)


def _incidents(attempts: Iterable[TaskAttempt]) -> list[set[str]]:
    """The nodes of each incident: what ended with NODE_FAIL within ten minutes of the one before."""
    failed = [each for each in attempts if each.state == NODE_FAIL and each.node]
    incidents: list[set[str]] = []
    last_s = float("-inf")
    for end_s, node in sorted((_seconds(each.end_time), each.node) for each in failed):
        if end_s - last_s > _TOGETHER_S or not incidents:
            incidents.append(set())
        incidents[-1].add(node)
        last_s = end_s
    return incidents


def _seconds(text: str) -> float:
    """Of Slurm's local time; all unknown times are one."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").timestamp()  # noqa: DTZ007 - one zone for all
    except ValueError:
        return 0.0
