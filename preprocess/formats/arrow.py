"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header that says what it is and how long. Only these
headers are read to find where record batches begin; of the file format, those that its footer lists. A part
of a stream is given to pyarrow as a stream of its own: the schema, the dictionaries before it, and the part's
record batches. Of a large record batch the bytes of some rows at a time are read, of each column in use.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from preprocess.formats.arrow_messages import BATCH, CONTINUES, Message, has_footer, messages_of
from preprocess.formats.arrow_slices import RowSlices, slices_of
from preprocess.formats.columns import InputStream, arrow_of, fields_in, refused_by_name, row_documents
from preprocess.formats.format import DocumentBatch, Inspected, Reading, Start, no_documents
from preprocess.inputs import ByteRange, OpenInput, Place, RangeReader
from preprocess.long_documents import LongDocument
from preprocess.text_fields import TextFields
from shardprep.errors import ReadWriteError

_LARGE_BYTES = 16 << 20  # a larger record batch is not held whole


class Arrow:
    """``.arrow``."""

    is_in_bytes = False

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
        place = Place(
            file=file,
            input_number=part.input_number,
            start=picked.first_row,
            end=picked.first_row,
            line=line,
            num_bytes=part.end - part.start,
        )
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
    arrow = arrow_of(".arrow")
    ipc = __import__("pyarrow.ipc", fromlist=["open_stream"])
    stream = _Spans(file, streamed) if streamed else InputStream(file)
    opened = ipc.open_stream if streamed else ipc.open_file
    with refused_by_name(file, "Arrow", stream):
        schema = opened(stream).schema
        fields = fields_in(file, schema, fields)
        wanted = {path[0] for path in fields.paths}
        numbers = [number for number, name in enumerate(schema.names) if name in wanted]
        stream.seek(0)
        options = arrow.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
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
