"""What file system a path stands on, and calls of ``lfs`` in which nothing is guessed.

The file system is read from the kernel's table of mounts. That table is right inside containers too (a bind
mount keeps its type), and it names the mount point, which ``statfs`` does not. ``lfs`` itself must not be
asked: ``lfs osts`` and ``lfs find`` exit 0 where there is no Lustre. A call of ``lfs`` gets an argument list,
the C locale and a time limit, and all of its output is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardprep.errors import LustreError

TIMEOUT_S = 30.0  # a healthy server answers within milliseconds; one that is down may never
_LONGER_S = {"hsm_restore": 600.0}  # the coordinator takes up a thousand requests in one call
_ESCAPED = re.compile(r"\\([0-7]{3})")  # the kernel writes blank, tab, newline and backslash in octal


class LfsSilentError(LustreError):
    """``lfs`` gave no answer within its time limit: to ask more would only take as long again."""


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


def kind_of(path: Path) -> str:
    """``folder``, ``file`` or, where nothing is there, an empty text.

    Raises LustreError where that cannot be known: a folder of another's that is closed to you, a server
    that is away (EIO, ENOTCONN, ESHUTDOWN, ESTALE, ETIMEDOUT), a name that is too long.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LustreError(
            f"{path} cannot be looked at ({why}), expected a path that you may see on a file system that "
            "answers; look at `ls -ld` of the folders above it, and at `lfs check servers`"
        ) from None
    return "folder" if stat.S_ISDIR(mode) else "file"


@dataclass(frozen=True, kw_only=True, slots=True)
class LfsResult:
    """What one call answered. ``exit_code`` is an errno for plain layouts, 4 for a wrong usage
    (but also EINTR), 1 for every failed composite layout (but also EPERM): read the texts too.
    """

    arguments: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    def checked(self, what_to_do: str) -> str:
        """Standard output, or LustreError with lfs's own words where it failed."""
        if self.exit_code == 0:
            return self.stdout
        raise LustreError(f"`lfs {self.shown}` {self.failure}; {what_to_do}")

    @property
    def shown(self) -> str:
        """The arguments for a person; of very many paths, the first ones."""
        text = " ".join(self.arguments)
        return text if len(text) < 1000 else f"{text[:300]} ..."

    @property
    def failure(self) -> str:
        """How it failed, in lfs's own words."""
        # 2.17 writes its usage to standard output, 2.15 to standard error
        words = (self.stderr.strip() or self.stdout.strip() or "no message").splitlines()
        how = f"failed with exit code {self.exit_code}"
        if self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code}"
        text = " / ".join(words[:2])
        return f"{how}: {text.encode(errors='backslashreplace').decode()}"


def find_lfs() -> str | None:
    """The path of the ``lfs`` that PATH names first, or None."""
    return shutil.which("lfs")


def time_limit_s(command: str) -> float:
    """Seconds that a call of ``lfs command`` may take."""
    return _LONGER_S.get(command, TIMEOUT_S)


def run_lfs(arguments: Sequence[str], last: Path | str) -> LfsResult:
    """Run ``lfs`` with the arguments and ``last``: a path, which is made absolute, or a name as it is.

    Symbolic links in a path are followed: lfs asks the link itself, and says that it has no layout.

    Raises LustreError where there is no lfs, where it cannot be started (another machine's binary), or
    where it gives no answer within ``time_limit_s``. A call that hangs in the kernel cannot be killed; it is
    left behind, and nobody waits for it.
    """
    program = find_lfs()
    if program is None:
        raise LustreError(
            "there is no lfs on PATH; load the Lustre client's module, or use a node that has it"
        )
    line = (*arguments, os.path.realpath(last) if isinstance(last, Path) else last)
    try:
        process = subprocess.Popen(
            [program, *line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            encoding="utf-8",
            errors="surrogateescape",
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        raise LustreError(
            f"{program} cannot be started ({error}), expected Lustre's lfs for this machine; "
            f"try `{program} --version`, and ask the site for one that runs here"
        ) from None
    timeout_s = time_limit_s(arguments[0])
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        raise LfsSilentError(
            f"`lfs {' '.join(line)[:1000]}` gave no answer in {timeout_s:g} s, expected milliseconds: a "
            "server of this file system may be down; look at `lfs check servers`, and try again"
        ) from None
    return LfsResult(arguments=line, exit_code=process.returncode, stdout=stdout, stderr=stderr)
