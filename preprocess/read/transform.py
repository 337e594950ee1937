"""Call the user's function for each document: ``plan --transform FILE``.

    def transform(record):             # a dict of the fields of the line or row; of .txt: "text"
        return record["text"].strip()  # a str, for --record chat a list of messages; None leaves it out

A task runs the file that its own ``--transform`` names, if it has the planned hash. The copy in the data set
is only for reading, and is never run.

A document is bad if the function raises. That has to be a property of the document, so an error that may
pass (``passing_error``) ends the attempt, and after any other error the function is called once more with the
same record: it has to raise the same type again. Not promised: an error that the function catches itself is
never seen here, and a passing error that lasts for both calls and is not among ``passing_error`` counts as
the document's.
"""

from __future__ import annotations

import json
import pickle
import re
import shlex
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from preprocess.read.code_files import CodeFiles
from preprocess.read.messages import PARTS_BESIDE
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, InputRecord, UnusableText, too_long
from preprocess.read.user_code import UserCode
from shardprep import LeaveOut
from shardprep.errors import ReadWriteError, Refused, UsageError
from shardprep.files import NOT_THERE, FileStamp
from shardprep.format import commands
from shardprep.format.data_folder import OF_THIS_COMMAND, DataFolder
from shardprep.format.names import TRANSFORM_DIR
from shardprep.format.plan_options import PlanOptions

_MAX_REASONS = 100  # of LeaveOut in a shard, because its manifest lists them
_MAX_REASON_CHARS = 80
_MAX_MESSAGE_CHARS = 1000  # of an exception, which may quote its document


class Record(dict[str, Any]):
    """What the user's function gets: exactly the fields of the data, whatever their names.

    Attributes say where the document is, so that they hide no field.
    """

    __slots__ = ("input_offset", "input_path")
    input_path: str  # relative to the input folder
    input_offset: int  # where the document begins: a byte or a row, see docs/format.md, "Places"


class Transform:
    """A user's function."""

    def __init__(self, path: Path, names: str, planned_sha256: str | None = None) -> None:
        """Read and hash its files. Raises as CodeFiles, and Refused if the hash is not the planned one.

        ``names``: those of ``--transform_files``. No code runs before ``load``.
        """
        self.files = CodeFiles(path, names)
        self.path = self.files.path
        self.sha256 = self.files.sha256
        self.cpu_s = 0.0  # so far, in the function
        if planned_sha256 not in (None, self.sha256):
            expected = f"{str(planned_sha256)[:12]} of the planned function"
            advice = f"a copy is in DATA/{TRANSFORM_DIR}/; restore the function, or plan into a new folder"
            raise Refused(path=path, found=f"sha256 {self.sha256[:12]}", expected=expected, advice=advice)
        self._code = UserCode(self.files)
        self._function: Any = None

    def load(self) -> None:
        """Load the function into this process, unless it is. Raises UsageError if that fails."""
        if self._function is not None:
            return
        try:
            module = self._code.load()
        except (UsageError, Refused):
            raise
        except BaseException as error:
            found = f"a function that cannot be loaded: {self._describe(error)}"
            # A file that is not there is like a module that is not there.
            is_lasting = isinstance(error, (*NOT_THERE, PermissionError)) or _is_import(error)
            if passing_error(error) is not None and not is_lasting:
                expected = "transform(record)"
                advice = "this may pass: run this again"
                raise ReadWriteError(path=self.path, found=found, expected=expected, advice=advice) from None
            missing = self._missing_module(error)
            raise missing or UsageError(path=self.path, found=found, expected="transform(record)") from None
        function = vars(module).get("transform")
        if not callable(function):
            raise UsageError(path=self.path, found="no function transform(record)", expected="transform")
        self._function = function

    def texts(
        self,
        documents: Iterable[tuple[InputRecord, int]],
        name: str,
        reasons: set[str] | None,
        *,
        is_chat: bool,
    ) -> list[bytes | UnusableText]:
        """Return the text of each document (of a chat, its messages as JSON), or why it is left out.

        ``documents``: (fields, place in the input) of each. ``name``: of the input. ``reasons``: those of
        LeaveOut so far in this shard, to which new ones are added; None keeps all. Raises as ``load``,
        ReadWriteError for an error that may pass, and the errors of the rules in user_code.py.
        """

        def texts_in_thread() -> list[bytes | UnusableText]:
            began_s = time.thread_time()
            results = []
            for fields, offset in documents:
                result = self._result_of(fields, name, offset, reasons)
                results.append(
                    result if isinstance(result, UnusableText) else _checked(result, is_chat=is_chat)
                )
            self.cpu_s += time.thread_time() - began_s
            return results

        self.load()
        return self._code.call(texts_in_thread)

    def _result_of(self, fields: InputRecord, name: str, offset: int, reasons: set[str] | None) -> Any:
        """Return what the function returns for a document, or why the document is left out."""
        place = f"{name}:{offset}"
        pickled = _pickled_if_nested(fields)
        result, error = self._called(fields, name, offset)
        if error is None:
            return result
        self._refuse_passing(error, place)
        if isinstance(error, LeaveOut):
            return _left_out(error, reasons)
        again, second = self._called(fields if pickled is None else pickle.loads(pickled), name, offset)  # noqa: S301
        if second is not None:
            self._refuse_passing(second, place)
        if second is None or _type_of(second) != _type_of(error):
            then = f"raised {self._describe(second)}" if second else f"returned {type(again).__name__}"
            message = f"{self.path} raised {self._describe(error)}, for {place}; called again, it {then}"
            todo = "its result must depend on the record only; if the cause has passed, run this again"
            raise ReadWriteError(f"{message}; {todo}", path=self.path)
        return UnusableText("transform_error", f"{self._describe(error)}, for {place}")

    def _called(self, fields: InputRecord, name: str, offset: int) -> tuple[Any, BaseException | None]:
        """Call the function. Return its result, and the exception that it raised."""
        record = Record(fields)
        record.input_path = name
        record.input_offset = offset
        result, caught = None, None
        try:
            result = self._function(record)
        except BaseException as error:
            caught = error
        if self._code.error is not None:
            self._code.error.advise(f"that was for {name}:{offset}")
            raise self._code.error
        return result, caught

    def _refuse_passing(self, error: BaseException, place: str) -> None:
        """Raise ReadWriteError, or UsageError for a missing library, if an error may pass."""
        if passing_error(error) is None:
            return
        if _is_import(error):
            found = f"a function that cannot import what it needs: {self._describe(error)}, for {place}"
            expected = "the libraries of the machine that planned; install them here"
            raise self._missing_module(error) or UsageError(path=self.path, found=found, expected=expected)
        why = "this may pass, so no document is left out for it"
        todo = "run this again, or if a document is at fault, catch the error and raise LeaveOut for it"
        message = f"{self.path} raised {self._describe(error)}, for {place}; {why}: {todo}"
        raise ReadWriteError(message, path=self.path)

    def _missing_module(self, error: BaseException) -> UsageError | None:
        """Return the error for a module of the user that was not named, if an import failed for that."""
        for each in _with_causes(error):
            if isinstance(each, ImportError):
                return self._code.missing_module(each)
        return None

    def _describe(self, error: BaseException) -> str:
        """Describe an exception, with the last line of the user's files in its traceback."""
        names = self.files.name_of_path
        frames = traceback.extract_tb(error.__traceback__)
        lines = [(names[frame.filename], frame.lineno) for frame in frames if frame.filename in names]
        if isinstance(error, SyntaxError) and error.lineno and error.filename in names:
            lines = [(names[error.filename], error.lineno)]
        at = f" ({lines[-1][0]} line {lines[-1][1]})" if lines else ""
        message = _message_of(error)
        if isinstance(error, AssertionError) and "daemonic processes" in message:
            message += "; it must start no processes, as tasks already use all CPUs"
        return f"{type(error).__name__}: {message}{at}"

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that the function imported, by name."""
        return self._code.versions()

    def stamps_of_copy(self) -> dict[str, FileStamp]:
        """Return the stamps of the files that ``publish_copy`` writes, by their names in a data set."""
        return {f"{TRANSFORM_DIR}/{name}": FileStamp.of(raw) for name, raw in self.files.contents.items()}

    def publish_copy(self, folder: DataFolder, *, is_first: bool = False) -> None:
        """Copy the files into a data set, for people to read.

        ``is_first``: before the plan. Then another file stays, and Refused is raised; else it is replaced.
        Raises CannotWrite, ReadWriteError.
        """
        for name, raw in self.files.contents.items():
            place = f"{TRANSFORM_DIR}/{name}"
            folder.make_subfolder(place.rpartition("/")[0])
            if is_first:
                folder.publish_equal(place, raw, what=OF_THIS_COMMAND)
            else:
                folder.publish(place, raw)


def transform_of(data_dir: DataFolder, options: PlanOptions, path: Path | None) -> Transform | None:
    """Load the function of a plan from ``--transform``, ``path``. Returns None if the plan has none.

    Raises Refused if it is not the planned function, UsageError if only one of plan and path has a function.
    """
    planned = options.transform_sha256
    if not planned and path is None:
        return None
    if path is None:
        found = f"a plan with a function for documents (sha256 {planned[:12]}), but no file with it"
        flags = shlex.join(commands.flags_of_input(data_dir))
        raise UsageError(path=data_dir, found=found, expected=f"its file: {flags}", remedy=flags)
    if not planned:
        expected = "none, as the plan has no function"
        advice = "or plan with it into a new folder"
        raise UsageError(found=f"--transform {path}", expected=expected, advice=advice)
    transform = Transform(path, options.transform_files, planned)
    transform.load()
    return transform


# Errors that may pass. ----------------------------------------------------------------------------------

# Types, by name because most libraries are not imported: a child that did not answer in time, a pool whose
# process died, memory of a GPU, and what PEP 249 calls errors of a database's operation.
_PASSING_TYPES = frozenset({
    "BrokenExecutor", "OperationalError", "OutOfMemoryError", "TimeoutError", "TimeoutExpired",
})  # fmt: skip
# What libraries in C++ and Rust, and Python for threads, raise as a RuntimeError or a panic.
_PASSING_TEXT = re.compile(
    "can't start new thread|can't allocate memory|cannot allocate memory|out of memory|bad_alloc|"
    "resource temporarily unavailable|too many open files|stale file handle|os error [0-9]+",
    re.IGNORECASE,
)


def passing_error(error: BaseException) -> BaseException | None:
    """Return the error that may pass among an error, its causes and what was handled when it was raised.

    These pass: MemoryError; OSError, with timeouts and connections; ImportError, as another machine may have
    the library; KeyboardInterrupt; and the types and texts above. LeaveOut is the user's decision, so only
    errors of the system count behind it: MemoryError, ImportError, and OSError with an errno. A library that
    raises OSError for bad data, as gzip does, gives none.
    """
    is_decided = isinstance(error, LeaveOut)
    for each in _with_causes(error):
        if isinstance(each, (MemoryError, ImportError)):
            return each
        if isinstance(each, OSError) and (each.errno is not None or not is_decided):
            return each
        if is_decided:
            continue
        names = {kind.__name__ for kind in type(each).__mro__}
        if isinstance(each, KeyboardInterrupt) or names & _PASSING_TYPES:
            return each
        may_be_system = isinstance(each, RuntimeError) or not isinstance(each, Exception)
        if may_be_system and _PASSING_TEXT.search(_message_of(each)):
            return each
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all that led to it, each once. ``from None`` hides a cause only from people."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__]
        grouped = getattr(each, "exceptions", ())  # of an ExceptionGroup
        if isinstance(grouped, (tuple, list)):
            todo += [one for one in grouped if isinstance(one, BaseException)]


def _type_of(error: BaseException) -> tuple[str, str]:
    """Return the type by its names: a class may be defined anew in each call."""
    return type(error).__module__, type(error).__qualname__


def _is_import(error: BaseException) -> bool:
    return isinstance(passing_error(error), ImportError)


def _pickled_if_nested(fields: InputRecord) -> bytes | None:
    """Return a copy of the fields if one of them can be changed in a record, which copies the top level."""
    for value in fields.values():
        if isinstance(value, (dict, list)):
            return pickle.dumps(fields)
    return None


# Results. -----------------------------------------------------------------------------------------------


_CHOSEN = "transform: "  # begins the reasons of LeaveOut


def bounded_reason(reason: str, reasons: set[str]) -> str:
    """Return a reason why a document is left out, without that of LeaveOut if a shard has too many others.

    ``reasons``: those of LeaveOut so far; a new one is added.
    """
    if not reason.startswith(_CHOSEN):
        return reason
    # A reason that contains, say, a score would be different for each document.
    if reason not in reasons and len(reasons) >= _MAX_REASONS:
        return "transform"
    reasons.add(reason)
    return reason


def _left_out(error: LeaveOut, reasons: set[str] | None) -> UnusableText:
    shown = "".join(char if char.isprintable() else " " for char in _message_of(error))
    reason = " ".join(shown.split())[:_MAX_REASON_CHARS]
    if not reason:
        return UnusableText("transform", reason)
    full = f"{_CHOSEN}{reason}"
    if reasons is not None:
        full = bounded_reason(full, reasons)
    return UnusableText(full, reason)


def _checked(result: object, *, is_chat: bool) -> bytes | UnusableText:
    """Return what a function returned as a text, or as JSON of messages. A blank text becomes empty."""
    if result is None:
        return UnusableText("transform", "the function left it out")
    if isinstance(result, str) and not is_chat:
        try:
            # Methods of str: a class of the user may have others.
            text = b"" if str.isspace(result) else str.encode(result)
        except UnicodeEncodeError:
            return UnusableText("surrogate", "half of a surrogate pair, in what the function returned")
        return too_long("its text") if len(text) > MOST_DOCUMENT_BYTES else text
    expected = "a list of messages, or a dict with them and tools," if is_chat else "a str"
    why = f"it returned {type(result).__name__}, expected {expected} or None"
    if is_chat and _is_conversation(result):
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            why = f"it returned messages that cannot be JSON ({_message_of(error)})"
    return UnusableText("transform_error", why)


def _is_conversation(result: object) -> bool:
    """Return whether a result is messages, or a conversation of nothing but what a template gets."""
    if not isinstance(result, dict):
        return isinstance(result, list)
    parts = {"messages": list, **PARTS_BESIDE}
    are_known = all(isinstance(value, parts.get(key, ())) for key, value in result.items())
    return are_known and "messages" in result


def _message_of(error: BaseException) -> str:
    """Return the text of an exception, without what cannot be written or varies between processes."""
    try:
        text = str(error)
    except BaseException:
        return ""
    text = text[:_MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", text)
