"""What ``show`` prints about a path, and how the files of a folder really lie on the OSTs.

Of all this only the layout must be told; whatever else lfs does not tell is a line that says so.
A file's layout is its own from its first byte on, whatever its folder's default says later.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustre.apply import is_as_asked, pool_for_replacement, start_warning
from lustre.layout import (
    ANY_OST,
    DataSize,
    Layout,
    apply_flags,
    choose_layout,
    layout_of_file_system,
    load_text,
    parse_layout,
    read_layout,
    setstripe_options,
    why_leave,
)
from lustre.lfs import FILES_PER_CALL, file_system_of, find_files, kind_of, run_lfs, why_not_usable
from lustre.restore import released_lines
from lustre.space import UNKNOWN, Targets, count_osts_if_told, ost_states, read_targets, state_lines
from shardprep.console import counted, quoted, short_bytes
from shardprep.errors import LustreError

_SHARD = re.compile(r"shard-\d{5}\.tar")
_FAR_MORE = 2  # times its share, and one file more, is beyond the chance of a few files
_CHANCE = 3  # files on the only OST that is seen, where nobody tells how many there are


# --- a path


def report(path: Path, size: DataSize) -> list[str]:
    """Return the lines about ``path``; changes nothing. Raises LustreError."""
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if reason := why_not_usable(path):
        return [*lines, f"nothing to show: {reason}"]
    layout = read_layout(path)
    if kind_of(path) != "folder":
        return [*lines, f"this file has {layout.text()}", *_server_lines(path)]
    of_file_system = layout_of_file_system(path)
    origin = "its own default"
    if layout.is_inherited:
        origin = "inherited, it has no default of its own"
    elif layout == of_file_system:
        origin = "the file system's default; lfs does not tell whether the folder has it of its own, too"
    lines.append(f"new files get {layout.text()} ({origin})")
    lines += [*filter(None, [start_warning(path, layout)]), *_server_lines(path), *_content_lines(path)]
    if size != DataSize():
        lines += _choice_lines(path, layout, why_leave(layout, of_file_system), size)
    return lines


def report_json(path: Path) -> dict[str, Any]:
    """Return the layout of new files and the balance of finished shards, for programs. Raises LustreError.

    ``layout`` and ``shards`` are None where there is nothing to tell, and ``why_not`` says why.
    """
    why_not = why_not_usable(path)
    if not why_not and kind_of(path) != "folder":
        why_not = f"{path} is no folder that is there"
    data: dict[str, Any] = {"path": str(path), "why_not": why_not, "layout": None, "shards": None}
    if why_not:
        return data
    data["layout"] = read_layout(path).text()
    try:
        balance, _ = _balance_of_shards(path)
    except OSError as error:
        raise LustreError(f"{path} cannot be listed ({error.strerror}), expected a folder to read") from None
    return {**data, "shards": balance.as_json() if balance else None}


def _server_lines(path: Path) -> list[str]:
    targets = Targets(osts=[], mdts=[], silent={})
    try:
        targets = read_targets(path)
        lines = targets.lines()
    except LustreError as error:
        lines = [f"how full OSTs and MDTs are is unknown: {error}"]
    asked: dict[str, Callable[[], list[str]]] = {
        "which OSTs are inactive": lambda: state_lines(ost_states(path), targets),
        "which files are released": lambda: released_lines(path),
    }
    for what, ask in asked.items():
        try:
            lines += ask()
        except (LustreError, OSError) as error:
            lines.append(f"{what} is unknown: {error}")
    return lines


def _content_lines(folder: Path) -> list[str]:
    """Say what the finished shards in a folder (not below it) really have, and how to move them."""
    try:
        balance, most_bytes = _balance_of_shards(folder)
    except OSError as error:
        return [f"what is in {folder} cannot be told: {error.strerror}"]
    except LustreError as error:
        return [f"which layouts its files have cannot be told: {error}"]
    return [*balance.lines(), *_move_lines(folder, balance, most_bytes)] if balance else []


def _balance_of_shards(folder: Path) -> tuple[Balance | None, int]:
    """How the finished tars lie, and bytes of the largest: one stat a shard, none of its idx and manifest."""
    with os.scandir(folder) as entries:
        tars = [entry for entry in entries if _SHARD.fullmatch(entry.name) and entry.is_file()]
    sizes = {entry.name: entry.stat().st_size for entry in sorted(tars, key=lambda entry: entry.name)}
    return (read_balance(folder, sizes), max(sizes.values())) if sizes else (None, 0)


def _move_lines(folder: Path, balance: Balance, shard_bytes: int) -> list[str]:
    """The command that moves finished shards to the table's layout, where they lie badly."""
    if not balance.is_lopsided:
        return []
    size = DataSize(shard_bytes=max(1, shard_bytes), num_shards=balance.num_files)
    options = shlex.join(setstripe_options(choose_layout(size, balance.num_osts).layout))
    names = f"find {quoted(folder)} -maxdepth 1 -type f -name 'shard-*.tar' -print0"
    return [
        "  to move them, while nothing reads or writes them (every byte is copied, names and bytes stay):",
        f"  {names} | xargs -0 -n 1 lfs migrate {options}",
        "  then: shardprep verify --fast, which writes osts.json anew",
    ]


def _choice_lines(path: Path, layout: Layout, leave: str | None, size: DataSize) -> list[str]:
    num_osts = count_osts_if_told(path, layout.pool)
    choice = choose_layout(size, num_osts)
    lines = [*choice.lines]
    command = f"shardprep lustre apply {quoted(path)} {apply_flags(choice.layout)}"
    if layout.has_tiers:
        command += f" --pool {pool_for_replacement(layout)}"
    kept = f"but {leave}: left alone. To have it all the same, " if leave else ""
    if is_as_asked(choice.layout, layout, {"": num_osts}):
        lines.append("  new files get that already")
    else:
        lines.append(f"  {kept}in a fresh, empty folder: {command}")
    if size.num_readers is not None and size.num_shards is not None and num_osts:
        lines.append(f"  {load_text(layout if leave else choice.layout, size, num_osts)}")
    return lines


# --- the files of a folder


def read_file_layouts(folder: Path, names: Sequence[str]) -> list[Layout | None]:
    """Return the layout of each file; None for a symbolic link, or one that was never written to.

    One call of lfs takes 256 files, and asks the metadata server once per file.
    """
    real = os.path.realpath(folder)
    paths = [f"{real}/{name}" for name in names]
    found: list[Layout | None] = []
    for first in range(0, len(paths), FILES_PER_CALL):
        asked = paths[first : first + FILES_PER_CALL]
        result = run_lfs("getstripe", *asked)
        if result.exit_code:
            raise LustreError(
                f"`lfs getstripe` of {counted(len(asked), 'file')} of {folder} {result.failure}; look at the "
                "files, and at `lfs check servers`"
            )
        texts = split_by_file(result.stdout, asked)
        found += [None if text.strip() == "has no stripe info" else parse_layout(text) for text in texts]
    return found


def split_by_file(output: str, paths: Sequence[str]) -> list[str]:
    """Return what ``lfs getstripe`` said of each path. Raises LustreError where one is missing."""
    found = find_files(output, paths, "(?=$| has no stripe info$)")
    if len(found) < len(paths):
        raise LustreError(
            f"`lfs getstripe` of {counted(len(paths), 'file')} printed {output.strip()[:200]!r}, "
            f"expected the layouts of {paths[0]} and on; is this `lfs` a site's wrapper?"
        )
    ends = [*(match.start() for match in found.values()), len(output)][1:]
    return [output[match.end() : end] for match, end in zip(found.values(), ends, strict=True)]


def first_ost(layout: Layout | None) -> int:
    """Return the OST of a file's first stripe past the metadata server; -1 for a file without one."""
    parts = layout.striped if layout else []
    return next((part.start_ost for part in parts if part.start_ost >= 0), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How files lie on the OSTs. Bytes are shared evenly among the stripes of a component."""

    num_files: int
    layouts: tuple[tuple[str, int], ...]  # in words, and how many files have it; the most frequent first
    bytes_by_ost: dict[int, int]
    files_by_ost: dict[int, int]
    num_osts: int  # that files here could lie on; 0: unknown
    first_osts: tuple[int, ...] = ()  # of each file, -1 where it has none
    without_layout: int = 0

    @property
    def most_loaded(self) -> int:
        """The OST with the most bytes. There is at least one."""
        return max(self.bytes_by_ost, key=lambda ost: (self.bytes_by_ost[ost], -ost))

    @property
    def times_the_mean(self) -> float:
        """Bytes of the most loaded OST against the mean of all that there are."""
        mean = sum(self.bytes_by_ost.values()) / max(self.num_osts, len(self.bytes_by_ost))
        return self.bytes_by_ost[self.most_loaded] / max(1e-9, mean)

    @property
    def is_lopsided(self) -> bool:
        """Whether one OST has far more files than its share, by more than chance makes of a few files."""
        most = max(self.files_by_ost.values(), default=0)
        if self.num_osts == UNKNOWN and len(self.files_by_ost) == 1:
            return most > _CHANCE
        share = math.ceil(sum(self.files_by_ost.values()) / max(1, self.num_osts, len(self.files_by_ost)))
        return most > _FAR_MORE * share + 1

    def as_json(self) -> dict[str, Any]:
        return {
            "num_shards": self.num_files,
            "without_layout": self.without_layout,
            "layouts": [{"layout": text, "num_shards": number} for text, number in self.layouts],
            "num_osts": self.num_osts or None,
            "osts": [
                {"ost": ost, "num_shards": self.files_by_ost[ost], "num_bytes": self.bytes_by_ost[ost]}
                for ost in sorted(self.bytes_by_ost)
            ],
            "most_loaded_times_the_mean": round(self.times_the_mean, 3) if self.bytes_by_ost else None,
            "is_lopsided": self.is_lopsided,
        }

    def lines(self) -> list[str]:
        """For a person: the layouts, the balance, and a warning where one OST has far more than its share."""
        shards = counted(self.num_files, "shard")
        lines = [f"{number} of {shards} have {text}" for text, number in self.layouts]
        if self.without_layout:
            lines.append(f"{self.without_layout} of {shards} have no layout (symbolic links?)")
        if not self.bytes_by_ost:
            return lines
        osts = counted(self.num_osts or len(self.bytes_by_ost), "OST")
        osts = f"{len(self.bytes_by_ost)} of {osts}" if self.num_osts else osts
        ost = self.most_loaded
        held = f"{counted(self.files_by_ost[ost], 'shard')}, {short_bytes(self.bytes_by_ost[ost])}"
        lines.append(
            f"they lie on {osts}; OST {ost} has the most: {held}, {self.times_the_mean:.3g} times the mean"
        )
        if self.is_lopsided:
            lines.append(
                f"warning: OST {ost} has far more than its share: it will serve most reads. Was a start "
                "named (lfs setstripe -i, -o)? `shardprep lustre show` tells, and how to move shards"
            )
        return lines


def read_balance(folder: Path, sizes: dict[str, int]) -> Balance | None:
    """Return how the files of a folder (bytes by name) lie on the OSTs; None off Lustre."""
    mount = file_system_of(folder)
    if mount is None or mount.fs_type != "lustre":
        return None
    layouts = read_file_layouts(folder, list(sizes))
    pools = {layout.pool for layout in layouts if layout}
    texts = Counter(layout.with_striped(start_ost=ANY_OST, osts=()).text() for layout in layouts if layout)
    shown = texts.most_common(4)
    if rest := sum(texts.values()) - sum(number for _, number in shown):
        shown.append(("other layouts", rest))
    bytes_by_ost: Counter[int] = Counter()
    files_by_ost: Counter[int] = Counter()
    for layout, num_bytes in zip(layouts, sizes.values(), strict=True):
        held: Counter[int] = Counter()
        for part, part_bytes in layout.of_file(num_bytes) if layout else []:
            osts = part.osts or ((part.start_ost,) if part.start_ost >= 0 else ())
            held.update({ost: part_bytes // len(osts) for ost in osts})
        bytes_by_ost.update(held)
        files_by_ost.update(held.keys())
    return Balance(
        num_files=len(layouts),
        layouts=tuple(shown),
        bytes_by_ost=dict(bytes_by_ost),
        files_by_ost=dict(files_by_ost),
        num_osts=count_osts_if_told(folder, pools.pop() if len(pools) == 1 else ""),
        first_osts=tuple(map(first_ost, layouts)),
        without_layout=layouts.count(None),
    )
