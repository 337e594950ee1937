"""Stop signals, and child processes that hear them.

After ``raise_on_stop_signals``, TERM, USR1 and INT raise ``Stopped``, so that a stopped task cleans up after
itself. Python drops an exception that is raised in a finalizer or a weak reference's callback; a Stopped that
was lost there is raised again a moment later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shardprep.errors import Stopped

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STOP_AGAIN_S = 0.01  # longer than most finalizers; in a longer one it comes again
_PR_SET_PDEATHSIG = 1


def raise_on_stop_signals() -> None:
    """Make the first of STOP_SIGNALS raise Stopped in the main thread. Later ones are ignored.

    Slurm sends TERM at a time limit, a preemption and scancel, and KILL some seconds later; an
    unhandled TERM would end Python without any ``finally``.
    """
    if not isinstance(sys.unraisablehook, _StopAgain):
        sys.unraisablehook = _StopAgain(sys.unraisablehook)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # of a process started within stop_signals_wait


@contextlib.contextmanager
def stop_signals_wait(
    numbers: Iterable[signal.Signals] = STOP_SIGNALS, *, spawns: bool = False
) -> Iterator[None]:
    """Let these signals wait, within ``with``. A process that is started here begins with them waiting.

    One that came while the child still imports would end it with a traceback, or as if it had been killed.
    ``spawns``: multiprocessing starts it, by another method than fork.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        if spawns:
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()  # when it starts the tracker it unblocks SIGINT and SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process TERM when its parent dies, however that dies (Linux).

    ``parent`` is the parent's process id: where it died before this call, the signal is sent at once.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def start_child(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start ``target(*args)`` in a process of its own, which is stopped when this one ends.

    It is spawned: a fork would copy the threads of numpy and tokenizers half-alive.
    """
    import multiprocessing  # 10 ms that most commands need not wait for

    process = multiprocessing.get_context("spawn").Process(
        target=_run_child, args=(os.getpid(), target, args), daemon=True
    )
    with stop_signals_wait(spawns=True):
        process.start()
    return process


def _run_child(parent: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        raise_on_stop_signals()
        die_with_parent(parent)
        target(*args)
    except Stopped as error:
        raise SystemExit(error.exit_code) from None


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    for each in STOP_SIGNALS:
        # Not SIG_IGN: a second signal that is on its way already would end in Python's own OSError.
        signal.signal(each, lambda *_: None)
    raise Stopped(
        f"stopped by {signal.Signals(number).name}; nothing unfinished is left, run this again to go on"
    )


class _StopAgain:
    """A sys.unraisablehook for a Stopped that Python could raise to nobody, such as one within ``__del__``.

    It cannot raise anything either, so an alarm does, when whatever was at work is over.
    """

    def __init__(self, hook: Callable[[sys.UnraisableHookArgs], Any]) -> None:
        self._hook = hook

    def __call__(self, unraisable: sys.UnraisableHookArgs, /) -> None:
        stopped = unraisable.exc_value
        if not isinstance(stopped, Stopped):
            self._hook(unraisable)
            return

        def raise_again(*_: object) -> NoReturn:
            raise Stopped(*stopped.args)

        signal.signal(signal.SIGALRM, raise_again)
        signal.setitimer(signal.ITIMER_REAL, _STOP_AGAIN_S)
