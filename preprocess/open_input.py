"""An input file, opened once and read by position; whether it was written to meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

from preprocess.shard_format import NotFound, ReadWriteError, Refused

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Stamp(NamedTuple):
    """What the file system says of a file. A write moves one of them at least, but for its clock's ticks.

    So do a touch, a chmod or a new link, which ask for another run for nothing: the price of the ctime, which
    alone tells of a write whose mtime was put back.
    """

    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class OpenInput:
    """A regular file, open for reading. It is closed when nobody holds it any more: threads share it.

    All reads go to the one descriptor, so that a file put in its place meanwhile is never mixed with it, and
    ``check_unchanged`` tells whether it was written to. Raises NotFound where it cannot be opened, or is
    no regular file: a FIFO would wait for ever, a device never end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not to wait for a FIFO's writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114 - it never raises
                reason = "it is a link to nothing"
            raise NotFound(f"input {path} cannot be opened: {reason}") from None
        weakref.finalize(self, _close, self._fd)
        status = self._status()
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "no regular file")
            raise NotFound(
                f"input {path} is {kind}, expected a regular file; move it away, or bring the file back"
            )
        self.stamp = _stamp(status)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
        except OSError as error:
            raise self._failed(error) from None

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end), fewer where the file ends before. Raises ReadWriteError."""
        pieces: list[bytes] = []
        try:
            while start < end and (piece := os.pread(self._fd, end - start, start)):
                if start + len(piece) == end and not pieces:
                    return piece
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            raise self._failed(error) from None
        return b"".join(pieces)

    def read_all(self, start: int, end: int) -> bytes:
        """The bytes [start, end). Raises ReadWriteError, also where the file ends before."""
        data = self.read(start, end)
        if len(data) < end - start:
            raise ReadWriteError(
                f"input {self.path} ended at byte {start + len(data)}, the plan says {end}; bring the whole "
                "file back, or plan anew into a new folder"
            )
        return data

    def check_unchanged(self) -> None:
        """That nobody wrote to the file since it was opened. Raises Refused, or ReadWriteError."""
        found = _stamp(self._status())
        if found != self.stamp:
            raise Refused(
                f"input {self.path} changed while it was read (size, mtime or ctime: "
                f"{found.num_bytes} bytes at {found.mtime_ns}, expected {self.stamp.num_bytes} bytes at "
                f"{self.stamp.mtime_ns}); nothing is published: once nobody writes to it, run this again, "
                "or plan anew into a new folder if its text is another"
            )

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> ReadWriteError:
        return ReadWriteError(f"input {self.path} cannot be read: {error.strerror}")


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing was written to it
        os.close(descriptor)
