"""The text of a job's script. Pure: ``submit --dry_run`` prints exactly what sbatch would get.

The script is ``prep_array.sh`` with another head, so that set-up, signals and exit codes are written
once. The head holds the table of the submission, array index -> shards. Slurm keeps a script from
submission on, so that no later file can change what a waiting task will do.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from preprocess.shard_format import UsageError
from slurm.job_request import JobRequest

JOB_NAME = "shardprep"
LOG_FOLDER = "logs"  # in O/jobs
_PASSED_ON = ("SHARDPREP_PYTHON", "SHARDPREP_SRUN_ARGS", "SHARDPREP_EXEC", "SHARDPREP_SETUP")


def prep_script() -> str:
    """``prep_array.sh`` as it is installed."""
    return (Path(__file__).parent / "prep_array.sh").read_text(encoding="utf-8")


def array_script(
    folder: Path,
    plan_id: str,
    tasks: Sequence[str],
    request: JobRequest,
    *,
    settings: Mapping[str, str],
    body: str,
) -> str:
    """The script of an array whose task i makes the shards ``tasks[i]``, such as ``17`` or ``0-5``.

    A task of one shard is the plain worker; several are ``run O --shards``. The job's name has the plan's
    id. Raises UsageError for values that cannot stand in a script.
    """
    options = [
        f"--job-name={_job_name(plan_id)}",
        f"--array=0-{len(tasks) - 1}%{min(request.max_parallel, len(tasks))}",
        f"--output={_log_pattern(folder, '%A_%a')}",
    ]
    place, flags = shlex.quote(str(folder)), shlex.join(shlex.split(request.worker_args))
    head = [
        f"shards_of=({' '.join(tasks)})",
        "shards=${shards_of[${SLURM_ARRAY_TASK_ID:-0}]}",
        'if [[ $shards = *[-,]* ]]; then shardprep_what="shards $shards"',
        f'  shardprep_command=(run {place} --shards "$shards" {flags})',
        'else shardprep_what="shard $shards"',
        f'  shardprep_command=(--shard_id "$shards" --output_dir {place} {flags}); fi',
        "# The array's indices are not the shards' numbers, so the worker must not compare them.",
        "unset SLURM_ARRAY_TASK_COUNT",
    ]
    return _script([*options, *request.sbatch_options()], settings, head, body)


def verify_script(
    folder: Path, plan_id: str, request: JobRequest, *, settings: Mapping[str, str], body: str
) -> str:
    """The script of the job that runs ``verify O`` when the arrays have ended, however they did."""
    small = request.changed(cpus_per_task=min(4, request.cpus_per_task), max_parallel=1)
    options = [f"--job-name={_job_name(plan_id)}-verify", f"--output={_log_pattern(folder, 'verify-%j')}"]
    head = ["shardprep_what=verify", f"shardprep_command=(verify {shlex.quote(str(folder))})"]
    return _script([*options, *small.sbatch_options()], settings, head, body)


def settings_of(request: JobRequest, environ: Mapping[str, str], python: str) -> dict[str, str]:
    """The script's SHARDPREP_ variables: the user's own, the set-up file, else this interpreter.

    A container or a set-up file brings its own Python, so then none is named.
    """
    settings = {name: environ[name] for name in _PASSED_ON if environ.get(name)}
    if request.setup:
        settings["SHARDPREP_SETUP"] = request.setup
    if "SHARDPREP_SETUP" in settings:
        settings["SHARDPREP_SETUP"] = os.path.realpath(settings["SHARDPREP_SETUP"])
    elif not {"SHARDPREP_EXEC", "SHARDPREP_SRUN_ARGS"} & settings.keys():
        settings.setdefault("SHARDPREP_PYTHON", python)
    return settings


def _job_name(plan_id: str) -> str:
    return f"{JOB_NAME}-{plan_id[:12]}"


def _log_pattern(folder: Path, name: str) -> str:
    if "\\" in str(folder):
        raise UsageError(
            f"{folder} has a backslash, with which Slurm puts no job's number into a log's name; rename "
            "the folder, or submit through a link of another name"
        )
    return f"{str(folder).replace('%', '%%')}/jobs/{LOG_FOLDER}/{name}.log"


def _script(options: Sequence[str], settings: Mapping[str, str], head: Sequence[str], body: str) -> str:
    match = re.search(r"^set -euo pipefail$", body, re.MULTILINE)
    assert match, "prep_array.sh has changed its first command"
    lines = [
        "#!/bin/bash",
        "# Made by `python -m slurm submit`: slurm/prep_array.sh with another head.",
        *(f"#SBATCH {_quoted(option)}" for option in ["--open-mode=append", *options]),
        *(f"export {name}={shlex.quote(settings.get(name, ''))}" for name in _PASSED_ON),
        *head,
        'echo "shardprep: node ${SLURMD_NODENAME:-}: $shardprep_what begins" >&2',
    ]
    text = "\n".join(lines) + "\n" + body[match.start() :]
    if found := re.search(r"^.*[\ud800-\udfff].*$", text, re.MULTILINE):
        raise UsageError(
            f"a job script must be UTF-8, and this line of it is not: {found[0]!r}; rename the folder or file"
        )
    return text


def _quoted(option: str) -> str:
    """sbatch splits at blanks and knows quotes, but not a shell's way of ending and joining them.

    Raises UsageError for a line end or the like: behind it the rest would be a command of the script.
    """
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
