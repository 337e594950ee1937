"""Control os_calls.c: count the calls to the operating system below a folder, and fail or signal at one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tests.children import environ_of_children

_SOURCE = Path(__file__).with_name("os_calls.c")
_MAX_CALLS = 8192
_MAX_PATH = 256
_VARIABLE = "FAULTS_ORDERS"

Mode = Literal["count", "once", "lasting", "signal", "short", "all short", "each change"]
_MODES: tuple[Mode, ...] = get_args(Mode)

# Errors of each operation on a local disk, Lustre or NFS, over a quota, or without permission.
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EINTR),
    "create": (errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO, errno.EMFILE),
    "read": (errno.EIO, errno.ESTALE, errno.EINTR, errno.ETIMEDOUT),
    "write": (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.EINVAL),  # O_DIRECT refused late
    "close": (errno.EIO,),
    "close written": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "stat": (errno.EACCES, errno.EIO, errno.ESTALE),
    "readdir": (errno.EIO, errno.ESTALE),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "link": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "unlink": (errno.EIO, errno.EACCES),
    "mkdir": (errno.EACCES, errno.ENOSPC, errno.EIO),
    "chmod": (errno.EPERM, errno.EIO),
}


class _Call(ctypes.Structure):
    _fields_ = (("op", ctypes.c_char * 16), ("path", ctypes.c_char * _MAX_PATH))


class _Orders(ctypes.Structure):
    _fields_ = (
        ("armed", ctypes.c_int),
        ("mode", ctypes.c_int),
        ("error", ctypes.c_int),
        ("at", ctypes.c_int),
        ("count", ctypes.c_int),
        ("op", ctypes.c_char * 16),
        ("root", ctypes.c_char * _MAX_PATH),
        ("calls", _Call * _MAX_CALLS),
    )


@dataclass(frozen=True)
class Call:
    """A call of a command to the operating system."""

    op: str
    path: str  # below the folder


class OsCalls:
    """Decides what happens to calls below ``root``. Needs a process that ``preload`` started."""

    def __init__(self, root: Path) -> None:
        with Path(os.environ[_VARIABLE]).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Orders))
        self._orders = _Orders.from_buffer(self._map)
        self._orders.root = os.fsencode(root.resolve())

    @contextlib.contextmanager
    def ordered(self, mode: Mode, *, at: int = 0, error: int = 0) -> Iterator[None]:
        """Give orders to the processes that call ``arm`` and to their children.

        ``error``: the errno, or the signal that all processes of the command get just before the call.
        """
        orders = self._orders
        orders.mode, orders.at, orders.error, orders.count, orders.op = _MODES.index(mode), at, error, 0, b""
        try:
            yield
        finally:
            orders.armed = 0

    def arm(self) -> None:
        """Let the orders take effect. The process that gave them must make no call below the folder then."""
        self._orders.armed = 1

    def calls(self) -> list[Call]:
        """Return the calls since the last orders, at most the first 8,192."""
        number = min(self._orders.count, _MAX_CALLS)
        return [Call(os.fsdecode(call.op), os.fsdecode(call.path)) for call in self._orders.calls[:number]]


def preload(folder: Path, argv: list[str]) -> None:
    """Run ``python argv`` with os_calls.c, compiled into ``folder``, and exit with its exit code.

    SIGTERM is passed on, as a terminal does with Ctrl-C. Returns at once in a process that has been started
    like this.
    """
    if _VARIABLE not in os.environ:
        environ = preloading_environ(folder)
        with subprocess.Popen([sys.executable, *argv], env=environ) as child:
            signal.signal(signal.SIGTERM, lambda *_: child.terminate())
            signal.signal(signal.SIGINT, lambda *_: None)
            sys.exit(child.wait())


def preloading_environ(folder: Path) -> dict[str, str]:
    """Compile os_calls.c into ``folder`` and return the environment of a process that has it."""
    library, orders = folder / "os_calls.so", folder / "orders"
    flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-Wno-nonnull-compare"]
    subprocess.run(["gcc", *flags, "-o", library, _SOURCE, "-ldl"], check=True)
    orders.write_bytes(bytes(ctypes.sizeof(_Orders)))
    preloaded = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    return environ_of_children(LD_PRELOAD=preloaded, **{_VARIABLE: str(orders)})
