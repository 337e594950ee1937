"""Read regular files safely.

A FIFO or a device in place of a file would make a reader wait for ever, so it is an error here. Every error
names its path, and ``with_retries`` repeats a read while a file system may come back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta

from shardprep.errors import BrokenShard, ReadWriteError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
PathOf = Callable[[], Path]  # builds a path for a message: 10^5 Paths take 0.5 s
logger = logging.getLogger(__name__)

NOT_THERE = (FileNotFoundError, NotADirectoryError)
_KINDS = {
    "d": "a folder",
    "l": "a link",
    "p": "a FIFO",
    "c": "a character device",
    "b": "a block device",
    "s": "a socket",
}
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # a sha256
MAX_LINE_BYTES = 128 << 20  # of a side file, whose lines repeat parts of records of at most 64 MiB

RETRY_DELAYS_S = (0.5, 1, 2, 4, 8, 16)  # an evicted Lustre client is back within seconds
# Errors of a network file system that cannot reach its server, and of too many open files.
RETRIED = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EMFILE, errno.ENFILE
})  # fmt: skip

WRITE_BYTES = 4 << 20  # a Lustre stripe; smaller writes cost a lock each


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStamp:
    """Size and content hash of one file."""

    num_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    sha256: Digest

    @classmethod
    def of(cls, content: bytes) -> FileStamp:
        """Return the stamp of a file with this content."""
        return cls(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


class errors_named:  # noqa: N801 - used like a function; a generator would take as long as a stat
    """Turn every OSError except NOT_THERE into a ReadWriteError that names the path."""

    def __init__(self, path: Path | PathOf) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, NOT_THERE):
            path = self._path if isinstance(self._path, Path) else self._path()
            why = error.strerror or str(error)
            if isinstance(error, PermissionError):
                why += f"; its owner can type: chmod -R a+rX {shlex.quote(str(path.parent))}"
            raise ReadWriteError(f"{path} cannot be read: {why}", path=path, found=why) from error


def with_retries(what: str, attempt: Callable[[], T]) -> T:
    """Return ``attempt()``, repeated after errors that may go away. ``what`` failed, for messages."""
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            return attempt()
        except (OSError, BrokenShard, ReadWriteError) as error:
            wait_to_retry(what, error, delay_s)
    raise AssertionError("the last attempt returns or raises")


def wait_to_retry(what: str, error: Exception, delay_s: float | None) -> None:
    """Sleep before the next attempt. Raise the error if it is permanent, or if ``delay_s`` is None."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno in RETRIED and delay_s is not None:
        logger.warning("%s (%s); trying again in %s s", what, cause, delay_s)
        time.sleep(delay_s)
        return
    if not isinstance(error, OSError):
        raise error
    tries = "" if delay_s is not None else f" in {len(RETRY_DELAYS_S) + 1} attempts"
    raise ReadWriteError(f"{what}{tries}: {error}") from error


def open_regular(path: Path | str) -> int:
    """Return a descriptor for reading. Raises OSError, or BrokenShard if it is not a regular file."""
    return _open_with_status(path)[0]


def _open_with_status(path: Path | str) -> tuple[int, os.stat_result]:
    """Return a descriptor for reading, and the status of the file. Raises as ``open_regular`` does."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    try:
        status = os.fstat(handle)
        check_is_regular(path, status.st_mode)
    except BaseException:
        close_read(handle)
        raise
    return handle, status


def close_read(handle: int) -> None:
    """Close a descriptor that was only read from, and ignore errors: nothing can be lost."""
    with contextlib.suppress(OSError):
        os.close(handle)


def check_is_regular(path: Path | str, mode: int) -> None:
    """Raise BrokenShard if a mode is not of a regular file."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.filemode(mode)[0], "a file of another kind")
        raise BrokenShard(
            path=path, found=kind, expected="a regular file", advice="put the file itself there"
        )


def refuse_fifos(folder: Path) -> None:
    """Check that a folder contains no FIFO, device or socket, which a library would wait for."""
    # Entries that cannot be examined fail later, when they are opened.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                mode = entry.stat().st_mode
                if not stat.S_ISDIR(mode):
                    check_is_regular(entry.path, mode)


class ReadFile:
    """A regular file, open for reads at any offset; a context manager. Reads raise OSError or BrokenShard."""

    _handle = -1

    def __init__(self, path: Path | PathOf, handle: int | None = None) -> None:
        """Open a file. ``handle``: a descriptor if it is open already, which this object closes."""
        self._path = path
        # A status may be a round trip, so that of opening is kept.
        if handle is None:
            self._handle, self.first_status = _open_with_status(self.path)
        else:
            self._handle = handle
            self.first_status = self.status()
        self.num_bytes = self.first_status.st_size

    @property
    def path(self) -> Path:
        """Return the path, for messages."""
        return self._path if isinstance(self._path, Path) else self._path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        handle = self._handle
        self._handle = -1
        close_read(handle)

    def status(self) -> os.stat_result:
        """Return its current status. Raises OSError."""
        return os.fstat(self._handle)

    def expect_scattered_reads(self) -> None:
        """Tell the kernel not to read ahead."""
        with contextlib.suppress(OSError):  # a hint
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)

    def mapped(self) -> mmap.mmap:
        """Map the whole file into memory. The map stays valid after ``close``. Raises OSError."""
        return mmap.mmap(self._handle, 0, prot=mmap.PROT_READ)

    def read_beginning(self, offset: int, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` from an offset, none at the end of the file. Raises OSError."""
        # Limited to the file's size when it was opened, because pread allocates before it reads.
        return os.pread(self._handle, min(num_bytes, max(self.num_bytes - offset, 0)), offset)

    def read_some(self, target: memoryview, offset: int) -> int:
        """Read into ``target`` from an offset. Return the number of bytes, because reads may be short."""
        try:
            count = os.preadv(self._handle, [target], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if not count:
            found = f"it ended at byte {offset} while it was read; was it replaced?"
            raise BrokenShard(path=self.path, found=found)
        return count

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Return exactly ``num_bytes`` from an offset. The file's size is checked before allocation."""
        if offset + num_bytes > self.num_bytes:
            expected = f"to contain bytes {offset} to {offset + num_bytes}"
            advice = "was it replaced?"
            raise BrokenShard(
                path=self.path, found=f"{self.num_bytes} bytes", expected=expected, advice=advice
            )
        data = bytearray(num_bytes)
        view = memoryview(data)
        done = 0
        while done < num_bytes:
            done += self.read_some(view[done:], offset + done)
        return data


class HashedFile(ReadFile):
    """A file that is hashed while it is read forward. Each byte is read once, unless requested again."""

    def __init__(self, path: Path | PathOf, handle: int | None = None) -> None:
        super().__init__(path, handle)
        self._digest = hashlib.sha256()
        self._kept = bytearray()  # the bytes hashed last
        self._kept_offset = 0  # in the file

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Return bytes as ``ReadFile.read`` does."""
        end = offset + num_bytes
        if offset < self._kept_offset or end > self.num_bytes:
            return super().read(offset, num_bytes)
        while (num_hashed := self._kept_offset + len(self._kept)) < end:
            if num_hashed <= offset:
                self._kept = bytearray()
                self._kept_offset = num_hashed
            block = super().read(num_hashed, min(WRITE_BYTES, self.num_bytes - num_hashed))
            self._digest.update(block)
            self._kept = self._kept + block if self._kept else block  # without a copy if it is the first
        # Keep the bytes from ``offset`` on, because the next read may begin there.
        del self._kept[: offset - self._kept_offset]
        self._kept_offset = offset
        return self._kept[:num_bytes]

    def sha256(self) -> str:
        """Read the rest and return the hash of the whole file, in hex."""
        self.read(self.num_bytes, 0)
        return self._digest.hexdigest()


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return all bytes of a file, at most ``max_bytes``.

    Raises FileNotFoundError or NotADirectoryError if it does not exist, BrokenShard if it is not a regular
    file or too large, and ReadWriteError if the file system fails.
    """
    return read_with_status(path, max_bytes=max_bytes)[0]


def read_with_status(path: Path, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read as ``read_regular`` does, and also return the status of the file that was read."""
    with errors_named(path), ReadFile(path) as file:
        return read_whole(file, max_bytes=max_bytes), file.status()


def read_whole(file: ReadFile, *, max_bytes: int) -> bytes:
    """Return all bytes of an open file, at most ``max_bytes``. Raises BrokenShard or OSError."""
    if file.num_bytes > max_bytes:
        raise BrokenShard(path=file.path, found=f"{file.num_bytes} bytes", expected=f"at most {max_bytes}")
    # No second buffer: malloc would keep its memory after it is freed.
    data = file.read_beginning(0, file.num_bytes)
    if len(data) < file.num_bytes:  # a short read
        data = bytes(file.read(0, file.num_bytes))
    return data


def read_beginning(path: Path, num_bytes: int) -> bytes:
    """Return a file's first bytes, none if it does not exist. Raises BrokenShard or ReadWriteError."""
    try:
        with errors_named(path), ReadFile(path) as file:
            return file.read_beginning(0, num_bytes)
    except NOT_THERE:
        return b""


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end. Raises as ``read_regular`` does."""
    with errors_named(path):
        yield from lines_of(path, open_regular(path))


def lines_of(path: Path, handle: int, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of an open file, each with its end, and close it. Raises OSError or BrokenShard."""
    with os.fdopen(handle, "rb") as file:
        while line := file.readline(max_bytes + 1):
            if len(line) > max_bytes:
                raise BrokenShard(f"{path} has a line of more than {max_bytes} bytes", path=path)
            yield line


def stamp_file(path: Path) -> FileStamp:
    """Return the size and sha256 of a file, read in blocks of 4 MiB. Raises as ``read_regular`` does."""
    with errors_named(path), HashedFile(path) as file:
        return FileStamp(num_bytes=file.num_bytes, sha256=file.sha256())


def size_of_file(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist. Raises ReadWriteError."""
    status = _status_of(path)
    return None if status is None else status.st_size


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder. Raises ReadWriteError."""
    status = _status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status_of(path: Path) -> os.stat_result | None:
    try:
        with errors_named(path):
            return os.stat(path)  # noqa: PTH116 - a Path's takes twice as long
    except NOT_THERE:
        return None


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic link, or False on an error, which the next access reports."""
    return os.path.islink(path)  # noqa: PTH114 - Path's may raise OSError


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, or none if it does not exist. Raises ReadWriteError."""
    try:
        with errors_named(folder):
            return sorted(os.listdir(folder))  # noqa: PTH208 - 10^5 Paths take 1 s
    except NOT_THERE:
        return []
