"""Find the file system of a path, call ``lfs`` safely, read targets, and check whether a data set will fit.

What lfs does not report is shown as unknown. A lack of space, or of numbers about it, never fails a command.
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
DF_TIMEOUT_S = 10.0  # `lfs df` waits for an OST that hangs, and its numbers are only for information
_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel writes blank, tab, newline and backslash in octal


class Mount(NamedTuple):
    """One mounted file system."""

    source: str  # device or server
    mount_point: str
    fs_type: str


def file_system_of(path: Path) -> Mount | None:
    """Return the mount of ``path``, which need not exist. Of several mounts at one point the last counts."""
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
    """Return the kernel's table of mounts for this process, or "" without /proc."""
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def lustre_mount(path: Path) -> Mount:
    """Return the Lustre mount of ``path``. Raises LustreError if it is on another file system."""
    mount = file_system_of(path)
    if mount is None or mount.fs_type != "lustre":
        where = mount.fs_type if mount else "an unknown file system"
        raise LustreError(f"{path} is on {where}, not on Lustre", path=path, found=where)
    return mount


def why_not_usable(path: Path) -> str | None:
    """Return why ``lfs`` cannot be used for ``path``, or None if it can."""
    try:
        lustre_mount(path)
    except LustreError as error:
        return str(error)
    return None if shutil.which("lfs") else f"{path} is on Lustre, but there is no lfs on PATH"


def existing_part(path: Path) -> Path:
    """Return ``path`` if it exists, or else its nearest parent that does."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if size_of_file(place) is not None)


class LfsResult(NamedTuple):
    """The result of a call. Exit codes differ between versions of lfs, so its messages identify a failure."""

    arguments: Sequence[str]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def failure(self) -> str:
        """Describe the failure with the message of lfs, from standard error, or standard output in 2.17."""
        words = (self.stderr.strip() or self.stdout.strip() or "no message").splitlines()
        code = self.exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        return f"`lfs {_short(self.arguments)}` {how}: {' / '.join(words[:2])}"

    @property
    def is_usage_error(self) -> bool:
        """Return whether lfs refused its options: it exits with 4, or 22 or 1 and a message about a value."""
        words = f"{self.stderr} {self.stdout}"
        return self.exit_code == 4 or bool(
            re.search("usage:|invalid|must be|not a multiple|over 4GB limit", words, re.IGNORECASE)
        )

    def checked(self, what_to_do: str = "look at `lfs check servers`") -> str:
        """Return standard output. Raises LustreError with the message of lfs if the call failed."""
        if self.exit_code:
            raise LustreError(f"{self.failure}; {what_to_do}", found=f"exit code {self.exit_code}")
        return self.stdout


_MAX_WORDS = 30  # of a call, in a message


def _short(words: Sequence[str]) -> str:
    return " ".join([*words[:_MAX_WORDS], *["..."] * (len(words) > _MAX_WORDS)])


def run_lfs(command: str, *arguments: Path | str) -> LfsResult:
    """Run ``lfs``. Paths are made absolute and links are resolved, because a link has no layout.

    Raises LustreError if lfs cannot be started or does not answer in time.
    """
    words = [command, *(os.path.realpath(each) if isinstance(each, Path) else each for each in arguments)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            ["lfs", *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        expected = "an lfs for this machine; load the module of the Lustre client, or use a node that has it"
        raise LustreError(found=f"lfs cannot be started ({error})", expected=expected) from None
    timeout_s = DF_TIMEOUT_S if command == "df" else TIMEOUT_S
    try:
        outputs = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # if it hangs in the kernel, leave it behind
            process.wait(timeout=0.2)
        found = f"`lfs {_short(words)}` did not answer in {timeout_s:g} s"
        expected = "milliseconds; a server may be down: look at `lfs check servers`"
        raise LustreError(found=found, expected=expected) from None
    # Decoded here, because a text stream would turn a carriage return in a file name into a newline.
    out, err = (each.decode("utf-8", "surrogateescape") for each in outputs)
    return LfsResult(words, process.returncode, out, err)


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
_POOL = re.compile(r"^[ \t-]*(?:lmm_)?pool:[ \t]*(\w\S*)", re.MULTILINE)  # in lfs getstripe -y


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
    return len(_members_of(path, pool))


def _members_of(path: Path, pool: str) -> set[int]:
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
    """Return the pools in which new files of a folder are placed; [] for all OSTs, or if it is not known."""
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
            members = {f"OST {index}" for pool in pools for index in _members_of(folder, pool)}
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
