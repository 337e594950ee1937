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


def found(environ: dict[str, str]) -> tuple[int, int]:
    who = find_process_rank(environ=environ)
    return who.rank, who.world_size


def test_a_task_of_srun_knows_its_rank_from_slurm_alone() -> None:
    assert found(SRUN) == (3, 4)


def test_the_number_of_tasks_is_the_steps_not_the_jobs() -> None:
    assert found({**SRUN, "SLURM_NTASKS": "8"}) == (3, 4)


@pytest.mark.parametrize("environ", [BATCH_SCRIPT, SALLOC_SHELL, INTERACTIVE_STEP])
def test_a_batch_script_and_an_interactive_shell_are_alone(environ: dict[str, str]) -> None:
    assert found(environ) == (0, 1)


def test_a_step_of_one_task_is_alone() -> None:
    assert found({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == (0, 1)


def test_slurm_variables_handed_into_a_container_without_a_job_id_are_meant() -> None:
    assert found({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == (1, 2)


def test_a_task_that_lost_its_step_id_is_refused_since_task_0_would_think_itself_alone() -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_ID is not set"):
        find_process_rank(environ={**BATCH_SCRIPT, "SLURM_PROCID": "2"})


def test_a_step_without_procid_is_refused() -> None:
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}
    with pytest.raises(UsageError, match="SLURM_PROCID is not set; start the training with srun"):
        find_process_rank(environ=environ)


def test_rank_and_world_size_win_over_slurm() -> None:
    assert found({**SRUN, "RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)


def test_arguments_win_over_everything() -> None:
    who = find_process_rank(5, 8, {**SRUN, "RANK": "1", "WORLD_SIZE": "2"})
    assert who == ProcessRank(rank=5, world_size=8, source="arguments", is_passed=True)


def test_nothing_set_means_one_process() -> None:
    assert found({}) == (0, 1)


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_half_of_rank_and_world_size_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="set both"):
        find_process_rank(environ=environ)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2)])
def test_half_of_the_arguments_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(UsageError, match="pass both or neither"):
        find_process_rank(rank, world_size, {})


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_rank_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=r"expected 0 <= rank < world_size"):
        find_process_rank(rank, world_size, {})


def test_a_rank_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="RANK is 'one', expected a whole number"):
        find_process_rank(environ={"RANK": "one", "WORLD_SIZE": "2"})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "5"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3"}


@pytest.mark.parametrize(("environ", "expected"), [(OPEN_MPI, (5, 8)), (MPICH, (2, 3))])
def test_a_process_of_mpirun_knows_its_rank_from_mpi_alone(
    environ: dict[str, str], expected: tuple[int, int]
) -> None:
    assert found(environ) == expected


@pytest.mark.parametrize(("environ", "expected"), [(OPEN_MPI, (5, 8)), (MPICH, (2, 3))])
def test_within_a_slurm_job_mpirun_starts_a_task_a_node_and_knows_better(
    environ: dict[str, str], expected: tuple[int, int]
) -> None:
    assert found({**SRUN, **environ}) == expected
    assert found({**environ, "RANK": "0", "WORLD_SIZE": "2"}) == (0, 2)


def test_pmix_alone_which_tells_no_number_of_processes_is_refused_and_srun_with_it_is_not() -> None:
    with pytest.raises(
        UsageError, match=r"PMIX_RANK is 0, and nothing says of how many processes; pass rank="
    ):
        find_process_rank(environ={"PMIX_RANK": "0"})
    assert found({**SRUN, "PMIX_RANK": "3"}) == (3, 4)
    assert found({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}) == (0, 1)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"])
def test_half_of_what_mpirun_sets_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="set both"):
        find_process_rank(environ={name: "1"})


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


def test_only_one_way_to_say_the_rank_may_be_passed() -> None:
    with pytest.raises(UsageError, match="rank and world_size and device_mesh were passed; pass one"):
        find_process_rank(0, 1, {}, device_mesh=object())
