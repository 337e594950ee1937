"""Whether a data set will fit: what it needs, and what targets, pools and quotas leave.

What lfs does not report is shown as unknown. A lack of space, or of numbers about it, never fails a command.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from lustre.lfs import existing_part, lustre_mount, run_lfs, why_not_usable
from lustre.targets import members_of, read_targets
from shardprep.console import counted, short_bytes, short_number
from shardprep.errors import LustreError, ShardprepError

_POOL = re.compile(r"^[ \t-]*(?:lmm_)?pool:[ \t]*(\w\S*)", re.MULTILINE)  # in lfs getstripe -y


class Need(NamedTuple):
    """The space that is needed: ``num_bytes`` in total, and three files per shard."""

    num_bytes: int
    num_shards: int


class Room(NamedTuple):
    """The bytes or files that one limit leaves."""

    name: str
    num_left: int | None  # None: unknown, and the note says why
    note: str = ""  # how accurate the number is, or when the limit takes effect
    is_of_files: bool = False


def _files_text(number: int) -> str:
    return counted(number, "file") if number < 100_000 else f"{short_number(number)} files"


def space_lines(folder: Path, need: Need) -> list[str]:
    """Return a line with the space needed and left, and a warning for each limit that is too small.

    Returns [] off Lustre or without lfs. Never raises.
    """
    try:
        if why_not_usable(folder):
            return []
        rooms = _read_rooms(existing_part(folder), need.num_bytes)
    except (ShardprepError, OSError) as error:
        return [f"note: whether it will fit is unknown: {error}"]
    needed = f"about {short_bytes(need.num_bytes)} in {_files_text(3 * need.num_shards)}"
    lefts = []
    warnings = []
    for room in rooms:
        note = f" ({room.note})" if room.note else ""
        if room.num_left is None:
            lefts.append(f"{room.name}: unknown{note}")
            continue
        is_short = room.num_left < (3 * need.num_shards if room.is_of_files else need.num_bytes)
        left = _files_text(room.num_left) if room.is_of_files else short_bytes(room.num_left)
        left = f"{room.name}: {left} left"
        lefts.append(left + note)
        if is_short:
            warnings.append(f"warning: it will not fit: {left}, and it needs {needed}")
    return [f"it needs {needed}; {'; '.join(lefts)}", *warnings]


def _pools_of(folder: Path) -> list[str]:
    """Return the pools that a folder's new files are placed in, or [] for all OSTs or if it is not known."""
    try:
        shown = run_lfs("getstripe", "-d", "-y", folder)
    except LustreError:
        return []
    return [] if shown.exit_code else sorted(set(_POOL.findall(shown.stdout)))


def _read_rooms(folder: Path, num_bytes: int) -> list[Room]:
    """Return what targets and the user's quota leave in an existing folder, by three calls of lfs.

    The folder's pool is asked for only if one of the OSTs has less than ``num_bytes``.
    """
    try:
        targets = read_targets(folder)
    except LustreError as error:
        rooms = [Room("free space", None, str(error))]
    else:
        osts = [ost for ost in targets.answered["OST"] if ost.takes_files]
        silent = f"{counted(len(targets.silent), 'target')} did not answer" if targets.silent else ""
        what = counted(len(osts), "OST")
        is_tight = any(ost.free_bytes < num_bytes for ost in targets.answered["OST"])
        pools = _pools_of(folder) if is_tight else []
        if pools:
            members: set[str] = set()
            for pool in pools:
                members.update(f"OST {index}" for index in members_of(folder, pool))
            osts = [ost for ost in osts if ost.name in members]
            what = f"{counted(len(osts), 'OST')} of pool {', '.join(pools)}"
        rooms = [Room(what, sum(ost.free_bytes for ost in osts), silent)]
        # A file needs an inode on an MDT and an object on an OST, so the smaller number counts.
        kinds = targets.answered.values()
        is_known = all(each and all(target.free_inodes is not None for target in each) for each in kinds)
        free = [sum(target.free_inodes or 0 for target in each if target.takes_files) for each in kinds]
        num_left, note = (min(free), "") if is_known else (None, targets.why_no_inodes)
        rooms.append(Room("inodes of MDTs and OSTs", num_left, note, is_of_files=True))
    if os.getuid() == 0:  # quotas do not limit root
        return rooms
    try:
        result = run_lfs("quota", "-u", str(os.getuid()), Path(lustre_mount(folder).mount_point))
        if result.exit_code in {0, 5}:  # 5: some numbers are inaccurate, and in brackets
            return [*rooms, *parse_quota(result.stdout)]
        return rooms if "not enabled" in result.stderr else [*rooms, Room("your quota", None, result.failure)]
    except (LustreError, ValueError) as error:
        return [*rooms, Room("your quota", None, str(error))]


def parse_quota(output: str) -> list[Room]:
    """Parse ``lfs quota`` into what the limits on bytes and files leave. Raises ValueError.

    The columns are: file system; KiB used (with ``*`` if over the limit), soft limit, hard limit, grace; and
    the same four for files. A long mount point has its own line. Inaccurate numbers are in brackets.
    """
    number = r"\[?(\d+)\]?\*?"
    figures = rf"{number}\s+{number}\s+{number}\s+(\S+)"  # used, soft, hard, grace
    match = re.search(rf"kbytes\s.*\n(?:.*\n)?.*\s{figures}\s+{figures}\s*$", output, re.MULTILINE)
    if match is None:
        raise ValueError(f"lfs quota printed no figures: {output.strip()[:200]!r}")
    inaccurate = "inaccurate: a server did not answer" if "[" in match[0] else ""
    rooms: list[Room] = []
    for is_of_files, numbers in ((False, match.groups()[:4]), (True, match.groups()[4:])):
        used, soft, hard, grace = numbers
        limit = int(hard) or int(soft)
        if not limit:
            continue
        left = max(0, limit - int(used))
        note = inaccurate
        if int(soft) and int(used) > int(soft):
            note = f"over the soft limit: writes fail in {grace}"
            if grace in {"expired", "none"}:  # "none" in 2.15: every write fails, whatever the hard limit
                left = 0
                note = "over the soft limit, and the grace period is over"
        rooms.append(Room("your quota", left if is_of_files else left << 10, note, is_of_files))
    return rooms
