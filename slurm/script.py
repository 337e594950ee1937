"""The scripts of the jobs.

A script is ``prep_array.sh`` with another head, so that set-up, signals and exit codes are written once. The
head of an array's script holds the table of the submission, array index -> shards. Slurm keeps a script from
submission on, so no later file can change what a waiting task will do.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shardprep.errors import UsageError
from shardprep.format.attempts import LOGS_FOLDER, folder_identity
from shardprep.format.submissions import JobRequest
from shardprep.own_packages import HOME
from slurm.commands import REQUEST_VARIABLES

JOB_NAME = "shardprep"
VERIFY, CONTROL = "-verify", "-control"  # end the names of such jobs


def names_begin(folder: Path, plan_id: str) -> str:
    """Return what the names of all jobs of a data set begin with, before the number of the submission."""
    return f"{JOB_NAME}-{plan_id[:12]}-{folder_identity(folder)}-"


def controller_script(
    folder: Path, name: str, command: str, request: JobRequest, *, time_min: int | None
) -> str:
    """Return the script of a job that runs ``command``, which needs Slurm's commands: in no container."""
    small = request.changed(
        cpus_per_task=1, mem_gb=1.0, mem_per_cpu_gb=None, max_parallel=1, time_min=time_min
    )
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
        f"shards_of=({' '.join(tasks)})",
        "shards=${shards_of[${SLURM_ARRAY_TASK_ID:-0}]}",
        'if [[ $shards = *[-,]* ]]; then shardprep_what="shards $shards"',
        f'  shardprep_command=(run {place} --shards "$shards" {flags})',
        'else shardprep_what="shard $shards"',
        f'  shardprep_command=(--shard_id "$shards" --planned --output_dir {place} {flags}); fi',
        "# The array's indices are not the shards' numbers, so the worker must not compare them.",
        "unset SLURM_ARRAY_TASK_COUNT",
    ]
    if len(parts := name.split("-")) > 3:  # see ``names_begin``: as this host sees the folder
        head.append(f"shardprep_identity={parts[2]}")
    if request.num_cpus is None:
        head.append("export SLURM_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE")
    return _script(options, request, head)


def verify_script(
    folder: Path, name: str, num_shards: int, request: JobRequest, *, time_min: int | None = None
) -> str:
    """Return the script of the job that runs ``verify DATA`` when the arrays have ended, however they did."""
    num_cpus = min(4, request.num_cpus or 4)
    small = request.changed(cpus_per_task=num_cpus, max_parallel=1, time_min=time_min)
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


def _settings(request: JobRequest) -> dict[str, str]:
    """Return the script's SHARDPREP_ variables. A container or a set-up file brings a Python of its own."""
    names = {each: name for each, name in REQUEST_VARIABLES.items() if name.startswith("SHARDPREP_")}
    settings = {name: getattr(request, each) or "" for each, name in names.items()}
    python = os.environ.get("SHARDPREP_PYTHON") or ("" if any(settings.values()) else sys.executable)
    return {"SHARDPREP_PYTHON": python, **settings}


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
    lines = [
        "#!/bin/bash",
        "# Made by `python -m slurm submit`: slurm/prep_array.sh with another head.",
        *(f"#SBATCH {_quoted(option)}" for option in options),
        *(f"export {name}={shlex.quote(value)}" for name, value in _settings(request).items()),
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
