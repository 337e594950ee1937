"""Processes: the signals that stop one, and the only place where one of ours starts Python.

After ``raise_on_stop_signals``, TERM, USR1 and INT raise ``Stopped``, so that a stopped task cleans up after
itself; processes of ``child_process`` do the same. Python drops an exception that is raised in a
finalizer or a weak reference's callback; a Stopped that was dropped there is raised again a moment later.

A data set may have a ``json.py``, and commands are often typed in its folder. So no process that is started
here looks for modules in the current folder: the first statement of its code removes the folder from the
path, before it imports anything. From Python 3.11 on, ``-P`` keeps it off the path from the start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shardprep import HOME
from shardprep.errors import Stopped

if TYPE_CHECKING:
    import subprocess

# Starting Python. ----------------------------------------------------------------------------------------

# The words after it are our folder, a function as "module:name", and the arguments that the function finds in
# sys.argv. ``python -c`` puts "" first on the path, which stands for the current folder.
_START = (
    "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; "
    "from shardprep import call_started; call_started()"
)


def python_command(call: str, *words: str) -> list[str]:
    """Return the command line that calls a function, ``"module:name"``, and exits with what it returns.

    No module comes from the folder in which it is typed. ``words``: the arguments of the command.
    """
    import subprocess  # takes 5 ms, and most tasks do not need it

    # Such as -W and -X, which multiprocessing passes on, too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    if sys.version_info >= (3, 11):
        flags.append("-P")  # Python 3.13 imports linecache for -c, before it runs the first statement
    return [sys.executable, *flags, "-c", _START, str(HOME), call, *words]


def shardprep_command(*words: object) -> list[str]:
    """Return the command line that runs ``shardprep WORDS`` with this Python, from any folder."""
    return python_command("shardprep.__main__:main", *map(str, words))


def start_python(
    call: str, *words: str, environ: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[Any]:
    """Start ``python_command``. ``environ``: variables that it gets beside ours. ``settings``: of Popen."""
    import subprocess

    everything = {**_environ_of_python(), **(environ or {})}
    return subprocess.Popen(python_command(call, *words), env=everything, **settings)


def run_shardprep(*words: object) -> int:
    """Run ``shardprep WORDS`` in a child process to its end, and return its exit code."""
    import subprocess

    return subprocess.run(shardprep_command(*words), env=_environ_of_python(), check=False).returncode


def _environ_of_python() -> dict[str, str]:
    """Return the environment, in which PYTHONPATH names no folder relative to the current one.

    An empty entry stands for the current folder, and Python imports sitecustomize from there. With
    PYTHONINSPECT, Python 3.10 imports readline from it.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
    places = environ.pop("PYTHONPATH", "").split(os.pathsep)
    kept = [place for place in places if place.startswith("/")]
    if kept:
        environ["PYTHONPATH"] = os.pathsep.join(kept)
    return environ


# Signals. ------------------------------------------------------------------------------------------------

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STOP_AGAIN_S = 0.01  # longer than most finalizers take; in a slower one it happens again
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StopSignals:
    """What this process does on STOP_SIGNALS, and which signals it blocks."""

    handlers: Mapping[signal.Signals, Any]
    blocked: frozenset[int]
    unraisable_hook: Callable[..., Any]

    @staticmethod
    def now() -> StopSignals:
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        blocked = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return StopSignals(handlers, blocked, sys.unraisablehook)

    def restore(self) -> None:
        """Do again what ``now`` found. Signals that it found blocked are ignored by all threads.

        A thread that is just ending does not block them, and would let one end the process.
        """
        ignore_stop_signals()
        sys.unraisablehook = self.unraisable_hook
        for number, handler in self.handlers.items():
            if number in self.blocked:
                signal.signal(number, signal.SIG_IGN)
            elif handler is not None:  # not one of C
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS in this and all other threads. Raises Stopped for one that came before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _handle_by_nothing()


def _handle_by_nothing() -> None:
    for number in STOP_SIGNALS:
        # Not SIG_IGN: with it, a second signal that is already pending makes Python raise an OSError.
        signal.signal(number, lambda *_: None)


def raise_on_stop_signals() -> None:
    """Make the first of STOP_SIGNALS raise Stopped in the main thread. Later ones are ignored."""
    # Slurm sends TERM at a time limit, a preemption and scancel, and KILL some seconds later.
    if getattr(sys.unraisablehook, "func", None) is not _stop_again:
        sys.unraisablehook = functools.partial(_stop_again, sys.unraisablehook)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked in a child of stop_signals_wait


@contextlib.contextmanager
def stop_signals_wait(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Block these signals within ``with``, in which a process starts."""
    # The child starts with them blocked. Otherwise a signal during its imports would end it with a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """Have the kernel send TERM to this process when its parent dies, whatever the cause (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # The parent may have died already.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    _handle_by_nothing()
    name = signal.Signals(number).name
    raise Stopped(f"stopped by {name}; nothing unfinished is left, run this again to go on")


def _stop_again(hook: Callable[[sys.UnraisableHookArgs], Any], unraisable: sys.UnraisableHookArgs, /) -> None:
    """Handle a Stopped that Python could not propagate, for example from ``__del__``."""
    stopped = unraisable.exc_value
    if not isinstance(stopped, Stopped):
        hook(unraisable)
        return

    def raise_again(*_: object) -> NoReturn:
        raise Stopped(*stopped.args)

    # This hook cannot propagate it either. An alarm raises it again once the finalizer is over.
    signal.signal(signal.SIGALRM, raise_again)
    signal.setitimer(signal.ITIMER_REAL, _STOP_AGAIN_S)
