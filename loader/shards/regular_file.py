"""Opens what must be a regular file. A FIFO would be waited for, a device such as /dev/zero never ends."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from preprocess.shard_format import BrokenShard

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path) -> int:
    """A handle to read a regular file with; links are followed. Close it with ``close_read``.

    Raises BrokenShard where it is something else, without waiting for it; OSError with the path.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO opens at once
    try:
        found = stat.S_IFMT(os.fstat(handle).st_mode)
    except OSError as error:
        close_read(handle)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if found != stat.S_IFREG:
        close_read(handle)
        kind = _KINDS.get(found, "of another kind")
        raise BrokenShard(f"{path} is {kind}, expected a regular file; put the file itself there")
    return handle


def close_read(handle: int) -> None:
    """Close a handle that was only read from: what fails then loses nothing."""
    with contextlib.suppress(OSError):
        os.close(handle)
