"""``ChildProcess``: a process of ``multiprocessing`` that takes no module from the current folder.

``multiprocessing`` starts its own by ``python -c "from multiprocessing..."``, for which Python looks in the
current folder first; so do its resource tracker and its fork server. This one starts by ``start_python``, and
has no need of those two.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe, context, process, reduction, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from shardprep import given, path_without_current_folder
from shardprep.errors import ShardprepError, Stopped
from shardprep.processes import die_with_parent, raise_on_stop_signals, start_python, stop_signals_wait

T = TypeVar("T")
_END_AFTER_S = 5.0  # after SIGTERM


def new_process(
    target: Callable[..., None], *args: Any, forks: bool = False, imports_main: bool = False
) -> BaseProcess:
    """Return a process of ``multiprocessing`` that will call ``target(*args)``. It ends with this one.

    ``forks``: it starts as a copy of this process, and otherwise as a new Python, which gets a pickle.
    ``imports_main``: the new Python imports the script of this process, as multiprocessing does.
    """
    if forks:
        return multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process = ChildProcess(target=target, args=args, daemon=True)
    process.imports_main = imports_main
    return process


def start_child(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start ``target(*args)`` in a new process, which is stopped when this one ends."""
    # Not a fork, which would copy the state of numpy's and tokenizers' threads, but not the threads.
    process = new_process(_run_child, os.getpid(), dict(given.flags()), target, args)
    with stop_signals_wait():
        process.start()
    return process


class ChildEnded(ChildProcessError):
    """A process ended without a result."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"it ended with {exit_code} and without a result")
        self.exit_code = exit_code  # -N if signal N killed it


def call_in_child(function: Callable[..., T], *args: Any) -> T:
    """Call ``function(*args)`` in a new process, which ends with the call, and return its result.

    Raises the ShardprepError that it raises, or ChildEnded.
    """
    ours, theirs = Pipe(duplex=False)
    process = start_child(_answer, theirs, function, args)
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise ChildEnded(process.exitcode or 0) from None
    finally:
        ours.close()
        process.terminate()
        process.join(_END_AFTER_S)
        process.kill()  # a user's code may hold the interpreter's lock, so that no signal is handled
        process.join()
    if isinstance(answer, ShardprepError):
        raise answer
    return answer  # type: ignore[no-any-return]  # as the function says


def _answer(pipe: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    answer: object
    try:
        answer = function(*args)
    except ShardprepError as error:
        answer = error
    with contextlib.suppress(BrokenPipeError):
        pipe.send(answer)


def _run_child(
    parent: int, flags: Mapping[str, object], target: Callable[..., None], args: tuple[object, ...]
) -> None:
    try:
        raise_on_stop_signals()
        die_with_parent(parent)
        with given.flags_are(flags):
            target(*args)
    except Stopped as error:
        raise SystemExit(error.exit_code) from None


class ChildProcess(BaseProcess):
    """As ``multiprocessing.Process`` is. Target and arguments are pickled; they may have connections."""

    _start_method = "spawn"  # what the child's own multiprocessing uses
    imports_main = False  # the script of the parent, as ``__mp_main__``

    @staticmethod
    def _Popen(started: ChildProcess) -> _Started:  # noqa: N802  its name in multiprocessing
        return _Started(started)


class _Inherited:
    """A descriptor that the child inherits, as multiprocessing pickles it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def detach(self) -> int:
        return self._handle


class _Started:
    """What multiprocessing asks of a started process."""

    method = "spawn"
    DupFd = _Inherited

    def __init__(self, started: ChildProcess) -> None:
        util._flush_std_streams()  # type: ignore[attr-defined]  # noqa: SLF001  as multiprocessing does
        self._inherited: list[int] = []
        content = io.BytesIO()
        as_popen: Any = self
        context.set_spawning_popen(as_popen)  # connections that are pickled call ``duplicate_for_child``
        try:
            reduction.dump(_preparation(started), content)
            reduction.dump(started, content)
        finally:
            context.set_spawning_popen(None)
        # Each end is readable once the other process has ended, whatever the cause.
        self.sentinel, childs_end = os.pipe()
        childs_input, our_end = os.pipe()
        opened = [self.sentinel, our_end]
        try:
            given = (*self._inherited, childs_end, childs_input)
            call = "shardprep.child_process:run_started"
            self._child = start_python(call, str(childs_input), pass_fds=given)
            with open(our_end, "wb", closefd=False) as pipe:
                pipe.write(content.getbuffer())
        except BaseException:
            _close_all(opened)
            raise
        finally:
            os.close(childs_end)
            os.close(childs_input)
        self.pid = self._child.pid
        self._close = util.Finalize(self, _close_all, (opened,))

    def duplicate_for_child(self, handle: int) -> int:
        """Let the child inherit a descriptor, under the same number."""
        self._inherited.append(handle)
        return handle

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._close()


def _preparation(started: ChildProcess) -> dict[str, object]:
    """Return what multiprocessing tells a child first. The path has no current folder, but for the script."""
    told = spawn.get_preparation_data(started.name)
    path = path_without_current_folder(sys.path)
    if started.imports_main:
        folder = _folder_of_main()
        path = [each for each in sys.path if each in path or each == folder]
    else:
        told.pop("init_main_from_name", None)
        told.pop("init_main_from_path", None)
    return {**told, "sys_path": path}


def _folder_of_main() -> str:
    """Return the folder in which Python found the script or module that it runs, or ""."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not file:
        return ""
    folder = Path(os.path.abspath(file)).parent  # noqa: PTH100  resolve() would follow links
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # of ``python -m PACKAGE.MODULE``
        for _ in range(spec.name.count(".")):
            folder = folder.parent
    return str(folder)


def _close_all(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def run_started() -> int:
    """Run, in the child, the process whose pickle the parent writes to a pipe. Returns its exit code."""
    handle = int(sys.argv[1])
    parent_sentinel = os.dup(handle)
    os.set_inheritable(parent_sentinel, False)
    # Where multiprocessing looks whether a process is being unpickled.
    current = vars(process.current_process())
    with os.fdopen(handle, "rb") as pipe:
        current["_inheriting"] = True
        try:
            spawn.prepare(pickle.load(pipe))  # noqa: S301  from the parent
            started = pickle.load(pipe)  # noqa: S301  from the parent
        finally:
            del current["_inheriting"]
    code: int = started._bootstrap(parent_sentinel)  # noqa: SLF001  as multiprocessing does
    return code
