"""Pause a Python process at a chosen call; tests/held_children.py puts this folder on its PYTHONPATH.

The process creates a file named after its process id in HOLD_FOLDER, and resumes once a file "go" is there.
If MOST_CPU_S is set, a CPU time limit that the process sets for itself allows that many more seconds. The
kernel's limit has whole seconds; for less, a timer sends the same signal.
"""

import os
import sys


def _hold_at(call: str, pattern: str, number: str, folder: str) -> None:
    import re
    import time

    left = [int(number)]

    def seen(path: str) -> None:
        if left[0] <= 0 or not re.search(pattern, path):
            return
        left[0] -= 1
        if left[0] == 0:
            with open(f"{folder}/{os.getpid()}", "w"):  # noqa: PTH123
                pass
            while os.path.exists(folder) and not os.path.exists(f"{folder}/go"):  # noqa: PTH110
                time.sleep(0.01)

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            seen(os.fsdecode(args[0]))

    def held(fd: int, *args: object) -> object:
        seen(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        return real(fd, *args)

    if call == "open":
        sys.addaudithook(hook)
    else:
        real = getattr(os, call)
        setattr(os, call, held)


def _limit_soon(most_cpu_s: float) -> None:
    import resource
    import time

    set_limit = resource.setrlimit
    timer = None if most_cpu_s >= 1 else _CpuTimer()

    def set_soon(which: int, limits: tuple[int, int]) -> None:
        soft, hard = limits
        if which == resource.RLIMIT_CPU and soft != resource.RLIM_INFINITY:
            if timer is None:
                soft = int(time.process_time()) + int(most_cpu_s)
            else:
                timer.start(most_cpu_s)
        set_limit(which, (soft, hard))

    resource.setrlimit = set_soon


class _CpuTimer:
    """Sends SIGXCPU to this process once it has taken so much more CPU time."""

    def __init__(self) -> None:
        import ctypes
        import signal
        import time

        self._long = ctypes.c_long
        self._calls = ctypes.CDLL("librt.so.1")
        self._timer = ctypes.c_void_p()
        # struct sigevent: a value of 8 bytes, the signal, and SIGEV_SIGNAL, which is 0
        event = (ctypes.c_int * 16)(0, 0, signal.SIGXCPU, 0)
        code = self._calls.timer_create(time.CLOCK_PROCESS_CPUTIME_ID, event, ctypes.byref(self._timer))
        assert code == 0

    def start(self, cpu_s: float) -> None:
        # struct itimerspec: the interval, which is 0, and the time until the signal, in seconds and ns
        spec = (self._long * 4)(0, 0, int(cpu_s), int(cpu_s % 1 * 1e9))
        code = self._calls.timer_settime(self._timer, 0, spec, None)
        assert code == 0


if "MOST_CPU_S" in os.environ:
    _limit_soon(float(os.environ["MOST_CPU_S"]))
if "HOLD_FOLDER" in os.environ:
    _hold_at(*(os.environ[f"HOLD_{name}"] for name in ("CALL", "PATH", "NUMBER", "FOLDER")))
