"""Wait for a condition; a test that waits in vain fails."""

from __future__ import annotations

import time
from collections.abc import Callable

# After so many seconds a process or a condition is given up. Nothing less decides: the machine may be busy.
HANG_S = 600.0


def wait_until(is_true: Callable[[], object], limit_s: float = HANG_S, every_s: float = 0.2) -> None:
    """Ask ``is_true`` every ``every_s`` seconds until it holds; fail after ``limit_s`` seconds.

    What takes long to ask, such as a command, is asked less often: it would keep a core busy.
    """
    deadline = time.monotonic() + limit_s
    while True:
        asked = time.monotonic()
        if is_true():
            return
        now = time.monotonic()
        assert now < deadline, f"not so within {limit_s} s"
        time.sleep(max(every_s, 3 * (now - asked)))
