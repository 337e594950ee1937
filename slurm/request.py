"""What a user asks for: the resources of a task, and how tasks are sent."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardprep.errors import UsageError
from shardprep.format import json_files
from shardprep.format.jobs import JobArray
from shardprep.option import option
from slurm.commands import REQUEST_VARIABLES, megabytes_of, minutes_of

# Fields that exclude each other.
MEMORY_FIELDS = ("mem_gb", "mem_per_cpu_gb")
SIZE_FIELDS = ("cpus_per_task", "nodes")
MEMORY_OPTIONS = {"--mem", "--mem-per-cpu", "--mem-per-gpu"}  # of sbatch, which takes one of them
_SET_BY_SUBMIT = {"--job-name", "--array", "--output", "--wrap", "--parsable", "--hold"}  # of sbatch
_MAX_NUMBER = 10**9  # CPUs, GB, minutes or tasks
_node_flag = functools.partial(option, group="partition, account and nodes")
_task_flag = functools.partial(option, group="resources of a task")
_run_flag = functools.partial(option, group="set-up, container and more options")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one task, and how many tasks run at once. None means the site's default."""

    partition: str | None = _node_flag(None, "partition (default: the site's)")
    cpus_per_task: int | str = _task_flag(
        1,
        "CPUs of a task (default: 1, or the node where nodes are not shared); node: a whole node, without "
        "other jobs",
    )
    nodes: int | None = _task_flag(
        None,
        "whole nodes: one job of this many nodes makes all shards, in place of an array; with "
        "--shards_per_task several such jobs",
    )
    mem_gb: float | None = _task_flag(None, "memory of a task (default: the site's)")
    mem_per_cpu_gb: float | None = _task_flag(None, "memory per CPU of a task, for sites that require it")
    time_min: int | None = _task_flag(None, "time limit of a task (default: the partition's)")
    max_parallel: int = _task_flag(50, "tasks that run at once (default: 50)")
    small_partition: str | None = _node_flag(
        None, "partition of the verify job and the controller (default: --partition)"
    )
    account: str | None = _node_flag(None, "account to charge (default: the site's)")
    qos: str | None = option(None)  # set by SBATCH_QOS; the next two likewise
    constraint: str | None = option(None)
    exclude: str | None = option(None)
    setup: str | None = _run_flag(
        None,
        "a file that tasks source first: modules, conda, a virtual environment; for hundreds of tasks use "
        "examples/environment_on_node.sh",
    )
    container: str | None = _run_flag(None, "command to run Python in, such as 'apptainer exec image.sif'")
    srun_args: str | None = _run_flag(None, "more options of srun, such as --container-image=... (pyxis)")
    notify: str | None = _run_flag(
        None, "a command that the verify job runs at its end; SHARDPREP_RESULT has the result"
    )
    sbatch_args: str = _run_flag("", "more options of sbatch, quoted as one word")
    controller_args: str = _run_flag(
        "", "options of sbatch for the verify job and the controller, such as '--partition=small --mem=2G'"
    )
    worker_args: str = _run_flag("", "more flags of the worker, such as '--max_bad_fraction 0.05'")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 < value <= _MAX_NUMBER:
                raise UsageError.of_value(f"--{name}", value, f"more than 0 and at most {_MAX_NUMBER}")
            found = re.search(r"[\x00-\x1f\x7f]|[\ud800-\udfff]", value) if isinstance(value, str) else None
            if found:
                expected = f"a value without {found[0]!r}, which a job script cannot contain"
                raise UsageError.of_value(f"--{name}", value[:200], expected)
        if isinstance(self.cpus_per_task, str) and self.cpus_per_task != "node":
            raise UsageError.of_value("--cpus_per_task", self.cpus_per_task, "a number, or: node")
        if self.nodes is not None and self.cpus_per_task not in (1, "node"):
            raise UsageError(
                found=f"--nodes and --cpus_per_task {self.cpus_per_task}", expected="one of them"
            )
        if self.mem_gb is not None and self.mem_per_cpu_gb is not None:
            raise UsageError(found="--mem_gb and --mem_per_cpu_gb", expected="one of them")
        for name in ("sbatch_args", "controller_args", "worker_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                expected = f"words of a shell ({error})"
                raise UsageError.of_value(f"--{name}", getattr(self, name), expected) from None
        for name in ("sbatch_args", "controller_args"):
            for word in shlex.split(getattr(self, name)):
                _check_sbatch_word(f"--{name} {word}", word)

    def sbatch_options(self) -> list[str]:
        """Return the options of sbatch. The last of equal ones applies, so that retry can raise memory."""
        options = _words_of_sbatch(self.sbatch_args)
        if self.mem_gb is not None or self.mem_per_cpu_gb is not None:  # sbatch takes one form of memory
            options = [each for each in options if each.partition("=")[0] not in MEMORY_OPTIONS]
        if self.nodes is None:
            options += ["--nodes=1", "--ntasks=1"]
        else:  # if a node dies, the others go on
            options += [f"--nodes={self.nodes}", "--ntasks-per-node=1", "--no-kill"]
        options.append("--exclusive" if self.num_cpus is None else f"--cpus-per-task={self.num_cpus}")
        if self.mem_gb is not None:
            options.append(f"--mem={round(self.mem_gb * 1024)}M")
        elif self.mem_per_cpu_gb is not None:
            options.append(f"--mem-per-cpu={round(self.mem_per_cpu_gb * 1024)}M")
        elif self.num_cpus is None and not self.names_memory:
            options.append("--mem=0")  # all of the node's
        if self.time_min is not None:
            options.append(f"--time={self.time_min}")
        for_site = ("partition", "account", "qos", "constraint", "exclude")
        return [*options, *(f"--{name}={getattr(self, name)}" for name in for_site if getattr(self, name))]

    @property
    def names_memory(self) -> bool:
        """Return whether the user asks for some memory, by a flag or an option of sbatch."""
        given = {each.partition("=")[0] for each in _words_of_sbatch(self.sbatch_args)}
        return self.mem_gb is not None or self.mem_per_cpu_gb is not None or bool(given & MEMORY_OPTIONS)

    @property
    def num_cpus(self) -> int | None:
        """Return the CPUs of a task, or None for all CPUs of its nodes."""
        if self.nodes is not None or isinstance(self.cpus_per_task, str):
            return None
        return self.cpus_per_task

    def changed(self, **changes: Any) -> JobRequest:
        """Return a copy with changes. Memory of one kind replaces the other kind, CPUs replace nodes."""
        return JobRequest(**with_changes(dataclasses.asdict(self), changes))


def _words_of_sbatch(args: str) -> list[str]:
    """Split options of sbatch. A value behind its option stays with it: each gets its own line."""
    words: list[str] = []
    for word in shlex.split(args):
        if words and not word.startswith("-"):
            joint = "=" if words[-1].startswith("--") else ""
            words[-1] += f"{joint}{word}"
        else:
            words.append(word)
    return words


def _check_sbatch_word(given: str, word: str) -> None:
    """Raise UsageError for an option of sbatch that would break a submission."""
    if re.match("--clusters|-M", word):
        expected = "no cluster; for another one, set SLURM_CLUSTERS=NAME"
        raise UsageError(found=given, expected=expected)
    if word.partition("=")[0] in _SET_BY_SUBMIT or re.match(r"-[JaoH]", word):
        raise UsageError(found=given, expected="options that submit does not set itself")


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a request with changes, see ``JobRequest.changed``."""
    replaced: set[str] = set()
    for fields in (MEMORY_FIELDS, SIZE_FIELDS):
        if any(changes.get(name) is not None for name in fields):
            replaced.update(fields)
    return {**{name: value for name, value in values.items() if name not in replaced}, **changes}


def request_of(array: JobArray) -> JobRequest:
    """Return the request of a recorded array. Raises BrokenShard or UsageError if it is none."""
    return json_files.as_type(Path("request"), array.request, JobRequest)


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that flags give, or else variables of sbatch and prep_array.sh."""
    found: dict[str, Any] = {}
    for name, variable in REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        such_as = ""
        if name == "time_min":
            value = minutes_of(text)
            such_as = "60 or 2:00:00"
        elif name in MEMORY_FIELDS:
            value = (megabytes_of(text) or 0) / 1024
            such_as = "4000 or 4G"
        if not value:
            expected = f"a value such as {such_as}; unset it, or give the flag --{name} too"
            raise UsageError.of_value(variable, text[:60], expected)
        found[name] = value
    given = with_changes(found, flags)
    if given.get("setup"):
        given["setup"] = os.path.abspath(os.path.expanduser(given["setup"]))  # noqa: PTH100, PTH111 - text
    return given


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    """How ``submit`` and ``retry`` send tasks."""

    command: Literal["submit", "retry"]
    shards: str | None = None  # such as 0-9,12; None: all
    shards_per_task: int | None = None
    dry_run: bool = False  # print the scripts and send nothing
    wait: bool = False  # until all jobs have ended
    until_done: bool = False  # with a controller behind the tasks
    round: int | None = None  # of a controller; None: a person typed the command

    @property
    def is_typed(self) -> bool:
        """Return whether a person typed the command, after which failures count anew."""
        return self.round is None

    @property
    def next_round(self) -> int:
        """Return the round of the controller behind these tasks."""
        return (self.round or 1) + 1 if self.command == "retry" else 1
