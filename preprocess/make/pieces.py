"""Pieces of a shard's tar, and the batches that they come from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.counts import Counting
from preprocess.make.packing import Starts
from preprocess.make.token_ids import TokenBatch
from shardprep.format.documents import DIGEST
from shardprep.format.idx import IdxRecords

Digests = npt.NDArray[np.void]  # DIGEST[documents]
NO_DIGESTS = np.empty(0, DIGEST)


class TarPiece(NamedTuple):
    """Consecutive bytes of the tar, with the idx records and digests of the samples that end in them.

    The samples are all for training, or all for validation.
    """

    data: bytes | npt.NDArray[np.uint8]
    records: IdxRecords
    digests: Digests = NO_DIGESTS  # of the documents that begin in the samples, if digests are kept
    is_validation: bool = False


class EncodedBatch(NamedTuple):
    """Encoded documents, with all that the writer needs of them. It reads no text."""

    counts: Counting  # of this batch
    id_lines: bytes  # for the file of ids, if ids are kept
    piece: TarPiece | None  # members, with offsets from 0; None for rows, which are packed in order
    tokens: TokenBatch | None = None  # to pack into rows
    starts: Starts | None = None  # START[documents], with positions of 0, to pack into rows
