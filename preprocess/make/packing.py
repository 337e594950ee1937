"""Pack documents into rows of seq_len tokens, in the order of the input.

A group of rows becomes one member. The groups depend on the documents alone, not on how they are batched.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from preprocess.make.token_ids import NO_LOSS, Ids, TokenBatch
from preprocess.read.documents import DocumentBatch
from shardprep.format import names
from shardprep.format.documents import DIGEST
from shardprep.format.spec import DatasetSpec

# Where a document begins: position in tokens, input number, byte in the input; with its digest, or zeros.
START = np.dtype([("position", "<i8"), ("input_number", "<u4"), ("input_offset", "<u8"), ("digest", DIGEST)])
Starts = npt.NDArray[np.void]  # START[documents]


def starts_of(documents: DocumentBatch, digests: npt.NDArray[np.void]) -> Starts:
    """Return where documents are in the input, before they have positions. ``digests`` may be empty."""
    starts = np.zeros(len(documents.lines), START)
    starts["input_number"] = documents.input_number
    starts["input_offset"] = documents.offsets
    if len(digests):
        starts["digest"] = digests
    return starts


class RowGroup(Struct, frozen=True, kw_only=True):
    """The rows of one member."""

    rows: npt.NDArray[Any]  # token ids [num_rows, seq_len], of row_dtype, padded
    row_tokens: npt.NDArray[np.uint32]  # uint32[num_rows]: tokens of each row without padding
    starts: Starts  # of the documents that begin in the group, by position in rows.ravel()
    firsts: Starts  # START[num_rows]: the document of each row's first token


class Packer:
    """Packs documents into rows, in order."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.seq_len = spec.seq_len
        self.num_split = 0  # documents that are not whole in one row
        self.group_rows = max(1, names.PACKED_MEMBER_BYTES // (spec.seq_len * spec.dtype.itemsize))
        self.dtype = spec.dtype
        self.pad_id = spec.tokenizer.pad_token_id or 0
        if spec.record == "chat":  # ids carry NO_LOSS while they are packed
            self.dtype = np.dtype(np.uint32)
            self.pad_id |= int(NO_LOSS)

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        """Add documents, whose origins are in ``starts``, and yield the groups that they fill."""
        raise NotImplementedError

    def finish(self) -> Iterator[RowGroup]:
        """Yield the groups of the documents left at the end."""
        raise NotImplementedError


class ConcatRows(Packer):
    """Joins all documents and cuts them into rows of seq_len tokens (``--pack concat``).

    Documents are cut at row ends. Only the shard's last row has padding.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self._ids: Ids = np.empty(0, np.uint32)  # not yet in a group
        self._starts: Starts = np.empty(0, START)  # of the documents that begin in them
        self._open = np.zeros(1, START)  # of the document in which the next group begins

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        has_tokens = np.diff(tokens.offsets) > 0
        # Positions in the tokens that are not yet in a group, the first of which begins a row.
        first = tokens.offsets[:-1][has_tokens] + len(self._ids)
        last = tokens.offsets[1:][has_tokens] + len(self._ids) - 1
        self.num_split += int((first // self.seq_len != last // self.seq_len).sum())
        starts = starts[has_tokens]
        starts["position"] = first
        self._ids = np.concatenate([self._ids, tokens.ids])
        self._starts = np.concatenate([self._starts, starts])
        group_tokens = self.group_rows * self.seq_len
        while len(self._ids) >= group_tokens:
            yield self._take(group_tokens)

    def finish(self) -> Iterator[RowGroup]:
        if len(self._ids):
            yield self._take(len(self._ids))

    def _take(self, num_tokens: int) -> RowGroup:
        """Return a group of the first ``num_tokens`` of these tokens."""
        seq_len = self.seq_len
        ids = self._ids[:num_tokens]
        self._ids = self._ids[num_tokens:]
        num_here = np.searchsorted(self._starts["position"], num_tokens)
        starts = self._starts[:num_here]
        self._starts = self._starts[num_here:].copy()
        self._starts["position"] -= num_tokens
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = np.pad(ids.astype(self.dtype, copy=False), (0, num_padding), constant_values=self.pad_id)
        open_before = np.concatenate((self._open, starts))
        self._open = open_before[-1:]
        firsts = open_before[np.searchsorted(starts["position"], np.arange(num_rows) * seq_len, side="right")]
        rows = rows.reshape(num_rows, seq_len)
        return RowGroup(rows=rows, row_tokens=row_tokens, starts=starts, firsts=firsts)


Provenance = tuple[int, int, bytes]  # input number, byte in it, and digest


class _Row(Struct, kw_only=True):
    """A row that is being filled."""

    ids: Ids
    first: Provenance  # of the first token's document
    num_tokens: int = 0
    starts: list[tuple[int, Provenance]] = field(default_factory=list)  # where documents begin


class BestFitRows(Packer):
    """Keeps documents whole if they fit into a row (``--pack best_fit``).

    Each document goes into the open row in which it leaves the least space, as in Ding et al. 2024, "Fewer
    Truncations Improve Language Modeling". To bound memory, the number of open rows is limited: the fullest
    one is closed when another must be opened. A document longer than a row fills rows of its own, and its
    rest opens another one. The price is padding, and about 1.5 us of Python per document.
    """

    _OPEN_BYTES = 8 << 20

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self._max_open = min(1024, max(16, self._OPEN_BYTES // (spec.seq_len * spec.dtype.itemsize)))
        self._open: list[tuple[int, int, _Row]] = []  # space, turn, row; ascending
        self._turn = 0  # among rows of equal space the oldest comes first
        self._closed: list[_Row] = []

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        seq_len = self.seq_len
        bounds = itertools.pairwise(tokens.offsets.tolist())
        columns = (starts[name].tolist() for name in ("input_number", "input_offset", "digest"))
        provenances = zip(*columns, strict=True)
        ids = tokens.ids.astype(self.dtype)
        for (begin, end), provenance in zip(bounds, provenances, strict=True):
            self.num_split += end - begin > seq_len
            for first in range(begin, end, seq_len):
                part = ids[first : min(first + seq_len, end)]
                # The next part of a long document always opens a row.
                place = bisect.bisect_left(self._open, (len(part),)) if first == begin else len(self._open)
                if place < len(self._open):
                    _, _, row = self._open.pop(place)
                else:
                    if len(self._open) == self._max_open:
                        self._closed.append(self._open.pop(0)[2])  # the fullest
                    row = _Row(ids=np.full(seq_len, self.pad_id, self.dtype), first=provenance)
                if first == begin:
                    row.starts.append((row.num_tokens, provenance))
                row.ids[row.num_tokens : row.num_tokens + len(part)] = part
                row.num_tokens += len(part)
                if row.num_tokens == seq_len:
                    self._closed.append(row)
                else:
                    self._turn += 1
                    bisect.insort(self._open, (seq_len - row.num_tokens, self._turn, row))
            if len(self._closed) >= self.group_rows:
                yield from self._groups(least=self.group_rows)

    def finish(self) -> Iterator[RowGroup]:
        self._closed += [row for _, _, row in self._open]
        yield from self._groups(least=1)

    def _groups(self, least: int) -> Iterator[RowGroup]:
        while len(self._closed) >= least:
            taken = self._closed[: self.group_rows]
            self._closed = self._closed[self.group_rows :]
            starts = [
                (number * self.seq_len + position, *document)
                for number, row in enumerate(taken)
                for position, document in row.starts
            ]
            yield RowGroup(
                rows=np.stack([row.ids for row in taken]),
                row_tokens=np.array([row.num_tokens for row in taken], np.uint32),
                starts=np.array(starts, START),
                firsts=np.array([(0, *row.first) for row in taken], START),
            )


# By --pack, or by the name of a record that has a packer of its own.
_PACKERS: dict[str, Callable[[DatasetSpec], Packer]] = {"concat": ConcatRows, "best_fit": BestFitRows}


def packer_of(spec: DatasetSpec, pack: str) -> Packer:
    """Return a new packer for the rows of a data set."""
    return _PACKERS.get(spec.record, _PACKERS[pack])(spec)
