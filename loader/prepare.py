"""``ensure_prepared``: a training job that makes its own data set first, on its rank 0.

Rank 0 plans, makes the shards and verifies them, in processes of its own. The other ranks wait for index.json
and compare plan and inputs with their own arguments. Ranks coordinate through the file system only: where
rank 0 fails, it writes ``.NAME.failed.json`` beside the data set's folder. Two jobs at once waste time alone,
since shards are equal bytes and done ones are skipped.
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
from pathlib import Path
from typing import Any

from loader.ranks import find_process_rank
from shardprep import HOME
from shardprep.console import say
from shardprep.errors import (
    BadInput,
    CannotWrite,
    NotFound,
    ReadWriteError,
    Refused,
    ShardprepError,
    UsageError,
)
from shardprep.files import check_names_are_utf8, publish_bytes, read_regular, size_of_file
from shardprep.format.names import INDEX_NAME, PLAN_NAME

_SAY_EVERY_S = 60.0  # that this rank waits
_LOOK_EVERY_S = 0.5
_LAUNCH = (  # the same in all processes of one start of a job, others in the next one
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
# Options of ``plan`` alone: they change no byte of a document, so the other commands do not have them.
_FOR_PLAN = ("num_shards", "shard_bytes", "stripe", "hash_inputs")
_ERROR_LINE = re.compile(r"(?:shardprep \w+: )?error: (.+)")  # argparse puts the command before it


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
    """Make and verify a data set in ``output_dir``, unless it is there, and return that folder.

    Every rank calls it, before the process group is made (its timeout is short) or after. Rank 0 runs
    ``shardprep plan``, ``run`` and ``verify``, which go on where an earlier attempt ended. The launcher must
    end the other ranks when rank 0 is killed, as srun and torchrun do.

    ``options``: flags of ``shardprep plan`` by name, such as ``num_shards=64, record="packed"``.
    ``num_proc``: processes that make shards; default: one per CPU that rank 0 may use. ``limit_s``: how long
    a rank waits at most. ``rank``, ``world_size``: as for the loader.

    Raises on every rank what made rank 0 fail, or Refused where ``output_dir`` was planned with other options
    or ``input_dir`` no longer holds the planned files: by name, size, and a sample of each file whose mtime
    differs. Raises ReadWriteError where the limit is over.
    """
    if not limit_s > 0:
        raise UsageError.of_value("limit_s", limit_s, "more than 0")
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
            _run("run", {"num_proc": num_proc}, str(folder))
            _run("verify", {}, str(folder))
    except BaseException as error:
        if who.world_size > 1:
            code = error.exit_code if isinstance(error, ShardprepError) else ReadWriteError.exit_code
            failure = {"launch": launch, "exit_code": code, "error": str(error) or type(error).__name__}
            with contextlib.suppress(ShardprepError, OSError):  # the error itself is of more weight
                publish_bytes(note, json.dumps(failure).encode())
        raise
    return os.fspath(output_dir)


def _compare(given: Mapping[str, Any]) -> None:
    """Raise Refused where the data set was planned with other options or from other inputs."""
    options = {name: value for name, value in given.items() if name not in _FOR_PLAN}
    _run("shard", options, "--shard_id=0", "--check_inputs")  # shard 0 is done: it compares and ends


def _wait_for_index(folder: Path, note: Path, launch: str, limit_s: float, rank: int) -> None:
    """Wait until rank 0 has verified the data set. Raises its error, if it fails in this start of the job."""
    began = time.monotonic()
    next_line_s = 0.0
    while size_of_file(folder / INDEX_NAME) is None:
        if failure := _read_failure(note, launch):
            exit_code, error = failure
            raise _error_of(exit_code, f"rank 0 could not prepare {folder}: {error}")
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            raise ReadWriteError(
                f"{folder} is not prepared after {limit_s:g} s (limit_s); every rank must call "
                "ensure_prepared, see the log of rank 0",
                path=folder,
            )
        if waited_s >= next_line_s:
            say(f"rank {rank}: waiting for rank 0 to prepare {folder}, for {waited_s:.0f} s by now")
            next_line_s = waited_s + _SAY_EVERY_S
        time.sleep(min(_LOOK_EVERY_S, limit_s / 4))


def _read_failure(note: Path, launch: str) -> tuple[int, str] | None:
    """Return the exit code and the error of rank 0, unless they are of another start of the job."""
    try:
        found = json.loads(read_regular(note, max_bytes=1 << 20))
        return (int(found["exit_code"]), str(found["error"])) if found["launch"] == launch else None
    except (ShardprepError, OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # no note, or a damaged one


def _error_of(exit_code: int, message: str) -> ShardprepError:
    """Return the error that ends a command with an exit code."""
    kinds = (UsageError, BadInput, NotFound, CannotWrite, Refused)
    kind = next((kind for kind in kinds if kind.exit_code == exit_code), ReadWriteError)
    return kind(message)


# Ours come before a preprocess.py in the current folder. The process dies with the one that started it.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from shardprep.signals import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from shardprep.__main__ import main; sys.exit(main())"
)


def _run(name: str, given: Mapping[str, Any], *words: str) -> None:
    """Run one command. Its lines go to this process's standard error. Raises the error that it ended with."""
    flags = []
    for option, value in given.items():
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{option}")
        elif value is not None:
            flags.append(f"--{option}={value}")
    command = [sys.executable, "-c", _CODE, str(HOME), str(os.getpid()), name, *words, *flags]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    last_error = ""
    with subprocess.Popen(command, text=True, errors="replace", **pipes) as process:
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
