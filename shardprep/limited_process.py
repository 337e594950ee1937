"""A process with limits of memory and CPU time, for what somebody else wrote: chat templates and tokenizers.

Such code may take exponential time or memory, for some texts only. The kernel enforces the limits, whatever
the code does, and this process gets an error. The process starts at the first question, in about 0.1 s, is
kept for the next ones, and ends when the process that asks ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shardprep.console import guard_streams
from shardprep.errors import ReadWriteError
from shardprep.hub import is_library_fault, words_of_fault
from shardprep.processes import STOP_SIGNALS, start_python, stop_signals_wait

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_OUT_OF_MEMORY = 99  # exit code of the process
_ENDS_WITHIN_S = 10.0


class CallFailed(Exception):
    """A call was over a limit, crashed, or raised an error of a library."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number  # of the item
        self.what = what  # such as "took more than 20 s of CPU time"


class _Question(NamedTuple):
    """What the process is asked: ``function(*common, item)`` for each item, within limits."""

    memory_bytes: int
    cpu_s: int
    function: Callable[..., object]
    common: tuple[object, ...]
    items: list[object]


@dataclass(kw_only=True)
class LimitedProcess:
    """Calls functions in a process with limits. Threads take turns."""

    name: str  # what it does, for people who list processes
    prepare: Callable[[], None]  # is called first, without limits: imports libraries
    memory_bytes: int  # of address space, beyond what the process has when a question comes
    cpu_s: int  # of each call, by all its threads
    answer_bytes: int  # of all answers to a question
    is_quiet: bool = False  # drop what libraries print
    _child: subprocess.Popen[bytes] | None = None
    _pipe: Connection | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call_each(
        self,
        function: Callable[..., object],
        common: tuple[object, ...],
        items: Iterable[object],
        *,
        more_cpu_s: int = 0,
        more_memory_bytes: int = 0,
    ) -> list[Any]:
        """Return ``function(*common, item)`` for each item.

        The arguments are pickled; results are what MessagePack can express, and arrays of numpy, which become
        bytes. ``more_*`` are added to the limits. Raises CallFailed, and ReadWriteError if the process ended
        for no reason that is known.
        """
        memory_bytes = self.memory_bytes + more_memory_bytes
        cpu_s = self.cpu_s + more_cpu_s
        items = list(items)
        answers: list[Any] = []
        with self._lock:
            try:
                self._ask(_Question(memory_bytes, cpu_s, function, common, items), answers)
            except BaseException:
                # The process may still be working, and the next question would get the answers to this one.
                self.end(at_once=True)
                raise
            if len(answers) == len(items):
                return answers
            code = self.end()
        number = len(answers)
        if code == -signal.SIGXCPU:
            raise CallFailed(number, f"took more than {cpu_s} s of CPU time")
        if code in (_OUT_OF_MEMORY, -signal.SIGABRT):  # Rust aborts when there is no memory
            raise CallFailed(number, f"took more than {memory_bytes >> 20} MiB of memory")
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
            raise CallFailed(number, f"crashed by {signal.Signals(-code).name}")
        what = f"a process with limits of memory and time ended with exit code {code} and without a message"
        raise ReadWriteError(f"{what}; is there too little memory? Run this again")

    def _ask(self, question: _Question, answers: list[Any]) -> None:
        """Send a question, and append the answers until there is one for each item, or the process ends."""
        self.start()
        num_items = len(question.items)
        left_bytes = self.answer_bytes
        assert self._pipe is not None
        with contextlib.suppress(OSError, EOFError):  # it ended
            self._pipe.send(question)
            while len(answers) < num_items:
                content = self._pipe.recv_bytes()
                left_bytes -= len(content)
                if left_bytes < 0:
                    raise CallFailed(len(answers), f"gave more than {self.answer_bytes >> 20} MiB")
                fault, answer = msgspec.msgpack.decode(content)
                if fault:
                    raise CallFailed(len(answers), fault)
                answers.append(answer)

    @property
    def is_started(self) -> bool:
        return self._child is not None

    def start(self) -> None:
        """Start the process if it does not run. It imports its libraries while this one goes on."""
        if self._child is not None:
            return
        self._pipe, theirs = Pipe()
        with theirs, stop_signals_wait():
            handle = theirs.fileno()
            words = ["shardprep.limited_process:serve", str(handle), str(int(self.is_quiet)), self.name]
            self._child = start_python(*words, pass_fds=(handle,), stdin=subprocess.DEVNULL)
        self._pipe.send(self.prepare)
        atexit.register(self.end)

    def end(self, *, at_once: bool = False) -> int:
        """End the process by closing its pipe, or by a signal after a while. Returns its exit code."""
        child = self._child
        self._child = None
        if child is None:
            return 0
        atexit.unregister(self.end)
        if self._pipe is not None:
            self._pipe.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_ENDS_WITHIN_S)
        child.kill()  # does nothing if it has ended
        return child.wait()


def serve() -> None:
    """Answer the questions that come through a pipe, until its other end is closed."""
    pipe = Connection(int(sys.argv[1]))
    is_quiet = sys.argv[2] == "1"
    asker = os.getppid()

    def end_with_asker() -> None:  # also if it was killed during a call that does not end
        while os.getppid() == asker:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_asker, daemon=True).start()
    for number in STOP_SIGNALS:  # the asking process handles them, and closes the pipe when it ends
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if is_quiet:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 2)
    os.dup2(2, 1)  # what libraries print is no result of the command
    guard_streams()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        prepare = pipe.recv()
        prepare()
        while True:
            memory_bytes, cpu_s, function, common, items = pipe.recv()
            limit_this_process(memory_bytes, cpu_s)
            for item in items:
                _limit_cpu(cpu_s)
                fault = ""
                answer = None
                try:
                    answer = function(*common, item)
                except MemoryError:
                    os._exit(_OUT_OF_MEMORY)
                except BaseException as error:
                    if not is_library_fault(error):
                        raise
                    fault = words_of_fault(error)
                pipe.send_bytes(msgspec.msgpack.encode((fault, answer), enc_hook=_bytes_of_array))


def limit_this_process(memory_bytes: int, cpu_s: int) -> None:
    """Let this process take so much more address space and CPU time. The kernel ends it beyond that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump when a limit ends this process
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + memory_bytes)
    _limit_cpu(cpu_s)


def _limit_cpu(cpu_s: int) -> None:
    # The kernel's limit has whole seconds, and counts from the start of the process.
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)


def _bytes_of_array(array: npt.NDArray[np.generic]) -> bytes:
    return array.tobytes()


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
