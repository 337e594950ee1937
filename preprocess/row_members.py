"""Packed rows -> bytes of tar members and idx records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.engines import NO_LOSS, TokenBatch
from preprocess.formats.format import DocumentBatch
from preprocess.long_documents import LongDocument
from preprocess.members import Piece, Prepared, ustar_header
from preprocess.packing import START, Packer, RowGroup
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import idx_dtype
from shardprep.format.names import (
    BLOCK_BYTES,
    DOC_STARTS_FIELD,
    LOSS_MASK_FIELD,
    ROW_TOKENS_FIELD,
    npy_header,
    rows_key,
    token_field,
)


class RowMembers:
    """Packed rows: many rows per member, with the places where documents begin in a member beside it."""

    def __init__(self, spec: DatasetSpec, shard_id: int, packer: Packer) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._packer = packer
        self._num_rows = 0
        self._tar_bytes = 0
        self.num_padding = 0

    @property
    def num_split(self) -> int:
        """Documents so far that do not lie whole in one row."""
        return self._packer.num_split

    def prepare(self, documents: DocumentBatch, tokens: TokenBatch) -> Prepared:
        """See Members."""
        starts = np.zeros(len(documents.texts), START)
        starts["source"] = documents.input_number
        starts["source_offset"] = documents.input_offsets
        return lambda: map(self._member, self._packer.append(tokens, starts))

    def long_document(
        self,
        document: LongDocument,
        num_text_bytes: int,  # noqa: ARG002 - rows hold no text
        ids: Iterable[npt.NDArray[np.uint32]],
    ) -> Iterator[Piece]:
        """See Members."""
        place = document.place
        start: npt.NDArray[np.void] | None = np.array([(0, place.input_number, place.start)], START)
        for piece in ids:
            yield from map(self._member, self._packer.append_piece(piece, start))
            start = None
        yield from map(self._member, self._packer.end_document())

    def rest(self) -> Iterator[Piece]:
        """See Members."""
        return map(self._member, self._packer.finish())

    def _member(self, group: RowGroup) -> Piece:
        """One member: its bytes, and the idx records of its rows."""
        fields: dict[str, npt.NDArray[Any]] = {
            DOC_STARTS_FIELD: group.starts["position"].astype(np.uint32),
            token_field("packed", "npy"): group.rows,
        }
        if self._spec.record == "chat":
            fields[LOSS_MASK_FIELD] = (group.rows < NO_LOSS).astype(np.uint8)
            fields[token_field("chat", "npy")] = (group.rows & ~NO_LOSS).astype(self._spec.dtype)
        num_padding = group.rows.size - int(group.row_tokens.sum(dtype=np.int64))
        if num_padding:
            fields[ROW_TOKENS_FIELD] = group.row_tokens
        pieces: list[bytes] = []
        payloads = {}  # byte in the tar where each field's numbers begin
        key = rows_key(self._shard_id, self._num_rows)
        for name, array in sorted(fields.items()):
            header = npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = self._tar_bytes + sum(map(len, pieces)) + BLOCK_BYTES + len(header)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.tobytes()]
            pieces.append(bytes(-num_bytes % BLOCK_BYTES))
        data = b"".join(pieces)
        self._num_rows += len(group.rows)
        self._tar_bytes += len(data)
        self.num_padding += num_padding
        return data, self._records(group, payloads)

    def _records(self, group: RowGroup, payloads: dict[str, int]) -> npt.NDArray[np.void]:
        row_bytes = self._spec.seq_len * self._spec.dtype.itemsize
        numbers = np.arange(len(group.rows))
        begins = np.searchsorted(group.starts["position"], numbers * self._spec.seq_len)
        records = np.empty(len(group.rows), idx_dtype(self._spec.kind))
        records["offset"] = payloads[token_field("packed", "npy")] + numbers * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = group.row_tokens
        records["source"] = group.firsts["source"]
        records["source_offset"] = group.firsts["source_offset"]
        records["starts_offset"] = payloads[DOC_STARTS_FIELD] + 4 * begins
        records["num_starts"] = np.diff(begins, append=len(group.starts))
        if LOSS_MASK_FIELD in payloads:
            records["mask_offset"] = payloads[LOSS_MASK_FIELD] + numbers * self._spec.seq_len
        return records
