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
from typing import TypeAlias

import msgspec

from shardprep import given
from shardprep.errors import MissingShard, ShardprepError, quoted
from shardprep.format import names
from shardprep.format.data_folder import DataFolder

_Folder: TypeAlias = "DataFolder | str | os.PathLike[str]"  # of a data set
_HEAD_BYTES = 4 << 20  # of plan.json; its head is longer only if a chat template is
_MAKING = ("shard", "run", "blank")  # commands that take _KEPT
_KEPT = ("max_bad_fraction", "engine", "memory_gb")  # flags of a process that its advice repeats
_SWITCHES = ("dry_run", "json")  # flags of plan that have no --no-
# Stand for the user's file and for the folder of the text where their place is not known.
FILE = "FILE"
RAW = "RAW"


def on(command: str, folder: _Folder, *flags: object) -> str:
    """Return ``shardprep COMMAND DATA FLAGS``, for a command that does not read the plan's input."""
    return _line("shardprep", *command.split(), Path(os.path.abspath(folder)), *flags)  # noqa: PTH100 - as in quoted


def run(folder: _Folder, shards: str = "", *flags: object) -> str:
    """Return the command that makes the missing shards on this machine. ``shards``: only these, "0-2,5"."""
    chosen = ["--shards", shards] if shards else []
    return on("run", folder, *chosen, *flags, *_given_flags("num_proc"), *flags_of_input(folder, flags))


def shard(shard_id: int, folder: _Folder, *flags: object) -> str:
    """Return the command that makes one shard, if it is not done."""
    words = ["--shard_id", shard_id, "--output_dir", Path(os.path.abspath(folder)), *flags]  # noqa: PTH100
    return _line("shardprep", *words, *_given_flags(), *flags_of_input(folder, flags))


def shard_again(shard_id: int, folder: _Folder) -> str:
    """Return the command that makes a damaged shard again though its manifest is there."""
    return shard(shard_id, folder, "--again")


def shard_of_other_plan(shard_id: int, folder: _Folder) -> str:
    """Return the command that moves a shard of another plan out of the folder, and makes the right one."""
    old = quoted(_data_folder(folder).path_of(names.shard_name(shard_id)))
    beside = quoted(f"{os.path.abspath(folder)}_other_plan")  # noqa: PTH100 - as in quoted
    return f"mkdir -p {beside} && mv {old}.* {beside} && {shard(shard_id, folder)}"


def submit(folder: _Folder, *flags: object, command: str = "submit") -> str:
    """Return the command that makes the missing shards as a job array. ``command``: submit or retry."""
    words = flags_of_input(folder)
    worker_args = ["--worker_args", _line(*words)] if words else []
    return on(command, folder, *flags, *worker_args)


def blank(
    folder: _Folder,
    ids: str | os.PathLike[str],
    new: str = "NEW",
    flags: Mapping[str, object] | None = None,
) -> str:
    """Return the command that copies a data set without some documents. ``flags``: of this data set."""
    words = ["--ids", os.path.abspath(ids), "--output", new]  # noqa: PTH100
    return on("blank", folder, *words, *flags_of_input(folder, flags=flags))


def plan(input_dir: str, output_dir: str) -> str:
    """Return a command that plans. Words in capitals, such as RAW, stand for what the user has to give."""
    folders = ["--input_dir", input_dir, "--output_dir", output_dir]
    return _line("shardprep", "plan", *folders, "--model_id", "MODEL", "--num_shards", "N")


def plan_again(flags: str) -> str:
    """Return the ``plan`` of this process with more flags, or "" if this process does not plan."""
    values = dict(given.flags())
    if values.pop("command", "") != "plan":
        return ""
    name = ""
    for word in shlex.split(flags):
        if word.startswith("--"):
            name = word.removeprefix("--")
            values[name] = True
        else:
            values[name] = word
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False and name not in _SWITCHES:
            words.append(f"--no-{name}")
        elif value is not None and value is not False:
            is_path = isinstance(value, Path) or (name == "model_id" and os.path.exists(str(value)))  # noqa: PTH110
            text = os.path.abspath(str(value)) if is_path else str(value)  # noqa: PTH100
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return _line("shardprep", "plan", *words)


def shard_without(name: str, shard_id: int, folder: _Folder) -> str:
    """Return the command that makes a shard of which a file is missing, or has another size."""
    # A shard is done even without its side files, which are in subfolders.
    return shard_again(shard_id, folder) if "/" in name else shard(shard_id, folder)


def missing_file(folder: DataFolder, name: str, shard_id: int) -> MissingShard:
    """Build the error for a missing file of a shard."""
    remedy = shard_without(name, shard_id, folder)
    return MissingShard(path=folder.path_of(name), found="missing", remedy=remedy)


def flags_of_input(
    folder: _Folder, given_already: Iterable[object] = (), flags: Mapping[str, object] | None = None
) -> list[str]:
    """Return the flags with which a command finds the input and the function of a folder's plan.

    ``flags``: for this data set (default: those of this process). Without a plan that can be read there are
    none: the command itself then says what is wrong.
    """
    head = _head_of(folder)
    if flags is None:
        flags = given.flags()
    words = list(map(str, given_already))
    found: list[str] = []
    input_dir = flags.get("input_dir")
    planned = head.get("input_dir")
    is_moved = isinstance(input_dir, Path) and isinstance(planned, str) and not _is_same(input_dir, planned)
    if is_moved and "--input_dir" not in words:
        found += ["--input_dir", os.path.abspath(str(input_dir))]  # noqa: PTH100
    elif input_dir is None and isinstance(planned, str) and not os.path.exists(planned):  # noqa: PTH110
        found += ["--input_dir", RAW]  # it moved, and this process does not know where to
    options = head.get("options")
    if not isinstance(options, Mapping):
        options = {}
    if options.get("transform_sha256") and "--transform" not in words:
        found += ["--transform", _function_of(_data_folder(folder), options, flags)]
    return found


def _given_flags(*more: str) -> list[str]:
    """Return the flags of this process that making shards again needs, if it makes shards."""
    flags = given.flags()
    words = list[str]()
    if flags.get("command") in _MAKING:
        for name in (*_KEPT, *more):
            if flags.get(name) is not None:
                words += [f"--{name}", str(flags[name])]
    return words


def _function_of(folder: DataFolder, options: Mapping[str, object], flags: Mapping[str, object]) -> str:
    """Return the file of the plan's function: as given, or its copy in the data set, or else FILE."""
    path = flags.get("transform")
    if isinstance(path, Path):
        return os.path.abspath(path)  # noqa: PTH100
    # A person would run the copy. So nobody else may be able to change it, or the plan that has its hash.
    beside = str(options.get("transform_files", "")).split(",")
    try:
        own = [name for name in folder.names(names.TRANSFORM_DIR) if name not in map(str.strip, beside)]
        if len(own) == 1:
            copy = f"{names.TRANSFORM_DIR}/{own[0]}"
            if all(_is_own(folder, name) for name in (".", names.PLAN_NAME, names.TRANSFORM_DIR, copy)):
                return os.path.abspath(folder.path_of(copy))  # noqa: PTH100
    except (OSError, ShardprepError):
        pass
    return FILE


def _is_own(folder: DataFolder, name: str) -> bool:
    """Return whether only this user or root can have written a file or folder."""
    status = folder.status_of(name)
    if status is None or stat.S_ISLNK(status.st_mode):
        return False
    others_write = stat.S_IWOTH
    # A user's private group, which has the number of the user, has no other members.
    if status.st_gid != status.st_uid:
        others_write |= stat.S_IWGRP
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & others_write


def _is_same(path: Path, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _data_folder(folder: _Folder) -> DataFolder:
    return folder if isinstance(folder, DataFolder) else DataFolder(os.fspath(folder))


def _head_of(folder: _Folder) -> Mapping[str, object]:
    """Return the head of a folder's plan.json, or {} if it has none that can be read."""
    try:
        status = _data_folder(folder).status_of(names.PLAN_NAME)
    except (OSError, ShardprepError):
        return {}
    if status is None:
        return {}
    path = os.path.abspath(folder)  # noqa: PTH100
    return _parsed_head(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _parsed_head(folder: str, *_: int) -> Mapping[str, object]:
    """Parse the first line of a folder's plan. The other arguments change when the file does."""
    try:
        beginning = DataFolder(folder).read_beginning(names.PLAN_NAME, _HEAD_BYTES)
        line = beginning.partition(b"\n")[0]
        head = msgspec.json.decode(line if line.endswith(b"}") else line + b"}")
    except (ShardprepError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
