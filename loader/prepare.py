"""``ensure_prepared``: a training job that makes its own data set first, on its rank 0.

Rank 0 plans, makes the shards and verifies them, in processes of its own; the other ranks wait. They need
nothing but the file system: rank 0 writes how it ended into ``.NAME.prepared.json`` beside the data set's
folder. Two jobs at once would only cost time: shards are equal bytes, and done ones are skipped.
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
from typing import Any, NoReturn

from loader.ranks import find_process_rank
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
from shardprep.format.json_files import load_json
from shardprep.format.names import INDEX_NAME, PLAN_NAME
from shardprep.own_packages import HOME

_MAX_NOTE_BYTES = 1 << 20
_SAY_EVERY_S = 60.0  # that this rank waits
_LOOK_EVERY_S = 0.5
# A failure that was there when this rank began may be of an earlier start: rank 0 removes it when it begins.
_OLD_FAILURE_S = 30.0
_LAUNCH = (  # the same in all processes of one start of a job, others in the next one
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
_ERRORS: dict[int, type[ShardprepError]] = {
    kind.exit_code: kind for kind in (UsageError, BadInput, NotFound, CannotWrite, ReadWriteError, Refused)
}
# What is told to ``plan`` alone: it decides no byte of a document, so the other commands do not know it.
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
    """Return ``output_dir`` when the data set in it is whole and verified; make it before, if it is not.

    Every rank calls it, before the process group is made (its timeout is short) or after. Rank 0 runs
    ``shardprep plan``, ``run`` and ``verify``, which go on where an earlier attempt ended. The launcher must
    end the other ranks when rank 0 is killed, as srun and torchrun do.

    ``options``: flags of ``shardprep plan`` by name, such as ``num_shards=64, record="packed"``.
    ``num_proc``: processes that make shards; default: one per CPU that rank 0 may use.
    ``limit_s``: how long a rank waits at most, in seconds.
    ``rank``, ``world_size``: default: of torch.distributed or the launcher, as for the loader.

    Raises on every rank what made rank 0 fail: UsageError, BadInput, NotFound, CannotWrite, ReadWriteError,
    or Refused where ``output_dir`` was planned with other options, or ``input_dir`` no longer holds the
    planned files: by name, size, and a sample of each file whose mtime differs. Raises ReadWriteError where
    the limit is over.
    """
    if not limit_s > 0:
        raise UsageError(f"limit_s is {limit_s}, expected more than 0")
    folder = Path(output_dir).absolute()
    check_names_are_utf8(str(folder), str(Path(input_dir).absolute()), model_id)
    who = find_process_rank(rank, world_size)
    given = {"input_dir": Path(input_dir).absolute(), "output_dir": folder, "model_id": model_id, **options}
    launch = " ".join(f"{name}={os.environ[name]}" for name in _LAUNCH if os.environ.get(name))
    asked = json.dumps([os.fspath(input_dir), model_id, options], sort_keys=True, default=str)
    if who.rank == 0:
        end: dict[str, Any] = {"launch": launch, "asked": asked, "exit_code": 0, "error": ""}
        note = _note_path(folder) if who.world_size > 1 else None
        _publish(note, None)
        try:
            _prepare(folder, given, num_proc)
        except ShardprepError as error:
            end |= {"exit_code": error.exit_code, "error": str(error)}
            raise
        except BaseException as error:
            why = f"it was stopped ({type(error).__name__})"
            end |= {"exit_code": ReadWriteError.exit_code, "error": why}
            raise
        finally:
            _publish(note, end)
    elif not _is_told(folder, launch, asked, limit_s, who.rank):
        _compare(given)
    return os.fspath(output_dir)


def _prepare(folder: Path, given: Mapping[str, Any], num_proc: int | None) -> None:
    if size_of_file(folder / PLAN_NAME) is None:
        _run("plan", given)
    else:
        _compare(given)
    if size_of_file(folder / INDEX_NAME) is None:
        _run("run", {"num_proc": num_proc}, str(folder))
        _run("verify", {}, str(folder))


def _compare(given: Mapping[str, Any]) -> None:
    """Raise Refused where the data set was planned with other options or from other inputs."""
    options = {name: value for name, value in given.items() if name not in _FOR_PLAN}
    _run("shard", options, "--shard_id=0", "--check_inputs")  # shard 0 is done: it compares and ends


def _note_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.prepared.json")


def _publish(note: Path | None, end: Mapping[str, Any] | None) -> None:
    """Write how rank 0 ended, or remove what an earlier start wrote. The work itself is of more weight."""
    with contextlib.suppress(ShardprepError, OSError):
        if note and end:
            publish_bytes(note, json.dumps({**end, "written": time.time()}).encode())
        elif note:
            note.unlink(missing_ok=True)


def _read_note(folder: Path) -> dict[str, Any]:
    try:
        found = load_json(read_regular(_note_path(folder), max_bytes=_MAX_NOTE_BYTES))
    except (ShardprepError, OSError, ValueError):
        return {}
    kinds = {"launch": str, "asked": str, "exit_code": int, "error": str}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kinds[name]) for name in kinds):
        return {}
    return found


def _is_told(folder: Path, launch: str, asked: str, limit_s: float, rank: int) -> bool:
    """Wait for rank 0. Return whether it says that the data set is as asked for; raise what it failed with.

    False where the data set is verified and rank 0 cannot say so: this rank must compare by itself.
    """
    began = time.monotonic()
    said: float | None = None
    first = _read_note(folder)
    can_be_told = os.access(folder.parent, os.W_OK | os.X_OK)
    while True:
        note = _read_note(folder)
        waited_s = time.monotonic() - began
        is_ours = bool(note) and note["launch"] == launch and (launch != "" or note != first)
        if is_ours and note["exit_code"] and (note != first or waited_s > _OLD_FAILURE_S):
            _raise(note["exit_code"], f"rank 0 could not prepare {folder}: {note['error']}")
        is_verified = size_of_file(folder / INDEX_NAME) is not None
        if is_verified and is_ours and note["exit_code"] == 0:
            # A rank with other arguments than rank 0, or after an earlier start, compares by itself.
            return note["asked"] == asked and note != first
        if is_verified and not (can_be_told and launch):
            return False
        if waited_s > limit_s:
            raise ReadWriteError(
                f"{folder} is not prepared after {limit_s:g} s (limit_s); every rank must call "
                "ensure_prepared, see the log of rank 0"
            )
        if said is None or time.monotonic() - said >= _SAY_EVERY_S:
            by_now = "" if said is None else f", for {waited_s:.0f} s by now"
            say(f"rank {rank}: waiting for rank 0 to prepare {folder}{by_now}")
            said = time.monotonic()
        time.sleep(min(_LOOK_EVERY_S, limit_s / 4))


def _flags(given: Mapping[str, Any]) -> list[str]:
    return [
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in given.items()
        if value is not None
    ]


# Ours come before a preprocess.py in the current folder. The process dies with the one that started it.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from shardprep.signals import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from shardprep.__main__ import main; sys.exit(main())"
)


def _run(name: str, given: Mapping[str, Any], *words: str) -> None:
    """Run one command; its lines go to this process's standard error. Raises the error that it ended with."""
    command = [sys.executable, "-c", _CODE, str(HOME), str(os.getpid()), name, *words, *_flags(given)]
    last_error = ""
    null, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        command, stdin=null, stdout=pipe, stderr=both, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip("\n"))
                if found := _ERROR_LINE.match(line):
                    last_error = found[1]
        except BaseException:
            process.terminate()
            raise
    if code := process.returncode:
        shown = f"signal {-code}" if code < 0 else f"exit code {code}"
        _raise(code, f"shardprep {name} ended with {shown}" + (f": {last_error}" if last_error else ""))


def _raise(exit_code: int, message: str) -> NoReturn:
    raise _ERRORS.get(exit_code, ReadWriteError)(message)
