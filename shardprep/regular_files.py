"""Reads what is a regular file, and says of every error which path it is about.

A FIFO or a device of the right name would make a reader wait for ever, or read for ever; it is an error here.
``with_retries`` tries a read again where a file system over a network may come back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from shardprep.errors import BrokenShard, ReadWriteError

HASH_BLOCK_BYTES = 4 << 20
NOT_THERE = (FileNotFoundError, NotADirectoryError)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> int:
    """A handle for reading; links are followed. Close it with ``close_read``.

    Raises BrokenShard for what is no regular file, without waiting for it; OSError with the path,
    FileNotFoundError among them, for all else.
    """
    return _opened(path)[0]


def _opened(path: Path) -> tuple[int, int]:
    """``open_regular``, and the file's size."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    try:
        found = os.fstat(handle)
    except OSError as error:
        close_read(handle)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not stat.S_ISREG(found.st_mode):
        close_read(handle)
        raise _no_regular_file(path, found.st_mode)
    return handle, found.st_size


def _no_regular_file(path: Path, mode: int) -> BrokenShard:
    kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
    return BrokenShard(f"{path} is {kind}, expected a regular file; put the file itself there")


def refuse_fifos(folder: Path) -> None:
    """That a folder holds no FIFO, device or socket, which a library that reads there would wait for.

    Looks at each name once and opens nothing; links are followed. What cannot be looked at is left to those
    who open it. Raises BrokenShard naming the file.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                mode = entry.stat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise _no_regular_file(Path(entry.path), mode)


def close_read(handle: int) -> None:
    """Close a handle that was only read from: what fails then loses nothing."""
    with contextlib.suppress(OSError):
        os.close(handle)


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """All bytes of a file; its size is looked at before anything is read. One stat and, mostly, one read.

    Raises FileNotFoundError or NotADirectoryError where it is not there, BrokenShard where it is no regular
    file or larger than ``max_bytes``, ReadWriteError where the file system fails.
    """
    with errors_named(path):
        handle, num_bytes = _opened(path)
        with os.fdopen(handle, "rb", buffering=0) as file:
            if num_bytes > max_bytes:
                raise BrokenShard(f"{path} has {num_bytes} bytes, expected at most {max_bytes}")
            parts: list[bytes] = []
            num_left = num_bytes
            while num_left > 0 and (part := file.read(num_left + 1)):  # reads may be short
                parts.append(part)
                num_left -= len(part)
        return b"".join(parts)


def read_beginning(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file; none where it is not there. Raises BrokenShard or ReadWriteError."""
    try:
        with errors_named(path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
            return file.read(num_bytes)
    except NOT_THERE:
        return b""


@dataclass(frozen=True, kw_only=True)
class FileStamp:
    """Size and content hash of one file."""

    num_bytes: int
    sha256: str  # in hex


def stamp_file(path: Path) -> FileStamp:
    """Size and sha256 of a file, read in blocks of 4 MiB. Raises as ``read_regular`` does."""
    with errors_named(path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
        sha256 = file_sha256(file)
        return FileStamp(num_bytes=file.tell(), sha256=sha256)


def file_sha256(file: BinaryIO | io.FileIO) -> str:
    """sha256, in hex, of an open file from where it stands, read in blocks of 4 MiB. Raises OSError."""
    digest = hashlib.sha256()
    while block := file.read(HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def size_of_file(path: Path) -> int | None:
    """Bytes of a file, None where it is not there. Raises ReadWriteError where that cannot be known."""
    try:
        with errors_named(path):
            return path.stat().st_size
    except NOT_THERE:
        return None


def is_folder(path: Path) -> bool:
    """Whether a folder is there. Raises ReadWriteError where that cannot be known."""
    try:
        with errors_named(path):
            return stat.S_ISDIR(path.stat().st_mode)
    except NOT_THERE:
        return False


def names_in(folder: Path) -> list[str]:
    """Names of what is in a folder, sorted; none where there is no such folder. Raises ReadWriteError."""
    try:
        with errors_named(folder):
            return sorted(os.listdir(folder))  # noqa: PTH208  names alone: 10^5 Paths would take a second
    except NOT_THERE:
        return []


@contextlib.contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Turns every OSError but "it is not there" into a ReadWriteError that names the path."""
    try:
        yield
    except NOT_THERE:
        raise
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be read: {error.strerror or error}") from error


T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.5, 1, 2, 4, 8, 16)  # a client that Lustre evicted is back in seconds
# What file systems over a network say while a server or the connection to it is gone.
RETRIED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})


def with_retries(what: str, attempt: Callable[[], T]) -> T:
    """``attempt()``, again after each error that may go away; ``what`` failed, as messages have it.

    Raises ReadWriteError, or what ``attempt`` raises for another reason.
    """
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return attempt()
        except (OSError, BrokenShard, ReadWriteError) as error:
            wait_to_retry(what, error, delay_s)
    raise AssertionError("the last attempt returns or raises")


def wait_to_retry(what: str, error: Exception, delay_s: float | None) -> None:
    """Sleep before another attempt, or raise where the error stays or will not go away.

    ``what`` failed, as messages have it; ``delay_s``: None after the last attempt. Raises ``error``, or
    ReadWriteError for an OSError.
    """
    cause = error if isinstance(error, OSError) else error.__context__
    if not isinstance(cause, OSError):
        raise error
    if cause.errno not in RETRIED or delay_s is None:
        tries = "" if delay_s is not None else f" in {len(RETRY_DELAYS_S) + 1} attempts"
        raise (
            error if not isinstance(error, OSError) else ReadWriteError(f"{what}{tries}: {cause}")
        ) from error
    logger.warning("%s (%s); trying again in %s s", what, cause, delay_s)
    time.sleep(delay_s)
