"""The commands that messages advise: quoted, with absolute paths, so that they can be pasted from any folder.

Each message takes its command from here, because a command needs more than the message knows. A command that
reads the input of a plan with a function needs ``--transform``, and where the input moved, ``--input_dir``.
Both come from the flags of this process, and the function also from its copy in the data set.

No command here loses anything. To replace a damaged shard is safe: its old files stay until the new ones are
complete. Flags that accept a loss, such as ``--max_bad_fraction``, are only repeated if they were given.
"""

from __future__ import annotations

import functools
import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardprep import files, given
from shardprep.errors import MissingShard, ShardprepError, quoted
from shardprep.format import names

_HEAD_BYTES = 4 << 20  # of plan.json; its head is longer only if a chat template is
_MAKING = ("shard", "run", "blank")  # commands that take _KEPT
_KEPT = ("max_bad_fraction", "engine", "memory_gb")  # flags of a process that its advice repeats
# Stands for the user's file where its place is not known.
FILE = "FILE"


def on(command: str, folder: str | os.PathLike[str], *flags: object) -> str:
    """Return ``shardprep COMMAND DATA FLAGS``, for a command that does not read the plan's input."""
    return _line("shardprep", *command.split(), Path(os.path.abspath(folder)), *flags)  # noqa: PTH100 - as in quoted


def run(folder: Path, shards: str = "", *flags: object) -> str:
    """Return the command that makes the missing shards on this machine. ``shards``: only these, "0-2,5"."""
    chosen = ["--shards", shards] if shards else []
    return on("run", folder, *chosen, *flags, *_given_flags("num_proc"), *flags_of_input(folder, flags))


def shard(shard_id: int, folder: Path, *flags: object) -> str:
    """Return the command that makes one shard, if it is not done."""
    words = ["--shard_id", shard_id, "--output_dir", Path(os.path.abspath(folder)), *flags]  # noqa: PTH100
    return _line("shardprep", *words, *_given_flags(), *flags_of_input(folder, flags))


def shard_again(shard_id: int, folder: Path) -> str:
    """Return the command that makes a damaged shard again though its manifest is there."""
    return shard(shard_id, folder, "--again")


def shard_of_other_plan(shard_id: int, folder: Path) -> str:
    """Return the command that moves a shard of another plan out of the folder, and makes the right one."""
    old = quoted(folder / names.shard_name(shard_id))
    beside = quoted(f"{os.path.abspath(folder)}_other_plan")  # noqa: PTH100 - as in quoted
    return f"mkdir -p {beside} && mv {old}.* {beside} && {shard(shard_id, folder)}"


def submit(folder: Path, *flags: object, command: str = "submit") -> str:
    """Return the command that makes the missing shards as a job array. ``command``: submit or retry."""
    words = flags_of_input(folder)
    worker_args = ["--worker_args", _line(*words)] if words else []
    return on(command, folder, *flags, *worker_args)


def blank(folder: Path, ids: Path, new: str = "NEW") -> str:
    """Return the command that copies a data set without the documents of a list."""
    return on("blank", folder, "--ids", Path(os.path.abspath(ids)), "--output", new, *flags_of_input(folder))  # noqa: PTH100


def plan(input_dir: str, output_dir: str) -> str:
    """Return a command that plans. Words in capitals, such as RAW, stand for what the user has to give."""
    folders = ["--input_dir", input_dir, "--output_dir", output_dir]
    return _line("shardprep", "plan", *folders, "--model_id", "MODEL", "--num_shards", "N")


def shard_without(path: Path, shard_id: int, folder: Path) -> str:
    """Return the command that makes a shard of which a file is missing, or has another size."""
    # A shard is done even without its side files, which are in subfolders.
    return shard(shard_id, folder) if path.parent == folder else shard_again(shard_id, folder)


def missing_file(path: Path, shard_id: int, folder: Path) -> MissingShard:
    """Build the error for a missing file of a shard."""
    return MissingShard(path=path, found="missing", remedy=shard_without(path, shard_id, folder))


def flags_of_input(folder: Path, given_already: Iterable[object] = ()) -> list[str]:
    """Return the flags with which a command finds the input and the function of a folder's plan.

    Without a plan that can be read there are none: the command itself then says what is wrong.
    """
    head, flags = _head_of(folder), given.flags()
    words = list(map(str, given_already))
    found: list[str] = []
    input_dir = flags.get("input_dir")
    planned = head.get("input_dir")
    is_moved = isinstance(input_dir, Path) and isinstance(planned, str) and not _is_same(input_dir, planned)
    if is_moved and "--input_dir" not in words:
        found += ["--input_dir", os.path.abspath(str(input_dir))]  # noqa: PTH100
    options = head.get("options")
    if not isinstance(options, Mapping):
        options = {}
    if options.get("transform_sha256") and "--transform" not in words:
        found += ["--transform", _function_of(folder, options)]
    return found


def _given_flags(*more: str) -> list[str]:
    """Return the flags of this process that making shards again needs, if it makes shards."""
    flags, found = given.flags(), list[str]()
    if flags.get("command") in _MAKING:
        for name in (*_KEPT, *more):
            if flags.get(name) is not None:
                found += [f"--{name}", str(flags[name])]
    return found


def _function_of(folder: Path, options: Mapping[str, Any]) -> str:
    """Return the file of the plan's function: as given, or its copy in the data set, or else FILE."""
    path = given.flags().get("transform")
    if isinstance(path, Path):
        return os.path.abspath(path)  # noqa: PTH100
    # A person would run the copy. So nobody else may be able to change it, or the plan that has its hash.
    beside = str(options.get("transform_files", "")).split(",")
    copies = folder / names.TRANSFORM_DIR
    try:
        own = [name for name in files.names_in(copies) if name not in map(str.strip, beside)]
        if len(own) == 1 and all(map(_is_own, (folder, folder / names.PLAN_NAME, copies, copies / own[0]))):
            return os.path.abspath(copies / own[0])  # noqa: PTH100
    except (OSError, ShardprepError):
        pass
    return FILE


def _is_own(path: Path) -> bool:
    """Return whether only this user or root can have written a file or folder."""
    status = path.lstat()
    others_write = stat.S_IWOTH
    # A user's private group, which has the number of the user, has no other members.
    if status.st_gid != status.st_uid:
        others_write |= stat.S_IWGRP
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others_write


def _is_same(path: Path, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _head_of(folder: Path) -> Mapping[str, Any]:
    """Return the head of a folder's plan.json, or {} if it has none that can be read."""
    path = Path(os.path.abspath(folder), names.PLAN_NAME)  # noqa: PTH100
    try:
        status = path.stat()
    except OSError:
        return {}
    return _parsed_head(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _parsed_head(path: Path, *_: int) -> Mapping[str, Any]:
    """Parse the first line of a plan. The other arguments change when the file does."""
    try:
        line = files.read_beginning(path, _HEAD_BYTES).partition(b"\n")[0]
        head = msgspec.json.decode(line if line.endswith(b"}") else line + b"}")
    except (ShardprepError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
