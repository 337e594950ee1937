"""Read Parquet with pyarrow, some pages at a time. A part begins at a row group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as compute
import pyarrow.parquet as parquet
import pyarrow.types as types

from preprocess.read import formats
from preprocess.read.formats import InputRecords, Inspected, SearchRanges, Start
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.tables import (
    MOST_ROWS,
    InputStream,
    fields_in,
    records_of_batch,
    refused_by_name,
    rows_at_once,
)
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.errors import BadInput

_MOST_DECODED_BYTES = 16 << 20  # of rows that pyarrow decodes at once, unless one row has more
_VALUE_BYTES = 16  # a decoded value takes at least so much, however few bits encode it
_LEAST_DECODED_BYTES = 4 << 20  # decoding costs time for each column, however few rows there are
_SEEN_ROWS = 64  # read to see the dictionaries of a row group
_FEW_ROWS = 16  # decoded at once if their size is unknown
_BUFFER_BYTES = 1 << 20  # read at once of a column, so that no row group is in memory as a whole
_SIGNATURE_BYTES = 28  # nonce and tag after the footer, in a file whose columns are encrypted


class Parquet:
    """``.parquet``. Only the columns in use are read, some pages at a time."""

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:
        """Estimate the text. Raises BadInput if the footer is damaged, or a column of the text is missing."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        table, stream, here = self._open(file, fields)
        with refused_by_name(file, "Parquet", stream):
            groups = range(table.metadata.num_row_groups)
            text_bytes = _text_bytes(table.metadata, groups, here)
            return Inspected(text_bytes, is_whole=False, names=table.schema_arrow.names)

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:
        places: list[Start] = []
        if file.stamp.num_bytes:
            table, stream, _ = self._open(file, fields)
            with refused_by_name(file, "Parquet", stream):
                places = [Start(start) for start, _ in _row_groups(table.metadata)[1:]]
        return formats.starts_among(places, file, ranges)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        reader.hash_rest()
        if reader.file.stamp.num_bytes:
            yield from _joined(self._decoded(reader, fields, batch_bytes), batch_bytes)

    def _decoded(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        """Yield the records of a part as they are decoded, perhaps few at a time."""
        file = reader.file
        byte_range = reader.byte_range
        table, stream, fields = self._open(file, fields)
        counted_end = byte_range.start  # end of the bytes that the records so far count
        with refused_by_name(file, "Parquet", stream):
            dictionaries = _Dictionaries(stream, table.metadata, fields)
            groups = _row_groups(table.metadata)
            first_row = 0
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
                    yield from records_of_batch(batch, up_to - counted_end, first_row, fields, batch_bytes)
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
                return table, stream, fields_in(file, table.schema_arrow, fields)
        expected = "Parquet without encryption"
        advice = "write it again, or move it away, and plan again"
        raise BadInput(
            path=file.path, found="an encrypted or a signed footer", expected=expected, advice=advice
        )


def _row_groups(metadata: Any) -> list[tuple[int, list[int]]]:
    """Return where a part may begin, and the row groups there: one, or all if they are not in order."""
    starts = []
    for number in range(metadata.num_row_groups):
        column = metadata.row_group(number).column(0)
        dictionary = column.dictionary_page_offset
        data = column.data_page_offset
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
        self.metadata = metadata
        self.fields = fields
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
            longest: list[int] = []
            for batch in itertools.islice(rows, 1):
                for column in batch.columns:
                    longest += _longest_values(column)
        except NotImplementedError:
            return None
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
    return list(itertools.chain.from_iterable(map(_longest_values, inner)))


def _rows_decoded_at_once(dictionaries: _Dictionaries, batch_bytes: int, number: int) -> int:
    """Return how many rows of a row group pyarrow may decode at once."""
    num_rows = dictionaries.metadata.row_group(number).num_rows
    num_bytes = 0
    for column in _columns_in_use(dictionaries.metadata, number, dictionaries.fields):
        num_bytes += max(column.total_uncompressed_size, _VALUE_BYTES * column.num_values)
    most = rows_at_once(num_rows, num_bytes, max(batch_bytes, _LEAST_DECODED_BYTES))
    row_bytes = dictionaries.most_row_bytes(number)
    if row_bytes is None:
        return min(most, _FEW_ROWS)
    return max(1, min(most, _MOST_DECODED_BYTES // max(1, row_bytes)))


def _joined(records: Iterator[InputRecords], batch_bytes: int) -> Iterator[InputRecords]:
    """Join records until they have about ``batch_bytes`` of text, or MOST_ROWS rows.

    Records for a function stay as they were decoded: they have all fields, of which any may be long.
    """
    some: list[InputRecords] = []
    num_rows = num_bytes = 0
    for each in records:
        if "record" in each.columns:
            yield each
            continue
        some.append(each)
        num_rows += len(each.texts)
        for text in each.texts:
            num_bytes += 0 if isinstance(text, UnusableText) else len(text)
        if num_bytes >= batch_bytes or num_rows >= MOST_ROWS:
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
