"""The batches of a rank, in order: starts the workers, receives their chunks and collates.

Slurm, torchrun and a terminal send a signal to all processes of a job. A worker that died of it would end the
process that trains, by an error of torch's DataLoader, before that one has saved its checkpoint. So workers
block these signals, and end with the process that trains.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from loader.batches import LoaderMetrics, StepBatches
from loader.chunks import Chunk
from loader.run import Position
from loader.workers import ChunkDataset, cannot_share, check_main_guard
from shardprep.errors import ReadWriteError, ShardprepError, UsageError
from shardprep.signals import stop_signals_wait

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 1.0  # whether the process that trains is still there; 50 us of CPU each time
_MOST_PATH_BYTES = 107  # of a Unix socket
_SOCKET_BYTES = len("/pymp-12345678/listener-12345678")


class BatchStream:
    """A rank's batches, step by step; with workers a few chunks are read ahead. Waits are counted in
    ``metrics``. Raises UsageError where TMPDIR is too long for workers."""

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
        if self._num_workers:
            _check_worker_sockets()
            try:
                chunks.position.share_memory_()
            except (OSError, RuntimeError) as error:
                raise cannot_share(error) from error
        # Items are passed on as they are: torch would turn what the workers send into something else.
        self._loader: DataLoader[Any] = DataLoader(
            chunks, batch_size=None, collate_fn=_as_it_is, worker_init_fn=follow_main_process, **workers
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
            chunks = self._next_chunks()
            for place in range(chunks[0].num_ticks):
                fillers = order.is_filler(tick, slots) if order.keeps_tail else None
                yield list(of_tick(chunks, place, first_batch, fillers))
                tick, first_batch = tick + 1, 0
            del chunks  # they may hold their window; the next one is read now

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
        if any(not worker.is_alive() for worker in self._workers()):  # as by Ctrl-C
            self.end()
        if self._stands_at != start:
            self._chunks.position[:] = torch.tensor(self._chunks.run.epoch_and_tick(start))
            context = self._loader.multiprocessing_context or multiprocessing.get_context()
            waits: Any = contextlib.nullcontext()
            if self._num_workers and self._loader._iterator is None:  # noqa: SLF001  they are started now
                # They begin with the signals blocked, while they import, too.
                spawns = context.get_start_method() != "fork"
                waits = stop_signals_wait(_SIGNALS, spawns=spawns)
                if spawns:
                    check_main_guard()
            try:
                with waits:
                    self._arriving = iter(self._loader)
            except OSError as error:  # semaphores lie in shared memory, too
                raise cannot_share(error) from error
        self._stands_at = None

    def _workers(self) -> Any:
        return getattr(self._arriving, "_workers", ())

    def _next_chunks(self) -> list[Chunk]:
        """Return the next chunk of every worker, in the order of their slots."""
        began = time.perf_counter()
        arriving = self._arriving
        try:
            chunks = [next(arriving) for _ in range(max(self._num_workers, 1))]
        except RuntimeError as error:  # torch's, that a worker has ended
            codes = [worker.exitcode for worker in self._workers()]
            if ReadWriteError.exit_code in codes or isinstance(error.__cause__, ReadWriteError):
                raise cannot_share(EOFError()) from error
            raise
        for chunk in chunks:
            if isinstance(chunk, ShardprepError):  # of a worker
                raise chunk
        self._metrics.wait_s += time.perf_counter() - began
        if self._num_workers:
            row_tokens = self._chunks.run.row_tokens
            chunks = [Chunk.unpack(chunk, row_tokens) for chunk in chunks]
        self._metrics.num_cut_tokens += sum(chunk.num_cut for chunk in chunks)
        return chunks


def _as_it_is(item: Any) -> Any:
    return item


def follow_main_process(_: int) -> None:
    """Block the signals in a worker, and end it when the main process ends. torch does not look for
    it while a worker waits for room in a pipe, nor under forkserver."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
    settings.pop("tempdir", None)  # a forked process has its parent's, which lives on
    sys.excepthook = _end_without_files
    folder = Path(get_temp_dir())  # of the sockets that send tensors
    threading.Thread(target=_end_with_main_process, args=(os.getppid(), folder), daemon=True).start()


def _end_without_files(_: object, error: BaseException, __: object) -> None:
    """End a worker whose thread that sends tensors failed. That thread tells sys.excepthook, and would go on
    failing, where no file can be opened, while the main process waits for it."""
    logger.error("%s", cannot_share(error))
    os._exit(ReadWriteError.exit_code)


def _end_with_main_process(parent_pid: int, folder: Path) -> None:
    """End this process once the main one is gone or sends SIGTERM, as torch does to a worker that hangs."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == parent_pid and main.is_alive():
        received = signal.sigtimedwait((signal.SIGTERM,), _LOOK_EVERY_S)
        if received is not None and received.si_pid == main.pid:
            break
    for _ in range(100):
        if not folder.exists():
            break
        shutil.rmtree(folder, ignore_errors=True)  # fails where the main thread adds a socket meanwhile
    os._exit(0)


def _check_worker_sockets() -> None:
    """Raise UsageError where TMPDIR is too long for a socket below it. A worker would say so on standard
    error, lose its batches, and the loop would wait for them for ever."""
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    folder, most = tempfile.gettempdir(), _MOST_PATH_BYTES - _SOCKET_BYTES
    if len(os.fsencode(folder)) > most:
        raise UsageError(
            f"the folder for temporary files, {folder}, has a path of {len(os.fsencode(folder))} bytes, and "
            f"workers can hand over their batches below one of {most} at most; set TMPDIR to a shorter one "
            "(export TMPDIR=/tmp), or num_workers to 0"
        )
