"""Some rows of a large record batch of an Arrow file: of each column in use, the bytes of these rows alone.

pyarrow reads a record batch whole: of one with 1.1 GB of text a task held 2.2 GB. Here the places of a
batch's buffers say where rows lie, and arrays are made of slices of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from preprocess.formats.arrow_messages import Buffers, Message, buffers_of
from preprocess.formats.columns import arrow_of, rows_at_once
from preprocess.inputs import OpenInput

_NUM_OWN_BUFFERS = {  # of a column, without those of its children
    "is_null": 0,
    "is_struct": 1,
    "is_fixed_size_list": 1,
    "is_list": 2,
    "is_large_list": 2,
    "is_map": 2,
    "is_dictionary": 2,
    "is_primitive": 2,
    "is_fixed_size_binary": 2,
    "is_decimal": 2,
    "is_string": 3,
    "is_large_string": 3,
    "is_binary": 3,
    "is_large_binary": 3,
}
_TEXTS = ("is_string", "is_large_string", "is_binary", "is_large_binary")
_SLICED = (*_TEXTS, "is_null", "is_struct", "is_list", "is_large_list", "is_primitive")


@dataclass(frozen=True)
class _Column:
    """A column, or a child of one: its type, and its buffers in the file."""

    kind: Any
    num_rows: int
    has_nulls: bool  # else nobody looks at the bits that say which
    places: Sequence[tuple[int, int]]
    children: Sequence[_Column]


@dataclass(frozen=True)
class RowSlices:
    """A record batch that is read some rows at a time."""

    file: OpenInput
    names: list[str]
    columns: list[_Column]
    num_rows: int

    def read(self, batch_bytes: int) -> Iterator[Any]:
        """pyarrow's RecordBatches of about twice ``batch_bytes``, of the columns in use.

        Raises ReadWriteError; ValueError where the batch is damaged.
        """
        arrow = arrow_of(".arrow")
        num_bytes = sum(map(_num_bytes, self.columns))
        most, first = rows_at_once(self.num_rows, num_bytes, 2 * batch_bytes), 0
        while True:
            num = min(most, self.num_rows - first)
            while num > 1 and sum(self._text_bytes(column, first, num) for column in self.columns) > (
                8 * batch_bytes
            ):
                num //= 2  # texts are longer here
            arrays = [self._array(arrow, column, first, num) for column in self.columns]
            yield arrow.RecordBatch.from_arrays(arrays, names=self.names)
            first += num
            if first >= self.num_rows:
                return

    def _text_bytes(self, column: _Column, first: int, num: int) -> int:
        if not _is_one_of(column.kind, _TEXTS):
            return 0
        width = _offset_bytes(column.kind)
        ends = [self._offsets(column, row, 0, width)[0] for row in (first, first + num)]
        return int(ends[1] - ends[0])

    def _array(self, arrow: Any, column: _Column, first: int, num: int) -> Any:
        """Rows [first, first + num) of a column."""
        kind, types = column.kind, arrow.types
        if first + num > column.num_rows:
            raise ValueError(f"a column has {column.num_rows} rows, expected {first + num}")
        if types.is_null(kind) or not num:
            return arrow.nulls(num, kind)
        own: list[Any] = [self._bits(column, 0, first, num) if column.has_nulls else None]
        children: list[Any] = []
        if types.is_struct(kind):
            children = [self._array(arrow, child, first, num) for child in column.children]
        elif types.is_boolean(kind):
            own.append(self._bits(column, 1, first, num))
        elif types.is_primitive(kind):
            width = kind.bit_width // 8
            own.append(self._read(column, 1, first * width, (first + num) * width))
        else:
            width = _offset_bytes(kind)
            offsets = self._offsets(column, first, num, width)
            begin, end = int(offsets[0]), int(offsets[-1])
            own.append((offsets - offsets[0]).tobytes())
            if column.children:
                children = [self._array(arrow, column.children[0], begin, end - begin)]
            else:
                own.append(self._read(column, 2, begin, end))
        buffers = [None if data is None else arrow.py_buffer(data) for data in own]
        return arrow.Array.from_buffers(kind, num, buffers, children=children or None)

    def _offsets(self, column: _Column, first: int, num: int, width: int) -> Any:
        """Where each of the rows begins, and the last one ends. Raises ValueError where they descend."""
        data = self._read(column, 1, first * width, (first + num + 1) * width)
        offsets = np.frombuffer(data, f"<i{width}")
        if int(offsets[0]) < 0 or np.any(offsets[1:] < offsets[:-1]):
            raise ValueError("the places of a column's values do not ascend")
        return offsets

    def _bits(self, column: _Column, number: int, first: int, num: int) -> bytes:
        """The bits of the rows, the first one's in front."""
        data = self._read(column, number, first // 8, (first + num + 7) // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return np.packbits(bits[first % 8 : first % 8 + num], bitorder="little").tobytes()

    def _read(self, column: _Column, number: int, start: int, end: int) -> bytes:
        begin, stop = column.places[number]
        if not start <= end <= stop - begin:
            raise ValueError(f"a buffer of {stop - begin} bytes has no bytes {start} to {end}")
        return self.file.read_all(begin + start, begin + end)


def slices_of(file: OpenInput, batch: Message, schema: Any, names: list[str]) -> RowSlices | None:
    """A record batch by rows; None where it has to be read whole.

    That is where it is compressed, or a column in use is neither strings, lists, structs nor numbers, or one
    before it has buffers whose number its type does not say. Raises BadInput, ReadWriteError.
    """
    buffers = buffers_of(file, batch)
    if not buffers.is_plain:
        return None
    columns: dict[str, _Column] = {}
    rest = _Rest(buffers)
    for item in schema:
        column = rest.take(item.type)
        if column is None:
            break
        columns[item.name] = column
    wanted = [name for name in dict.fromkeys(names) if name in schema.names]
    if any(name not in columns or not _can_be_sliced(columns[name]) for name in wanted):
        return None
    if any(columns[name].num_rows != batch.num_rows for name in wanted):
        return None  # pyarrow says what is wrong
    return RowSlices(file, wanted, [columns[name] for name in wanted], batch.num_rows)


class _Rest:
    """The nodes and buffers of a batch that no column has taken yet."""

    def __init__(self, buffers: Buffers) -> None:
        self._nodes, self._places = iter(buffers.nodes), iter(buffers.places)

    def take(self, kind: Any) -> _Column | None:
        """The next column, which is of this type; None where it cannot be told."""
        names = (name for name in _NUM_OWN_BUFFERS if _is_one_of(kind, (name,)))
        name, node = next(names, None), next(self._nodes, None)
        if name is None or node is None:
            return None
        num_rows, num_null = node
        own = [place for _, place in zip(range(_NUM_OWN_BUFFERS[name]), self._places, strict=False)]
        kinds = [kind.field(number).type for number in range(kind.num_fields)]
        children = [] if name == "is_dictionary" else [self.take(child) for child in kinds]
        if len(own) < _NUM_OWN_BUFFERS[name] or None in children:
            return None
        if num_null and own and not _size(own[0]):
            return None  # damaged: nothing says which of its rows are null
        present = [child for child in children if child is not None]
        return _Column(kind, num_rows, num_null != 0, own, present)


def _can_be_sliced(column: _Column) -> bool:
    return _is_one_of(column.kind, _SLICED) and all(map(_can_be_sliced, column.children))


def _is_one_of(kind: Any, names: tuple[str, ...]) -> bool:
    types = arrow_of(".arrow").types
    return any(getattr(types, name)(kind) for name in names)


def _offset_bytes(kind: Any) -> int:
    return 8 if _is_one_of(kind, ("is_large_string", "is_large_binary", "is_large_list")) else 4


def _size(place: tuple[int, int]) -> int:
    return place[1] - place[0]


def _num_bytes(column: _Column) -> int:
    return sum(map(_size, column.places)) + sum(map(_num_bytes, column.children))
