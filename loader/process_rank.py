"""Which of how many processes this one is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from preprocess.shard_format import UsageError

# Slurm numbers the steps that are no srun of the user (batch script, interactive shell) from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """Rank and world size of data parallelism, and where they were found.

    Ranks that share data (tensor or pipeline parallelism) pass the same data-parallel rank.
    """

    rank: int
    world_size: int
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} (from {self.source}) is impossible; "
                "expected 0 <= rank < world_size"
            )


def find_process_rank(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> ProcessRank:
    """Explicit arguments, else torch.distributed, else RANK/WORLD_SIZE, else an srun step, else alone.

    Call it in the process that trains: a spawned worker knows nothing of the process group.
    Raises UsageError where only one of a pair is given, or a value is no number.
    """
    environ = os.environ if environ is None else environ
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(f"rank={rank} and world_size={world_size}; pass both or neither")
        return ProcessRank(rank=rank, world_size=world_size, source="arguments")
    return _from_torch() or _from_pair(environ) or _from_srun(environ) or _alone()


def _alone() -> ProcessRank:
    return ProcessRank(rank=0, world_size=1, source="nothing set: one process")


def _from_torch() -> ProcessRank | None:
    distributed = sys.modules.get("torch.distributed")  # never imported here: not in use then
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return ProcessRank(
        rank=distributed.get_rank(), world_size=distributed.get_world_size(), source="torch.distributed"
    )


def _from_pair(environ: Mapping[str, str]) -> ProcessRank | None:
    rank, world_size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise UsageError(
            f"RANK is {rank!r} and WORLD_SIZE is {world_size!r}; set both (torchrun does) or neither, "
            "or pass rank= and world_size="
        )
    return ProcessRank(
        rank=_number("RANK", rank), world_size=_number("WORLD_SIZE", world_size), source="RANK/WORLD_SIZE"
    )


def _from_srun(environ: Mapping[str, str]) -> ProcessRank | None:
    procid = environ.get("SLURM_PROCID")
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    if num_tasks is None or _number("SLURM_NTASKS", num_tasks) == 1 or not _in_srun(environ):
        return None
    if procid is None:
        raise UsageError(
            f"SLURM_NTASKS is {num_tasks}, but SLURM_PROCID is not set; start the training with srun, "
            "or pass rank= and world_size="
        )
    return ProcessRank(
        rank=_number("SLURM_PROCID", procid),
        world_size=_number("SLURM_NTASKS", num_tasks),
        source="SLURM_PROCID/SLURM_NTASKS",
    )


def _in_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, one of a task each.

    A batch script and salloc's shell are alone, whatever SLURM_NTASKS says there: the first has no
    step of its own, the second a special one or none. Without any job id the variables were handed
    into a container, by somebody who means them.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is not None:
        return _number("SLURM_STEP_ID", step) < _FIRST_SPECIAL_STEP
    procid = environ.get("SLURM_PROCID", "0")
    in_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    if in_job and procid != "0":
        raise UsageError(
            f"SLURM_PROCID is {procid} but SLURM_STEP_ID is not set, so task 0 would take itself for "
            "alone; hand SLURM_STEP_ID in, too, or pass rank= and world_size="
        )
    return not in_job and "SLURM_PROCID" in environ


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} is {value!r}, expected a whole number") from None
