"""What file system a path stands on, read off the kernel's table of mounts.

The table is right inside containers too (a bind mount keeps its type) and names the mount point,
which ``statfs`` does not. ``lfs`` itself must not be asked: ``lfs osts`` and ``lfs find`` exit 0
off Lustre.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel writes blank, tab, newline and backslash in octal


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One mounted file system: its device or server, where it stands, and its type."""

    source: str
    mount_point: str
    fs_type: str

    @property
    def is_lustre(self) -> bool:
        """Whether ``lfs`` can be used there."""
        return self.fs_type == "lustre"

    @property
    def fs_name(self) -> str:
        """The file system's name in ``10.0.0.1@tcp:/name/folder``, which pools go by."""
        return self.source.rpartition(":/")[2].split("/")[0]


def mount_of(path: str, mounts_table: str) -> Mount | None:
    """The mount that holds ``path`` (absolute, without symlinks); None if the table names none.

    The longest mount point wins, and among equal ones the last, which hides the earlier.
    """
    found: Mount | None = None
    for line in mounts_table.splitlines():
        fields = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in line.split(" ")]
        if len(fields) < 3:
            continue
        mount = Mount(source=fields[0], mount_point=fields[1], fs_type=fields[2])
        is_above = f"{path}/".startswith(f"{mount.mount_point.rstrip('/')}/")
        if is_above and (found is None or len(mount.mount_point) >= len(found.mount_point)):
            found = mount
    return found


def read_mounts_table() -> str:
    """The kernel's table as this process sees it; empty where there is no /proc."""
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system_of(path: Path) -> Mount | None:
    """The mount that holds ``path``, symlinks resolved; a path not there yet counts as where it would be."""
    return mount_of(os.path.realpath(path), read_mounts_table())
