"""Wait for a condition; a test that waits in vain fails."""

from __future__ import annotations

import time
from collections.abc import Callable

# After so many seconds a process or a condition is given up. Nothing less decides: the machine may be busy.
HANG_S = 600.0


def wait_until(is_true: Callable[[], object], limit_s: float = HANG_S, every_s: float = 0.2) -> None:
    """Ask ``is_true`` every ``every_s`` seconds until it holds; fail after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"not so within {limit_s} s"
        time.sleep(every_s)
