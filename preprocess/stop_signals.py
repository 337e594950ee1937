"""TERM, USR1 and INT as an exception, so that a stopped task cleans up after itself."""

from __future__ import annotations

import signal
from types import FrameType

from preprocess.shard_format import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def raise_on_stop_signals() -> None:
    """Make the first of STOP_SIGNALS raise Stopped in the main thread; later ones are ignored.

    Slurm sends TERM at a time limit, a preemption and scancel, and KILL some seconds later; an
    unhandled TERM would end Python without any ``finally``.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    for each in STOP_SIGNALS:
        # Not SIG_IGN: a second signal that is on its way already would end in Python's own OSError.
        signal.signal(each, lambda *_: None)
    raise Stopped(
        f"stopped by {signal.Signals(number).name}; nothing unfinished is left, run this again to go on"
    )
