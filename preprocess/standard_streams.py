"""Standard output and error that outlast their reader: ``| head`` may go away, a log's pipe may close.

What nobody can read any more is dropped, the work goes on, and the exit code is the work's own. Without
it a worker would lose its shard to a line of its log, and ``verify | head`` would end in a traceback.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from preprocess.shard_format import ReadWriteError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def outlast_readers() -> None:
    """From now on this process's streams drop what cannot be read; what was put in their place is left alone.

    Of standard error every failure is dropped, a closed terminal or a full disk, too: a log is not worth
    the work. Of standard output only a closed pipe is: what was asked for must not be missing unseen, so
    another failure raises ReadWriteError, once. A command flushes it before its exit code is settled.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _outlasting(sys.stdout, BrokenPipeError)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _outlasting(sys.stderr, OSError)


def output_is_read() -> bool:
    """Whether standard output has a reader; for a command that would go on printing."""
    poll = select.poll()
    poll.register(1, 0)  # errors are told unasked
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _Outlasting(io.FileIO):
    def __init__(self, descriptor: int, dropped: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._dropped = dropped

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except self._dropped:
            return memoryview(data).nbytes
        except OSError as error:
            self._dropped = OSError  # once is enough: what is left in a buffer is written again at the end
            raise ReadWriteError(f"standard output cannot be written: {error.strerror}") from None


def _outlasting(stream: TextIO | None, dropped: type[OSError]) -> TextIO:
    """``stream`` anew over its descriptor; the null device for one that was closed before the start."""
    if stream is None:
        return open(os.devnull, "w")  # noqa: PTH123 - a TextIO, which lives as long as the process
    raw = _Outlasting(stream.fileno(), dropped)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering),
        write_through=is_unbuffered,
    )
