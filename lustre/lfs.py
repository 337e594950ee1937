"""Calls ``lfs`` so that nothing is guessed: an argument list, the C locale, a time limit, all output kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lustre.errors import LustreError

TIMEOUT_S = 30.0  # a healthy server answers within milliseconds; one that is down may never


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
        # 2.17 writes its usage to standard output, 2.15 to standard error
        words = (self.stderr.strip() or self.stdout.strip() or "no message").splitlines()
        raise LustreError(
            f"`lfs {' '.join(self.arguments)}` failed with exit code {self.exit_code}: "
            f"{' / '.join(words[:2])}; {what_to_do}"
        )


def find_lfs() -> str | None:
    """The path of the ``lfs`` that PATH names first, or None."""
    return shutil.which("lfs")


def run_lfs(arguments: Sequence[str], last: Path | str, *, timeout_s: float = TIMEOUT_S) -> LfsResult:
    """Run ``lfs`` with the arguments and ``last``: a path, which is made absolute, or a name as it is.

    Raises LustreError where there is no lfs, or no answer within ``timeout_s`` seconds. A call that
    hangs in the kernel cannot be killed; it is left behind rather than waited for.
    """
    program = find_lfs()
    if program is None:
        raise LustreError(
            "there is no lfs on PATH; load the Lustre client's module, or use a node that has it"
        )
    line = (*arguments, str(last.absolute()) if isinstance(last, Path) else last)
    process = subprocess.Popen(
        [program, *line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
        encoding="utf-8",
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        raise LustreError(
            f"`lfs {' '.join(line)}` gave no answer in {timeout_s:g} s, expected milliseconds: a server "
            "of this file system may be down; look at `lfs check servers`, and try again"
        ) from None
    return LfsResult(arguments=line, exit_code=process.returncode, stdout=stdout, stderr=stderr)
