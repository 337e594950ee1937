"""What a task asks Slurm for: JobRequest, whose fields are the flags of ``submit``, and where they come from.

A value is that of a flag, or of a variable of sbatch (SBATCH_PARTITION) or of prep_array.sh. Some fields name
commands, so no file of a data set gives any of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from shardprep.command_line import option
from shardprep.errors import UsageError
from slurm.commands import REQUEST_VARIABLES, megabytes_of, minutes_of

WHOLE_NODE = "node"  # as --cpus_per_task
_MEMORY = ("mem_gb", "mem_per_cpu_gb")  # they exclude each other
# Options of sbatch that a submission sets itself.
_OURS = {"--job-name", "--array", "--output", "--wrap", "--parsable", "--hold"}
_MOST = 10**9  # of CPUs, GB, minutes, tasks
_NODES = "partition, account and nodes"
_RESOURCES = "resources of a task"
_RUNS = "set-up, container and more options"
FLAG_GROUPS = (_NODES, _RESOURCES, _RUNS)
# Fields that name commands, or that may hold options which do.
COMMANDS = ("setup", "container", "srun_args", "notify", "sbatch_args", "worker_args")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one task, and how many run at once. None leaves it to the site."""

    partition: str | None = option(None, "partition (default: the site's)", group=_NODES)
    cpus_per_task: int | str = option(
        8, "CPUs of a task (default: 8); node: all of a node that no other job is on", group=_RESOURCES
    )
    mem_gb: float | None = option(None, "memory of a task (default: the site's)", group=_RESOURCES)
    mem_per_cpu_gb: float | None = option(
        None, "memory per CPU of a task, for sites that require it", group=_RESOURCES
    )
    time_min: int | None = option(None, "time limit of a task (default: the partition's)", group=_RESOURCES)
    max_parallel: int = option(50, "tasks that run at once (default: 50)", group=_RESOURCES)
    account: str | None = option(None, "account to charge (default: the site's)", group=_NODES)
    qos: str | None = option(None, "quality of service (default: the site's)", group=_NODES)
    constraint: str | None = option(None, "features of the nodes", group=_NODES)
    exclude: str | None = option(None, "nodes to leave out, such as n[3-5]", group=_NODES)
    setup: str | None = option(
        None, "a file that tasks source first: modules, conda, a virtual environment", group=_RUNS
    )
    container: str | None = option(None, "put before Python, such as 'apptainer exec image.sif'", group=_RUNS)
    srun_args: str | None = option(
        None, "more options of srun, such as --container-image=... (pyxis)", group=_RUNS
    )
    notify: str | None = option(
        None, "a command that the verify job runs at its end; SHARDPREP_RESULT says how it ended", group=_RUNS
    )
    sbatch_args: str = option("", "more options of sbatch, quoted as one word", group=_RUNS)
    worker_args: str = option("", "more flags of the worker, such as '--max_bad_fraction 0.05'", group=_RUNS)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(JobRequest).items():
            _check_value(name, getattr(self, name), hint)
        if self.num_cpus is None and self.cpus_per_task != WHOLE_NODE:
            raise UsageError(
                f"--cpus_per_task is {self.cpus_per_task!r}, expected a number, or: {WHOLE_NODE}"
            )
        if self.mem_gb is not None and self.mem_per_cpu_gb is not None:
            raise UsageError(
                "--mem_gb and --mem_per_cpu_gb exclude each other; give one of them",
                found="--mem_gb and --mem_per_cpu_gb",
                expected="one of them",
            )
        for name in ("sbatch_args", "worker_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise UsageError(f"--{name} {getattr(self, name)!r} cannot be split: {error}") from None
        for word in shlex.split(self.sbatch_args):
            has = f"--sbatch_args has {word}"
            if re.match("--clusters|-M", word):
                raise UsageError(f"{has}; for another cluster: SLURM_CLUSTERS=NAME before submit")
            if word.partition("=")[0] in _OURS or re.match(r"-[JaoH]", word):
                raise UsageError(
                    f"{has}, which submit sets itself; leave it out", found=f"--sbatch_args {word}"
                )

    def sbatch_options(self) -> list[str]:
        """The options of sbatch that this stands for. Later ones win: retry must be able to raise memory."""
        options = [*shlex.split(self.sbatch_args), "--nodes=1", "--ntasks=1"]
        options.append("--exclusive" if self.num_cpus is None else f"--cpus-per-task={self.num_cpus}")
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
        """Return a copy with other values; memory of one kind replaces memory of the other kind."""
        return JobRequest(**with_changes(dataclasses.asdict(self), changes))


def _check_value(name: str, value: object, hint: Any) -> None:
    """Raises UsageError for a value of another type (of a file, say), or a number that no job can have."""
    kind = hint | int if hint == float | None else hint
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"--{name} is {value!r:.60}, expected {getattr(hint, '__name__', hint)}")
    if isinstance(value, int | float) and not 0 < value <= _MOST:
        raise UsageError.of_value(f"--{name}", value, f"more than 0 and at most {_MOST}")
    if isinstance(value, str) and (found := re.search(r"[\x00-\x1f\x7f]|[\ud800-\udfff]", value)):
        raise UsageError(
            f"--{name} is {value!r:.200}, and {found[0]!r} cannot stand in a job script; leave it out"
        )


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a request with changes; memory of one kind replaces memory of the other kind."""
    replaced = _MEMORY if any(changes.get(name) is not None for name in _MEMORY) else ()
    return {**{name: value for name, value in values.items() if name not in replaced}, **changes}


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the user gave by flags, or else by sbatch's and prep_array.sh's own variables.

    A set-up file's path becomes absolute. Raises UsageError for a time or memory that cannot be read.
    """
    found: dict[str, Any] = {}
    for name, variable in REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        if name in ("time_min", *_MEMORY):
            value = minutes_of(text) if name == "time_min" else (megabytes_of(text) or 0) / 1024
            if not value:
                expected = "60 or 2:00:00" if name == "time_min" else "4000 or 4G"
                raise UsageError(
                    f"{variable} is {text!r:.60}, expected a value such as {expected}; "
                    f"unset it, or give the flag --{name} too"
                )
        found[name] = value
    given = with_changes(found, flags)
    if given.get("setup"):
        given["setup"] = os.path.abspath(os.path.expanduser(given["setup"]))  # noqa: PTH100, PTH111 - text
    return given
