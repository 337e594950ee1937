"""Arrow files, as ``datasets`` keeps and saves them: the stream format, and the file format. Through pyarrow.

Both are messages one after the other, each with a header that says what it is and how long. Only these
headers are read to find where record batches begin. A part is given to pyarrow as a stream of its own: the
schema, the dictionaries before it, and the part's record batches. A large record batch is left out of that
stream, and of each column in use the bytes of some rows at a time are read.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from preprocess.formats.arrow_messages import BATCH, CONTINUES, Message, messages_of
from preprocess.formats.arrow_slices import RowSlices, slices_of
from preprocess.formats.columns import InputStream, arrow_of, check_columns, refused_by_name, row_documents
from preprocess.formats.format import DocumentBatch, Inspected, Reading, Start, no_documents
from preprocess.inputs import ByteRange, OpenInput, Place, RangeReader
from preprocess.long_documents import LongDocument
from shardprep.errors import ReadWriteError

_LARGE_BYTES = 16 << 20  # a larger record batch is not held whole


class Arrow:
    """``.arrow``."""

    is_in_bytes = False

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """See Format. Raises BadInput for another kind of file, or a missing column."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        schema = next(messages_of(file))
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
        picked = self._picked(file, part, reading)
        place = Place(
            file=file,
            input_number=part.input_number,
            start=picked.first_row,
            end=picked.first_row,
            line=line,
            num_bytes=part.end - part.start,
        )
        spans = _Spans(file, picked.streamed)
        table = self._columns(file, spans, reading)
        with refused_by_name(file, "Arrow", spans):
            yield from row_documents(_read_batches(table, picked, part, reading.batch_bytes), place, reading)
        if not picked.batches:
            yield no_documents(place)

    def _picked(self, file: OpenInput, part: ByteRange, reading: Reading) -> _Picked:
        """What of a file a part needs."""
        picked = _Picked(0, [], [], {})
        names = [path[0] for path in reading.fields.paths]
        for message in messages_of(file):
            if message.start >= part.end:
                break
            if message.kind == BATCH and message.start < part.start:
                picked = picked._replace(first_row=picked.first_row + message.num_rows)
                continue
            if message.kind == BATCH:
                picked.batches.append(message)
                if message.end - message.start > _LARGE_BYTES:
                    schema = self._schema(file, _Spans(file, picked.streamed))
                    if slices := slices_of(file, message, schema, names):
                        picked.slices[message.start] = slices
                        continue
            picked.streamed.append(message)
        return picked

    def _schema(self, file: OpenInput, spans: _Spans) -> Any:
        with refused_by_name(file, "Arrow", spans):
            return __import__("pyarrow.ipc", fromlist=["open_stream"]).open_stream(spans).schema

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


class _Picked(NamedTuple):
    first_row: int  # of the part, in the file
    streamed: list[Message]  # the schema, dictionaries and record batches that pyarrow reads as a stream
    batches: list[Message]  # record batches of the part
    slices: dict[int, RowSlices]  # the large ones, by their first byte


def _read_batches(
    table: Any, picked: _Picked, part: ByteRange, batch_bytes: int
) -> Iterator[tuple[Any, int]]:
    """Each record batch, or some rows of a large one, with the bytes of the part up to the next one."""
    begin, messages = part.start, picked.batches
    for message, later in itertools.zip_longest(messages, messages[1:]):
        following = part.end if later is None else later.start
        if message.start in picked.slices:
            for rows in picked.slices[message.start].read(batch_bytes):
                yield rows, 0
            yield rows.slice(rows.num_rows), following - begin
        else:
            batch = table.read_next_batch()
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


def _check_footer(file: OpenInput) -> None:
    """That the footer of the file format is whole, though it is not needed. Raises BadInput."""
    stream = InputStream(file)
    with refused_by_name(file, "Arrow", stream):
        __import__("pyarrow.ipc", fromlist=["open_file"]).open_file(stream)
