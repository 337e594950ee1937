"""Documents' ids -> rows of seq_len tokens, each document whole in one row where it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.row_members import START, RowGroup, pad_id, rows_a_member
from preprocess.shard_format import DatasetSpec
from preprocess.token_batches import TokenBatch

Ids = npt.NDArray[np.unsignedinteger[Any]]
Source = tuple[int, int]  # input, and byte in it


class _ClosedRow(NamedTuple):
    ids: Ids  # padded
    num_tokens: int
    starts: list[tuple[int, Source]]  # where documents begin
    first: Source  # of the first token


class BestFitRows:
    """Keeps documents whole where they fit into a row (``--pack best_fit``).

    Each document goes into the open row in which it leaves the least space, as in Ding et al. 2024,
    "Fewer Truncations Improve Language Modeling", but over a window of open rows rather than the
    whole shard, so that memory is bounded; the fullest row is closed when another must be opened. A
    document longer than a row fills rows of its own, and its rest opens one. The price: padding, and
    about 1.5 us of Python a document.
    """

    _OPEN_BYTES = 8 << 20

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        num_open = min(1024, max(16, self._OPEN_BYTES // (spec.seq_len * spec.dtype.itemsize)))
        self._buffer = np.full((num_open, spec.seq_len), pad_id(spec), spec.dtype)
        self._free = list(range(num_open - 1, -1, -1))  # rows of the buffer that hold nothing
        self._spaces = 0  # bit s: some open row has s tokens of space
        self._open: dict[int, list[int]] = {}  # space -> the open rows that have it
        self._starts_of: list[list[tuple[int, Source]]] = [[] for _ in range(num_open)]
        self._first_of: list[Source] = [(0, 0)] * num_open
        self._closed: list[_ClosedRow] = []
        self._group_rows = rows_a_member(spec)
        self._rest: list[Ids] = []  # of a document given in pieces
        self._rest_start: Source = (0, 0)
        self._rest_is_start = False
        self.num_cut = 0

    def append(self, tokens: TokenBatch, starts: npt.NDArray[np.void]) -> Iterator[RowGroup]:
        """See Packer."""
        bounds = tokens.offsets.tolist()
        sources, offsets = starts["source"].tolist(), starts["source_offset"].tolist()
        ids = tokens.ids.astype(self._spec.dtype)
        for number, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
            begin, end = bounds[number], bounds[number + 1]
            if end - begin <= self._spec.seq_len:
                if begin < end:
                    self._put(ids[begin:end], (source, offset), is_start=True)
            else:
                self._put_long(ids[begin:end], (source, offset), is_start=True)
                self.num_cut += 1
            if len(self._closed) >= self._group_rows:
                yield from self._groups()

    def append_piece(self, ids: Ids, start: npt.NDArray[np.void] | None) -> Iterator[RowGroup]:
        """See Packer."""
        if start is not None:
            self._rest_start = (int(start["source"][0]), int(start["source_offset"][0]))
            self._rest_is_start = True
        self._rest.append(ids.astype(self._spec.dtype))
        held = np.concatenate(self._rest)
        whole = max(0, len(held) - 1) // self._spec.seq_len * self._spec.seq_len  # never the last token
        if whole:
            self._put_long(held[:whole], self._rest_start, is_start=self._rest_is_start)
            self.num_cut += self._rest_is_start
            self._rest_is_start = False
        self._rest = [held[whole:]]
        yield from self._groups()

    def end_document(self) -> Iterator[RowGroup]:
        """See Packer."""
        for ids in self._rest:
            if len(ids):
                self._put(ids, self._rest_start, is_start=self._rest_is_start)
        self._rest = []
        yield from self._groups()

    def finish(self) -> Iterator[RowGroup]:
        """See Packer."""
        for space in sorted(self._open):
            for row in self._open[space]:
                self._close(row, space)
        yield from self._groups(last=True)

    def _put_long(self, ids: Ids, first: Source, *, is_start: bool) -> None:
        for begin in range(0, len(ids), self._spec.seq_len):
            self._put(ids[begin : begin + self._spec.seq_len], first, is_start=is_start and begin == 0)

    def _put(self, ids: Ids, first: Source, *, is_start: bool) -> None:
        """Place at most a row's worth of ids. What goes on from another row always opens one."""
        length = len(ids)
        fitting = self._spaces >> length if is_start else 0
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = self._pop(space)
        else:
            space = self._spec.seq_len
            row = self._new_row()
            self._first_of[row] = first
        begin = self._spec.seq_len - space
        self._buffer[row, begin : begin + length] = ids
        if is_start:
            self._starts_of[row].append((begin, first))
        if space == length:
            self._close(row, 0)
        else:
            self._open.setdefault(space - length, []).append(row)
            self._spaces |= 1 << (space - length)

    def _pop(self, space: int) -> int:
        rows = self._open[space]
        row = rows.pop(0)
        if not rows:
            del self._open[space]
            self._spaces ^= 1 << space
        return row

    def _new_row(self) -> int:
        if not self._free:
            fullest = (self._spaces & -self._spaces).bit_length() - 1
            self._close(self._pop(fullest), fullest)
        return self._free.pop()

    def _close(self, row: int, space: int) -> None:
        length = self._spec.seq_len - space
        self._closed.append(
            _ClosedRow(self._buffer[row].copy(), length, self._starts_of[row], self._first_of[row])
        )
        self._buffer[row] = pad_id(self._spec)
        self._starts_of[row] = []
        self._free.append(row)

    def _groups(self, *, last: bool = False) -> Iterator[RowGroup]:
        while len(self._closed) >= self._group_rows or (last and self._closed):
            taken, self._closed = self._closed[: self._group_rows], self._closed[self._group_rows :]
            seq_len = self._spec.seq_len
            starts = [
                (number * seq_len + position, *first)
                for number, row in enumerate(taken)
                for position, first in row.starts
            ]
            yield RowGroup(
                rows=np.stack([row.ids for row in taken]),
                row_tokens=np.array([row.num_tokens for row in taken], np.uint32),
                starts=np.array(starts, START),
                firsts=np.array([(0, *row.first) for row in taken], START),
            )
