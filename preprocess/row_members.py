"""Rows of token ids -> the bytes of their tar members and their idx records, many rows a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.shard_format import (
    BLOCK_BYTES,
    DOC_STARTS_FIELD,
    IDX_ROW,
    PACKED_MEMBER_BYTES,
    ROW_TOKENS_FIELD,
    DatasetSpec,
    npy_header,
    rows_key,
    token_field,
)
from preprocess.ustar import ustar_header

# A document: where it begins, in tokens, and the input that it came from.
START = np.dtype([("position", "<i8"), ("source", "<u4"), ("source_offset", "<u8")])


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of one member."""

    rows: npt.NDArray[Any]  # token ids [num_rows, seq_len], in the spec's dtype, padded
    row_tokens: npt.NDArray[np.uint32]  # uint32[num_rows]: tokens that are no padding
    starts: npt.NDArray[np.void]  # START of the documents that begin here, by position in rows.ravel()
    firsts: npt.NDArray[np.void]  # START[num_rows] of the document of each row's first token


def rows_a_member(spec: DatasetSpec) -> int:
    """Rows of a full member: about PACKED_MEMBER_BYTES of ids, at least one."""
    return max(1, PACKED_MEMBER_BYTES // (spec.seq_len * spec.dtype.itemsize))


def pad_id(spec: DatasetSpec) -> int:
    """What fills rows that are not full."""
    pad = spec.tokenizer.pad_token_id
    return 0 if pad is None else pad


class RowMembers:
    """Lays out members one after the other."""

    def __init__(self, spec: DatasetSpec, shard_id: int) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._num_rows = 0
        self.num_padding = 0

    def member(self, group: RowGroup, tar_bytes: int) -> tuple[bytes, npt.NDArray[np.void]]:
        """A member that begins at byte ``tar_bytes`` of the tar: its bytes, and IDX_ROW[num_rows]."""
        fields: dict[str, npt.NDArray[Any]] = {
            DOC_STARTS_FIELD: group.starts["position"].astype(np.uint32),
            token_field("packed", "npy"): group.rows,
        }
        num_padding = group.rows.size - int(group.row_tokens.sum(dtype=np.int64))
        if num_padding:
            fields[ROW_TOKENS_FIELD] = group.row_tokens
        pieces: list[bytes] = []
        payloads = {}  # byte in the tar where each field's numbers begin
        key = rows_key(self._shard_id, self._num_rows)
        for name, array in sorted(fields.items()):
            header = npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = tar_bytes + sum(map(len, pieces)) + BLOCK_BYTES + len(header)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.tobytes()]
            pieces.append(bytes(-num_bytes % BLOCK_BYTES))
        self._num_rows += len(group.rows)
        self.num_padding += num_padding
        return b"".join(pieces), self._entries(group, payloads)

    def _entries(self, group: RowGroup, payloads: dict[str, int]) -> npt.NDArray[np.void]:
        row_bytes = self._spec.seq_len * self._spec.dtype.itemsize
        numbers = np.arange(len(group.rows))
        begins = np.searchsorted(group.starts["position"], numbers * self._spec.seq_len)
        entries = np.empty(len(group.rows), IDX_ROW)
        entries["offset"] = payloads[token_field("packed", "npy")] + numbers * row_bytes
        entries["num_bytes"] = row_bytes
        entries["num_tokens"] = group.row_tokens
        entries["source"] = group.firsts["source"]
        entries["source_offset"] = group.firsts["source_offset"]
        entries["starts_offset"] = payloads[DOC_STARTS_FIELD] + 4 * begins
        entries["num_starts"] = np.diff(begins, append=len(group.starts))
        return entries
