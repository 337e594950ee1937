"""What can be known to go wrong before anything is written or submitted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from preprocess.shard_format import CannotWrite, UsageError
from preprocess.shard_plan import Plan, need_plan
from preprocess.tokenizer_files import check_tokenizer_files
from slurm.cluster_limits import PartitionLimits, find_partition_limits
from slurm.job_request import JobRequest
from slurm.slurm_commands import SlurmRefused, slurm_output


def check_folder(folder: Path, request: JobRequest, say: Callable[[str], None]) -> Plan:
    """The plan, once folder, tokenizer, set-up file and input are as the tasks need them.

    Raises NotFound, CannotWrite, OtherTokenizer, UsageError, each with what to do. Writes nothing.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    jobs = folder / "jobs"
    for place in (folder, jobs, jobs / "logs"):
        if place.exists() and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise CannotWrite(
                f"{place} is no folder you can write to; for a group's data set: chmod -R g+rwX {folder}"
            )
    if request.setup and not Path(request.setup).is_file():
        raise UsageError(f"--setup {request.setup} is no file (seen from {Path.cwd()})")
    if not plan.input_dir.is_dir() and "--input_dir" not in request.worker_args:
        say(
            f"warning: {plan.input_dir} cannot be seen from here; if the nodes cannot see it either, "
            "tasks end with 66. Has the input moved? --worker_args '--input_dir NEW'"
        )
    return plan


def check_request(request: JobRequest, script: str) -> None:
    """Have Slurm test the script, and refuse what it would leave pending for ever. Raises SlurmRefused."""
    limits = find_partition_limits(request)
    if limits is not None:
        check_partition(request, limits)
    try:
        slurm_output("sbatch", "--test-only", text=script)
    except SlurmRefused as error:
        asked = shlex.join(request.sbatch_options())
        has = "" if limits is None else f"; a node of {limits.name} has up to {_has(limits)}"
        raise SlurmRefused(f"{error}. Asked for: {asked}{has}. Nothing was written or submitted") from None


def check_partition(request: JobRequest, limits: PartitionLimits) -> None:
    """Raises SlurmRefused where no node of the partition could ever run a task."""
    asked: Sequence[tuple[str, float | None, float | None, str]] = (
        ("--cpus_per_task", request.cpus_per_task, limits.max_cpus or None, "CPUs"),
        ("--mem_gb", request.mem_gb, limits.max_mem_mb / 1024 if limits.max_mem_mb else None, "GB"),
        ("--time_min", request.time_min, limits.max_time_min, "minutes"),
    )
    for flag, wanted, most, unit in asked:
        if wanted is not None and most is not None and wanted > most:
            raise SlurmRefused(
                f"{flag} is {wanted:g}, partition {limits.name} allows at most {most:g} {unit}: the job "
                "would stay pending for ever; ask for less, or for another --partition (sinfo)"
            )


def _has(limits: PartitionLimits) -> str:
    return f"{limits.max_cpus} CPUs and {limits.max_mem_mb} MB"
