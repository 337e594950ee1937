"""The storage targets (OSTs) of a file system: how many there are, how full they are, which are in trouble.

``lfs df`` says how full they are, ``lfs osts`` and ``lfs pool_list`` how many a file can be spread over. An
OST that is down makes ``lfs df`` exit with its error although it names all others: these are read anyway.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import LfsSilentError, Mount, run_lfs
from shardprep.errors import LustreError

NEARLY_FULL = 0.9  # our own number: Lustre has none; a write to a full OST fails, whatever the others have
UNKNOWN = 0  # as a number of OSTs: lfs does not tell
_STATES = {"D": "degraded", "N": "closed to new files", "R": "read-only"}
_ASK = "look at `lfs check servers`"
# `fs-OST0002_UUID  1073741824  1073741824  0 100%  /mnt[OST:2] S`, KiB; the mount point may hold anything
_DF_LINE = re.compile(
    r"^\S+\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+\s+.*\[(OST|MDT):(\d+)\]\s*([A-Za-z]*)\s*$", re.MULTILINE
)
# `fs-OST0002_UUID : Cannot send after transport endpoint shutdown`, or `OST0002             : ...`
_DF_TROUBLE = re.compile(r"^\S*?((?:OST|MDT)[0-9a-f]{4})(?:_UUID)?\s*: (\S.*)$", re.MULTILINE)
_OST_LINE = re.compile(r"^(\d+): \S+_UUID\s*(\w*)", re.MULTILINE)
_MEMBER = re.compile(r"^\S+-OST([0-9a-f]{4})_UUID", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One OST or MDT as ``lfs df`` has it; bytes, or with ``lfs df -i`` objects."""

    index: int
    total: int
    used: int
    available: int
    flags: str = ""  # D degraded, N creates no objects, R read-only, S out of space, I out of inodes

    @property
    def fill(self) -> float:
        """The used part, 0 to 1, of what is used or available to users."""
        return self.used / max(1, self.used + self.available)

    @property
    def is_out_of_space(self) -> bool:
        """Whether a new stripe here would fail for want of room."""
        return "S" in self.flags or self.available == 0

    @property
    def takes_files(self) -> bool:
        """Whether the server puts new stripes here."""
        return not self.is_out_of_space and not set("NRI") & set(self.flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """What ``lfs df`` told: the targets that answered, and of the others what it said instead."""

    osts: tuple[Target, ...]
    mdts: tuple[Target, ...] = ()
    silent: tuple[tuple[str, str], ...] = ()  # ("OST0002", "Cannot send after transport endpoint shutdown")
    error: str = ""  # how lfs df ended, where it failed although it named targets


def parse_df(output: str, *, unit_bytes: int = 1024) -> Fill:
    """The targets that ``lfs df`` printed; ``unit_bytes`` is 1 for ``-i``. Inactive ones are left out."""
    targets: dict[str, list[Target]] = {"OST": [], "MDT": []}
    for total, used, available, kind, index, flags in _DF_LINE.findall(output):
        targets[kind].append(
            Target(
                index=int(index),
                total=int(total) * unit_bytes,
                used=int(used) * unit_bytes,
                available=int(available) * unit_bytes,
                flags=flags,
            )
        )
    silent = tuple((name, words.strip()) for name, words in _DF_TROUBLE.findall(output))
    return Fill(osts=tuple(targets["OST"]), mdts=tuple(targets["MDT"]), silent=silent)


def read_fill(mount: Mount, *, inodes: bool = False) -> Fill:
    """The targets of a mounted Lustre, and how full they are of bytes, or of objects and inodes.

    Where ``lfs df`` gives no answer it is asked once more without the targets that are away (``-l``).
    Raises LustreError where it names no target at all.
    """
    options = ["df", *(["-i"] if inodes else [])]
    lines = ""
    try:
        result = run_lfs(options, Path(mount.mount_point))
    except LfsSilentError as error:
        lines = str(error)
        result = run_lfs([*options, "-l"], Path(mount.mount_point))
    fill = parse_df(result.stdout, unit_bytes=1 if inodes else 1024)
    if not fill.osts and not fill.silent:
        result.checked(_ASK)
    if result.exit_code:
        lines = f"`lfs {result.shown}` {result.failure}"
    return Fill(osts=fill.osts, mdts=fill.mdts, silent=fill.silent, error=lines)


def fill_lines(fill: Fill) -> list[str]:
    """For a person: one line, and a warning for every target that is nearly full or takes no more."""
    lines = [_summary(fill.osts)]
    for ost in fill.osts:
        lines += _target_lines(ost)
    for name, words in fill.silent:
        number = f"{name[:3]} {int(name[3:], 16)}"
        if words == "inactive device":
            lines.append(f"warning: {number} is inactive: files with a stripe there cannot be read now")
        else:
            lines.append(f"warning: {number} does not answer: {words} (of lfs df)")
    if fill.error and not fill.silent:
        lines.append(f"warning: not every OST may be named here: {fill.error}")
    return lines


def _summary(osts: Sequence[Target]) -> str:
    if not osts:
        return "lfs df names no OST; how full they are cannot be told"
    whole = sum(ost.used for ost in osts) / max(1, sum(ost.used + ost.available for ost in osts))
    least, most = (pick(osts, key=lambda ost: ost.fill) for pick in (min, max))
    spread = f"from {least.fill:.0%} (OST {least.index}) to {most.fill:.0%} (OST {most.index})"
    return f"{len(osts)} OSTs, {whole:.0%} full: {spread if least.fill < most.fill else 'all alike'}"


def _target_lines(ost: Target) -> list[str]:
    lines = []
    if ost.is_out_of_space:
        lines.append(f"warning: OST {ost.index} is out of space: a file that gets a stripe there fails")
    elif ost.fill >= NEARLY_FULL:
        lines.append(f"warning: OST {ost.index} is {ost.fill:.0%} full")
    if "I" in ost.flags:
        lines.append(
            f"warning: OST {ost.index} is out of inodes: it takes no new file (lfs df says {ost.flags})"
        )
    if states := [words for flag, words in _STATES.items() if flag in ost.flags]:
        lines.append(f"warning: OST {ost.index} is {' and '.join(states)} (lfs df says {ost.flags})")
    return lines


def ost_states(path: Path) -> dict[int, str]:
    """``ACTIVE`` or ``INACTIVE`` by OST, as ``lfs osts`` says of a path known to be Lustre.

    Elsewhere it prints nothing and exits 0. Raises LustreError where it fails: it needs more of the client
    (/sys, debugfs or netlink) than ``lfs setstripe`` does.
    """
    output = run_lfs(["osts"], path).checked(_ASK)
    return {int(index): state for index, state in _OST_LINE.findall(output)}


def state_lines(states: dict[int, str], fill: Fill | None) -> list[str]:
    """A warning for every OST that is inactive, and for active ones of which ``lfs df`` said nothing."""
    told = {int(name[3:], 16) for name, _ in fill.silent if name.startswith("OST")} if fill else set()
    lines = [
        f"warning: OST {index} is inactive: files with a stripe there cannot be read now"
        for index, state in states.items()
        if state == "INACTIVE" and index not in told
    ]
    if fill and fill.osts:
        told |= {ost.index for ost in fill.osts}
        lines += [
            f"warning: OST {index} is left out by lfs df: it does not answer now"
            for index, state in states.items()
            if state != "INACTIVE" and index not in told
        ]
    return lines


def count_osts(path: Path, mount: Mount, pool: str = "") -> int:
    """OSTs that a file here can be spread over: all that are not inactive, or those of ``pool``.

    Raises LustreError where lfs does not tell, and where there is no such pool or it has no OST. A pool must
    be asked for first: 2.15 takes a missing one and exits 0, 2.17 fails with ``Success (0)``, and both take
    one without OSTs, in which the first write fails.
    """
    if not pool:
        return sum(state != "INACTIVE" for state in ost_states(path).values())
    full_name = f"{mount.fs_name}.{pool}"
    pools = run_lfs(["pool_list"], mount.fs_name).checked(_ASK).split()
    if full_name not in pools:
        names = ", ".join(word.partition(".")[2] for word in pools if word.startswith(f"{mount.fs_name}."))
        raise LustreError(
            f"{mount.mount_point} ({mount.fs_name}) has no pool {pool!r}, expected one of: {names or 'none'}"
        )
    members = {int(index, 16) for index in _MEMBER.findall(run_lfs(["pool_list"], full_name).checked(_ASK))}
    if not members:
        raise LustreError(
            f"pool {pool} of {mount.mount_point} has no OST, expected at least one: the first write of a "
            f"file there would fail; ask the site, or leave --pool out"
        )
    try:
        states = ost_states(path)
    except LustreError:
        return len(members)
    return sum(states.get(index) != "INACTIVE" for index in members)


def count_osts_if_told(path: Path, mount: Mount, pool: str = "") -> int:
    """``count_osts``, or UNKNOWN where lfs does not tell: nothing but a note depends on it."""
    try:
        return count_osts(path, mount, pool)
    except LustreError:
        return UNKNOWN
