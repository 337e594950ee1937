"""Pause commands at a chosen call, so that a test reaches that point under any load."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.waiting import wait_until

_PLACE = Path(__file__).parent / "held"


class Hold:
    """A point at which processes pause: a call of ``call`` for a file whose path matches ``path``.

    ``call`` is "open", or a function of os that takes a descriptor: write, fsync, readv. Each Python process
    that inherits ``environ()`` pauses there once and still handles signals; ``release`` resumes all of them.
    If a thread is paused, a process that exits on a signal waits for it, so call ``release`` then, too.
    """

    def __init__(self, folder: Path, call: str, path: str) -> None:
        self._folder = folder / "hold"
        self._folder.mkdir(parents=True)
        self._settings = {"HOLD_FOLDER": str(self._folder), "HOLD_CALL": call, "HOLD_PATH": path}

    def environ(self, number: int = 1) -> dict[str, str]:
        """Return the variables for a process that should pause at its ``number``-th such call."""
        places = [str(_PLACE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self._settings, "HOLD_NUMBER": str(number), "PYTHONPATH": os.pathsep.join(places)}

    def pids(self) -> list[int]:
        """Return the ids of all processes that have paused there so far."""
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name != "go")

    def wait(self, num_held: int, *processes: subprocess.Popen[str]) -> list[int]:
        """Wait until ``num_held`` processes have paused, and return their ids. Fails if a process exits."""

        def are_held() -> bool:
            for process in processes:
                assert process.poll() is None, process.communicate()
            return len(self.pids()) >= num_held

        wait_until(are_held, every_s=0.01)
        return self.pids()

    def release(self) -> None:
        """Resume all processes, and do not pause later ones."""
        (self._folder / "go").touch()
