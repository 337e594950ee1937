"""The storage targets (OSTs, MDTs) of a file system, the user's quota, and whether a data set will fit.

An OST that is down makes ``lfs df`` exit with its error although it names all others: these are read anyway.
What lfs does not tell is said to be unknown; nothing about space ever fails a command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lustre.lfs import LfsSilentError, existing_part, lustre_mount, run_lfs, why_not_usable
from shardprep.console import counted, short_bytes, short_number
from shardprep.errors import LustreError

NEARLY_FULL = 0.9  # our own number: Lustre has none; a write to a full OST fails, whatever the others have
UNKNOWN = 0  # as a number of OSTs: lfs does not tell
_INACTIVE = "is inactive: files with a stripe there cannot be read now"
_STATES = {"D": "degraded", "N": "closed to new files", "R": "read-only"}
# `fs-OST0002_UUID  1073741824  1073741824  0 100%  /mnt[OST:2] S`, KiB; the mount point may hold anything
_DF_LINE = re.compile(
    r"^\S+\s+\d+\s+(\d+)\s+(\d+)\s+\S+\s+.*\[(OST|MDT):(\d+)\]\s*([A-Za-z]*)\s*$", re.MULTILINE
)
# `fs-OST0002_UUID : Cannot send after transport endpoint shutdown`, or `OST0002             : ...`
_DF_TROUBLE = re.compile(r"^\S*?(OST|MDT)([0-9a-f]{4})(?:_UUID)?\s*: (\S.*)$", re.MULTILINE)
_OST_LINE = re.compile(r"^(\d+): \S+_UUID\s*(\w*)", re.MULTILINE)
_MEMBER = re.compile(r"^\S+-OST([0-9a-f]{4})_UUID", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One OST or MDT as ``lfs df`` has it."""

    name: str  # OST 2
    used_bytes: int
    free_bytes: int
    flags: str = ""  # D degraded, N creates no objects, R read-only, S out of space, I out of inodes
    free_inodes: int | None = None  # None: not told

    @property
    def fill(self) -> float:
        """The used part, 0 to 1, of what is used or free for users."""
        return self.used_bytes / max(1, self.used_bytes + self.free_bytes)

    @property
    def is_out_of_space(self) -> bool:
        return "S" in self.flags or self.free_bytes == 0

    @property
    def is_out_of_inodes(self) -> bool:
        return "I" in self.flags or self.free_inodes == 0

    @property
    def takes_files(self) -> bool:
        """Whether the server puts new files or stripes here."""
        return not (self.is_out_of_space or self.is_out_of_inodes or set("NR") & set(self.flags))

    def warnings(self) -> list[str]:
        """A line for each thing that is wrong with it."""
        said = f" (lfs df says {self.flags})" if self.flags else ""
        is_mdt = self.name.startswith("MDT")
        fails = "no file can be made there" if is_mdt else "a file that gets a stripe there fails"
        lines = []
        if self.is_out_of_space:
            lines.append(f"is out of space: {fails}{said}")
        elif self.fill >= NEARLY_FULL:
            lines.append(f"is {self.fill:.0%} full")
        if self.is_out_of_inodes:
            lines.append(f"is out of inodes: it takes no new file{said}")
        if states := [words for flag, words in _STATES.items() if flag in self.flags]:
            lines.append(f"is {' and '.join(states)}{said}")
        return [f"warning: {self.name} {words}" for words in lines]


@dataclass(kw_only=True, slots=True)
class Targets:
    """What ``lfs df`` told: the targets that answered, and by name what it said of the others instead."""

    osts: list[Target]
    mdts: list[Target]
    silent: dict[str, str]
    notes: list[str] = field(default_factory=list)  # what could not be told, and why

    def lines(self) -> list[str]:
        """For a person: a line for OSTs and for MDTs, and a warning for every target in trouble."""
        lines = [_summary(self.osts, "OST"), _summary(self.mdts, "MDT")]
        for target in (*self.osts, *self.mdts):
            lines += target.warnings()
        for name, words in self.silent.items():
            how = _INACTIVE if words == "inactive device" else f"does not answer: {words} (of lfs df)"
            lines.append(f"warning: {name} {how}")
        return [*lines, *(f"warning: {note}" for note in self.notes)]


def _summary(targets: Sequence[Target], kind: str) -> str:
    if not targets:
        return f"lfs df names no {kind}; how full they are is unknown"
    used = sum(target.used_bytes for target in targets)
    whole = used / max(1, used + sum(target.free_bytes for target in targets))
    least, most = (pick(targets, key=lambda target: target.fill) for pick in (min, max))
    text = f"{counted(len(targets), kind)}, {whole:.0%} full"
    if least.fill < most.fill:
        text += f": from {least.fill:.0%} ({least.name}) to {most.fill:.0%} ({most.name})"
    elif len(targets) > 1:
        text += ": all alike"
    if kind == "MDT":
        told = [target.free_inodes for target in targets if target.free_inodes is not None]
        text += f"; free inodes: {short_number(sum(told)) if told else 'unknown'}"
    return text


def parse_df(blocks: str, inodes: str = "") -> Targets:
    """Read the targets of ``lfs df`` and, joined with them, of ``lfs df -i``. Inactive ones are left out."""
    free_inodes = {f"{kind} {index}": int(free) for _, free, kind, index, _ in _DF_LINE.findall(inodes)}
    found: dict[str, list[Target]] = {"OST": [], "MDT": []}
    for used, free, kind, index, flags in _DF_LINE.findall(blocks):
        name = f"{kind} {index}"
        sizes = {"used_bytes": int(used) << 10, "free_bytes": int(free) << 10}
        found[kind].append(Target(name=name, flags=flags, free_inodes=free_inodes.get(name), **sizes))
    trouble = _DF_TROUBLE.findall(blocks)
    silent = {f"{kind} {int(index, 16)}": said.strip() for kind, index, said in trouble}
    return Targets(osts=found["OST"], mdts=found["MDT"], silent=silent)


def read_targets(path: Path) -> Targets:
    """Ask for the targets of the Lustre of ``path``.

    Two calls; none more after one that gave no answer. Raises LustreError where the first names no target.
    """
    place = Path(lustre_mount(path).mount_point)
    blocks = run_lfs("df", place)
    targets = parse_df(blocks.stdout)
    if not (targets.osts or targets.mdts or targets.silent):
        raise LustreError(f"`lfs {blocks.shown}` {blocks.failure}; look at `lfs check servers`")
    notes = []
    if blocks.exit_code and not targets.silent:
        notes.append(f"not every OST may be named here: `lfs {blocks.shown}` {blocks.failure}")
    try:
        targets = parse_df(blocks.stdout, run_lfs("df", "-i", place).stdout)
    except LustreError as error:
        notes.append(f"free inodes are unknown: {error}")
    targets.notes = notes
    return targets


# --- how many OSTs there are


def ost_states(path: Path) -> dict[int, str]:
    """Return ``ACTIVE`` or ``INACTIVE`` by OST. Raises LustreError; it needs /sys, debugfs or netlink."""
    return {int(index): state for index, state in _OST_LINE.findall(run_lfs("osts", path).checked())}


def state_lines(states: dict[int, str], targets: Targets) -> list[str]:
    """Warn of every OST that is inactive, and of active ones of which ``lfs df`` said nothing."""
    told = {*targets.silent, *(ost.name for ost in targets.osts)}
    inactive, missing = [], []
    for index, state in states.items():
        name = f"OST {index}"
        if state == "INACTIVE" and name not in targets.silent:
            inactive.append(f"warning: {name} {_INACTIVE}")
        elif state != "INACTIVE" and targets.osts and name not in told:
            missing.append(f"warning: {name} is left out by lfs df: it does not answer now")
    return inactive + missing


def count_osts(path: Path, pool: str = "") -> int:
    """Count the OSTs that a file here can be spread over: all that are not inactive, or those of ``pool``.

    Raises LustreError where lfs does not tell, and where there is no such pool or it has no OST: 2.15 takes a
    missing one and exits 0, and both versions take one without OSTs, in which the first write fails.
    """
    if not pool:
        return sum(state != "INACTIVE" for state in ost_states(path).values())
    mount = lustre_mount(path)
    full_name = f"{mount.fs_name}.{pool}"
    pools = run_lfs("pool_list", mount.fs_name).checked().split()
    if full_name not in pools:
        names = ", ".join(word.partition(".")[2] for word in pools if word.startswith(f"{mount.fs_name}."))
        raise LustreError(
            f"{mount.mount_point} ({mount.fs_name}) has no pool {pool!r}, expected one of: {names or 'none'}"
        )
    members = {int(index, 16) for index in _MEMBER.findall(run_lfs("pool_list", full_name).checked())}
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


def count_osts_if_told(path: Path, pool: str = "") -> int:
    """``count_osts``, or UNKNOWN where lfs does not tell: nothing but a note depends on it."""
    try:
        return count_osts(path, pool)
    except LustreError:
        return UNKNOWN


# --- what is left


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What will still be written: shards of ``num_bytes`` in all, of three files each."""

    num_bytes: int
    num_shards: int

    def text(self) -> str:
        return f"about {short_bytes(self.num_bytes)} in {_files_text(3 * self.num_shards)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one limit leaves: bytes, and files or objects; None where it sets no limit."""

    name: str
    free_bytes: int | None = None
    free_files: int | None = None
    note: str = ""  # what else is to be known: how sure the figures are, when a limit will bite
    unknown: str = ""  # why nothing is told

    def text(self) -> str:
        if self.unknown:
            return f"{self.name}: unknown ({self.unknown})"
        left = [] if self.free_bytes is None else [short_bytes(self.free_bytes)]
        left += [] if self.free_files is None else [_files_text(self.free_files)]
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: {' and '.join(left)} left{note}" if left else f"{self.name}: no limit{note}"

    def lacks(self, need: Need) -> list[str]:
        """Return what does not fit, for a person."""
        found = []
        if self.free_bytes is not None and self.free_bytes < need.num_bytes:
            found.append(f"{self.name}: {short_bytes(self.free_bytes)} left")
        if self.free_files is not None and self.free_files < 3 * need.num_shards:
            found.append(f"{self.name}: {_files_text(self.free_files)} left")
        return found


def _files_text(number: int) -> str:
    return counted(number, "file") if number < 100_000 else f"{short_number(number)} files"


def space_lines(folder: Path, need: Need) -> list[str]:
    """Say what there is room for against what is needed; nothing off Lustre and without lfs. Never raises.

    One line, and a warning for each limit that is too small. What lfs does not tell is said to be unknown.
    """
    try:
        if why_not_usable(folder):
            return []
        rooms = _read_rooms(existing_part(folder))
    except (LustreError, OSError) as error:
        return [f"note: whether it will fit is unknown: {error}"]
    lines = [f"it needs {need.text()}; {'; '.join(room.text() for room in rooms)}"]
    lacking = [words for room in rooms for words in room.lacks(need)]
    return [*lines, *(f"warning: it will not fit: {words}, and it needs {need.text()}" for words in lacking)]


def _read_rooms(folder: Path) -> list[Room]:
    """Return what targets and the user's quota leave for an existing folder, by three calls of lfs."""
    rooms: list[Room] = []
    try:
        targets = read_targets(folder)
    except LustreError as error:
        rooms.append(Room(name="free space", unknown=str(error)))
        if isinstance(error, LfsSilentError):
            return [*rooms, Room(name="quota", unknown="not asked for after that")]
    else:
        osts = [ost for ost in targets.osts if ost.takes_files]
        silent = f"{counted(len(targets.silent), 'target')} did not answer" if targets.silent else ""
        free_bytes = sum(ost.free_bytes for ost in osts)
        rooms.append(Room(name=counted(len(osts), "OST"), free_bytes=free_bytes, note=silent))
        rooms.append(_inodes_room(targets))
    if os.getuid() == 0:  # no quota binds root
        return rooms
    try:
        place = Path(lustre_mount(folder).mount_point)
        result = run_lfs("quota", "-u", str(os.getuid()), place)
        if result.exit_code in {0, 5}:  # 5: some figures are inaccurate, and stand in brackets
            rooms.append(parse_quota(result.stdout))
        else:
            why = "" if "not enabled" in result.stderr else result.failure
            rooms.append(Room(name="your quota", unknown=why))
    except (LustreError, OSError, ValueError) as error:
        rooms.append(Room(name="your quota", unknown=str(error)))
    return rooms


def _inodes_room(targets: Targets) -> Room:
    """A file needs an inode of an MDT and an object of an OST: the fewer count."""
    name, kinds = "inodes of MDTs and OSTs", (targets.mdts, targets.osts)
    if not all(kinds) or any(each.free_inodes is None for kind in kinds for each in kind):
        return Room(name=name, unknown=next(iter(targets.notes), "lfs df names no MDT or no OST"))
    free = (sum(each.free_inodes or 0 for each in kind if each.takes_files) for kind in kinds)
    return Room(name=name, free_files=min(free))


def parse_quota(output: str) -> Room:
    """Read what ``lfs quota`` leaves. Raises ValueError for anything else.

    Below the heads stand: file system, KiB used (``*`` if too many), soft and hard limit, grace, and the same
    of files. A long mount point has its own line; an inaccurate number stands in brackets; limit 0 is none.
    """
    head = re.search(r"^\s*Filesystem\s+kbytes\s.*$", output, re.MULTILINE)
    lines = output[head.end() :].split("\n") if head else []
    line = next((line for line in lines if re.search(r"\s\[?\d+\]?\*?(\s+\S+){7}\s*$", f" {line}")), None)
    if line is None:
        raise ValueError(f"lfs quota printed no figures: {output.strip()[:200]!r}")
    fields = line.split()[-8:]
    kib, block_note = _left(*fields[:4])
    files, file_note = _left(*fields[4:])
    notes = [block_note, file_note, "inaccurate: a server did not answer" if "[" in line else ""]
    note = "; ".join(dict.fromkeys(filter(None, notes)))
    return Room(name="your quota", free_bytes=None if kib is None else kib << 10, free_files=files, note=note)


def _left(used: str, soft: str, hard: str, grace: str) -> tuple[int | None, str]:
    """Return what the hard limit leaves, or the soft one where there is no other, and a note.

    Where the time of grace is over (``expired``, in 2.15 ``none``) every write fails.
    """
    num_used, num_soft, num_hard = (int(text.strip("[]*")) for text in (used, soft, hard))
    limit = num_hard or num_soft
    left = max(0, limit - num_used) if limit else None
    if not num_soft or num_used <= num_soft:
        return left, ""
    if grace in {"expired", "none"}:
        return 0, "over the soft limit, and its time of grace is over"
    return left, f"over the soft limit: writes fail in {grace}"
