"""A folder that others may write to: everything in it is reached by descriptors, and never through a link.

``Folder`` opens the folder itself once. Names in it are relative, with "/": ``ids/shard-00000.jsonl``. Each
part of a name is opened with O_NOFOLLOW, so neither a link that lies there nor one that is planted during the
work leads a command to another place. Only regular files are opened, without waiting for a FIFO, and a file
whose size is mostly a hole is refused before memory is taken for it.

``writable`` is a pattern of the names that the owner of a folder, such as the format of a data set, defines.
Nothing else is written or removed. The file is one class: each method reaches its name by the same walk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardprep import files, publishing
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused
from shardprep.files import FileStamp, HashedFile, ReadFile
from shardprep.publishing import PublishedFile

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for a writer
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)  # of opening a link with O_NOFOLLOW, as a file and as a folder
# A larger file must have this share of its size on disk, or else of data.
_SPARSE_BYTES = 16 << 20
_LEAST_SHARE = 0.01
_MOST_HOLES = 10_000  # of a file
_STAT_BLOCK_BYTES = 512
_MOST_ATTEMPTS = 100  # to publish a file, one more than attempts that are done may remove its temporary
_MOST_LEVELS = (
    2  # of folders in a temporary folder; that of ``verify --deep`` has ids/, digests/, quarantine/
)

_T = TypeVar("_T")


class _Handle:
    """A descriptor of a folder, closed when nobody uses it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        files.close_read(self.fd)


def _num_data_bytes(handle: int, wanted_bytes: float) -> int:
    """Return how many bytes of a file are no hole, or a part of it that is enough."""
    num_bytes = at = 0
    with contextlib.suppress(OSError):  # behind the last data
        for _ in range(_MOST_HOLES):
            start = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, start, os.SEEK_HOLE)
            num_bytes += at - start
            if num_bytes >= wanted_bytes:
                break
    os.lseek(handle, 0, os.SEEK_SET)
    return num_bytes


class Folder:
    """The folder at ``path``, opened at the first access. A copy in another process opens it anew.

    Methods that read raise FileNotFoundError or NotADirectoryError for what does not exist, BrokenShard for
    a link, for anything else that is not a regular file, and for a size that is not on disk. Other errors of
    the system are ReadWriteErrors; those of ``open`` are OSErrors, which ``files.with_retries`` repeats.
    Methods that write raise CannotWrite or ReadWriteError.
    """

    _handle: _Handle | None = None

    def __init__(self, path: Path | str, *, writable: re.Pattern[str], may_be_link: bool = True) -> None:
        """``may_be_link``: whether ``path`` itself may be a link, such as one that a person gave."""
        self.path = Path(path)
        self._writable = writable
        self._flags = _FOLDER if may_be_link else _FOLDER | os.O_NOFOLLOW

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_handle"}

    def close(self) -> None:
        """Close the folder. The next access opens it again."""
        self._handle = None

    def path_of(self, name: str) -> Path:
        """Return the path of a name, for messages and for programs that take paths."""
        return self.path / name

    # Reaching a name. -------------------------------------------------------------------------------------

    def _opened(self) -> _Handle:
        """Return the folder's descriptor. Raises OSError."""
        if self._handle is None:
            try:
                fd = os.open(self.path, self._flags)
            except PermissionError:  # a folder that may be passed through, but not listed
                fd = os.open(self.path, self._flags | os.O_PATH)
            except NotADirectoryError:
                if self._flags & os.O_NOFOLLOW and files.is_link(self.path):
                    found = f"a link to {os.readlink(self.path)!r}"  # noqa: PTH115
                    raise CannotWrite(path=self.path, found=found, expected="a folder in its place") from None
                raise
            self._handle = _Handle(fd)
        return self._handle

    def _reach(self, name: str) -> tuple[_Handle, str]:
        """Return the folder of a name, and the last part of the name. Raises BrokenShard or OSError."""
        subfolder, _, last = name.rpartition("/")
        return self._open_subfolder(subfolder) if subfolder else self._opened(), last

    def _open_subfolder(self, name: str) -> _Handle:
        """Open a folder below this one. Raises BrokenShard for a link, and OSError."""
        handle = self._opened()
        reached = ""
        for part in name.split("/"):
            reached = f"{reached}/{part}" if reached else part
            try:
                handle = _Handle(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle.fd))
            except OSError as error:
                raise self._named(error, handle, reached) from None
        return handle

    def _named(self, error: OSError, parent: _Handle, name: str) -> OSError | BrokenShard:
        """Return the error of an access to a name with its path, or a BrokenShard if the name is a link."""
        path = self.path_of(name)
        if error.errno in files.RETRIED:
            self._handle = None  # a stale descriptor stays stale: the next attempt opens another one
        if error.errno in _LINK_ERRORS:
            with contextlib.suppress(OSError):
                found = f"a link to {os.readlink(name.rpartition('/')[2], dir_fd=parent.fd)!r}"
                return BrokenShard(
                    path=path, found=found, expected="no link; put the file or folder itself there"
                )
        return type(error)(error.errno, error.strerror, str(path))

    def subfolder(self, name: str) -> Folder:
        """Return a folder below this one, to read many files of it: it is opened once, not for each file."""
        return _Subfolder(self.path_of(name), partial(self._open_subfolder, name))

    # Reading. ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether the folder itself exists. Raises ReadWriteError."""
        return files.is_folder(self.path)

    def _open(self, name: str) -> int:
        """Return a descriptor of a regular file. Raises BrokenShard or OSError."""
        parent, last = self._reach(name)
        try:
            handle = os.open(last, _READ, dir_fd=parent.fd)
        except OSError as error:
            raise self._named(error, parent, name) from None
        try:
            status = os.fstat(handle)
            self._check_is_regular(name, status)
            if status.st_size > _SPARSE_BYTES:
                self._check_is_on_disk(name, handle, status)
        except BaseException:
            files.close_read(handle)
            raise
        return handle

    def _check_is_regular(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            files.check_is_regular(self.path_of(name), status.st_mode)

    def _check_is_on_disk(self, name: str, handle: int, status: os.stat_result) -> None:
        """Raise BrokenShard if a large file is mostly a hole, which costs its writer nothing."""
        wanted_bytes = status.st_size * _LEAST_SHARE
        if status.st_blocks * _STAT_BLOCK_BYTES >= wanted_bytes:
            return
        # Some file systems count no blocks, or compress them, or count them seconds after an fsync. Of a
        # whole file they tell that most of it is data: a few blocks of zeros may be holes.
        if _num_data_bytes(handle, wanted_bytes) >= wanted_bytes:
            return
        # A file that was moved to an archive comes back when it is read.
        os.pread(handle, 1, 0)
        num_bytes = os.fstat(handle).st_blocks * _STAT_BLOCK_BYTES
        if num_bytes < wanted_bytes:
            found = f"{status.st_size} bytes, of which only {num_bytes} are on disk: the rest is a hole"
            raise BrokenShard(
                path=self.path_of(name), found=found, expected="a whole file", advice="copy it again"
            )

    def open(self, name: str) -> ReadFile:
        """Open a regular file. Raises FileNotFoundError, NotADirectoryError, BrokenShard or OSError."""
        return ReadFile(partial(self.path_of, name), self._open(name))

    def open_hashed(self, name: str) -> HashedFile:
        """Open a regular file that is hashed while it is read. Raises as ``open``."""
        return HashedFile(partial(self.path_of, name), self._open(name))

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return all bytes of a file, at most ``max_bytes``."""
        with files.errors_named(partial(self.path_of, name)), self.open(name) as file:
            return files.read_whole(file, max_bytes=max_bytes)

    def read_with_status(self, name: str, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
        """Read as ``read`` does, and also return the status of the file that was read."""
        with files.errors_named(partial(self.path_of, name)), self.open(name) as file:
            return files.read_whole(file, max_bytes=max_bytes), file.status()

    def read_beginning(self, name: str, num_bytes: int) -> bytes:
        """Return a file's first bytes, none if it does not exist."""
        try:
            with files.errors_named(partial(self.path_of, name)), self.open(name) as file:
                return file.read_beginning(0, num_bytes)
        except files.NOT_THERE:
            return b""

    def read_end(self, name: str, num_bytes: int) -> bytes:
        """Return a file's last bytes, none if it does not exist."""
        try:
            with files.errors_named(partial(self.path_of, name)), self.open(name) as file:
                return file.read_beginning(max(file.num_bytes - num_bytes, 0), num_bytes)
        except files.NOT_THERE:
            return b""

    def lines(self, name: str, *, max_line_bytes: int = files.MAX_LINE_BYTES) -> Iterator[bytes]:
        """Yield the lines of a file, each with its end. Raises BrokenShard for a line that is too long."""
        path = self.path_of(name)
        with files.errors_named(path):
            yield from files.lines_of(path, self._open(name), max_line_bytes)

    def stamp_of(self, name: str) -> FileStamp:
        """Return the size and sha256 of a file, read in blocks of 4 MiB."""
        with files.errors_named(partial(self.path_of, name)), self.open_hashed(name) as file:
            return FileStamp(num_bytes=file.num_bytes, sha256=file.sha256())

    def status_of(self, name: str) -> os.stat_result | None:
        """Return the status of whatever has this name, a link's own, or None if nothing has it."""
        try:
            with files.errors_named(partial(self.path_of, name)):
                parent, last = self._reach(name)
                return os.stat(last, dir_fd=parent.fd, follow_symlinks=False)
        except files.NOT_THERE:
            return None

    def size_of(self, name: str) -> int | None:
        """Return the size of a regular file in bytes, or None if it does not exist."""
        status = self.status_of(name)
        if status is None:
            return None
        self._check_is_regular(name, status)
        return status.st_size

    def is_subfolder(self, name: str) -> bool:
        """Return whether a name is a folder, and no link to one."""
        status = self.status_of(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def names(self, subfolder: str = "") -> list[str]:
        """Return the names in the folder or in one below it, sorted, or none if it does not exist."""
        try:
            with files.errors_named(self.path_of(subfolder)):
                # Opened again: threads that list through one descriptor would disturb each other.
                handle = self._open_subfolder(subfolder or ".")
                return sorted(os.listdir(handle.fd))  # noqa: PTH208 - a Path has no descriptors of folders
        except files.NOT_THERE:
            return []

    def names_below(self, subfolder: str) -> list[str]:
        """Return the names of all that is in a subfolder, each after the folder that it is in.

        Raises OSError if it is nested deeper than a temporary folder of ours.
        """
        below = [f"{subfolder}/{name}" for name in self.names(subfolder)]
        for name in below:  # it grows meanwhile
            if self.is_subfolder(name):
                if name.count("/") - subfolder.count("/") > _MOST_LEVELS:
                    why = "it has folders in folders, as no attempt leaves; remove it yourself"
                    raise OSError(errno.ENOTEMPTY, why, str(self.path_of(subfolder)))
                below += [f"{name}/{inside}" for inside in self.names(name)]
        return below

    # Writing. ---------------------------------------------------------------------------------------------

    def _reach_to_write(self, name: str) -> tuple[_Handle, str]:
        """Reach a name of the folder's owner. Raises CannotWrite."""
        if self._writable.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no name that may be written in {self.path}")
        try:
            return self._reach(name)
        except BrokenShard as error:
            found = f"{error.found}, where files of the same name would be replaced"
            raise CannotWrite(path=error.path, found=found, expected="a folder in its place") from None
        except OSError as error:
            raise publishing.not_creatable(self.path_of(name), error) from None

    def make_folder(self) -> None:
        """Create the folder itself and its parents, if missing. Raises CannotWrite or ReadWriteError."""
        publishing.make_folder(self.path, parents=True)

    def make_subfolder(self, name: str) -> None:
        """Create a folder below this one, if missing, and sync its parent. Raises CannotWrite."""
        reached = ""
        for part in name.split("/"):
            reached = f"{reached}/{part}" if reached else part
            parent, last = self._reach_to_write(reached)
            try:
                os.mkdir(last, dir_fd=parent.fd)
            except FileExistsError:
                if self.is_subfolder(reached):
                    continue
                found = "a file or a link, where a folder is needed"
                raise CannotWrite(path=self.path_of(reached), found=found, expected="a folder") from None
            except OSError as error:
                raise publishing.not_creatable(self.path_of(reached), error) from None
            self._sync(parent, reached)

    def new_file(self, name: str) -> PublishedFile:
        """Begin a file that appears under its name when it is published, in a subfolder that exists."""
        parent, _ = self._reach_to_write(name)
        return PublishedFile(self.path_of(name), os.dup(parent.fd))

    def publish(self, name: str, content: bytes) -> None:
        """Replace a file's content atomically, and sync it and its folder."""

        def write() -> None:
            with self.new_file(name) as file:
                file.write(content)
                file.sync()
                file.rename_into_place()

        _until_published(write)
        self.sync(name.rpartition("/")[0])

    def publish_equal(self, name: str, content: bytes, *, what: str) -> None:
        """Write a file unless it exists. Raises Refused if the one that exists has another content."""

        def write() -> bool:
            with self.new_file(name) as file:
                file.write(content)
                file.sync()
                return file.publish_first()

        if _until_published(write):
            self.sync(name.rpartition("/")[0])
        else:
            self._refuse_other(name, content, what)

    def _refuse_other(self, name: str, content: bytes, what: str) -> None:
        """Raise Refused if a file has another content."""
        existing = None
        with contextlib.suppress(*files.NOT_THERE, BrokenShard):
            existing = self.read(name, max_bytes=len(content))
        if existing != content:
            expected = f"nothing, or {what}"
            advice = "move it away, or name another folder"
            raise Refused(
                path=self.path_of(name), found="another file, which stays", expected=expected, advice=advice
            )

    def publish_copy(self, name: str, source: Folder, stamp: FileStamp | None = None) -> FileStamp:
        """Publish a copy of the file of this name in another folder. Return the stamp of what was read.

        With another ``stamp`` than the given one nothing is published. The folder is not synced. Raises
        FileNotFoundError or NotADirectoryError if there is no such file, and errors of reading and writing.
        """

        def copy() -> FileStamp:
            with source.open(name) as file, self.new_file(name) as written:
                for start in range(0, file.num_bytes, files.WRITE_BYTES):
                    num_bytes = min(files.WRITE_BYTES, file.num_bytes - start)
                    written.write(memoryview(file.read(start, num_bytes)))
                copied = written.sync()
                if stamp is None or copied == stamp:
                    written.rename_into_place()
            return copied

        with files.errors_named(source.path_of(name)):
            return _until_published(copy)

    def publish_link(self, name: str, source: Folder) -> bool:
        """Make a name a hard link to the file of this name in another folder. Return whether it could.

        The folder is not synced. Raises BrokenShard if it is not a regular file, and CannotWrite.
        """
        parent, last = self._reach_to_write(name)
        temporary = publishing.temporary_name(Path(last)).name
        try:
            there, last_there = source._reach(name)
            os.link(last_there, temporary, src_dir_fd=there.fd, dst_dir_fd=parent.fd, follow_symlinks=False)
            status = os.stat(temporary, dir_fd=parent.fd, follow_symlinks=False)
            files.check_is_regular(source.path_of(name), status.st_mode)
            # It does nothing if both are links to the same file already.
            os.rename(temporary, last, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent.fd)
        return True

    def create(self, name: str, content: bytes = b"") -> None:
        """Create a small file that no other process has created. Raises FileExistsError or OSError."""
        parent, last = self._reach_to_write(name)
        handle = os.open(last, _CREATE | os.O_EXCL, 0o666, dir_fd=parent.fd)
        try:
            os.write(handle, content)
        finally:
            os.close(handle)

    def append(self, name: str, data: bytes, *, mode: int = 0o666) -> None:
        """Append to a file by a single write, and create it if it is missing. Raises OSError, CannotWrite."""
        parent, last = self._reach_to_write(name)
        handle = os.open(last, _CREATE | os.O_APPEND, mode, dir_fd=parent.fd)
        try:
            status = os.fstat(handle)
            files.check_is_regular(self.path_of(name), status.st_mode)
            if status.st_nlink > 1:
                found = "a file that has another name, too"
                raise CannotWrite(
                    path=self.path_of(name), found=found, expected="a file of this folder alone"
                )
            os.write(handle, data)
        finally:
            os.close(handle)

    def sync(self, subfolder: str = "") -> None:
        """Fsync the folder or one below it, so that its names survive a crash. Raises ReadWriteError."""
        try:
            handle = self._open_subfolder(subfolder) if subfolder else self._opened()
        except OSError as error:
            raise publishing.not_synced(self.path_of(subfolder), error) from None
        self._sync(handle, subfolder)

    def _sync(self, handle: _Handle, name: str) -> None:
        try:
            os.fsync(handle.fd)
        except OSError as error:
            raise publishing.not_synced(self.path_of(name), error) from None

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError, CannotWrite or OSError."""
        parent, last = self._reach_to_write(name)
        os.unlink(last, dir_fd=parent.fd)

    def remove_subfolder(self, name: str) -> None:
        """Remove an empty folder below this one. Raises OSError, also if it is not empty."""
        parent, last = self._reach_to_write(name)
        os.rmdir(last, dir_fd=parent.fd)

    # Temporaries. -----------------------------------------------------------------------------------------

    def publish_folder(self, name: str, contents: Mapping[str, bytes]) -> bool:
        """Publish a folder of files at once, unless a file or a folder that is not empty has its name.

        Returns whether the name was free.
        """
        with self.temporary_folder(name) as (temporary, path):
            unfinished = Folder(path, writable=re.compile("[^/]+"))
            for file_name, content in contents.items():
                with unfinished.new_file(file_name) as file:
                    file.write(content)
                    file.sync()
                    file.rename_into_place()
            unfinished.sync()
            parent, last = self._reach_to_write(name)
            try:
                # It also replaces an empty folder.
                os.rename(temporary, last, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
            except OSError as error:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                    raise publishing.not_creatable(self.path_of(name), error) from None
                return False
            self._sync(parent, name)
        return True

    @contextlib.contextmanager
    def temporary_folder(self, name: str) -> Iterator[tuple[str, Path]]:
        """Create a temporary folder for ``name``, and remove it at the end of the block.

        Yields its name, and a path by which no link leads elsewhere.
        """
        parent, last = self._reach_to_write(name)
        temporary = publishing.temporary_name(Path(last)).name
        path = Path(f"/proc/self/fd/{parent.fd}", temporary)
        try:
            # Within this block, because a signal may come while mkdir runs.
            try:
                os.mkdir(temporary, dir_fd=parent.fd)
            except OSError as error:
                raise publishing.not_creatable(self.path_of(name), error) from None
            yield temporary, path
        finally:
            subfolder, _, _ = name.rpartition("/")
            with contextlib.suppress(OSError, BrokenShard, ReadWriteError):
                self.remove_temporary(f"{subfolder}/{temporary}" if subfolder else temporary)

    def temporaries(self, subfolders: Collection[str] = ()) -> list[str]:
        """Return the names of temporary files and folders here and in some subfolders.

        A subfolder that is a link is left out.
        """
        listed = [name for name in self.names() if publishing.TEMPORARY_NAME.fullmatch(name)]
        for subfolder in subfolders:
            with contextlib.suppress(BrokenShard):
                inside = filter(publishing.TEMPORARY_NAME.fullmatch, self.names(subfolder))
                listed += [f"{subfolder}/{name}" for name in inside]
        return listed

    def remove_temporaries(
        self, *stems: str, older_than_s: float = 0, subfolders: Collection[str] = ()
    ) -> None:
        """Remove temporary files of earlier attempts, by their stems (default: all). Errors are ignored.

        Nobody can tell whether such an attempt still runs. If it does, it fails without its temporary file.
        """
        prefixes = tuple(f".{stem}." for stem in stems) or (".",)
        temporaries: list[str] = []
        with contextlib.suppress(ReadWriteError):  # a later attempt tries again
            temporaries = self.temporaries(subfolders)
        for name in temporaries:
            if name.rpartition("/")[2].startswith(prefixes):
                with contextlib.suppress(OSError, ReadWriteError, BrokenShard):
                    status = self.status_of(name)
                    if status is not None and time.time() - status.st_mtime >= older_than_s:
                        self.remove_temporary(name)

    def remove_temporary(self, name: str) -> None:
        """Remove a temporary file, or a temporary folder with all that is in it.

        Raises OSError, BrokenShard, ReadWriteError.
        """
        parent, last = self._reach(name)
        if publishing.TEMPORARY_NAME.fullmatch(last) is None:
            raise ValueError(f"{name!r} is no temporary name")
        if self.is_subfolder(name):
            # Files before the folders that they are in.
            for inside in reversed(self.names_below(name)):
                inner, inner_last = self._reach(inside)
                remove = os.rmdir if self.is_subfolder(inside) else os.unlink
                with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                    remove(inner_last, dir_fd=inner.fd)
            os.rmdir(last, dir_fd=parent.fd)
        else:
            os.unlink(last, dir_fd=parent.fd)


def _until_published(publish: Callable[[], _T]) -> _T:
    """Publish a file again as long as other attempts, which are done, remove its temporary file."""
    for _ in range(_MOST_ATTEMPTS - 1):
        with contextlib.suppress(publishing.TemporaryRemoved):
            return publish()
    return publish()


class _Subfolder(Folder):
    """A folder below another one. Its path is never followed: a stale descriptor is reached anew."""

    def __init__(self, path: Path, reach: Callable[[], _Handle]) -> None:
        super().__init__(path, writable=re.compile(r"(?!)"))
        self._reach_it = reach

    def _opened(self) -> _Handle:
        if self._handle is None:
            self._handle = self._reach_it()
        return self._handle
