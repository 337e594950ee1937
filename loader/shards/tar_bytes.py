"""A tar's bytes by slices, as a map of it would give them, but read: a failing page of a map is a SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from preprocess.shard_format import BrokenShard
from preprocess.shard_format.regular_files import close_read, open_regular

_LEAST_BYTES, _MOST_BYTES = 4 << 10, 1 << 20


class TarBytes:
    """Read-only; use it in ``with``. ``tar[first:end]`` is ``bytes``, shorter at the file's end.

    It keeps the last block that it read, which grows to 1 MiB while slices follow each other closely and
    is 4 KiB where they are far apart, so that neither many small members nor a few large ones cost more
    than they must: 0.3 us a slice. Raises OSError, and BrokenShard where it is no regular file or became
    shorter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = open_regular(path)
        try:
            self._num_bytes = os.fstat(self._handle).st_size
        except BaseException:
            close_read(self._handle)
            raise
        self._block = b""
        self._first = self._end = 0  # of the block
        self._ahead_bytes = _LEAST_BYTES

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> bytes:
        first, end = part.start, min(part.stop, self._num_bytes)
        if first < self._first or end > self._end:
            self._read(first, end)
        return self._block[first - self._first : end - self._first]

    def __enter__(self) -> TarBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_read(self._handle)

    def _read(self, first: int, end: int) -> None:
        is_near = self._first <= first < self._end + self._ahead_bytes
        self._ahead_bytes = min(4 * self._ahead_bytes, _MOST_BYTES) if is_near else _LEAST_BYTES
        wanted = min(max(end - first, self._ahead_bytes), self._num_bytes - first)
        parts, done = [], 0
        while done < wanted:
            parts.append(self._read_some(wanted - done, first + done))
            done += len(parts[-1])
        self._block = parts[0] if len(parts) == 1 else b"".join(parts)
        self._first, self._end = first, first + done

    def _read_some(self, num_bytes: int, offset: int) -> bytes:
        try:
            part = os.pread(self._handle, num_bytes, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if not part:
            raise BrokenShard(f"{self._path} ended at byte {offset} while it was read; was it replaced?")
        return part
