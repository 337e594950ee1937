"""Documents and their ids -> the bytes of their tar members, a batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from preprocess.documents import DocumentBatch
from preprocess.json_ids import json_ids
from preprocess.shard_format import (
    BLOCK_BYTES,
    IDX_DOCUMENT,
    MAX_MEMBER_BYTES,
    TEXT_FIELD,
    BadInput,
    DatasetSpec,
    npy_header,
    token_field,
)
from preprocess.token_batches import TokenBatch
from preprocess.ustar import document_headers, padded


class DocumentMembers:
    """Lays out ``text.txt`` and ``token_ids`` members: a sample a document."""

    def __init__(self, spec: DatasetSpec, shard_id: int, *, keep_text: bool) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._keep_text = keep_text
        self._json = json_ids(spec.tokenizer.vocab_size) if spec.token_format == "json" else None
        self._npy_header_bytes = 0 if self._json else len(npy_header(spec.dtype, (1,)))

    def append(
        self, documents: DocumentBatch, tokens: TokenBatch, tar_bytes: int
    ) -> tuple[memoryview, npt.NDArray[np.void]]:
        """Members of a batch that begins at byte ``tar_bytes`` of the tar, and their idx records.

        Returns the tar's bytes and IDX_DOCUMENT[documents]. Raises BadInput for a document whose
        member would be larger than the idx can say.
        """
        num_tokens = tokens.lengths
        if self._json:
            id_bytes = self._json.lengths(tokens)
        else:
            id_bytes = num_tokens * self._spec.dtype.itemsize + self._npy_header_bytes
        texts = [text.encode() for text in documents.texts] if self._keep_text else []
        text_bytes = np.fromiter(map(len, texts), np.int64, len(texts))
        largest = max(id_bytes.max(initial=0), text_bytes.max(initial=0))
        if largest > MAX_MEMBER_BYTES:
            raise BadInput(
                f"a document of input {documents.source} makes a member of {largest} bytes, at most "
                f"{MAX_MEMBER_BYTES} are possible; use --record packed, or split the document"
            )
        sample_bytes = padded(id_bytes) + BLOCK_BYTES
        if self._keep_text:
            sample_bytes += padded(text_bytes) + BLOCK_BYTES
        ends = np.cumsum(sample_bytes)
        buffer = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
        id_starts = ends - padded(id_bytes) - BLOCK_BYTES
        if self._keep_text:
            text_starts = self._place_headers(buffer, ends - sample_bytes, documents, TEXT_FIELD, text_bytes)
            _place(buffer, text_starts, texts)
        field = token_field("documents", self._spec.token_format)
        id_starts = self._place_headers(buffer, id_starts, documents, field, id_bytes)
        self._place_ids(buffer, id_starts, id_bytes, tokens)
        entries = np.empty(len(num_tokens), IDX_DOCUMENT)
        entries["offset"] = tar_bytes + id_starts + self._npy_header_bytes
        entries["num_bytes"] = id_bytes - self._npy_header_bytes
        entries["num_tokens"] = num_tokens
        entries["source"] = documents.source
        entries["source_offset"] = documents.source_offsets
        return buffer.data, entries

    def _place_headers(
        self,
        buffer: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        documents: DocumentBatch,
        field: str,
        num_bytes: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Write one header a document at ``starts``; returns where the payloads begin."""
        headers = document_headers(self._shard_id, documents.lines, field, num_bytes)
        buffer.reshape(-1, BLOCK_BYTES)[starts // BLOCK_BYTES] = headers
        return starts + BLOCK_BYTES

    def _place_ids(
        self,
        buffer: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        num_bytes: npt.NDArray[np.int64],
        tokens: TokenBatch,
    ) -> None:
        if self._json:
            written = memoryview(self._json.separated(tokens))
            ends = np.cumsum(np.where(tokens.lengths > 0, num_bytes, 0))
            begins = ends - np.where(tokens.lengths > 0, num_bytes, 0)
            pieces = [
                written[begin + 1 : end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
            _place(buffer, starts, pieces)
            buffer[starts] = ord("[")
            buffer[starts + num_bytes - 1] = ord("]")
            return
        dtype = self._spec.dtype
        ids = tokens.ids.astype(dtype).view(np.uint8).data
        size = dtype.itemsize
        bounds = (tokens.offsets * size).tolist()
        pieces = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
        headers = [npy_header(dtype, (length,)) for length in tokens.lengths.tolist()]
        _place(buffer, starts, headers)
        _place(buffer, starts + self._npy_header_bytes, pieces)


def _place(
    buffer: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], pieces: Sequence[bytes | memoryview]
) -> None:
    """Copy each piece to its place: a loop of slices, 0.15 us each, beats a scatter at 4 ns a byte."""
    view = buffer.data
    for start, piece in zip(starts.tolist(), pieces, strict=True):
        view[start : start + len(piece)] = piece
