"""What a task asks Slurm for: JobRequest, whose fields are the flags of ``submit``, and where they come from.

Defaults of a site, a user and a data set stand in ``shardprep.toml``: the table [slurm], and
[slurm.profiles.NAME] for --profile. Of three files the nearer one wins, key by key: /etc/shardprep.toml, the
user's (~/.config/shardprep.toml), and the data set's own. Flags and sbatch's variables (SBATCH_PARTITION) win
over all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from shardprep.command_line import option
from shardprep.errors import CannotWrite, UsageError
from shardprep.files import NOT_THERE, publish_bytes, read_regular
from slurm.commands import REQUEST_VARIABLES, megabytes_of, minutes_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "shardprep.toml"
WHOLE_NODE = "node"  # as --cpus_per_task
_MEMORY = ("mem_gb", "mem_per_cpu_gb")  # they exclude each other
# Options of sbatch that a submission sets itself.
_OURS = {"--job-name", "--array", "--output", "--dependency", "--wrap", "--parsable", "--hold"}
_MOST = 10**9  # of CPUs, GB, minutes, tasks
_SITE = Path("/etc")
_MAX_BYTES = 1 << 20
_NODES = "partition, account and nodes"
_RESOURCES = "resources of a task"
_RUNS = "set-up, container and more options"
FLAG_GROUPS = (_NODES, _RESOURCES, _RUNS)


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
            if word.partition("=")[0] in _OURS or re.match(r"-[JaodH]", word):
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


_FIELDS = [item.name for item in dataclasses.fields(JobRequest)]


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
    return _with_whole_setup(with_changes(found, flags), "")


def _with_whole_setup(values: dict[str, Any], base: str | Path) -> dict[str, Any]:
    """The values with the absolute path of a set-up file that was given relative to a folder."""
    if not values.get("setup"):
        return values
    path = os.path.join(base, os.path.expanduser(values["setup"]))  # noqa: PTH111, PTH118 - text
    return {**values, "setup": os.path.abspath(path)}  # noqa: PTH100


def user_file() -> Path:
    """The user's own file, whether it is there or not."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config", FILE_NAME)


def find_defaults(folder: Path, profile: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that the three files and the chosen profile give, and where each was found.

    Raises UsageError for what cannot be used, naming file and key, and what reading the files raises.
    """
    places = (_SITE / FILE_NAME, user_file(), folder / FILE_NAME)
    tables = [(path, _read(path)) for path in places]
    for _, table in reversed(tables):  # the nearer one first
        chosen = table.pop("profile", None)
        profile = profile or chosen
    profiles = [(path, table.pop("profiles", {})) for path, table in tables]
    if profile is not None and not any(profile in each for _, each in profiles):
        known = sorted({name for _, each in profiles for name in each})
        raise UsageError(
            f"there is no profile {profile!r}; known: {', '.join(known) or 'none'} "
            f"(looked into {', '.join(map(str, places))})"
        )
    found = [(str(path), table) for path, table in tables]
    found += [(f"profile {profile} of {path}", each[profile]) for path, each in profiles if profile in each]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, table in found:
        values = with_changes(values, table)
        sources |= dict.fromkeys(table, source)
    return values, sources


def save_profile(name: str, values: Mapping[str, Any], *, dry_run: bool = False) -> Path:
    """Write a profile into the user's file, in place of one of this name; the rest of the file stays.

    A dry run checks the same and writes nothing. Raises UsageError for a name that is none, CannotWrite or
    ReadWriteError.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise UsageError(f"--save_profile is {name!r}, expected letters, digits, - and _")
    path = user_file()
    _read(path)  # a file that cannot be read must not be written over
    if dry_run:
        return path
    try:
        text = read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8")
    except NOT_THERE:
        text = ""
    header = f"[slurm.profiles.{name}]"
    kept = re.sub(rf"^{re.escape(header)}.*?(?=^\[|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).rstrip()
    lines = [header, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
    publish_bytes(path, ("\n\n".join(filter(None, (kept, "\n".join(lines)))) + "\n").encode("utf-8"))
    return path


def _read(path: Path) -> dict[str, Any]:
    """The table [slurm] of a file, checked; {} where there is none. Other tables may be others'."""
    try:
        table = tomllib.loads(read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8")).get("slurm", {})
    except NOT_THERE:
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {error}; mend it or move it away") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: slurm is {table!r:.60}, expected a table: [slurm]")
    profiles, profile = table.pop("profiles", {}), table.pop("profile", None)
    if not isinstance(profiles, dict) or not all(isinstance(each, dict) for each in profiles.values()):
        raise UsageError(f"{path}: profiles must be tables such as [slurm.profiles.leonardo]")
    if profile is not None and not isinstance(profile, str):
        raise UsageError(f"{path}: profile is {profile!r:.60}, expected the name of a profile")
    checked = {name: _checked(path, f"[slurm.profiles.{name}]", each) for name, each in profiles.items()}
    return {**_checked(path, "[slurm]", table), "profiles": checked, "profile": profile}


def _checked(path: Path, where: str, table: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(table.keys() - set(_FIELDS)):
        raise UsageError(f"{path}: {where} has {unknown[0]!r}, expected: {', '.join(_FIELDS)}")
    for name, value in table.items():
        try:
            JobRequest(**{name: value})
        except UsageError as error:
            raise UsageError(f"{path}: {where}: {error}") from None
    return _with_whole_setup(table, path.parent)
