"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header that says what it is and how long. Only these
headers are read to find where record batches begin. A part is given to pyarrow as a stream of its own: the
schema, the dictionaries before it, and the part's record batches.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from preprocess.formats.columns import InputStream, arrow_of, check_columns, refused_by_name, row_documents
from preprocess.formats.format import DocumentBatch, Inspected, RangeReader, Reading, Start, no_documents
from preprocess.inputs import OpenInput, Place
from preprocess.long_documents import LongDocument
from shardprep.errors import BadInput, ReadWriteError

_MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"
_HEAD_BYTES = 4 << 10
_MOST_HEADER_BYTES = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


class _Message(NamedTuple):
    kind: int
    start: int
    end: int
    num_rows: int


class Arrow:
    """``.arrow``."""

    is_in_bytes = False

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """See Format. Raises BadInput for another kind of file, or a missing column."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        schema = next(_messages(file))
        self._columns(file, _Spans(file, [schema]), reading)
        if schema.start:
            _check_footer(file)
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
            (message.start for message in _messages(file) if message.kind == _BATCH) if size else iter(())
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
        first_row, used, batches = 0, [], []
        for message in _messages(file):
            if message.start >= part.end:
                break
            if message.kind != _BATCH:
                used.append(message)
            elif message.start < part.start:
                first_row += message.num_rows
            else:
                used.append(message)
                batches.append(message)
        place = Place(
            file=file,
            input_number=part.input_number,
            start=first_row,
            end=first_row,
            line=line,
            num_bytes=part.end - part.start,
        )
        spans = _Spans(file, used)
        table = self._columns(file, spans, reading)
        with refused_by_name(file, "Arrow", spans):
            yield from row_documents(_read_batches(table, batches, part.start, part.end), place, reading)
        if not batches:
            yield no_documents(place)

    def _columns(self, file: OpenInput, spans: _Spans, reading: Reading) -> Any:
        """A pyarrow reader of a stream, for the columns in use."""
        arrow = arrow_of(".arrow")
        ipc = __import__("pyarrow.ipc", fromlist=["open_stream"])
        with refused_by_name(file, "Arrow", spans):
            schema = ipc.open_stream(spans).schema
            check_columns(file, schema, reading.fields)
            wanted = {path[0] for path in reading.fields.paths}
            numbers = [number for number, name in enumerate(schema.names) if name in wanted]
            spans.seek(0)
            options = arrow.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
            return ipc.open_stream(spans, options=options)


def _read_batches(table: Any, messages: list[_Message], start: int, end: int) -> Iterator[tuple[Any, int]]:
    """Each record batch, with the bytes of the part up to the next one."""
    begin = start
    for message, later in itertools.zip_longest(messages, messages[1:]):
        following = end if later is None else later.start
        batch = table.read_next_batch()
        if batch.num_rows != message.num_rows:
            raise ValueError(f"a record batch has {batch.num_rows} rows, its header says {message.num_rows}")
        yield batch, following - begin
        begin = following


class _Spans(InputStream):
    """Some messages of a file as one stream, with the mark that ends it."""

    def __init__(self, file: OpenInput, messages: list[_Message]) -> None:
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
        found.append((_CONTINUES + bytes(4))[max(0, position - tail) : max(0, end - tail)])
        self._position = max(position, end)
        return b"".join(found)

    def _read_file(self, start: int, end: int) -> bytes:
        try:
            return self._file.read_all(start, end)
        except ReadWriteError as error:
            self.error = error
            raise OSError(str(error)) from None


def _messages(file: OpenInput) -> Iterator[_Message]:
    """The messages of a file, in order; their headers alone are read. Raises BadInput, naming the byte."""
    size = file.stamp.num_bytes
    head = file.read(0, min(size, 8))
    is_file = head.startswith(_MAGIC)
    if is_file and file.read(size - 6, size) != _MAGIC:
        raise _broken(file, f"it does not end in {_MAGIC!r}")
    position = 8 if is_file else 0
    if not is_file and head[:4] != _CONTINUES:
        raise _broken(file, f"it begins with {head!r}")
    while True:
        block = file.read(position, min(position + _HEAD_BYTES, size))
        if len(block) < 8 or block[:4] != _CONTINUES:
            raise _broken(file, f"no message begins at byte {position}: it is cut short, or damaged")
        header_bytes = int.from_bytes(block[4:8], "little")
        if not header_bytes:
            return
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
        yield _Message(kind, position, end, num_rows)
        position = end


def _check_footer(file: OpenInput) -> None:
    """That the footer of the file format is whole, though it is not needed. Raises BadInput."""
    stream = InputStream(file)
    with refused_by_name(file, "Arrow", stream):
        __import__("pyarrow.ipc", fromlist=["open_file"]).open_file(stream)


def _broken(file: OpenInput, why: str) -> BadInput:
    return BadInput(
        f"input {file.path} cannot be read as Arrow: {why}; bring a whole file, or move it away and plan anew"
    )


def _header(data: bytes) -> tuple[int, int, int]:
    """Kind, rows and bytes of the body of a message, by its flatbuffer (format/Message.fbs of Arrow)."""
    root = struct.unpack_from("<I", data, 0)[0]
    kind = struct.unpack_from("<B", data, _slot(data, root, 1))[0]
    body_slot = _slot(data, root, 3, optional=True)
    body_bytes = struct.unpack_from("<q", data, body_slot)[0] if body_slot else 0
    num_rows = 0
    if kind == _BATCH:
        inner = _slot(data, root, 2)
        table = inner + struct.unpack_from("<I", data, inner)[0]
        rows_slot = _slot(data, table, 0, optional=True)
        num_rows = struct.unpack_from("<q", data, rows_slot)[0] if rows_slot else 0
    if kind not in (_SCHEMA, _DICTIONARY, _BATCH) or body_bytes < 0 or num_rows < 0:
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
