"""The batches of a rank, in order: worker processes read chunks, and the training process collates them.

A chunk is a few ticks of a worker's slots, so a worker sends 1 MiB at a time through its pipe, not a batch.
Nothing lies in shared memory: a container's /dev/shm may be small. Workers share the slots of the rank: if
every worker took each n-th tick instead, all of them together would read everything n times.

Slurm, torchrun and a terminal send a signal to all processes of a job. A worker that died of it would end the
process that trains, by an error of torch's DataLoader, before that one has saved its checkpoint. So workers
block these signals, and end with the process that trains.
"""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from loader.batches import LoaderMetrics, StepBatches
from loader.chunks import Chunk
from loader.order import share
from loader.run import Position, Run, RunReader
from shardprep.errors import ReadWriteError, ShardprepError, UsageError
from shardprep.signals import stop_signals_wait

CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us beside its bytes
MAX_CHUNK_TICKS = 256
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 1.0  # whether the process that trains is still there; 50 us of CPU each time


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

    def __iter__(self) -> Iterator[Chunk | ShardprepError]:
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
            # A thread of torch's queue sends a chunk later, when the next window may lie where it lay.
            yield from (chunk.joined() for chunk in chunks)
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


class BatchStream:
    """A rank's batches, step by step; with workers a few chunks are read ahead. Waits are counted in
    ``metrics``."""

    def __init__(
        self,
        chunks: ChunkDataset,
        step_batches: StepBatches,
        metrics: LoaderMetrics,
        workers: Mapping[str, Any],
    ) -> None:
        self._chunks = chunks
        self._step_batches = step_batches
        self._metrics = metrics
        self._num_workers: int = workers.get("num_workers", 0)
        # Items are passed on as they are: torch would turn what the workers send into something else.
        self._loader: DataLoader[Any] = DataLoader(
            chunks, batch_size=None, collate_fn=_as_it_is, worker_init_fn=_follow_main_process, **workers
        )
        self._arriving: Any = None  # the newest iterator of that
        self._stands_at: Position | None = None  # if that is the beginning of an epoch

    def steps(self, start: Position) -> Iterator[list[tuple[Any, tuple[int, int]]]]:
        """Yield the steps of an epoch from a position on: each batch with what ``metrics`` count of it."""
        run = self._chunks.run
        self._send_workers_to(start)
        num_done, first_batch = divmod(start.num_micro, run.batches_per_tick)
        epoch, tick = run.epoch_and_tick(start)
        ticks = self._ticks(tick, first_batch)
        end = run.first_step(epoch + 1)
        for step in range(start.step, end):
            batches = next(ticks)
            for _ in range(1, run.ticks_in_step(step) - num_done):
                batches += next(ticks)
            num_done = 0
            yield batches
        self._stands_at = Position(end)

    def _ticks(self, tick: int, first_batch: int) -> Iterator[list[tuple[Any, tuple[int, int]]]]:
        """Yield the batches of each tick of an epoch, from a batch of one tick on."""
        order, slots, of_tick = self._chunks.run.order, self._chunks.slots, self._step_batches.of_tick
        while True:
            chunk = self._next_chunk()
            for place in range(chunk.num_ticks):
                fillers = order.is_filler(tick, slots) if order.keeps_tail else None
                yield list(of_tick(chunk, place, first_batch, fillers))
                tick, first_batch = tick + 1, 0
            del chunk  # it may hold its window; the next one is read now

    def end(self) -> None:
        """End the workers and close the files. The next steps start them again."""
        arriving, self._arriving, self._stands_at = self._arriving, None, None
        self._loader._iterator = None  # noqa: SLF001  torch has no public way to end persistent workers
        if hasattr(arriving, "_shutdown_workers"):
            with contextlib.suppress(RuntimeError):  # of a worker that ended by itself: its own error is told
                arriving._shutdown_workers()  # noqa: SLF001
        self._chunks.close()

    def _send_workers_to(self, start: Position) -> None:
        """Make the next chunks those from a position on. Persistent workers may stand there already."""
        if any(not worker.is_alive() for worker in getattr(self._arriving, "_workers", ())):  # as by Ctrl-C
            self.end()
        if self._stands_at != start:
            self._chunks.position[:] = torch.tensor(self._chunks.run.epoch_and_tick(start))
            if self._num_workers and self._loader._iterator is None:  # noqa: SLF001  they are started now
                self._start_workers()
            else:
                self._arriving = iter(self._loader)
        self._stands_at = None

    def _start_workers(self) -> None:
        context = self._loader.multiprocessing_context or multiprocessing.get_context()
        spawns = context.get_start_method() != "fork"
        if spawns:
            _check_main_guard()
        try:
            self._chunks.position.share_memory_()
            # They begin with the signals blocked, while they import, too.
            with stop_signals_wait(_SIGNALS, spawns=spawns):
                self._arriving = iter(self._loader)
        except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise ReadWriteError(
                f"workers cannot be started: {error}. Raise what is full (ulimit -n, ulimit -u, memory), or "
                "pass num_workers=0"
            ) from error

    def _next_chunk(self) -> Chunk:
        """Return the next chunk of every worker as one, in the order of their slots."""
        began = time.perf_counter()
        chunks = [next(self._arriving) for _ in range(max(self._num_workers, 1))]
        for chunk in chunks:
            if isinstance(chunk, ShardprepError):  # of a worker
                raise chunk
        self._metrics.wait_s += time.perf_counter() - began
        chunk = Chunk.stacked(chunks)
        self._metrics.num_cut_tokens += chunk.num_cut
        return chunk


def _as_it_is(item: Any) -> Any:
    return item


def _follow_main_process(_: int) -> None:
    """Block the signals in a worker, and end it when the main process ends. torch does not look for
    it while a worker waits for room in a pipe, nor under forkserver."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_with_main_process, args=(os.getppid(),), daemon=True).start()


def _end_with_main_process(parent_pid: int) -> None:
    """End this process once the main one is gone or sends SIGTERM, as torch does to a worker that hangs."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == parent_pid and main.is_alive():
        received = signal.sigtimedwait((signal.SIGTERM,), _LOOK_EVERY_S)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)


def _check_main_guard() -> None:
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
