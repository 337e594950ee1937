"""``retry``: which of the missing shards are sent again, and what each one's failure asks for.

``submit --until_done`` leaves a small job on the cluster. When the arrays and their verify job have ended, it
runs ``retry --until_done``: that writes the report of a verified data set; or it sends what failed, with a
controller of its own behind it; or it stops with a sentence where only people can help. What it did is in
DATA/jobs/history.jsonl, which ``status`` shows.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from preprocess.attempts import Attempt
from shardprep.console import counted, quoted, say
from shardprep.errors import NotFound, ReadWriteError, UsageError
from shardprep.format.names import id_ranges
from slurm.request import JobRequest
from slurm.script import CONTROL, controller_script, job_name
from slurm.send import Sending, check_recorded, prepare, submit_script
from slurm.site import check_folder, find_partition_limits
from slurm.state import (
    NODE_FAIL,
    OUT_OF_MEMORY,
    TIMEOUT,
    DatasetState,
    ShardState,
    reason_to_leave,
    remedy_of,
)
from slurm.submissions import append_event

REPORT_NAME = "report.html"
_TOGETHER_S = 600.0  # Slurm finds nodes of one power cut up to SlurmdTimeout (300 s) apart
_LATE_KILL_MIN = 2  # Slurm looks at limits every half minute, and then waits for the task to end


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
    nodes = failing_nodes(state.attempts.own)
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
        given, had = (last.array and last.array.time_min) or 0, round(last.elapsed_s / 60)
        if had - given <= _LATE_KILL_MIN:
            had = given or had
        request = request.changed(time_min=max(2 * had, 2))
    if failing:
        kept = (request.exclude or "").split(",") if "[" not in (request.exclude or "") else [request.exclude]
        names = dict.fromkeys(str(name) for name in [*kept, *failing] if name)
        request = request.changed(exclude=",".join(names))
    return request


def failing_nodes(attempts: Iterable[Attempt], at_least: int = 2) -> list[str]:
    """Nodes that went down alone ``at_least`` times, with tasks of this data set: a retry leaves them out.

    What ended within ten minutes of the one before is one incident: a node that goes down takes all its tasks
    with it. A power cut takes many nodes at once; that is nobody's fault, and none would be left.
    """
    failed = [each for each in attempts if each.stopped_by in (NODE_FAIL, "node failure") and each.node]
    incidents: list[set[str]] = []
    last_s = float("-inf")
    for ended, node in sorted((each.ended or each.began, each.node) for each in failed):
        if ended - last_s > _TOGETHER_S:
            incidents.append(set())
        incidents[-1].add(node)
        last_s = ended
    counts = Counter(next(iter(nodes)) for nodes in incidents if len(nodes) == 1)
    return sorted(node for node, number in counts.items() if number >= at_least)


def send_controller(
    state: DatasetState, number: int, request: JobRequest, job_ids: Sequence[str], flags: Sequence[str]
) -> str:
    """Submit the job that runs ``retry --until_done`` when these jobs have ended; returns its id.

    Raises what ``slurm_output`` raises.
    """
    command = [sys.executable, "-m", "slurm", "retry", str(state.folder), "--until_done", *flags]
    name = job_name(state.folder, state.plan.plan_id, number, CONTROL)
    script = controller_script(state.folder, name, shlex.join(command), request)
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    return submit_script(script, *after)


def finish(state: DatasetState, max_attempts: int) -> int:
    """Where ``retry`` sends nothing: verify what is done and write the report, or say why this stops."""
    folder = state.folder
    if not state.is_verified and len(state.made.done) == state.plan.num_shards:
        code = subprocess.run([sys.executable, "-m", "preprocess", "verify", folder], check=False).returncode
        if code:
            return _stop(state, "verify fails, its words are in this log")
    elif not state.is_verified:
        words = []
        for cause, shards in state.failed_by_cause().items():
            why = reason_to_leave(shards[0], max_attempts, {}) or "left out"
            ids = id_ranges(each.shard_id for each in shards)
            words.append(f"shards {ids}: {cause}, {why}; {remedy_of(cause)}")
        return _stop(state, "; ".join(words) or "shards are missing that may run where it cannot be seen")
    output = folder / REPORT_NAME
    subprocess.run([sys.executable, "-m", "slurm", "report", folder, "--output", output], check=False)
    append_event(folder, "finished", report=str(output))
    say(f"{counted(state.plan.num_shards, 'shard')} verified; wrote {output}")
    return 0


def stop_after(state: DatasetState, num_rounds: int) -> int:
    """Where the budget is used up."""
    missing = id_ranges(state.ids("failed", "not submitted"))
    return _stop(state, f"shards {missing} are not made after {counted(num_rounds, 'round')} (--max_rounds)")


def _stop(state: DatasetState, why: str) -> int:
    append_event(state.folder, "stopped", why=why)
    say(f"error: only a person can help now: {why}")
    return ReadWriteError.exit_code
