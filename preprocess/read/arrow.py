"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header (a flatbuffer: format/Message.fbs of Arrow) that
says what it is and how long. Only these headers are read to find where record batches begin. The file format
is a stream between two marks, with a footer, and is read as that stream. A part of a file is given to pyarrow
as a stream of its own: the schema, the dictionaries before it, and the part's record batches. Streams may
follow each other in a file (``cat a.arrow b.arrow``), where pyarrow stops behind the first.

pyarrow reads a record batch whole. A file with a large one is mapped instead, and its pages are let go with
each batch of documents. The price: where a mapped page cannot be read, the system ends the process (SIGBUS).
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow.ipc as ipc

from preprocess.read.columns import InputStream, fields_in, refused_by_name, row_records
from preprocess.read.format import Inspected, Records, Start, no_records, starts_among
from preprocess.read.inputs import OpenInput, RangeReader, unreadable
from preprocess.read.text_fields import TextFields, text_fields_of
from shardprep.errors import BadInput
from shardprep.format.options import PlanOptions

END, SCHEMA, DICTIONARY, BATCH = 0, 1, 2, 3
_MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"
_HEAD_BYTES = 4 << 10
_MOST_HEADER_BYTES = 64 << 20
_MOST_PADDING_BYTES = 64
_LARGE_BYTES = 16 << 20  # a larger record batch is not held whole


class Message(NamedTuple):
    """One message; a record batch has rows."""

    kind: int
    start: int  # byte of the file
    end: int
    num_rows: int
    is_packed: bool  # its buffers are compressed


def messages_of(file: OpenInput) -> Iterator[Message]:
    """The messages of a file, in order, by their headers; each of its streams begins with its schema.

    Raises BadInput, naming the byte.
    """
    size = file.stamp.num_bytes
    position, end = 0, size
    is_file = file.read(0, len(_MAGIC)) == _MAGIC
    if is_file:
        tail = file.read(max(0, size - 10), size)
        position, end = 8, size - 10 - int.from_bytes(tail[:4], "little")
        if not tail.endswith(_MAGIC) or end < position:
            raise _broken(file, f"it does not end in a footer and {_MAGIC!r}")
    begins = True
    while position < end:
        message = _message_at(file, position, end)
        if begins and message.kind != SCHEMA:
            raise _broken(file, f"no stream begins at byte {position}, as there is no schema")
        if message.kind == SCHEMA and not begins:
            raise _broken(file, f"a schema stands within a stream, at byte {position}")
        if message.kind != END:
            yield message
        # The mark of the end is optional: a stream may end with the file.
        position, begins = message.end, message.kind == END
        if is_file and begins:
            if end - position > _MOST_PADDING_BYTES or file.read(position, end).strip(b"\0"):
                raise _broken(file, f"its stream ends at byte {position}, and its footer begins at {end}")
            return


def _message_at(file: OpenInput, position: int, file_end: int) -> Message:
    """Return the message that begins at a byte; the mark of the end is one, too. Raises BadInput."""
    block = file.read(position, min(position + _HEAD_BYTES, file_end))
    # Before Arrow 0.15 messages began with the size of their header alone.
    at = 4 if block.startswith(CONTINUES) else 0
    header_bytes = int.from_bytes(block[at : at + 4], "little")
    begin = position + at + 4
    if len(block) < at + 4 or header_bytes > min(file_end - begin, _MOST_HEADER_BYTES):
        raise _broken(file, f"no message begins at byte {position}: it is cut short, or damaged")
    if not header_bytes:
        return Message(END, position, begin, 0, is_packed=False)
    header = block[at + 4 : at + 4 + header_bytes]
    if len(header) < header_bytes:
        header = file.read_all(begin, begin + header_bytes)
    try:
        kind, num_rows, body_bytes, is_packed = _header(header)
    except (struct.error, IndexError, ValueError):
        raise _broken(file, f"the message at byte {position} has no right header") from None
    end = begin + header_bytes + body_bytes
    if end > file_end:
        raise _broken(file, f"the message at byte {position} goes on behind the end: it is cut short")
    return Message(kind, position, end, num_rows, is_packed)


def _broken(file: OpenInput, why: str) -> BadInput:
    return unreadable(file, f"cannot be read as Arrow: {why}")


def _header(data: bytes) -> tuple[int, int, int, bool]:
    """Return kind, rows and bytes of the body of a message, and whether its buffers are compressed."""
    root = struct.unpack_from("<I", data, 0)[0]
    kind, inner = _number(data, root, 1, "<B"), _slot(data, root, 2)
    body_bytes = _number(data, root, 3, "<q")
    num_rows, is_packed = 0, False
    if kind == BATCH and inner:
        table = inner + struct.unpack_from("<I", data, inner)[0]
        num_rows, is_packed = _number(data, table, 0, "<q"), _slot(data, table, 3) > 0
    is_known = kind in (SCHEMA, DICTIONARY) or (kind == BATCH and inner)
    if not is_known or body_bytes < 0 or num_rows < 0:
        raise ValueError(f"kind {kind}")
    return kind, num_rows, body_bytes, is_packed


def _number(data: bytes, table: int, number: int, code: str) -> int:
    slot = _slot(data, table, number)
    return int(struct.unpack_from(code, data, slot)[0]) if slot else 0


def _slot(data: bytes, table: int, number: int) -> int:
    """Return where a field of a flatbuffer's table lies; 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    num_bytes = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry + 2 <= num_bytes else 0
    return int(table + offset) if offset else 0


class Arrow:
    """``.arrow``."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Raises BadInput for another kind of file, or a missing column."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        _open(file, list(itertools.islice(messages_of(file), 1)), text_fields_of(options), None)
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)

    def starts(
        self,
        file: OpenInput,
        stretches: Sequence[tuple[int, int]],
        options: PlanOptions,  # noqa: ARG002
    ) -> list[Start | None]:
        messages = messages_of(file) if file.stamp.num_bytes else iter(())
        return starts_among((Start(each.start) for each in messages if each.kind == BATCH), file, stretches)

    def read(
        self,
        reader: RangeReader,
        options: PlanOptions,  # noqa: ARG002 - the fields say it all
        fields: TextFields,
        batch_bytes: int,
    ) -> Iterator[Records]:
        file, part = reader.file, reader.part
        reader.hash_rest()
        if not file.stamp.num_bytes:
            return
        messages = list(itertools.takewhile(lambda each: each.start < part.end, messages_of(file)))
        batches = [each for each in messages if each.kind == BATCH and each.start >= part.start]
        is_large = any(each.end - each.start > _LARGE_BYTES and not each.is_packed for each in batches)
        memory = file.mapped() if is_large else None
        # Each batch accounts for the bytes up to the next one, the first and the last one for the rest, too.
        starts = [part.start, *(each.start for each in batches[1:]), part.end]
        num_bytes = {each: starts[n + 1] - starts[n] for n, each in enumerate(batches)}
        row = sum(each.num_rows for each in messages if each.kind == BATCH and each.start < part.start)
        for own in _streams(messages, part.start):
            arrays, stream, fields_here = _open(file, own, fields, memory)
            own_batches = [each for each in own if each.kind == BATCH]
            with refused_by_name(file, "Arrow", stream):
                pairs = _with_bytes(arrays, own_batches, num_bytes)
                for records in row_records(pairs, row, fields_here, batch_bytes):
                    yield records
                    if memory is not None:
                        memory.madvise(mmap.MADV_DONTNEED)
            row += sum(each.num_rows for each in own_batches)
        if not batches:
            yield no_records(part.end - part.start)


def _streams(messages: list[Message], start: int) -> list[list[Message]]:
    """Return what pyarrow is given, one after the other, to read the record batches from byte ``start`` on.

    Of each stream: its schema, its dictionaries and these batches.
    """
    streams: list[list[Message]] = []
    for message in messages:
        if message.kind == SCHEMA:
            streams.append([])
        if message.kind != BATCH or message.start >= start:
            streams[-1].append(message)
    return [own for own in streams if any(each.kind == BATCH for each in own)]


def _open(
    file: OpenInput, messages: list[Message], fields: TextFields, memory: mmap.mmap | None
) -> tuple[Any, InputStream, TextFields]:
    """Return pyarrow's reader of the columns in use, what it reads from, and the fields in the file.

    It reads these messages, the schema first. Raises BadInput, ReadWriteError.
    """
    stream = InputStream(file, [(each.start, each.end) for each in messages], memory)
    with refused_by_name(file, "Arrow", stream):
        schema = ipc.open_stream(stream).schema
        fields = fields_in(file, schema, fields)
        wanted = {path[0] for path in fields.paths}
        numbers = [number for number, name in enumerate(schema.names) if name in wanted]
        stream.seek(0)
        options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        return ipc.open_stream(stream, options=options), stream, fields


def _with_bytes(
    arrays: Iterator[Any], batches: list[Message], num_bytes: dict[Message, int]
) -> Iterator[tuple[Any, int]]:
    """Yield each record batch with the bytes that it accounts for, if it has the rows of its header."""
    for message in batches:
        batch = next(arrays)
        if batch.num_rows != message.num_rows:
            raise ValueError(f"a record batch has {batch.num_rows} rows, its header says {message.num_rows}")
        yield batch, num_bytes[message]
