"""Print about a path what new files will get, how full the servers are, and where finished shards lie.

Of all this only the layout must be told; whatever else lfs does not tell is a line that says so.
A file's layout is its own from its first byte on, whatever its folder's default says later.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lustre.apply import start_warning
from lustre.layout import ANY_OST, Layout, layout_of_file_system, parse_layout, read_layout
from lustre.lfs import FILES_PER_CALL, file_system_of, find_files, kind_of, run_lfs, why_not_usable
from lustre.space import UNKNOWN, Targets, count_osts_if_told, ost_states, read_targets, state_lines
from shardprep.console import counted
from shardprep.errors import LustreError

_SHARD = re.compile(r"shard-\d{5}\.tar")


def report(path: Path) -> list[str]:
    """Return the lines about ``path``; changes nothing. Raises LustreError."""
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if reason := why_not_usable(path):
        return [*lines, f"nothing to show: {reason}"]
    layout = read_layout(path)
    if kind_of(path) != "folder":
        return [*lines, f"this file has {layout.text()}", *_server_lines(path)]
    if layout.is_inherited:
        origin = "inherited, it has no default of its own"
    elif layout == layout_of_file_system(path):
        origin = "the file system's default; lfs does not tell whether the folder has it of its own, too"
    else:
        origin = "its own default"
    lines.append(f"new files get {layout.text()} ({origin})")
    if warning := start_warning(path, layout):
        lines.append(warning)
    lines += _server_lines(path)
    try:
        balance = _balance_of_shards(path)
    except OSError as error:
        lines.append(f"what is in {path} cannot be told: {error.strerror}")
    except LustreError as error:
        lines.append(f"which layouts its files have cannot be told: {error}")
    else:
        lines += balance.lines() if balance else []
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
        balance = _balance_of_shards(path)
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
    try:
        lines += state_lines(ost_states(path), targets)
    except LustreError as error:
        lines.append(f"which OSTs are inactive is unknown: {error}")
    return lines


# --- the finished shards of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How finished shards lie on the OSTs."""

    layouts: Counter[str]  # in words, and how many shards have it; "" for those without one
    files_by_ost: Counter[int]  # shards with a stripe there
    num_osts: int  # that the shards could lie on; 0: unknown

    @property
    def is_lopsided(self) -> bool:
        """Whether one OST has far more shards than its share, by more than chance makes of a few."""
        most = max(self.files_by_ost.values(), default=0)
        num_osts = max(self.num_osts, len(self.files_by_ost), 1)
        if self.num_osts == UNKNOWN and num_osts == 1:
            return most > 3  # how many OSTs there are is not told: more than three on one is no chance
        return most > 2 * math.ceil(self.files_by_ost.total() / num_osts) + 1

    def as_json(self) -> dict[str, Any]:
        return {
            "num_shards": self.layouts.total(),
            "without_layout": self.layouts[""],
            "layouts": [
                {"layout": text, "num_shards": number} for text, number in self.layouts.most_common() if text
            ],
            "num_osts": self.num_osts or None,
            "osts": [{"ost": ost, "num_shards": self.files_by_ost[ost]} for ost in sorted(self.files_by_ost)],
            "is_lopsided": self.is_lopsided,
        }

    def lines(self) -> list[str]:
        """Return the layouts, the balance, and a warning where one OST has far more than its share."""
        shards = counted(self.layouts.total(), "shard")
        lines = []
        for text, number in self.layouts.most_common(5):
            lines.append(f"{number} of {shards} have {text or 'no layout (symbolic links?)'}")
        if len(self.layouts) > 5:
            lines.append(f"and {counted(len(self.layouts) - 5, 'other layout')}")
        if not self.files_by_ost:
            return lines
        ost, most = min(self.files_by_ost.items(), key=lambda item: (-item[1], item[0]))
        osts = counted(self.num_osts or len(self.files_by_ost), "OST")
        most_text = counted(most, "shard")
        lines.append(f"they lie on {len(self.files_by_ost)} of {osts}; OST {ost} has the most: {most_text}")
        if self.is_lopsided:
            lines.append(
                f"warning: OST {ost} has far more than its share: it will serve most reads. Was a start "
                "named (lfs setstripe -i, -o)? `lfs migrate -c 1 FILE` moves a shard while nothing reads it"
            )
        return lines


def _balance_of_shards(folder: Path) -> Balance | None:
    """Ask lfs where the finished tars of a folder (not below it) lie; None where there are none."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if _SHARD.fullmatch(entry.name) and entry.is_file())
    if not names:
        return None
    layouts = read_file_layouts(folder, names)
    texts: Counter[str] = Counter()
    files_by_ost: Counter[int] = Counter()
    for layout in layouts:
        if layout is None:
            texts[""] += 1
            continue
        anywhere = tuple(replace(part, start_ost=ANY_OST, osts=()) for part in layout.components)
        texts[replace(layout, components=anywhere).text()] += 1
        osts: set[int] = set()
        for part in layout.components:
            osts.update(part.osts or ([part.start_ost] if part.start_ost >= 0 else []))
        files_by_ost.update(osts)
    pools = {layout.pool for layout in layouts if layout}
    num_osts = count_osts_if_told(folder, pools.pop() if len(pools) == 1 else "")
    return Balance(layouts=texts, files_by_ost=files_by_ost, num_osts=num_osts)


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
        texts = _texts_by_file(result.stdout, asked)
        found += [None if text.strip() == "has no stripe info" else parse_layout(text) for text in texts]
    return found


def _texts_by_file(output: str, paths: Sequence[str]) -> list[str]:
    """Return what ``lfs getstripe`` said of each path. Raises LustreError where one is missing."""
    found = find_files(output, paths, "(?=$| has no stripe info$)")
    if len(found) < len(paths):
        raise LustreError(
            f"`lfs getstripe` of {counted(len(paths), 'file')} printed {output.strip()[:200]!r}, "
            f"expected the layouts of {paths[0]} and on; is this `lfs` a site's wrapper?"
        )
    ends = [*(match.start() for match in found.values()), len(output)][1:]
    return [output[match.end() : end] for match, end in zip(found.values(), ends, strict=True)]
