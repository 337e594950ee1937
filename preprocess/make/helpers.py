"""Helpers of a task: processes that read, encode and lay out stretches of its shard, one per core.

Each is a fork of the task, made when the engine is loaded and nothing else is, so that they share its
memory: a further core takes some 150 MB. The task gives them stretches in order, and gets batches that it
appends in order, so the shard has the same bytes as from one process. Batches lie in shared memory; only
what is small goes through pipes.

A helper that dies fails the task, and one whose task dies gets a signal. It leaves no file: it writes none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from msgspec.structs import replace

from preprocess.make.arena import Arena
from preprocess.make.engine import Engine
from preprocess.make.helper_server import (
    Done,
    EndOfShard,
    HelperFacts,
    HelperServer,
    NumLines,
    SentBatch,
)
from preprocess.make.pieces import EncodedBatch
from preprocess.make.settings import WorkerSettings
from preprocess.make.stretches import Job
from preprocess.read.documents import DocumentBatch
from preprocess.read.transform import bounded_reason
from shardprep.errors import ReadWriteError, Stopped
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Plan
from shardprep.processes import die_with_parent, raise_on_stop_signals, stop_signals_wait

ARENA_BYTES = 48 << 20  # four batches of short documents
_ENDS_WITHIN_S = 5.0
_FAILED = 70  # exit code of a helper that could not even say why


@dataclass
class _Outstanding:
    """A job that a helper has and that is not yet appended."""

    helper: _Helper
    num_lines: int | None = None
    is_told: bool = False  # its first line


class _Helper:
    """The task's side of a helper."""

    def __init__(self, serve: Callable[[Connection, Arena], None], others: list[_Helper]) -> None:
        self.arena = Arena(ARENA_BYTES)
        self.pipe, theirs = Pipe()
        self.jobs: deque[_Outstanding] = deque()
        self.inbox: deque[Any] = deque()  # SentBatch, Done, HelperFacts, or an exception
        self.has_failed = False
        parent = os.getpid()
        with stop_signals_wait(), warnings.catch_warnings():
            # Python warns of threads, which a fork does not have. These are of engines, which do without.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
            if self._pid == 0:
                _run_fork(parent, serve, theirs, self.arena, [self, *others])
        theirs.close()

    def send(self, message: Any) -> None:
        """Send a message. That the helper is dead is noticed when it is received from."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """Return the next message. Raises Stopped, or ReadWriteError if the helper is dead."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            code = os.waitstatus_to_exitcode(status)
            if code == Stopped.exit_code:
                raise Stopped(
                    "stopped with its helpers; nothing unfinished is left, run this again"
                ) from None
            how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with {code}"
            raise ReadWriteError(f"a helper of this task {how}; run this again") from None

    def stop(self) -> None:
        """Ask the helper to end."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def end(self) -> None:
        """Wait until the helper that was stopped is gone."""
        if self._pid:
            pid, self._pid = self._pid, 0
            end_at = time.monotonic() + _ENDS_WITHIN_S
            while not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > end_at:  # a user's code may hold the interpreter's lock
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.005)
        self.pipe.close()
        self.arena.close()


class Helpers:
    """The helpers of a task."""

    def __init__(
        self,
        plan: Plan,
        folder: DataFolder,
        settings: WorkerSettings,
        engine: Engine,
        *,
        num_helpers: int,
        batch_bytes: int,
    ) -> None:
        """Fork them. The process must have loaded nothing that starts threads or processes but the engine."""
        server = HelperServer(plan, folder, settings, engine, batch_bytes)
        self._helpers: list[_Helper] = []
        self._is_read, self._tell_read = Pipe(duplex=False)  # a byte for each job that was read
        try:
            for _ in range(num_helpers):
                self._helpers.append(_Helper(server.serve, list(self._helpers)))
        except BaseException:
            self.end()
            raise

    @property
    def number(self) -> int:
        return len(self._helpers)

    def encoded(self, shard_id: int, jobs: Iterator[Job]) -> Generator[EncodedBatch, None, None]:
        """Yield the batches of a shard in order. Each one is valid until the next one is asked for.

        Raises the error of the first job that failed, in the order of the input.
        """
        order: deque[_Outstanding] = deque()
        known = _KnownLines(order)
        reasons: set[str] = set()  # of LeaveOut
        with ThreadPoolExecutor(1) as reader:
            following: Future[Any] | None = self._read_next(reader, jobs)
            while True:
                # Give out jobs. The next one is read or found in a thread.
                while following is not None and (following.done() or not order):
                    if order and following.exception() is not None:
                        break  # an earlier job may have an error, too
                    job = following.result()
                    if job is None:
                        following = None
                        break
                    helper = self._free_helper(is_large=isinstance(job, DocumentBatch))
                    if helper is None:
                        if not order:
                            raise ReadWriteError("no helper of this task works; run this again")
                        break
                    helper.send((shard_id, job))
                    helper.jobs.append(_Outstanding(helper))
                    order.append(helper.jobs[-1])
                    following = self._read_next(reader, jobs)
                if not order:
                    return
                first = order[0].helper
                if not first.inbox:
                    self._receive(known)
                    continue
                message = first.inbox.popleft()
                if isinstance(message, SentBatch):
                    batch: EncodedBatch = first.arena.unpack(message.pickled, message.places)
                    bad = batch.counts.bad
                    for number, each in enumerate(bad):
                        bad[number] = replace(each, reason=bounded_reason(each.reason, reasons))
                    yield batch
                    del batch
                    if message.places is not None:
                        first.arena.free()
                elif isinstance(message, Done):
                    order.popleft()
                    first.jobs.popleft()
                else:
                    raise message

    def facts(self) -> list[HelperFacts]:
        """Return what each helper used for the shard that is over."""
        found = []
        for helper in self._helpers:
            helper.send(EndOfShard())
        for helper in self._helpers:
            message = helper.receive()
            if isinstance(message, BaseException):
                raise message
            found.append(message)
        return found

    def end(self) -> None:
        """Stop the helpers."""
        for helper in self._helpers:
            helper.stop()
        for helper in self._helpers:
            helper.end()
        self._helpers = []
        self._is_read.close()
        self._tell_read.close()

    def _free_helper(self, *, is_large: bool) -> _Helper | None:
        """Return the helper that may get a job: an idle one, or one that knows the first line of its job.

        A large job, which a pipe has no room for, goes to an idle one, which is waiting for it. Otherwise
        both processes might wait for each other.
        """
        for helper in self._helpers:
            if not helper.jobs and not helper.has_failed:
                return helper
        for helper in self._helpers:
            if not is_large and len(helper.jobs) == 1 and helper.jobs[0].is_told and not helper.has_failed:
                return helper
        return None

    def _read_next(self, reader: ThreadPoolExecutor, jobs: Iterator[Job]) -> Future[Any]:
        """Have a thread find, or read, the next job. ``_receive`` returns when it is there."""
        following = reader.submit(next, jobs, None)
        following.add_done_callback(lambda _: self._tell_read.send_bytes(b"r"))
        return following

    def _receive(self, known: _KnownLines) -> None:
        """Wait for messages, sort them into inboxes, and tell helpers their first lines."""
        by_pipe = {helper.pipe: helper for helper in self._helpers if not helper.has_failed}
        for pipe in wait([self._is_read, *by_pipe]):
            if pipe is self._is_read:
                self._is_read.recv_bytes()
                continue
            helper = by_pipe[pipe]  # type: ignore[index]
            message = helper.receive()
            if isinstance(message, NumLines):
                next(job for job in helper.jobs if job.num_lines is None).num_lines = message.number
                known.tell()
                continue
            helper.inbox.append(message)
            helper.has_failed = isinstance(message, BaseException)


class _KnownLines:
    """Tells helpers the numbers of their first lines, in order."""

    def __init__(self, order: deque[_Outstanding]) -> None:
        self._order = order
        self._num_lines = 0  # of all jobs that were told

    def tell(self) -> None:
        for job in self._order:
            if job.is_told:
                continue
            if job.num_lines is None:
                return
            job.helper.send(self._num_lines)
            job.is_told = True
            self._num_lines += job.num_lines


def _run_fork(
    parent: int,
    serve: Callable[[Connection, Arena], None],
    pipe: Connection,
    arena: Arena,
    helpers: list[_Helper],
) -> NoReturn:
    """Serve, and exit without the cleanup of the process that forked."""
    code = _FAILED
    try:
        for helper in helpers:
            helper.pipe.close()  # the parent's ends
            if helper.arena is not arena:
                helper.arena.close()
        arena.keep_child_end()
        raise_on_stop_signals()
        die_with_parent(parent)
        serve(pipe, arena)
        code = 0
    except Stopped:
        code = Stopped.exit_code
    except (EOFError, BrokenPipeError):
        code = 0  # the parent has ended
    finally:
        os._exit(code)
