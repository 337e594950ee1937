"""What is checked before anything is written or submitted: the data set's folder, and what Slurm says.

Limits of accounts and QOS are not read: Slurm refuses what is beyond them, or says why a job waits.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardprep.console import quoted, say
from shardprep.errors import CannotWrite, UsageError
from shardprep.files import is_link
from shardprep.format.attempts import LOGS_FOLDER
from shardprep.format.names import id_ranges
from shardprep.format.plan import Plan, need_plan
from shardprep.format.submissions import JOBS_FOLDER, JobRequest
from shardprep.format.tokenizer_files import check_tokenizer_files
from slurm.commands import SlurmRefused, minutes_of, read_config, slurm_answer, slurm_output

_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)
# Slurm's words for more jobs than MaxArraySize, a QOS or an account allows, and for a size or time that a QOS
# forbids: then fewer tasks are refused, too, and its words are shown.
_TOO_MANY = re.compile(r"accounting/QOS policy|array specification|submit limit|SubmitJob", re.IGNORECASE)


class TooManyTasks(SlurmRefused):
    """Slurm takes no array of so many tasks; fewer, larger ones may do."""

    num_tasks = 0  # of the largest array


def refusal(error: SlurmRefused, num_tasks: int) -> SlurmRefused:
    """Return the error, as TooManyTasks where fewer tasks may be taken."""
    if num_tasks < 2 or not _TOO_MANY.search(str(error)):
        return error
    found = TooManyTasks(str(error))
    found.num_tasks = num_tasks
    return found


def check_folder(folder: Path, request: JobRequest) -> Plan:
    """Return the plan, once folder, tokenizer, set-up file and input are as the tasks need them.

    Raises NotFound, CannotWrite, OtherTokenizer, UsageError. Writes nothing.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    for place in (folder, folder / JOBS_FOLDER, folder / LOGS_FOLDER):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CannotWrite(
                f"{place} cannot be looked at ({error.strerror}); it must be a folder you can write to"
            ) from None
        if place != folder and is_link(place):  # records, and Slurm's logs, would go where it leads
            raise CannotWrite(f"{place} is a link; put a folder in its place")
        if not (is_folder and os.access(place, os.W_OK | os.X_OK)):
            raise CannotWrite(
                f"{place} is no folder that you can write to; for a group's data set its owner can type: "
                f"chmod -R g+rwX {quoted(folder)}"
            )
    if request.setup and not (os.path.isabs(request.setup) and os.path.isfile(request.setup)):  # noqa: PTH113, PTH117 - Path's may raise OSError
        raise UsageError(
            f"--setup {request.setup} is no file; give the path of the file that tasks shall source",
            path=request.setup,
            expected="file that tasks shall source",
        )
    if not os.path.isdir(plan.input_dir) and "--input_dir" not in request.worker_args:  # noqa: PTH112 - as above
        say(
            f"warning: {plan.input_dir} cannot be seen from here; if the nodes cannot see it either, "
            "tasks end with 66. Has the input moved? --worker_args '--input_dir NEW'"
        )
    return plan


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a submission is fitted to: the largest array, and the partition's nodes."""

    cluster: str
    max_array_size: int  # it bounds the index, which is why arrays of ours begin at 0
    nodes: list[tuple[str, int, int]]  # (state, MB, CPUs), of the named or the default partition
    max_time_min: int | None = None  # of a job in it; None for no limit

    @property
    def max_cpus(self) -> int | None:
        """Return the CPUs of the largest node."""
        return max((num_cpus for _, _, num_cpus in self.nodes), default=None)

    @property
    def max_mem_mb(self) -> int | None:
        """Return the memory of the largest node."""
        return max((mem_mb for _, mem_mb, _ in self.nodes), default=None)


def find_site(partition: str | None) -> Site:
    """Ask the controller. Raises what ``slurm_answer`` raises."""
    config = read_config()

    def parse(text: str) -> Site:
        nodes, limit = [], None
        for line in text.splitlines():
            name, state, mem, cpus, time = line.split("|")
            # sinfo marks the default partition; a request may name several, separated by commas.
            is_asked = name.endswith("*") if partition is None else name.rstrip("*") in partition.split(",")
            if is_asked:
                nodes.append((state, int(mem.rstrip("+")), int(cpus.rstrip("+"))))
                limit = minutes_of(time)
        return Site(
            cluster=config.get("ClusterName", ""),
            max_array_size=int(config["MaxArraySize"]),
            nodes=nodes,
            max_time_min=limit,
        )

    return slurm_answer(parse, "sinfo", "--noheader", "--exact", "--format=%P|%T|%m|%c|%l")


def tasks_of_shards(shard_ids: Sequence[int], max_tasks: int, shards_per_task: int | None) -> list[str]:
    """Return what each task makes, such as ``17`` or ``0-5``, at least ``shards_per_task`` (1) shards."""
    wanted = -(-len(shard_ids) // (shards_per_task or 1))
    num_tasks = max(1, min(wanted, max_tasks))
    bounds = [len(shard_ids) * number // num_tasks for number in range(num_tasks + 1)]
    return [id_ranges(shard_ids[start:end]) for start, end in itertools.pairwise(bounds)]


def check_script(request: JobRequest, script: str, num_tasks: int, site: Site) -> None:
    """Have Slurm test the script. Raises SlurmRefused, or TooManyTasks."""
    try:
        slurm_output("sbatch", "--test-only", text=script)
    except SlurmRefused as error:
        mem_mb, num_cpus = request.least_mem_gb * 1024, request.num_cpus or 1
        fitting = [node for node in site.nodes if node[1] >= mem_mb and node[2] >= num_cpus]
        if fitting and all(_NODES_AWAY.search(state) for state, _, _ in fitting):
            say(f"warning: {error}; the jobs wait until such nodes are back: sinfo -R")
            return
        words = f"{error}. Asked for: {shlex.join(request.sbatch_options())}"
        if site.nodes:
            words += f"; a node has up to {site.max_cpus} CPUs and {site.max_mem_mb} MB"
        raise refusal(SlurmRefused(f"{words}. Nothing was written or submitted"), num_tasks) from None
