"""``plan --transform FILE``: one function of the user's that every document goes through.

    def transform(record):             # the fields of the line or row (of .txt: text), input and place
        return record["text"].strip()  # a str, for --record chat a list of messages; None leaves it out

What runs is the file that is named where the process starts, if its hash is the plan's; the copy in a data
set is for people, and never runs.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from preprocess.read.format import MOST_DOCUMENT_BYTES, too_long
from preprocess.read.text_fields import UnusableText
from shardprep import LeaveOut
from shardprep.errors import NotFound, Refused, UsageError
from shardprep.files import NOT_THERE, make_subfolder, publish_bytes, read_regular
from shardprep.format.names import TRANSFORM_DIR
from shardprep.format.plan import PlanOptions

_MAX_BYTES = 64 << 20  # of the function's file, or of a table of its own
_MOST_REASONS = 100  # of LeaveOut, in a shard: its manifest names each
_MOST_REASON_CHARS = 80


class Transform:
    """The user's function, loaded; of one process. Raises NotFound, UsageError, BadInput."""

    def __init__(self, path: Path, files: str) -> None:
        """``files``: other files that it uses, by their names beside it: "words.txt,helpers.py"."""
        self.path = path
        self.contents = {path.name: _read(path)}
        for name in filter(None, map(str.strip, files.split(","))):
            if name in self.contents or Path(name).name != name:
                raise UsageError.of_value("--transform_files", name, f"names of other files beside {path}")
            self.contents[name] = _read(path.with_name(name))
        hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.contents.items()}
        function_hash = hashes.pop(path.name)  # whatever the file's name is
        self.sha256 = hashlib.sha256(json.dumps([function_hash, hashes], sort_keys=True).encode()).hexdigest()
        self.cpu_s = 0.0  # so far, in the function
        module = types.ModuleType("shardprep_transform")
        module.__file__ = str(path)
        folder = path.resolve().parent
        if len(self.contents) > 1 and str(folder) not in sys.path:
            sys.path.append(str(folder))  # behind all others: a file there hides no library
        before = {*sys.modules}
        try:
            exec(compile(self.contents[path.name], str(path), "exec"), vars(module))  # noqa: S102
        except (Exception, SystemExit) as error:  # sys.exit(0) would look like success
            found = f"no function that can be loaded: {_words_of(error, path)}"
            raise UsageError(path=path, found=found, expected="transform(record)") from None
        for name in {*sys.modules} - before:
            imported = Path(getattr(sys.modules[name], "__file__", None) or "/")
            if imported.parent == folder and imported.name not in self.contents:
                raise UsageError(
                    f"--transform {path} imports {imported.name} beside it; name it, so that it counts "
                    f"in the plan: --transform_files {','.join([*list(self.contents)[1:], imported.name])}",
                    path=imported,
                    remedy="--transform_files",
                )
        self._function: Any = vars(module).get("transform")
        if not callable(self._function):
            raise UsageError(path=path, found="no function transform(record)", expected="transform")

    def texts(
        self, documents: Iterable[tuple[dict[str, Any], int]], name: str, reasons: set[str], *, is_chat: bool
    ) -> Iterator[bytes | UnusableText]:
        """Yield the text of each document, of a chat its messages as JSON, or why it is left out.

        Args:
            documents: of each its record, and its place in the input.
            name: of the input.
            reasons: those of LeaveOut so far, in this shard.
        """
        began_s = time.thread_time()
        for record, place in documents:
            record["input"], record["place"] = name, place
            try:
                result = self._function(record)
            except LeaveOut as reason:
                shown = "".join(char if char.isprintable() else " " for char in _text_of(reason))
                words = " ".join(shown.split())[:_MOST_REASON_CHARS]
                # A reason with a score in it would be another one for each document.
                if not words or (words not in reasons and len(reasons) >= _MOST_REASONS):
                    yield UnusableText("transform", words)
                else:
                    reasons.add(words)
                    yield UnusableText(f"transform: {words}", words)
            except (Exception, SystemExit) as error:
                yield UnusableText("transform_error", f"{_words_of(error, self.path)}, for {name}:{place}")
            else:
                yield _checked(result, is_chat=is_chat)
        self.cpu_s += time.thread_time() - began_s

    def publish_copy(self, folder: Path) -> None:
        """Keep the files in a data set, for people. Raises CannotWrite, ReadWriteError."""
        for name, raw in self.contents.items():
            publish_bytes(make_subfolder(folder, TRANSFORM_DIR) / name, raw)


def transform_of(options: PlanOptions, path: Path | None) -> Transform | None:
    """Load the function of a plan, None where it has none. ``path``: as --transform names it.

    Raises Refused where that is not the function that was planned, UsageError where one of both is missing.
    """
    expected = options.transform_sha256
    if not expected and path is None:
        return None
    if not expected:
        expected = "none, as the plan has no function; or plan anew with it, into a new folder"
        raise UsageError(found=f"--transform {path}", expected=expected)
    if path is None:
        raise UsageError(
            f"the plan's documents go through a function (sha256 {expected[:12]}), and code in a data set "
            "never runs; name the file: --transform FILE",
            expected="--transform FILE",
            remedy="--transform FILE",
        )
    found = Transform(path, options.transform_files)
    if found.sha256 != expected:
        expected = (
            f"the plan's function, {expected[:12]}; bring it back as it was planned, or plan anew into a new "
            f"folder; {TRANSFORM_DIR}/ in the data set has a copy to compare"
        )
        raise Refused(path=path, found=f"sha256 {found.sha256[:12]}", expected=expected)
    return found


def _checked(result: object, *, is_chat: bool) -> bytes | UnusableText:
    """Return a text, or messages as JSON; b"" for white space alone, which counts as an empty line."""
    if result is None:
        return UnusableText("transform", "the function left it out")
    if isinstance(result, str) and not is_chat:
        try:
            text = b"" if result.isspace() else result.encode()
        except UnicodeEncodeError:
            return UnusableText("surrogate", "half of a surrogate pair, in what the function returned")
        return too_long("its text") if len(text) > MOST_DOCUMENT_BYTES else text
    if isinstance(result, list) and is_chat:
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            return UnusableText("transform_error", f"it returned messages that cannot be JSON ({error})")
    expected = "a list of messages" if is_chat else "a str"
    return UnusableText(
        "transform_error", f"it returned {type(result).__name__}, expected {expected} or None"
    )


def _words_of(error: BaseException, path: Path) -> str:
    """Return what was raised, and the last line of the user's file that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.lineno:
        lines = [error.lineno]
    at = f" ({path.name} line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {_text_of(error)}{at}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's own, whose text fails
        return ""


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, max_bytes=_MAX_BYTES)
    except NOT_THERE:
        raise NotFound(f"{path}, of --transform, is no file", path=path) from None
