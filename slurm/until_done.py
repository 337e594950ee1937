"""``submit --until_done``: a small job on the cluster that sends again what failed, until all is verified.

This controller waits for the arrays and their verify job. Then it runs ``retry --until_done``, which looks at
the state. It writes the report of a verified data set; or it sends what failed, each shard as its cause asks,
with a controller of its own behind it; or it stops with a sentence where only people can help. What it did is
in DATA/jobs/history.jsonl, which ``status`` shows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from shardprep.console import counted, say
from shardprep.errors import ReadWriteError
from shardprep.format.names import id_ranges
from slurm.dataset_state import DatasetState, ShardState
from slurm.failure_causes import remedy_of
from slurm.job_records import append_event
from slurm.job_script import JobRequest, controller_name, controller_script
from slurm.slurm_commands import slurm_output

REPORT_NAME = "report.html"


def send_controller(
    state: DatasetState, number: int, request: JobRequest, job_ids: Sequence[str], flags: Sequence[str]
) -> str:
    """Submit the job that runs ``retry --until_done`` when these jobs have ended; returns its id.

    Raises what ``slurm_output`` raises.
    """
    command = [sys.executable, "-m", "slurm", "retry", str(state.folder), "--until_done", *flags]
    script = controller_script(
        state.folder, controller_name(state.folder, state.plan.plan_id, number), shlex.join(command), request
    )
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    said = slurm_output("sbatch", "--parsable", *after, text=script)
    job_id = (said.strip().splitlines() or [""])[-1].split(";")[0]  # behind what a site's wrapper says
    if not re.fullmatch(r"[0-9]{1,10}", job_id):
        raise ReadWriteError(f"sbatch answered {said[:80]!r}, expected a job id; look at: squeue --me")
    return job_id


def finish(state: DatasetState, left: Sequence[ShardState]) -> int:
    """Where ``retry`` sends nothing: verify what is done and write the report, or say why this stops."""
    folder = state.folder
    if not state.is_verified and len(state.made.done) == state.plan.num_shards:
        code = subprocess.run([sys.executable, "-m", "preprocess", "verify", folder], check=False).returncode
        if code:
            return _stop(state, "verify fails, its words are in this log")
    elif not state.is_verified:
        causes: dict[str, list[int]] = {}
        for shard in left:
            causes.setdefault(shard.cause or "", []).append(shard.shard_id)
        words = [f"shards {id_ranges(ids)}: {cause}; {remedy_of(cause)}" for cause, ids in causes.items()]
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
