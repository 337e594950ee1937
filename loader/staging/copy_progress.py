"""How far copying is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LOG_EVERY_S = 30.0


class CopyProgress:
    """Counts bytes up to a known total, on standard error. Use it in ``with``."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._began = self._spoke = time.monotonic()
        self._bar = (
            tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True) if sys.stderr.isatty() else None
        )

    def __enter__(self) -> CopyProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Count more as done; less than none where something must be copied again."""
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif now - self._spoke >= LOG_EVERY_S:
            self._spoke = now
            rate = self._done_bytes / (now - self._began)
            left_s = (self._total_bytes - self._done_bytes) / max(rate, 1.0)
            share = self._done_bytes / max(self._total_bytes, 1)
            of, speed = f"{self._total_bytes / 1e9:.1f} GB", f"{rate / 1e6:.0f} MB/s"
            self.say(f"{self._label}: {share:.0%} of {of}, {speed}, {left_s:.0f} s left")

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()
