"""Open the input files, read and hash their bytes, and see that they are those that were planned.

A file is opened once and read by position. If it was written to in the meantime, it is refused at the end.
Planning records its size, its mtime and a hash of 3 x 64 KiB.
"""

from __future__ import annotations

import codecs
import errno
import functools
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardprep.errors import BadInput, BrokenShard, NotFound, ReadWriteError, Refused
from shardprep.files import ReadFile, with_retries
from shardprep.format.plan import ByteRange

# Errors that mean that there is no such input. Any other error of opening a file may be temporary.
_NO_SUCH_INPUT = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
    errno.ENXIO, errno.ENODEV,
})  # fmt: skip
RESTORE = "restore the file, or plan into a new folder"
_SAMPLE_BYTES = 64 << 10
_HASHED_BYTES = 512 << 10  # read at once, if bytes are only hashed


class Stamp(NamedTuple):
    """Size and times of a file. A write changes one of them, but so does ``touch`` or a new hard link."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    def __str__(self) -> str:
        mtime, ctime = (np.datetime64(time_ns, "ns") for time_ns in self[1:])
        return f"{self.num_bytes} bytes, mtime {mtime}Z, ctime {ctime}Z"


class OpenInput:
    """A regular file that is open for reading; threads may share it.

    All reads use one descriptor, so bytes of a file that replaces it are never mixed in. After a temporary
    error a read is tried again. Raises NotFound if there is no such regular file, and ReadWriteError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = with_retries(f"input {path} cannot be opened", functools.partial(ReadFile, path))
        except (BrokenShard, ReadWriteError) as error:
            cause = error.__cause__
            found = error.found
            if isinstance(cause, OSError) and cause.errno in _NO_SUCH_INPUT:
                found = cause.strerror
            if found is None:
                raise
            if isinstance(cause, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114 - it never raises
                found = "a broken link"
            expected = "a regular file that can be read"
            advice = "restore it, or move it away"
            raise NotFound(path=path, found=found, expected=expected, advice=advice) from None
        self.stamp = _stamp_of(self.file.first_status)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), fewer if the file ends before. Raises ReadWriteError."""
        data = b""
        read = self.file.read_beginning
        while (at := start + len(data)) < end:
            what = f"input {self.path} cannot be read at byte {at}"
            piece = with_retries(what, functools.partial(read, at, end - at))
            if not piece:
                break
            data += piece  # usually the whole range, in which case nothing is copied
        return data

    def read_all(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError, also if the file ends before."""
        data = self.read(start, end)
        if len(data) < end - start:
            what = f"input {self.path} ended at byte {start + len(data)}, expected {end} or more bytes"
            raise ReadWriteError(f"{what}; {RESTORE}")
        return data

    def check_unchanged(self) -> None:
        """Check that the file did not change since it was opened. Raises Refused, or ReadWriteError."""
        try:
            now = _stamp_of(self.file.status())
        except OSError as error:
            raise ReadWriteError(f"input {self.path} cannot be read: {error.strerror}") from None
        if now != self.stamp:
            changed = f"a file that changed while it was read: {now}"
            advice = "run this again once it no longer changes, or plan into a new folder"
            raise Refused(path=self.path, found=changed, expected=self.stamp, advice=advice)


def _stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# Beginnings of the pointers that git-lfs, git-annex and git-xet leave in place of a file, and the command to
# fetch it. The first version of git-lfs had other names.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git lfs pull",
    b"version https://hawser.github.com/spec/": "git lfs pull",
    b"version http://git-media.io/v/": "git lfs pull",
    b"/annex/objects/": "git annex get .",
    b".git/annex/objects/": "git annex get .",  # a link that is a file, where git makes no links
    b"# xet version ": "git xet materialize .",
}

MOST_POINTER_BYTES = 1024


def fetch_command(data: bytes) -> str | None:
    """Return the command that fetches the file, if ``data`` is only a pointer to it, or else None.

    Git may have changed the line ends of a pointer, and an editor may have put a byte order mark before it.
    """
    if len(data) > MOST_POINTER_BYTES:
        return None
    text = data.removeprefix(codecs.BOM_UTF8).lstrip()
    while text.startswith(b"../"):
        text = text[3:]
    for beginning, command in _POINTERS.items():
        if text.startswith(beginning):
            return command
    return None


def unreadable(file: OpenInput, why: str) -> BadInput:
    """Build the error for an input that cannot be read as the format of its name."""
    message = f"input {file.path} {why}; replace it with an intact file, or move it away and plan again"
    return BadInput(message, path=file.path, expected="an intact file")


class RangeReader:
    """Reads a range of bytes of a file, in one thread, and hashes each byte once, in order.

    Raises NotFound if the file is gone, Refused if it is not the planned one. The sample is hashed again only
    if size or mtime differ. To notice other changes, too, plan with ``--hash_inputs``.
    """

    def __init__(self, byte_range: ByteRange, digest: hashlib._Hash | None) -> None:
        self.byte_range = byte_range
        self._digest = digest
        self._hashed_end = byte_range.start  # all bytes of the range before this one are hashed
        planned = byte_range.planned
        try:
            self.file = OpenInput(byte_range.path)
        except NotFound as error:
            if planned is not None:
                error.advise("if the raw folder moved, pass --input_dir")
                error.remedy = "--input_dir"
            raise
        size = self.file.stamp.num_bytes
        if planned is None or (size, self.file.stamp.mtime_ns) == (planned.num_bytes, planned.mtime_ns):
            return
        found = sample_sha256(self.file)
        if (size, found) != (planned.num_bytes, planned.sha256):
            sampled = f"{size} bytes with sample {found[:12]}"
            expected = f"{planned.num_bytes} with {planned.sha256[:12]} as planned"
            raise Refused(path=byte_range.path, found=sampled, expected=expected, advice=RESTORE)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._hashed_end:
            self._digest.update(memoryview(data)[self._hashed_end - start :])
            self._hashed_end = end
        return data

    def hash_rest(self) -> None:
        """Read and hash the rest of the range, unless there is no digest."""
        while self._digest is not None and self._hashed_end < self.byte_range.end:
            self.read(self._hashed_end, min(self._hashed_end + _HASHED_BYTES, self.byte_range.end))


def samples_of(file: OpenInput) -> list[bytes]:
    """Return the first, middle and last 64 KiB of a file, or all of a small one. Raises ReadWriteError."""
    size = file.stamp.num_bytes
    if size <= 3 * _SAMPLE_BYTES:
        return [file.read(0, size)]
    starts = (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES)
    return [file.read(start, start + _SAMPLE_BYTES) for start in starts]


def sha256_of_samples(samples: list[bytes]) -> str:
    """Return the hash of a file's samples that a plan has."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample)
    return digest.hexdigest()


def sample_sha256(file: OpenInput) -> str:
    """Return the sha256 of the first, middle and last 64 KiB, or of a small file. Raises ReadWriteError."""
    return sha256_of_samples(samples_of(file))
