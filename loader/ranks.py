"""The rank of this process, and ``ensure_prepared``, with which a training job makes its data set first.

Rank 0 plans, makes and verifies the shards in child processes. The other ranks wait for index.json, and
compare the plan and the inputs with their own arguments. Ranks coordinate through the file system only: if
rank 0 fails, it writes ``.NAME.failed.json`` next to the data set's folder. Two jobs at once only waste time,
since they write equal bytes and skip shards that are done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.command_line import check_names_are_utf8
from shardprep.console import say
from shardprep.errors import NotFound, ReadWriteError, Refused, ShardprepError, UsageError
from shardprep.files import read_regular, size_of_file
from shardprep.format.names import INDEX_NAME, PLAN_NAME
from shardprep.launch import MPI, TORCHRUN, find_launch
from shardprep.local_paths import check_local_path
from shardprep.processes import start_python
from shardprep.publishing import publish_bytes

_LAUNCHERS = (TORCHRUN, *MPI)
_OR_PASSED = "or rank= and world_size="


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """Data-parallel rank and world size, and where they come from.

    Processes that share data (tensor or pipeline parallelism) have the same data-parallel rank.
    """

    rank: int
    world_size: int
    source: str  # such as "RANK/WORLD_SIZE", for messages
    is_passed: bool = False  # by the caller, so it takes precedence

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(found=f"{self}", expected="0 <= rank < world_size")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} (from {self.source})"


def find_process_rank(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> ProcessRank:
    """Return the rank from the arguments, else torch.distributed, else the launcher, else rank 0 of 1.

    Call it in the process that trains. Launchers set RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_*, PMI_*
    (MPICH, Intel MPI), or the variables of an srun step; ``environ`` replaces os.environ. Raises UsageError
    if only one of rank and world size is given, or a variable is not a number.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(found=f"rank={rank} and world_size={world_size}", expected="both or neither")
        return ProcessRank(rank=rank, world_size=world_size, source="arguments", is_passed=True)
    found = _rank_from(os.environ if environ is None else environ)
    return found or ProcessRank(rank=0, world_size=1, source="nothing set: one process")


def check_process_rank(who: ProcessRank) -> None:
    """Raise UsageError if this process now has another rank, since ranks would get the same batches."""
    now = None if who.is_passed else _rank_from(os.environ)
    if now is not None and (now.rank, now.world_size) != (who.rank, who.world_size):
        expected = f"a loader made in each rank, after init_process_group, {_OR_PASSED}"
        raise UsageError(found=f"a loader of {who}, in the process of {now}", expected=expected)


def _rank_from(environ: Mapping[str, str]) -> ProcessRank | None:
    """Return the rank from torch.distributed or a launcher, or None if there is neither."""
    dist = sys.modules.get("torch.distributed")  # not imported: not in use
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return ProcessRank(rank=rank, world_size=world_size, source="torch.distributed")
    found = find_launch(environ, otherwise=_OR_PASSED, launchers=_LAUNCHERS)
    if found is None:
        return None
    return ProcessRank(rank=found.rank, world_size=found.num_processes, source=found.source)


# Making the data set in the training job.

_SAY_EVERY_S = 60.0
_LOOK_EVERY_S = 0.5
_LAUNCH = (  # together they identify one start of a job: equal in all its processes
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
_ERROR_LINE = re.compile(r"(?:shardprep \w+: )?error: (.+)")  # argparse puts the command first


def ensure_prepared(
    output_dir: str | os.PathLike[str],
    *,
    input_dir: str | os.PathLike[str],
    model_id: str,
    num_proc: int | None = None,
    limit_s: float = 24 * 3600.0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> str:
    """Make and verify a data set in ``output_dir`` unless it exists, and return that folder.

    All ranks must call it, before or after the process group is created (whose timeout is short). Rank 0 runs
    ``shardprep plan``, ``run`` and ``verify``, which continue an earlier attempt; the others wait. The
    launcher must end the other ranks if rank 0 is killed, as srun and torchrun do.

        data = ensure_prepared("DATA", input_dir="RAW", model_id="MODEL", num_shards=64)
        loader = get_llama3_dataloader(data, batch_size=8)

    Args:
        num_proc: processes that make shards. Default: one per CPU that rank 0 may use.
        limit_s: seconds that a rank waits at most. Default: 24 hours.
        options: more flags of ``shardprep plan`` by name, such as ``num_shards=64, record="packed"``.

    Raises:
        Refused: ``output_dir`` was planned with other options (also if they are left out now), or
            ``input_dir`` has changed since: names, sizes, or a sample of each file.
        ShardprepError: rank 0 failed, and all ranks raise its error; or ``limit_s`` is over (ReadWriteError).
    """
    if not limit_s > 0:
        raise UsageError.of_value("limit_s", limit_s, "more than 0")
    check_local_path(os.fspath(output_dir), "output_dir")
    check_local_path(os.fspath(input_dir), "input_dir")
    folder, raw = Path(output_dir).absolute(), Path(input_dir).absolute()
    check_names_are_utf8(str(folder), str(raw), model_id)
    who = find_process_rank(rank, world_size)
    given = {"input_dir": raw, "output_dir": folder, "model_id": model_id, **options}
    launch = " ".join(f"{name}={os.environ[name]}" for name in _LAUNCH if os.environ.get(name))
    note = folder.with_name(f".{folder.name}.failed.json")
    if who.rank != 0:
        _wait_for_index(folder, note, launch, limit_s, who.rank)
        _compare(given)
        return os.fspath(output_dir)
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        if size_of_file(folder / PLAN_NAME) is None:
            _run("plan", given)
        else:
            _compare(given)
        if size_of_file(folder / INDEX_NAME) is None:
            function = options.get("transform")  # the plan keeps its hash alone
            _run("run", {"num_proc": num_proc, "part": "0/1", "transform": function}, str(folder))
            _run("verify", {}, str(folder))
    except BaseException as error:
        if who.world_size > 1:
            code = getattr(error, "exit_code", ReadWriteError.exit_code)
            failure = {"launch": launch, "exit_code": code, "error": str(error) or type(error).__name__}
            with contextlib.suppress(ShardprepError, OSError):  # must not hide the error itself
                publish_bytes(note, json.dumps(failure).encode())
        raise
    return os.fspath(output_dir)


def _compare(given: Mapping[str, Any]) -> None:
    """Raise Refused if the data set was planned with other options or from other inputs.

    ``plan`` compares all of them, those that are left out, too. It writes nothing with --dry_run.
    """
    try:
        _run("plan", {**given, "dry_run": True})
    except NotFound as error:  # the inputs are gone, so these are not the ones that were planned
        raise Refused(str(error)) from error


def _wait_for_index(folder: Path, note: Path, launch: str, limit_s: float, rank: int) -> None:
    """Wait until rank 0 has verified the data set. Raises its error if it fails in this start of the job."""
    began = time.monotonic()
    next_line_s = 0.0
    while size_of_file(folder / INDEX_NAME) is None:
        failure: Exception | None = None
        # A missing or damaged note is ignored.
        with contextlib.suppress(ShardprepError, OSError, ValueError, LookupError, TypeError, RecursionError):
            content = json.loads(read_regular(note, max_bytes=1 << 20))
            if content["launch"] == launch:  # else another start of the job wrote it
                message = f"rank 0 could not prepare {folder}: {content['error']}"
                failure = _error_of(int(content["exit_code"]), message)
        if failure is not None:
            raise failure
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            found = f"not prepared after {limit_s:g} s (limit_s)"
            expected = "ensure_prepared in every rank; see the log of rank 0"
            raise ReadWriteError(path=folder, found=found, expected=expected)
        if waited_s >= next_line_s:
            say(f"rank {rank}: waiting for rank 0 to prepare {folder}, {waited_s:.0f} s so far")
            next_line_s = waited_s + _SAY_EVERY_S
        time.sleep(min(_LOOK_EVERY_S, limit_s / 4))


def _error_of(exit_code: int, message: str) -> ShardprepError:
    """Return an error of the class that has this exit code: the first one, which is the most general."""
    kinds = {kind.exit_code: kind for kind in reversed(ShardprepError.__subclasses__())}
    return kinds.get(exit_code, ReadWriteError)(message)


def _run(name: str, given: Mapping[str, Any], *words: str) -> None:
    """Run one command, and pass its lines on to standard error. Raises the error that it ended with."""
    flags = []
    for option, value in given.items():
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{option}")
        elif value is not None:
            flags.append(f"--{option}={value}")
    call = ["shardprep.__main__:run_for_parent", str(os.getpid()), name, *words, *flags]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    last_error = ""
    with start_python(*call, text=True, errors="replace", **pipes) as process:
        try:
            for line in process.stdout or ():
                say(line.rstrip("\n"))
                if found := _ERROR_LINE.match(line):
                    last_error = f": {found[1]}"
        except BaseException:
            process.terminate()
            raise
    if code := process.returncode:
        shown = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise _error_of(code, f"shardprep {name} ended with {shown}{last_error}")
