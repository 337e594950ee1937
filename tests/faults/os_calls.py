"""The orders to os_calls.c: count the calls to the operating system below a folder, fail or signal at one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
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

# What each operation really ends with on a local disk, on Lustre or NFS, over a quota or without rights.
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
    """A call to the operating system that a command made."""

    op: str
    path: str  # below the folder


class OsCalls:
    """Says what happens to the calls below ``root``; of the process that ``preload`` started."""

    def __init__(self, root: Path) -> None:
        with Path(os.environ[_VARIABLE]).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Orders))
        self._orders = _Orders.from_buffer(self._map)
        self._orders.root = os.fsencode(root.resolve())

    @contextlib.contextmanager
    def ordered(self, mode: Mode, *, at: int = 0, error: int = 0) -> Iterator[None]:
        """Orders for the processes that call ``arm``, and those that they start.

        ``error``: the errno, or the signal that all processes of the command get just before the call.
        """
        orders = self._orders
        orders.mode, orders.at, orders.error, orders.count, orders.op = _MODES.index(mode), at, error, 0, b""
        try:
            yield
        finally:
            orders.armed = 0

    def arm(self) -> None:
        """From now on the orders hold. The process that gave them makes no call below the folder then."""
        self._orders.armed = 1

    def calls(self) -> list[Call]:
        """Those of the last orders; the ones behind a limit of some thousands are not known."""
        number = min(self._orders.count, _MAX_CALLS)
        return [Call(os.fsdecode(call.op), os.fsdecode(call.path)) for call in self._orders.calls[:number]]


def preload(folder: Path, argv: list[str]) -> None:
    """Run ``python argv`` with os_calls.c, compiled into ``folder``, and exit as it does; nothing in that."""
    if _VARIABLE in os.environ:
        return
    library, orders = folder / "os_calls.so", folder / "orders"
    flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-Wno-nonnull-compare"]
    subprocess.run(["gcc", *flags, "-o", library, _SOURCE, "-ldl"], check=True)
    orders.write_bytes(bytes(ctypes.sizeof(_Orders)))
    preloaded = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    environ = environ_of_children(LD_PRELOAD=preloaded, **{_VARIABLE: str(orders)})
    sys.exit(subprocess.run([sys.executable, *argv], env=environ, check=False).returncode)
