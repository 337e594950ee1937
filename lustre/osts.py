"""The storage targets (OSTs) of a file system: how many there are, how full they are, where each file begins.

``lfs df`` says how full they are, ``lfs osts`` and ``lfs pool_list`` how many a file can be spread over, and
``lfs getstripe`` on which one the first stripe of a file lies: one call for 256 files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import Mount, file_system_of, run_lfs
from shardprep.errors import LustreError

NEARLY_FULL = 0.9  # our own number: Lustre has none; a write to a full OST fails, whatever the others have
NOT_KNOWN = -1
FILES_A_CALL = 256  # the longest paths of so many fit into one argument list
_LAYOUT_VALUE = re.compile(r"\s*lmm_(pattern|stripe_offset):\s*(\S+)\s*")
_STATES = {"D": "degraded", "N": "closed to new files", "R": "read-only"}
_ASK = "look at `lfs check servers`"
# `fs-OST0002_UUID  1073741824  1073741824  0 100%  /mnt[OST:2] S`, KiB; the mount point may hold anything
_DF_LINE = re.compile(r"^\S+\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+\s+.*\[OST:(\d+)\]\s*([A-Za-z]*)\s*$", re.MULTILINE)
_OST_LINE = re.compile(r"^(\d+): \S+_UUID\s*(\w*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class OstFill:
    """One OST as ``lfs df`` has it."""

    index: int
    total_bytes: int
    used_bytes: int
    available_bytes: int
    flags: str = ""  # D degraded, N creates no objects, R read-only, S out of space

    @property
    def fill(self) -> float:
        """The used part, 0 to 1, of what is used or available to users."""
        return self.used_bytes / max(1, self.used_bytes + self.available_bytes)

    @property
    def is_out_of_space(self) -> bool:
        """Whether a new stripe here would fail."""
        return "S" in self.flags or self.available_bytes == 0


def parse_df(output: str) -> tuple[OstFill, ...]:
    """The OSTs that ``lfs df`` (blocks of 1 KiB) printed; inactive ones are not among them."""
    return tuple(
        OstFill(
            index=int(index),
            total_bytes=int(total) << 10,
            used_bytes=int(used) << 10,
            available_bytes=int(available) << 10,
            flags=flags,
        )
        for total, used, available, index, flags in _DF_LINE.findall(output)
    )


def read_fill(mount: Mount) -> tuple[OstFill, ...]:
    """The OSTs of a mounted Lustre and how full they are. Raises LustreError."""
    return parse_df(run_lfs(["df"], Path(mount.mount_point)).checked(_ASK))


def fill_lines(osts: tuple[OstFill, ...]) -> list[str]:
    """For a person: one line, and a warning for every OST that is nearly full or takes no more."""
    if not osts:
        return ["lfs df names no OST; how full they are cannot be told"]
    whole = sum(ost.used_bytes for ost in osts) / max(
        1, sum(ost.used_bytes + ost.available_bytes for ost in osts)
    )
    least, most = (pick(osts, key=lambda ost: ost.fill) for pick in (min, max))
    spread = f"from {least.fill:.0%} (OST {least.index}) to {most.fill:.0%} (OST {most.index})"
    lines = [f"{len(osts)} OSTs, {whole:.0%} full: {spread if least.fill < most.fill else 'all alike'}"]
    for ost in osts:
        if ost.is_out_of_space:
            lines.append(f"warning: OST {ost.index} is out of space: a file that gets a stripe there fails")
        elif ost.fill >= NEARLY_FULL:
            lines.append(f"warning: OST {ost.index} is {ost.fill:.0%} full")
        if state := _STATES.get(ost.flags.replace("S", "")[:1]):
            lines.append(f"warning: OST {ost.index} is {state} (lfs df says {ost.flags})")
    return lines


def inactive_lines(osts_output: str) -> list[str]:
    """A warning for every OST that ``lfs osts`` calls inactive: what lies there cannot be read now."""
    return [
        f"warning: OST {index} is inactive: files with a stripe there cannot be read now"
        for index, state in _OST_LINE.findall(osts_output)
        if state == "INACTIVE"
    ]


def read_osts(path: Path) -> str:
    """What ``lfs osts`` prints of a path known to be Lustre; elsewhere it prints nothing and exits 0."""
    return run_lfs(["osts"], path).checked(_ASK)


def count_osts(path: Path, mount: Mount, pool: str = "") -> int:
    """OSTs that a file here can be spread over: all, or those of ``pool``.

    Raises LustreError where there is no such pool. It must be asked first: 2.15 takes a missing pool
    and exits 0, 2.17 fails with ``Success (0)``.
    """
    if not pool:
        return len(_OST_LINE.findall(read_osts(path)))
    full_name = f"{mount.fs_name}.{pool}"
    pools = run_lfs(["pool_list"], mount.fs_name).checked(_ASK).split()
    if full_name not in pools:
        names = ", ".join(word.partition(".")[2] for word in pools if word.startswith(f"{mount.fs_name}."))
        raise LustreError(
            f"{mount.mount_point} ({mount.fs_name}) has no pool {pool!r}, expected one of: {names or 'none'}"
        )
    members = run_lfs(["pool_list"], full_name).checked(_ASK)
    return len(re.findall(r"^\S+-OST\w+_UUID", members, flags=re.MULTILINE))


def first_osts(folder: Path, names: Sequence[str]) -> list[int] | None:
    """The OST of the first stripe of each file; None where the folder is not on Lustre.

    NOT_KNOWN for a file that has no stripe, as one that lies on the metadata server alone. One call of
    lfs takes 256 files, and asks the metadata server once per file. Raises LustreError where lfs is missing
    or fails, as it does for a file that is not there, does not answer, or prints something else.
    """
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return None
    paths = [str((folder / name).absolute()) for name in names]
    found: list[int] = []
    for first in range(0, len(paths), FILES_A_CALL):
        asked = paths[first : first + FILES_A_CALL]
        result = run_lfs(["getstripe", *asked[:-1]], asked[-1])
        if result.exit_code:
            words = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
            raise LustreError(
                f"`lfs getstripe` of {len(asked)} files of {folder} failed with exit code "
                f"{result.exit_code}: {words[0]}; look at the files, and at `lfs check servers`"
            )
        osts = parse_first_osts(result.stdout)
        if [path for path, _ in osts] != asked:
            raise LustreError(
                f"`lfs getstripe` of {len(asked)} files of {folder} printed {result.stdout.strip()[:200]!r}, "
                f"expected the layouts of {asked[0]} and on; is this `lfs` a site's wrapper?"
            )
        found += [ost for _, ost in osts]
    return found


def parse_first_osts(output: str) -> list[tuple[str, int]]:
    """Path and first OST of each file that ``lfs getstripe``, without options, printed.

    A file's part begins with its absolute path. Of a progressive layout the first component that lies on
    an OST counts: one on the metadata server (``mdt``) has none, and one not yet written to says -1.
    """
    found: list[tuple[str, int]] = []
    pattern = ""
    for line in output.split("\n"):
        if line.startswith("/"):
            found.append((line, NOT_KNOWN))
        elif found and (match := _LAYOUT_VALUE.fullmatch(line)):
            path, ost = found[-1]
            if match[1] == "pattern":
                pattern = match[2]
            elif ost == NOT_KNOWN and pattern != "mdt" and match[2].isdigit():
                found[-1] = (path, int(match[2]))
    return found
