"""Token ids of consecutive documents, as flat arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from preprocess.read.formats import Numbers

Ids = npt.NDArray[np.uint32]


class TokenBatch(Struct, frozen=True, kw_only=True):
    """Ids of consecutive documents: document i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids  # uint32[tokens]
    offsets: Numbers  # int64[documents + 1]

    @staticmethod
    def of(ids: Sequence[Ids]) -> TokenBatch:
        """Build a batch from the ids of each document."""
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(item) for item in ids], out=offsets[1:])
        return TokenBatch(ids=np.concatenate(ids) if ids else np.empty(0, np.uint32), offsets=offsets)

    @staticmethod
    def of_buffers(ids: Ids | bytes, offsets: Numbers | bytes) -> TokenBatch:
        """Build a batch from its arrays, which are bytes if another process made them."""
        if isinstance(ids, bytes):
            ids = np.frombuffer(bytearray(ids), np.uint32)
        if isinstance(offsets, bytes):
            offsets = np.frombuffer(bytearray(offsets), np.int64)
        return TokenBatch(ids=ids, offsets=offsets)

    @staticmethod
    def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
        """Join consecutive batches, at least one."""
        if len(batches) == 1:
            return batches[0]
        return TokenBatch.of([ids for batch in batches for ids in batch.documents()])

    def documents(self) -> list[Ids]:
        """Return the ids of each document."""
        return [self.ids[begin:end] for begin, end in itertools.pairwise(self.offsets.tolist())]

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> TokenBatch:
        """Return a batch of the wanted documents. ``is_wanted``: bool[documents]."""
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths[is_wanted])])
        return TokenBatch(ids=self.ids[np.repeat(is_wanted, lengths)], offsets=offsets)


NO_LOSS = np.uint32(1 << 31)  # this bit is set in ids of a conversation that the assistant did not write
