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
from typing import NamedTuple

from preprocess.make.resources import WorkerSettings, bind_to
from preprocess.make.task import engine_line, part_line, speed_line
from preprocess.make.worker import Work, Worker, load_worker
from shardprep.console import Progress, guard_streams, say
from shardprep.errors import ReadWriteError, ShardprepError
from shardprep.format.attempts import Failure, append_failure
from shardprep.format.plan import need_plan
from shardprep.signals import start_child


class Done(NamedTuple):
    """A shard that was made."""

    work: Work  # all of it
    line: str  # for people: which part of the input, and how fast


Event = Work | Done | Failure | str  # work that was done, what became of the shard, or a line for people


class _Process:
    """A worker process and the shard it is at."""

    def __init__(self, folder: Path, settings: WorkerSettings, cpus: list[int], is_verbose: bool) -> None:
        self.cpus = cpus
        self.shard_id: int | None = None
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
            assert self.shard_id is not None
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
) -> tuple[list[Work], list[Failure]]:
    """Make shards in one process for each of ``cpus_of``, its CPUs; returns the work done, and what failed.

    A failure does not stop the others. A process that dies takes its shard with it, and a new one
    goes on with the rest. On Stopped the processes are stopped, too, and clean up.
    """
    todo = deque(shard_ids)
    failures: list[Failure] = []
    made: list[Work] = []
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
                    made.append(event.work)
                    if is_verbose:
                        say(event.line)
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
    """Body of a worker process: shards come in, progress and outcomes go out."""
    try:
        guard_streams()
        bind_to(cpus)
        try:
            plan = need_plan(folder)
            worker = load_worker(plan, folder, settings, num_cpus=len(cpus), warn=pipe.send)
            if is_verbose:
                pipe.send(engine_line(worker))
        except ShardprepError as error:
            while True:
                pipe.send(Failure.of(pipe.recv(), error))
        while True:
            pipe.send(_outcome(worker, pipe.recv(), pipe))
    except (EOFError, BrokenPipeError):
        return


def _outcome(worker: Worker, shard_id: int, pipe: Connection) -> Failure | Done:
    try:
        shard = worker.plan.shard(shard_id)
        manifest = worker.run_shard(shard, pipe.send)
    except ShardprepError as error:
        return Failure.of(shard_id, error)
    return Done(Work.of(manifest), f"{part_line(worker.plan, shard)}; {speed_line(manifest)}")
