"""Files and folders that appear whole or not at all: temporary name, fsync, rename.

A crash, a signal or a full disk anywhere leaves what stood under the name before, or the new file or folder
whole. All that a data set consists of is written through these two:

    PublishedFile     bytes -> a file, its size and sha256 counted on the way; ``publish_bytes``: in one call
    PublishedFolder   a folder to be filled, each file in it synced; a tokenizer's, for example

``publish`` takes the place of what has the name, ``publish_first`` leaves that alone and says so.

The temporary name is unique to the attempt, ``.NAME.HOST-PID-HEX.tmp`` in the target's own folder: a rename
never crosses file systems, and no lock is needed. ``remove_temporaries`` clears up after attempts that died.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from shardprep.errors import CannotWrite, ReadWriteError
from shardprep.regular_files import FileStamp

WRITE_BYTES = 4 << 20  # a Lustre stripe; smaller writes cost a lock each
STALE_AFTER_S = 24 * 3600
# As _temporary_name gives it; .old: what PublishedFolder puts aside.
TEMPORARY_NAME = re.compile(r"\..+-\d+-[0-9a-f]{8}(\.old)?\.tmp")


class PublishedFile:
    """Collects bytes under a name unique to this attempt; ``publish`` gives them the real one.

    The temporary file has mode ``0666 & ~umask``, so that colleagues can read what comes of it. Errors name
    the file and its file system's own reason: CannotWrite at creation, ReadWriteError afterwards.

    Whole pieces bypass the page cache where the file system allows it (O_DIRECT): a shard is read
    by others and later, so its pages would only crowd out the input's, and count against the job's
    memory. It costs 0.03 s of CPU for 200 MB, against 0.06, and up to 0.38 where the page cache's pages are
    fresh (benchmarks/writer.py).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._fd = -1
        self._digest = hashlib.sha256()
        self.temporary = _temporary_name(path)
        self._owner = os.getpid()
        self._is_there = True  # perhaps; False once the temporary name is given up
        try:
            self._fd = _open_new(self.temporary)
        except OSError as error:
            raise _not_creatable(path, error) from None
        self._piece = mmap.mmap(-1, WRITE_BYTES)  # aligned to a page, as O_DIRECT wants
        self._num_held = 0

    def __del__(self) -> None:
        """A signal may come before anybody holds the new object; not in a fork, which holds a copy."""
        if getattr(self, "_is_there", False) and self._owner == os.getpid():
            self.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; they reach the file in pieces of WRITE_BYTES."""
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        self._digest.update(view)
        while len(view) >= WRITE_BYTES - self._num_held:
            size = WRITE_BYTES - self._num_held
            self._piece[self._num_held :] = view[:size]
            view = view[size:]
            self._num_held = 0
            self._write_out(memoryview(self._piece))
        self._piece[self._num_held : self._num_held + len(view)] = view
        self._num_held += len(view)

    def _write_out(self, view: memoryview) -> None:
        try:
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not _leave_direct(self._fd):
                        raise
        except OSError as error:
            raise self._failed("written", error) from None

    def _failed(self, what: str, error: OSError) -> ReadWriteError:
        return ReadWriteError(
            f"{self.path} could not be {what} after {self.num_bytes} bytes: {error.strerror}; the temporary "
            "file is removed, nothing is lost: mend the cause (df, lfs df, quota) and run this again"
        )

    def sync(self) -> FileStamp:
        """Write out and fsync; the name is not yet given."""
        try:
            _leave_direct(self._fd)  # the last piece is not of a whole number of blocks
            self._write_out(memoryview(self._piece)[: self._num_held])
            self._num_held = 0
            os.fsync(self._fd)
            os.close(self._fd)
        except OSError as error:
            raise self._failed("synced", error) from None
        finally:
            self._fd = -1
        return FileStamp(num_bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def publish(self) -> None:
        """Give the synced file its name, in place of what has it."""
        try:
            self.temporary.rename(self.path)
        except OSError as error:
            raise self._failed("renamed", error) from None
        self._is_there = False

    def publish_first(self) -> bool:
        """Give the synced file its name unless that is taken; whether it was free."""
        try:
            os.link(self.temporary, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed("linked", error) from None
        finally:
            self.discard()
        return True

    def discard(self) -> None:
        """Close and remove the temporary file, if it is there."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)
            self._is_there = False


def publish_bytes(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content`` by one rename; synced, with its folder. Raises as PublishedFile does."""
    file = PublishedFile(path)
    try:
        file.write(content)
        file.sync()
        file.publish()
    finally:
        file.discard()
    sync_folder(path.parent)


class PublishedFolder:
    """Holds files under a name unique to this attempt; ``publish`` gives their folder the real one.

    Use it in ``with`` and fill ``temporary``; what is not published is removed at the end. The folder has
    mode ``0777 & ~umask``. Raises CannotWrite at creation and publishing, ReadWriteError where a sync fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = _temporary_name(path)

    def __enter__(self) -> PublishedFolder:
        try:
            self.temporary.mkdir()
        except OSError as error:
            raise _not_creatable(self.path, error) from None
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # rmtree lets some through that it was told to ignore
            shutil.rmtree(self.temporary, ignore_errors=True)

    def publish_first(self) -> bool:
        """Sync, and give the folder its name unless a file or a full folder has it; whether it was free."""
        self._sync()
        try:
            self.temporary.rename(self.path)  # over an empty folder, too
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                raise CannotWrite(f"{self.path} cannot be written: {error.strerror}") from None
            return False
        finally:
            sync_folder(self.path.parent)
        return True

    def publish(self) -> None:
        """Sync, and give the folder its name, in place of what has it.

        A full folder is renamed away first and then removed: between the two renames nothing has the name. It
        is renamed back where the second one fails.
        """
        if self.publish_first():
            return
        aside = self.temporary.with_suffix(".old.tmp")
        try:
            self.path.rename(aside)
            self.temporary.rename(self.path)
        except OSError as error:
            raise CannotWrite(f"{self.path} cannot be written: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                remove_tree(aside) if os.path.lexists(self.path) else aside.rename(self.path)
        sync_folder(self.path.parent)

    def _sync(self) -> None:
        for folder, _, names in os.walk(self.temporary, topdown=False):
            for name in names:
                sync_path(Path(folder, name))
            sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that its renames outlast a crash. Raises ReadWriteError."""
    sync_path(folder)


def sync_path(path: Path) -> None:
    """fsync a file or a folder. Raises ReadWriteError."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise ReadWriteError(f"{path} could not be synced: {error.strerror}") from None


def remove_temporaries(
    folder: Path, *stems: str, older_than_s: float, subfolders: Sequence[str] = ()
) -> None:
    """Remove what earlier attempts left of files with such stems, in a folder and in some of its subfolders.

    Each folder is listed once. Whether one of the attempts still lives cannot be known: losing its temporary
    file costs it the attempt.
    """
    now, wanted = time.time(), set(stems)
    found: list[Path] = []
    for each in (folder, *(folder / name for name in subfolders)):
        with contextlib.suppress(OSError):  # what cannot be listed is left for a later attempt
            found += [each / name for name in os.listdir(each) if _is_temporary(name, wanted)]  # noqa: PTH208
    for path in found:
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime >= older_than_s:
                remove_tree(path)


def _is_temporary(name: str, stems: set[str]) -> bool:
    """Whether a name is ``.STEM.ANYTHING.tmp``."""
    if not (name.startswith(".") and name.endswith(".tmp")):
        return False
    dots = [place for place, character in enumerate(name) if character == "." and 0 < place < len(name) - 4]
    return any(name[1:place] in stems for place in dots)


def _temporary_name(path: Path) -> Path:
    attempt = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{attempt}.tmp")


def _not_creatable(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"{path.parent} cannot be written to: {error.strerror} ({path.name})")


def remove_tree(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _open_new(path: Path) -> int:
    """Create a file for writing, with O_DIRECT where its file system has that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems create it before they refuse the flag
        return os.open(path, flags, 0o666)


def _leave_direct(fd: int) -> bool:
    """Go on through the page cache; whether the file was written past it until now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
