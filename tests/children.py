"""Start processes from tests. If one fails unexpectedly, the assertion shows its output."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.waiting import HANG_S

Command = Sequence[str | os.PathLike[str]]


def shardprep(*words: object) -> list[str]:
    """Return the command line that runs ``shardprep WORDS`` in a process of its own."""
    return [sys.executable, "-m", "shardprep", *map(str, words)]


def environ_of_children(**variables: str) -> dict[str, str]:
    """Return this environment without Slurm's variables and without the hub, plus these variables."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("SLURM_", "DATASET_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", **variables}


def run_child(
    command: Command, *, code: int | None = 0, stdin: str | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. If its exit code is not ``code``, fail with everything that it printed.

    ``code=None`` accepts any exit code. ``stdin`` is its input, and ``settings`` go to Popen.
    """
    __tracebackhide__ = True
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    settings["env"] = {"PYTHONFAULTHANDLER": "1", **(settings.get("env") or os.environ)}
    with child(command, **{"stdin": source, "stderr": subprocess.PIPE, **settings}) as process:
        out, err = _communicate(process, code, stdin)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def end_of(process: subprocess.Popen[str], *, code: int | None = 0) -> str:
    """Wait for a child and return the rest of its output. Fails as ``run_child`` does."""
    __tracebackhide__ = True
    return "".join(_communicate(process, code))


def _communicate(
    process: subprocess.Popen[str], code: int | None, stdin: str | None = None
) -> tuple[str, str]:
    __tracebackhide__ = True
    try:
        out, err = process.communicate(stdin, timeout=HANG_S)
        ending = f"it ended with {process.returncode}, expected {code}"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints where it hangs
            process.wait(5)
        _kill_group(process)
        out, err = process.communicate()
        ending = f"it was killed after {HANG_S} s"
    if "killed" in ending or code not in (None, process.returncode):
        words = shlex.join(map(str, process.args))[:2000]  # type: ignore[arg-type]  # always a list here
        printed = f"--- standard output\n{out or ''}\n--- standard error\n{err or ''}"
        raise AssertionError(f"{words}\n{printed}\n{ending}")
    return out or "", err or ""


def fork_functions(patch: pytest.MonkeyPatch) -> None:
    """Let functions that a command calls in a new Python run in forks, which takes 0.02 s and not 0.3 s.

    Not for functions that use threads of this process: forks have none.
    """
    patch.setattr("shardprep.child_process.ChildProcess", multiprocessing.get_context("fork").Process)


@contextlib.contextmanager
def child(command: Command, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own. On exit, its whole process group is killed.

    Standard output is a text pipe. Standard error goes to pytest, which shows it if the test fails.
    """
    process = subprocess.Popen(
        list(command),
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "start_new_session": True, **settings},
        text=True,
        errors="backslashreplace",
    )
    try:
        yield process
    finally:
        if process.returncode is None:  # otherwise its id may belong to another process by now
            _kill_group(process)
        process.communicate()


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # in case it has no session of its own


def is_living(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    """Return an unused port below the kernel's ephemeral range, so that it stays free."""
    for port in range(10000 + os.getpid() % 8000, 20000):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port from 10000 to 20000")
