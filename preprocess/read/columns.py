"""Rows of tables -> documents: what Parquet and Arrow have in common. Needs pyarrow."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute

from preprocess.read.format import Records, texts_of
from preprocess.read.inputs import OpenInput, unreadable
from preprocess.read.table_values import json_values, stored_type
from preprocess.read.text_fields import FieldPath, MessageFields, RecordFields, TextFields, UnusableText
from shardprep.errors import BadInput, ReadWriteError

_MOST_ROWS = 8192


# Arrays lie in libc's memory: in pyarrow's own pool a task holds 24 MB more, at equal CPU seconds.
arrow.set_memory_pool(arrow.system_memory_pool())


class InputStream(io.RawIOBase):
    """An open input, or some spans of it one after the other, as a Python file for libraries.

    Given its ``memory``, what is read is not copied.
    """

    def __init__(
        self, file: OpenInput, spans: Sequence[tuple[int, int]] = (), memory: mmap.mmap | None = None
    ) -> None:
        super().__init__()
        view = None if memory is None else memoryview(memory)
        self._read = file.read_all if view is None else lambda start, end: view[start:end]
        self._spans = spans or [(0, file.stamp.num_bytes)]
        self._ends = [*itertools.accumulate(end - start for start, end in self._spans)]
        self._position = 0
        self.error: ReadWriteError | None = None  # libraries hide it behind their own

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._ends[-1])[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> Any:
        """Return up to ``size`` bytes, or all that follow. Raises OSError."""
        num_left = self._ends[-1] - self._position
        num_left = num_left if size is None or size < 0 else min(size, num_left)
        pieces = []
        while num_left > 0:
            number = bisect.bisect_right(self._ends, self._position)
            end = self._spans[number][1]
            start = end - (self._ends[number] - self._position)
            end = min(end, start + num_left)
            try:
                pieces.append(self._read(start, end))
            except ReadWriteError as error:
                self.error = error
                raise OSError(str(error)) from None
            self._position += end - start
            num_left -= end - start
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextlib.contextmanager
def refused_by_name(file: OpenInput, name: str, stream: InputStream) -> Iterator[None]:
    """Where pyarrow raises inside: ReadWriteError for a failed read behind it, else BadInput."""
    try:
        yield
    except (*_BUILT_IN_ERRORS, arrow.ArrowException) as error:
        if stream.error is not None:
            raise stream.error from None
        words = str(error).split("\n")[0][:200]
        raise unreadable(file, f"cannot be read as {name} ({words})") from None


# What pyarrow's errors are, and what its Python part raises for values that no writer writes. A damaged size
# asks for more memory than there is.
_BUILT_IN_ERRORS = (ValueError, OSError, RuntimeError, LookupError, TypeError, OverflowError, MemoryError)


def fields_in(file: OpenInput, schema: Any, fields: TextFields) -> TextFields:
    """Find the fields in a table. A column's name may have dots, and goes before a nested field.

    Raises BadInput where the text has no column, one of another type, or two columns may be meant.
    """
    if isinstance(fields, RecordFields):
        return fields.of_columns(schema.names)
    kinds: tuple[str, ...] = _TEXTS
    expected = "strings"
    if isinstance(fields, MessageFields):
        kinds, expected = (*_LISTS, *_TEXTS), "lists of messages, or JSON"
    places: dict[FieldPath, FieldPath] = {}
    for path in fields.paths:
        found, name, is_text = _places_of(schema, path), ".".join(path), path in fields.text_paths
        problem = None
        if len(found) > 1:
            shown = ", ".join(" > ".join(place) for place, _ in found)
            problem = f"{len(found)} columns or fields that {name} may mean ({shown})", "one"
        elif is_text and not found:
            problem = f"no column {name}", f"one of {', '.join(schema.names)}"
        elif is_text and not is_one_of(found[0][1], kinds):
            problem = f"{str(found[0][1])[:200]} in the column {name}", expected
        if problem is not None:
            raise BadInput(
                f"input {file.path} has {problem[0]}, expected {problem[1]}; choose another --text_field, or "
                "move the file away, and plan anew",
                path=file.path,
                found=problem[0],
                expected=problem[1],
            )
        for place, _ in found:
            places[path] = place
    return fields.at(places)


def _places_of(kind: Any, path: FieldPath) -> list[tuple[FieldPath, Any]]:
    """Return where a table, or a struct, may have a field, and its type; a column of this very name alone."""
    if not isinstance(kind, (arrow.Schema, arrow.StructType)):
        return []
    inner = [(kind.field(number).name, kind.field(number).type) for number in range(len(kind))]
    whole_name = ".".join(path)
    found: list[tuple[FieldPath, Any]] = [((name,), each) for name, each in inner if name == whole_name]
    if found:
        return found
    for end in range(1, len(path)):
        for name, each in inner:
            if name != ".".join(path[:end]):
                continue
            if is_one_of(each, ("is_null",)):
                found.append(((name,), each))  # all of it is null, and so is what would be in it
            found += [((name, *rest), of_rest) for rest, of_rest in _places_of(each, path[end:])]
    return found


_TEXTS = (
    "is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view",
    "is_null",
)  # fmt: skip
_LISTS = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view", "is_null")


def is_one_of(kind: Any, names: tuple[str, ...]) -> bool:
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if isinstance(kind, arrow.BaseExtensionType):
        kind = kind.storage_type
    return any(getattr(types, name, lambda _: False)(kind) for name in names)


def column_names(fields: TextFields) -> list[str]:
    return [".".join(path) for path in fields.paths]


def rows_at_once(num_rows: int, num_bytes: int, batch_bytes: int) -> int:
    """Return how many rows have about ``batch_bytes``, given rows and bytes of some of them."""
    return max(1, min(_MOST_ROWS, batch_bytes * num_rows // max(1, num_bytes)))


def row_records(
    batches: Iterator[tuple[Any, int]], first_row: int, fields: TextFields, batch_bytes: int
) -> Iterator[Records]:
    """Yield the records of record batches, each with the bytes of the file that it accounts for.

    Some rows at a time, fewer where their texts are longer.
    """
    for batch, num_bytes in batches:
        columns = {path: _column(batch, path) for path in fields.paths}
        arrays = [column for column, _ in columns.values() if column is not None]
        num_in_use = sum(array.nbytes for array in arrays)
        # Of a dictionary nobody knows the bytes of some rows.
        arrays = [array for array in arrays if not arrow.types.is_dictionary(array.type)]
        most, first = rows_at_once(batch.num_rows, num_in_use, 2 * batch_bytes), 0
        while first < max(1, batch.num_rows):
            num = min(most, batch.num_rows - first)
            while num > 1 and sum(array.slice(first, num).nbytes for array in arrays) > 8 * batch_bytes:
                num //= 2
            values: dict[FieldPath, list[Any]] = {
                path: [None] * num if column is None else json_values(column.slice(first, num), kind)
                for path, (column, kind) in columns.items()
            }
            of_text: list[Any] = [values[path] for path in fields.text_paths]
            texts: Sequence[str | UnusableText] = of_text[0]
            if fields.plain_name is None or not {str}.issuperset(map(type, texts)):
                texts = [fields.text_of_values(of_row) for of_row in zip(*of_text, strict=True)]
            yield Records(
                texts=texts_of(texts),
                starts=np.arange(first_row, first_row + num, dtype=np.int64),
                sizes=np.ones(num, np.int64),
                num_bytes=num_bytes,
                columns=fields.columns(values),
            )
            first_row, first, num_bytes = first_row + num, first + max(1, num), 0


def _column(batch: Any, path: FieldPath) -> tuple[Any, Any]:
    """Return the array of a field as it is stored, once it points at nothing outside of it, and its type.

    (None, None) where there is none. A value that cannot be read is a bad row and no bad file. Raises
    ValueError.
    """
    if path[0] not in batch.schema.names:
        return None, None
    column = batch.column(path[0])
    for name in path[1:]:
        try:
            column = compute.struct_field(column, name)
        except (ValueError, KeyError, TypeError, NotImplementedError):
            return None, None
    kind = column.type
    column = column.view(stored_type(kind))
    column.validate(full=True)
    if arrow.types.is_dictionary(column.type):
        values = column.dictionary
        if is_one_of(values.type, ("is_string_view", "is_binary_view")):  # which pyarrow cannot take
            column = arrow.DictionaryArray.from_arrays(column.indices, values.cast(arrow.large_binary()))
    return column, kind
