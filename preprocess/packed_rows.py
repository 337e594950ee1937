"""Documents' ids -> rows of seq_len tokens, laid out as tar members of many rows each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from preprocess.documents import DocumentBatch
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
from preprocess.token_batches import TokenBatch
from preprocess.ustar import ustar_header

_START = np.dtype([("position", "<i8"), ("source", "<u4"), ("source_offset", "<u8")])


class PackedRows:
    """Joins documents and cuts them at every seq_len-th token (``--pack concat``).

    Nothing is dropped: the shard's last row is filled with padding and says its length.
    """

    def __init__(self, spec: DatasetSpec, shard_id: int) -> None:
        self._spec = spec
        self._shard_id = shard_id
        pad = spec.tokenizer.pad_token_id
        self._pad_token_id = 0 if pad is None else pad
        row_bytes = spec.seq_len * spec.dtype.itemsize
        self._member_tokens = max(1, PACKED_MEMBER_BYTES // row_bytes) * spec.seq_len
        self._ids: list[npt.NDArray[np.uint32]] = []  # not yet in a member
        self._starts: list[npt.NDArray[np.void]] = []  # _START of the documents in them
        self._num_held = 0
        self._num_rows = 0  # in members so far
        self._open = np.zeros(1, _START)  # the document that the next row begins in
        self.num_padding = 0

    def append(
        self, documents: DocumentBatch, tokens: TokenBatch, tar_bytes: int
    ) -> Iterator[tuple[bytes, npt.NDArray[np.void]]]:
        """Take a batch; yield the members that are now full: (tar bytes, IDX_ROW[rows]) each."""
        starts = np.empty(len(tokens.lengths), _START)
        starts["position"] = tokens.offsets[:-1] + self._num_held
        starts["source"] = documents.source
        starts["source_offset"] = documents.source_offsets
        self._starts.append(starts[tokens.lengths > 0])
        self._ids.append(tokens.ids)
        self._num_held += len(tokens.ids)
        while self._num_held >= self._member_tokens:
            member, entries = self._take(self._member_tokens, tar_bytes)
            tar_bytes += len(member)
            yield member, entries

    def finish(self, tar_bytes: int) -> Iterator[tuple[bytes, npt.NDArray[np.void]]]:
        """Yield the last member, if tokens are left for one."""
        if self._num_held:
            yield self._take(self._num_held, tar_bytes)

    def _take(self, num_tokens: int, tar_bytes: int) -> tuple[bytes, npt.NDArray[np.void]]:
        """One member of the first ``num_tokens`` tokens held."""
        ids = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        starts = self._starts[0] if len(self._starts) == 1 else np.concatenate(self._starts)
        self._ids, ids = [ids[num_tokens:]], ids[:num_tokens]
        num_here = int(np.searchsorted(starts["position"], num_tokens))
        later = starts[num_here:].copy()
        later["position"] -= num_tokens
        self._starts, starts = [later], starts[:num_here]
        self._num_held -= num_tokens
        return self._member(ids, starts, tar_bytes)

    def _member(
        self, ids: npt.NDArray[np.uint32], starts: npt.NDArray[np.void], tar_bytes: int
    ) -> tuple[bytes, npt.NDArray[np.void]]:
        seq_len = self._spec.seq_len
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = np.pad(ids.astype(self._spec.dtype), (0, num_padding), constant_values=self._pad_token_id)
        rows = rows.reshape(num_rows, seq_len)
        positions = starts["position"].astype(np.uint32)
        fields = {DOC_STARTS_FIELD: positions, token_field("packed", "npy"): rows}
        if num_padding:
            fields[ROW_TOKENS_FIELD] = row_tokens
        pieces: list[bytes] = []
        payloads = {}  # byte in the tar where each field's numbers begin
        key = rows_key(self._shard_id, self._num_rows)
        for name, array in sorted(fields.items()):
            header = npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = tar_bytes + sum(map(len, pieces)) + BLOCK_BYTES + len(header)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.tobytes()]
            pieces.append(bytes(-num_bytes % BLOCK_BYTES))
        entries = self._entries(starts, row_tokens, payloads)
        self._num_rows += num_rows
        self.num_padding += num_padding
        return b"".join(pieces), entries

    def _entries(
        self, starts: npt.NDArray[np.void], row_tokens: npt.NDArray[np.uint32], payloads: dict[str, int]
    ) -> npt.NDArray[np.void]:
        """idx records of a member's rows; each names the document that its first token is of."""
        row_bytes = self._spec.seq_len * self._spec.dtype.itemsize
        numbers = np.arange(len(row_tokens))
        first = numbers * self._spec.seq_len
        begins = np.searchsorted(starts["position"], first)
        open_before = np.concatenate((self._open, starts))
        of_row = open_before[np.searchsorted(starts["position"], first, side="right")]
        entries = np.empty(len(row_tokens), IDX_ROW)
        entries["offset"] = payloads[token_field("packed", "npy")] + numbers * row_bytes
        entries["num_bytes"] = row_bytes
        entries["num_tokens"] = row_tokens
        entries["source"] = of_row["source"]
        entries["source_offset"] = of_row["source_offset"]
        entries["starts_offset"] = payloads[DOC_STARTS_FIELD] + 4 * begins
        entries["num_starts"] = np.diff(begins, append=len(starts))
        self._open = open_before[-1:]
        return entries


def append_token(tokens: TokenBatch, token_id: int) -> TokenBatch:
    """The same documents, each with one more token at its end."""
    num_documents = len(tokens.lengths)
    return TokenBatch(
        ids=np.insert(tokens.ids, tokens.offsets[1:], token_id),
        offsets=tokens.offsets + np.arange(num_documents + 1),
    )
