"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header (a flatbuffer: format/Message.fbs of Arrow) that
says what it is and how long. Only these headers are read to find where record batches begin; of the file
format, those that its footer lists. A part of a stream is given to pyarrow as a stream of its own: the
schema, the dictionaries before it, and the part's record batches.

pyarrow reads a record batch whole. A file with a large one is mapped instead, and its pages are let go with
each batch of documents. The price: where a mapped page cannot be read, the system ends the process (SIGBUS).
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.ipc as ipc

from preprocess.formats.columns import InputStream, fields_in, refused_by_name, row_documents
from preprocess.formats.format import DocumentBatch, Inspected, Reading, Start, no_documents, starts_among
from preprocess.formats.inputs import OpenInput, RangeReader, unreadable
from preprocess.formats.long_documents import LongDocument
from preprocess.formats.text_fields import TextFields
from shardprep.errors import BadInput

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
_MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"
_HEAD_BYTES = 4 << 10
_MOST_HEADER_BYTES = 64 << 20
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
    """The messages of a file, in order: a stream's begin with its schema; of the file format the record
    batches alone.

    Their headers are read, and of the file format its footer. Raises BadInput, naming the byte.
    """
    size = file.stamp.num_bytes
    head = file.read(0, min(size, 8))
    if head.startswith(_MAGIC):
        if file.read(size - 6, size) != _MAGIC:
            raise _broken(file, f"it does not end in {_MAGIC!r}")
        yield from _listed_batches(file)
        return
    if head[:4] != CONTINUES:
        raise _broken(file, f"it begins with {head!r}")
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
        kind, num_rows, body_bytes, is_packed = _header(block[8 : 8 + header_bytes])
    except (struct.error, IndexError, ValueError):
        raise _broken(file, f"the message at byte {position} has no right header") from None
    end = position + 8 + header_bytes + body_bytes
    if end > size:
        raise _broken(file, f"the message at byte {position} goes on behind the end: it is cut short")
    return Message(kind, position, position + 8 + header_bytes, end, num_rows, is_packed)


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
    """Where a field of a flatbuffer's table lies; 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    num_bytes = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry + 2 <= num_bytes else 0
    return int(table + offset) if offset else 0


class Arrow:
    """``.arrow``."""

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """Raises BadInput for another kind of file, or a missing column."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        _open(file, list(itertools.islice(messages_of(file), 1)), reading.fields, None)
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)

    def starts(
        self,
        file: OpenInput,
        stretches: Sequence[tuple[int, int]],
        reading: Reading,  # noqa: ARG002
    ) -> list[Start | None]:
        messages = messages_of(file) if file.stamp.num_bytes else iter(())
        return starts_among((Start(each.start) for each in messages if each.kind == BATCH), file, stretches)

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        file, part = reader.file, reader.part
        reader.hash_rest()
        if not file.stamp.num_bytes:
            return
        messages = list(itertools.takewhile(lambda each: each.start < part.end, messages_of(file)))
        own = [each for each in messages if each.kind != BATCH or each.start >= part.start]
        before = [each for each in messages if each.kind == BATCH and each.start < part.start]
        batches = [each for each in own if each.kind == BATCH]
        is_large = any(each.end - each.start > _LARGE_BYTES and not each.is_packed for each in batches)
        memory = file.mapped() if is_large else None
        arrow_reader, stream, fields = _open(file, own, reading.fields, memory)
        numbers = range(len(before), len(before) + len(batches))
        is_file = hasattr(arrow_reader, "get_batch")  # which a stream has not
        arrays = map(arrow_reader.get_batch, numbers) if is_file else iter(arrow_reader)
        place = reader.place(sum(each.num_rows for each in before), line)
        reading = dataclasses.replace(reading, fields=fields)
        with refused_by_name(file, "Arrow", stream):
            starts = [part.start, *(each.start for each in batches[1:]), part.end]
            for item in row_documents(_with_bytes(arrays, batches, starts), place, reading):
                yield item
                if memory is not None:
                    memory.madvise(mmap.MADV_DONTNEED)
        if not batches:
            yield no_documents(place)


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
    arrays: Iterator[Any], batches: list[Message], starts: list[int]
) -> Iterator[tuple[Any, int]]:
    """Each record batch with the bytes of the part up to the next one, if it has the rows of its header."""
    for message, (begin, end) in zip(batches, itertools.pairwise(starts), strict=False):
        batch = next(arrays)
        if batch.num_rows != message.num_rows:
            raise ValueError(f"a record batch has {batch.num_rows} rows, its header says {message.num_rows}")
        yield batch, end - begin
