"""What the formats of tables share: an input as a file for pyarrow, the columns in use, and their records."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import mmap
from collections.abc import Container, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.types as types

from preprocess.read import formats, inputs
from preprocess.read.formats import InputRecords, Numbers, SearchRanges
from preprocess.read.inputs import OpenInput
from preprocess.read.table_values import (
    BINARY_OF,
    TEXT_OF,
    ArrowArray,
    ArrowType,
    ReadValue,
    json_values,
    same_value,
    stored_type,
)
from preprocess.read.text_fields import FieldPath, JsonValue, NoColumn, TextFields, UnusableText
from shardprep.errors import BadInput, ReadWriteError, ShardprepError

# With libc's memory pool a task takes 24 MB less than with pyarrow's own, and the same CPU time.
arrow.set_memory_pool(arrow.system_memory_pool())

ArrowSchema: TypeAlias = Any  # pyarrow.Schema; the library declares no types
ArrowBatch: TypeAlias = Any  # pyarrow.RecordBatch
MOST_ROWS = 8192  # at a time
# Bases of pyarrow's errors, and what its Python code raises for damaged files, such as for a huge size.
_BUILT_IN_ERRORS = (ValueError, OSError, RuntimeError, LookupError, TypeError, OverflowError, MemoryError)


class InputStream(io.RawIOBase):
    """``head``, and then spans of an input, as one file for pyarrow.

    The spans are read from ``memory``, if given, without a copy.
    """

    def __init__(
        self, file: OpenInput, spans: SearchRanges, memory: mmap.mmap | None = None, head: bytes = b""
    ) -> None:
        super().__init__()
        view = None if memory is None else memoryview(memory)
        self._read = file.read_all if view is None else lambda start, end: view[start:end]
        self._head = head
        # The first span stands for the head.
        spans = [(0, len(head)), *spans]
        self._spans = spans
        self._ends = [*itertools.accumulate(end - start for start, end in spans)]
        self._position = 0
        self.error: ShardprepError | None = None  # of a failed read: pyarrow raises its own error instead

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
        """Return up to ``size`` bytes, or all that are left. Raises OSError."""
        stop = self._ends[-1] if size is None or size < 0 else min(self._position + size, self._ends[-1])
        pieces: list[JsonValue] = []
        while self._position < stop:
            number = bisect.bisect_right(self._ends, self._position)
            shift = self._spans[number][1] - self._ends[number]  # from a position in the stream to the file's
            end = min(self._ends[number], stop)
            if number == 0:
                pieces.append(self._head[self._position : end])
                self._position = end
                continue
            try:
                pieces.append(self._read(self._position + shift, end + shift))
            except ReadWriteError as error:
                self.error = error
                raise OSError(str(error)) from None
            self._position = end
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class StreamOfInput(Protocol):
    """A file for pyarrow, which remembers the error that pyarrow replaces by its own."""

    error: ShardprepError | None


@contextlib.contextmanager
def refused_by_name(file: OpenInput, name: str, stream: StreamOfInput) -> Iterator[None]:
    """Turn pyarrow's errors into ReadWriteError if a read failed, else into BadInput with the file's path."""
    try:
        yield
    except (*_BUILT_IN_ERRORS, arrow.ArrowException) as error:
        if stream.error is not None:
            raise stream.error from None
        words = str(error).split("\n")[0][:200]
        raise inputs.unreadable(file, f"cannot be read as {name} ({words})") from None


def fields_in(file: OpenInput, schema: ArrowSchema, fields: TextFields) -> TextFields:
    """Find the fields in a table. A column whose own name has dots takes precedence over a nested field.

    Raises BadInput if the text has no column, a column of another type, or more than one.
    """
    if fields.takes_records:
        return fields.of_columns(schema.names)
    is_chat = fields.is_chat
    # A conversation may be in several fields, and a table has some of them.
    lacks_all = not any(_places_of(schema, path) for path in fields.text_paths)
    places: dict[FieldPath, FieldPath] = {}
    for path in fields.paths:
        found = _places_of(schema, path)
        name = ".".join(path)
        is_text = path == fields.text_paths[0] or (path in fields.text_paths and not is_chat)
        problem = expected = ""
        kind = BadInput
        if len(found) > 1:
            shown = ", ".join(" > ".join(place) for place, _ in found)
            problem = f"{len(found)} columns or fields that {name} may mean ({shown})"
            expected = "one"
        elif is_text and not found and (lacks_all or not (is_chat or fields.is_first_of)):
            kind = NoColumn
            problem = f"no column {name}"
            expected = f"one of {', '.join(schema.names)}"
        elif is_text and found and not _can_be_text(found[0][1], is_chat=is_chat):
            problem = f"{str(found[0][1])[:200]} in the column {name}"
            expected = "lists of messages, or JSON" if is_chat else "strings"
        if problem:
            expected += "; choose another --text_field, or move the file away, and plan again"
            raise kind(path=file.path, found=problem, expected=expected)
        if found:
            places[path] = found[0][0]
    return fields.at(places)


def _places_of(kind: ArrowType, path: FieldPath) -> list[tuple[FieldPath, ArrowType]]:
    """Return where a table or a struct may have a field, and its type. An exact name is the only place."""
    if not isinstance(kind, (arrow.Schema, arrow.StructType)):
        return []
    inner = [(each.name, each.type) for each in map(kind.field, range(len(kind)))]
    places: list[tuple[FieldPath, ArrowType]] = []
    for name, each in inner:
        if name == ".".join(path):
            places.append(((name,), each))
    if places:
        return places
    for end in range(1, len(path)):
        for name, each in inner:
            if name == ".".join(path[:end]):
                if types.is_null(each):
                    places.append(((name,), each))  # all values are null, so those in them are, too
                places += [((name, *rest), of_rest) for rest, of_rest in _places_of(each, path[end:])]
    return places


def _can_be_text(kind: ArrowType, *, is_chat: bool) -> bool:
    stored, _ = stored_type(kind)
    if types.is_dictionary(stored):
        stored = stored.value_type
    # Among the stored types only lists have a value_field.
    return stored in TEXT_OF or types.is_null(stored) or (is_chat and hasattr(stored, "value_field"))


def rows_at_once(num_rows: int, num_bytes: int, batch_bytes: int) -> int:
    """Return how many rows have about ``batch_bytes``, if ``num_rows`` have ``num_bytes``."""
    return max(1, min(MOST_ROWS, batch_bytes * num_rows // max(1, num_bytes)))


def records_of_batch(
    batch: ArrowBatch, num_bytes: int, first_row: int, fields: TextFields, batch_bytes: int
) -> Iterator[InputRecords]:
    """Yield the records of a record batch, some rows at a time. The first ones count ``num_bytes``."""
    names = set(batch.schema.names)  # a table may have thousands
    columns = {path: _column(batch, names, path) for path in fields.paths}
    arrays = [column for column, _ in columns.values() if column is not None]
    most = rows_at_once(batch.num_rows, sum(array.nbytes for array in arrays), 2 * batch_bytes)
    first = 0
    while first < max(1, batch.num_rows):
        num = min(most, batch.num_rows - first)
        while num > 1 and sum(_value_bytes(array.slice(first, num)) for array in arrays) > 2 * batch_bytes:
            num //= 2
        values: dict[FieldPath, list[JsonValue]] = {
            path: [None] * num if column is None else json_values(column.slice(first, num), read)
            for path, (column, read) in columns.items()
        }
        of_text: list[JsonValue] = [values[path] for path in fields.text_paths]
        texts: Sequence[str | UnusableText] = of_text[0]
        if fields.plain_name is None or not {str}.issuperset(map(type, texts)):
            texts = [fields.text_of_values(of_row) for of_row in zip(*of_text, strict=True)]
        rows = first_row + first + np.arange(num)
        others = fields.columns(values)
        utf8_texts = formats.texts_of(texts)
        yield InputRecords(
            texts=utf8_texts, starts=rows, sizes=np.ones_like(rows), num_bytes=num_bytes, columns=others
        )
        first += max(1, num)
        num_bytes = 0


def _column(batch: ArrowBatch, names: Container[str], path: FieldPath) -> tuple[ArrowArray, ReadValue]:
    """Return the array of a field in its stored type, or None if there is none, and what reads its values.

    Raises ValueError if an offset or index in it is out of bounds.
    """
    if path[0] not in names:
        return None, same_value
    column = batch.column(path[0])
    for name in path[1:]:
        try:
            column = compute.struct_field(column, name)
        except (ValueError, KeyError, TypeError, NotImplementedError):
            return None, same_value
    stored, read = stored_type(column.type)
    column = column.view(stored)
    column.validate(full=True)
    return column, read


def _value_bytes(array: ArrowArray) -> int:
    """Return how many bytes the values of an array take at most, each counted as often as it occurs.

    Arrays may share values: those of a dictionary, of a run, and of views into one buffer.
    """
    kind = array.type
    if types.is_dictionary(kind):
        return len(array) * _longest_value_bytes(array.dictionary)
    if types.is_run_end_encoded(kind):
        return len(array) * _longest_value_bytes(array.values)
    if types.is_struct(kind):
        return sum(_value_bytes(each) for each in array.flatten())
    if types.is_map(kind):
        entries = array.offsets[-1].as_py() - array.offsets[0].as_py()
        first = array.offsets[0].as_py()
        return sum(_value_bytes(each.slice(first, entries)) for each in (array.keys, array.items))
    name = str(kind).partition("<")[0]
    if name in ("list_view", "large_list_view"):
        num_values = compute.sum(array.sizes).as_py() or 0
        return num_values * _longest_value_bytes(array.values)
    if hasattr(kind, "value_field"):
        return _value_bytes(array.flatten())
    if name in ("string_view", "binary_view"):
        return int(_view_lengths(array).sum()) + 16 * len(array)
    return max(array.nbytes, 8 * len(array))


def _longest_value_bytes(array: ArrowArray) -> int:
    """Return how many bytes a value of an array takes at most."""
    if array.type in TEXT_OF or array.type in BINARY_OF:
        if "view" in str(array.type):
            return int(_view_lengths(array).max(initial=0))
        return compute.max(compute.binary_length(array)).as_py() or 0
    return _value_bytes(array)


def _view_lengths(array: ArrowArray) -> Numbers:
    """Return the lengths of an array of views: int64[n]. A view takes 16 bytes and begins with its length."""
    views = np.frombuffer(array.buffers()[1], "<i4").reshape(-1, 4)[array.offset : array.offset + len(array)]
    return views[:, 0].astype(np.int64)
