"""One shard's documents as a stream of ids with their lengths, EOS put behind each where it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from preprocess.shard_samples import ShardSamples


@dataclass(frozen=True, kw_only=True)
class ShardTokens:
    """What an exporter is given of a shard."""

    samples: ShardSamples
    rows_hold_wholes: bool  # --pack best_fit
    put_eos: int | None  # behind each document; None where the shards have it, or it is not wanted

    @property
    def shard_id(self) -> int:
        return self.samples.shard_id

    def lengths(self, *, of_rows: bool) -> npt.NDArray[np.int64]:
        """Tokens of each document, or of each stored row: int64[n]; what ``pieces`` gives, cut."""
        if of_rows and self.samples.spec.seq_len:
            return self.samples.records["num_tokens"].astype(np.int64)
        lengths = self.samples.document_lengths(rows_hold_wholes=self.rows_hold_wholes)
        return lengths + (self.put_eos is not None)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """All ids in order, some at a time: uint32[tokens] arrays."""
        if self.put_eos is None:
            yield from self.samples.pieces()
            return
        ends = np.cumsum(self.samples.document_lengths(rows_hold_wholes=self.rows_hold_wholes))
        done = told = 0  # ids, documents
        for piece in self.samples.pieces():
            until = int(np.searchsorted(ends, done + len(piece), side="right"))
            yield np.insert(piece, ends[told:until] - done, self.put_eos)
            done, told = done + len(piece), until

    def sequences(self, lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint32]]:
        """The same ids, cut into sequences of some lengths: uint32[length] arrays."""
        held = np.empty(0, np.uint32)
        pieces = self.pieces()
        for length in lengths.tolist():
            parts, have = [held], len(held)
            while have < length:
                parts.append(next(pieces))
                have += len(parts[-1])
            joined = np.concatenate(parts) if len(parts) > 1 else held
            yield joined[:length]
            held = joined[length:]
