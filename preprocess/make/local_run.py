"""The missing shards of a plan on this machine, several processes at once.

Each process loads the tokenizer once and is given one shard after the other. A failure is printed, and
written into the attempt's record for ``status``; the other shards go on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from preprocess.make.resources import WorkerSettings, bind_to
from preprocess.make.worker import Work, done_line, load_worker
from shardprep.command_line import start_child
from shardprep.console import Progress, guard_streams, say
from shardprep.errors import ReadWriteError, ShardprepError
from shardprep.format.jobs import Failure, append_failure
from shardprep.format.manifest import Manifest
from shardprep.format.plan import need_plan

Event = Work | Manifest | Failure | str  # work that was done, what became of the shard, or a line for people


class _Process:
    """A worker process and the shard it is at."""

    def __init__(self, folder: Path, settings: WorkerSettings, cpus: list[int], is_verbose: bool) -> None:
        self.cpus = cpus
        self.shard_id = -1
        self.is_dead = False
        self.pipe, theirs = Pipe()
        self._process = start_child(_serve, folder, settings, cpus, is_verbose, theirs)
        theirs.close()

    def give(self, shard_id: int) -> None:
        self.shard_id = shard_id
        with contextlib.suppress(BrokenPipeError):  # it died idle; the end of its pipe tells
            self.pipe.send(shard_id)

    def receive(self) -> Event:
        try:
            event: Event = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.end()
            self.is_dead = True
            code = self._process.exitcode or 0
            how = f"killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
            return Failure.of(self.shard_id, ReadWriteError(f"its process was {how}"))
        return event

    def end(self) -> None:
        """Wait for a process that has nothing more to do, or died."""
        self.pipe.close()
        self._process.join()

    def stop(self) -> None:
        self._process.terminate()
        self.end()


def run_shards(
    folder: Path,
    settings: WorkerSettings,
    shard_ids: Iterable[int],
    cpus_of: list[list[int]],
    progress: Progress,
    *,
    is_verbose: bool,
) -> tuple[list[Manifest], list[Failure]]:
    """Make shards in one process for each of ``cpus_of``, its CPUs; returns what was made, and what failed.

    A failure does not stop the others. A process that dies takes its shard with it, and a new one
    goes on with the rest. On Stopped the processes are stopped, too, and clean up.
    """
    todo = deque(shard_ids)
    failures: list[Failure] = []
    made: list[Manifest] = []
    notes: set[str] = set()
    processes = [_Process(folder, settings, cpus, is_verbose) for cpus in cpus_of[: len(todo)]]
    try:
        for process in processes:
            process.give(todo.popleft())
        while processes:
            ready = wait([process.pipe for process in processes])
            for process in [process for process in processes if process.pipe in ready]:
                event = process.receive()
                if isinstance(event, Work):
                    progress.add(event.num_bytes, event.counts)
                    continue
                if isinstance(event, str):
                    if event not in notes:  # each process says it
                        say(event)
                    notes.add(event)
                    continue
                if isinstance(event, Failure):
                    failures.append(event)
                    say(f"shard {event.shard_id:05d} failed ({event.exit_code}): {event.reason}")
                    append_failure(event)
                else:
                    made.append(event)
                    if is_verbose:
                        say(done_line(event, folder))
                processes.remove(process)
                if todo:
                    fresh = process
                    if process.is_dead:
                        fresh = _Process(folder, settings, process.cpus, is_verbose)
                    processes.append(fresh)
                    fresh.give(todo.popleft())
                else:
                    process.end()
    finally:
        for process in processes:
            process.stop()
    return made, sorted(failures, key=lambda failure: failure.shard_id)


def _serve(
    folder: Path, settings: WorkerSettings, cpus: list[int], is_verbose: bool, pipe: Connection
) -> None:
    """Make the shards that come in, in a worker process; progress and outcomes go out."""
    worker, shard_id = None, -1
    with contextlib.suppress(EOFError, BrokenPipeError):
        guard_streams()
        bind_to(cpus)
        while True:
            shard_id = pipe.recv()
            try:
                if worker is None:
                    plan = need_plan(folder)
                    worker = load_worker(plan, folder, settings, num_cpus=len(cpus), warn=pipe.send)
                    if is_verbose:
                        pipe.send(worker.means_line())
                pipe.send(worker.run_shard(worker.plan.shard(shard_id), pipe.send))
            except ShardprepError as error:
                pipe.send(Failure.of(shard_id, error))
