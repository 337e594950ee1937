"""One run in a process of its own: a fork of this one, with limits, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

Ending = Literal["ended", "traceback", "hang", "memory", "killed"]

# A run takes some 0.03 s. The limits are far above, as other work may keep the processors busy.
CPU_LIMIT_S = 20
WALL_LIMIT_S = 300
_MORE_MEMORY_BYTES = 3 << 30  # than the fork begins with
_NOT_OURS = ("/site-packages/", "/lib/python", "<frozen")
# What Python and Rust print of an error that nobody caught, or that a thread or a destructor raised.
_SPILLED = ("Traceback (most recent call last)", "Exception ignored in", "panicked at")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended; ``code`` and ``value`` are of "ended" alone."""

    how: Ending
    code: int = 0
    value: Any = None  # what the run yielded, as JSON
    text: str = ""  # what it printed, or the exception with its last line


def run_forked(
    work: Callable[[], tuple[int, Any]],
    *,
    cpu_limit_s: int = CPU_LIMIT_S,
    wall_limit_s: int = WALL_LIMIT_S,
    meanwhile: Callable[[], None] | None = None,
) -> Ended:
    """``work()`` in a fork; it returns an exit code and a value, or raises.

    A sleep lasts no time there: attempts and their number are tried, not the waiting. An error that is a
    ShardprepError counts as its exit code, any other exception as a traceback. ``meanwhile`` is called here
    each time that the run stops (SIGSTOP); then it goes on.
    """
    run = ForkedRun(work, cpu_limit_s=cpu_limit_s, wall_limit_s=wall_limit_s)
    while meanwhile and run.is_stopped():
        meanwhile()
        run.go_on()
    return run.end()


class ForkedRun:
    """A run that has begun; ``end`` waits for it. See ``run_forked``."""

    def __init__(
        self,
        work: Callable[[], tuple[int, Any]],
        *,
        cpu_limit_s: int = CPU_LIMIT_S,
        wall_limit_s: int = WALL_LIMIT_S,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-run-")
        self._said, self._result = (Path(self._folder.name, name) for name in ("said", "result"))
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _child(work, self._said, self._result, cpu_limit_s, wall_limit_s)
        with contextlib.suppress(OSError):  # both do it, whoever is first: a signal to the group finds one
            os.setpgid(self.pid, self.pid)

    def is_stopped(self) -> bool:
        """Wait until it stops or ends; whether it stopped."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self._status = status
        return False

    def go_on(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> Ended:
        """Wait for its end."""
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started and left
        text = self._said.read_text(encoding="utf-8", errors="replace") if self._said.exists() else ""
        has_facts = self._result.exists() and self._result.stat().st_size
        facts = json.loads(self._result.read_bytes()) if has_facts else None
        self._folder.cleanup()
        return _ended(os.waitstatus_to_exitcode(self._status), facts, text)


def _ended(code: int, facts: dict[str, Any] | None, text: str) -> Ended:
    if facts is not None:
        if facts["how"] == "ended" and any(sign in text for sign in _SPILLED):
            return Ended(how="traceback", text=_last_words(text))
        return Ended(**{"text": text.strip(), **facts})
    if -code in (signal.SIGALRM, signal.SIGXCPU):
        return Ended(how="hang", text=f"it did not end by itself: {signal.Signals(-code).name}")
    if -code == signal.SIGKILL:
        return Ended(how="killed", text=text)
    if -code == signal.SIGABRT and "memory allocation" in text:
        return Ended(how="memory", text=_last_words(text))
    return Ended(how="traceback", text=f"the process ended with {code}: {_last_words(text)}")


def _child(
    work: Callable[[], tuple[int, Any]], said: Path, result: Path, cpu_limit_s: int, wall_limit_s: int
) -> NoReturn:
    facts: dict[str, Any] = {"how": "traceback", "text": "the harness failed"}
    try:
        os.setpgid(0, 0)
        _redirect(said)
        _limit(cpu_limit_s, wall_limit_s)
        time.sleep = lambda _seconds: None
        facts = _facts(work)
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's end does: waits for threads
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # a run may have lowered the soft one
        result.write_bytes(json.dumps(facts).encode())
        os._exit(0)


def _facts(work: Callable[[], tuple[int, Any]]) -> dict[str, Any]:
    try:
        code, value = work()
    except MemoryError as error:
        return {"how": "memory", "text": described(error)}
    except SystemExit as error:
        return {"how": "ended", "code": error.code if isinstance(error.code, int) else 1}
    except BaseException as error:
        exit_code = getattr(error, "exit_code", None)
        if isinstance(exit_code, int):
            return {"how": "ended", "code": exit_code, "text": f"{type(error).__name__}: {error}"}
        return {"how": "traceback", "text": described(error)}
    return {"how": "ended", "code": code, "value": value}


def described(error: BaseException) -> str:
    """An exception with the last line of this project that it passed; no values, so that equal ones group."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not any(part in frame.filename for part in _NOT_OURS)] or frames
    where = f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}" if ours else "?"
    if isinstance(error, OSError) and error.errno:
        return f"OSError ({where})"
    return (
        f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else 'no word'} ({where})"
    )


def _last_words(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    files = [line.split('"')[1::2][0] + line.split('"')[-1] for line in lines if line.startswith('  File "')]
    ours = [line for line in files if not any(part in line for part in _NOT_OURS)]
    return f"{lines[-1][:120] if lines else 'no word'} ({ours[-1] if ours else '?'})"


def _redirect(said: Path) -> None:
    number = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    os.close(number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _limit(cpu_limit_s: int, wall_limit_s: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize() + _MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
