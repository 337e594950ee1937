"""Commands that stand still in the middle of their work, so that a test meets them there at any load."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.waiting import wait_until

_PLACE = Path(__file__).parent / "held"


class Hold:
    """A point at which processes stop: a call of ``call`` for a file whose path matches ``path``.

    ``call`` is "open", or a function of os that takes a descriptor: write, fsync, readv. All Python processes
    that inherit ``environ()`` stop there once, and still heed their signals; ``release`` lets them go on.
    Where a thread stops, a process that a signal ends waits for it: release it then, too.
    """

    def __init__(self, folder: Path, call: str, path: str) -> None:
        self._folder = folder / "hold"
        self._folder.mkdir(parents=True)
        self._settings = {"HOLD_FOLDER": str(self._folder), "HOLD_CALL": call, "HOLD_PATH": path}

    def environ(self, number: int = 1) -> dict[str, str]:
        """Variables of a process that is to stop at its ``number``-th such call."""
        places = [str(_PLACE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self._settings, "HOLD_NUMBER": str(number), "PYTHONPATH": os.pathsep.join(places)}

    def pids(self) -> list[int]:
        """The processes that stand there, or did before they were let go or ended."""
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name != "go")

    def wait(self, num_held: int, *processes: subprocess.Popen[str]) -> list[int]:
        """Wait until so many stand there and return their ids; fail where one of ``processes`` ends."""

        def are_held() -> bool:
            for process in processes:
                assert process.poll() is None, process.communicate()
            return len(self.pids()) >= num_held

        wait_until(are_held, every_s=0.01)
        return self.pids()

    def release(self) -> None:
        """Let all go on, and those that come later pass."""
        (self._folder / "go").touch()
