"""Whether a data set will fit: quota, and free space and inodes of OSTs and metadata servers.

Every figure is asked for on its own, and one that lfs does not tell is left out: nothing here ever fails a
command. ``lfs quota`` counts in KiB, and a limit of 0 is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import LfsSilentError, Mount, file_system_of, find_lfs, run_lfs
from lustre.osts import Target, read_fill
from shardprep.errors import LustreError

_PROJECT = re.compile(r"^\s*(\d+)\s")  # `lfs project -d`: `   12 P /mnt/folder`
_ROOT = 0  # quota does not bind it


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What will still be written."""

    num_bytes: int
    num_files: int

    def text(self) -> str:
        """For a person."""
        return f"about {_gb(self.num_bytes)} in {self.num_files} files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one limit leaves: bytes, and files or objects; None where it sets no limit or does not tell."""

    name: str
    free_bytes: int | None = None
    free_files: int | None = None

    def lacks(self, need: Need) -> list[str]:
        """What does not fit, for a person."""
        found = []
        if self.free_bytes is not None and self.free_bytes < need.num_bytes:
            found.append(f"{self.name} leaves {_gb(self.free_bytes)}")
        if self.free_files is not None and self.free_files < need.num_files:
            found.append(f"{self.name} leaves {self.free_files} files")
        return found


def is_usable(folder: Path) -> bool:
    """Whether a folder is on Lustre, and lfs is there to ask."""
    mount = file_system_of(folder)
    return mount is not None and mount.is_lustre and find_lfs() is not None


def space_lines(folder: Path, need: Need) -> list[str]:
    """For a person: what there is room for against what is needed; empty off Lustre and without lfs.

    One line, and a warning for each limit that is too small. Never raises.
    """
    try:
        mount = file_system_of(folder)
        if mount is None or not is_usable(folder):
            return []
        rooms = read_rooms(_existing(folder), mount)
    except (LustreError, OSError) as error:
        return [f"note: whether it will fit cannot be told: {error}"]
    return room_lines(rooms, need)


def room_lines(rooms: list[Room], need: Need) -> list[str]:
    """The same of rooms that are known. Pure."""
    if not rooms:
        return ["note: whether it will fit cannot be told: neither lfs df nor lfs quota says anything of use"]
    told = []
    for room in rooms:
        parts = [] if room.free_bytes is None else [_gb(room.free_bytes)]
        parts += [] if room.free_files is None else [f"{room.free_files} files"]
        told.append(f"{room.name}: {' and '.join(parts)} left")
    lines = [f"it needs {need.text()}; {'; '.join(told)}"]
    for room in rooms:
        lines += [
            f"warning: it will not fit: {words}, and it needs {need.text()}" for words in room.lacks(need)
        ]
    return lines


def read_rooms(folder: Path, mount: Mount) -> list[Room]:
    """What quotas and targets leave for an existing folder; only what lfs tells."""
    rooms = []
    ask: list[Callable[[], Room | None]] = [
        lambda: _target_room(mount),
        lambda: _inode_room(mount),
        lambda: _quota(mount, "-u", os.getuid(), "your quota"),
        lambda: _quota(mount, "-g", _group(folder), "the group's quota"),
        lambda: _quota(mount, "-p", _project(folder), "the project's quota"),
    ]
    for question in ask:
        try:
            room = question()
        except LfsSilentError:
            break
        except (LustreError, OSError, ValueError):
            continue
        if room is not None and (room.free_bytes, room.free_files) != (None, None):
            rooms.append(room)
    return rooms


def _target_room(mount: Mount) -> Room | None:
    osts = [ost for ost in read_fill(mount).osts if ost.takes_files]
    return Room(name=f"{len(osts)} OSTs", free_bytes=sum(ost.available for ost in osts)) if osts else None


def _inode_room(mount: Mount) -> Room | None:
    """A file needs an inode of a metadata server, and an object of an OST: the fewer count."""
    fill = read_fill(mount, inodes=True)
    kinds: list[tuple[Target, ...]] = [kind for kind in (fill.mdts, fill.osts) if kind]
    if not kinds:
        return None
    return Room(
        name="inodes of MDT and OSTs", free_files=min(sum(item.available for item in kind) for kind in kinds)
    )


def _quota(mount: Mount, option: str, number: int, name: str) -> Room | None:
    """None for root and project 0, whom no quota binds."""
    if number == _ROOT:
        return None
    output = run_lfs(["quota", option, str(number)], Path(mount.mount_point)).checked("ask the site")
    free_kib, free_files = parse_quota(output)
    return Room(name=name, free_bytes=None if free_kib is None else free_kib << 10, free_files=free_files)


def parse_quota(output: str) -> tuple[int | None, int | None]:
    """KiB and files that ``lfs quota`` leaves; None for no limit. Raises ValueError for anything else.

    Below the line of heads stand: file system, KiB used (``*`` if too many), soft and hard limit, grace, and
    the same of files. A long mount point has a line of its own; an inaccurate number stands in brackets.
    """
    head = re.search(r"^\s*Filesystem\s+kbytes\s.*$", output, re.MULTILINE)
    if head is None:
        raise ValueError(f"no quota in {output.strip()[:200]!r}")
    words = output[head.end() :].split("\n")
    line = next((line for line in words if len(line.split()) >= 8), None)
    if line is None:
        raise ValueError(f"no quota in {output.strip()[:200]!r}")
    used, soft, hard, _, num_files, soft_files, hard_files, _ = line.split()[-8:]
    return _left(used, soft, hard), _left(num_files, soft_files, hard_files)


def _left(used: str, soft: str, hard: str) -> int | None:
    """What the hard limit leaves, or the soft one where there is no other."""
    numbers = [int(text.strip("[]*")) for text in (used, soft, hard)]
    limit = numbers[2] or numbers[1]
    return max(0, limit - numbers[0]) if limit else None


def _group(folder: Path) -> int:
    """Files belong to the folder's group where it is set so (setgid), else to the user's."""
    status = folder.stat()
    return status.st_gid if status.st_mode & 0o2000 else os.getgid()


def _project(folder: Path) -> int:
    output = run_lfs(["project", "-d"], folder).checked("ask the site")
    match = _PROJECT.match(output)
    return int(match[1]) if match else 0


def _existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
