"""The rank of this process: from arguments, torch.distributed, or the variables of a launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardprep.errors import UsageError
from shardprep.launch import MPI, TORCHRUN, find_launch

_LAUNCHERS = (TORCHRUN, *MPI)
_OR_PASSED = "or rank= and world_size="


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """Data-parallel rank and world size, and where they come from.

    Processes that share data (tensor or pipeline parallelism) have the same data-parallel rank.
    """

    rank: int
    world_size: int
    source: str  # such as "RANK/WORLD_SIZE", for messages
    is_passed: bool = False  # by the caller, so it takes precedence

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(found=f"{self}", expected="0 <= rank < world_size")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (from {self.source})"


def find_process_rank(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> ProcessRank:
    """Return the rank from the arguments, else torch.distributed, else the launcher, else rank 0 of 1.

    Call it in the process that trains. Launchers set RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_*, PMI_*
    (MPICH, Intel MPI), or the variables of an srun step; ``environ`` replaces os.environ. Raises UsageError
    if only one of rank and world size is given, or a variable is not a number.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(found=f"rank={rank} and world_size={world_size}", expected="both or neither")
        return ProcessRank(rank=rank, world_size=world_size, source="arguments", is_passed=True)
    found = _rank_from(os.environ if environ is None else environ)
    return found or ProcessRank(rank=0, world_size=1, source="nothing set: one process")


def check_process_rank(who: ProcessRank) -> None:
    """Raise UsageError if this process now has another rank, since ranks would get the same batches."""
    now = None if who.is_passed else _rank_from(os.environ)
    if now is not None and (now.rank, now.world_size) != (who.rank, who.world_size):
        expected = f"a loader made in each rank, after init_process_group, {_OR_PASSED}"
        raise UsageError(found=f"a loader of {who}, in the process of {now}", expected=expected)


def _rank_from(environ: Mapping[str, str]) -> ProcessRank | None:
    """Return the rank from torch.distributed or a launcher, or None if there is neither."""
    dist = sys.modules.get("torch.distributed")  # not imported: not in use
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return ProcessRank(rank=rank, world_size=world_size, source="torch.distributed")
    found = find_launch(environ, otherwise=_OR_PASSED, launchers=_LAUNCHERS)
    if found is None:
        return None
    return ProcessRank(rank=found.rank, world_size=found.num_processes, source=found.said_by)
