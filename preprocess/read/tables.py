"""Read tables with pyarrow, some rows at a time: Parquet, and Arrow as ``datasets`` caches and saves it.

A part of a Parquet file begins at a row group, a part of an Arrow file at a record batch. An Arrow file is a
sequence of messages, whose headers (flatbuffers: format/Message.fbs of Arrow) are read to find the batches.
pyarrow gets a part as a stream: the schema, the dictionaries before the part, and its record batches. A file
may have several streams, of which pyarrow itself reads only the first.

pyarrow reads a record batch whole. A file with a large one is mapped instead, and its pages are released
after each batch of documents. The price: if a mapped page cannot be read, the process ends with SIGBUS.

Values become those of JSON, by one rule per type (docs/format.md, "Values of tables"); a value without one
becomes an UnusableText. pyarrow's own ``to_pylist`` returns objects of pandas if that is installed, and fails
at the first value that has no Python object.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import mmap
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet
import pyarrow.types as types

from preprocess.read import documents, text_fields
from preprocess.read.documents import (
    InputRecords,
    Inspected,
    Numbers,
    OpenInput,
    RangeReader,
    Start,
    Stretches,
)
from preprocess.read.fields import text_fields_of
from preprocess.read.text_fields import FieldPath, TextFields, UnusableText
from shardprep.errors import BadInput, ReadWriteError
from shardprep.files import with_retries
from shardprep.format.plan import PlanOptions

# With libc's memory pool a task takes 24 MB less than with pyarrow's own, and the same CPU time.
arrow.set_memory_pool(arrow.system_memory_pool())

_MOST_ROWS = 8192  # at a time
_MOST_DECODED_BYTES = 16 << 20  # of rows that pyarrow decodes at once, unless one row has more
_VALUE_BYTES = 16  # a decoded value takes at least so much, however few bits encode it
_SEEN_ROWS = 64  # read to see the dictionaries of a row group
_FEW_ROWS = 16  # decoded at once if their size is unknown
_BUFFER_BYTES = 1 << 20  # read at once of a column, so that no row group is in memory as a whole
_SIGNATURE_BYTES = 28  # nonce and tag after the footer, in a file whose columns are encrypted
# Bases of pyarrow's errors, and what its Python code raises for damaged files, such as for a huge size.
_BUILT_IN_ERRORS = (ValueError, OSError, RuntimeError, LookupError, TypeError, OverflowError, MemoryError)


class InputStream(io.RawIOBase):
    """``head``, and then spans of an input, as one file for pyarrow.

    The spans are read from ``memory``, if given, without a copy.
    """

    def __init__(
        self, file: OpenInput, spans: Stretches, memory: mmap.mmap | None = None, head: bytes = b""
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
        self.error: ReadWriteError | None = None  # of a failed read: pyarrow raises its own error instead

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
        pieces: list[Any] = []
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


@contextlib.contextmanager
def refused_by_name(file: OpenInput, name: str, stream: InputStream) -> Iterator[None]:
    """Turn pyarrow's errors into ReadWriteError if a read failed, else into BadInput with the file's path."""
    try:
        yield
    except (*_BUILT_IN_ERRORS, arrow.ArrowException) as error:
        if stream.error is not None:
            raise stream.error from None
        words = str(error).split("\n")[0][:200]
        raise documents.unreadable(file, f"cannot be read as {name} ({words})") from None


# Parquet. -----------------------------------------------------------------------------------------------


class Parquet:
    """``.parquet``. Only the columns in use are read, some pages at a time."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Estimate the text. Raises BadInput if the footer is damaged, or a column of the text is missing."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        table, stream, fields = self._open(file, text_fields_of(options))
        with refused_by_name(file, "Parquet", stream):
            groups = range(table.metadata.num_row_groups)
            return Inspected(text_bytes=_text_bytes(table.metadata, groups, fields), is_whole=False)

    def starts(self, file: OpenInput, stretches: Stretches, options: PlanOptions) -> list[Start | None]:
        places: list[Start] = []
        if file.stamp.num_bytes:
            table, stream, _ = self._open(file, text_fields_of(options))
            with refused_by_name(file, "Parquet", stream):
                places = [Start(start) for start, _ in _row_groups(table.metadata)[1:]]
        return documents.starts_among(places, file, stretches)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        reader.hash_rest()
        if reader.file.stamp.num_bytes:
            yield from _joined(self._decoded(reader, fields, batch_bytes), batch_bytes)

    def _decoded(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        """Yield the records of a part as they are decoded, perhaps few at a time."""
        file, byte_range = reader.file, reader.byte_range
        table, stream, fields = self._open(file, fields)
        counted_end = byte_range.start  # end of the bytes that the records so far count
        with refused_by_name(file, "Parquet", stream):
            dictionaries = _Dictionaries(stream, table.metadata, fields)
            groups, first_row = _row_groups(table.metadata), 0
            ends = [*(start for start, _ in groups[1:]), byte_range.end]
            for (start, numbers), end in zip(groups, ends, strict=False):
                expected = sum(table.metadata.row_group(number).num_rows for number in numbers)
                if start < byte_range.start:
                    first_row += expected
                    continue
                if start >= byte_range.end:
                    break
                num_rows = 0
                for batch in table.iter_batches(
                    batch_size=min(map(partial(_rows_decoded_at_once, dictionaries, batch_bytes), numbers)),
                    row_groups=numbers,
                    columns=[".".join(path) for path in fields.paths],
                    use_threads=False,
                ):
                    num_rows += batch.num_rows
                    # Each row counts an equal share of the group's bytes.
                    up_to = start + (min(end, byte_range.end) - start) * num_rows // max(1, expected)
                    yield from _records(batch, up_to - counted_end, first_row, fields, batch_bytes)
                    counted_end = up_to
                    first_row += batch.num_rows
                if num_rows != expected:
                    raise ValueError(f"row group {numbers[0]} has {num_rows} rows, not {expected}")
        if counted_end < byte_range.end:  # row groups without rows, or no row group
            yield InputRecords(num_bytes=byte_range.end - counted_end)

    def _open(self, file: OpenInput, fields: TextFields) -> tuple[Any, InputStream, TextFields]:
        """Open a table. Returns a pyarrow ParquetFile, its stream, and the fields in it. Raises BadInput."""
        size = file.stamp.num_bytes
        stream = InputStream(file, [(0, size)])
        tail = file.read(max(0, size - 8), size)
        is_encrypted = tail.endswith(b"PARE")  # the footer, too
        with refused_by_name(file, "Parquet", stream):
            if not is_encrypted:
                table = parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES)
                # pyarrow would end the process (SIGABRT) when asked for the metadata of an encrypted column.
                signed_bytes = table.metadata.serialized_size + _SIGNATURE_BYTES
                is_encrypted = int.from_bytes(tail[:4], "little") == signed_bytes
            if not is_encrypted:
                return table, stream, _fields_in(file, table.schema_arrow, fields)
        expected = "Parquet without encryption; write it again, or move it away, and plan again"
        raise BadInput(path=file.path, found="an encrypted or a signed footer", expected=expected)


def _row_groups(metadata: Any) -> list[tuple[int, list[int]]]:
    """Return where a part may begin, and the row groups there: one, or all if they are not in order."""
    starts = []
    for number in range(metadata.num_row_groups):
        column = metadata.row_group(number).column(0)
        dictionary, data = column.dictionary_page_offset, column.data_page_offset
        starts.append(dictionary if dictionary and 0 < dictionary < data else data)
    if any(before >= after for before, after in itertools.pairwise(starts)):
        return [(0, [*range(len(starts))])]
    return [(start if number else 0, [number]) for number, start in enumerate(starts)]


def _columns_in_use(metadata: Any, number: int, fields: TextFields) -> Iterator[Any]:
    """Yield the metadata of a row group's columns in use: leaves, such as a.b.list.element."""
    wanted = {".".join(path) for path in fields.paths}
    group = metadata.row_group(number)
    for place in range(group.num_columns):
        column = group.column(place)
        # A field of a struct is a column, as is everything in it.
        if not wanted.isdisjoint(itertools.accumulate(column.path_in_schema.split("."), "{}.{}".format)):
            yield column


def _text_bytes(metadata: Any, groups: Sequence[int], fields: TextFields) -> int:
    """Estimate the text of row groups by the decompressed size of the columns in use."""
    num_bytes = 0
    for number in groups:
        for column in _columns_in_use(metadata, number, fields):
            num_bytes += column.total_uncompressed_size
    return num_bytes


class _Dictionaries:
    """Looks up how long the values in the dictionaries of a Parquet file are.

    A dictionary has a text once that many rows have, so the encoded size of rows says little about their
    decoded size. To see a row group's dictionaries, a few rows are read: about a page of each column.
    """

    def __init__(self, stream: InputStream, metadata: Any, fields: TextFields) -> None:
        self.metadata, self.fields = metadata, fields
        self._stream = stream
        self._table: Any = None

    def most_row_bytes(self, number: int) -> int | None:
        """Return how many bytes a row of a row group may take by its dictionaries, None if it is unknown.

        In a column of lists each row counts as many values as the rows have on average.
        """
        num_rows = max(1, self.metadata.row_group(number).num_rows)
        names: list[str] = []  # of columns of texts
        has_dictionary = False
        values_per_row = 1
        for column in _columns_in_use(self.metadata, number, self.fields):
            if "DELTA_BYTE_ARRAY" in column.encodings:  # values share beginnings
                return None
            if column.physical_type == "BYTE_ARRAY":
                names.append(column.path_in_schema)
                has_dictionary |= column.has_dictionary_page
                values_per_row = max(values_per_row, -(-column.num_values // num_rows))
        if not has_dictionary:
            return 0
        if self._table is None:
            self._table = parquet.ParquetFile(
                self._stream, metadata=self.metadata, read_dictionary=names, buffer_size=_BUFFER_BYTES
            )
        rows = self._table.iter_batches(
            batch_size=_SEEN_ROWS, row_groups=[number], columns=names, use_threads=False
        )
        try:
            found = [_longest_values(column) for row in itertools.islice(rows, 1) for column in row.columns]
        except NotImplementedError:
            return None
        longest = list(itertools.chain.from_iterable(found))
        # A column without a value in the first rows shows no dictionary.
        return sum(longest) * values_per_row if len(longest) == len(names) and all(longest) else None


def _longest_values(array: Any) -> list[int]:
    """Return the length of the longest value in each dictionary of an array, 0 for an empty one."""
    if types.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary)
        return [compute.max(lengths).as_py() or 0]
    if types.is_struct(array.type):
        inner = [array.field(number) for number in range(array.type.num_fields)]
    elif types.is_map(array.type):
        inner = [array.keys, array.items]
    elif hasattr(array.type, "value_field"):
        inner = [array.values]
    else:
        inner = []
    return [length for each in inner for length in _longest_values(each)]


def _rows_decoded_at_once(dictionaries: _Dictionaries, batch_bytes: int, number: int) -> int:
    """Return how many rows of a row group pyarrow may decode at once."""
    num_rows = dictionaries.metadata.row_group(number).num_rows
    num_bytes = 0
    for column in _columns_in_use(dictionaries.metadata, number, dictionaries.fields):
        num_bytes += max(column.total_uncompressed_size, _VALUE_BYTES * column.num_values)
    most = _rows_at_once(num_rows, num_bytes, batch_bytes)
    row_bytes = dictionaries.most_row_bytes(number)
    if row_bytes is None:
        return min(most, _FEW_ROWS)
    return max(1, min(most, _MOST_DECODED_BYTES // max(1, row_bytes)))


def _joined(records: Iterator[InputRecords], batch_bytes: int) -> Iterator[InputRecords]:
    """Join records until they have about ``batch_bytes`` of text, or _MOST_ROWS rows."""
    some: list[InputRecords] = []
    num_rows = num_bytes = 0
    for each in records:
        some.append(each)
        num_rows += len(each.texts)
        for text in each.texts:
            num_bytes += 0 if isinstance(text, UnusableText) else len(text)
        if num_bytes >= batch_bytes or num_rows >= _MOST_ROWS:
            yield _join(some)
            some = []
            num_rows = num_bytes = 0
    if some:
        yield _join(some)


def _join(some: list[InputRecords]) -> InputRecords:
    if len(some) == 1:
        return some[0]
    columns: dict[str, list[Any]] = {}
    for each in some:
        for name, values in each.columns.items():
            columns.setdefault(name, []).extend(values)
    return InputRecords(
        texts=list(itertools.chain.from_iterable(each.texts for each in some)),
        starts=np.concatenate([each.starts for each in some]),
        sizes=np.concatenate([each.sizes for each in some]),
        num_bytes=sum(each.num_bytes for each in some),
        columns=columns,
    )


# Arrow. -------------------------------------------------------------------------------------------------

_END, _SCHEMA, _DICTIONARY, _BATCH = 0, 1, 2, 3  # kinds of messages
_MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"
_HEAD_BYTES = 4 << 10
_MOST_HEADER_BYTES = 64 << 20
_MOST_PADDING_BYTES = 64
_LARGE_BYTES = 16 << 20  # a file with a larger record batch is mapped


class _Message(NamedTuple):
    kind: int
    start: int  # byte of the file
    end: int
    num_rows: int  # of a record batch


class Arrow:
    """``.arrow``: the stream format, and the file format."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Estimate the text. Raises BadInput for another kind of file, or if a column of it is missing."""
        first = next(_messages_of(file), None)
        if first is not None:
            self._open(file, [first], text_fields_of(options), None)
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=first is None)

    def starts(self, file: OpenInput, stretches: Stretches, options: PlanOptions) -> list[Start | None]:  # noqa: ARG002
        places = (Start(each.start) for each in _messages_of(file) if each.kind == _BATCH)
        return documents.starts_among(places, file, stretches)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        file, byte_range = reader.file, reader.byte_range
        reader.hash_rest()
        first_row, counted_end, is_large = 0, byte_range.start, False
        # For each stream its schema, its dictionaries and the part's record batches.
        streams: list[list[_Message]] = []
        for message in itertools.takewhile(lambda each: each.start < byte_range.end, _messages_of(file)):
            if message.kind == _SCHEMA:
                streams.append([])
            if message.kind == _BATCH and message.start < byte_range.start:
                first_row += message.num_rows
            else:
                streams[-1].append(message)
                is_large |= message.kind == _BATCH and message.end - message.start > _LARGE_BYTES
        memory = with_retries(f"input {file.path} cannot be mapped", file.file.mapped) if is_large else None
        for messages in streams:
            batches = [each for each in messages if each.kind == _BATCH]
            if not batches:
                continue
            arrays, stream, fields_here = self._open(file, messages, fields, memory)
            with refused_by_name(file, "Arrow", stream):
                for message in batches:
                    batch = next(arrays, None)
                    if batch is None or batch.num_rows != message.num_rows:
                        raise ValueError(f"a record batch of {message.num_rows} rows is missing")
                    num_bytes = message.end - counted_end
                    for records in _records(batch, num_bytes, first_row, fields_here, batch_bytes):
                        yield records
                        if memory is not None:
                            memory.madvise(mmap.MADV_DONTNEED)
                    counted_end = message.end
                    first_row += batch.num_rows
        if counted_end < byte_range.end:  # the end marker, and a footer
            yield InputRecords(num_bytes=byte_range.end - counted_end)

    def _open(
        self, file: OpenInput, messages: Sequence[_Message], fields: TextFields, memory: mmap.mmap | None
    ) -> tuple[Any, InputStream, TextFields]:
        """Return pyarrow's reader of some messages, for the columns in use, its stream, and the fields."""
        spans = [(each.start, each.end) for each in messages]
        stream = InputStream(file, spans, memory)
        with refused_by_name(file, "Arrow", stream):
            if messages[0].start == messages[0].end:  # the schema is in the footer
                whole = InputStream(file, [(0, file.stamp.num_bytes)])
                head = ipc.open_file(whole).schema.serialize().to_pybytes()
                stream = InputStream(file, spans, memory, head)
            schema = ipc.open_stream(stream).schema
            fields = _fields_in(file, schema, fields)
            wanted = {path[0] for path in fields.paths}
            numbers = [number for number, name in enumerate(schema.names) if name in wanted]
            stream.seek(0)
            options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
            return ipc.open_stream(stream, options=options), stream, fields


def _messages_of(file: OpenInput) -> Iterator[_Message]:
    """Yield the messages of a file in order. Each stream begins with its schema. Raises BadInput."""
    size = file.stamp.num_bytes
    position, end, begins = 0, size, True
    is_file = file.read(0, len(_MAGIC)) == _MAGIC
    if is_file:
        tail = file.read(max(0, size - 10), size)
        position, end = 8, size - 10 - int.from_bytes(tail[:4], "little")
        if not tail.endswith(_MAGIC) or end <= position:
            raise _broken(file, f"it does not end in a footer and {_MAGIC!r}")
        if not _begins_with_schema(file, position, end):
            yield from _messages_of_footer(file, end, size - 10)
            return
    while position < end:
        message = _message_at(file, position, end)
        if begins != (message.kind == _SCHEMA):
            raise _broken(file, f"a schema is missing, or is not the first of its stream, at byte {position}")
        if message.kind != _END:
            yield message
        # The end marker is optional: a stream may end with the file.
        position, begins = message.end, message.kind == _END
        if is_file and begins:
            if end - position > _MOST_PADDING_BYTES or file.read(position, end).strip(b"\0"):
                raise _broken(file, f"its stream ends at byte {position}, and its footer begins at {end}")
            return


def _begins_with_schema(file: OpenInput, position: int, end: int) -> bool:
    try:
        return _message_at(file, position, end).kind == _SCHEMA
    except BadInput:
        return False


def _messages_of_footer(file: OpenInput, begin: int, end: int) -> Iterator[_Message]:
    """Yield the messages of a file by its footer, which is in the bytes [begin, end).

    polars writes no header before its schema, which others read from the footer alone. The schema that this
    yields has no bytes.
    """
    if end - begin > _MOST_HEADER_BYTES:
        raise _broken(file, f"its footer has {end - begin} bytes")
    data = file.read_all(begin, end)
    places: list[tuple[int, int]] = []  # where each message begins and ends
    try:
        root = struct.unpack_from("<I", data)[0]
        for number in (2, 3):  # dictionaries, record batches
            place, offset = _field(data, root, number, "<I")
            if not place:
                continue
            (num_blocks,) = struct.unpack_from("<I", data, place + offset)
            for block in range(num_blocks):
                at = place + offset + 4 + block * _BLOCK.size
                start, header_bytes, body_bytes = _BLOCK.unpack_from(data, at)
                places.append((start, start + header_bytes + body_bytes))
    except struct.error:
        raise _broken(file, "its footer is damaged") from None
    places.sort()
    yield _Message(_SCHEMA, 0, 0, 0)
    # The schema before the messages takes less than the footer, which has it, too. No bytes are left over
    # but padding and the end marker, so a second file behind the first is noticed.
    position, most_between = 8, len(data) + _MOST_PADDING_BYTES  # after the magic and its padding
    for start, stop in places:
        if not position <= start <= position + most_between or stop > begin:
            raise _broken(file, f"its footer has a message at byte {start}, where none can be")
        message = _message_at(file, start, begin)
        if message.kind not in (_DICTIONARY, _BATCH) or message.end != stop:
            raise _broken(file, f"its footer and the message at byte {start} differ")
        yield message
        position, most_between = stop, _MOST_PADDING_BYTES
    if begin - position > most_between + len(_CONTINUES) + 4:
        raise _broken(file, f"its last message ends at byte {position}, and its footer begins at {begin}")


def _message_at(file: OpenInput, position: int, file_end: int) -> _Message:
    """Return the message that begins at a byte, which may be the end marker. Raises BadInput."""
    block = file.read(position, min(position + _HEAD_BYTES, file_end))
    # Before Arrow 0.15 a message began with the size of its header, without the marker.
    at = 4 if block.startswith(_CONTINUES) else 0
    header_bytes = int.from_bytes(block[at : at + 4], "little")
    begin = position + at + 4
    if len(block) < at + 4 or header_bytes > min(file_end - begin, _MOST_HEADER_BYTES):
        raise _broken(file, f"no message begins at byte {position}: it is cut short, or damaged")
    if not header_bytes:
        return _Message(_END, position, begin, 0)
    header = block[at + 4 : at + 4 + header_bytes]
    if len(header) < header_bytes:
        header = file.read_all(begin, begin + header_bytes)
    try:
        kind, body_bytes, num_rows = _header(header)
    except (struct.error, IndexError, ValueError):
        kind = body_bytes = num_rows = -1
    end = begin + header_bytes + body_bytes
    if kind < 0 or end > file_end:
        raise _broken(file, f"the message at byte {position} has an invalid header, or is cut short")
    return _Message(kind, position, end, num_rows)


def _broken(file: OpenInput, why: str) -> BadInput:
    return documents.unreadable(file, f"cannot be read as Arrow: {why}")


def _header(data: bytes) -> tuple[int, int, int]:
    """Return (kind, body_bytes, num_rows) of a message, given its header. Raises if that is invalid."""
    root, num_rows = int(struct.unpack_from("<I", data)[0]), 0
    _, kind = _field(data, root, 1, "<B")
    inner, offset = _field(data, root, 2, "<I")
    _, body_bytes = _field(data, root, 3, "<q")
    if kind == _BATCH and inner:
        _, num_rows = _field(data, inner + offset, 0, "<q")
    is_known = kind in (_SCHEMA, _DICTIONARY) or (kind == _BATCH and inner)
    if not is_known or body_bytes < 0 or num_rows < 0:
        raise ValueError(f"kind {kind}")
    return kind, body_bytes, num_rows


_BLOCK = struct.Struct("<qi4xq")  # of a footer: where a message begins, the bytes of its header and its body


def _field(data: bytes, table: int, number: int, code: str) -> tuple[int, int]:
    """Return the place and the value of a field of a flatbuffer's table, two zeros if it is absent."""

    def at(place: int, code: str) -> int:
        return int(struct.unpack_from(code, data, place)[0])

    vtable, entry = table - at(table, "<i"), 4 + 2 * number
    offset = at(vtable + entry, "<H") if entry + 2 <= at(vtable, "<H") else 0
    return (table + offset, at(table + offset, code)) if offset else (0, 0)


# Columns. -----------------------------------------------------------------------------------------------


def _fields_in(file: OpenInput, schema: Any, fields: TextFields) -> TextFields:
    """Find the fields in a table. A column whose own name has dots takes precedence over a nested field.

    Raises BadInput if the text has no column, a column of another type, or more than one.
    """
    if isinstance(fields, text_fields.RecordFields):
        return text_fields.RecordFields(fields.options, schema.names)
    is_chat = fields.is_chat
    # A conversation may be in several fields, and a table has some of them.
    lacks_all = not any(_places_of(schema, path) for path in fields.text_paths)
    places: dict[FieldPath, FieldPath] = {}
    for path in fields.paths:
        found, name = _places_of(schema, path), ".".join(path)
        is_text = path == fields.text_paths[0] or (path in fields.text_paths and not is_chat)
        problem = expected = ""
        if len(found) > 1:
            shown = ", ".join(" > ".join(place) for place, _ in found)
            problem, expected = f"{len(found)} columns or fields that {name} may mean ({shown})", "one"
        elif is_text and not found and (lacks_all or not is_chat):
            problem, expected = f"no column {name}", f"one of {', '.join(schema.names)}"
        elif is_text and found and not _can_be_text(found[0][1], is_chat=is_chat):
            problem = f"{str(found[0][1])[:200]} in the column {name}"
            expected = "lists of messages, or JSON" if is_chat else "strings"
        if problem:
            expected += "; choose another --text_field, or move the file away, and plan again"
            raise BadInput(path=file.path, found=problem, expected=expected)
        if found:
            places[path] = found[0][0]
    return fields.at(places)


def _places_of(kind: Any, path: FieldPath) -> list[tuple[FieldPath, Any]]:
    """Return where a table or a struct may have a field, and its type. An exact name is the only place."""
    if not isinstance(kind, (arrow.Schema, arrow.StructType)):
        return []
    inner = [(each.name, each.type) for each in map(kind.field, range(len(kind)))]
    found: list[tuple[FieldPath, Any]] = [((name,), each) for name, each in inner if name == ".".join(path)]
    if found:
        return found
    for end in range(1, len(path)):
        for name, each in inner:
            if name == ".".join(path[:end]):
                if types.is_null(each):
                    found.append(((name,), each))  # all values are null, so those in them are, too
                found += [((name, *rest), of_rest) for rest, of_rest in _places_of(each, path[end:])]
    return found


def _can_be_text(kind: Any, *, is_chat: bool) -> bool:
    stored, _ = _stored(kind)
    if types.is_dictionary(stored):
        stored = stored.value_type
    # Among the stored types only lists have a value_field.
    return stored in _TEXT_OF or types.is_null(stored) or (is_chat and hasattr(stored, "value_field"))


def _rows_at_once(num_rows: int, num_bytes: int, batch_bytes: int) -> int:
    """Return how many rows have about ``batch_bytes``, if ``num_rows`` have ``num_bytes``."""
    return max(1, min(_MOST_ROWS, batch_bytes * num_rows // max(1, num_bytes)))


def _records(
    batch: Any, num_bytes: int, first_row: int, fields: TextFields, batch_bytes: int
) -> Iterator[InputRecords]:
    """Yield the records of a record batch, some rows at a time. The first ones count ``num_bytes``."""
    columns = {path: _column(batch, path) for path in fields.paths}
    arrays = [column for column, _ in columns.values() if column is not None]
    most = _rows_at_once(batch.num_rows, sum(array.nbytes for array in arrays), 2 * batch_bytes)
    first = 0
    while first < max(1, batch.num_rows):
        num = min(most, batch.num_rows - first)
        while num > 1 and sum(_value_bytes(array.slice(first, num)) for array in arrays) > 2 * batch_bytes:
            num //= 2
        values: dict[FieldPath, list[Any]] = {
            path: [None] * num if column is None else _json_values(column.slice(first, num), read)
            for path, (column, read) in columns.items()
        }
        of_text: list[Any] = [values[path] for path in fields.text_paths]
        texts: Sequence[str | UnusableText] = of_text[0]
        if fields.plain_name is None or not {str}.issuperset(map(type, texts)):
            texts = [fields.text_of_values(of_row) for of_row in zip(*of_text, strict=True)]
        rows, others = first_row + first + np.arange(num), fields.columns(values)
        found = documents.texts_of(texts)
        yield InputRecords(
            texts=found, starts=rows, sizes=np.ones_like(rows), num_bytes=num_bytes, columns=others
        )
        first, num_bytes = first + max(1, num), 0


def _column(batch: Any, path: FieldPath) -> tuple[Any, _Read]:
    """Return the array of a field in its stored type, or None if there is none, and what reads its values.

    Raises ValueError if an offset or index in it is out of bounds.
    """
    if path[0] not in batch.schema.names:
        return None, _same
    column = batch.column(path[0])
    for name in path[1:]:
        try:
            column = compute.struct_field(column, name)
        except (ValueError, KeyError, TypeError, NotImplementedError):
            return None, _same
    stored, read = _stored(column.type)
    column = column.view(stored)
    column.validate(full=True)
    return column, read


def _value_bytes(array: Any) -> int:
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


def _longest_value_bytes(array: Any) -> int:
    """Return how many bytes a value of an array takes at most."""
    if array.type in _TEXT_OF or array.type in _BINARY_OF:
        if "view" in str(array.type):
            return int(_view_lengths(array).max(initial=0))
        return compute.max(compute.binary_length(array)).as_py() or 0
    return _value_bytes(array)


def _view_lengths(array: Any) -> Numbers:
    """Return the lengths of an array of views: int64[n]. A view takes 16 bytes and begins with its length."""
    views = np.frombuffer(array.buffers()[1], "<i4").reshape(-1, 4)[array.offset : array.offset + len(array)]
    return views[:, 0].astype(np.int64)


# Values. ------------------------------------------------------------------------------------------------

# Returns the JSON value for pyarrow's value of a stored type, which is never None.
_Read = Callable[[Any], Any]
_NANOSECONDS = {"D": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_FIRST_DAY, _LAST_DAY = np.array(["0001-01-01", "9999-12-31"], "M8[D]").astype(np.int64).tolist()
_BINARY_OF = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
if hasattr(arrow, "string_view"):  # pyarrow 16
    _BINARY_OF[arrow.string_view()] = arrow.binary_view()
_TEXT_OF = {binary: text for text, binary in _BINARY_OF.items()}


class _NoValue(Exception):
    """A value, and so each value that contains it, has none in JSON. ``args``: reason, detail for people."""


def _json_values(array: Any, read: _Read) -> list[Any]:
    """Return the JSON values of an array in its stored type, an UnusableText for one that has none."""
    if types.is_run_end_encoded(array.type):
        array = compute.run_end_decode(array)
    if types.is_dictionary(array.type) and "view" not in str(array.type.value_type):
        array = array.dictionary.take(array.indices)  # a thirtieth of the time; not implemented for views
    if read is _text and array.type in _TEXT_OF:
        with contextlib.suppress(UnicodeDecodeError):  # nearly always all can be decoded
            return list(array.view(_TEXT_OF[array.type]).to_pylist())
    try:
        values = array.to_pylist()
    except (ValueError, TypeError, LookupError, OverflowError, NotImplementedError, arrow.ArrowException):
        return [UnusableText("wrong_type", f"a value of the type {array.type} has no text")] * len(array)
    found: list[Any] = []
    for value in values:
        try:
            found.append(None if value is None else read(value))
        except _NoValue as why:
            found.append(UnusableText(*why.args))
    return found


def _stored(kind: Any) -> tuple[Any, _Read]:
    """Return the plain type that stores a type, and what reads a value of it.

    Strings are stored as binary, and times as integers. In its stored type an array can be validated whatever
    its values are, and pyarrow returns each value, whatever else is installed.
    """
    if isinstance(kind, arrow.BaseExtensionType):
        stored, read = _stored(kind.storage_type)
        return stored, _EXTENSIONS.get(kind.extension_name, read)
    if kind in _BINARY_OF or kind in _TEXT_OF or types.is_fixed_size_binary(kind):
        return _BINARY_OF.get(kind, kind), _text
    if types.is_dictionary(kind):
        stored, read = _stored(kind.value_type)
        return arrow.dictionary(kind.index_type, stored, kind.ordered), read
    if types.is_run_end_encoded(kind):
        stored, read = _stored(kind.value_type)
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
        (key, read_key), (item, read_item) = _stored(kind.key_type), _stored(kind.item_type)
        return arrow.map_(key, item, kind.keys_sorted), lambda pairs: [
            [_or_none(read_key, name), _or_none(read_item, value)] for name, value in pairs
        ]
    if hasattr(kind, "value_field"):  # lists of any kind
        inner, read_item = _stored(kind.value_type)
        if types.is_fixed_size_list(kind):
            stored = arrow.list_(inner, kind.list_size)
        else:
            name = str(kind).partition("<")[0]  # list, large_list, list_view or large_list_view
            stored = getattr(arrow, "list_" if name == "list" else name)(inner)
        return stored, lambda items: [_or_none(read_item, item) for item in items]
    return kind, _same


def _stored_struct(kind: Any) -> tuple[Any, _Read]:
    names = [kind.field(number).name for number in range(kind.num_fields)]
    inner = [_stored(kind.field(number).type) for number in range(kind.num_fields)]

    def read(value: dict[str, Any]) -> dict[str, Any]:
        if len({*names}) < len(names):
            raise _NoValue("wrong_type", "an object with two fields of one name has no text")
        return {
            name: _or_none(of, part) for name, (_, of), part in zip(names, inner, value.values(), strict=True)
        }

    # Fields are named by numbers, as pyarrow returns no object in which two fields have the same name.
    return arrow.struct([arrow.field(str(n), stored) for n, (stored, _) in enumerate(inner)]), read


def _or_none(read: _Read, value: Any) -> Any:
    return None if value is None else read(value)


def _same(value: Any) -> Any:
    return value


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _NoValue("undecodable", f"byte {error.start} of the text is not utf-8") from None


def _from_json(value: bytes) -> Any:
    found = text_fields.from_json(_text(value))
    if isinstance(found, UnusableText):
        raise _NoValue(found.reason, found.detail)
    return found


_EXTENSIONS: dict[str, _Read] = {
    "arrow.json": _from_json,
    "arrow.uuid": lambda value: str(uuid.UUID(bytes=value)),
    "arrow.bool8": bool,
}


def _text_of_time(nanoseconds: int, kind: Any) -> str:
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
