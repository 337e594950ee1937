"""TERM, USR1 and INT as an exception, so that a stopped task cleans up after itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from preprocess.shard_format import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def raise_on_stop_signals() -> None:
    """Make the first of STOP_SIGNALS raise Stopped in the main thread; later ones are ignored.

    Slurm sends TERM at a time limit, a preemption and scancel, and KILL some seconds later; an
    unhandled TERM would end Python without any ``finally``.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # of a process started within stop_signals_wait


@contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Within, STOP_SIGNALS wait; a process that is started here begins with them waiting.

    Else one that comes while the child still imports would end it by Python's own handlers, with a
    traceback, or as if it had been killed. The child ends the waiting by raise_on_stop_signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
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


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    for each in STOP_SIGNALS:
        # Not SIG_IGN: a second signal that is on its way already would end in Python's own OSError.
        signal.signal(each, lambda *_: None)
    raise Stopped(
        f"stopped by {signal.Signals(number).name}; nothing unfinished is left, run this again to go on"
    )
