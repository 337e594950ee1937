"""``retry``: which of the missing shards are sent again, and what each one's failure asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import datetime
from typing import Any

from shardprep.errors import NotFound, UsageError
from shardprep.format.names import id_ranges
from slurm.cluster_limits import check_folder, find_partition_limits
from slurm.dataset_state import DatasetState, ShardState, reason_to_leave
from slurm.failure_causes import NODE_FAIL, OUT_OF_MEMORY, TIMEOUT
from slurm.job_script import JobRequest, quoted
from slurm.sending import Sending
from slurm.slurm_queries import TaskAttempt
from slurm.submitting import check_recorded, prepare

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

    ``shard_ids``: no others.
    ``changes`` are the request's fields that the user gave; they win over what a cause would change.
    """
    check_recorded(state)
    tried = [shard for shard in state.shards if shard.attempts]
    if not state.submissions and not tried and state.ids("not submitted", "not visible"):
        raise NotFound(
            f"nothing was submitted for {state.folder} yet; run: shardprep submit {quoted(state.folder)}"
        )
    if max_attempts < 1:
        raise UsageError(f"--max_attempts is {max_attempts}, expected 1 or more")
    base = base_request(state)
    limits = find_partition_limits(base.changed(**changes))
    nodes = failing_nodes(attempt for each in state.task_attempts.values() for attempt in each)
    groups: dict[JobRequest, list[int]] = {}
    left = []
    if goes_on := [
        each for each in state.ids("running", "pending") if shard_ids is None or each in shard_ids
    ]:
        say(f"left out, as they wait or run (one that was cancelled may end just now): {id_ranges(goes_on)}")
    for shard in state.shards:
        is_wanted = shard_ids is None or shard.shard_id in shard_ids
        if not is_wanted or shard.state not in ("failed", "not submitted"):
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
    before = state.submissions[-1].sources if state.submissions else {}
    sources = {**before, **dict.fromkeys(changes, "given to retry")}
    return left, prepare(state, list(groups.items()), shards_per_task, say, sources=sources)


def base_request(state: DatasetState) -> JobRequest:
    """The newest submission's request; without one what a plain task had."""
    if state.submissions:
        return state.submissions[-1].arrays[0].request
    num_cpus = [each.num_cpus for each in state.attempts.own if each.job_id and each.num_cpus]
    return JobRequest(cpus_per_task=num_cpus[-1]) if num_cpus else JobRequest()


def retry_request(
    shard: ShardState, base: JobRequest, max_mem_mb: int, failing: Sequence[str] = ()
) -> JobRequest:
    """The last attempt's request, with what its failure asks for.

    Memory is doubled after OUT_OF_MEMORY, up to ``max_mem_mb`` (of the largest node; 0 if not known), time
    is doubled after TIMEOUT, and the nodes in ``failing`` are excluded.
    """
    last = shard.attempts[-1] if shard.attempts else None
    request = last.array.request if last and last.array else base
    mem_mb = (
        last.array.mem_mb if last and last.array else last.record.mem_mb if last and last.record else None
    )
    if last and last.cause == OUT_OF_MEMORY and mem_mb:
        mem_gb = min(2 * mem_mb, max_mem_mb or 2 * mem_mb) / 1024
        if request.mem_per_cpu_gb is None:
            request = request.changed(mem_gb=round(mem_gb, 3))
        else:
            request = request.changed(mem_per_cpu_gb=round(mem_gb / (request.num_cpus or 1), 3))
    if last and last.cause == TIMEOUT:
        # Somebody may have given it more meanwhile (scontrol update timelimit=); a plain task told no limit.
        given = last.array.time_min or 0 if last.array else 0
        request = request.changed(time_min=max(2 * max(given, round(last.elapsed_s / 60)), 2))
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
