"""What a job array asks Slurm for: one frozen dataclass whose fields are the commands' flags."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from preprocess.shard_format import UsageError

_OURS = (
    "--job-name",
    "-J",
    "--array",
    "-a",
    "--output",
    "-o",
    "--dependency",
    "-d",
    "--wrap",
    "--parsable",
    "--hold",
    "-H",
)


_MOST = 10**9  # of CPUs, GB, minutes, tasks


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one task, and how many run at once. None leaves it to the site."""

    partition: str | None = field(default=None, metadata={"help": "partition (default: the site's)"})
    cpus_per_task: int = field(default=8, metadata={"help": "CPUs of a task (default 8)"})
    mem_gb: float | None = field(default=None, metadata={"help": "memory of a task (default: the site's)"})
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
    sbatch_args: str = field(default="", metadata={"help": "more options of sbatch, quoted as one word"})
    worker_args: str = field(
        default="", metadata={"help": "more flags of the worker, such as '--max_bad_fraction 0.05'"}
    )

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(JobRequest).items():
            _check_value(name, getattr(self, name), hint)
        for name in ("sbatch_args", "worker_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise UsageError(f"--{name} {getattr(self, name)!r} cannot be split: {error}") from None
        for word in shlex.split(self.sbatch_args):
            if word.partition("=")[0] in _OURS or re.match(r"-[JaodH]", word):
                raise UsageError(f"--sbatch_args has {word}, which submit sets itself; leave it out")

    def sbatch_options(self) -> list[str]:
        """The options of sbatch that this stands for. Later ones win: retry must be able to raise memory."""
        options = [
            *shlex.split(self.sbatch_args),
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={self.cpus_per_task}",
        ]
        if self.mem_gb is not None:
            options.append(f"--mem={round(self.mem_gb * 1024)}M")
        if self.time_min is not None:
            options.append(f"--time={self.time_min}")
        names = ("partition", "account", "qos", "constraint", "exclude")
        return [*options, *(f"--{name}={getattr(self, name)}" for name in names if getattr(self, name))]

    def changed(self, **changes: object) -> JobRequest:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


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


HELP = {item.name: str(item.metadata["help"]) for item in dataclasses.fields(JobRequest)}
