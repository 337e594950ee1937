"""What a task asks Slurm for (JobRequest, whose fields are the commands' flags), and the scripts of the jobs.

Pure: text in, text out; ``submit --dry_run`` prints exactly what sbatch would get. A script is
``prep_array.sh`` with another head, so that set-up, signals and exit codes are written once. The head of an
array's script holds the table of the submission, array index -> shards. Slurm keeps a script from submission
on, so no later file can change what a waiting task will do.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from preprocess.attempts import folder_identity
from shardprep.errors import UsageError

JOB_NAME = "shardprep"
CONTROLLER_SUFFIX = "-control"
LOG_FOLDER = "logs"  # in O/jobs
_PASSED_ON = ("SHARDPREP_PYTHON", "SHARDPREP_SRUN_ARGS", "SHARDPREP_EXEC", "SHARDPREP_SETUP")
# Options of sbatch that a submission sets itself.
_OURS = {"--job-name", "-J", "--array", "-a", "--output", "-o", "--dependency", "-d"}
_OURS |= {"--wrap", "--parsable", "--hold", "-H"}
WHOLE_NODE = "node"  # as --cpus_per_task
_MOST = 10**9  # of CPUs, GB, minutes, tasks


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one task, and how many run at once. None leaves it to the site."""

    partition: str | None = field(default=None, metadata={"help": "partition (default: the site's)"})
    cpus_per_task: int | str = field(
        default=8,
        metadata={"help": "CPUs of a task (default 8); node: all of a node that no other job is on"},
    )
    mem_gb: float | None = field(default=None, metadata={"help": "memory of a task (default: the site's)"})
    mem_per_cpu_gb: float | None = field(
        default=None, metadata={"help": "memory of each CPU of a task, where a site wants it so"}
    )
    time_min: int | None = field(
        default=None, metadata={"help": "time limit of a task (default: the partition's)"}
    )
    max_parallel: int = field(default=50, metadata={"help": "tasks that run at once (default 50)"})
    account: str | None = field(default=None, metadata={"help": "account to charge"})
    qos: str | None = field(default=None, metadata={"help": "quality of service"})
    constraint: str | None = field(default=None, metadata={"help": "features of the nodes"})
    exclude: str | None = field(default=None, metadata={"help": "nodes to leave out, such as n[3-5]"})
    setup: str | None = field(
        default=None,
        metadata={"help": "a file that tasks source first: modules, conda, a virtual environment"},
    )
    container: str | None = field(
        default=None, metadata={"help": "put before Python, such as 'apptainer exec image.sif'"}
    )
    srun_args: str | None = field(
        default=None, metadata={"help": "more options of srun, such as --container-image=... (pyxis)"}
    )
    notify: str | None = field(
        default=None,
        metadata={
            "help": "a command that the verify job runs at its end; SHARDPREP_RESULT says how it ended"
        },
    )
    sbatch_args: str = field(default="", metadata={"help": "more options of sbatch, quoted as one word"})
    worker_args: str = field(
        default="", metadata={"help": "more flags of the worker, such as '--max_bad_fraction 0.05'"}
    )

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(JobRequest).items():
            _check_value(name, getattr(self, name), hint)
        if isinstance(self.cpus_per_task, str) and self.cpus_per_task != WHOLE_NODE:
            raise UsageError(
                f"--cpus_per_task is {self.cpus_per_task!r}, expected a number, or: {WHOLE_NODE}"
            )
        if self.mem_gb is not None and self.mem_per_cpu_gb is not None:
            raise UsageError("--mem_gb and --mem_per_cpu_gb exclude each other; give one of them")
        for name in ("sbatch_args", "worker_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise UsageError(f"--{name} {getattr(self, name)!r} cannot be split: {error}") from None
        for word in shlex.split(self.sbatch_args):
            if re.match("--clusters|-M", word):
                raise UsageError(
                    f"--sbatch_args has {word}; for another cluster: SLURM_CLUSTERS=NAME before submit"
                )
            if word.partition("=")[0] in _OURS or re.match(r"-[JaodH]", word):
                raise UsageError(f"--sbatch_args has {word}, which submit sets itself; leave it out")

    def sbatch_options(self) -> list[str]:
        """The options of sbatch that this stands for. Later ones win: retry must be able to raise memory."""
        options = [
            *shlex.split(self.sbatch_args),
            "--nodes=1",
            "--ntasks=1",
            "--exclusive" if self.num_cpus is None else f"--cpus-per-task={self.num_cpus}",
        ]
        if self.mem_gb is not None:
            options.append(f"--mem={round(self.mem_gb * 1024)}M")
        elif self.mem_per_cpu_gb is not None:
            options.append(f"--mem-per-cpu={round(self.mem_per_cpu_gb * 1024)}M")
        elif self.num_cpus is None:
            options.append("--mem=0")  # all of the node's
        if self.time_min is not None:
            options.append(f"--time={self.time_min}")
        names = ("partition", "account", "qos", "constraint", "exclude")
        return [*options, *(f"--{name}={getattr(self, name)}" for name in names if getattr(self, name))]

    @property
    def num_cpus(self) -> int | None:
        """Of a task; None for those of a whole node, however many it has."""
        return self.cpus_per_task if isinstance(self.cpus_per_task, int) else None

    @property
    def least_mem_gb(self) -> float:
        """What a node must have for one task, as far as the request says it."""
        return self.mem_gb or (self.mem_per_cpu_gb or 0) * (self.num_cpus or 1)

    def changed(self, **changes: Any) -> JobRequest:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


def quoted(folder: Path) -> str:
    """A path as a command that is shown to a user must have it."""
    return shlex.quote(str(folder))


def prep_script() -> str:
    """``prep_array.sh`` as it is installed."""
    return (Path(__file__).parent / "prep_array.sh").read_text(encoding="utf-8")


def job_name(folder: Path, plan_id: str, number: int) -> str:
    """What the jobs of a data set's submission of this number are called, and nothing else is.

    It has the plan's id, the folder's identity (a copy of the data set has the same plan) and the number.
    """
    return f"{names_begin(folder, plan_id)}{number}"


def names_begin(folder: Path, plan_id: str) -> str:
    """What the names of all jobs of a data set begin with."""
    return f"{JOB_NAME}-{plan_id[:12]}-{folder_identity(folder):x}-"


def job_names(folder: Path, plan_id: str, number: int) -> tuple[str, str]:
    """Of a submission's arrays, and of its verify job."""
    name = job_name(folder, plan_id, number)
    return name, f"{name}-verify"


def controller_name(folder: Path, plan_id: str, number: int) -> str:
    """Of the job that sends again what a submission did not make."""
    return f"{job_name(folder, plan_id, number)}{CONTROLLER_SUFFIX}"


def controller_script(folder: Path, name: str, command: str, request: JobRequest) -> str:
    """The script of a job that runs ``command``, which needs Slurm's commands: in no container."""
    small = request.changed(cpus_per_task=1, mem_gb=1.0, mem_per_cpu_gb=None, max_parallel=1)
    options = [f"--job-name={name}", f"--output={_log_pattern(folder, 'control-%j')}"]
    options += small.sbatch_options()
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    if request.setup:
        lines.append(f"source {shlex.quote(os.path.realpath(request.setup))}")
    root = Path(__file__).resolve().parents[1]
    return "\n".join([*lines, f"cd {shlex.quote(str(root))}", f"exec {command}", ""])


def array_script(
    folder: Path,
    name: str,
    tasks: Sequence[str],
    request: JobRequest,
    *,
    settings: Mapping[str, str],
    body: str,
) -> str:
    """The script of an array whose task i makes the shards ``tasks[i]``, such as ``17`` or ``0-5``.

    A task of one shard is the plain worker; several are ``run O --shards``. ``name``: of the job.
    Raises UsageError for values that cannot stand in a script.
    """
    options = [
        f"--job-name={name}",
        f"--array=0-{len(tasks) - 1}%{min(request.max_parallel, len(tasks))}",
        f"--output={_log_pattern(folder, '%A_%a')}",
    ]
    place, flags = shlex.quote(str(folder)), shlex.join(shlex.split(request.worker_args))
    head = [
        f"shardprep_folder={place} shardprep_by=submit",
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
    return _script([*options, *request.sbatch_options()], settings, head, body)


def verify_script(
    folder: Path,
    name: str,
    num_shards: int,
    request: JobRequest,
    *,
    settings: Mapping[str, str],
    body: str,
) -> str:
    """The script of the job that runs ``verify O`` when the arrays have ended, however they did.

    In its log stands "shardprep: verified 1000 shards of O" then, or "shardprep: not verified: 1000 ...".
    """
    small = request.changed(cpus_per_task=min(4, request.num_cpus or 4), max_parallel=1)
    options = [f"--job-name={name}", f"--output={_log_pattern(folder, 'verify-%j')}"]
    head = [f"shardprep_folder={shlex.quote(str(folder))} shardprep_by=submit"]
    head += ["shardprep_what=verify", f"shardprep_command=(verify {shlex.quote(str(folder))})"]
    head.append(f"shardprep_verified={shlex.quote(f'{num_shards} shards of {folder}')}")
    if request.notify:
        head.append(f"shardprep_notify={shlex.quote(request.notify)}")
    return _script([*options, *small.sbatch_options()], settings, head, body)


def settings_of(request: JobRequest, environ: Mapping[str, str], python: str) -> dict[str, str]:
    """The script's SHARDPREP_ variables: the user's own, the set-up file, else this interpreter.

    A container or a set-up file brings its own Python, so then none is named.
    """
    settings = {name: environ[name] for name in _PASSED_ON if environ.get(name)}
    given = {"SHARDPREP_EXEC": request.container, "SHARDPREP_SRUN_ARGS": request.srun_args}
    settings |= {name: value for name, value in given.items() if value}
    if request.setup:
        settings["SHARDPREP_SETUP"] = request.setup
    if "SHARDPREP_SETUP" in settings:
        settings["SHARDPREP_SETUP"] = os.path.realpath(settings["SHARDPREP_SETUP"])
    elif not {"SHARDPREP_EXEC", "SHARDPREP_SRUN_ARGS"} & settings.keys():
        settings.setdefault("SHARDPREP_PYTHON", python)
    return settings


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


def _check_value(name: str, value: object, hint: Any) -> None:
    """Raises UsageError for a value of another type (of a file, say), or a number that no job can have."""
    kind = hint | int if hint == float | None else hint
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"--{name} is {value!r:.60}, expected {getattr(hint, '__name__', hint)}")
    if isinstance(value, int | float) and not 0 < value <= _MOST:
        raise UsageError(f"--{name} is {value}, expected more than 0 and at most {_MOST}")
    if isinstance(value, str) and (found := re.search(r"[\x00-\x1f\x7f]|[\ud800-\udfff]", value)):
        raise UsageError(
            f"--{name} is {value!r:.200}, and {found[0]!r} cannot stand in a job script; leave it out"
        )
