"""The job scripts of tasks and of verify.

A script is ``prep_array.sh`` with another head, which contains the table array index -> shards. Slurm keeps a
copy of the script from submission on, so later changes of files do not affect waiting tasks.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shardprep.errors import UsageError
from shardprep.format import attempts
from shardprep.format.data_folder import LOGS_FOLDER, DataFolder
from shardprep.format.names import id_ranges
from slurm.commands import REQUEST_VARIABLES
from slurm.fit import NUM_PROC
from slurm.refusals import TASKS, VERIFY_JOB, options_of
from slurm.request import JobRequest


def tasks_of_shards(shard_ids: Sequence[int], max_tasks: int, shards_per_task: int | None) -> list[str]:
    """Divide shards into tasks of at least ``shards_per_task`` (1) shards, such as ``17`` or ``0-5``."""
    wanted = -(-len(shard_ids) // (shards_per_task or 1))
    num_tasks = max(1, min(wanted, max_tasks))
    bounds = [len(shard_ids) * number // num_tasks for number in range(num_tasks + 1)]
    return [id_ranges(shard_ids[start:end]) for start, end in itertools.pairwise(bounds)]


def array_script(folder: Path, name: str, tasks: Sequence[str], request: JobRequest) -> str:
    """Render the script of an array whose task i makes the shards ``tasks[i]``, such as ``17`` or ``0-5``."""
    array = f"--array=0-{len(tasks) - 1}%{min(request.max_parallel, len(tasks))}"
    place = shlex.quote(str(folder))
    flags = shlex.join(shlex.split(request.worker_args))
    several = "*[-,]*"
    if request.nodes or re.search(NUM_PROC, request.worker_args):  # only `run` has this flag
        several = "*"
    lines = [
        f"shardprep_folder={place}",
        f"shardprep_identity={attempts.folder_identity(DataFolder(folder))}",  # as this host sees the folder
        f"shards_of=({' '.join(tasks)})",
        "# An index is evaluated: other text than a number could run a command.",
        "[[ ${SLURM_ARRAY_TASK_ID:-0} =~ ^(0|[1-9][0-9]*)$ ]] || exit 2",
        "shards=${shards_of[${SLURM_ARRAY_TASK_ID:-0}]}",
        f'if [[ $shards = {several} ]]; then shardprep_what="shards $shards"',
        f'  shardprep_command=(run {place} --shards "$shards" {flags})',
        'else shardprep_what="shard $shards"',
        f'  shardprep_command=(--shard_id "$shards" --planned --output_dir {place} {flags}); fi',
        "# Array indices are not shard numbers, so the worker must not compare them.",
        "unset SLURM_ARRAY_TASK_COUNT",
    ]
    if request.num_cpus is None and request.nodes is None:
        lines.append("export SLURM_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE")
    return _script(script_head(folder, name, "%A_%a", [array, *options_of(TASKS, request)]), request, lines)


def verify_script(folder: Path, name: str, num_shards: int, request: JobRequest) -> str:
    """Render the script of the job that runs ``verify DATA`` after the arrays, whether they failed or not."""
    place = shlex.quote(str(folder))
    lines = [
        f"shardprep_folder={place}",
        f"shardprep_what=verify shardprep_command=(verify {place})",
        f"shardprep_verified={shlex.quote(f'{num_shards} shards of {folder}')}",
    ]
    lines += [f"shardprep_notify={shlex.quote(request.notify)}"] if request.notify else []
    head = script_head(folder, name, "verify-%j", options_of(VERIFY_JOB, request))
    return _script(head, request, [*lines, _VERIFY_END])


# prep_array.sh calls this at its end. It prints a line to grep for, and runs --notify.
_VERIFY_END = """shardprep_end() {
  export SHARDPREP_RESULT=verified SHARDPREP_EXIT_CODE=$1
  if (($1)); then SHARDPREP_RESULT="not verified"; fi
  echo "shardprep: ${SHARDPREP_RESULT/not verified/not verified:} $shardprep_verified" >&2
  [[ -z ${shardprep_notify:-} ]] || bash -c "$shardprep_notify" || say "--notify ended with exit code $?"
}"""


def script_head(folder: Path, name: str, log: str, options: Sequence[str]) -> list[str]:
    """Render the first lines of a script: the shell and the options of sbatch."""
    if "\\" in str(folder):
        expected = "none: Slurm would not put the job id into log names; rename the folder"
        raise UsageError(path=folder, found="a backslash in its name", expected=expected)
    output = f"--output={str(folder).replace('%', '%%')}/{LOGS_FOLDER}/{log}.log"
    options = ("--open-mode=append", f"--job-name={name}", output, *options)
    return ["#!/bin/bash", *(f"#SBATCH {_quoted_for_sbatch(each)}" for each in options)]


def _script(head: Sequence[str], request: JobRequest, body: Sequence[str]) -> str:
    """Render ``prep_array.sh`` with another head."""
    prep_array = (Path(__file__).parent / "prep_array.sh").read_text(encoding="utf-8")
    first = "set -euo pipefail\n"
    names = {field: name for field, name in REQUEST_VARIABLES.items() if name.startswith("SHARDPREP_")}
    settings = {name: getattr(request, field) or "" for field, name in names.items()}
    # A container or a set-up file has its own Python.
    python = os.environ.get("SHARDPREP_PYTHON") or ("" if any(settings.values()) else sys.executable)
    settings = {"SHARDPREP_PYTHON": python, **settings}
    lines = [
        *head,
        "# Made by `python -m slurm submit`: slurm/prep_array.sh with another head.",
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        *body,
        'echo "shardprep: node ${SLURMD_NODENAME:-}: $shardprep_what begins" >&2',
    ]
    text = "\n".join(lines) + "\n" + first + prep_array.partition(f"\n{first}")[2]
    found = re.search(r"^.*[\ud800-\udfff].*$", text, re.MULTILINE)
    if found:
        raise UsageError(found=repr(found[0]), expected="UTF-8 in a job script; rename the folder or file")
    return text


def _quoted_for_sbatch(option: str) -> str:
    """Quote an option for an #SBATCH line, where quotes cannot be joined as in a shell. Raises UsageError."""
    found = re.search(r"[\x00-\x1f\x7f]", option)
    if found:
        expected = f"no {found[0]!r}, which is not possible in an #SBATCH line; rename the folder"
        raise UsageError(found=repr(option), expected=expected)
    if not re.search(r"[\s'\"#\\]", option):
        return option
    name, equals, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value if equals else name)
    return f'{name}="{escaped}"' if equals else f'"{escaped}"'
