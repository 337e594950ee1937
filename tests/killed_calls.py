"""A command that is killed before one of its calls of the system that change files."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from shardprep.__main__ import main

_CALLS = {"mkdir", "open", "write", "fsync", "link", "unlink", "rename"}


def killed_at(number: int, words: list[str]) -> int:
    """Run a command in a fork that a SIGKILL ends before its ``number``-th call of the system; its status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    done = 0

    def count(_: Any, event: str, function: Any) -> None:
        nonlocal done
        if event == "c_call" and function.__module__ == "posix" and function.__name__ in _CALLS:
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.setprofile(count)
    code = main(words)
    sys.setprofile(None)
    os._exit(code)
