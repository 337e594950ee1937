"""Documents' ids -> rows of seq_len tokens, joined and cut wherever a row ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from preprocess.row_members import START, RowGroup, pad_id, rows_a_member
from preprocess.shard_format import DatasetSpec
from preprocess.token_batches import TokenBatch

Ids = npt.NDArray[np.uint32]


class Packer(Protocol):
    """Takes documents in order and yields row groups as they fill; the groups do not depend on batches."""

    num_cut: int  # documents that do not lie whole in one row

    def append(self, tokens: TokenBatch, starts: npt.NDArray[np.void]) -> Iterator[RowGroup]:
        """Take documents, with START[documents] that name their sources."""

    def append_piece(self, ids: Ids, start: npt.NDArray[np.void] | None) -> Iterator[RowGroup]:
        """Take a piece of a document too long to be held; START[1] with its first piece."""

    def end_document(self) -> Iterator[RowGroup]:
        """The document given in pieces is at its end."""

    def finish(self) -> Iterator[RowGroup]:
        """Yield what is left."""


class ConcatRows:
    """Joins all documents and cuts at every seq_len-th token (``--pack concat``).

    No padding but in the shard's last row; documents are cut at row ends.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._group_tokens = rows_a_member(spec) * spec.seq_len
        self._ids: list[Ids] = []  # not yet in a group
        self._starts: list[npt.NDArray[np.void]] = []  # START of the documents in them
        self._num_held = 0
        self._num_before = 0  # tokens in groups so far
        self._open = np.zeros(1, START)  # the document that the next group begins in
        self._piece_tokens = 0
        self.num_cut = 0

    def append(self, tokens: TokenBatch, starts: npt.NDArray[np.void]) -> Iterator[RowGroup]:
        """See Packer."""
        filled = tokens.lengths > 0
        first = tokens.offsets[:-1][filled] + self._num_before + self._num_held
        last = first + tokens.lengths[filled] - 1
        self.num_cut += int((first // self._spec.seq_len != last // self._spec.seq_len).sum())
        starts = starts[filled]
        starts["position"] = tokens.offsets[:-1][filled] + self._num_held
        self._starts.append(starts)
        self._ids.append(tokens.ids)
        self._num_held += len(tokens.ids)
        return self._full_groups()

    def append_piece(self, ids: Ids, start: npt.NDArray[np.void] | None) -> Iterator[RowGroup]:
        """See Packer."""
        if start is not None:
            start["position"] = self._num_held
            self._starts.append(start)
        self._ids.append(ids)
        self._num_held += len(ids)
        self._piece_tokens += len(ids)
        return self._full_groups()

    def end_document(self) -> Iterator[RowGroup]:
        """See Packer."""
        end = self._num_before + self._num_held
        first = end - self._piece_tokens
        self.num_cut += first // self._spec.seq_len != (end - 1) // self._spec.seq_len
        self._piece_tokens = 0
        return iter(())

    def finish(self) -> Iterator[RowGroup]:
        """See Packer."""
        if self._num_held:
            yield self._take(self._num_held)

    def _full_groups(self) -> Iterator[RowGroup]:
        while self._num_held >= self._group_tokens:
            yield self._take(self._group_tokens)

    def _take(self, num_tokens: int) -> RowGroup:
        """A group of the first ``num_tokens`` tokens held."""
        ids = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        starts = self._starts[0] if len(self._starts) == 1 else np.concatenate(self._starts)
        self._ids, ids = [ids[num_tokens:]], ids[:num_tokens]
        num_here = int(np.searchsorted(starts["position"], num_tokens))
        later = starts[num_here:].copy()
        later["position"] -= num_tokens
        self._starts, starts = [later], starts[:num_here]
        self._num_held -= num_tokens
        self._num_before += num_tokens
        return self._group(ids, starts)

    def _group(self, ids: Ids, starts: npt.NDArray[np.void]) -> RowGroup:
        seq_len = self._spec.seq_len
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = np.pad(ids.astype(self._spec.dtype), (0, num_padding), constant_values=pad_id(self._spec))
        open_before = np.concatenate((self._open, starts))
        self._open = open_before[-1:]
        row_begins = np.arange(num_rows) * seq_len
        return RowGroup(
            rows=rows.reshape(num_rows, seq_len),
            row_tokens=row_tokens,
            starts=starts,
            firsts=open_before[np.searchsorted(starts["position"], row_begins, side="right")],
        )


def append_token(tokens: TokenBatch, token_id: int) -> TokenBatch:
    """The same documents, each with one more token at its end."""
    num_documents = len(tokens.lengths)
    return TokenBatch(
        ids=np.insert(tokens.ids, tokens.offsets[1:], token_id),
        offsets=tokens.offsets + np.arange(num_documents + 1),
    )
