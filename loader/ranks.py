"""Finds the rank of this process, and the number of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardprep.errors import UsageError

# The rank, the number of ranks, and who sets them. mpirun within a Slurm job starts one srun task a node, so
# Slurm's variables are looked at behind these.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "torchrun sets them"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun sets them"),
    ("PMI_RANK", "PMI_SIZE", "mpiexec sets them"),
)
# Slurm numbers the steps that are no srun of the user (batch script, interactive shell) from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """Rank and world size of data parallelism, and who said so.

    Ranks that share data (tensor or pipeline parallelism) pass the same data-parallel rank.
    """

    rank: int
    world_size: int
    source: str
    is_passed: bool = False  # by the caller, so nothing else is asked

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                found=f"rank {self.rank} of {self.world_size} (from {self.source})",
                expected="0 <= rank < world_size",
            )


def find_process_rank(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> ProcessRank:
    """Return the rank that was passed, else torch.distributed's, else the launcher's, else 0 of 1.

    Launchers: RANK/WORLD_SIZE (torchrun), OMPI_COMM_WORLD_*, PMI_* (MPICH, Intel MPI), an srun step. Call it
    in the process that trains. Raises UsageError where half of a pair is given, a value is no number, or a
    launcher sets a rank and no size.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(found=f"rank={rank} and world_size={world_size}", expected="both or neither")
        return ProcessRank(rank=rank, world_size=world_size, source="arguments", is_passed=True)
    found = _found(os.environ if environ is None else environ)
    return found or ProcessRank(rank=0, world_size=1, source="nothing set: one process")


def check_process_rank(who: ProcessRank, environ: Mapping[str, str] | None = None) -> None:
    """Raise UsageError where this process has become another rank than ``who``.

    A loader that was made before the process group would give all ranks the same batches.
    """
    now = None if who.is_passed else _found(os.environ if environ is None else environ)
    if now is not None and (now.rank, now.world_size) != (who.rank, who.world_size):
        raise UsageError(
            found=f"a loader of rank {who.rank} of {who.world_size} (from {who.source}), in the process of "
            f"rank {now.rank} of {now.world_size} (from {now.source})",
            expected="a loader that each rank makes, after init_process_group, or rank= and world_size=",
        )


def _found(environ: Mapping[str, str]) -> ProcessRank | None:
    """Return what torch.distributed or a launcher says, or None."""
    dist = sys.modules.get("torch.distributed")  # never imported here: not in use then
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return ProcessRank(rank=rank, world_size=world_size, source="torch.distributed")
    for rank_name, size_name, setter in _LAUNCHERS:
        if (rank_name in environ) != (size_name in environ):
            raise UsageError(
                found=f"{rank_name}={environ.get(rank_name)} and {size_name}={environ.get(size_name)}",
                expected=f"both, as {setter}, or neither, or rank= and world_size=",
            )
        if rank_name in environ:
            break
    else:
        rank_name = "SLURM_PROCID"
        size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        if size_name not in environ and "PMIX_RANK" in environ:  # srun --mpi=pmix sets Slurm's, too
            raise UsageError(
                found=f"PMIX_RANK={environ['PMIX_RANK']} without a number of processes",
                expected="rank= and world_size=, or RANK and WORLD_SIZE in each process",
            )
        is_alone = size_name not in environ or _number(environ, size_name) == 1
        if is_alone or not _is_task_of_srun(environ):
            return None
        if rank_name not in environ:
            raise UsageError(
                found=f"{size_name}={environ[size_name]} without {rank_name}",
                expected="a training that srun starts, or rank= and world_size=",
            )
    return ProcessRank(
        rank=_number(environ, rank_name),
        world_size=_number(environ, size_name),
        source=f"{rank_name}/{size_name}",
    )


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of its tasks.

    A batch script and salloc's shell are alone, whatever SLURM_NTASKS says there. Variables without any job
    id were handed into a container on purpose.
    """
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in environ:
            return _number(environ, name) < _FIRST_SPECIAL_STEP
    in_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    if in_job and environ.get("SLURM_PROCID", "0") != "0":
        raise UsageError(
            found=f"SLURM_PROCID={environ['SLURM_PROCID']} without SLURM_STEP_ID, so task 0 would be alone",
            expected="SLURM_STEP_ID handed in, too, or rank= and world_size=",
        )
    return not in_job and "SLURM_PROCID" in environ


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError.of_value(name, environ[name], "a whole number") from None
