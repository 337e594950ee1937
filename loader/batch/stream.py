"""The batches of a rank, in order. Worker processes read chunks, and the training process collates batches.

A chunk is a few ticks of a worker's slots, so a worker sends 1 MiB at a time instead of a batch. Workers
divide the slots of their rank: if each took every n-th tick instead, n workers would read everything n times.

Each worker has its own socket, and shares neither memory nor a lock. A container's /dev/shm may be small, and
the queues of torch's DataLoader wait forever if a worker is killed while it holds a lock.

Slurm, torchrun and a terminal send a signal to all processes of a job. If it killed a worker, the training
process would fail before it saves a checkpoint. So workers block these signals, and end with that process.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from loader.batch.batches import CountedBatch, LoaderMetrics, StepBatches
from loader.batch.run_reader import RunReader
from loader.order.mixture import Position, Run
from loader.order.order import share
from loader.read.chunks import Chunk
from loader.read.samples import Samples
from shardprep.child_process import new_process
from shardprep.errors import ReadWriteError, ShardprepError, UsageError
from shardprep.processes import stop_signals_wait

CHUNK_BYTES = 1 << 20  # a worker's message costs about 150 us besides its bytes
MAX_CHUNK_TICKS = 256
_BLOCKED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_CHECK_PARENT_S = 1.0  # how often a worker checks the training process, which takes 50 us of CPU
_JOIN_TIMEOUT_S = 5.0  # how long to wait for a worker to exit
# A fork in another thread must not inherit a worker's end: its socket would outlive that worker.
_start_lock = threading.Lock()


class _Worker(NamedTuple):
    """A process that reads some slots of the rank, and this process's end of its socket."""

    process: BaseProcess
    connection: Connection
    started_by: int  # pid; a fork of that process has this connection, too


@dataclass(eq=False)
class BatchStream:
    """The batches of a rank, step by step. Workers read a few chunks ahead. ``metrics`` count the waits.

    Files stay open and workers alive until ``end``: opening shards again costs more than reading a window.
    With ``endless``, the chunks of an epoch are followed by those of the next.
    """

    run: Run
    samples: Mapping[str, Samples]  # of the sources that this loader reads
    slots: range
    step_batches: StepBatches
    metrics: LoaderMetrics
    endless: bool
    options: Mapping[str, Any]  # worker options of torch's DataLoader

    def __post_init__(self) -> None:
        self._num_workers: int = self.options.get("num_workers", 0)
        self._workers: list[_Worker] = []
        self._num_requests = 0  # positions that were sent to the workers
        # Without workers, this process reads the chunks.
        self._reader = RunReader(self.run, self.samples, self.slots)
        self._own_chunks: Iterator[Chunk] | None = None  # from this reader; None with workers
        self._next_start: Position | None = None  # where the next chunk begins; None within an epoch
        weakref.finalize(self, _end_workers, self._workers).atexit = False  # they end by themselves then
        weakref.finalize(self, self._reader.close)

    @property
    def _chunk_ticks(self) -> int:
        """Return the ticks per chunk. Without workers, rows are only copied at their tick (see Ragged)."""
        if not self._num_workers and self.run.row_tokens:
            return MAX_CHUNK_TICKS
        slots_per_worker = -(-len(self.slots) // max(self._num_workers, 1))
        sample_tokens: float = self.run.row_tokens
        if not sample_tokens:
            names = [source.name for source in self.run.sources if source.name in self.samples]
            sample_tokens = max(self.samples[name].mean_tokens for name in names)
        worker_samples = slots_per_worker * self.run.order.group  # of a tick
        tick_bytes = 4 * worker_samples * sample_tokens
        return max(1, min(MAX_CHUNK_TICKS, int(CHUNK_BYTES // tick_bytes)))

    def steps(self, start: Position) -> Iterator[list[CountedBatch]]:
        """Yield the batches of each step of an epoch from a position on."""
        run = self.run
        self._read_from(start)
        num_done, first_batch = divmod(start.num_micro, run.batches_per_tick)
        epoch, epoch_tick = run.epoch_and_tick(start)
        end = run.first_step(epoch + 1)
        chunk = None
        chunk_tick = 0
        for step in range(start.step, end):
            batches: list[CountedBatch] = []
            for _ in range(num_done, run.ticks_in_step(step)):
                if chunk is None:
                    chunk = self._next_chunk()
                    chunk_tick = 0
                fillers = run.order.is_filler(epoch_tick, self.slots) if run.is_validation else None
                batches += self.step_batches.of_tick(chunk, chunk_tick, first_batch, fillers)
                epoch_tick += 1
                chunk_tick += 1
                first_batch = 0
                if chunk_tick == chunk.num_ticks:
                    chunk = None  # it may keep its window in memory while the next one is read
            num_done = 0
            yield batches
        self._next_start = Position(end)

    def end(self) -> None:
        """End the workers and close the files. ``steps`` starts them again."""
        self._own_chunks = self._next_start = None
        _end_workers(self._workers)
        self._reader.close()

    def _read_from(self, start: Position) -> None:
        """Read the next chunks from a position on, unless they already begin there."""
        if any(each.started_by != os.getpid() or not each.process.is_alive() for each in self._workers):
            self.end()  # they are started again below
        if self._next_start != start:
            epoch, epoch_tick = self.run.epoch_and_tick(start)
            if not self._num_workers:
                self._own_chunks = self._reader.chunks(
                    epoch, epoch_tick, self._chunk_ticks, endless=self.endless
                )
            elif not self._workers:
                self._start_workers()
            self._num_requests += 1
            for worker in self._workers:
                with contextlib.suppress(OSError):  # _receive reports a worker that died
                    worker.connection.send((self._num_requests, epoch, epoch_tick))
        self._next_start = None

    def _start_workers(self) -> None:
        forks = multiprocessing.get_start_method() == "fork"
        if not forks:
            _check_main_guard()
        try:
            # Workers start with the signals blocked, so that none kills them during their imports.
            with _start_lock, stop_signals_wait(_BLOCKED_SIGNALS):
                for number in range(self._num_workers):
                    own_end, worker_end = multiprocessing.Pipe()
                    slots = share(self.slots, number, self._num_workers)
                    num_ahead = self.options.get("prefetch_factor") or 1
                    process = new_process(
                        _run_worker,
                        worker_end,
                        self.run,
                        self.samples,
                        slots,
                        self._chunk_ticks,
                        self.endless,
                        num_ahead,
                        forks=forks,
                        imports_main=True,
                    )
                    with worker_end:
                        process.start()
                    self._workers.append(_Worker(process, own_end, os.getpid()))
        except (OSError, EOFError) as error:
            self.end()
            expected = "free file descriptors, processes and memory (ulimit -n, ulimit -u), or num_workers=0"
            raise ReadWriteError(found=f"cannot start workers: {error}", expected=expected) from error

    def _next_chunk(self) -> Chunk:
        """Return the next chunk of all workers, concatenated in the order of their slots."""
        began = time.perf_counter()
        if self._own_chunks is not None:
            chunks = [next(self._own_chunks)]
        else:
            chunks = [self._receive(worker) for worker in self._workers]
        self.metrics.wait_s += time.perf_counter() - began
        chunk = Chunk.stacked(chunks)
        self.metrics.num_cut_tokens += chunk.num_cut_tokens
        return chunk

    def _receive(self, worker: _Worker) -> Chunk:
        """Return the next chunk of a worker. Raises the worker's error, or ReadWriteError if it died."""
        request = 0
        item = None
        try:
            while request != self._num_requests:  # chunks of an earlier position may arrive first
                request, item = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(_JOIN_TIMEOUT_S)
            code = worker.process.exitcode or 0
            found = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            advice = "SIGKILL usually means that memory ran out: use fewer num_workers or request more memory"
            message = f"worker process {worker.process.pid} ended early ({found}). {advice}"
            raise ReadWriteError(message, found=found) from None
        if isinstance(item, ShardprepError):
            raise item
        assert isinstance(item, Chunk)
        return item


def _end_workers(workers: list[_Worker]) -> None:
    """Kill the workers that this process started. They have nothing to save, and one may hang in a read."""
    for worker in workers:
        if worker.started_by == os.getpid():
            worker.process.kill()
    for worker in workers:
        if worker.started_by == os.getpid():
            worker.process.join(_JOIN_TIMEOUT_S)
        worker.connection.close()
    workers.clear()


def _run_worker(
    connection: Connection,
    run: Run,
    samples: Mapping[str, Samples],
    slots: range,
    chunk_ticks: int,
    endless: bool,
    num_ahead: int,
) -> None:
    """Read and send chunks from each position that arrives, until this process is killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    threading.Thread(target=_end_with_main_process, args=(os.getppid(),), daemon=True).start()
    reader = RunReader(run, samples, slots)
    ahead: queue.Queue[bytes] = queue.Queue(max(num_ahead - 1, 1))  # one more is being sent
    threading.Thread(target=_send_all, args=(connection, ahead), daemon=True).start()
    while True:
        try:
            request, epoch, epoch_tick = connection.recv()
        except (EOFError, OSError):
            return  # the training process has ended
        try:
            for chunk in reader.chunks(epoch, epoch_tick, chunk_ticks, endless=endless):
                message = pickle.dumps((request, chunk.joined()), pickle.HIGHEST_PROTOCOL)
                del chunk  # it may keep its window in memory while the next one is read
                ahead.put(message)
                if connection.poll():  # a new position has arrived
                    break
        except ShardprepError as error:
            ahead.put(pickle.dumps((request, error)))


def _send_all(connection: Connection, ahead: queue.Queue[bytes]) -> None:
    with contextlib.suppress(OSError):  # the training process has ended
        while True:
            connection.send_bytes(ahead.get())


def _end_with_main_process(parent_pid: int) -> None:
    """Exit when the main process has ended or sends SIGTERM, as torch does to a worker that hangs."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == parent_pid and main.is_alive():
        received = signal.sigtimedwait((signal.SIGTERM,), _CHECK_PARENT_S)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)


def _check_main_guard() -> None:
    """Raise UsageError if each worker would import the script, and so run its training loop again."""
    for frame, line_number in traceback.walk_stack(inspect.currentframe()):
        path = frame.f_globals.get("__file__") or ""
        is_script = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        # Workers do not import what was typed into an interpreter.
        if not is_script or not os.path.isfile(path):  # noqa: PTH113
            continue
        lines = Path(path).read_text(errors="replace").splitlines()[:line_number]
        if not any(line.startswith("if ") and "__name__" in line for line in lines):
            remedy = 'if __name__ == "__main__":'
            found = f"line {line_number} starts workers by spawn or forkserver, which import and run it"
            expected = f"it below `{remedy}`, or num_workers=0"
            raise UsageError(path=path, found=found, expected=expected, remedy=remedy)
