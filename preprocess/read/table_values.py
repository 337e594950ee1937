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

_UNITS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_DAY, _LAST_DAY = np.array(["0001-01-01", "9999-12-31"], "M8[D]").astype(np.int64).tolist()
_STRINGS = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
if hasattr(arrow, "string_view"):  # pyarrow 16
    _STRINGS[arrow.string_view()] = arrow.binary_view()
_TEXTS = {binary: text for text, binary in _STRINGS.items()}


def stored_type(kind: Any) -> Any:
    """Return the type of the same bytes without what they mean: strings are binary, times are integers.

    An array that is viewed so can be checked for what it points at, whatever its values are.
    """
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
        return arrow.struct([_stored_field(kind.field(number)) for number in range(kind.num_fields)])
    if types.is_map(kind):
        return arrow.map_(_stored_field(kind.key_field), _stored_field(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return arrow.list_(_stored_field(kind.value_field), kind.list_size)
    for name in ("list", "large_list", "list_view", "large_list_view"):
        if getattr(types, f"is_{name}", lambda _: False)(kind):
            made = arrow.list_ if name == "list" else getattr(arrow, name)
            return made(_stored_field(kind.value_field))
    return kind


def _stored_field(field: Any) -> Any:
    return arrow.field(field.name, stored_type(field.type), field.nullable)


def json_values(array: Any, kind: Any) -> list[Any]:
    """Return the values of an array of ``kind``, viewed as its ``stored_type``."""
    if isinstance(kind, arrow.BaseExtensionType):
        return _of_extension(array, kind)
    if types.is_dictionary(kind):
        return json_values(array.dictionary.take(array.indices), kind.value_type)
    if array.type in _TEXTS:
        return _texts(array)
    if types.is_fixed_size_binary(array.type) and not types.is_decimal(kind):
        return [None if value is None else decoded(value) for value in array.to_pylist()]
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
    if (of_number := _of_numbers(kind)) is not None:
        return [None if value is None else of_number(value) for value in array.to_pylist()]
    if types.is_date(kind) or types.is_timestamp(kind):
        return _dates(array.to_pylist(), kind)
    try:
        values: list[Any] = array.to_pylist()
    except (ValueError, TypeError, LookupError, OverflowError, NotImplementedError, arrow.ArrowException):
        return [_unusable(f"a value of the type {kind}") for _ in range(len(array))]
    return values


def decoded(value: bytes) -> str | UnusableText:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the text is not utf-8")


def _unusable(what: str) -> UnusableText:
    return UnusableText("wrong_type", f"{what} has no text")


def _texts(array: Any) -> list[Any]:
    try:  # all at once, if they can be decoded, as nearly always
        texts: list[Any] = array.view(_TEXTS[array.type]).to_pylist()
    except UnicodeDecodeError:
        return [None if value is None else decoded(value) for value in array.to_pylist()]
    return texts


def _of_extension(array: Any, kind: Any) -> list[Any]:
    values, name = json_values(array, kind.storage_type), kind.extension_name
    if name == "arrow.json":
        return [from_json(value) if isinstance(value, str) else value for value in values]
    if name == "arrow.uuid":
        return [None if value is None else str(uuid.UUID(bytes=value)) for value in array.to_pylist()]
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


def _of_numbers(kind: Any) -> Callable[[Any], Any] | None:
    """What gives the value of one stored number; None for the types that are not looked at one by one."""
    if types.is_decimal(kind):
        return lambda value: _decimal(int.from_bytes(value, "little", signed=True), kind.scale)
    if types.is_float16(kind):
        return lambda value: float(np.uint16(value).view(np.float16))
    if types.is_time(kind):
        return lambda value: _time(value, kind.unit)
    if types.is_duration(kind):
        return lambda value: _duration(value, kind.unit)
    if types.is_interval(kind):
        return list  # months, days, nanoseconds
    return None


def _decimal(unscaled: int, scale: int) -> str:
    digits = str(abs(unscaled))
    if scale > 0:
        digits = digits.zfill(scale + 1)
        digits = f"{digits[:-scale]}.{digits[-scale:]}"
    elif unscaled:
        digits += "0" * -scale
    return f"-{digits}" if unscaled < 0 else digits


def _fraction(parts: int, unit: str) -> str:
    """Return what stands behind a second: 6 digits, 9 where nanoseconds need them, nothing for 0."""
    nanoseconds = parts * (10**9 // _UNITS_PER_S[unit])
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09}" if nanoseconds % 1000 else f".{nanoseconds // 1000:06}"


def _time(value: int, unit: str) -> str | UnusableText:
    seconds, parts = divmod(value, _UNITS_PER_S[unit])
    if not 0 <= seconds < 86400:
        return _unusable("a time outside of the day")
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{_fraction(parts, unit)}"


def _duration(value: int, unit: str) -> str:
    """As in ISO 8601, in seconds."""
    seconds, parts = divmod(abs(value), _UNITS_PER_S[unit])
    return f"{'-' if value < 0 else ''}PT{seconds}{_fraction(parts, unit)}S"


def _dates(values: list[int | None], kind: Any) -> list[Any]:
    """Days, and points in time: as in ISO 8601; those of a zone are in UTC, which needs no table of zones."""
    is_date, end = types.is_date(kind), ""
    # A date64 has milliseconds.
    unit = kind.unit if not is_date else "ms" if kind.bit_width == 64 else "D"
    if not is_date and kind.tz is not None:
        end = "+00:00"
    found: list[Any] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        seconds, parts = (value * 86400, 0) if unit == "D" else divmod(value, _UNITS_PER_S[unit])
        days = seconds // 86400
        if not _FIRST_DAY <= days <= _LAST_DAY:
            found.append(_unusable("a date outside of the years 1 to 9999"))
        elif is_date:
            found.append(str(np.datetime64(days, "D")))
        else:
            found.append(f"{np.datetime64(seconds, 's')}{_fraction(parts, unit)}{end}")
    return found
