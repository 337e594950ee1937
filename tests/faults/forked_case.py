"""Run a function in a fork with limits, and find out how it ended."""

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
from typing import Any, Literal

Ending = Literal["ended", "traceback", "hang", "memory", "killed"]

# A run takes about 0.03 s. The limits are far above that, because the machine may be busy.
_CPU_LIMIT_S = 20
_WALL_LIMIT_S = 300
_MORE_MEMORY_BYTES = 3 << 30  # in addition to the memory of the fork at its start
_OF_SIGNALS: dict[int, Ending] = {signal.SIGALRM: "hang", signal.SIGXCPU: "hang", signal.SIGKILL: "killed"}
_NOT_OURS = ("/site-packages/", "/lib/python", "<frozen", "forked_case.py")
# Messages of Python and Rust about errors that were not caught, or that a thread or destructor raised.
_SPILLED = ("Traceback (most recent call last)", "Exception ignored in", "panicked at")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended. Only "ended" has a ``code`` and a ``value``."""

    how: Ending
    code: int = 0
    value: Any = None  # the return value, after a round trip through JSON
    text: str = ""  # its output, or on failure the last line with the last line of code of this project

    @property
    def is_well(self) -> bool:
        return (self.how, self.code) == ("ended", 0)


class ForkedRun:
    """Start ``work()`` in a fork. It returns (exit code, value) or raises; ``end`` waits for it.

    time.sleep returns at once there, so that retries take no time. A ShardprepError counts as its exit code,
    any other exception as a traceback.
    """

    def __init__(
        self,
        work: Callable[[], tuple[int, Any]],
        *,
        cpu_limit_s: int = _CPU_LIMIT_S,
        memory_bytes: int = _MORE_MEMORY_BYTES,
    ) -> None:
        self._printed = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - end() closes both
        self._result = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                self._be_child(work, cpu_limit_s, memory_bytes)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):  # both processes do it, so that the group exists in any case
            os.setpgid(self.pid, self.pid)

    def end(self, meanwhile: Callable[[], object] | None = None) -> Ended:
        """Wait for the end. Each time that the fork stops (SIGSTOP), call ``meanwhile`` and continue it."""
        try:
            _, status = os.waitpid(self.pid, os.WUNTRACED if meanwhile else 0)
            while meanwhile and os.WIFSTOPPED(status):
                meanwhile()
                os.killpg(self.pid, signal.SIGCONT)
                _, status = os.waitpid(self.pid, os.WUNTRACED)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # it, if the campaign is stopped; processes that it left
        with self._printed as printed, self._result as result:
            printed.seek(0)
            result.seek(0)
            text = printed.read().decode(errors="replace").strip()
            facts = json.loads(result.read() or "null")
        if facts and facts["how"] == "ended" and not any(sign in text for sign in _SPILLED):
            return Ended(**{"text": text, **facts})
        code = os.waitstatus_to_exitcode(status)
        how = _OF_SIGNALS.get(-code, "traceback")
        if "memory allocation" in text or (facts and facts["how"] == "memory"):
            how = "memory"
        return Ended(how=how, text=f"{'' if facts else f'ended with {code}: '}{_last_words(text)}")

    def _be_child(self, work: Callable[[], tuple[int, Any]], cpu_limit_s: int, memory_bytes: int) -> None:
        facts: dict[str, Any] = {"how": "traceback"}
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(self._printed.fileno(), stream)
            _limit(cpu_limit_s, memory_bytes)
            time.sleep = lambda _seconds: None
            facts = _facts(work)
            threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as Python does at exit
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            self._result.write(json.dumps(facts).encode())
            self._result.flush()


def _facts(work: Callable[[], tuple[int, Any]]) -> dict[str, Any]:
    try:
        code, value = work()
    except MemoryError:
        return {"how": "memory"}
    except BaseException as error:
        exit_code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
        if isinstance(exit_code, int):
            return {"how": "ended", "code": exit_code, "text": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
        return {"how": "traceback"}
    return {"how": "ended", "code": code, "value": value}


def _last_words(text: str) -> str:
    """Return the last line, and the last line of our code in a traceback, to group equal causes."""
    lines = [line for line in text.splitlines() if line.strip()]
    files = [line.split('"')[1] + line.split('"')[2] for line in lines if line.startswith('  File "')]
    ours = [line for line in files if not any(part in line for part in _NOT_OURS)]
    return f"{lines[-1][:120] if lines else 'no output'} ({ours[-1] if ours else '?'})"


def _limit(cpu_limit_s: int, memory_bytes: int) -> None:
    for of_campaign in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(of_campaign, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _WALL_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
