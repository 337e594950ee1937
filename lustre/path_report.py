"""What ``show`` prints about a path: file system, layout, OSTs, finished shards, released files, a choice.

Of all this only the layout must be told; whatever else lfs does not tell is a line that says so.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustre.directory_layout import differences, layout_of_file_system, why_leave, why_not
from lustre.file_layouts import Balance, read_balance
from lustre.layout import Layout, read_layout
from lustre.layout_choice import Choice, choose_layout, load_text, shards_text
from lustre.layout_options import apply_flags, migrate_command
from lustre.lfs import Mount, file_system_of, kind_of
from lustre.osts import Fill, count_osts_if_told, fill_lines, ost_states, read_fill, state_lines
from lustre.released_files import count_released, released_lines
from shardprep.errors import LustreError, LustreUsageError

_SHARD = re.compile(r"shard-\d{5}\.tar")
_BIG_BYTES = 1 << 30  # an input from here on is worth moving to a wider layout


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """The shards that a layout is chosen for; None where it is not known."""

    shard_bytes: int | None = None
    num_shards: int | None = None
    num_readers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no data set has, with LustreUsageError."""
        for name in ("shard_bytes", "num_shards", "num_readers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LustreUsageError(f"--{name} is {value}, expected 1 or more")

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return (self.shard_bytes, self.num_shards, self.num_readers) != (None, None, None)


def report(path: Path, size: DataSize) -> list[str]:
    """The lines about ``path``, which need not exist yet; changes nothing. Raises LustreError from lfs.

    The layout must be told; all the rest may fail, in a line.
    """
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if (reason := why_not(path)) or mount is None:
        return [*lines, f"nothing to show: {reason}"]
    there = next(place for place in (path.absolute(), *path.absolute().parents) if kind_of(place))
    if there != path.absolute():
        lines.append(f"{path} is not there yet; it will copy the default of {there}")
    layout = read_layout(there)
    of_file_system = layout_of_file_system(there)
    is_folder = kind_of(there) == "folder"
    lines += [_layout_line(layout, of_file_system, is_folder=is_folder), *_ost_lines(there, mount)]
    lines += _released_lines(there)
    if is_folder:
        if there == path.absolute():
            lines += content_lines(there)
        if size.is_given:
            lines += _choice_lines(path, layout, of_file_system, size, count_osts_if_told(there, mount))
    return lines


def report_json(path: Path) -> dict[str, Any]:
    """The layout of new files and the balance of finished shards, for programs. Raises LustreError from lfs.

    ``layout`` and ``shards`` are None where there is nothing to tell, and ``why_not`` says why.
    """
    reason = why_not(path) or (None if kind_of(path) == "folder" else f"{path} is no folder that is there")
    if reason:
        return {"path": str(path), "why_not": reason, "layout": None, "shards": None}
    layout = read_layout(path)
    try:
        sizes = {name: size for name, size in _sizes(path).items() if _SHARD.fullmatch(name)}
    except OSError as error:
        raise LustreError(f"{path} cannot be listed ({error.strerror}), expected a folder to read") from None
    balance = read_balance(path, list(sizes), list(sizes.values())) if sizes else None
    return {
        "path": str(path),
        "why_not": None,
        "layout": layout.text(),
        "shards": balance.as_json() if balance else None,
    }


def _layout_line(layout: Layout, of_file_system: Layout | None, *, is_folder: bool) -> str:
    if not is_folder:
        return f"this file has {layout.text()}"
    origin = "its own default"
    if layout.is_inherited:
        origin = "inherited, it has no default of its own"
    elif layout == of_file_system:
        origin = "the file system's default; lfs does not tell whether the folder has it of its own, too"
    line = f"new files get {layout.text()} ({origin})"
    if layout.fixed_place:
        line += (
            f"\nwarning: every new file lies {layout.fixed_place}, so that one place gets all shards; "
            "python -m lustre apply with any layout ends that"
        )
    return line


def _ost_lines(path: Path, mount: Mount) -> list[str]:
    fill: Fill | None = None
    try:
        fill = read_fill(mount)
        lines = fill_lines(fill)
    except LustreError as error:
        lines = [f"how full the OSTs are cannot be told: {error}"]
    try:
        lines += state_lines(ost_states(path), fill)
    except LustreError as error:
        lines.append(f"which OSTs are inactive cannot be told: {error}")
    return lines


def _released_lines(path: Path) -> list[str]:
    try:
        return released_lines(count_released(path), path)
    except (LustreError, OSError) as error:
        return [f"which files are released cannot be told: {error}"]


def content_lines(folder: Path) -> list[str]:
    """What the finished shards of a folder really have, and which big files would gain by ``lfs migrate``.

    Files of its root alone, without going below it; a folder with neither gives no line.
    """
    try:
        sizes = _sizes(folder)
    except OSError as error:
        return [f"what is in {folder} cannot be told: {error.strerror}"]
    shards = {name: num_bytes for name, num_bytes in sizes.items() if _SHARD.fullmatch(name)}
    inputs = (
        {name: num_bytes for name, num_bytes in sizes.items() if num_bytes >= _BIG_BYTES}
        if not shards
        else {}
    )
    lines = []
    try:
        if shards and (balance := read_balance(folder, list(shards), list(shards.values()))):
            lines += [*balance.lines(), *_move_lines(folder, balance, max(shards.values()))]
        if inputs and (balance := read_balance(folder, list(inputs), list(inputs.values()))):
            lines += _input_lines(folder, inputs, balance)
    except LustreError as error:
        lines.append(f"which layouts its files have cannot be told: {error}")
    return lines


def _sizes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        files = sorted((entry for entry in entries if entry.is_file()), key=lambda entry: entry.name)
        return {entry.name: entry.stat().st_size for entry in files}


def _move_lines(folder: Path, balance: Balance, shard_bytes: int) -> list[str]:
    """The command that moves finished shards to the table's layout, where they lie badly."""
    if not balance.is_lopsided:
        return []
    choice = choose_layout(shard_bytes=shard_bytes, num_shards=balance.num_files, num_osts=balance.num_osts)
    return [
        "  to move them, while nothing reads or writes them (every byte is copied, names and bytes stay):",
        f"  {migrate_command(choice.layout, folder, 'shard-*.tar')}",
        "  then: python -m preprocess verify --fast, which writes osts.json anew",
    ]


def _input_lines(folder: Path, inputs: dict[str, int], balance: Balance) -> list[str]:
    """Big inputs with a stripe each are read by every task from one OST."""
    if max(balance.files_by_ost.values(), default=0) == 0 or len(inputs) >= balance.num_osts > 0:
        return []
    one_stripe = sum(number for text, number in balance.layouts if "plain: 1 stripe" in text)
    if not one_stripe:
        return []
    choice = choose_layout(
        shard_bytes=max(inputs.values()), num_shards=len(inputs), num_osts=balance.num_osts
    )
    head = (
        f"{one_stripe} big files have one stripe each: all tasks that read one wait for the same OST. To "
        "spread them, while nothing writes them (every byte is copied):"
    )
    return [
        head,
        f"  {migrate_command(choice.layout, folder, '*')}",
    ]


def _choice_lines(
    path: Path, layout: Layout, of_file_system: Layout | None, size: DataSize, all_osts: int
) -> list[str]:
    mount = file_system_of(path)
    num_osts = count_osts_if_told(path, mount, layout.pool) if mount and layout.pool else all_osts
    choice = choose_layout(
        shard_bytes=size.shard_bytes,
        num_shards=size.num_shards,
        num_readers=size.num_readers,
        num_osts=num_osts,
    )
    lines = choice_lines(choice, size)
    leave = why_leave(layout, of_file_system)
    command = f"python -m lustre apply {shlex.quote(str(path))} {apply_flags(choice.layout)}"
    kept = f"but {leave}: left alone. To have it all the same, " if leave else ""
    if differences(choice.layout, layout, {"": num_osts}):
        lines.append(f"  {kept}in a fresh, empty folder: {command}")
    else:
        lines.append("  new files get that already")
    if size.num_readers is not None and size.num_shards is not None and num_osts:
        text = load_text(
            layout if leave else choice.layout,
            shard_bytes=size.shard_bytes or 1,
            num_shards=size.num_shards,
            num_readers=size.num_readers,
            num_osts=num_osts,
        )
        lines.append(f"  {text}")
    return lines


def choice_lines(choice: Choice, size: DataSize) -> list[str]:
    """The choice for a person: what, why, and whose advice."""
    return [
        f"for {shards_text(size.shard_bytes, size.num_shards)}: {choice.layout.text()}",
        f"  why: {choice.why}",
        f"  source: {choice.source}",
    ]
