"""What is checked before anything is sent, and the scripts of the jobs.

A script is ``prep_array.sh`` with another head, which holds the table array index -> shards. Slurm keeps a
script from submission on, so no later file can change what a waiting task will do. Limits of accounts and QOS
are not read: Slurm refuses what is beyond them, or says why a job waits.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardprep import HOME
from shardprep.console import quoted, say
from shardprep.errors import CannotWrite, UsageError
from shardprep.files import is_link
from shardprep.format.jobs import JOBS_FOLDER, LOGS_FOLDER, JobRequest, folder_identity
from shardprep.format.names import id_ranges
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan
from slurm.commands import (
    REQUEST_VARIABLES,
    SlurmRefused,
    minutes_of,
    read_config,
    slurm_answer,
    slurm_output,
)

JOB_NAME = "shardprep"
VERIFY, CONTROL = "-verify", "-control"  # end the names of such jobs
_NODES_AWAY = re.compile("drain|down|maint|fail|reboot|unk|power|reserved", re.IGNORECASE)


def check_folder(folder: Path, request: JobRequest) -> Plan:
    """Return the plan, once folder, tokenizer, set-up file and input are as the tasks need them.

    Raises NotFound, CannotWrite, OtherTokenizer, UsageError. Writes nothing.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    for place in (folder, folder / JOBS_FOLDER, folder / LOGS_FOLDER):
        if place != folder and is_link(place):  # records, and Slurm's logs, would go where it leads
            raise CannotWrite(f"{place} is a link; put a folder in its place")
        if os.path.lexists(place) and not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):  # noqa: PTH112 - Path's may raise
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
    """What a submission is fitted to: the largest array, and the partition's largest node."""

    cluster: str
    max_array_size: int  # it bounds the index, which is why arrays of ours begin at 0
    nodes: list[tuple[str, int, int]]  # (state, MB, CPUs), of the named or the default partition
    max_time_min: int | None = None  # of a job in it; None for no limit

    @property
    def max_cpus(self) -> int | None:
        return max((num_cpus for _, _, num_cpus in self.nodes), default=None)

    @property
    def max_mem_mb(self) -> int | None:
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


def check_script(request: JobRequest, script: str, site: Site) -> None:
    """Have Slurm test the script. Raises SlurmRefused."""
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
        raise SlurmRefused(f"{words}. Nothing was written or submitted") from None


def names_begin(folder: Path, plan_id: str) -> str:
    """Return what the names of all jobs of a data set begin with, before the number of the submission."""
    return f"{JOB_NAME}-{plan_id[:12]}-{folder_identity(folder)}-"


def controller_script(folder: Path, name: str, command: str, request: JobRequest) -> str:
    """Return the script of a job that runs ``command``, which needs Slurm's commands: in no container."""
    small = request.changed(cpus_per_task=1, mem_gb=1.0, mem_per_cpu_gb=None, max_parallel=1)
    options = [f"--job-name={name}", f"--output={_log_pattern(folder, 'control-%j')}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(each)}" for each in [*options, *small.sbatch_options()])]
    lines += [f"source {shlex.quote(request.setup)}"] if request.setup else []
    return "\n".join([*lines, f"cd {shlex.quote(str(HOME.resolve()))}", f"exec {command}", ""])


def array_script(folder: Path, name: str, tasks: Sequence[str], request: JobRequest) -> str:
    """Return the script of an array whose task i makes the shards ``tasks[i]``, such as ``17`` or ``0-5``.

    Raises UsageError for values that cannot stand in a script.
    """
    options = [
        f"--job-name={name}",
        f"--array=0-{len(tasks) - 1}%{min(request.max_parallel, len(tasks))}",
        f"--output={_log_pattern(folder, '%A_%a')}",
    ]
    place, flags = shlex.quote(str(folder)), shlex.join(shlex.split(request.worker_args))
    head = [
        f"shardprep_folder={place}",
        f"shardprep_identity={folder_identity(folder)}",  # as this host sees the folder
        f"shards_of=({' '.join(tasks)})",
        "shards=${shards_of[${SLURM_ARRAY_TASK_ID:-0}]}",
        'if [[ $shards = *[-,]* ]]; then shardprep_what="shards $shards"',
        f'  shardprep_command=(run {place} --shards "$shards" {flags})',
        'else shardprep_what="shard $shards"',
        f'  shardprep_command=(--shard_id "$shards" --planned --output_dir {place} {flags}); fi',
        "# The array's indices are not the shards' numbers, so the worker must not compare them.",
        "unset SLURM_ARRAY_TASK_COUNT",
    ]
    if request.num_cpus is None:
        head.append("export SLURM_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE")
    return _script(options, request, head)


def verify_script(folder: Path, name: str, num_shards: int, request: JobRequest) -> str:
    """Return the script of the job that runs ``verify DATA`` when the arrays have ended, however they did."""
    small = request.changed(cpus_per_task=min(4, request.num_cpus or 4), max_parallel=1)
    place = shlex.quote(str(folder))
    head = [
        f"shardprep_folder={place}",
        f"shardprep_what=verify shardprep_command=(verify {place})",
        f"shardprep_verified={shlex.quote(f'{num_shards} shards of {folder}')}",
    ]
    head += [f"shardprep_notify={shlex.quote(request.notify)}"] if request.notify else []
    options = [f"--job-name={name}", f"--output={_log_pattern(folder, 'verify-%j')}"]
    return _script(options, small, [*head, _VERIFY_END])


# What prep_array.sh calls at its end: a line to grep, and whom to tell.
_VERIFY_END = """shardprep_end() {
  export SHARDPREP_RESULT=verified SHARDPREP_EXIT_CODE=$1
  (($1 == 0)) || SHARDPREP_RESULT="not verified:"
  echo "shardprep: $SHARDPREP_RESULT $shardprep_verified" >&2
  SHARDPREP_RESULT=${SHARDPREP_RESULT%:}
  [[ -z ${shardprep_notify:-} ]] || bash -c "$shardprep_notify" || say "--notify ended with exit code $?"
}"""


def _log_pattern(folder: Path, name: str) -> str:
    if "\\" in str(folder):
        raise UsageError(
            f"{folder} has a backslash, with which Slurm puts no job's number into a log's name; rename "
            "the folder, or submit through a link of another name"
        )
    return f"{str(folder).replace('%', '%%')}/{LOGS_FOLDER}/{name}.log"


def _script(options: Sequence[str], request: JobRequest, head: Sequence[str]) -> str:
    """Return ``prep_array.sh`` from its first command on, behind another head."""
    prep_array = (Path(__file__).parent / "prep_array.sh").read_text(encoding="utf-8")
    first = "set -euo pipefail\n"
    options = ["--open-mode=append", *options, *request.sbatch_options()]
    names = {each: name for each, name in REQUEST_VARIABLES.items() if name.startswith("SHARDPREP_")}
    settings = {name: getattr(request, each) or "" for each, name in names.items()}
    # A container or a set-up file brings a Python of its own.
    python = os.environ.get("SHARDPREP_PYTHON") or ("" if any(settings.values()) else sys.executable)
    settings = {"SHARDPREP_PYTHON": python, **settings}
    lines = [
        "#!/bin/bash",
        "# Made by `python -m slurm submit`: slurm/prep_array.sh with another head.",
        *(f"#SBATCH {_quoted(option)}" for option in options),
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        *head,
        'echo "shardprep: node ${SLURMD_NODENAME:-}: $shardprep_what begins" >&2',
    ]
    text = "\n".join(lines) + "\n" + first + prep_array.partition(f"\n{first}")[2]
    if found := re.search(r"^.*[\ud800-\udfff].*$", text, re.MULTILINE):
        raise UsageError(
            f"a job script must be UTF-8, and this line of it is not: {found[0]!r}; rename the folder or file"
        )
    return text


def _quoted(option: str) -> str:
    """Quote as sbatch reads it, which knows no shell's way of joining quotes. Raises UsageError."""
    if found := re.search(r"[\x00-\x1f\x7f]", option):
        raise UsageError(
            f"{option!r} has {found[0]!r}, which cannot stand in a line of #SBATCH; rename the folder, or "
            "submit through a link of another name"
        )
    if not re.search(r"[\s'\"#\\]", option):
        return option
    name, equals, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value if equals else name)
    return f'{name}="{escaped}"' if equals else f'"{escaped}"'
