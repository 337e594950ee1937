"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header (a flatbuffer: format/Message.fbs of Arrow) that
says what it is and how long. Only these headers are read to find where record batches begin; of the file
format, those that its footer lists. A part of a stream is given to pyarrow as a stream of its own: the
schema, the dictionaries before it, and the part's record batches. Streams may follow each other in a file
(``cat a.arrow b.arrow``), where pyarrow stops behind the first.

pyarrow reads a record batch whole. A file with a large one is mapped instead, and its pages are let go with
each batch of documents. The price: where a mapped page cannot be read, the system ends the process (SIGBUS).
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
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
_MOST_PADDING_BYTES = 4 << 10
_LARGE_BYTES = 16 << 20  # a larger record batch is not held whole


class Message(NamedTuple):
    """One message; a record batch has rows."""

    kind: int
    start: int  # byte of the file
    body_start: int
    end: int
    num_rows: int
    is_packed: bool  # its buffers are compressed


def messages_of(file: OpenInput) -> Iterator[Message]:
    """The messages of a file, in order: each of its streams begins with its schema; of the file format the
    record batches alone.

    Their headers are read, and of the file format its footer. Raises BadInput, naming the byte.
    """
    size = file.stamp.num_bytes
    if file.read(0, len(_MAGIC)) == _MAGIC:
        if file.read(size - 6, size) != _MAGIC:
            raise _broken(file, f"it does not end in {_MAGIC!r}")
        yield from _listed_batches(file)
        return
    # The mark of the end is optional: a stream may end with the file.
    position, begins = 0, True
    while position < size:
        message = _stream_start(file, position) if begins else _message_at(file, position)
        if message.kind == SCHEMA and not begins:
            raise _broken(file, f"a schema stands within a stream, at byte {position}")
        if message.kind != END:
            yield message
        position, begins = message.end, message.kind == END


def _stream_start(file: OpenInput, position: int) -> Message:
    """Return the schema with which a stream begins. Raises BadInput where none begins here."""
    head = file.read(position, min(position + 8, file.stamp.num_bytes))
    where = "it begins with" if position == 0 else f"behind the end of a stream, at byte {position}, it has"
    try:
        message = _message_at(file, position)
    except BadInput:
        # Without its mark of four bytes, nearly everything that is no stream at all.
        if head.startswith(CONTINUES):
            raise
        raise _broken(file, f"{where} {head!r}") from None
    if message.kind != SCHEMA:
        raise _broken(file, f"{where} another message than a schema")
    return message


def _listed_batches(file: OpenInput) -> Iterator[Message]:
    """The record batches that the footer lists, in the order of the file; dictionaries may stand behind them.

    Some writers leave something else than the schema at byte 8. But where anything stands that the footer
    does not list, the file is damaged, or is several, one behind another: pyarrow would leave out record
    batches without a word.
    """
    footer_start, blocks = _footer(file)
    position = 0
    try:
        if (schema := _message_at(file, 8)).kind == SCHEMA:
            position = schema.end
    except BadInput:
        if file.read(8, 12) == CONTINUES:
            raise
    for kind, start, header_bytes, body_bytes in sorted(blocks, key=lambda block: block[1]):
        if start < max(8, position):
            raise _broken(file, f"its footer lists byte {start} twice, or within another message")
        _check_padding(file, position, start)
        message = _message_at(file, start)
        ends = (start + header_bytes, start + header_bytes + body_bytes)
        if (message.kind, message.body_start, message.end) != (kind, *ends):
            raise _broken(file, f"the message at byte {start} is not what the footer says")
        if kind == BATCH:
            yield message
        position = message.end
    _check_padding(file, position, footer_start)


def _check_padding(file: OpenInput, position: int, end: int) -> None:
    """That zeros alone, or the mark of the end, stand between what the footer lists."""
    if not position:
        return  # what stands before the first one is not known
    between = file.read(position, min(end, position + _MOST_PADDING_BYTES))
    if len(between) != end - position or between.replace(CONTINUES, b"").strip(b"\0"):
        raise _broken(file, f"its footer does not list what stands at byte {position}")


def _footer(file: OpenInput) -> tuple[int, list[list[int]]]:
    """Where the footer begins, and what it lists: kind, first byte, and bytes of header and body of each."""
    size = file.stamp.num_bytes
    if size < 18:
        raise _broken(file, f"it has {size} bytes, and no footer")
    num_bytes = int.from_bytes(file.read(size - 10, size - 6), "little")
    start = size - 10 - num_bytes
    if not 0 < num_bytes <= _MOST_HEADER_BYTES or start < 8:
        raise _broken(file, f"its footer has {num_bytes} bytes, it says")
    data = file.read_all(start, size - 10)
    blocks: list[list[int]] = []
    try:
        root = struct.unpack_from("<I", data, 0)[0]
        for number, kind in ((2, DICTIONARY), (3, BATCH)):
            if slot := _slot(data, root, number):
                vector = slot + struct.unpack_from("<I", data, slot)[0]
                num = struct.unpack_from("<I", data, vector)[0]
                listed = np.frombuffer(data, "<i8", 3 * num, vector + 4).reshape(num, 3).copy()
                listed[:, 1] &= 0xFFFFFFFF  # of 32 bits, and as many without a meaning
                if kind == BATCH and np.any(np.diff(listed[:, 0]) <= 0):
                    raise _broken(file, "its footer lists record batches in another order than they stand in")
                blocks += [[kind, *block] for block in listed.tolist()]
    except (struct.error, IndexError, ValueError):
        raise _broken(file, "its footer is damaged") from None
    return start, blocks


def _message_at(file: OpenInput, position: int) -> Message:
    """Return the message that begins at a byte; the mark of the end is one, too. Raises BadInput."""
    size = file.stamp.num_bytes
    block = file.read(position, min(position + _HEAD_BYTES, size))
    # Before Arrow 0.15 messages began with the size of their header alone.
    at = 4 if block.startswith(CONTINUES) else 0
    if len(block) < at + 4:
        raise _broken(file, f"no message begins at byte {position}: it is cut short, or damaged")
    header_bytes = int.from_bytes(block[at : at + 4], "little")
    begin = position + at + 4
    if not header_bytes:
        return Message(END, position, begin, begin, 0, is_packed=False)
    if header_bytes > min(size - begin, _MOST_HEADER_BYTES):
        raise _broken(file, f"the message at byte {position} goes on behind the end")
    header = block[at + 4 : at + 4 + header_bytes]
    if len(header) < header_bytes:
        header = file.read_all(begin, begin + header_bytes)
    try:
        kind, num_rows, body_bytes, is_packed = _header(header)
    except (struct.error, IndexError, ValueError):
        raise _broken(file, f"the message at byte {position} has no right header") from None
    end = begin + header_bytes + body_bytes
    if end > size:
        raise _broken(file, f"the message at byte {position} goes on behind the end: it is cut short")
    return Message(kind, position, begin + header_bytes, end, num_rows, is_packed)


def _broken(file: OpenInput, why: str) -> BadInput:
    return unreadable(file, f"cannot be read as Arrow: {why}")


def _header(data: bytes) -> tuple[int, int, int, bool]:
    """Kind, rows and bytes of the body of a message, and whether its buffers are compressed."""
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
        before = [each for each in messages if each.kind == BATCH and each.start < part.start]
        is_large = any(each.end - each.start > _LARGE_BYTES and not each.is_packed for each in batches)
        memory = file.mapped() if is_large else None
        # Each batch accounts for the bytes up to the next one, the first and the last one for the rest, too.
        starts = [part.start, *(each.start for each in batches[1:]), part.end]
        num_bytes = {each: starts[n + 1] - starts[n] for n, each in enumerate(batches)}
        row = sum(each.num_rows for each in before)
        for own in _streams(messages, part.start):
            own_batches = [each for each in own if each.kind == BATCH]
            arrow_reader, stream, fields_here = _open(file, own, fields, memory)
            is_file = hasattr(arrow_reader, "get_batch")  # which a stream has not
            numbers = range(len(before), len(before) + len(batches))
            arrays = map(arrow_reader.get_batch, numbers) if is_file else iter(arrow_reader)
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
    """What pyarrow is to be given one after the other to read the record batches from byte ``start`` on.

    Of each stream: its schema, its dictionaries and these batches; of the file format the batches.
    """
    streams: list[list[Message]] = []
    for message in messages:
        if message.kind == SCHEMA or not streams:
            streams.append([])
        if message.kind != BATCH or message.start >= start:
            streams[-1].append(message)
    return [own for own in streams if any(each.kind == BATCH for each in own)]


def _open(
    file: OpenInput, messages: list[Message], fields: TextFields, memory: mmap.mmap | None
) -> tuple[Any, InputStream, TextFields]:
    """pyarrow's reader of the columns in use, what it reads from, and the fields where the file has them.

    Of a stream it reads these messages, the schema first. Raises BadInput, ReadWriteError.
    """
    is_stream = bool(messages) and messages[0].kind == SCHEMA
    stream = InputStream(file, [(each.start, each.end) for each in messages] if is_stream else [], memory)
    opened = ipc.open_stream if is_stream else ipc.open_file
    with refused_by_name(file, "Arrow", stream):
        schema = opened(stream).schema
        fields = fields_in(file, schema, fields)
        wanted = {path[0] for path in fields.paths}
        numbers = [number for number, name in enumerate(schema.names) if name in wanted]
        stream.seek(0)
        # Of the file format pyarrow would copy the columns.
        included = numbers if is_stream or memory is None else []
        options = ipc.IpcReadOptions(included_fields=included, use_threads=False)
        return opened(stream, options=options), stream, fields


def _with_bytes(
    arrays: Iterator[Any], batches: list[Message], num_bytes: dict[Message, int]
) -> Iterator[tuple[Any, int]]:
    """Each record batch with the bytes that it accounts for, if it has the rows of its header."""
    for message in batches:
        batch = next(arrays)
        if batch.num_rows != message.num_rows:
            raise ValueError(f"a record batch has {batch.num_rows} rows, its header says {message.num_rows}")
        yield batch, num_bytes[message]
