"""Read Arrow files, as ``datasets`` caches and saves them. A part begins at a record batch.

An Arrow file is a sequence of messages, whose headers (flatbuffers: format/Message.fbs of Arrow) are read to
find the batches. pyarrow gets a part as a stream: the schema, the dictionaries before the part, and its
record batches. A file may have several streams, of which pyarrow itself reads only the first.

pyarrow reads a record batch whole. A file with a large one is mapped instead, and its pages are released
after each batch of documents. The price: if a mapped page cannot be read, the process ends with SIGBUS.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow.ipc as ipc

from preprocess.read import formats, inputs
from preprocess.read.formats import InputRecords, Inspected, SearchRanges, Start
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.tables import InputStream, fields_in, records_of_batch, refused_by_name
from preprocess.read.text_fields import TextFields
from shardprep.errors import BadInput
from shardprep.files import with_retries

# Kinds of messages.
_END = 0
_SCHEMA = 1
_DICTIONARY = 2
_BATCH = 3
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

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:
        """Estimate the text. Raises BadInput for another kind of file, or if a column of it is missing."""
        first = next(_messages_of(file), None)
        if first is not None:
            self._open(file, [first], fields, None)
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=first is None)

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:  # noqa: ARG002
        places = (Start(each.start) for each in _messages_of(file) if each.kind == _BATCH)
        return formats.starts_among(places, file, ranges)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        file = reader.file
        byte_range = reader.byte_range
        reader.hash_rest()
        first_row = 0
        counted_end = byte_range.start
        is_large = False
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
                    for records in records_of_batch(batch, num_bytes, first_row, fields_here, batch_bytes):
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
            fields = fields_in(file, schema, fields)
            wanted = {path[0] for path in fields.paths}
            numbers = [number for number, name in enumerate(schema.names) if name in wanted]
            stream.seek(0)
            options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
            return ipc.open_stream(stream, options=options), stream, fields


def _messages_of(file: OpenInput) -> Iterator[_Message]:
    """Yield the messages of a file in order. Each stream begins with its schema. Raises BadInput."""
    size = file.stamp.num_bytes
    position = 0
    end = size
    begins = True
    is_file = file.read(0, len(_MAGIC)) == _MAGIC
    if is_file:
        tail = file.read(max(0, size - 10), size)
        position = 8
        end = size - 10 - int.from_bytes(tail[:4], "little")
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
        position = message.end
        begins = message.kind == _END
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
    position = 8  # after the magic and its padding
    most_between = len(data) + _MOST_PADDING_BYTES
    for start, stop in places:
        if not position <= start <= position + most_between or stop > begin:
            raise _broken(file, f"its footer has a message at byte {start}, where none can be")
        message = _message_at(file, start, begin)
        if message.kind not in (_DICTIONARY, _BATCH) or message.end != stop:
            raise _broken(file, f"its footer and the message at byte {start} differ")
        yield message
        position = stop
        most_between = _MOST_PADDING_BYTES
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
    return inputs.unreadable(file, f"cannot be read as Arrow: {why}")


def _header(data: bytes) -> tuple[int, int, int]:
    """Return (kind, body_bytes, num_rows) of a message, given its header. Raises if that is invalid."""
    root = int(struct.unpack_from("<I", data)[0])
    num_rows = 0
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

    vtable = table - at(table, "<i")
    entry = 4 + 2 * number
    offset = at(vtable + entry, "<H") if entry + 2 <= at(vtable, "<H") else 0
    return (table + offset, at(table + offset, code)) if offset else (0, 0)
