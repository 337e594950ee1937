"""Members of a tar for packed rows: many rows a member, with the places where documents begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.make.packing import RowGroup, Starts, packer_of
from preprocess.make.pieces import EncodedBatch, TarPiece
from preprocess.make.tar_headers import ustar_header
from preprocess.make.token_ids import NO_LOSS, Ids, TokenBatch
from shardprep.format import names
from shardprep.format.documents import are_for_validation
from shardprep.format.idx import IDX_DTYPES
from shardprep.format.plan_options import PlanOptions
from shardprep.format.spec import DatasetSpec


class RowMembers:
    """Packed rows: many rows per member, and beside it the positions where documents begin.

    Rows for training and rows for validation have a packer each, so no row has documents of both.
    """

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        self._spec, self._shard_id = spec, shard_id
        self._packers = [packer_of(spec, options.pack) for _ in range(2 if spec.validation_fraction else 1)]
        self._member_tokens = self._packers[0].group_rows * spec.seq_len
        self._held: list[tuple[Ids, Starts]] = []  # documents for validation that are not packed yet
        self._num_held_tokens = 0
        self._num_rows = 0
        self._tar_bytes = 0
        self.num_padding = 0

    @property
    def num_split(self) -> int:
        return sum(packer.num_split for packer in self._packers)

    def pieces(self, batch: EncodedBatch) -> Iterator[TarPiece]:
        """Yield the members that a batch fills.

        Documents for validation are held until they fill a member. So the order of members depends on the
        documents alone, not on batches, and consecutive documents for training are packed together.
        """
        tokens, starts = batch.tokens, batch.starts
        assert tokens is not None  # it is from a BatchLayout
        assert starts is not None
        if not (fraction := self._spec.validation_fraction):
            yield from map(self._member, self._packers[0].append(tokens, starts))
            return
        is_training = ~are_for_validation(starts["digest"], fraction)
        numbers, ids, first = np.arange(len(starts)), tokens.documents(), 0
        for number in np.flatnonzero(~is_training).tolist():
            self._held.append((ids[number].copy(), starts[number : number + 1].copy()))
            self._num_held_tokens += len(ids[number])
            if self._num_held_tokens >= self._member_tokens:
                here = is_training & (first <= numbers) & (numbers < number)
                yield from map(self._member, self._packers[0].append(tokens.only(here), starts[here]))
                yield from self._release()
                first = number
        here = is_training & (first <= numbers)
        yield from map(self._member, self._packers[0].append(tokens.only(here), starts[here]))

    def _release(self) -> Iterator[TarPiece]:
        """Pack the documents that are held for validation, and yield the members that they fill."""
        held, self._held, self._num_held_tokens = self._held, [], 0
        if held:
            tokens, starts = TokenBatch.of([ids for ids, _ in held]), [start for _, start in held]
            for group in self._packers[1].append(tokens, np.concatenate(starts)):
                yield self._member(group, is_validation=True)

    def rest(self) -> Iterator[TarPiece]:
        yield from map(self._member, self._packers[0].finish())
        if self._spec.validation_fraction:
            yield from self._release()
            for group in self._packers[1].finish():
                yield self._member(group, is_validation=True)

    def _member(self, group: RowGroup, *, is_validation: bool = False) -> TarPiece:
        """Return the bytes of one member, with the idx records of its rows."""
        fields: dict[str, npt.NDArray[Any]] = {
            names.DOC_STARTS_FIELD: group.starts["position"].astype(np.uint32),
            names.ROW_IDS_FIELD: group.rows,
        }
        if self._spec.record == "chat":
            fields[names.LOSS_MASK_FIELD] = (group.rows < NO_LOSS).astype(np.uint8)
            fields[names.ROW_IDS_FIELD] = (group.rows & ~NO_LOSS).astype(self._spec.dtype)
        num_padding = group.rows.size - int(group.row_tokens.sum(dtype=np.int64))
        if num_padding:
            fields[names.ROW_TOKENS_FIELD] = group.row_tokens
        pieces: list[bytes | memoryview] = []
        end = self._tar_bytes
        payloads = {}  # byte in the tar where each field's numbers begin
        key = f"rows_{self._shard_id}_{self._num_rows:08d}"  # the number of the first row
        for name, array in sorted(fields.items()):
            header = names.npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = end + names.BLOCK_BYTES + len(header)
            padding = bytes(-num_bytes % names.BLOCK_BYTES)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.data, padding]
            end += names.BLOCK_BYTES + num_bytes + len(padding)
        data = b"".join(pieces)
        self._num_rows += len(group.rows)
        self._tar_bytes = end
        self.num_padding += num_padding
        seq_len, numbers = self._spec.seq_len, np.arange(len(group.rows))
        row_bytes = seq_len * self._spec.dtype.itemsize
        begins = np.searchsorted(group.starts["position"], numbers * seq_len)
        records = np.empty(len(group.rows), IDX_DTYPES[self._spec.kind])
        records["offset"] = payloads[names.ROW_IDS_FIELD] + numbers * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = group.row_tokens
        records["input_number"] = group.firsts["input_number"]
        records["input_offset"] = group.firsts["input_offset"]
        records["starts_offset"] = payloads[names.DOC_STARTS_FIELD] + 4 * begins
        records["num_starts"] = np.diff(begins, append=len(group.starts))
        if names.LOSS_MASK_FIELD in payloads:
            records["mask_offset"] = payloads[names.LOSS_MASK_FIELD] + numbers * seq_len
        return TarPiece(data, records, group.starts["digest"], is_validation)
