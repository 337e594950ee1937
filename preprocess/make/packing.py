"""Ids of documents -> packed rows of seq_len tokens, in groups that become one tar member each.

ConcatRows joins all documents and splits them wherever a row ends; BestFitRows keeps each document whole in
one row where it fits. Both hold at most one group and the open rows, about 8 MiB, beside what they are given.
The groups depend on the documents alone, never on how these were batched.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import NO_LOSS, Ids, TokenBatch
from shardprep.format.documents import DIGEST
from shardprep.format.names import DIGEST_BYTES, PACKED_MEMBER_BYTES, DatasetSpec

# A document: where it begins, in tokens, the input that it came from, and its digest, zeros without one.
START = np.dtype([("position", "<i8"), ("source", "<u4"), ("source_offset", "<u8"), ("digest", DIGEST)])
Starts = npt.NDArray[np.void]  # START[documents]


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of one member."""

    rows: npt.NDArray[Any]  # token ids [num_rows, seq_len], of row_dtype, padded
    row_tokens: npt.NDArray[np.uint32]  # uint32[num_rows]: tokens that are no padding
    starts: Starts  # START of the documents that begin here, by position in rows.ravel()
    firsts: Starts  # START[num_rows] of the document of each row's first token


def rows_per_member(spec: DatasetSpec) -> int:
    """Rows of a full member: about PACKED_MEMBER_BYTES of ids, at least one."""
    return max(1, PACKED_MEMBER_BYTES // (spec.seq_len * spec.dtype.itemsize))


def pad_id(spec: DatasetSpec) -> int:
    """Return what fills rows that are not full."""
    pad = spec.tokenizer.pad_token_id or 0
    return pad | int(NO_LOSS) if spec.record == "chat" else pad


def row_dtype(spec: DatasetSpec) -> np.dtype[Any]:
    """Of ids while they are packed: those of conversations carry NO_LOSS."""
    return np.dtype(np.uint32) if spec.record == "chat" else spec.dtype


class Packer(Protocol):
    """Takes documents in order and yields row groups as they fill; the groups do not depend on batches."""

    num_split: int  # documents that do not lie whole in one row

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        """Take documents, with START[documents] that names their provenance."""

    def finish(self) -> Iterator[RowGroup]:
        """Yield what is left."""


class ConcatRows:
    """Joins all documents and cuts at every seq_len-th token (``--pack concat``).

    No padding but in the shard's last row; documents are cut at row ends.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._group_tokens = rows_per_member(spec) * spec.seq_len
        self._ids: list[Ids] = []  # not yet in a group
        self._starts: list[Starts] = []  # START of the documents in them
        self._num_held = 0
        self._open = np.zeros(1, START)  # the document that the next group begins in
        self.num_split = 0

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        lengths, seq_len = np.diff(tokens.offsets), self._spec.seq_len
        first = tokens.offsets[:-1] + self._num_held  # the groups before are whole rows
        has_tokens = lengths > 0
        if not has_tokens.all():
            starts, first, lengths = starts[has_tokens], first[has_tokens], lengths[has_tokens]
        last = first + lengths - 1
        self.num_split += int((first // seq_len != last // seq_len).sum())
        starts["position"] = first
        self._starts.append(starts)
        self._ids.append(tokens.ids)
        self._num_held += len(tokens.ids)
        while self._num_held >= self._group_tokens:
            yield self._take(self._group_tokens)

    def finish(self) -> Iterator[RowGroup]:
        if self._num_held:
            yield self._take(self._num_held)

    def _take(self, num_tokens: int) -> RowGroup:
        """Return a group of the first ``num_tokens`` tokens held."""
        ids = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        starts = self._starts[0] if len(self._starts) == 1 else np.concatenate(self._starts)
        self._ids, ids = [ids[num_tokens:]], ids[:num_tokens]
        num_here = int(np.searchsorted(starts["position"], num_tokens))
        later = starts[num_here:].copy()
        later["position"] -= num_tokens
        self._starts, starts = [later], starts[:num_here]
        self._num_held -= num_tokens
        seq_len = self._spec.seq_len
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = ids.astype(row_dtype(self._spec), copy=False)
        if num_padding:
            rows = np.pad(rows, (0, num_padding), constant_values=pad_id(self._spec))
        open_before = np.concatenate((self._open, starts))
        self._open = open_before[-1:]
        row_begins = np.arange(num_rows) * seq_len
        return RowGroup(
            rows=rows.reshape(num_rows, seq_len),
            row_tokens=row_tokens,
            starts=starts,
            firsts=open_before[np.searchsorted(starts["position"], row_begins, side="right")],
        )


Provenance = tuple[int, int, bytes]  # input number, byte in it, and digest


class _ClosedRow(NamedTuple):
    ids: Ids  # padded
    num_tokens: int
    starts: list[tuple[int, Provenance]]  # where documents begin
    first: Provenance  # of the first token


class BestFitRows:
    """Keeps documents whole where they fit into a row (``--pack best_fit``).

    Each document goes into the open row in which it leaves the least space, as in Ding et al. 2024,
    "Fewer Truncations Improve Language Modeling", but over a window of open rows rather than the
    whole shard, so that memory is bounded; the fullest row is closed when another must be opened. A
    document longer than a row fills rows of its own, and its rest opens one. The price: padding, and
    about 1.5 us of Python per document.
    """

    _OPEN_BYTES = 8 << 20

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        num_open = min(1024, max(16, self._OPEN_BYTES // (spec.seq_len * spec.dtype.itemsize)))
        self._buffer = np.full((num_open, spec.seq_len), pad_id(spec), row_dtype(spec))
        self._free = list(range(num_open - 1, -1, -1))  # rows of the buffer that hold nothing
        self._open: list[tuple[int, int, int]] = []  # space, turn, row; ascending
        self._turn = 0  # of equal spaces the one that is there longest comes first
        self._starts_of: list[list[tuple[int, Provenance]]] = [[] for _ in range(num_open)]
        self._first_of: list[Provenance] = [(0, 0, bytes(DIGEST_BYTES))] * num_open
        self._closed: list[_ClosedRow] = []
        self._group_rows = rows_per_member(spec)
        self.num_split = 0

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        bounds, seq_len = tokens.offsets.tolist(), self._spec.seq_len
        provenances = zip(
            *(starts[name].tolist() for name in ("source", "source_offset", "digest")), strict=True
        )
        ids = tokens.ids.astype(self._buffer.dtype)
        for number, provenance in enumerate(provenances):
            begin, end = bounds[number], bounds[number + 1]
            self.num_split += end - begin > seq_len
            for first in range(begin, end, seq_len):
                self._put(ids[first : min(first + seq_len, end)], provenance, is_start=first == begin)
            if len(self._closed) >= self._group_rows:
                yield from self._groups()

    def finish(self) -> Iterator[RowGroup]:
        for space, _, row in self._open:
            self._close(row, space)
        self._open = []
        yield from self._groups(last=True)

    def _put(self, ids: Ids, first: Provenance, *, is_start: bool) -> None:
        """Place at most a row's worth of ids. What goes on from another row always opens one."""
        length = len(ids)
        place = bisect.bisect_left(self._open, (length,)) if is_start else len(self._open)
        if place < len(self._open):
            space, _, row = self._open.pop(place)
        else:
            if not self._free:
                space, _, row = self._open.pop(0)  # the fullest
                self._close(row, space)
            space, row = self._spec.seq_len, self._free.pop()
            self._first_of[row] = first
        begin = self._spec.seq_len - space
        self._buffer[row, begin : begin + length] = ids
        if is_start:
            self._starts_of[row].append((begin, first))
        if space == length:
            self._close(row, 0)
        else:
            self._turn += 1
            bisect.insort(self._open, (space - length, self._turn, row))

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


# By --pack; a record whose rows are formed in a way of its own, by its name.
_PACKERS: dict[str, Callable[[DatasetSpec], Packer]] = {"concat": ConcatRows, "best_fit": BestFitRows}


def packer_of(spec: DatasetSpec, pack: str) -> Packer:
    """Return what forms the rows of a data set."""
    return _PACKERS.get(spec.record, _PACKERS[pack])(spec)
