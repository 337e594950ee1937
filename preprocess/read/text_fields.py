"""Take the text out of a record: one field, several fields in a template, or whole records for a function."""

from __future__ import annotations

import copy
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from msgspec import Struct

from shardprep.errors import BadInput, UsageError
from shardprep.format.choices import choices_for
from shardprep.format.plan_options import PlanOptions

FieldPath = tuple[str, ...]
JsonValue: TypeAlias = Any  # a str, int, float, bool, None, list or dict, as a parser of JSON gives it
InputRecord: TypeAlias = dict[str, JsonValue]  # a document as its file has it: its fields by name
Columns = dict[str, list[JsonValue]]  # beside the texts, by name: "id", "source", "record"
# A longer document is left out. The limit is the same on all machines, so that the bytes of a shard are, too.
MOST_DOCUMENT_BYTES = 64 << 20
# Levels of lists and objects. Python's own limit depends on its version and stack; orjson's is 1,024.
MAX_JSON_DEPTH = 512
_MOST_KEPT = 4096  # files with fields of their own, at once
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


class UnusableText(Struct, frozen=True):
    """Why a record has no usable text: a reason, for the counts, and a detail for people."""

    reason: str  # see docs/format.md, "Documents left out"
    detail: str


MISSING = object()  # the value of a field that a record does not have


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {MOST_DOCUMENT_BYTES} bytes")


class NoColumn(BadInput):
    """A table has no column for the text."""


class TextFields:
    """Takes the text, and id and source if asked for, out of records. A dot in a name goes one level down.

    Raises UsageError if the options have an invalid name or template.
    """

    is_chat = False  # whether texts are the JSON of conversations
    takes_records = False  # whether the record itself is a column, for a function that makes the text

    def __init__(self, options: PlanOptions, path: str = "") -> None:
        """``path``: of a file in the input folder, if the options may differ by file."""
        self.options = options
        named = {"id": options.id_field, "source": options.source_field}
        self.named = {each: _path(name, f"--{each}_field") for each, name in named.items() if name}
        self._literals: list[str] = []  # of a template: the text before each field, and after the last one
        if options.text_template:
            self.text_paths, self._literals = _parsed_template(options.text_template)
        else:
            names = choices_for(path, options.text_field, ":") or [options.text_field]
            self.text_paths = [_path(name, "--text_field") for name in names]
        # Whether the text is the value of the first of these fields that a record has.
        self.is_first_of = not self._literals and len(self.text_paths) > 1
        # Whether the field of each text is told, as several may have it.
        is_several = "," in options.text_field or ":" in options.text_field
        self.tells_field = is_several and not (self._literals or self.is_chat)
        # Name of the text's field if it is a single one at the top level, else None.
        is_plain = not (self._literals or self.is_first_of) and len(self.text_paths[0]) == 1
        self.plain_name = self.text_paths[0][0] if is_plain else None
        self._of_files: dict[str, TextFields] = {}
        self._in_turn: list[TextFields] = []
        if self.is_first_of:
            self._in_turn = [self._single(path) for path in self.text_paths]

    def _single(self, path: FieldPath) -> TextFields:
        """Return what takes one of several fields alone."""
        single = copy.copy(self)
        single.text_paths = [path]
        single.is_first_of = False
        single.plain_name = path[0] if len(path) == 1 else None
        return single

    def at(self, places: Mapping[FieldPath, FieldPath]) -> TextFields:
        """Return a copy with the paths of a table. ``places`` maps those that differ."""
        copied = copy.copy(self)
        copied.text_paths = [places.get(path, path) for path in self.text_paths]
        copied.named = {each: places.get(path, path) for each, path in self.named.items()}
        return copied

    def of_file(self, path: str) -> TextFields:
        """Return what takes texts out of a file, given its path in the input folder."""
        if ":" not in self.options.text_field:
            return self
        if path not in self._of_files:
            if len(self._of_files) >= _MOST_KEPT:
                self._of_files.clear()
            self._of_files[path] = type(self)(self.options, path)
        return self._of_files[path]

    def of_columns(self, names: Sequence[str]) -> TextFields:  # noqa: ARG002
        """Return what takes texts out of a table with these columns."""
        return self

    def in_turn(self) -> list[TextFields]:
        """Return what takes each of several fields alone, in their order."""
        return self._in_turn or [self]

    def chosen(self, record: JsonValue) -> TextFields:
        """Return what takes the first of several fields that a record has, or self if it has none."""
        for single in self._in_turn:
            if value_at(record, single.text_paths[0]) not in (MISSING, None):
                return single
        return self

    def chosen_value(self, values: Sequence[JsonValue]) -> tuple[FieldPath, JsonValue]:
        """Return the first of several fields that has a value, given the values of ``text_paths``."""
        pairs = list(zip(self.text_paths, values, strict=True))
        for path, value in pairs:
            if value is not MISSING and value is not None:
                return path, value
        # That which is null says more than that which is missing.
        return next((pair for pair in pairs if pair[1] is None), pairs[0])

    @property
    def paths(self) -> list[FieldPath]:
        """Return all fields that have to be read, each once."""
        return list(dict.fromkeys((*self.text_paths, *self.named.values())))

    @property
    def paths_of_columns(self) -> list[FieldPath]:
        """Return the fields whose values ``columns`` needs."""
        return self.paths if self.tells_field else list(self.named.values())

    def columns(self, values: Mapping[FieldPath, Sequence[JsonValue]]) -> dict[str, list[str]]:
        """Return the columns beside the texts: "id" and "source", each if the options name its field.

        If --text_field names several fields, "field" is the one that has the text. ``values``: of the
        fields in ``paths_of_columns``, by path.
        """
        columns = {each: list(map(name_of, values[path])) for each, path in self.named.items()}
        if self.tells_field:
            of_records = zip(*(values[path] for path in self.text_paths), strict=True)
            columns["field"] = [".".join(self.chosen_value(each)[0]) for each in of_records]
        return columns

    def columns_of_single(self, single: TextFields, num_records: int) -> dict[str, list[str]]:
        """Return the columns if ``single`` has the text of all records, and no others are asked for."""
        return {"field": [".".join(single.text_paths[0])] * num_records} if self.tells_field else {}

    def of_records(self, records: Sequence[JsonValue]) -> tuple[list[str | UnusableText], Columns]:
        """Return the text of each record, and the columns beside the texts."""
        texts = [each if isinstance(each, UnusableText) else self.text(each) for each in records]
        values = {path: [value_at(each, path) for each in records] for path in self.paths_of_columns}
        return texts, dict(self.columns(values))

    def text(self, record: JsonValue) -> str | UnusableText:
        if not isinstance(record, dict):
            return UnusableText("bad_json", f"it is {_kind(record)}, expected an object")
        return self.text_of_values([value_at(record, path) for path in self.text_paths])

    def text_of_values(self, values: Sequence[JsonValue]) -> str | UnusableText:
        """Return the text, given the values of ``text_paths``."""
        if self.is_first_of:
            path, value = self.chosen_value(values)
            return value if type(value) is str else unusable(path, value)
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
    paths = list[FieldPath]()
    literals = [""]
    why = ""
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
        expected = "one such as '{input}\\n\\n{output}'"
        advice = "braces are {{ and }}"
        raise UsageError(found=found, expected=expected, advice=advice)
    return paths, literals


class RecordFields(TextFields):
    """Takes whole records as a column "record" beside the texts, for the function of ``--transform``."""

    takes_records = True

    def __init__(self, options: PlanOptions, columns_of_table: Sequence[str] = ()) -> None:
        super().__init__(options)
        self.text_paths = [(name,) for name in columns_of_table]
        self.plain_name = None
        self.is_first_of = False
        self.tells_field = False
        self._in_turn = []

    def of_file(self, path: str) -> TextFields:  # noqa: ARG002
        return self

    def of_columns(self, names: Sequence[str]) -> TextFields:
        return RecordFields(self.options, names)

    def of_records(self, records: Sequence[JsonValue]) -> tuple[list[str | UnusableText], Columns]:
        texts, columns = super().of_records(records)
        columns["record"] = list(records)
        return texts, columns

    def text_of_values(self, values: Sequence[JsonValue]) -> str | UnusableText:  # noqa: ARG002
        return "a record"  # a placeholder for the result of --transform

    def columns(self, values: Mapping[FieldPath, Sequence[JsonValue]]) -> Columns:
        values_of: Columns = {**super().columns(values)}
        if self.text_paths:
            names = [name for (name,) in self.text_paths]
            values_of["record"] = []
            for row in zip(*(values[path] for path in self.text_paths), strict=True):
                # A value that cannot be read becomes None.
                read = (None if isinstance(value, UnusableText) else value for value in row)
                values_of["record"].append(dict(zip(names, read, strict=True)))
        return values_of


def from_json(text: str) -> JsonValue:
    """Parse JSON. Returns UnusableText if it is invalid, or if an object has a key twice."""
    try:
        orjson.loads(text)  # rejects NaN, and halves of surrogate pairs
        return json.loads(text, object_pairs_hook=_object_of)  # keeps all digits of integers
    except (ValueError, RecursionError):
        return UnusableText("bad_json", "a string that should be JSON is not")


def parsed_if_json(value: JsonValue) -> JsonValue:
    if not isinstance(value, str):
        return value
    parsed = from_json(value)
    return value if isinstance(parsed, UnusableText) else parsed


def _object_of(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return fields


def _path(name: str, flag: str) -> FieldPath:
    path = tuple(name.split("."))
    if not all(path):
        raise UsageError.of_value(flag, name, "names of fields between dots, such as metadata.title")
    return path


def value_at(record: JsonValue, path: FieldPath) -> JsonValue:
    """Return the value of a field, or MISSING, which ``unusable`` describes."""
    for name in path:
        if not isinstance(record, dict) or name not in record:
            return MISSING
        record = record[name]
    return record


def unusable(path: FieldPath, value: JsonValue, expected: str = "a string") -> UnusableText:
    if isinstance(value, UnusableText):
        return value
    name = ".".join(path)
    if value is MISSING:
        return UnusableText("no_field", f"there is no field {name}")
    if value is None:
        return UnusableText("null_field", f"the field {name} is null")
    return UnusableText("wrong_type", f"the field {name} is {_kind(value)}, expected {expected}")


def name_of(value: JsonValue) -> str:
    """Return an id or a source as text: a string as it is, another value as JSON, "" for none."""
    if value is MISSING or value is None or isinstance(value, UnusableText):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _kind(value: JsonValue) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", str: "a string"}
    names |= {type(None): "null", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
