"""Wait for a condition, or fail the test after a time limit."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

# Time limit for a process or a condition. It is this long because the machine may be busy.
HANG_S = 600.0


def wait_until_gone(before: set[Any]) -> None:
    """Wait until only the children of ``multiprocessing`` that are in ``before`` are alive.

    torch gives a worker of a closed loader 5 s to exit, then kills it without waiting.
    """
    wait_until(lambda: not set(multiprocessing.active_children()) - before)


def wait_until(is_true: Callable[[], object], limit_s: float = HANG_S, every_s: float = 0.2) -> None:
    """Call ``is_true`` every ``every_s`` seconds until it returns true; fail after ``limit_s`` seconds.

    A slow check, such as a command, runs less often, so that it does not keep a core busy.
    """
    began = checked = time.monotonic()
    while not is_true():
        now = time.monotonic()
        assert now < began + limit_s, f"not true within {limit_s} s"
        time.sleep(max(every_s, 3 * (now - checked)))
        checked = time.monotonic()
