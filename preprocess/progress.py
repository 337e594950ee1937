"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

LOG_EVERY_S = 30.0


class Progress:
    """Counts input bytes up to a known total, on standard error."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._began = self._spoke = time.monotonic()
        self._bar = (
            tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Count more bytes as done."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
            return
        now = time.monotonic()
        if now - self._spoke >= LOG_EVERY_S:
            self._spoke = now
            self.say(self._line(now - self._began))

    def _line(self, elapsed_s: float) -> str:
        rate = self._done / elapsed_s
        left_s = (self._total - self._done) / max(rate, 1)
        share = self._done / max(1, self._total)
        speed = f"{rate / 1e6:.1f} MB/s, {left_s:.0f} s left"
        return f"{self._label}: {share:.0%} of {self._total / 1e6:.0f} MB, {speed}"

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            say(line)


def say(line: str) -> None:
    """Print a line to standard error, where logs and progress go."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
