"""The values of tables as those of JSON, by one rule per type.

- Booleans, integers, floats: as in JSON. Strings, binary, their views: the text.
- Decimals: a string with all digits of the scale, ``"1.50"``.
- Dates, timestamps: ``"2026-01-01"``, ``"2026-01-01T03:02:00.500000"``; with a time zone in UTC, with
  ``+00:00``.
- Times: ``"03:02:00"``. Durations: ``"PT1.500000S"``, ``"-PT3S"``. Intervals: ``[months, days, ns]``.
- Lists, structs, maps: lists, objects, lists of pairs. Dictionaries, run-end encoded: their values.
- ``arrow.json``, ``arrow.uuid``, ``arrow.bool8``: what the JSON says, ``"8-4-4-4-12"`` digits, a Boolean.
  Other extension types: as stored.

A fraction of a second has 6 digits, 9 if nanoseconds need them, and none if it is 0. These have no value:
bytes that are not UTF-8, invalid JSON, a date outside the years 1 to 9999, a time outside the day, a struct
with two fields of the same name, and anything that contains one of them.

A value without one becomes an UnusableText. pyarrow's own ``to_pylist`` returns objects of pandas if that is
installed, and fails at the first value that has no Python object.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.types as types

from preprocess.read import text_fields
from preprocess.read.text_fields import JsonValue, UnusableText

ArrowType: TypeAlias = Any  # pyarrow.DataType; the library declares no types
ArrowArray: TypeAlias = Any  # pyarrow.Array or ChunkedArray
# Returns the JSON value for pyarrow's value of a stored type, which is never None.
ReadValue = Callable[[JsonValue], JsonValue]
_NANOSECONDS = {"D": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

_FIRST_DAY, _LAST_DAY = np.array(["0001-01-01", "9999-12-31"], "M8[D]").astype(np.int64).tolist()

BINARY_OF = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}

if hasattr(arrow, "string_view"):  # pyarrow 16
    BINARY_OF[arrow.string_view()] = arrow.binary_view()

TEXT_OF = {binary: text for text, binary in BINARY_OF.items()}


class _NoValue(Exception):
    """A value, and so each value that contains it, has none in JSON. ``args``: reason, detail for people."""


def json_values(array: ArrowArray, read: ReadValue) -> list[JsonValue]:
    """Return the JSON values of an array in its stored type, an UnusableText for one that has none."""
    if types.is_run_end_encoded(array.type):
        array = compute.run_end_decode(array)
    if types.is_dictionary(array.type) and "view" not in str(array.type.value_type):
        array = array.dictionary.take(array.indices)  # a thirtieth of the time; not implemented for views
    if read is _text and array.type in TEXT_OF:
        with contextlib.suppress(UnicodeDecodeError):  # nearly always all can be decoded
            return list(array.view(TEXT_OF[array.type]).to_pylist())
    try:
        values = array.to_pylist()
    except (ValueError, TypeError, LookupError, OverflowError, NotImplementedError, arrow.ArrowException):
        return [UnusableText("wrong_type", f"a value of the type {array.type} has no text")] * len(array)
    read_values: list[JsonValue] = []
    for value in values:
        try:
            read_values.append(None if value is None else read(value))
        except _NoValue as why:
            read_values.append(UnusableText(*why.args))
    return read_values


def stored_type(kind: ArrowType) -> tuple[ArrowType, ReadValue]:
    """Return the plain type that stores a type, and what reads a value of it.

    Strings are stored as binary, and times as integers. In its stored type an array can be validated whatever
    its values are, and pyarrow returns each value, whatever else is installed.
    """
    if isinstance(kind, arrow.BaseExtensionType):
        stored, read = stored_type(kind.storage_type)
        return stored, _EXTENSIONS.get(kind.extension_name, read)
    if kind in BINARY_OF or kind in TEXT_OF or types.is_fixed_size_binary(kind):
        return BINARY_OF.get(kind, kind), _text
    if types.is_dictionary(kind):
        stored, read = stored_type(kind.value_type)
        return arrow.dictionary(kind.index_type, stored, kind.ordered), read
    if types.is_run_end_encoded(kind):
        stored, read = stored_type(kind.value_type)
        return arrow.run_end_encoded(kind.run_end_type, stored), read
    if types.is_decimal(kind):
        # Decimal keeps all digits of a text, while arithmetic would round.
        return arrow.binary(kind.bit_width // 8), lambda value: format(
            Decimal(f"{int.from_bytes(value, 'little', signed=True)}E{-kind.scale}"), "f"
        )
    if types.is_float16(kind):
        return arrow.uint16(), lambda value: float(np.uint16(value).view(np.float16))
    if types.is_interval(kind):
        return kind, list  # months, days, nanoseconds
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        # A date64 has milliseconds.
        unit = "D" if types.is_date32(kind) else "ms" if types.is_date64(kind) else kind.unit
        stored = arrow.int32() if kind.bit_width == 32 else arrow.int64()
        return stored, lambda value: _text_of_time(value * _NANOSECONDS[unit], kind)
    if types.is_struct(kind):
        return _stored_struct(kind)
    if types.is_map(kind):
        key, read_key = stored_type(kind.key_type)
        item, read_item = stored_type(kind.item_type)
        return arrow.map_(key, item, kind.keys_sorted), lambda pairs: [
            [_or_none(read_key, name), _or_none(read_item, value)] for name, value in pairs
        ]
    if hasattr(kind, "value_field"):  # lists of any kind
        inner, read_item = stored_type(kind.value_type)
        if types.is_fixed_size_list(kind):
            stored = arrow.list_(inner, kind.list_size)
        else:
            name = str(kind).partition("<")[0]  # list, large_list, list_view or large_list_view
            stored = getattr(arrow, "list_" if name == "list" else name)(inner)
        return stored, lambda items: [_or_none(read_item, item) for item in items]
    return kind, same_value


def _stored_struct(kind: ArrowType) -> tuple[ArrowType, ReadValue]:
    names = [kind.field(number).name for number in range(kind.num_fields)]
    inner = [stored_type(kind.field(number).type) for number in range(kind.num_fields)]

    def read(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if len({*names}) < len(names):
            raise _NoValue("wrong_type", "an object with two fields of one name has no text")
        parts = zip(names, inner, value.values(), strict=True)
        return {name: _or_none(read_part, part) for name, (_, read_part), part in parts}

    # Fields are named by numbers, as pyarrow returns no object in which two fields have the same name.
    numbered = [arrow.field(str(number), stored) for number, (stored, _) in enumerate(inner)]
    return arrow.struct(numbered), read


def _or_none(read: ReadValue, value: JsonValue) -> JsonValue:
    return None if value is None else read(value)


def same_value(value: JsonValue) -> JsonValue:
    return value


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _NoValue("undecodable", f"byte {error.start} of the text is not utf-8") from None


def _from_json(value: bytes) -> JsonValue:
    parsed = text_fields.from_json(_text(value))
    if isinstance(parsed, UnusableText):
        raise _NoValue(parsed.reason, parsed.detail)
    return parsed


_EXTENSIONS: dict[str, ReadValue] = {
    "arrow.json": _from_json,
    "arrow.uuid": lambda value: str(uuid.UUID(bytes=value)),
    "arrow.bool8": bool,
}


def _text_of_time(nanoseconds: int, kind: ArrowType) -> str:
    """Format a time, a duration, a date or a timestamp as ISO 8601, in UTC if it has a time zone.

    A fraction of a second has 6 digits, or 9 if it needs nanoseconds. It is left out if it is 0.
    """
    is_duration = types.is_duration(kind)
    sign = "-" if is_duration and nanoseconds < 0 else ""
    seconds, rest = divmod(abs(nanoseconds) if sign else nanoseconds, 10**9)
    fraction = f".{rest:09}" if rest % 1000 else f".{rest // 1000:06}" if rest else ""
    if is_duration:
        return f"{sign}PT{seconds}{fraction}S"
    days = seconds // 86_400
    if types.is_time(kind):
        if days:
            raise _NoValue("wrong_type", "a time outside of the day has no text")
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}"
    if not _FIRST_DAY <= days <= _LAST_DAY:
        raise _NoValue("wrong_type", "a date outside of the years 1 to 9999 has no text")
    if types.is_date(kind):
        return str(np.datetime64(days, "D"))
    zone = "" if getattr(kind, "tz", None) is None else "+00:00"
    return f"{np.datetime64(seconds, 's')}{fraction}{zone}"
