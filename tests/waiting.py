"""Wait for a condition; a test that waits in vain fails."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

# After so many seconds a process or a condition is given up. Nothing less decides: the machine may be busy.
HANG_S = 600.0


def wait_until_gone(before: set[Any]) -> None:
    """Wait until no child of ``multiprocessing`` lives but those of ``before``.

    torch gives a worker of a closed loader 5 s to end, and then ends it without waiting.
    """
    wait_until(lambda: not set(multiprocessing.active_children()) - before)


def wait_until(is_true: Callable[[], object], limit_s: float = HANG_S, every_s: float = 0.2) -> None:
    """Ask ``is_true`` every ``every_s`` seconds until it holds; fail after ``limit_s`` seconds.

    What takes long to ask, such as a command, is asked less often: it would keep a core busy.
    """
    began = asked = time.monotonic()
    while not is_true():
        now = time.monotonic()
        assert now < began + limit_s, f"not so within {limit_s} s"
        time.sleep(max(every_s, 3 * (now - asked)))
        asked = time.monotonic()
