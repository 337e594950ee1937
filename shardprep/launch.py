"""Which process of its launch this one is: by the variables of srun, Open MPI, MPICH or torchrun.

The loader's ranks and the processes of ``run`` come from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardprep.errors import UsageError

# Variables of rank and number of processes, and who sets them. They come before Slurm's, since mpirun starts
# one srun task per node.
TORCHRUN = ("RANK", "WORLD_SIZE", "torchrun sets them")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun sets them"),
    ("PMI_RANK", "PMI_SIZE", "mpiexec sets them"),
)
# Variables of the rank on the node, and of the number of processes there.
_ON_NODE = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# From here Slurm numbers the steps that the user did not start by srun (batch script, interactive shell).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MOST_PROCESSES = 10**9


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process of a launch of several."""

    rank: int
    num_processes: int
    said_by: str  # the variables, such as "RANK/WORLD_SIZE"


@dataclass(frozen=True, kw_only=True)
class ArrayPlace:
    """A task of a Slurm job array, or a job that is none."""

    number: int = 0  # from 0
    num_tasks: int = 1


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Where a process is among the nodes of its launch; what is not known is as for one process."""

    node: int = 0  # from 0
    num_nodes: int = 1
    rank: int = 0  # among the processes of the node
    num_processes: int = 1  # of the launch on the node


def find_launch(
    environ: Mapping[str, str], *, otherwise: str, launchers: Sequence[tuple[str, str, str]] = MPI
) -> Launch | None:
    """Return which process this is, or None if no launcher started several.

    ``launchers``: those that come before Slurm. ``otherwise``: how a user can name rank and number of
    processes, for errors. Raises UsageError if only one of them is known, or one is not a number.
    """
    for rank_name, size_name, setter in launchers:
        if (rank_name in environ) != (size_name in environ):
            found = f"{rank_name}={environ.get(rank_name)} and {size_name}={environ.get(size_name)}"
            raise UsageError(found=found, expected=f"both, as {setter}, or neither, {otherwise}")
        if rank_name in environ:
            return _launch(environ, rank_name, size_name)
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if size_name not in environ and "PMIX_RANK" in environ:  # srun --mpi=pmix sets Slurm's, too
        found = f"PMIX_RANK={environ['PMIX_RANK']} without a number of processes"
        raise UsageError(
            found=found, expected=f"a launcher that says how many processes it starts, {otherwise}"
        )
    is_alone = size_name not in environ or _number(environ, size_name) == 1
    if is_alone or not _is_task_of_srun(environ, otherwise):
        return None
    if "SLURM_PROCID" not in environ:
        found = f"{size_name}={environ[size_name]} without SLURM_PROCID"
        raise UsageError(found=found, expected=f"a process that srun starts, {otherwise}")
    return _launch(environ, "SLURM_PROCID", size_name)


def find_node_place(environ: Mapping[str, str]) -> NodePlace:
    """Return where this process is among its launch's nodes. Variables that are no numbers are ignored."""
    for rank_name, size_name in _ON_NODE:
        rank = _number_or(environ.get(rank_name), -1)
        size = _number_or(environ.get(size_name), 0)
        if not 0 <= rank < size:
            continue
        # torchrun numbers the nodes. mpirun does not: mostly it fills one after the other.
        overall = _number_or(environ.get("OMPI_COMM_WORLD_RANK", environ.get("PMI_RANK")), 0)
        of_all = _number_or(environ.get("OMPI_COMM_WORLD_SIZE", environ.get("PMI_SIZE")), size)
        node = overall // size
        num_nodes = -(-of_all // size)
        if rank_name == "LOCAL_RANK":
            node = _number_or(environ.get("GROUP_RANK"), 0)
            num_nodes = _number_or(environ.get("GROUP_WORLD_SIZE"), 1)
        return _place(node, num_nodes, rank, size)
    try:
        launch = find_launch(environ, otherwise="", launchers=())
    except UsageError:
        launch = None
    if launch is None:
        return NodePlace()
    node = _number_or(environ.get("SLURM_NODEID"), 0)
    num_nodes = _number_or(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")), 1)
    sizes = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")))
    size = sizes[node] if node < len(sizes) else 1
    return _place(node, num_nodes, _number_or(environ.get("SLURM_LOCALID"), 0), size)


def find_array_place(environ: Mapping[str, str]) -> ArrayPlace:
    """Return which task of its job array this is. Variables that are no numbers are ignored.

    Of a list without a step, such as ``1,5,6``, two tasks may get one number.
    """
    num_tasks = _number_or(environ.get("SLURM_ARRAY_TASK_COUNT"), 1)
    index = _number_or(environ.get("SLURM_ARRAY_TASK_ID"), 0)
    first = _number_or(environ.get("SLURM_ARRAY_TASK_MIN"), 0)
    step = _number_or(environ.get("SLURM_ARRAY_TASK_STEP"), 1)
    if num_tasks < 1 or step < 1:
        return ArrayPlace()
    return ArrayPlace(number=(index - first) // step % num_tasks, num_tasks=num_tasks)


def _place(node: int, num_nodes: int, rank: int, size: int) -> NodePlace:
    if not (0 <= node < num_nodes and 0 <= rank < size):
        return NodePlace()
    return NodePlace(node=node, num_nodes=num_nodes, rank=rank, num_processes=size)


def _tasks_per_node(text: str) -> list[int]:
    """Parse ``2(x3),1`` into [2, 2, 2, 1], and other text into []."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not match:
            return []
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _launch(environ: Mapping[str, str], rank_name: str, size_name: str) -> Launch:
    rank = _number(environ, rank_name)
    num_processes = _number(environ, size_name)
    return Launch(rank=rank, num_processes=num_processes, said_by=f"{rank_name}/{size_name}")


def _is_task_of_srun(environ: Mapping[str, str], otherwise: str) -> bool:
    """Return whether srun started this process as one of its tasks.

    A batch script and salloc's shell are single processes. Without a job id, a container got the variables.
    """
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in environ:
            return _number(environ, name) < _FIRST_SPECIAL_STEP
    in_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    if in_job and environ.get("SLURM_PROCID", "0") != "0":
        found = f"SLURM_PROCID={environ['SLURM_PROCID']} without SLURM_STEP_ID, so task 0 looks like a script"
        raise UsageError(found=found, expected=f"both in the environment, {otherwise}")
    return not in_job and "SLURM_PROCID" in environ


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError.of_value(name, environ[name], "a whole number") from None


def _number_or(text: str | None, default: int) -> int:
    if text is None or not re.fullmatch("[0-9]{1,9}", text):
        return default
    return int(text)
