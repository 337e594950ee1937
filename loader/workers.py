"""What a worker process does: it reads its slots and sends chunks.

A chunk is a few ticks of a worker's slots as one compact tensor, so a worker sends 1 MiB at a time, not a
batch. Workers share the slots of the rank: if every worker took each n-th tick instead, all of them together
would read everything n times.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import resource
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.chunks import Chunk
from loader.order import share
from loader.rounds import RunReader
from loader.run import Run
from shardprep.errors import ReadWriteError, ShardprepError, UsageError

CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us whatever its size
MAX_CHUNK_TICKS = 256


class ChunkDataset(IterableDataset[Any]):
    """Chunks of this rank's slots from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and tick in it, shared with the workers. Items are a chunk of each worker
    in turn. Each process keeps its reader until ``close``: opening shards anew costs more than reading a
    window.
    """

    def __init__(self, run: Run, slots: range, *, endless: bool) -> None:
        self.run = run
        self.slots = slots
        self.endless = endless
        self.position = torch.zeros(2, dtype=torch.int64)
        self._reader: RunReader | None = None
        self._close_reader: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[Shared | Chunk | ShardprepError]:
        worker = get_worker_info()
        if self._reader is None:
            slots = self.slots if worker is None else share(self.slots, worker.id, worker.num_workers)
            self._reader = RunReader(self.run, slots)
            self._close_reader = weakref.finalize(self, self._reader.close)
        epoch, tick = self.position.tolist()
        chunks = self._reader.chunks(epoch, tick, self._chunk_ticks(), endless=self.endless)
        if worker is None:
            yield from chunks
            return
        try:
            yield from (Shared(chunk.pack()) for chunk in chunks)
        except ShardprepError as error:
            # Raised here it would lose its fields: torch raises a new error of the traceback's text.
            yield error

    def close(self) -> None:
        """Close the files that this process has open. The next ``iter`` opens them again."""
        if self._close_reader is not None:
            self._close_reader()
        self._reader = self._close_reader = None

    def _chunk_ticks(self) -> int:
        """Choose the ticks of a chunk, from what all workers know alike: their chunks must agree. Rows that
        are not sent take no memory until their tick, see Ragged."""
        worker = get_worker_info()
        row_tokens = self.run.row_tokens
        if worker is None and row_tokens:
            return MAX_CHUNK_TICKS
        slots = -(-len(self.slots) // (worker.num_workers if worker else 1))
        longest = max(samples.mean_tokens for samples in self.run.samples)
        tick_bytes = 4 * slots * self.run.order.group * (row_tokens or longest)
        return max(1, min(MAX_CHUNK_TICKS, int(CHUNK_BYTES // tick_bytes)))


class Shared:
    """A tensor on its way from a worker: the training process receives the tensor, in shared memory.

    torch would share it in a thread of its queue, which drops what it cannot share, and the training process
    would wait for it for ever. Raises ReadWriteError here, which torch raises in the training process.
    """

    def __init__(self, packed: torch.Tensor) -> None:
        try:
            self._pickled = bytes(ForkingPickler.dumps(packed))
        except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise cannot_share(error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._pickled,)


def _received(pickled: bytes) -> torch.Tensor:
    """Return what a worker shared. Runs where torch takes it from the queue, as the worker may end then."""
    try:
        packed: torch.Tensor = pickle.loads(pickled)  # noqa: S301  of our own process
    except (OSError, EOFError) as error:
        raise cannot_share(error) from error
    return packed


def check_main_guard() -> None:
    """Raise UsageError where each worker would run this loop again: spawn and forkserver import the script.

    Call it in the training process. Else a worker would fail, and where all that it is given is more than a
    pipe holds, the training process would wait for it for ever.
    """
    frame: Any = sys._getframe()  # noqa: SLF001
    while frame is not None and (
        frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__"
    ):
        frame = frame.f_back
    path = "" if frame is None else frame.f_globals.get("__file__") or ""
    if not os.path.isfile(path):  # noqa: PTH113  typed in, or of a thread: it is imported by nobody
        return
    for statement in ast.parse(Path(path).read_bytes()).body:
        if isinstance(statement, ast.If) and "'__name__'" in ast.dump(statement.test):
            return
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            raise UsageError(
                f"line {frame.f_lineno} of {path} starts workers by spawn or forkserver, and each of them "
                'would import this script and do so again; put it below `if __name__ == "__main__":`, or '
                "pass num_workers=0",
                path=path,
                remedy='if __name__ == "__main__":',
            )


def cannot_share(error: BaseException) -> ReadWriteError:
    """Return the error to raise, which says how much there is of what this takes."""
    most_files, most_bytes = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    )
    free = total = 0
    num_files = most_files  # to look takes a file, too
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage("/dev/shm")  # noqa: S108  where torch shares memory
        num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    reason = str(error) or "a worker ended before it had sent one (its last line says why)"
    size = (
        "" if most_bytes == resource.RLIM_INFINITY else f"; a file can have {most_bytes:,} bytes (ulimit -f)"
    )
    return ReadWriteError(
        f"workers and the training process cannot share batches: {reason}. /dev/shm has {free / 1e6:,.1f} of "
        f"{total / 1e6:,.1f} MB free; process {os.getpid()} has {num_files} of {most_files} files open "
        f"(ulimit -n){size}. Raise what is full (--shm-size of a container, ulimit), pass a smaller "
        "num_workers or prefetch_factor, or num_workers=0, which needs none of these"
    )
