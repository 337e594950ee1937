"""Which rank a process takes itself for."""

from __future__ import annotations

import pytest

from loader.ranks import ProcessRank, check_process_rank, find_process_rank
from shardprep.errors import UsageError

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SALLOC_SHELL = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}
INTERACTIVE_STEP = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "5"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
FIRST_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
FOUND: dict[str, tuple[dict[str, str], tuple[int, int]]] = {
    "a task of srun": (SRUN, (3, 4)),
    "the step's tasks, not the job's": ({**SRUN, "SLURM_NTASKS": "8"}, (3, 4)),
    "a batch script is alone": (BATCH_SCRIPT, (0, 1)),
    "salloc's shell is alone": (SALLOC_SHELL, (0, 1)),
    "an interactive step is alone": (INTERACTIVE_STEP, (0, 1)),
    "a step of one task is alone": ({**SRUN, **FIRST_OF_ONE}, (0, 1)),
    "handed into a container without a job id": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
    "torchrun within srun": ({**SRUN, **TORCHRUN}, (1, 2)),
    "nothing is set": ({}, (0, 1)),
    "Open MPI": (OPEN_MPI, (5, 8)),
    "MPICH": (MPICH, (2, 3)),
    "mpirun starts a task a node, and knows better than Slurm": ({**SRUN, **OPEN_MPI}, (5, 8)),
    "MPICH in a Slurm job": ({**SRUN, **MPICH}, (2, 3)),
    "torchrun under mpirun": ({**OPEN_MPI, **TORCHRUN}, (1, 2)),
    "PMIx by srun": ({**SRUN, "PMIX_RANK": "3"}, (3, 4)),
    "PMIx by srun, alone": ({**SRUN, **FIRST_OF_ONE, "PMIX_RANK": "0"}, (0, 1)),
}
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "task 0 would think itself alone": ({**BATCH_SCRIPT, "SLURM_PROCID": "2"}, "SLURM_STEP_ID is not set"),
    "no procid": (
        {name: value for name, value in SRUN.items() if name != "SLURM_PROCID"},
        "SLURM_PROCID is not set; start the training with srun",
    ),
    "no number": ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', expected a whole number"),
    "PMIx alone": ({"PMIX_RANK": "0"}, "PMIX_RANK is 0, and nothing says of how many processes; pass rank="),
    **{
        f"half: {name}": ({name: "1"}, "set both")
        for name in ("RANK", "WORLD_SIZE", *MPICH, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    },
}


@pytest.mark.parametrize(("environ", "expected"), FOUND.values(), ids=FOUND)
def test_a_process_knows_its_rank_from_its_launcher(
    environ: dict[str, str], expected: tuple[int, int]
) -> None:
    who = find_process_rank(environ=environ)
    assert (who.rank, who.world_size) == expected


@pytest.mark.parametrize(("environ", "said"), REFUSED.values(), ids=REFUSED)
def test_what_tells_no_rank_for_sure_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_process_rank(environ=environ)


def test_arguments_win_over_everything() -> None:
    who = find_process_rank(5, 8, {**SRUN, **TORCHRUN})
    assert who == ProcessRank(rank=5, world_size=8, source="arguments", is_passed=True)


@pytest.mark.parametrize(
    ("rank", "world_size", "said"),
    [
        (0, None, "pass both or neither"),
        (None, 2, "pass both or neither"),
        *((rank, size, "expected 0 <= rank < world_size") for rank, size in ((2, 2), (-1, 2), (0, 0))),
    ],
)
def test_an_impossible_rank_is_refused(rank: int | None, world_size: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_process_rank(rank, world_size, {})


def test_a_rank_that_was_found_and_is_another_one_by_now_is_refused() -> None:
    alone, told = find_process_rank(environ={}), find_process_rank(0, 1)
    check_process_rank(alone, {})
    check_process_rank(alone, {"RANK": "0", "WORLD_SIZE": "1"})
    for environ in ({"RANK": "0", "WORLD_SIZE": "2"}, SRUN, OPEN_MPI, MPICH):
        with pytest.raises(
            UsageError, match=r"made as rank 0 of 1 .* this process is rank \d of \d .*make the loader"
        ):
            check_process_rank(alone, environ)
        check_process_rank(told, environ)  # who passes a rank knows what it is for
    check_process_rank(find_process_rank(environ=SRUN), {})  # nothing says otherwise
