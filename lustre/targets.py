"""Targets of a Lustre file system, OSTs and MDTs: how full each is, and which belong to a pool."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lustre.lfs import lustre_mount, run_lfs
from shardprep.console import counted, short_number
from shardprep.errors import LustreError

NEARLY_FULL = 0.9  # our choice, Lustre defines none; a write to a full OST fails even if others have space
UNKNOWN = 0  # a number of OSTs that lfs does not report
_FLAGS = {  # of `lfs df`
    "S": "is out of space: writes to it fail",
    "I": "is out of inodes: it takes no new file",
    "D": "is degraded",
    "N": "is closed to new files",
    "R": "is read-only",
}
# `fs-OST0002_UUID  1073741824  1073741824  0 100%  /mnt[OST:2] S`, KiB; the mount point is any text
_DF_LINE = re.compile(
    r"^\S+\s+\d+\s+(\d+)\s+(\d+)\s+\S+\s+.*\[(OST|MDT):(\d+)\]\s*([A-Za-z]*)\s*$", re.MULTILINE
)
# `fs-OST0002_UUID : Cannot send after transport endpoint shutdown`, or `OST0002             : ...`
_DF_TROUBLE = re.compile(r"^\S*?(OST|MDT)([0-9a-f]{4})(?:_UUID)?\s*: (\S.*)$", re.MULTILINE)
_MEMBER = re.compile(r"^\S+-OST([0-9a-f]{4})_UUID", re.MULTILINE)


class Target(NamedTuple):
    """An OST or MDT as ``lfs df`` shows it."""

    name: str  # OST 2
    used_bytes: int
    free_bytes: int
    free_inodes: int | None  # None: unknown
    flags: str  # keys of _FLAGS

    @property
    def fill(self) -> float:
        """Return the used fraction, 0 to 1, of the space available to users."""
        return self.used_bytes / max(1, self.used_bytes + self.free_bytes)

    @property
    def takes_files(self) -> bool:
        return not set("SINR") & set(self.flags)


@dataclass(kw_only=True, slots=True)
class Targets:
    """Targets that answered ``lfs df``, and what is wrong with the others."""

    answered: dict[str, list[Target]]  # "OST" or "MDT" -> targets
    silent: dict[str, str] = field(default_factory=dict)  # name -> trouble
    why_no_inodes: str = ""

    def lines(self) -> list[str]:
        """Return a line for the OSTs, one for the MDTs, and a warning for each target in trouble."""
        lines = []
        trouble = []
        for kind, targets in self.answered.items():
            if not targets:
                lines.append(f"how full the {kind}s are is unknown: lfs df lists none")
                continue
            used = sum(each.used_bytes for each in targets)
            free = sum(each.free_bytes for each in targets)
            inodes = [each.free_inodes for each in targets if each.free_inodes is not None]
            num_inodes = short_number(sum(inodes)) if inodes else f"unknown ({self.why_no_inodes})"
            used_part = used / max(1, used + free)
            lines.append(f"{counted(len(targets), kind)}, {used_part:.0%} full; free inodes: {num_inodes}")
            for target in targets:
                trouble += [f"{target.name} {_FLAGS[flag]}" for flag in target.flags if flag in _FLAGS]
                if target.fill >= NEARLY_FULL and "S" not in target.flags:
                    trouble.append(f"{target.name} is {target.fill:.0%} full")
        trouble += [f"{name} {words}" for name, words in self.silent.items()]
        return [*lines, *(f"warning: {words}" for words in trouble)]


def read_targets(path: Path) -> Targets:
    """Read the targets of the file system of ``path`` by two calls of lfs. Raises LustreError without any.

    If an OST is down, ``lfs df`` exits with an error but still lists the others, which are read.
    """
    place = Path(lustre_mount(path).mount_point)
    blocks = run_lfs("df", "-v", place)  # -v: inactive ones, too
    found = Targets(answered={"OST": [], "MDT": []})
    inodes = ""
    try:
        inodes = run_lfs("df", "-i", place).stdout
    except LustreError as error:
        found.why_no_inodes = str(error)
    free_inodes = {(kind, index): int(free) for _, free, kind, index, _ in _DF_LINE.findall(inodes)}
    for used, free, kind, index, flags in _DF_LINE.findall(blocks.stdout):
        left = free_inodes.get((kind, index))
        if int(free) == 0 and "S" not in flags:
            flags += "S"
        if left == 0 and "I" not in flags:
            flags += "I"
        found.answered[kind].append(Target(f"{kind} {index}", int(used) << 10, int(free) << 10, left, flags))
    for kind, index, message in _DF_TROUBLE.findall(blocks.stdout):
        is_inactive = message.strip() == "inactive device"
        words = "is inactive" if is_inactive else f"does not answer: {message.strip()}"
        found.silent[f"{kind} {int(index, 16)}"] = f"{words}: files with a stripe there cannot be read now"
    if not (any(found.answered.values()) or found.silent):
        raise LustreError(f"{blocks.failure}; look at `lfs check servers`")
    return found


def count_osts(path: Path, pool: str = "") -> int:
    """Return the number of OSTs of the file system or of a pool, or UNKNOWN.

    Raises LustreError for a pool that does not exist or is empty: lfs may accept it, but writes would fail.
    """
    if not pool:
        try:
            return len(read_targets(path).answered["OST"])
        except LustreError:  # only a note depends on the number
            return UNKNOWN
    return len(members_of(path, pool))


def members_of(path: Path, pool: str) -> set[int]:
    """Return the indices of a pool's OSTs. Raises LustreError if it does not exist or is empty."""
    # A pool's full name begins with the file system's: ``name`` of ``10.0.0.1@tcp:/name/folder``.
    fs_name = lustre_mount(path).source.rpartition(":/")[2].split("/")[0]
    prefix = f"{fs_name}."
    words = run_lfs("pool_list", fs_name).checked().split()
    pools = [word.removeprefix(prefix) for word in words if word.startswith(prefix)]
    members = run_lfs("pool_list", prefix + pool).checked() if pool in pools else ""
    indices = {int(index, 16) for index in _MEMBER.findall(members)}
    if indices:
        return indices
    expected = f"one of: {', '.join(pools) or 'none'}; the first write of a file would fail"
    raise LustreError(path=path, found=f"no pool {pool!r} with OSTs in {fs_name}", expected=expected)
