"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header (a flatbuffer: format/Message.fbs of Arrow) that
says what it is and how long. Only these headers are read to find where record batches begin; of the file
format, those that its footer lists. A part of a stream is given to pyarrow as a stream of its own: the
schema, the dictionaries before it, and the part's record batches.

pyarrow reads a record batch whole: of one with 1.1 GB of text a task held 2.2 GB. So of a large one the bytes
of some rows at a time are read, of each column in use, and arrays are made of these slices.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as arrow
import pyarrow.ipc as ipc

from preprocess.formats.columns import (
    InputStream,
    fields_in,
    is_one_of,
    refused_by_name,
    row_documents,
    rows_at_once,
)
from preprocess.formats.format import DocumentBatch, Inspected, Reading, Start, no_documents
from preprocess.formats.inputs import ByteRange, OpenInput, RangeReader
from preprocess.formats.long_documents import LongDocument
from preprocess.formats.text_fields import TextFields
from shardprep.errors import BadInput, ReadWriteError

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
_MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"
_HEAD_BYTES = 4 << 10
_MOST_HEADER_BYTES = 64 << 20


class Message(NamedTuple):
    """One message; a record batch has rows."""

    kind: int
    start: int  # byte of the file
    body_start: int
    end: int
    num_rows: int


class Buffers(NamedTuple):
    """What the header of a record batch says of its columns, depth first."""

    nodes: list[tuple[int, int]]  # of each column: rows, and how many of them are null
    places: list[tuple[int, int]]  # of each buffer, [start, end) in the file
    is_plain: bool  # neither compressed, nor with a number of buffers that varies


def has_footer(file: OpenInput) -> bool:
    """Whether a file is of the file format, and not of the stream format. Raises BadInput for neither."""
    size = file.stamp.num_bytes
    head = file.read(0, min(size, 8))
    if head.startswith(_MAGIC) and file.read(size - 6, size) != _MAGIC:
        raise _broken(file, f"it does not end in {_MAGIC!r}")
    if not head.startswith(_MAGIC) and head[:4] != CONTINUES:
        raise _broken(file, f"it begins with {head!r}")
    return head.startswith(_MAGIC)


def messages_of(file: OpenInput) -> Iterator[Message]:
    """The messages of a file, in order; of the file format the record batches alone.

    Their headers are read, and of the file format its footer. Raises BadInput, naming the byte.
    """
    if has_footer(file):
        yield from _listed_batches(file)
        return
    position = 0
    while (message := _message_at(file, position)) is not None:
        if (message.kind == SCHEMA) != (position == 0):
            raise _broken(file, f"the first alone is a schema, not the message at byte {position}")
        yield message
        position = message.end


def _listed_batches(file: OpenInput) -> Iterator[Message]:
    """The record batches that the footer lists, in the order of the file; dictionaries may stand behind them.

    Some writers leave something else than the schema at byte 8. But where a message stands that the footer
    does not list, it is damaged: pyarrow would leave out a record batch without a word.
    """
    footer_start, blocks = _footer(file)
    position = 8
    if file.read(8, 12) == CONTINUES and (schema := _message_at(file, 8)) is not None:
        position = schema.end
    for kind, start, header_bytes, body_bytes in sorted(blocks, key=lambda block: block[1]):
        if start < position:
            raise _broken(file, f"its footer lists byte {start} twice, or within another message")
        _check_nothing_at(file, position, start)
        message = _message_at(file, start)
        ends = (start + header_bytes, start + header_bytes + body_bytes)
        if message is None or (message.kind, message.body_start, message.end) != (kind, *ends):
            raise _broken(file, f"the message at byte {start} is not what the footer says")
        if kind == BATCH:
            yield message
        position = message.end
    _check_nothing_at(file, position, footer_start)


def _check_nothing_at(file: OpenInput, position: int, end: int) -> None:
    """That no message begins where the footer lists none; the mark of the end may stand there."""
    head = file.read(position, position + 8) if position + 8 <= end else b""
    if head[:4] == CONTINUES and any(head[4:]):
        raise _broken(file, f"its footer does not list the message at byte {position}")


def _footer(file: OpenInput) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Where the footer begins, and what it lists: kind, first byte, and bytes of header and body of each."""
    size = file.stamp.num_bytes
    if size < 18:
        raise _broken(file, f"it has {size} bytes, and no footer")
    num_bytes = int.from_bytes(file.read(size - 10, size - 6), "little")
    start = size - 10 - num_bytes
    if not 0 < num_bytes <= _MOST_HEADER_BYTES or start < 8:
        raise _broken(file, f"its footer has {num_bytes} bytes, it says")
    data = file.read_all(start, size - 10)
    blocks: list[tuple[int, int, int, int]] = []
    try:
        root = struct.unpack_from("<I", data, 0)[0]
        for number, kind in ((2, DICTIONARY), (3, BATCH)):
            if _slot(data, root, number, optional=True):
                listed = _structs(data, root, number, 3)
                listed[:, 1] &= 0xFFFFFFFF  # of 32 bits, and as many without a meaning
                if kind == BATCH and np.any(np.diff(listed[:, 0]) <= 0):
                    raise _broken(file, "its footer lists record batches in another order than they stand in")
                blocks += [(kind, *block) for block in listed.tolist()]
    except (struct.error, IndexError, ValueError):
        raise _broken(file, "its footer is damaged") from None
    return start, blocks


def _message_at(file: OpenInput, position: int) -> Message | None:
    """The message that begins at a byte; None for the mark of the end. Raises BadInput."""
    size = file.stamp.num_bytes
    block = file.read(position, min(position + _HEAD_BYTES, size))
    if len(block) < 8 or block[:4] != CONTINUES:
        raise _broken(file, f"no message begins at byte {position}: it is cut short, or damaged")
    header_bytes = int.from_bytes(block[4:8], "little")
    if not header_bytes:
        return None
    if header_bytes > min(size - position - 8, _MOST_HEADER_BYTES):
        raise _broken(file, f"the message at byte {position} goes on behind the end")
    if header_bytes + 8 > len(block):
        block = file.read_all(position, position + 8 + header_bytes)
    try:
        kind, num_rows, body_bytes = _header(block[8 : 8 + header_bytes])
    except (struct.error, IndexError, ValueError):
        raise _broken(file, f"the message at byte {position} has no right header") from None
    end = position + 8 + header_bytes + body_bytes
    if end > size:
        raise _broken(file, f"the message at byte {position} goes on behind the end: it is cut short")
    return Message(kind, position, position + 8 + header_bytes, end, num_rows)


def _broken(file: OpenInput, why: str) -> BadInput:
    return BadInput(
        f"input {file.path} cannot be read as Arrow: {why}; bring a whole file, or move it away and plan anew"
    )


def _header(data: bytes) -> tuple[int, int, int]:
    """Kind, rows and bytes of the body of a message,."""
    root = struct.unpack_from("<I", data, 0)[0]
    kind = struct.unpack_from("<B", data, _slot(data, root, 1))[0]
    body_slot = _slot(data, root, 3, optional=True)
    body_bytes = struct.unpack_from("<q", data, body_slot)[0] if body_slot else 0
    num_rows = 0
    if kind == BATCH:
        inner = _slot(data, root, 2)
        table = inner + struct.unpack_from("<I", data, inner)[0]
        rows_slot = _slot(data, table, 0, optional=True)
        num_rows = struct.unpack_from("<q", data, rows_slot)[0] if rows_slot else 0
    if kind not in (SCHEMA, DICTIONARY, BATCH) or body_bytes < 0 or num_rows < 0:
        raise ValueError(f"kind {kind}")
    return kind, num_rows, body_bytes


def _slot(data: bytes, table: int, number: int, *, optional: bool = False) -> int:
    """Where a field of a flatbuffer's table lies; 0 for one that is absent and may be."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    num_bytes = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry + 2 <= num_bytes else 0
    if not offset:
        if optional:
            return 0
        raise ValueError("a field is missing")
    return int(table + offset)


def buffers_of(file: OpenInput, batch: Message) -> Buffers:
    """Where the buffers of a record batch lie. Raises BadInput, ReadWriteError."""
    data = file.read_all(batch.start + 8, batch.body_start)
    try:
        root = struct.unpack_from("<I", data, 0)[0]
        inner = _slot(data, root, 2)
        table = inner + struct.unpack_from("<I", data, inner)[0]
        nodes, places = _structs(data, table, 1, 2), _structs(data, table, 2, 2)
        is_plain = not any(_slot(data, table, number, optional=True) for number in (3, 4))
    except (struct.error, IndexError, ValueError):
        raise _broken(file, f"the message at byte {batch.start} has no right header") from None
    num_bytes = batch.end - batch.body_start
    for offset, size in places.tolist():
        if not 0 <= offset <= offset + size <= num_bytes:
            raise _broken(file, f"a buffer of the message at byte {batch.start} lies outside of it")
    starts = places[:, 0] + batch.body_start
    return Buffers(
        nodes=[(rows, nulls) for rows, nulls in nodes.tolist()],
        places=list(zip(starts.tolist(), (starts + places[:, 1]).tolist(), strict=True)),
        is_plain=is_plain,
    )


def _structs(data: bytes, table: int, number: int, width: int) -> npt.NDArray[np.int64]:
    """A vector of structs of ``width`` 64-bit integers: int64[n, width]."""
    slot = _slot(data, table, number)
    vector = slot + struct.unpack_from("<I", data, slot)[0]
    num = struct.unpack_from("<I", data, vector)[0]
    return np.frombuffer(data, "<i8", width * num, vector + 4).reshape(num, width).astype(np.int64)


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
        num_bytes = sum(map(_num_bytes, self.columns))
        most, first = rows_at_once(self.num_rows, num_bytes, 2 * batch_bytes), 0
        while True:
            num = min(most, self.num_rows - first)
            while num > 1 and sum(self._text_bytes(column, first, num) for column in self.columns) > (
                8 * batch_bytes
            ):
                num //= 2  # texts are longer here
            arrays = [self._array(column, first, num) for column in self.columns]
            yield arrow.RecordBatch.from_arrays(arrays, names=self.names)
            first += num
            if first >= self.num_rows:
                return

    def _text_bytes(self, column: _Column, first: int, num: int) -> int:
        if not is_one_of(column.kind, _TEXTS):
            return 0
        width = _offset_bytes(column.kind)
        ends = [self._offsets(column, row, 0, width)[0] for row in (first, first + num)]
        return int(ends[1] - ends[0])

    def _array(self, column: _Column, first: int, num: int) -> Any:
        """Rows [first, first + num) of a column."""
        kind, types = column.kind, arrow.types
        if first + num > column.num_rows:
            raise ValueError(f"a column has {column.num_rows} rows, expected {first + num}")
        if types.is_null(kind) or not num:
            return arrow.nulls(num, kind)
        own: list[Any] = [self._bits(column, 0, first, num) if column.has_nulls else None]
        children: list[Any] = []
        if types.is_struct(kind):
            children = [self._array(child, first, num) for child in column.children]
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
                children = [self._array(column.children[0], begin, end - begin)]
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
        names = (name for name in _NUM_OWN_BUFFERS if is_one_of(kind, (name,)))
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
    return is_one_of(column.kind, _SLICED) and all(map(_can_be_sliced, column.children))


def _offset_bytes(kind: Any) -> int:
    return 8 if is_one_of(kind, ("is_large_string", "is_large_binary", "is_large_list")) else 4


def _size(place: tuple[int, int]) -> int:
    return place[1] - place[0]


def _num_bytes(column: _Column) -> int:
    return sum(map(_size, column.places)) + sum(map(_num_bytes, column.children))


_LARGE_BYTES = 16 << 20  # a larger record batch is not held whole


class Arrow:
    """``.arrow``."""

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """See Format. Raises BadInput for another kind of file, or a missing column."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        first = next(messages_of(file), None)
        _open(file, [] if first is None or has_footer(file) else [first], reading.fields)
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)

    def starts(
        self,
        file: OpenInput,
        stretches: Sequence[tuple[int, int]],
        reading: Reading,  # noqa: ARG002
    ) -> list[Start | None]:
        """See Format."""
        size = file.stamp.num_bytes
        places = (
            (message.start for message in messages_of(file) if message.kind == BATCH) if size else iter(())
        )
        found: list[Start | None] = []
        place = 0
        for byte, end in stretches:
            while place < byte:
                place = next(places, size)
            found.append(Start(place) if place < end or place == size else None)
        return found

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        """See Format: the record batches that begin in the part."""
        file, part = reader.file, reader.part
        reader.hash_rest()
        if not file.stamp.num_bytes:
            return
        picked = _picked(file, part, reading.fields)
        reading = dataclasses.replace(reading, fields=picked.opened.fields)
        place = reader.place(picked.first_row, line)
        with refused_by_name(file, "Arrow", picked.opened.stream):
            yield from row_documents(_read_batches(picked, part, reading.batch_bytes), place, reading)
        if not picked.batches:
            yield no_documents(place)


class _Opened(NamedTuple):
    """A file, or some messages of it as a stream, as pyarrow reads it: the columns in use alone."""

    reader: Any  # of a stream or a file
    schema: Any  # with all columns
    fields: TextFields  # where the file has them
    stream: InputStream


def _open(file: OpenInput, streamed: list[Message], fields: TextFields) -> _Opened:
    """Open a file of the file format, or else the messages ``streamed``. Raises BadInput, ReadWriteError."""
    stream = _Spans(file, streamed) if streamed else InputStream(file)
    opened = ipc.open_stream if streamed else ipc.open_file
    with refused_by_name(file, "Arrow", stream):
        schema = opened(stream).schema
        fields = fields_in(file, schema, fields)
        wanted = {path[0] for path in fields.paths}
        numbers = [number for number, name in enumerate(schema.names) if name in wanted]
        stream.seek(0)
        options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        return _Opened(opened(stream, options=options), schema, fields, stream)


class _Picked(NamedTuple):
    """What of a file a part needs."""

    opened: _Opened
    first_row: int  # of the part, in the file
    batches: list[Message]  # the record batches of the part
    slices: dict[int, RowSlices]  # the large ones, by their first byte
    arrays: Iterator[Any]  # the others, as pyarrow's RecordBatches


def _picked(file: OpenInput, part: ByteRange, fields: TextFields) -> _Picked:
    is_stream = not has_footer(file)
    kept: list[Message] = []
    first_row = num_before = 0
    for message in messages_of(file):
        if message.start >= part.end:
            break
        if message.kind == BATCH and message.start < part.start:
            first_row, num_before = first_row + message.num_rows, num_before + 1
        else:
            kept.append(message)
    opened = _open(file, kept[:1] if is_stream else [], fields)
    batches = [message for message in kept if message.kind == BATCH]
    names = [path[0] for path in opened.fields.paths]
    slices = {
        batch.start: rows
        for batch in batches
        if batch.end - batch.start > _LARGE_BYTES
        and (rows := slices_of(file, batch, opened.schema, names)) is not None
    }
    if is_stream:
        opened = _open(file, [message for message in kept if message.start not in slices], fields)
        return _Picked(opened, first_row, batches, slices, iter(opened.reader))
    numbers = [number for number, batch in enumerate(batches, num_before) if batch.start not in slices]
    return _Picked(opened, first_row, batches, slices, map(opened.reader.get_batch, numbers))


def _read_batches(picked: _Picked, part: ByteRange, batch_bytes: int) -> Iterator[tuple[Any, int]]:
    """Each record batch, or some rows of a large one, with the bytes of the part up to the next one."""
    begin, messages = part.start, picked.batches
    for message, later in itertools.zip_longest(messages, messages[1:]):
        following = part.end if later is None else later.start
        if message.start in picked.slices:
            for rows in picked.slices[message.start].read(batch_bytes):
                yield rows, 0
            yield rows.slice(rows.num_rows), following - begin
        else:
            batch = next(picked.arrays)
            if batch.num_rows != message.num_rows:
                raise ValueError(
                    f"a record batch has {batch.num_rows} rows, its header says {message.num_rows}"
                )
            yield batch, following - begin
        begin = following


class _Spans(InputStream):
    """Some messages of a file as one stream, with the mark that ends it."""

    def __init__(self, file: OpenInput, messages: list[Message]) -> None:
        super().__init__(file)
        self._pieces = [(message.start, message.end) for message in messages]
        self._ends = list(itertools.accumulate(end - start for start, end in self._pieces))
        self._all = (self._ends[-1] if self._ends else 0) + 8

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._all)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        position = self._position
        end = self._all if size is None or size < 0 else min(position + size, self._all)
        found = []
        for (start, stop), last in zip(self._pieces, self._ends, strict=True):
            first = last - (stop - start)
            if first < end and position < last:
                found.append(
                    self._read_file(start + max(position - first, 0), start + min(end, last) - first)
                )
        tail = self._all - 8
        found.append((CONTINUES + bytes(4))[max(0, position - tail) : max(0, end - tail)])
        self._position = max(position, end)
        return b"".join(found)

    def _read_file(self, start: int, end: int) -> bytes:
        try:
            return self._file.read_all(start, end)
        except ReadWriteError as error:
            self.error = error
            raise OSError(str(error)) from None
