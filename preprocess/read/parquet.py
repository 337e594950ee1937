"""Parquet, through pyarrow: cut between row groups, read some pages at a time, only the columns in use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.parquet as parquet

from preprocess.read.columns import (
    InputStream,
    column_names,
    fields_in,
    refused_by_name,
    row_records,
    rows_at_once,
)
from preprocess.read.format import Inspected, Records, Start, no_records, starts_among
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.text_fields import TextFields, text_fields_of
from shardprep.errors import BadInput
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange

_BUFFER_BYTES = 1 << 20  # read at once of a column, so that no row group is held whole
_SIGNATURE_BYTES = 28  # behind the footer of a file whose columns are encrypted: a nonce and a tag


class Parquet:
    """``.parquet``."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Raises BadInput where the footer is broken, or a column of the text is missing."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        table, stream, fields = _open(file, text_fields_of(options))
        with refused_by_name(file, "Parquet", stream):
            groups = range(table.metadata.num_row_groups)
            text_bytes = sum(_text_bytes(table.metadata, group, fields) for group in groups)
        return Inspected(text_bytes=text_bytes, is_whole=False)

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], options: PlanOptions
    ) -> list[Start | None]:
        places: list[int] = []
        if file.stamp.num_bytes:
            table, stream, _ = _open(file, text_fields_of(options))
            with refused_by_name(file, "Parquet", stream):
                places = [start for start, _ in _row_groups(table)[1:]]
        return starts_among(map(Start, places), file, stretches)

    def read(
        self,
        reader: RangeReader,
        options: PlanOptions,  # noqa: ARG002 - the fields say it all
        fields: TextFields,
        batch_bytes: int,
    ) -> Iterator[Records]:
        file, part = reader.file, reader.part
        num_left = part.end - part.start
        reader.hash_rest()
        if not file.stamp.num_bytes:
            return
        table, stream, fields = _open(file, fields)
        with refused_by_name(file, "Parquet", stream):
            groups = [each for each in _row_groups(table) if each[0] < part.end]
            before = [number for start, numbers in groups if start < part.start for number in numbers]
            own = [(start, numbers) for start, numbers in groups if start >= part.start]
            first_row = sum(table.metadata.row_group(number).num_rows for number in before)
            batches = _batches(table, own, part, fields, batch_bytes)
            for records in row_records(batches, first_row, fields, batch_bytes):
                num_left -= records.num_bytes
                yield records
        if num_left:  # of row groups without rows, or of no row group
            yield no_records(num_left)


def _open(file: OpenInput, fields: TextFields) -> tuple[Any, InputStream, TextFields]:
    """Return a pyarrow ParquetFile, what it reads from, and the fields in it. Raises BadInput."""
    stream = InputStream(file)
    size = file.stamp.num_bytes
    tail = file.read(max(0, size - 8), size)
    if tail.endswith(b"PARE"):
        raise _encrypted(file, "an encrypted footer")
    with refused_by_name(file, "Parquet", stream):
        table = parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False, memory_map=False)
        # pyarrow ends the process (SIGABRT) where the metadata of an encrypted column is asked for.
        if int.from_bytes(tail[:4], "little") == table.metadata.serialized_size + _SIGNATURE_BYTES:
            raise _encrypted(file, "encrypted columns, or a signed footer")
        return table, stream, fields_in(file, table.schema_arrow, fields)


def _encrypted(file: OpenInput, what: str) -> BadInput:
    return BadInput(
        path=file.path,
        found=what,
        expected="Parquet that can be read without a key; write it anew without encryption, or move it away, "
        "and plan anew",
    )


def _row_groups(table: Any) -> list[tuple[int, list[int]]]:
    """Where a part may begin, and the row groups there: one alone, or all where their bytes do not ascend."""
    starts, numbers = [], list(range(table.metadata.num_row_groups))
    for number in numbers:
        column = table.metadata.row_group(number).column(0)
        dictionary, data = column.dictionary_page_offset, column.data_page_offset
        starts.append(dictionary if dictionary and 0 < dictionary < data else data)
    if any(before >= after for before, after in itertools.pairwise(starts)):
        return [(0, numbers)]
    return [(starts[number] if number else 0, [number]) for number in numbers]


def _text_bytes(metadata: Any, group: int, fields: TextFields) -> int:
    """Return about how much text a row group has: its columns in use, decompressed."""
    names = set(column_names(fields))
    row_group = metadata.row_group(group)
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    return sum(
        column.total_uncompressed_size
        for column in columns
        if not names.isdisjoint(itertools.accumulate(column.path_in_schema.split("."), "{}.{}".format))
    )


def _batches(
    table: Any, groups: list[tuple[int, list[int]]], part: ByteRange, fields: TextFields, batch_bytes: int
) -> Iterator[tuple[Any, int]]:
    """Return the record batches of row groups; each group's last one accounts for all bytes of it."""
    bounds = itertools.pairwise([part.start, *(start for start, _ in groups[1:]), part.end])
    for (_, numbers), (begin, end) in zip(groups, bounds, strict=False):
        expected = sum(table.metadata.row_group(number).num_rows for number in numbers)
        num_bytes = sum(_text_bytes(table.metadata, number, fields) for number in numbers)
        num_rows, num_told = 0, 0
        for batch in table.iter_batches(
            batch_size=rows_at_once(expected, num_bytes, batch_bytes),
            row_groups=numbers,
            columns=column_names(fields),
            use_threads=False,
        ):
            num_rows += batch.num_rows
            share = (end - begin) * num_rows // max(1, expected)
            yield batch, share - num_told
            num_told = share
        if num_rows != expected:
            raise BadInput(f"row group {numbers[0]} has {num_rows} rows, its footer says {expected}")
