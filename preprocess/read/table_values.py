"""Values of Arrow arrays as values of JSON, by one rule for each type (docs/format.md, "Values of tables").

pyarrow's own ``to_pylist`` gives objects of pandas where that is installed, and ends at the first value that
Python has no object for. Here a value that cannot be given is an UnusableText in its place.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.types as types

from preprocess.read.text_fields import UnusableText, from_json

_NANOSECONDS = {"D": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_FIRST_DAY, _LAST_DAY = np.array(["0001-01-01", "9999-12-31"], "M8[D]").astype(np.int64).tolist()
_STRINGS = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
if hasattr(arrow, "string_view"):  # pyarrow 16
    _STRINGS[arrow.string_view()] = arrow.binary_view()
_TEXTS = {binary: text for text, binary in _STRINGS.items()}


def stored_type(kind: Any) -> Any:
    """Return the type of the same bytes without what they mean: strings are binary, times are integers.

    An array that is viewed so can be checked for what it points at, whatever its values are.
    """

    def field(inner: Any) -> Any:
        return arrow.field(inner.name, stored_type(inner.type), inner.nullable)

    if isinstance(kind, arrow.BaseExtensionType):
        return stored_type(kind.storage_type)
    if kind in _STRINGS:
        return _STRINGS[kind]
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, stored_type(kind.value_type), kind.ordered)
    if types.is_decimal(kind):
        return arrow.binary(kind.bit_width // 8)
    if types.is_float16(kind):
        return arrow.uint16()
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        return arrow.int32() if kind.bit_width == 32 else arrow.int64()
    if types.is_struct(kind):
        return arrow.struct([field(kind.field(number)) for number in range(kind.num_fields)])
    if types.is_map(kind):
        return arrow.map_(field(kind.key_field), field(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return arrow.list_(field(kind.value_field), kind.list_size)
    for name in ("list", "large_list", "list_view", "large_list_view"):
        if getattr(types, f"is_{name}", lambda _: False)(kind):
            made = arrow.list_ if name == "list" else getattr(arrow, name)
            return made(field(kind.value_field))
    return kind


def json_values(array: Any, kind: Any) -> list[Any]:
    """Return the values of an array of ``kind``, viewed as its ``stored_type``."""
    if isinstance(kind, arrow.BaseExtensionType):
        return _of_extension(array, kind)
    if types.is_dictionary(kind):
        return json_values(array.dictionary.take(array.indices), kind.value_type)
    if array.type in _TEXTS:
        try:  # all at once, if they can be decoded, as nearly always
            texts: list[Any] = array.view(_TEXTS[array.type]).to_pylist()
        except UnicodeDecodeError:
            return _each(array, _decoded)
        return texts
    if types.is_decimal(kind):
        return _each(array, lambda value: _decimal(int.from_bytes(value, "little", signed=True), kind.scale))
    if types.is_fixed_size_binary(array.type):
        return _each(array, _decoded)
    if types.is_struct(kind):
        return _objects(array, kind)
    if types.is_map(kind):
        pairs = arrow.struct([kind.key_field, kind.item_field])
        rows = _lists(array, pairs)
        return [[[*pair.values()] for pair in row] if isinstance(row, list) else row for row in rows]
    if types.is_run_end_encoded(kind):
        return json_values(compute.run_end_decode(array), kind.value_type)
    if hasattr(kind, "value_type"):  # lists of any kind
        return _lists(array, kind.value_type)
    if types.is_float16(kind):
        return _each(array, lambda value: float(np.uint16(value).view(np.float16)))
    if types.is_interval(kind):
        return _each(array, list)  # months, days, nanoseconds
    # A date64 has milliseconds.
    unit = "D" if types.is_date32(kind) else "ms" if types.is_date64(kind) else getattr(kind, "unit", "")
    if unit:
        as_text = _text_of_time(kind)
        return _each(array, lambda value: as_text(value * _NANOSECONDS[unit]))
    try:
        values: list[Any] = array.to_pylist()
    except (ValueError, TypeError, LookupError, OverflowError, NotImplementedError, arrow.ArrowException):
        return [_unusable(f"a value of the type {kind}") for _ in range(len(array))]
    return values


def _each(array: Any, value_of: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else value_of(value) for value in array.to_pylist()]


def _decoded(value: bytes) -> str | UnusableText:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the text is not utf-8")


def _unusable(what: str) -> UnusableText:
    return UnusableText("wrong_type", f"{what} has no text")


def _of_extension(array: Any, kind: Any) -> list[Any]:
    values, name = json_values(array, kind.storage_type), kind.extension_name
    if name == "arrow.json":
        return [from_json(value) if isinstance(value, str) else value for value in values]
    if name == "arrow.uuid":
        return _each(array, lambda value: str(uuid.UUID(bytes=value)))
    if name == "arrow.bool8":
        return [None if value is None else value != 0 for value in values]
    return values


def _objects(array: Any, kind: Any) -> list[Any]:
    names = [kind.field(number).name for number in range(kind.num_fields)]
    if len({*names}) < len(names):
        return [_unusable("an object with two fields of one name") for _ in range(len(array))]
    columns = [json_values(array.field(number), kind.field(number).type) for number in range(len(names))]
    rows = zip(*columns, strict=True) if columns else [()] * len(array)
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return _with_nulls(array, [_whole(one, one.values()) for one in found])


def _lists(array: Any, kind: Any) -> list[Any]:
    """Return the values of lists whose items are of ``kind``."""
    if not hasattr(array, "offsets") or hasattr(array, "sizes"):  # of fixed size, or views
        rows = [None if one.values is None else json_values(one.values, kind) for one in array]
        return [None if row is None else _whole(row, row) for row in rows]
    offsets = array.offsets.to_pylist()
    first, last = (offsets[0], offsets[-1]) if offsets else (0, 0)
    if types.is_map(array.type):
        array = array.view(arrow.list_(arrow.struct([array.type.key_field, array.type.item_field])))
    values = json_values(array.values.slice(first, last - first), kind)
    rows = [values[begin - first : end - first] for begin, end in itertools.pairwise(offsets)]
    return _with_nulls(array, [_whole(row, row) for row in rows])


def _whole(value: Any, parts: Any) -> Any:
    """Return a list or an object, or why a part of it cannot be given."""
    return next((part for part in parts if type(part) is UnusableText), value)


def _with_nulls(array: Any, values: list[Any]) -> list[Any]:
    if not array.null_count:
        return values
    is_valid = array.is_valid().to_pylist()
    return [value if is_there else None for value, is_there in zip(values, is_valid, strict=True)]


def _decimal(unscaled: int, scale: int) -> str:
    digits = str(abs(unscaled))
    if scale > 0:
        digits = digits.zfill(scale + 1)
        digits = f"{digits[:-scale]}.{digits[-scale:]}"
    elif unscaled:
        digits += "0" * -scale
    return f"-{digits}" if unscaled < 0 else digits


def _text_of_time(kind: Any) -> Callable[[int], str | UnusableText]:
    """Return what writes nanoseconds as ISO 8601 does; points in time of a zone are in UTC.

    A fraction of a second has 6 digits, 9 where nanoseconds need them, and none for 0.
    """
    end = "+00:00" if getattr(kind, "tz", None) is not None else ""

    def as_text(nanoseconds: int) -> str | UnusableText:
        is_negative = types.is_duration(kind) and nanoseconds < 0
        seconds, rest = divmod(abs(nanoseconds) if is_negative else nanoseconds, 10**9)
        fraction = f".{rest:09}" if rest % 1000 else f".{rest // 1000:06}" if rest else ""
        if types.is_duration(kind):
            return f"{'-' if is_negative else ''}PT{seconds}{fraction}S"
        days = seconds // 86_400
        if types.is_time(kind):
            if days:
                return _unusable("a time outside of the day")
            return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}"
        if not _FIRST_DAY <= days <= _LAST_DAY:
            return _unusable("a date outside of the years 1 to 9999")
        if types.is_date(kind):
            return str(np.datetime64(days, "D"))
        return f"{np.datetime64(seconds, 's')}{fraction}{end}"

    return as_text
