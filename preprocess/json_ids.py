"""Flat token ids -> the text of one JSON list a document, without an object a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.token_batches import TokenBatch


class JsonIds:
    """Writes ids as ``json.dumps`` does, ``[128000, 9906]``: the bytes of webdataset's TarWriter.

    A table holds ``, 9906`` of every id, padded with zero bytes to a fixed width: a batch is one
    look-up and one pass that drops the zeros. About 11 ns a token, against 16 of orjson on short
    arrays (one core), and orjson leaves out the spaces.
    """

    def __init__(self, vocab_size: int) -> None:
        width = 8 if vocab_size <= 10**6 else 16
        texts = np.array([f", {number}" for number in range(vocab_size)], f"S{width}")
        self._table: npt.NDArray[np.void] = texts.view(f"V{width}")
        self._widths: npt.NDArray[Any] = np.char.str_len(texts).astype(np.uint8)

    def lengths(self, batch: TokenBatch) -> npt.NDArray[np.int64]:
        """int64[documents]: bytes of each document's JSON text."""
        ends = np.zeros(len(batch.ids) + 1, np.int64)
        np.cumsum(self._widths[batch.ids], out=ends[1:])
        # "[" takes the place of the first ", ", and "]" the byte that this saves.
        return np.maximum(np.diff(ends[batch.offsets]), 2)

    def separated(self, batch: TokenBatch) -> bytes:
        """All ids, each with ``, `` before it."""
        return self._table[batch.ids].tobytes().translate(None, b"\0")
