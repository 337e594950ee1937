"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

LOG_EVERY_S = 30.0


class Progress:
    """Counts up to a known total, on standard error: input bytes, or what ``unit`` names (in the plural)."""

    def __init__(self, label: str, total: int, *, unit: str = "bytes") -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._done = 0
        self._began = self._spoke = time.monotonic()
        sign = "B" if unit == "bytes" else f" {unit}"
        self._bar = (
            tqdm(total=total, desc=label, unit=sign, unit_scale=True, file=sys.stderr)
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

    def add(self, num_done: int) -> None:
        """Count more as done."""
        self._done += num_done
        if self._bar is not None:
            self._bar.update(num_done)
            return
        now = time.monotonic()
        if now - self._spoke >= LOG_EVERY_S:
            self._spoke = now
            self.say(progress_line(self._label, self._done, self._total, self._unit, now - self._began))

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            say(line)


def progress_line(label: str, num_done: int, total: int, unit: str, elapsed_s: float) -> str:
    """How far it is, how fast, and how long it will still take at that speed."""
    rate = num_done / elapsed_s
    left_s = (total - num_done) / max(rate, 1e-9)
    of, speed = f"{total} {unit}", f"{rate:.1f} {unit}/s"
    if unit == "bytes":
        of, speed = f"{total / 1e6:.0f} MB", f"{rate / 1e6:.1f} MB/s"
    return f"{label}: {num_done / max(1, total):.0%} of {of}, {speed}, {left_s:.0f} s left"


def say(line: str) -> None:
    """Print a line to standard error, where logs and progress go."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
