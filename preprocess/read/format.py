"""What every format of raw input shares: an open file, the part of it that a shard reads, and its records.

A file is opened once and read by position, and is looked at again at the end: one that was written to
meanwhile is refused. Its stamp at planning is its size, its mtime and a hash of 3 x 64 KiB.

A part is a range of the file's own bytes, whatever the format: so each byte of the input is in exactly one
shard. Where a part may begin is the format's to say: at a line, a row group, a frame; or at byte 0 alone.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.errors import BadInput, BrokenShard, NotFound, ReadWriteError, Refused
from shardprep.files import ReadFile, with_retries
from shardprep.format.plan import ByteRange, PlanOptions

# A longer document is left out by name. The same on all machines, so that all leave out the same documents.
MOST_DOCUMENT_BYTES = 64 << 20
# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32
# What says that there is no such input; whatever else opening ends with may go away.
_NO_SUCH_INPUT = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
    errno.ENXIO, errno.ENODEV,
})  # fmt: skip
_SAMPLE_BYTES = 64 << 10
HASH_BYTES = 1 << 19  # read at once where bytes are only hashed, or only a line's end is looked for


class Stamp(NamedTuple):
    """What the file system says of a file: a write moves one of them, and so does a touch or a new link."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class OpenInput:
    """A regular file, open for reading. It is closed when nobody holds it any more: threads share it.

    All reads go to the one descriptor, so that a file put in its place meanwhile is never mixed with it.
    Opening and reading are tried again where a file system may come back; raises ReadWriteError where it does
    not, NotFound where the file is not there, may not be read, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = with_retries(f"input {path} cannot be opened", functools.partial(ReadFile, path))
        except BrokenShard as error:
            message = f"input {error}, or move it away"
            raise NotFound(message, path=path, found=error.found, expected=error.expected) from None
        except ReadWriteError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _NO_SUCH_INPUT:
                raise
            reason = cause.strerror
            if isinstance(cause, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114 - it never raises
                reason = "it is a link to nothing"
            message = f"input {path} cannot be opened: {reason}; bring it back, or move it away"
            raise NotFound(message, path=path, found=reason) from None
        self.stamp = self._status()

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            file.close()

    def expect_scattered_reads(self) -> None:
        """Tell the system not to read ahead, which would read three times as much for nothing."""
        self._file.expect_scattered_reads()

    def mapped(self) -> mmap.mmap:
        """Return the file as memory. Raises ReadWriteError."""
        return with_retries(f"input {self.path} cannot be mapped", self._file.mapped)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), fewer where the file ends before. Raises ReadWriteError."""
        data, read = b"", self._file.read_beginning
        while (at := start + len(data)) < end:
            piece = with_retries(
                f"input {self.path} cannot be read at byte {at}", functools.partial(read, at, end - at)
            )
            if not piece:
                break
            data += piece  # most often all of it: nothing is copied then
        return data

    def read_all(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError, also where the file ends before."""
        data = self.read(start, end)
        if len(data) < end - start:
            raise ReadWriteError(
                f"input {self.path} ended at byte {start + len(data)}, the plan says {end}; bring the whole "
                "file back, or plan anew into a new folder"
            )
        return data

    def check_unchanged(self) -> None:
        """That nobody wrote to the file since it was opened. Raises Refused, or ReadWriteError."""
        found = self._status()
        if found != self.stamp:
            expected = (
                f"{self.stamp.num_bytes} bytes at {self.stamp.mtime_ns}; nothing is published: once nobody "
                "writes to it, run this again, or plan anew into a new folder if its text is another"
            )
            changed = (
                f"size, mtime or ctime changed while it was read: {found.num_bytes} bytes at {found.mtime_ns}"
            )
            raise Refused(path=self.path, found=changed, expected=expected)

    def _status(self) -> Stamp:
        try:
            status = self._file.status()
        except OSError as error:
            raise ReadWriteError(f"input {self.path} cannot be read: {error.strerror}") from None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# What git-lfs and git-annex leave in the place of a file that was not fetched, and what fetches it.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
    b"/annex/objects/": "git annex get .",
}
MOST_POINTER_BYTES = 1024


def what_fetches(data: bytes) -> str | None:
    """Return the command that brings the content of which a whole file's ``data`` is a pointer, else None."""
    for beginning, command in _POINTERS.items():
        if data.startswith(beginning) and len(data) <= MOST_POINTER_BYTES:
            return command
    return None


def check_is_fetched(file: OpenInput) -> None:
    """Raise BadInput where a file is only the pointer that a clone of a repository has in its place."""
    size = file.stamp.num_bytes
    if size <= MOST_POINTER_BYTES and (command := what_fetches(file.read(0, size))) is not None:
        raise BadInput(
            f"input {file.path} is a pointer to a file that was not fetched, expected the file itself; run "
            f"in its repository: {command}"
        )


def unreadable(file: OpenInput, why: str) -> BadInput:
    """Return the error of an input that cannot be read as what its name says."""
    return BadInput(
        f"input {file.path} {why}; bring a whole file, or move it away and plan anew",
        path=file.path,
        expected="a whole file",
    )


def open_part(part: ByteRange) -> OpenInput:
    """Open the file of a part. Raises NotFound where it is gone, Refused where it is not as it was planned.

    Its sample is read again only where its mtime differs. ``plan --hash_inputs`` sees other changes.
    """
    if part.planned is None:
        return OpenInput(part.path)
    try:
        file = OpenInput(part.path)
    except NotFound as error:
        error.advise("if the raw folder moved, pass --input_dir")
        error.remedy = "--input_dir"  # which the advice says
        raise
    planned, size = part.planned, file.stamp.num_bytes
    if (size, file.stamp.mtime_ns) == (planned.num_bytes, planned.mtime_ns):
        return file
    found = sample_sha256(file)
    if (size, found) != (planned.num_bytes, planned.sha256):
        expected = (
            f"{planned.num_bytes} with {planned.sha256[:12]} as planned; bring the file back, or plan anew "
            "into a new folder"
        )
        raise Refused(path=part.path, found=f"{size} bytes with sample {found[:12]}", expected=expected)
    return file


class RangeReader:
    """Reads a range from its file, for one thread; hashes, in order, each byte that it meets first."""

    def __init__(self, part: ByteRange, digest: hashlib._Hash | None) -> None:
        self.file = open_part(part)
        self.part = part
        self._digest = digest
        self._num_hashed = part.start  # byte up to which the range is hashed

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._num_hashed:
            self._digest.update(memoryview(data)[self._num_hashed - start :])
            self._num_hashed = end
        return data

    def hash_rest(self) -> None:
        """Hash what was not read, if the range is hashed at all."""
        while self._digest is not None and self._num_hashed < self.part.end:
            self.read(self._num_hashed, min(self._num_hashed + HASH_BYTES, self.part.end))


def sample_sha256(file: OpenInput) -> str:
    """sha256, in hex, of the first, middle and last 64 KiB, or of all. Raises ReadWriteError."""
    size = file.stamp.num_bytes
    if size <= 3 * _SAMPLE_BYTES:
        return hashlib.sha256(file.read(0, size)).hexdigest()
    starts = (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES)
    return hashlib.sha256(b"".join(file.read(start, start + _SAMPLE_BYTES) for start in starts)).hexdigest()


class Inspected(NamedTuple):
    """What planning wants to know of a file."""

    text_bytes: int  # about; shards are made even by it
    is_whole: bool  # no part of it begins inside it


class Start(NamedTuple):
    """A place where a part of a file may begin."""

    byte: int  # of the file
    text_byte: int = 0  # of the text, where that is compressed; else 0


# Stands between two texts that are joined. None of its beginnings is an end of it, so it cannot overlap
# itself. The quotes are those of two strings of JSON, which are joined as they are.
BETWEEN = b'"\0\1document\2"'


class Texts(Sequence[bytes]):
    """Texts of consecutive documents, as UTF-8: joined, and one by one where somebody asks for that.

    Args:
        each: the texts; or instead
        joined: all texts in one buffer, with BETWEEN between two of them, and in none of them.
        num_texts: in ``joined``.
        characters: any string that has all their characters beyond ASCII, if there is one already.
    """

    def __init__(
        self,
        each: list[bytes] | None = None,
        *,
        joined: bytes = b"",
        num_texts: int = 0,
        characters: str | None = None,
    ) -> None:
        self.joined, self.num_texts = joined, num_texts
        if each is not None:
            self.each, self.joined, self.num_texts = each, BETWEEN.join(each), len(each)
        self.num_bytes = len(self.joined) - max(0, self.num_texts - 1) * len(BETWEEN)  # of the texts alone
        self.characters = characters

    @functools.cached_property
    def each(self) -> list[bytes]:
        return self.joined.split(BETWEEN) if self.num_texts else []

    def only(self, numbers: Iterable[int]) -> Texts:
        """Return some of the texts."""
        each = self.each
        return Texts([each[number] for number in numbers])

    def __len__(self) -> int:
        return self.num_texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.each)

    def __getitem__(self, number: Any) -> Any:
        return self.each[number]


@dataclass(frozen=True, kw_only=True)
class Records:
    """Consecutive lines or rows of a file: what each says, and where it lies."""

    texts: Texts | Sequence[bytes | UnusableText]  # as UTF-8; of a list an empty one is no document
    starts: npt.NDArray[np.int64]  # int64[n]: byte of the file's text, or row, of each
    sizes: npt.NDArray[np.int64]  # int64[n]: bytes of each, or 1 for a row
    num_bytes: int  # of the file, that these account for
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what each tells beside its text


class Format(Protocol):
    """One format of input files. It keeps nothing of a file; every method may run in several threads."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Weigh a file for planning, with few reads. Raises BadInput where it cannot be of this format."""

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], options: PlanOptions
    ) -> list[Start | None]:
        """For each (byte, end), ascending, the first place at or behind ``byte`` where a part may begin.

        None where there is none before ``end``; the file's size where none follows in the file.
        Raises BadInput.
        """

    def read(
        self, reader: RangeReader, options: PlanOptions, fields: TextFields, batch_bytes: int
    ) -> Iterator[Records]:
        """Yield the records of a part in order, about ``batch_bytes`` of text at a time.

        Their ``num_bytes`` sum up to the part's bytes. Raises BadInput, ReadWriteError.
        """


def starts_among(
    places: Iterable[Start], file: OpenInput, stretches: Sequence[tuple[int, int]]
) -> list[Start | None]:
    """Answer ``Format.starts`` for a file with these places, ascending, behind its beginning.

    Without any it is a file that is only read whole.
    """
    end_of_file, remaining, place = Start(file.stamp.num_bytes), iter(places), Start(0)
    found: list[Start | None] = []
    for byte, end in stretches:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        found.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return found


def no_records(num_bytes: int) -> Records:
    """Account for bytes of a file in which no record begins."""
    none = np.empty(0, np.int64)
    return Records(texts=[], starts=none, sizes=none, num_bytes=num_bytes)


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {MOST_DOCUMENT_BYTES} bytes")


def texts_of(values: Iterable[str | UnusableText]) -> list[bytes | UnusableText]:
    """Return the texts of records as UTF-8, none of white space alone; all others stay as they are."""
    found: list[bytes | UnusableText] = []
    for value in values:
        if isinstance(value, UnusableText):
            found.append(value)
            continue
        text = b"" if value.isspace() else value.encode()
        found.append(text if len(text) <= MOST_DOCUMENT_BYTES else too_long("its text"))
    return found
