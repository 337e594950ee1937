"""Take the text out of a record: one field, several fields in a template, or the result of a user's function.

``plan --transform FILE`` names the file of the function, which is called for each document:

    def transform(record):             # fields of the line or row (of .txt: "text"), "input" and "place"
        return record["text"].strip()  # a str, for --record chat a list of messages; None leaves it out

A task runs the file that its own ``--transform`` names, if it has the planned hash. The copy in the data set
is only for reading, and is never run.
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
# A longer document is left out. The limit is the same on all machines, so that the bytes of a shard are, too.
MOST_DOCUMENT_BYTES = 64 << 20
# Levels of lists and objects. Python's own limit depends on its version and stack; orjson's is 1,024.
MAX_JSON_DEPTH = 512
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
_MAX_FILE_BYTES = 64 << 20  # of the function's file, and of each file that it uses
_MAX_REASONS = 100  # of LeaveOut in a shard, because its manifest lists them
_MAX_REASON_CHARS = 80


@dataclass(frozen=True)
class UnusableText:
    """Why a record has no usable text: a reason, for the counts, and a detail for people."""

    reason: str  # see docs/format.md, "Documents left out"
    detail: str


_MISSING = object()  # the value of a field that a record does not have


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {MOST_DOCUMENT_BYTES} bytes")


class TextFields:
    """Takes the text, and id and source if asked for, out of records. A dot in a name goes one level down.

    Raises UsageError if the options have an invalid name or template.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        named = {"id": options.id_field, "source": options.source_field}
        self.named = {each: _path(name, f"--{each}_field") for each, name in named.items() if name}
        self._literals: list[str] = []  # of a template: the text before each field, and after the last one
        if options.text_template:
            self.text_paths, self._literals = _parsed_template(options.text_template)
        else:
            self.text_paths = [_path(options.text_field, "--text_field")]
        # Name of the text's field if it is a single one at the top level, else None.
        is_plain = not self._literals and len(self.text_paths[0]) == 1
        self.plain_name = self.text_paths[0][0] if is_plain else None

    def at(self, places: Mapping[FieldPath, FieldPath]) -> TextFields:
        """Return a copy with the paths of a table; ``places`` maps those that differ."""
        copied = copy.copy(self)
        copied.text_paths = [places.get(path, path) for path in self.text_paths]
        copied.named = {each: places.get(path, path) for each, path in self.named.items()}
        return copied

    @property
    def paths(self) -> list[FieldPath]:
        """Return all fields that have to be read, each once."""
        return list(dict.fromkeys((*self.text_paths, *self.named.values())))

    def columns(self, values: Mapping[FieldPath, Sequence[Any]]) -> dict[str, list[str]]:
        """Return the columns beside the texts: "id" and "source", each if the options name its field.

        ``values``: of the fields in ``named``, by path.
        """
        return {each: list(map(name_of, values[path])) for each, path in self.named.items()}

    def text(self, record: Any) -> str | UnusableText:
        if not isinstance(record, dict):
            return UnusableText("bad_json", f"it is {_kind(record)}, expected an object")
        return self.text_of_values([value_at(record, path) for path in self.text_paths])

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:
        """Return the text, given the values of ``text_paths``."""
        for path, value in zip(self.text_paths, values, strict=True):
            if type(value) is not str:
                return unusable(path, value)
        if not self._literals:
            return values[0]
        pairs = zip(self._literals, (*values, ""), strict=True)
        return "".join(literal + value for literal, value in pairs)


def _parsed_template(template: str) -> tuple[list[FieldPath], list[str]]:
    """Return the fields of a template like ``{input}\\n\\n{output}``, and the literals around them."""
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


TOOLS_COLUMN = "field of the template: "  # begins the names of columns with such fields
_TEMPLATE_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEMPLATE_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")


class MessageFields(TextFields):
    """Takes conversations out of records. The text is the JSON of their messages, to be rendered later.

    If the chat template names tools or documents, these fields of a record are columns, too, because a
    template that does not get them renders another text than the data is meant for.
    """

    def __init__(self, options: PlanOptions) -> None:
        super().__init__(options)
        self.plain_name = None
        (messages,) = self.text_paths
        code = " ".join(_TEMPLATE_CODE.findall(options.chat_template))
        for name in ("tools", "documents"):
            if re.search(rf"(?<![\w.]){name}\b", _TEMPLATE_STRING.sub("", code)):
                for path in ((name,), (*messages[:-1], name)):  # also beside nested messages
                    self.named[TOOLS_COLUMN + ".".join(path)] = path

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:
        """Return the messages as JSON, given the value of the field."""
        (value,), (path,) = values, self.text_paths
        if value is _MISSING or value is None or isinstance(value, UnusableText):
            return unusable(path, value)
        # In some tables the list, or each message, is a string of JSON, as messages may have other fields.
        value = _parsed_if_json(value)
        if not isinstance(value, list):
            return unusable(path, value, "a list")
        messages = list(map(_parsed_if_json, value))
        try:
            return json.dumps(messages, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:  # such as a NaN in a table
            return UnusableText("wrong_type", f"the field {'.'.join(path)} cannot be JSON ({error})")


class RecordFields(TextFields):
    """Takes whole records as a column "record" beside the texts, for the function of ``--transform``."""

    def __init__(self, options: PlanOptions, columns_of_table: Sequence[str] = ()) -> None:
        super().__init__(options)
        self.text_paths = [(name,) for name in columns_of_table]
        self.plain_name = None

    def text_of_values(self, values: Sequence[Any]) -> str | UnusableText:  # noqa: ARG002
        return "a record"  # a placeholder for the result of --transform

    def columns(self, values: Mapping[FieldPath, Sequence[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {**super().columns(values)}
        if self.text_paths:
            names, found["record"] = [name for (name,) in self.text_paths], []
            for row in zip(*(values[path] for path in self.text_paths), strict=True):
                # A value that cannot be read becomes None.
                read = (None if isinstance(value, UnusableText) else value for value in row)
                found["record"].append(dict(zip(names, read, strict=True)))
        return found


def from_json(text: str) -> Any:
    """Parse JSON. Returns UnusableText if it is invalid, or if an object has a key twice."""
    try:
        orjson.loads(text)  # rejects NaN, and halves of surrogate pairs
        return json.loads(text, object_pairs_hook=_object_of)  # keeps all digits of integers
    except (ValueError, RecursionError):
        return UnusableText("bad_json", "a string that should be JSON is not")


def _parsed_if_json(value: Any) -> Any:
    if not isinstance(value, str) or isinstance(found := from_json(value), UnusableText):
        return value
    return found


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _path(name: str, flag: str) -> FieldPath:
    path = tuple(name.split("."))
    if not all(path):
        raise UsageError.of_value(flag, name, "names of fields between dots, such as metadata.title")
    return path


def value_at(record: Any, path: FieldPath) -> Any:
    """Return the value of a field, or _MISSING, which ``unusable`` describes."""
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
    """Return an id or a source as text: a string as it is, another value as JSON, "" for none."""
    if value is _MISSING or value is None or isinstance(value, UnusableText):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a string"}
    names |= {type(None): "null", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def text_fields_of(options: PlanOptions) -> TextFields:
    """Return the TextFields of these options. Raises UsageError if a name or the template is invalid."""
    if options.transform_sha256:
        return RecordFields(options)
    return MessageFields(options) if options.record == "chat" else TextFields(options)


# The user's function. -----------------------------------------------------------------------------------


class Transform:
    """A user's function, loaded into this process."""

    def __init__(self, path: Path, files: str, planned_sha256: str | None = None) -> None:
        """Load it. Raises NotFound, UsageError, and Refused before any code runs if the hash differs.

        ``files``: names of other files that it uses, in the folder of ``path``: "words.txt,helpers.py".
        """
        self.path = path
        self.contents: dict[str, bytes] = {}
        for name in [path.name, *filter(None, map(str.strip, files.split(",")))]:
            if name in self.contents or Path(name).name != name:
                raise UsageError.of_value("--transform_files", name, f"names of other files beside {path}")
            try:
                self.contents[name] = read_regular(path.with_name(name), max_bytes=_MAX_FILE_BYTES)
            except NOT_THERE:
                missing = path.with_name(name)
                raise NotFound(f"{missing}, of --transform, does not exist", path=missing) from None
        hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.contents.items()}
        function_hash = hashes.pop(path.name)  # the name of the file does not count
        self.sha256 = hashlib.sha256(json.dumps([function_hash, hashes], sort_keys=True).encode()).hexdigest()
        if planned_sha256 not in (None, self.sha256):
            expected = f"{str(planned_sha256)[:12]} of the planned function; a copy is in "
            expected += f"DATA/{TRANSFORM_DIR}/; restore the function, or plan into a new folder"
            raise Refused(path=path, found=f"sha256 {self.sha256[:12]}", expected=expected)
        self.cpu_s = 0.0  # so far, in the function
        module = types.ModuleType("shardprep_transform")
        module.__file__ = str(path)
        folder = path.resolve().parent
        if len(self.contents) > 1 and str(folder) not in sys.path:
            sys.path.append(str(folder))  # last, so that a file there hides no library
        before = {*sys.modules}
        try:
            exec(compile(self.contents[path.name], str(path), "exec"), vars(module))  # noqa: S102
        except (Exception, SystemExit) as error:  # sys.exit(0) would look like success
            found = f"a function that cannot be loaded: {_describe(error, path)}"
            raise UsageError(path=path, found=found, expected="transform(record)") from None
        for name in {*sys.modules} - before:
            imported = Path(getattr(sys.modules[name], "__file__", None) or "/")
            if imported.parent == folder and imported.name not in self.contents:
                files = ",".join([*list(self.contents)[1:], imported.name])
                message = f"{path} imports {imported.name}; to plan it, too, add --transform_files {files}"
                raise UsageError(message, path=imported, remedy="--transform_files")
        self._function: Any = vars(module).get("transform")
        if not callable(self._function):
            raise UsageError(path=path, found="no function transform(record)", expected="transform")

    def texts(
        self, documents: Iterable[tuple[dict[str, Any], int]], name: str, reasons: set[str], *, is_chat: bool
    ) -> Iterator[bytes | UnusableText]:
        """Yield the text of each document (of a chat, its messages as JSON), or why it is left out.

        ``documents``: (record, place in the input) of each. ``name``: of the input. ``reasons``: those of
        LeaveOut so far in this shard; new ones are added.
        """
        began_s = time.thread_time()
        for record, place in documents:
            record["input"], record["place"] = name, place
            try:
                result = self._function(record)
            except LeaveOut as error:
                shown = "".join(char if char.isprintable() else " " for char in _message_of(error))
                reason = " ".join(shown.split())[:_MAX_REASON_CHARS]
                # A reason that contains, say, a score would be different for each document.
                if not reason or (reason not in reasons and len(reasons) >= _MAX_REASONS):
                    yield UnusableText("transform", reason)
                else:
                    reasons.add(reason)
                    yield UnusableText(f"transform: {reason}", reason)
            except (Exception, SystemExit) as error:
                yield UnusableText("transform_error", f"{_describe(error, self.path)}, for {name}:{place}")
            else:
                yield _checked(result, is_chat=is_chat)
        self.cpu_s += time.thread_time() - began_s

    def publish_copy(self, folder: Path) -> None:
        """Copy the files into a data set, for people to read. Raises CannotWrite, ReadWriteError."""
        for name, raw in self.contents.items():
            publish_bytes(make_subfolder(folder, TRANSFORM_DIR) / name, raw)


def transform_of(options: PlanOptions, path: Path | None) -> Transform | None:
    """Load the function of a plan from ``--transform``, ``path``. Returns None if the plan has none.

    Raises Refused if it is not the planned function, UsageError if only one of plan and path has a function.
    """
    planned = options.transform_sha256
    if not planned and path is None:
        return None
    if path is None:
        found = f"a plan with a function for documents (sha256 {planned[:12]}), but no file with it"
        raise UsageError(found=found, expected="--transform FILE", remedy="--transform FILE")
    if not planned:
        expected = "none, as the plan has no function; or plan with it into a new folder"
        raise UsageError(found=f"--transform {path}", expected=expected)
    return Transform(path, options.transform_files, planned)


def _checked(result: object, *, is_chat: bool) -> bytes | UnusableText:
    """Return what a function returned as a text, or as JSON of messages. A blank text becomes empty."""
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


def _describe(error: BaseException, path: Path) -> str:
    """Describe an exception, with the last line of the user's file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.lineno:
        lines = [error.lineno]
    at = f" ({path.name} line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {_message_of(error)}{at}"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's exception class, whose __str__ fails
        return ""
