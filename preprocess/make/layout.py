"""Lay out a batch of encoded documents: count them, and lay out what depends on this batch alone."""

from __future__ import annotations

import numpy as np
import orjson

from preprocess.make.counts import Counting
from preprocess.make.members import DocumentLayout
from preprocess.make.packing import starts_of
from preprocess.make.pieces import NO_DIGESTS, Digests, EncodedBatch
from preprocess.make.token_ids import NO_LOSS, TokenBatch
from preprocess.read.documents import DocumentBatch
from shardprep.format.plan_options import PlanOptions
from shardprep.format.spec import DatasetSpec


class BatchLayout:
    """Lays out batches of one shard. It keeps nothing of a batch, so threads and processes may share it."""

    def __init__(self, spec: DatasetSpec, options: PlanOptions, shard_id: int) -> None:
        self._spec = spec
        self._options = options
        self._shard_id = shard_id
        self._documents: DocumentLayout | None = None  # None for rows, which are packed in order
        if not spec.has_rows:
            self._documents = DocumentLayout(spec, shard_id, options)

    def lay_out(
        self,
        documents: DocumentBatch,
        tokens: TokenBatch,
        digests: Digests | None = None,
        before_blanking: DocumentBatch | None = None,
    ) -> EncodedBatch:
        """Count the documents of a batch, and lay out its members if they depend on it alone.

        ``digests`` default to those of the documents, if digests are kept. ``before_blanking``, by default
        the documents, has the texts to count and the ids to keep. Raises BadInput, OtherTokenizer.
        """
        if digests is None:
            digests = documents.digests() if self._options.digests else NO_DIGESTS
        if before_blanking is None:
            before_blanking = documents
        counts = Counting(self._shard_id)
        num_learnt = None
        if self._spec.record == "chat":
            # int64[tokens + 1]: tokens with labels before each token
            before = np.concatenate([[0], np.cumsum(tokens.ids < NO_LOSS)])
            num_learnt = np.diff(before[tokens.offsets])
        counts.add(before_blanking, np.diff(tokens.offsets), num_learnt)
        id_lines = _id_lines(before_blanking) if self._options.id_field else b""
        if self._documents is None:
            return EncodedBatch(counts, id_lines, None, tokens, starts_of(documents, digests))
        return EncodedBatch(counts, id_lines, self._documents.piece_of(documents, tokens, digests))


def _id_lines(documents: DocumentBatch) -> bytes:
    """Return a line of JSON per document: input number, place in it, id. Lines of text have no id."""
    ids = documents.columns.get("id") or [""] * len(documents.lines)
    lines = [
        orjson.dumps([documents.input_number, *place], option=orjson.OPT_APPEND_NEWLINE)
        for place in zip(documents.offsets.tolist(), ids, strict=True)
    ]
    return b"".join(lines)
