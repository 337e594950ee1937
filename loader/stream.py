"""The batches of a rank, in order: worker processes read chunks, and the training process collates them.

A chunk is a few ticks of a worker's slots, so a worker sends 1 MiB at a time, not a batch. Workers share the
slots of the rank: if each took every n-th tick instead, together they would read everything n times.

Each worker has a socket of its own, and shares neither memory nor a lock. A container's /dev/shm may be
small, and the queues of torch's DataLoader wait for ever where a worker is killed while it holds a lock.

Slurm, torchrun and a terminal send a signal to all processes of a job. A worker that died of it would end the
process that trains before its checkpoint. So workers block these signals, and end with that process.
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

from loader.batches import LoaderMetrics, StepBatches
from loader.chunks import Chunk, RunReader
from loader.order import share
from loader.run import Position, Run
from shardprep.command_line import stop_signals_wait
from shardprep.errors import ReadWriteError, ShardprepError, UsageError

CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us beside its bytes
MAX_CHUNK_TICKS = 256
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 1.0  # whether the process that trains is still there; 50 us of CPU each time
_END_S = 5.0  # that a worker which was killed may take to be gone
# A fork inherits open sockets, and what two processes have open does not end with one of them.
_one_starts = threading.Lock()


class _Worker(NamedTuple):
    """A process that reads some slots of the rank, and this process's end of its socket."""

    process: BaseProcess
    connection: Connection
    started_by: int  # pid; a fork of that process has the others' ends, too


@dataclass(eq=False)
class BatchStream:
    """A rank's batches, step by step; with workers a few chunks are read ahead. ``metrics`` count waits.

    Files stay open, and workers alive, until ``end``: opening shards anew costs more than reading a window.
    ``endless``: chunks of the next epoch follow those of one.
    """

    run: Run
    slots: range
    step_batches: StepBatches
    metrics: LoaderMetrics
    endless: bool
    options: Mapping[str, Any]  # of the workers, as torch's DataLoader takes them

    def __post_init__(self) -> None:
        self._num_workers: int = self.options.get("num_workers", 0)
        self._workers: list[_Worker] = []
        self._num_sent = 0  # how often the workers were sent to a position
        self._reader = RunReader(self.run, self.slots)  # of this process, where it has no workers
        self._arriving: Iterator[Chunk] | None = None  # its chunks
        self._stands_at: Position | None = None  # where the next chunks are from, if an epoch begins there
        weakref.finalize(self, _end_workers, self._workers).atexit = False
        weakref.finalize(self, self._reader.close)

    @property
    def _chunk_ticks(self) -> int:
        """Return the ticks of a chunk. Rows that are not sent take no memory until their tick, see Ragged."""
        if not self._num_workers and self.run.row_tokens:
            return MAX_CHUNK_TICKS
        slots = -(-len(self.slots) // max(self._num_workers, 1))
        longest = max(samples.mean_tokens for samples in self.run.samples)
        tick_bytes = 4 * slots * self.run.order.group * (self.run.row_tokens or longest)
        return max(1, min(MAX_CHUNK_TICKS, int(CHUNK_BYTES // tick_bytes)))

    def steps(self, start: Position) -> Iterator[list[tuple[Any, tuple[int, int]]]]:
        """Yield the steps of an epoch from a position on: each batch with what ``metrics`` count of it."""
        run = self.run
        self._read_from(start)
        num_done, first_batch = divmod(start.num_micro, run.batches_per_tick)
        epoch, tick = run.epoch_and_tick(start)
        end = run.first_step(epoch + 1)
        chunk, place = None, 0
        for step in range(start.step, end):
            batches: list[tuple[Any, tuple[int, int]]] = []
            for _ in range(num_done, run.ticks_in_step(step)):
                if chunk is None:
                    chunk, place = self._next_chunk(), 0
                fillers = run.order.is_filler(tick, self.slots) if run.is_validation else None
                batches += self.step_batches.of_tick(chunk, place, first_batch, fillers)
                tick, place, first_batch = tick + 1, place + 1, 0
                if place == chunk.num_ticks:
                    chunk = None  # it may hold its window; the next one is read now
            num_done = 0
            yield batches
        self._stands_at = Position(end)

    def end(self) -> None:
        """End the workers and close the files. The next steps start them again."""
        self._arriving = self._stands_at = None
        _end_workers(self._workers)
        self._reader.close()

    def _read_from(self, start: Position) -> None:
        """Make the next chunks those from a position on. Where workers read on, they may stand there."""
        pid = os.getpid()
        if any(worker.started_by != pid or not worker.process.is_alive() for worker in self._workers):
            self.end()  # they are started again
        if self._stands_at != start:
            epoch, tick = self.run.epoch_and_tick(start)
            if not self._num_workers:
                self._arriving = self._reader.chunks(epoch, tick, self._chunk_ticks, endless=self.endless)
            elif not self._workers:
                self._start_workers()
            self._num_sent += 1
            for worker in self._workers:
                with contextlib.suppress(OSError):  # one that died is told of when its chunk is missing
                    worker.connection.send((self._num_sent, epoch, tick))
        self._stands_at = None

    def _start_workers(self) -> None:
        context: Any = multiprocessing.get_context()
        spawns = context.get_start_method() != "fork"
        if spawns:
            _check_main_guard()
        try:
            # They begin with the signals blocked, while they import, too.
            with _one_starts, stop_signals_wait(_SIGNALS, spawns=spawns):
                for number in range(self._num_workers):
                    here, there = multiprocessing.Pipe()
                    slots = share(self.slots, number, self._num_workers)
                    num_ahead = self.options.get("prefetch_factor") or 1
                    given = (there, self.run, slots, self._chunk_ticks, self.endless, num_ahead)
                    process = context.Process(target=_work, args=given, daemon=True)
                    with there:
                        process.start()
                    self._workers.append(_Worker(process, here, os.getpid()))
        except (OSError, EOFError) as error:
            self.end()
            expected = "free file descriptors, processes and memory (ulimit -n, ulimit -u), or num_workers=0"
            raise ReadWriteError(found=f"cannot start workers: {error}", expected=expected) from error

    def _next_chunk(self) -> Chunk:
        """Return the next chunk of every worker as one, in the order of their slots."""
        began = time.perf_counter()
        if self._arriving is not None:
            chunks = [next(self._arriving)]
        else:
            chunks = [self._received(worker) for worker in self._workers]
        self.metrics.wait_s += time.perf_counter() - began
        chunk = Chunk.stacked(chunks)
        self.metrics.num_cut_tokens += chunk.num_cut
        return chunk

    def _received(self, worker: _Worker) -> Chunk:
        """Return the next chunk of a worker. Raises its error, or ReadWriteError where it died."""
        number, item = 0, None
        try:
            while number != self._num_sent:  # chunks from where it read before may still be on their way
                number, item = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(_END_S)
            code = worker.process.exitcode or 0
            found = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            advice = "SIGKILL mostly means that memory ran out: pass fewer num_workers, or ask for more"
            said = f"worker process {worker.process.pid} ended early ({found}). {advice}"
            raise ReadWriteError(said, found=found) from None
        if isinstance(item, ShardprepError):
            raise item
        assert isinstance(item, Chunk)
        return item


def _end_workers(workers: list[_Worker]) -> None:
    """Kill the workers that this process started: they keep nothing, and one may hang in a read."""
    for worker in workers:
        if worker.started_by == os.getpid():
            worker.process.kill()
    for worker in workers:
        if worker.started_by == os.getpid():
            worker.process.join(_END_S)
        worker.connection.close()
    workers.clear()


def _work(
    connection: Connection, run: Run, slots: range, chunk_ticks: int, endless: bool, num_ahead: int
) -> None:
    """Read chunks from each position that arrives, and send them, until the process is killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_with_main_process, args=(os.getppid(),), daemon=True).start()
    reader = RunReader(run, slots)
    ahead: queue.Queue[bytes] = queue.Queue(max(num_ahead - 1, 1))  # one more is being sent
    threading.Thread(target=_send_all, args=(connection, ahead), daemon=True).start()
    while True:
        try:
            number, epoch, tick = connection.recv()
        except (EOFError, OSError):
            return  # the process that trains is gone
        try:
            for chunk in reader.chunks(epoch, tick, chunk_ticks, endless=endless):
                message = pickle.dumps((number, chunk.joined()), pickle.HIGHEST_PROTOCOL)
                del chunk  # it may hold its window; the next one is read now
                ahead.put(message)
                if connection.poll():  # another position
                    break
        except ShardprepError as error:
            ahead.put(pickle.dumps((number, error)))


def _send_all(connection: Connection, ahead: queue.Queue[bytes]) -> None:
    with contextlib.suppress(OSError):  # the process that trains is gone
        while True:
            connection.send_bytes(ahead.get())


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
    """Raise UsageError where each worker would import the script, and so run this loop again."""
    for frame, line_number in traceback.walk_stack(inspect.currentframe()):
        path = frame.f_globals.get("__file__") or ""
        is_script = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        # What is typed in is imported by nobody.
        if not is_script or not os.path.isfile(path):  # noqa: PTH113
            continue
        lines = Path(path).read_text(errors="replace").splitlines()[:line_number]
        if not any(line.startswith("if ") and "__name__" in line for line in lines):
            remedy = 'if __name__ == "__main__":'
            found = f"line {line_number} starts workers by spawn or forkserver, which would import and run it"
            expected = f"it below `{remedy}`, or num_workers=0"
            raise UsageError(path=path, found=found, expected=expected, remedy=remedy)
