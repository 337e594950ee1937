"""Make several shards on this machine.

Each process loads the tokenizer once, and makes one shard after the other. When fewer shards are left than
there are processes, these few share the cores: each waits for its part of them, and has helpers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from preprocess.make import resources, shared_work
from preprocess.make.log_lines import done_line
from preprocess.make.parts import ShardQueue
from preprocess.make.settings import WorkerSettings
from preprocess.make.worker import Worker
from shardprep.console import Progress, guard_streams, say
from shardprep.errors import ReadWriteError, ShardprepError
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan, need_plan

if TYPE_CHECKING:  # a task of one shard does without them
    from shardprep.format.attempts import Failure


class _Batch(NamedTuple):
    """A worker process has encoded a batch. Other events are a Manifest and a Failure."""

    num_bytes: int  # of the input
    amounts: dict[str, int]  # by noun


class _Note(NamedTuple):
    """A worker process has something to say."""

    line: str


class _Process:
    """A worker process, and the shard that it is making."""

    shard_id = -1
    pipe: Any = None
    _child: Any = None

    def __init__(
        self, folder: DataFolder, settings: WorkerSettings, cpus: list[int], is_verbose: bool
    ) -> None:
        self.cpus = cpus
        self._args = (folder, settings, cpus, is_verbose)  # of _serve

    def send(self, shard_id: int) -> None:
        """Send a shard to the process, which is started if needed."""
        from multiprocessing import Pipe

        from shardprep.child_process import start_child

        self.shard_id = shard_id
        if self._child is None:
            self.pipe, theirs = Pipe()
            self._child = start_child(_serve, *self._args, theirs)
            theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it died while idle: ``receive`` reports that
            self.pipe.send(shard_id)

    def receive(self) -> Any:
        """Return the next event: a _Batch, a _Note, a Manifest or a Failure."""
        from shardprep.format.attempts import Failure

        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            code = self.end()
            how = f"killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
            return Failure.of(self.shard_id, ReadWriteError(f"its process was {how}"))

    def end(self, *, at_once: bool = False) -> int:
        """Let the process end, by SIGTERM if ``at_once``, and return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        if at_once:
            child.terminate()
        self.pipe.close()
        child.join()
        return child.exitcode or 0


class _SharedCores:
    """The cores for the last shards, when fewer shards are left than processes, which end one by one.

    Each of these shards gets the cores of several processes, as soon as enough of them have ended.
    """

    def __init__(self) -> None:
        self._shares: deque[int] = deque()  # of each shard that has none yet: how many processes' cores
        self._free: list[list[int]] = []  # cores of the processes that ended

    @property
    def are_wanted(self) -> bool:
        return bool(self._shares)

    def share(self, num_processes: int, num_shards: int) -> None:
        """Share the cores of all processes between the shards that are left: 3, 3 and 2 of 8."""
        each, rest = divmod(num_processes, num_shards)
        self._shares.extend([each + 1] * rest + [each] * (num_shards - rest))

    def give(self, cpus: list[int]) -> None:
        """Add the cores of a process that has ended."""
        self._free.append(cpus)

    def take(self) -> list[list[int]]:
        """Return the cores for the next shard, a list a process, or none while too few are free."""
        if len(self._free) < self._shares[0]:
            return []
        num_free = self._shares.popleft()
        taken = self._free[:num_free]
        del self._free[:num_free]
        return taken


def run_shards(
    folder: DataFolder,
    plan: Plan,
    settings: WorkerSettings,
    todo: ShardQueue,
    cpus_of: list[list[int]],
    progress: Progress,
    *,
    is_verbose: bool,
) -> tuple[list[Manifest], list[Failure]]:
    """Make shards in several processes, with the CPUs in ``cpus_of``. Return manifests and failures.

    A failure does not stop the other shards. It is printed, and added to the attempt's record for ``status``.
    If a process dies, its shard has failed, and a new process makes the next one. On Stopped the processes
    are stopped, too, and clean up.
    """
    from multiprocessing.connection import wait

    from shardprep.format.attempts import Failure, append_failure

    failures: list[Failure] = []
    made: list[Manifest] = []
    notes: set[str] = set()
    processes: list[_Process] = []
    busy: dict[Any, _Process] = {}  # by their pipes
    num_processes = min(len(cpus_of), len(todo.look_for(len(cpus_of))))
    shared = _SharedCores()
    try:
        for cpus in cpus_of[:num_processes]:
            shard_id = todo.take()
            if shard_id is not None:
                process = _Process(folder, settings, cpus, is_verbose)
                processes.append(process)
                process.send(shard_id)
                busy[process.pipe] = process
        while busy:
            for pipe in wait(list(busy)):
                process = busy[pipe]
                event = process.receive()
                if isinstance(event, _Batch):
                    progress.add(event.num_bytes, event.amounts)
                    continue
                if isinstance(event, _Note):
                    if event.line not in notes:  # each process sends it
                        say(event.line)
                    notes.add(event.line)
                    continue
                if isinstance(event, Failure):
                    failures.append(event)
                    say(f"shard {event.shard_id:05d} failed ({event.exit_code}): {event.reason}")
                    append_failure(event)
                else:
                    made.append(event)
                    progress.add_shards(1)
                    if is_verbose:
                        say(done_line(event, folder))
                del busy[pipe]
                left = todo.look_for(num_processes)
                if not shared.are_wanted and left and _are_shared(plan, settings, left, num_processes):
                    shared.share(num_processes, len(left))
                if shared.are_wanted:
                    process.end()
                    shared.give(process.cpus)
                    cores = shared.take() if left else []
                    if not cores:
                        continue
                    cpus = sorted(set(itertools.chain.from_iterable(cores)))
                    process = _Process(folder, _with_memory(settings, len(cores)), cpus, is_verbose)
                    processes.append(process)
                shard_id = todo.take()
                if shard_id is None:
                    process.end()
                    continue
                process.send(shard_id)
                busy[process.pipe] = process
    finally:
        for process in processes:
            process.end(at_once=True)
    return made, sorted(failures, key=lambda failure: failure.shard_id)


def _are_shared(plan: Plan, settings: WorkerSettings, todo: Collection[int], num_processes: int) -> bool:
    """Return whether the shards that are left should share the cores of all processes."""
    if len(todo) >= num_processes:
        return False
    num_cpus = num_processes // len(todo)
    shares = _with_memory(settings, num_cpus)
    return all(shared_work.num_helpers(plan, plan.shard(each), shares, num_cpus) for each in todo)


def _with_memory(settings: WorkerSettings, num_processes: int) -> WorkerSettings:
    """Return the settings of a process that has the memory of several."""
    if settings.memory_gb is None:
        return settings
    return replace(settings, memory_gb=settings.memory_gb * num_processes)


def _serve(
    folder: DataFolder, settings: WorkerSettings, cpus: list[int], is_verbose: bool, pipe: Any
) -> None:
    """Make the shards whose ids come through the pipe, and send events back. Runs in a worker process."""
    from shardprep.format.attempts import Failure

    worker: Worker | None = None

    def tell(line: str) -> None:
        pipe.send(_Note(line))

    def on_batch(num_bytes: int, amounts: dict[str, int]) -> None:
        pipe.send(_Batch(num_bytes, amounts))

    with contextlib.suppress(EOFError, BrokenPipeError), contextlib.ExitStack() as helped:
        guard_streams()
        resources.bind_to(cpus)
        while True:
            shard_id = pipe.recv()
            try:
                if worker is None:
                    plan = need_plan(folder).at(settings.input_dir)
                    shard = plan.shard(shard_id)
                    worker = Worker(plan, folder, settings, num_cpus=len(cpus), warn=tell, first_shard=shard)
                    helped.enter_context(worker)
                    if is_verbose:
                        tell(worker.resources_line())
                pipe.send(worker.run_shard(worker.plan.shard(shard_id), on_batch))
            except ShardprepError as error:
                pipe.send(Failure.of(shard_id, error))
                if worker is not None and worker.has_helpers:  # they still have jobs of that shard
                    worker = None
                    helped.close()
