"""The tables of plan.json, of which a reader gets only the blocks that have its rows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from shardprep import errors, files
from shardprep.files import Digest
from shardprep.format import json_files
from shardprep.format.json_files import Count

T = TypeVar("T")
ROWS_PER_BLOCK = 512
_MAX_BLOCK_BYTES = 16 << 20  # a path has at most 4 KiB


class Table(Struct, frozen=True, kw_only=True):
    """The place of a table's rows in plan.json."""

    num_rows: Count
    offset: Count  # of the first row, counted from the end of the head
    # Bytes and sha256 of each block of 512 rows. A comma and a line end separate two blocks.
    blocks: list[tuple[Annotated[int, Meta(ge=0, le=_MAX_BLOCK_BYTES)], Digest]]


class Rows(Sequence[T]):
    """A table of a plan. A block is read when one of its rows is first needed, and then kept."""

    def __init__(self, file: files.ReadFile, begin: int, table: Table, kind: Any) -> None:
        """``begin``: offset of the byte after the head. Raises BrokenShard if rows and blocks disagree."""
        self._file = file
        self._table = table
        self._kind = kind
        sizes = [num_bytes for num_bytes, _ in table.blocks]
        if len(sizes) != -(-table.num_rows // ROWS_PER_BLOCK):
            expected = f"the blocks of {table.num_rows} rows"
            raise json_files.wrong_value(file.path, "tables", f"{len(sizes)} blocks", expected)
        steps = (size + len(b",\n") for size in sizes)
        self._offsets = list(itertools.accumulate(steps, initial=begin + table.offset))
        self._blocks: dict[int, list[T]] = {}  # those read so far

    def __len__(self) -> int:
        return self._table.num_rows

    def __iter__(self) -> Iterator[T]:
        for number in range(len(self._table.blocks)):
            yield from self._block(number)

    def __getitem__(self, key: Any) -> Any:  # slices are not supported
        number, place = divmod(range(len(self))[key], ROWS_PER_BLOCK)
        return self._block(number)[place]

    def _block(self, number: int) -> list[T]:
        if number in self._blocks:
            return self._blocks[number]
        path = self._file.path
        begin = self._offsets[number]
        num_bytes, expected = self._table.blocks[number]
        num_rows = min(ROWS_PER_BLOCK, len(self) - number * ROWS_PER_BLOCK)
        where = f"bytes {begin} to {begin + num_bytes}"
        with files.errors_named(path):
            raw = self._file.read(begin, num_bytes)
        sha256 = hashlib.sha256(raw).hexdigest()
        if sha256 != expected:
            raise errors.BrokenShard(
                path=path, found=f"{where}: sha256 {sha256[:12]}", expected=expected[:12]
            )
        with json_files.type_errors_named(path):
            rows: list[T] = msgspec.json.decode(b"[" + raw + b"]", type=self._kind)
        if len(rows) != num_rows:
            raise errors.BrokenShard(path=path, found=f"{where} have {len(rows)} rows", expected=num_rows)
        self._blocks[number] = rows
        return rows
