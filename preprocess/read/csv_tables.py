"""Read ``.csv`` and ``.tsv`` with a header, some rows at a time, with pyarrow. All values are texts.

A value may have line ends within quotes, so a row can only be found from the beginning: a file is in one
shard. A row with another number of values than the header ends the shard with an error that names it, as
nobody knows which of its values is the text.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as arrow
import pyarrow.csv as arrow_csv

from preprocess.read import encodings, formats, inputs
from preprocess.read.compressed import (
    COMPRESSIONS,
    HEAD_TEXT_BYTES,
    TextBlocks,
    beginning_of_text,
    decompressed,
)
from preprocess.read.formats import InputRecords, Inspected, SearchRanges, Start
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.tables import fields_in, records_of_batch, refused_by_name
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, TextFields
from shardprep.errors import BadInput, ReadWriteError, ShardprepError
from shardprep.format.plan_options import PlanOptions

_BLOCK_BYTES = 4 << 20  # parsed at once; a row must fit into it
_LARGE_BLOCK_BYTES = 2 * MOST_DOCUMENT_BYTES  # for files with longer rows, in which quotes may be doubled
_READ_BYTES = 512 << 10
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # of delimiters


class _RowTooLongError(Exception):
    """A row does not fit into a block."""


class _Text(io.RawIOBase):
    """The text of a file as UTF-8, as a file for pyarrow."""

    def __init__(self, pieces: TextBlocks, codec: str) -> None:
        super().__init__()
        self._pieces = pieces
        self._decoder = None
        if codec not in (encodings.UTF_8, encodings.UTF_8_WITH_MARK):
            self._decoder = codecs.getincrementaldecoder(codec)()
        self._left = b""  # text that was read, but not asked for
        self.num_bytes = 0  # of the file, read so far
        self.num_quotes = 0
        self.error: ShardprepError | None = None  # pyarrow raises its own instead

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        most = _READ_BYTES if size is None or size < 0 else size
        data = self.peek(most)
        self._left = self._left[len(data) :]
        return data

    def peek(self, most: int) -> bytes:
        """Return the next bytes, ``most`` unless the text ends before. Raises OSError."""
        try:
            while len(self._left) < most:
                data, num_read = next(self._pieces, (b"", -1))
                if num_read < 0:
                    break
                self.num_bytes += num_read
                self.num_quotes += data.count(b'"')
                self._left += data if self._decoder is None else self._decoder.decode(data).encode()
        except (ReadWriteError, BadInput) as error:
            self.error = error
            raise OSError(str(error)) from None
        return self._left[:most]


class Csv:
    """``.csv``, with commas between values."""

    delimiter = ","

    def __init__(self, suffix: str) -> None:
        """``suffix``: of a compressed file, or ""."""
        self.compression = COMPRESSIONS[suffix] if suffix else None

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:
        """Estimate the text. Raises BadInput if a column of the text is missing."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        head, text_bytes = beginning_of_text(file, self.compression, fields.options.zstd_long)
        names = _header(head, self.delimiter)
        schema = arrow.schema([(name, arrow.string()) for name in names])
        try:
            fields_in(file, schema, fields)
        except BadInput as error:
            (line,) = names if len(names) == 1 else ("",)
            other = next((each for each in _NAMES if each in line), "")
            if other:
                error.advise(f"its values seem to be between {_NAMES[other]}, not {_NAMES[self.delimiter]}")
            raise
        return Inspected(text_bytes, is_whole=True, head=head, names=names)

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:  # noqa: ARG002
        return formats.starts_among((), file, ranges)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        part = reader.byte_range
        num_rows = counted_end = 0
        if part.end:
            for batch, num_read in self._batches(reader, fields.options):
                here = fields_in(reader.file, batch.schema, fields)
                num_bytes = num_read - counted_end
                yield from records_of_batch(batch, num_bytes, num_rows, here, batch_bytes)
                num_rows += batch.num_rows
                counted_end = num_read
        yield InputRecords(num_bytes=part.end - counted_end)

    def _batches(self, reader: RangeReader, options: PlanOptions) -> Iterator[tuple[Any, int]]:
        """Yield the record batches of a file, with the file bytes that were read so far. Raises BadInput."""
        num_rows = 0
        for block_bytes in (_BLOCK_BYTES, _LARGE_BLOCK_BYTES):
            try:
                for batch, num_read in self._parsed(reader, options, block_bytes, num_rows):
                    yield batch, num_read
                    num_rows += batch.num_rows
            except _RowTooLongError:
                continue
            return
        raise inputs.unreadable(reader.file, "has a row that is too long, or a quote that is not closed")

    def _parsed(
        self, reader: RangeReader, options: PlanOptions, block_bytes: int, num_skipped: int
    ) -> Iterator[tuple[Any, int]]:
        """Yield the record batches after the first rows. Raises _RowTooLongError, BadInput."""
        span = (0, reader.byte_range.end)
        pieces = decompressed(
            reader.file, self.compression, reader.read, span, _READ_BYTES, options.zstd_long
        )
        text = _Text(pieces, encodings.encoding_of(reader.byte_range, options))
        batch = None
        with refused_by_name(reader.file, "CSV", text):
            names = _header(text.peek(HEAD_TEXT_BYTES), self.delimiter)
            opened = arrow_csv.open_csv(
                text,
                arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes),
                arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                # As bytes, so that each value is checked by itself.
                arrow_csv.ConvertOptions(check_utf8=False, column_types=dict.fromkeys(names, arrow.binary())),
            )
            try:
                for batch in opened:
                    num_here = min(num_skipped, batch.num_rows)
                    num_skipped -= num_here
                    if num_here < batch.num_rows:
                        yield batch.slice(num_here), text.num_bytes
            except arrow.ArrowInvalid as error:
                if "straddling object" in str(error):
                    raise _RowTooLongError from None
                raise
            # Otherwise the last value may have swallowed rows.
            if text.num_quotes % 2 and batch is not None and b"\n" in (batch.column(-1)[-1].as_py() or b""):
                raise ValueError("a quote is not closed")


class Tsv(Csv):
    """``.tsv``, with tabs between values."""

    delimiter = "\t"


def _header(head: bytes, delimiter: str) -> list[str]:
    """Return the names of the columns, given the beginning of a file's text."""
    data = head.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError:  # of another encoding, or cut within a character
        text = data.decode(
            encodings.CP949 if encodings.is_clearly_cp949(data) else encodings.UTF_8, "replace"
        )
    return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
