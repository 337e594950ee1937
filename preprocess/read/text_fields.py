"""What of a record is the text: one field, several by a template, or what a function of the user's makes.

``plan --transform FILE`` names the function, which every document goes through:

    def transform(record):             # the fields of the line or row (of .txt: text), input and place
        return record["text"].strip()  # a str, for --record chat a list of messages; None leaves it out

What runs is the file that is named where the process starts, if its hash is the plan's; the copy in a data
set is for people, and never runs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import string
import sys
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shardprep import LeaveOut
from shardprep.errors import NotFound, Refused, UsageError
from shardprep.files import NOT_THERE, make_subfolder, publish_bytes, read_regular
from shardprep.format.names import TRANSFORM_DIR
from shardprep.format.plan import PlanOptions

FieldPath = tuple[str, ...]
# A longer document is left out by name. The same on all machines, so that all leave out the same documents.
MOST_DOCUMENT_BYTES = 64 << 20
# Lists and objects within each other. Python's own limit is what is left of its stack, another one in each
# version; orjson's is 1,024.
MAX_JSON_DEPTH = 512
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
_MAX_BYTES = 64 << 20  # of the function's file, or of a table of its own
_MOST_REASONS = 100  # of LeaveOut, in a shard: its manifest names each
_MOST_REASON_CHARS = 80


@dataclass(frozen=True)
class UnusableText:
    """Why a record gives no text: a reason to count by, and a detail for people."""

    reason: str  # see docs/format.md, "Documents left out"
    detail: str


_MISSING = object()


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {MOST_DOCUMENT_BYTES} bytes")


class TextFields:
    """Takes the text, and what else is wanted, out of records. Field names have dots for nesting.

    Raises UsageError where the options' names are none, or the template: ``{input}\\n\\n{output}``.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        named = {"id": options.id_field, "source": options.source_field}
        self.named = {each: _path(name, f"--{each}_field") for each, name in named.items() if name}
        self._literals: list[str] = []  # of a template: one before each field, and one behind the last
        if options.text_template:
            self.text_paths, self._literals = _parsed_template(options.text_template)
        else:
            self.text_paths = [_path(options.text_field, "--text_field")]
        # The one field of the text, where a look-up of it is all there is to do.
        is_plain = not self._literals and len(self.text_paths[0]) == 1
        self.plain_name = self.text_paths[0][0] if is_plain else None

    def at(self, places: Mapping[FieldPath, FieldPath]) -> TextFields:
        """Return these fields where a table has them; those that ``places`` does not name stay."""
        other = copy.copy(self)
        other.text_paths = [places.get(path, path) for path in self.text_paths]
        other.named = {each: places.get(path, path) for each, path in self.named.items()}
        return other

    @property
    def paths(self) -> list[FieldPath]:
        """All fields that have to be read, each once."""
        return list(dict.fromkeys((*self.text_paths, *self.named.values())))

    def columns(self, values: Mapping[FieldPath, Sequence[Any]]) -> dict[str, list[str]]:
        """What records tell beside their texts: "id" and "source" of each, where a field of it was named.

        ``values``: those of the fields of ``named``.
        """
        return {each: list(map(name_of, values[path])) for each, path in self.named.items()}

    def text(self, record: Any) -> str | UnusableText:
        if not isinstance(record, dict):
            return UnusableText("bad_json", f"it is {_kind(record)}, expected an object")
        return self.text_of_values([value_at(record, path) for path in self.text_paths])

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:
        """Return the text, given the value of each of ``text_paths``."""
        for path, value in zip(self.text_paths, values, strict=True):
            if type(value) is not str:
                return unusable(path, value)
        if not self._literals:
            return values[0]
        pairs = zip(self._literals, (*values, ""), strict=True)
        return "".join(literal + value for literal, value in pairs)


def _parsed_template(template: str) -> tuple[list[FieldPath], list[str]]:
    """Return the fields of ``{input}\\n\\n{output}``, and the text before each and behind the last one."""
    text = re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], template)
    paths, literals, why = list[FieldPath](), [""], ""
    try:
        for before, name, spec, conversion in string.Formatter().parse(text):
            literals[-1] += before
            if name is not None:
                if spec or conversion or not name:
                    why = "a field is written {name}, without : or !"
                else:
                    paths.append(_path(name, "--text_template"))
                literals.append("")
    except ValueError as error:
        why = str(error)
    if why or not paths:
        found = f"--text_template {template!r} ({why or 'it names no field'})"
        expected = "one such as '{input}\\n\\n{output}'; braces are {{ and }}"
        raise UsageError(found=found, expected=expected)
    return paths, literals


class MessageFields(TextFields):
    """The same of conversations: the text is their list of messages as JSON, to be rendered later."""

    def __init__(self, options: PlanOptions) -> None:
        super().__init__(options)
        self.plain_name = None

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:
        """Return the messages as JSON, given the value of the field."""
        (value,), (path,) = values, self.text_paths
        if value is _MISSING or value is None or isinstance(value, UnusableText):
            return unusable(path, value)
        # Some tables have them as JSON, since messages may differ in their fields: all of the list, or each.
        value = _parsed_if_json(value)
        if not isinstance(value, list):
            return unusable(path, value, "a list")
        messages = list(map(_parsed_if_json, value))
        try:
            return json.dumps(messages, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:  # a NaN of a table
            return UnusableText("wrong_type", f"the field {'.'.join(path)} cannot be JSON ({error})")


class RecordFields(TextFields):
    """Takes whole records, for the function of ``--transform``: a column "record" beside the texts.

    ``columns_of_table``: the names of a table's columns.
    """

    def __init__(self, options: PlanOptions, columns_of_table: Sequence[str] = ()) -> None:
        super().__init__(options)
        self.text_paths = [(name,) for name in columns_of_table]
        self.plain_name = None

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:  # noqa: ARG002
        return "a record"  # never encoded: what --transform returns takes its place

    def columns(self, values: Mapping[FieldPath, Sequence[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {**super().columns(values)}
        if self.text_paths:
            names, found["record"] = [name for (name,) in self.text_paths], []
            for row in zip(*(values[path] for path in self.text_paths), strict=True):
                # A value that cannot be read is null.
                read = (None if isinstance(value, UnusableText) else value for value in row)
                found["record"].append(dict(zip(names, read, strict=True)))
        return found


def from_json(text: str) -> Any:
    """Return what a string says as JSON; UnusableText where it is none, or an object names a key twice."""
    try:
        orjson.loads(text)  # it knows no NaN and no half of a surrogate pair
        return json.loads(text, object_pairs_hook=_object_of)  # of integers it loses no digit
    except (ValueError, RecursionError):
        return UnusableText("bad_json", "a string that should be JSON is not")


def _parsed_if_json(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(found := from_json(value), UnusableText):
        return value
    return found


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _path(name: str, flag: str) -> FieldPath:
    path = tuple(name.split("."))
    if not all(path):
        raise UsageError.of_value(flag, name, "names of fields between dots, such as metadata.title")
    return path


def value_at(record: Any, path: FieldPath) -> Any:
    """Return the value of a field, however deep; what ``unusable`` knows as missing where there is none."""
    for name in path:
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
    return record


def unusable(path: FieldPath, value: Any, expected: str = "a string") -> UnusableText:
    if isinstance(value, UnusableText):
        return value
    name = ".".join(path)
    if value is _MISSING:
        return UnusableText("no_field", f"there is no field {name}")
    if value is None:
        return UnusableText("null_field", f"the field {name} is null")
    return UnusableText("wrong_type", f"the field {name} is {_kind(value)}, expected {expected}")


def name_of(value: Any) -> str:
    """Return an id or a source as text: strings as they are, other values as JSON; "" for none."""
    if value is _MISSING or value is None or isinstance(value, UnusableText):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a string"}
    names |= {type(None): "null", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def text_fields_of(options: PlanOptions) -> TextFields:
    """Return what of a record is the text. Raises UsageError where the names or the template are none."""
    if options.transform_sha256:
        return RecordFields(options)
    return MessageFields(options) if options.record == "chat" else TextFields(options)


# The user's function. -----------------------------------------------------------------------------------


class Transform:
    """The user's function, loaded; of one process. Raises NotFound, UsageError, BadInput."""

    def __init__(self, path: Path, files: str, planned_sha256: str | None = None) -> None:
        """``files``: other files that it uses, by their names beside it: "words.txt,helpers.py".

        With a hash of planning, nothing but what was planned runs. Raises Refused for others.
        """
        self.path = path
        self.contents: dict[str, bytes] = {}
        for name in [path.name, *filter(None, map(str.strip, files.split(",")))]:
            if name in self.contents or Path(name).name != name:
                raise UsageError.of_value("--transform_files", name, f"names of other files beside {path}")
            try:
                self.contents[name] = read_regular(path.with_name(name), max_bytes=_MAX_BYTES)
            except NOT_THERE:
                missing = path.with_name(name)
                raise NotFound(f"{missing}, of --transform, is no file", path=missing) from None
        hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.contents.items()}
        function_hash = hashes.pop(path.name)  # whatever the file's name is
        self.sha256 = hashlib.sha256(json.dumps([function_hash, hashes], sort_keys=True).encode()).hexdigest()
        if planned_sha256 not in (None, self.sha256):
            expected = f"{str(planned_sha256)[:12]} of the planned function, of which DATA/{TRANSFORM_DIR}/ "
            expected += "has a copy; bring it back, or plan into a new folder"
            raise Refused(path=path, found=f"sha256 {self.sha256[:12]}", expected=expected)
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
                files = ",".join([*list(self.contents)[1:], imported.name])
                message = f"{path} imports {imported.name}; so that it counts, add --transform_files {files}"
                raise UsageError(message, path=imported, remedy="--transform_files")
        self._function: Any = vars(module).get("transform")
        if not callable(self._function):
            raise UsageError(path=path, found="no function transform(record)", expected="transform")

    def texts(
        self, documents: Iterable[tuple[dict[str, Any], int]], name: str, reasons: set[str], *, is_chat: bool
    ) -> Iterator[bytes | UnusableText]:
        """Yield the text of each document, of a chat its messages as JSON, or why it is left out.

        ``documents``: of each its record, and its place in the input ``name``. ``reasons``: those of LeaveOut
        so far, in this shard.
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
    planned = options.transform_sha256
    if not planned and path is None:
        return None
    if path is None:
        found = f"a plan whose documents go through a function (sha256 {planned[:12]}), and no file of it"
        raise UsageError(found=found, expected="--transform FILE", remedy="--transform FILE")
    if not planned:
        expected = "none, as the plan has no function; or plan anew with it, into a new folder"
        raise UsageError(found=f"--transform {path}", expected=expected)
    return Transform(path, options.transform_files, planned)


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
    expected = "a list of messages" if is_chat else "a str"
    why = f"it returned {type(result).__name__}, expected {expected} or None"
    if isinstance(result, list) and is_chat:
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            why = f"it returned messages that cannot be JSON ({error})"
    return UnusableText("transform_error", why)


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
