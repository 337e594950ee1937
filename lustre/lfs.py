"""Which file system a path stands on, safe calls of ``lfs``, its targets, and whether a data set will fit.

What lfs does not tell is said to be unknown; nothing about space ever fails a command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shardprep.console import counted, short_bytes, short_number
from shardprep.errors import LustreError, ShardprepError
from shardprep.files import size_of_file

TIMEOUT_S = 30.0  # a healthy server answers within milliseconds
DF_TIMEOUT_S = 10.0  # an OST that hangs makes df wait; nobody needs its answer that much
_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel writes blank, tab, newline and backslash in octal


class Mount(NamedTuple):
    """One mounted file system."""

    source: str  # its device or server
    mount_point: str
    fs_type: str

    @property
    def fs_name(self) -> str:
        """Return ``name`` of ``10.0.0.1@tcp:/name/folder``, which pools go by."""
        return self.source.rpartition(":/")[2].split("/")[0]


def file_system_of(path: Path) -> Mount | None:
    """Return the mount that holds ``path``, which need not exist yet: the longest, of these the last."""
    found: Mount | None = None
    real_path = os.path.realpath(path)
    for line in read_mounts_table().splitlines():
        fields = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in line.split(" ")]
        if len(fields) < 3:
            continue
        mount = Mount(*fields[:3])
        is_above = f"{real_path}/".startswith(f"{mount.mount_point.rstrip('/')}/")
        if is_above and (found is None or len(mount.mount_point) >= len(found.mount_point)):
            found = mount
    return found


def read_mounts_table() -> str:
    """Read the kernel's table as this process sees it. Without /proc it is empty."""
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def lustre_mount(path: Path) -> Mount:
    """Return the Lustre mount that holds ``path``. Raises LustreError where there is none."""
    mount = file_system_of(path)
    if mount is None or mount.fs_type != "lustre":
        where = mount.fs_type if mount else "an unknown file system"
        raise LustreError(f"{path} is on {where}, not on Lustre", path=path, found=where)
    return mount


def why_not_usable(path: Path) -> str | None:
    """Say why ``lfs`` can do nothing for ``path``, or return None."""
    try:
        lustre_mount(path)
    except LustreError as error:
        return str(error)
    return None if shutil.which("lfs") else f"{path} is on Lustre, but there is no lfs on PATH"


def existing_part(path: Path) -> Path:
    """Return ``path`` itself or, where it is not there yet, the nearest folder above it that is."""
    return next(
        place for place in (path.absolute(), *path.absolute().parents) if size_of_file(place) is not None
    )


class LfsResult(NamedTuple):
    """What one call answered. Of one failure the exit codes differ by version: the texts say which it is."""

    arguments: Sequence[str]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def failure(self) -> str:
        """Return how it failed, in lfs's own words: on standard error, or in 2.17 on standard output."""
        words = (self.stderr.strip() or self.stdout.strip() or "no message").splitlines()
        code = self.exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        return f"`lfs {' '.join(self.arguments)}` {how}: {' / '.join(words[:2])}"

    def checked(self, what_to_do: str = "look at `lfs check servers`") -> str:
        """Return standard output. Raises LustreError with lfs's own words where it failed."""
        if self.exit_code:
            raise LustreError(f"{self.failure}; {what_to_do}", found=f"exit code {self.exit_code}")
        return self.stdout


def run_lfs(command: str, *arguments: Path | str) -> LfsResult:
    """Run ``lfs``. A Path becomes absolute and without links, of which lfs would say they have no layout.

    Raises LustreError where it cannot be started, or gives no answer in time.
    """
    words = [command, *(os.path.realpath(each) if isinstance(each, Path) else each for each in arguments)]
    pipe, environment = subprocess.PIPE, {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            ["lfs", *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        expected = "Lustre's lfs for this machine; load the client's module, or use a node that has it"
        raise LustreError(found=f"lfs cannot be started ({error})", expected=expected) from None
    timeout_s = DF_TIMEOUT_S if command == "df" else TIMEOUT_S
    try:
        outputs = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is left behind
            process.wait(timeout=0.2)
        found = f"`lfs {' '.join(words)}` gave no answer in {timeout_s:g} s"
        expected = "milliseconds; a server may be down: look at `lfs check servers`"
        raise LustreError(found=found, expected=expected) from None
    # Decoded here: a text stream would turn a carriage return in a file's name into a line end.
    out, err = (each.decode("utf-8", "surrogateescape") for each in outputs)
    return LfsResult(words, process.returncode, out, err)


NEARLY_FULL = 0.9  # our own number: Lustre has none; a write to a full OST fails, whatever the others have
UNKNOWN = 0  # as a number of OSTs: lfs does not tell
_FLAGS = {  # of `lfs df`
    "S": "is out of space: a file that goes there fails",
    "I": "is out of inodes: it takes no new file",
    "D": "is degraded",
    "N": "is closed to new files",
    "R": "is read-only",
}
# `fs-OST0002_UUID  1073741824  1073741824  0 100%  /mnt[OST:2] S`, KiB; the mount point may hold anything
_DF_LINE = re.compile(
    r"^\S+\s+\d+\s+(\d+)\s+(\d+)\s+\S+\s+.*\[(OST|MDT):(\d+)\]\s*([A-Za-z]*)\s*$", re.MULTILINE
)
# `fs-OST0002_UUID : Cannot send after transport endpoint shutdown`, or `OST0002             : ...`
_DF_TROUBLE = re.compile(r"^\S*?(OST|MDT)([0-9a-f]{4})(?:_UUID)?\s*: (\S.*)$", re.MULTILINE)
_MEMBER = re.compile(r"^\S+-OST[0-9a-f]{4}_UUID", re.MULTILINE)


class Target(NamedTuple):
    """One OST or MDT as ``lfs df`` has it."""

    name: str  # OST 2
    used_bytes: int
    free_bytes: int
    free_inodes: int | None  # None: not told
    flags: str  # keys of _FLAGS

    @property
    def fill(self) -> float:
        """Return the used part, 0 to 1, of what is used or free for users."""
        return self.used_bytes / max(1, self.used_bytes + self.free_bytes)

    @property
    def takes_files(self) -> bool:
        return not set("SINR") & set(self.flags)


@dataclass(kw_only=True, slots=True)
class Targets:
    """What ``lfs df`` told: targets that answered, and by name what is wrong with the others."""

    answered: dict[str, list[Target]]  # of OST and MDT
    silent: dict[str, str] = field(default_factory=dict)
    why_no_inodes: str = ""

    def lines(self) -> list[str]:
        """Return a line for OSTs and one for MDTs, and a warning for every target in trouble."""
        lines, trouble = [], []
        for kind, targets in self.answered.items():
            if not targets:
                lines.append(f"how full {kind}s are is unknown: lfs df names none")
                continue
            used, free = sum(each.used_bytes for each in targets), sum(each.free_bytes for each in targets)
            inodes = [each.free_inodes for each in targets if each.free_inodes is not None]
            told = short_number(sum(inodes)) if inodes else f"unknown ({self.why_no_inodes})"
            full = f"{used / max(1, used + free):.0%} full"
            lines.append(f"{counted(len(targets), kind)}, {full}; free inodes: {told}")
            for target in targets:
                trouble += [f"{target.name} {_FLAGS[flag]}" for flag in target.flags if flag in _FLAGS]
                if target.fill >= NEARLY_FULL and "S" not in target.flags:
                    trouble.append(f"{target.name} is {target.fill:.0%} full")
        trouble += [f"{name} {words}" for name, words in self.silent.items()]
        return [*lines, *(f"warning: {words}" for words in trouble)]


def read_targets(path: Path) -> Targets:
    """Ask for the targets of the Lustre of ``path`` by two calls. Raises LustreError where it names none.

    An OST that is down makes ``lfs df`` exit with its error although it names all others: these are read.
    """
    place = Path(lustre_mount(path).mount_point)
    blocks = run_lfs("df", "-v", place)  # -v: with inactive ones
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
        target = Target(f"{kind} {index}", int(used) << 10, int(free) << 10, left, flags)
        found.answered[kind].append(target)
    for kind, index, said in _DF_TROUBLE.findall(blocks.stdout):
        is_inactive = said.strip() == "inactive device"
        words = "is inactive" if is_inactive else f"does not answer: {said.strip()}"
        found.silent[f"{kind} {int(index, 16)}"] = f"{words}: files with a stripe there cannot be read now"
    if not (any(found.answered.values()) or found.silent):
        raise LustreError(f"{blocks.failure}; look at `lfs check servers`")
    return found


def count_osts(path: Path, pool: str = "") -> int:
    """Return the number of OSTs of the file system or of a pool, or UNKNOWN.

    Raises LustreError for a pool that is not there or has no OST: lfs may take it, and the first write fails.
    """
    if not pool:
        try:
            return len(read_targets(path).answered["OST"])
        except LustreError:  # nothing but a note depends on it
            return UNKNOWN
    mount = lustre_mount(path)
    prefix = f"{mount.fs_name}."
    words = run_lfs("pool_list", mount.fs_name).checked().split()
    pools = [word.removeprefix(prefix) for word in words if word.startswith(prefix)]
    members = run_lfs("pool_list", prefix + pool).checked() if pool in pools else ""
    if num_members := len(_MEMBER.findall(members)):
        return num_members
    expected = f"one of: {', '.join(pools) or 'none'}; the first write of a file would fail"
    raise LustreError(path=path, found=f"no pool {pool!r} with OSTs in {mount.fs_name}", expected=expected)


class Need(NamedTuple):
    """What will be written: ``num_bytes`` in all, and three files for each shard."""

    num_bytes: int
    num_shards: int

    def text(self) -> str:
        return f"about {short_bytes(self.num_bytes)} in {_files_text(3 * self.num_shards)}"


class Room(NamedTuple):
    """What one limit leaves."""

    name: str
    num_left: int | None  # None: unknown, and the note says why
    note: str = ""  # how sure the figure is, or when the limit will bite
    is_of_files: bool = False  # else of bytes


def _files_text(number: int) -> str:
    return counted(number, "file") if number < 100_000 else f"{short_number(number)} files"


def space_lines(folder: Path, need: Need) -> list[str]:
    """Return a line of what is needed and left, and a warning for each limit that is too small.

    Returns nothing off Lustre and without lfs. Never raises.
    """
    try:
        if why_not_usable(folder):
            return []
        rooms = _read_rooms(existing_part(folder))
    except (ShardprepError, OSError) as error:
        return [f"note: whether it will fit is unknown: {error}"]
    told, warnings = [], []
    for room in rooms:
        note = f" ({room.note})" if room.note else ""
        if room.num_left is None:
            told.append(f"{room.name}: unknown{note}")
            continue
        is_short = room.num_left < (3 * need.num_shards if room.is_of_files else need.num_bytes)
        left = _files_text(room.num_left) if room.is_of_files else short_bytes(room.num_left)
        left = f"{room.name}: {left} left"
        told.append(left + note)
        if is_short:
            warnings.append(f"warning: it will not fit: {left}, and it needs {need.text()}")
    return [f"it needs {need.text()}; {'; '.join(told)}", *warnings]


def _read_rooms(folder: Path) -> list[Room]:
    """Return what targets and the user's quota leave for an existing folder, by three calls of lfs."""
    try:
        targets = read_targets(folder)
    except LustreError as error:
        rooms = [Room("free space", None, str(error))]
    else:
        osts = [ost for ost in targets.answered["OST"] if ost.takes_files]
        silent = f"{counted(len(targets.silent), 'target')} did not answer" if targets.silent else ""
        rooms = [Room(counted(len(osts), "OST"), sum(ost.free_bytes for ost in osts), silent)]
        # A file needs an inode of an MDT and an object of an OST: the fewer count.
        free: list[int] = []
        for each in targets.answered.values():
            known = [target for target in each if target.free_inodes is not None]
            if each and len(known) == len(each):
                free.append(sum(target.free_inodes or 0 for target in each if target.takes_files))
        num_left, note = (min(free), "") if len(free) == 2 else (None, targets.why_no_inodes)
        rooms.append(Room("inodes of MDTs and OSTs", num_left, note, is_of_files=True))
    if os.getuid() == 0:  # no quota binds root
        return rooms
    try:
        result = run_lfs("quota", "-u", str(os.getuid()), Path(lustre_mount(folder).mount_point))
        if result.exit_code in {0, 5}:  # 5: some figures are inaccurate, and stand in brackets
            return [*rooms, *parse_quota(result.stdout)]
        return rooms if "not enabled" in result.stderr else [*rooms, Room("your quota", None, result.failure)]
    except (LustreError, ValueError) as error:
        return [*rooms, Room("your quota", None, str(error))]


def parse_quota(output: str) -> list[Room]:
    """Read what ``lfs quota`` leaves of bytes and files, where there is a limit. Raises ValueError.

    Below the heads stand: file system, KiB used (``*`` if too many), soft and hard limit, grace, and the same
    of files. A long mount point has its own line; an inaccurate number stands in brackets.
    """
    number = r"\[?(\d+)\]?\*?"
    figures = rf"{number}\s+{number}\s+{number}\s+(\S+)"  # used, soft, hard, grace
    match = re.search(rf"kbytes\s.*\n(?:.*\n)?.*\s{figures}\s+{figures}\s*$", output, re.MULTILINE)
    if match is None:
        raise ValueError(f"lfs quota printed no figures: {output.strip()[:200]!r}")
    inaccurate = "inaccurate: a server did not answer" if "[" in match[0] else ""
    rooms = []
    for is_of_files, (used, soft, hard, grace) in enumerate((match.groups()[:4], match.groups()[4:])):
        limit = int(hard) or int(soft)
        if not limit:
            continue
        left, note = max(0, limit - int(used)), inaccurate
        if int(soft) and int(used) > int(soft):
            note = f"over the soft limit: writes fail in {grace}"
            if grace in {"expired", "none"}:  # the latter in 2.15: every write fails, whatever the hard limit
                left, note = 0, "over the soft limit, and its time of grace is over"
        rooms.append(Room("your quota", left if is_of_files else left << 10, note, bool(is_of_files)))
    return rooms
