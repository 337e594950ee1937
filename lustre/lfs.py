"""Which file system a path stands on, by the kernel's table of mounts, and safe calls of ``lfs``."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardprep.errors import LustreError
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


def mount_of(path: str, mounts_table: str) -> Mount | None:
    """Return the mount that holds ``path`` (absolute, without symlinks): the longest, of these the last."""
    found: Mount | None = None
    for line in mounts_table.splitlines():
        fields = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in line.split(" ")]
        if len(fields) < 3:
            continue
        mount = Mount(*fields[:3])
        is_above = f"{path}/".startswith(f"{mount.mount_point.rstrip('/')}/")
        if is_above and (found is None or len(mount.mount_point) >= len(found.mount_point)):
            found = mount
    return found


def read_mounts_table() -> str:
    """Read the kernel's table as this process sees it. Without /proc it is empty."""
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system_of(path: Path) -> Mount | None:
    """Return the mount that holds ``path``, symlinks resolved. The path need not exist yet."""
    return mount_of(os.path.realpath(path), read_mounts_table())


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
        raise LustreError(
            f"lfs cannot be started ({error}), expected Lustre's lfs for this machine; load the Lustre "
            "client's module, or use a node that has it"
        ) from None
    timeout_s = DF_TIMEOUT_S if command == "df" else TIMEOUT_S
    try:
        outputs = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is left behind
            process.wait(timeout=0.2)
        raise LustreError(
            f"`lfs {' '.join(words)}` gave no answer in {timeout_s:g} s, expected milliseconds: a server of "
            "this file system may be down; look at `lfs check servers`"
        ) from None
    # Decoded here: a text stream would turn a carriage return in a file's name into a line end.
    out, err = (each.decode("utf-8", "surrogateescape") for each in outputs)
    return LfsResult(words, process.returncode, out, err)
