"""Calls of ``lfs`` for paths on Lustre: each ends in time, with the message of lfs if it failed."""

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
