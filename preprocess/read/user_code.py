"""Run a user's Python file, and the files that it names, from exactly the bytes that were hashed.

``UserCode`` compiles the bytes of ``CodeFiles``, and calls them in one thread of its own: what was set up
while the module was loaded (a database, a thread-local) works in every call, and the depth of the stack is
the same in every command.

While the code runs, these rules hold in this process. A rule that is broken ends the work with its error,
even if the code catches what is raised:

- A module of the user runs only if it was named. Its bytes are the hashed ones (``hashed_modules``).
  An audit hook sees all code that runs from a file, however it is imported, and refuses other files of the
  code's folders and of the current folder. It costs 0.1 µs for each event that Python audits.
- A file beside the code that was not named does not run as text (``exec(file.read())``). If it is only read,
  a warning says that the plan does not keep it.
- The code does not end or replace this process, so exit code 0 still means that the shard is done.
- What it prints goes to standard error, because standard output has results.

Each rule holds only because the others do, so they stand together.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import posix
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from preprocess.read.code_files import MAX_FILE_BYTES, CodeFiles
from preprocess.read.hashed_modules import HashedModules
from preprocess.read.library_files import (
    OUR_PACKAGES,
    absolute,
    is_below,
    is_installed,
    is_library,
    version_of,
)
from shardprep.console import say
from shardprep.errors import ShardprepError, UsageError

T = TypeVar("T")
# The same on every machine, whatever ``ulimit -s`` says: a deep recursion ends at the same depth.
_STACK_BYTES = 16 << 20
_MODULE_NAME = "shardprep_transform"  # of the main file, for classes that are pickled
_CODE_SUFFIXES = (".py", ".pyc", ".pyw")
_MAX_READS = 100  # files that are read and were not named: those that are remembered
_MAX_LIBRARIES = 200
_MAX_VERSION_CHARS = 100
_IF_IT_CHANGES = "if it changes, later shards differ from earlier ones. To keep it: plan with"


class _Ended(BaseException):
    """Ends a call of the user's code, whose error UserCode keeps. No ``except Exception`` catches it."""


class UserCode:
    """A user's module, loaded from ``files`` into this process."""

    def __init__(self, files: CodeFiles) -> None:
        self.files = files
        self.finder = HashedModules(files)
        self.error: ShardprepError | None = None  # of the rule that was broken
        self.reads: list[str] = []  # files beside the code that it read, and that were not named
        self._num_told = 0  # of these
        self.modules: dict[str, types.ModuleType] = {}  # by name, while other code has its place
        self._started_in = _current_folder()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def load(self) -> types.ModuleType:
        """Run the main file, and return its module. Raises whatever it raises, and UsageError."""
        return self.call(self._load)

    def _load(self) -> types.ModuleType:
        self._refuse_names_of_libraries()
        spec = self.finder.spec_of(_MODULE_NAME, self.files.path.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE_NAME] = module
        assert spec.loader is not None  # spec_of gives one
        spec.loader.exec_module(module)
        return module

    def _refuse_names_of_libraries(self) -> None:
        """Raise UsageError if a named module hides one of Python or of a library."""
        _, *others = self.files.contents  # the first one is the main file
        for top in sorted({name.partition("/")[0].removesuffix(".py") for name in others}):
            if self.files.module_file(top) is None and not self.files.has_modules_in(top):
                continue
            if top in sys.stdlib_module_names or top in sys.modules or is_installed(top):
                found = f"--transform_files with {top}, which hides Python's module of this name"
                raise UsageError(found=found, expected="a name that no library has", advice="rename it")

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the code's thread, and return its result or raise its exception.

        Raises the error of a rule that the code breaks.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)
        answer: Future[T] = Future()
        self._jobs.put((answer, functools.partial(self._call, function, *args)))
        return answer.result()

    def is_in_its_thread(self) -> bool:
        """Return whether this thread is the code's. Others of this process open our own files."""
        return threading.current_thread() is self._thread

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        with _running_code(self):
            try:
                result = function(*args)
            except BaseException:
                self.raise_if_ended()
                raise
        self.raise_if_ended()
        self._tell_reads()
        return result

    def raise_if_ended(self) -> None:
        """Raise the error of a rule that the code broke, even if it caught the exception."""
        if self.error is not None:
            raise self.error

    def end(self, error: ShardprepError) -> NoReturn:
        """End the call with an error."""
        self.error = error
        raise _Ended(str(error))

    def check_may_run(self, filename: str) -> None:
        """End the call if code from a file may not run."""
        if not filename or filename.startswith("<"):  # such as <string>
            return
        path = absolute(filename)
        while not os.path.lexists(path) and "/" in path:  # a module in a zip file
            path = os.path.dirname(path)  # noqa: PTH120
        name = self.files.name_of(path)
        if name is None:
            if self._is_of_user(path):
                self.end(self.files.not_named(path))
        elif not self.files.is_as_hashed(name):  # loaded by other means than ``import``
            self.end(self.files.changed(name))

    def check_may_read(self, filename: str) -> None:
        """End the call if a file of code, which it would run as text, is not named."""
        path = absolute(filename)
        if self.files.name_of(path) is None and os.path.lexists(path) and self._is_of_user(path):
            self.end(self.files.not_named(path))

    def see_read(self, filename: str) -> None:
        """Remember a file beside the code that is read, and that the hash does not contain."""
        path = absolute(filename)
        if path in self.reads or len(self.reads) == _MAX_READS or self.files.name_of(path) is not None:
            return
        if os.path.isfile(path) and self._is_beside(path):  # noqa: PTH113
            self.reads.append(path)

    def check_text_may_run(self, text: str | bytes) -> None:
        """End the call if a text that is compiled is that of a file which was not named."""
        wanted = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        for path in self.reads:
            content = b""
            with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
                content = file.read(MAX_FILE_BYTES)
            # As Python reads text: one kind of line end, no byte order mark.
            content = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
            if content.strip() and content.strip() == wanted.replace(b"\r\n", b"\n").strip():
                self.end(self.files.not_named(path))

    def _tell_reads(self) -> None:
        for path in self.reads[self._num_told :]:
            flag = self.files.flag_to_name(path)
            say(f"warning: {self.files.path} reads {path}, which is not planned: {_IF_IT_CHANGES} {flag}")
        self._num_told = len(self.reads)

    def _is_beside(self, path: str) -> bool:
        """Return whether a file is in the code's folders: no library, and no cache in a hidden folder."""
        if is_library(path):
            return False
        for folder in self.files.folders:
            if is_below(path, str(folder)):
                inside = Path(path).relative_to(folder)
                return not any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        return False

    def keep_modules(self, new_names: Iterable[str]) -> None:
        """Remember the modules that came from the files, also those that were found by other means."""
        for name in new_names:
            if getattr(sys.modules[name], "__file__", None) in self.files.name_of_path:
                self.finder.names.add(name)
        self.modules = {name: sys.modules[name] for name in self.finder.names if name in sys.modules}

    def missing_module(self, error: ImportError) -> UsageError | None:
        """Return the error for a module that was not found, but is in a folder of the user."""
        top = (error.name or "").partition(".")[0]
        if not top.isidentifier():
            return None
        for folder in [*self.files.folders, *filter(None, [self._started_in])]:
            for path in (folder / f"{top}.py", folder / top / "__init__.py", folder / top):
                if path.exists() and (path.suffix or any(path.glob("*.py"))):
                    return self.files.not_named(str(path))
        return None

    def _is_of_user(self, path: str) -> bool:
        """Return whether a file is in the code's folders, or imported from the current folder."""
        if is_library(path):
            return False
        real = os.path.realpath(path)
        for folder in map(str, self.files.folders):
            if is_below(path, folder) or is_below(real, folder):
                return True
        # A module counts as imported from the longest folder of sys.path that it is in.
        roots = [root for root in map(absolute, sys.path) if is_below(path, root)]
        root = max(roots, key=len, default=os.path.dirname(path))  # noqa: PTH120
        currents = {str(each) for each in (self._started_in, _current_folder()) if each is not None}
        return root in currents or os.path.realpath(root) in currents

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that the code imported, "" if one does not say it."""
        versions: dict[str, str] = {}
        no_libraries = {*sys.stdlib_module_names, *OUR_PACKAGES, *self.finder.names}
        for name in sorted(self.finder.library_names - no_libraries):
            if name.startswith("_") or name not in sys.modules:
                continue
            if len(versions) == _MAX_LIBRARIES:
                break
            versions[name] = version_of(name)[:_MAX_VERSION_CHARS]
        return versions


def _current_folder() -> Path | None:
    with contextlib.suppress(OSError):  # it was removed
        return Path.cwd()
    return None


# What holds while the code runs.

_turn = threading.Lock()  # the rules hold for the whole process, so one code runs at a time
_running: UserCode | None = None
_loaded: UserCode | None = None  # whose modules are in sys.modules
_ENDINGS = [(module, name) for module in (os, posix) for name in ("_exit", "execv", "execve")]


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    """Run jobs until there is None. It holds no reference to the UserCode between them."""
    while True:
        job = jobs.get()
        if job is None:
            return
        answer, function = job
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        del job, answer, function


@contextlib.contextmanager
def _running_code(code: UserCode) -> Iterator[None]:
    """Make the rules of this module hold."""
    global _running
    with _turn, _output_to_stderr():
        _install_audit()
        _bring_modules(code)
        before = [getattr(module, name) for module, name in _ENDINGS]
        for (module, name), real in zip(_ENDINGS, before, strict=True):
            setattr(module, name, functools.partial(_end_process, code, name, real, os.getpid()))
        sys.meta_path.insert(0, code.finder)
        modules_before = {*sys.modules}
        _running = code
        try:
            yield
        finally:
            _running = None
            with contextlib.suppress(ValueError):  # the code removed it
                sys.meta_path.remove(code.finder)
            for (module, name), real in zip(_ENDINGS, before, strict=True):
                setattr(module, name, real)
            code.keep_modules(sys.modules.keys() - modules_before)


@functools.cache
def _install_audit() -> None:
    sys.addaudithook(_audit)  # it cannot be removed


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """See all code that runs from a file (modules, extension modules, texts), and the files that are read."""
    code = _running
    if code is None:
        return
    if event == "exec":
        if args[0] is not code.finder.served:
            code.check_may_run(str(getattr(args[0], "co_filename", "")))
    elif event == "import":
        if args[1]:
            code.check_may_run(os.fsdecode(args[1]))
    elif event == "open" and isinstance(args[0], (str, bytes)):
        path = os.fsdecode(args[0])
        if path.endswith(_CODE_SUFFIXES):
            if "__pycache__" not in path:
                code.check_may_read(path)
        elif code.is_in_its_thread() and not args[2] & _WRITING:
            code.see_read(path)
    elif event == "compile" and code.is_in_its_thread() and isinstance(args[0], (str, bytes)):
        code.check_text_may_run(args[0])


def _bring_modules(code: UserCode) -> None:
    """Put the code's modules into sys.modules, in place of those of the code that ran before."""
    global _loaded
    if _loaded is code:
        return
    for name, module in (_loaded.modules if _loaded else {}).items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(code.modules)
    _loaded = code


def _end_process(code: UserCode, name: str, real: Callable[..., Any], pid: int, *args: Any) -> None:
    """Stand in for a function that ends or replaces the process, which only our main thread may."""
    if os.getpid() != pid or threading.current_thread() is threading.main_thread():
        real(*args)
    found = f"a function that calls os.{name}, which would end the task"
    code.end(UsageError(path=code.files.path, found=found, expected="one that returns or raises"))


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send standard output to standard error, also that of libraries and of child processes."""
    real = -1
    with contextlib.suppress(OSError):  # one of them is closed
        real = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
        if real >= 0:
            os.dup2(real, 1)
            os.close(real)
