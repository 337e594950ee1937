"""What ``show`` tells about a path: what new files get, how full the servers are, where shards lie.

Only the layout must be told; whatever else lfs does not tell is a line that says so.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from lustre.apply import new_files_text, origin_text
from lustre.layout import ANY_OST, read_layout
from lustre.lfs import file_system_of, why_not_usable
from lustre.space import count_osts, read_targets
from shardprep.console import counted
from shardprep.errors import LustreError, ShardprepError
from shardprep.files import is_folder, names_in

NUM_LOOKED_AT = 64  # finished shards, spread evenly: each is a call of lfs
_SHARD = re.compile(r"shard-\d{5}\.tar")


def report(path: Path) -> list[str]:
    """Return the lines about ``path``, and change nothing. Raises LustreError."""
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if reason := why_not_usable(path):
        return [*lines, f"nothing to show: {reason}"]
    layout = read_layout(path)
    if is_folder(path):
        lines.append(f"{new_files_text(path, layout)} ({origin_text(path, layout)})")
    else:
        lines.append(f"this file has {layout.text()}")
    try:
        lines += read_targets(path).lines()
    except LustreError as error:
        lines.append(f"how full OSTs and MDTs are is unknown: {error}")
    try:
        return lines + _shard_lines(path)
    except ShardprepError as error:
        return [*lines, f"where its shards lie cannot be told: {error}"]


def _shard_lines(folder: Path) -> list[str]:
    """Ask lfs where finished tars of a folder (not below it) lie, and warn if one OST has most of them."""
    names = [name for name in names_in(folder) if _SHARD.fullmatch(name)] if is_folder(folder) else []
    if not names:
        return []
    looked_at = names[:: -(-len(names) // NUM_LOOKED_AT)]
    layouts, osts = Counter[str](), Counter[int]()
    for name in looked_at:
        layout = read_layout(folder / name)
        # Without the OSTs, which differ from file to file.
        parts = tuple(replace(part, start_ost=ANY_OST, osts=()) for part in layout.components)
        layouts[replace(layout, components=parts).text()] += 1
        osts.update({ost for part in layout.components for ost in part.osts})
    shards = f"{counted(len(looked_at), 'shard')} looked at"
    lines = [f"{number} of {shards} have {text}" for text, number in layouts.most_common()]
    for ost, number in osts.most_common(1):
        lines.append(f"they lie on {counted(len(osts), 'OST')}; OST {ost} has most: {number}")
        # Servers take turns: an OST with so many is one that somebody named.
        if number > max(4, 2 * len(looked_at) / 3) and count_osts(folder) > 2:
            lines.append(
                f"warning: OST {ost} will serve most reads. Was a start named (lfs setstripe -i, -o)? "
                "`lfs migrate -c 1 FILE` moves a shard while nothing reads it"
            )
    return lines
