"""Publish files and folders, which appear whole or not at all: temporary name, fsync, rename.

``publish`` replaces an existing one and syncs its folder, ``rename_into_place`` replaces it alone;
``publish_first`` leaves it alone and returns False. The temporary name, ``.NAME.HOST-PID-HEX.tmp``, is unique
to the attempt and in the target's folder, so a rename never crosses file systems and no lock is needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardprep.errors import CannotWrite, ReadWriteError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Self
from shardprep.files import WRITE_BYTES, FileStamp, close_read, open_regular

STALE_AFTER_S = 24 * 3600
# A random one, or a mark, see ``preprocess/make/attempt.py`` and ``preprocess/plan/task_plan.py``.
TEMPORARY_NAME = re.compile(r"\..+(?:-\d+-[0-9a-f]{8}|\.begun|\.second|\.claimed)\.tmp")


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder, if missing, and sync its parent. Raises CannotWrite or ReadWriteError."""
    if parents and not os.path.isdir(path.parent):  # noqa: PTH112 - Path's may raise OSError
        make_folder(path.parent, parents=True)
    try:
        path.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.isdir(path):  # noqa: PTH112
            return
        why = error.strerror
        raise CannotWrite(f"{path} cannot be created: {why}", path=path, found=why) from None
    # A folder with write but no read permission, as some home folders are, cannot be synced.
    if os.access(path.parent, os.R_OK):
        sync_folder(path.parent)


class TemporaryRemoved(ReadWriteError):
    """Another attempt, which was done, removed the temporary file of this one."""


class PublishedFile:
    """Writes a temporary file, which ``rename_into_place`` renames to ``path``.

    The temporary file has mode ``0666 & ~umask``. Errors name the file and the system's reason: CannotWrite
    at creation, ReadWriteError afterwards.

    Whole pieces bypass the page cache if the file system allows it (O_DIRECT): their pages would displace
    those of the input, and count against the job's memory. 200 MB cost 0.03 s of CPU, against 0.06 to 0.38.
    """

    def __init__(self, path: Path, folder: int | None = None) -> None:
        """Create the temporary file. ``folder``: a descriptor of its folder, which this object closes."""
        self.path = path
        self.num_bytes = 0
        self._digest = hashlib.sha256()
        self.temporary = temporary_name(path)
        # With a descriptor of the folder, the names in it are enough, and no part of the path can be swapped.
        self._folder = folder
        self._name = os.fspath(path if folder is None else path.name)
        self._temporary_name = os.fspath(self.temporary if folder is None else self.temporary.name)
        self._owner = os.getpid()
        self._may_exist = True  # whether the temporary file may have to be removed
        self._behind: _Behind | None = None  # set before a signal could have ``discard`` ask for it
        self._fd = -1
        try:
            self._fd = os.open(
                self._temporary_name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o666,
                dir_fd=folder,
            )
        except OSError as error:
            self._close_folder()
            raise not_creatable(path, error) from None
        with contextlib.suppress(OSError):  # not supported by every file system
            self._set_direct(os.O_DIRECT)
        self._piece = mmap.mmap(-1, WRITE_BYTES)  # aligned to a page, as O_DIRECT requires
        self._num_buffered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def __del__(self) -> None:
        """Clean up if a signal arrived before the ``with`` began, but not in a forked copy."""
        if getattr(self, "_may_exist", False) and self._owner == os.getpid():
            self.discard()

    def write_behind(self) -> None:
        """From now on write pieces in a thread, while the next one is filled. Takes WRITE_BYTES of memory."""
        self._behind = _Behind()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. They are written in pieces of WRITE_BYTES."""
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        self._digest.update(view)
        while view:
            part = view[: WRITE_BYTES - self._num_buffered]
            self._piece[self._num_buffered : self._num_buffered + len(part)] = part
            self._num_buffered += len(part)
            view = view[len(part) :]
            if self._num_buffered == WRITE_BYTES:
                self._write_out()

    def write_file(self, path: Path) -> None:
        """Append the contents of another file. Raises OSError or BrokenShard if it cannot be read."""
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while block := file.read(WRITE_BYTES):
                self.write(block)

    def deny_others_writing(self) -> None:
        """Let only the owner write to the file, whatever the umask. Errors are ignored."""
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.fstat(self._fd).st_mode)
            os.fchmod(self._fd, mode & ~(stat.S_IWGRP | stat.S_IWOTH))

    def _write_out(self) -> None:
        view = memoryview(self._piece)[: self._num_buffered]
        self._num_buffered = 0
        if self._behind is None:
            self._write_piece(view)
            return
        self._piece = self._behind.exchange(self._piece, partial(self._write_piece, view))

    def _write_piece(self, view: memoryview) -> None:
        with self._errors("written"):
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except OSError as error:
                    # O_DIRECT may fail only here, and always does for a partial block.
                    if error.errno != errno.EINVAL or not self._set_direct(0):
                        raise

    def _set_direct(self, flag: int) -> bool:
        """Set O_DIRECT, or clear it with 0. Return whether it was set."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT | flag)
        return bool(flags & os.O_DIRECT)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except IsADirectoryError:
            found = "a folder"
            expected = "a file, or a name that is free"
            raise CannotWrite(path=self.path, found=found, expected=expected) from None
        except OSError as error:
            why = f"{self.path} could not be {what} after {self.num_bytes} bytes: {error.strerror}"
            todo = "nothing is lost: fix the cause (df, lfs df, quota) and run this again"
            kind = TemporaryRemoved if error.errno == errno.ENOENT else ReadWriteError
            raise kind(f"{why}; {todo}", path=self.path, found=error.strerror) from None

    def sync(self) -> FileStamp:
        """Write out, fsync and close the temporary file."""
        self._end_behind()
        try:
            with self._errors("synced"):
                self._set_direct(0)  # the last piece may end in a partial block
                self._write_out()
                os.fsync(self._fd)
                os.close(self._fd)
        finally:
            self._fd = -1
        return FileStamp(num_bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def rename_into_place(self) -> None:
        """Rename the synced file, replacing one of the same name. The caller syncs the folder."""
        with self._errors("renamed"):
            os.rename(self._temporary_name, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._may_exist = False

    def publish_first(self) -> bool:
        """Rename the synced file unless the name is taken. Return whether it was free."""
        try:
            with self._errors("linked"), contextlib.suppress(FileExistsError):
                os.link(self._temporary_name, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                return True
        finally:
            self.discard()
        return False

    def discard(self) -> None:
        """Close and remove the temporary file, if it exists."""
        with contextlib.suppress(ReadWriteError):
            self._end_behind()
        if self._fd >= 0:
            close_read(self._fd)
            self._fd = -1
        if self._may_exist:
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary_name, dir_fd=self._folder)
                self._may_exist = False
        self._close_folder()

    def _end_behind(self) -> None:
        """Wait for the last piece of the thread. Raises its error."""
        if self._behind is not None:
            self._behind.end()
            self._behind = None  # not before: a signal may come in between, and ``discard`` has to wait, too

    def _close_folder(self) -> None:
        if self._folder is not None:
            self._may_exist = False  # its name means nothing without the folder
            close_read(self._folder)
            self._folder = None


class _Behind:
    """A thread that writes one piece while the next one is filled."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._thread = ThreadPoolExecutor(1)
        self._other = mmap.mmap(-1, WRITE_BYTES)
        self._written: Future[None] | None = None

    def exchange(self, piece: mmap.mmap, write: Callable[[], None]) -> mmap.mmap:
        """Have a piece written, and return the one that is free. Raises the error of the piece before."""
        if self._written is not None:
            self._written.result()
        self._written = self._thread.submit(write)
        free, self._other = self._other, piece
        return free

    def end(self) -> None:
        """Wait until all is written. Raises the error of the last piece."""
        self._thread.shutdown()
        if self._written is not None:
            self._written.result()


def publish_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, and sync it and its folder. Raises as PublishedFile does."""
    with PublishedFile(path) as file:
        file.write(content)
        file.sync()
        file.rename_into_place()
    sync_folder(path.parent)


class PublishedFolder:
    """A temporary folder for files, within ``with``; ``publish`` renames it to ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = temporary_name(path)

    def __enter__(self) -> PublishedFolder:
        try:
            self.temporary.mkdir()
        except OSError as error:
            raise not_creatable(self.path, error) from None
        except BaseException:
            # A signal can arrive while mkdir runs; then nobody holds the folder yet.
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # rmtree raises some errors despite ignore_errors
            shutil.rmtree(self.temporary, ignore_errors=True)

    def publish_first(self) -> bool:
        """Sync and rename, unless a file or a non-empty folder has the name. Return whether it was free."""
        for folder, _, names in os.walk(self.temporary, topdown=False):
            for name in (*names, ""):
                sync_folder(Path(folder, name))
        try:
            self.temporary.rename(self.path)  # over an empty folder, too
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                raise CannotWrite(path=self.path, found=f"it cannot be written: {error.strerror}") from None
            return False
        finally:
            sync_folder(self.path.parent)
        return True

    def publish(self) -> None:
        """Sync and rename. A file or folder of the same name is removed first."""
        if not self.publish_first():
            with contextlib.suppress(OSError):
                remove_tree(self.path)
            if not self.publish_first():
                raise CannotWrite(f"{self.path} is in the way: remove it", path=self.path)


def temporary_name(path: Path) -> Path:
    """Return a name in the folder of ``path`` that is unique to this attempt."""
    attempt = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
    return path.with_name(f".{path.name}.{attempt}.tmp")


def not_creatable(path: Path, error: OSError) -> CannotWrite:
    """Return the error for a file that could not be created in its folder."""
    folder = path.parent
    return CannotWrite(f"{folder} cannot be written to: {error.strerror} ({path.name})", path=folder)


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that its renames survive a crash, or a file. Raises ReadWriteError."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise not_synced(path, error) from None


def not_synced(path: Path, error: OSError) -> ReadWriteError:
    """Return the error for a folder or a file that could not be synced."""
    return ReadWriteError(f"{path} could not be synced: {error.strerror}", path=path)


def remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()
