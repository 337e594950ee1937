"""A thread that logs which shard a read hangs in, while it hangs."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)


class StallWatch:
    """A thread that logs a warning for every ``limit_s`` that one read goes on. 0.3 us a read.

    A server of a parallel file system that is gone blocks a read for minutes and without an error;
    all other ranks then wait in a collective, and only this line tells where.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reading: tuple[float, Path, int] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, path: Path, offset: int) -> None:
        """A read begins; the thread starts with the first one, in the process that reads."""
        self._reading = (time.monotonic(), path, offset)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """It is over."""
        self._reading = None

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        said = 0.0
        while not self._ended.wait(self._limit_s / 4):
            reading, now = self._reading, time.monotonic()
            if reading is None or now - max(reading[0], said) < self._limit_s:
                continue
            said = now
            logger.warning(
                "%s: reading at byte %d has taken %.0f s and goes on; is the file system of this shard up?",
                reading[1], reading[2], now - reading[0],
            )  # fmt: skip
