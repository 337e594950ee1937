"""Samples as the shards hold them: documents, cut at a length or split into pieces, and packed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk
from loader.reading.shard_reader import ReaderContext, SampleBytes, ShardReader
from loader.samples.token_ids import (
    CannotDecode,
    Decoded,
    check_vocab,
    decode_parts,
    decode_samples,
    decode_starts,
    places_of,
    rows_in_place,
)
from loader.shards.shard_set import ShardSet
from shardprep.errors import BrokenShard


class DocumentPieces:
    """Numbers the pieces through all shards, in order; an empty document is one empty piece.

    Making it opens every shard for its idx: 0.1 ms per shard and 1 ns per document, files cached.
    """

    def __init__(self, shards: ShardSet, max_length: int, context: ReaderContext) -> None:
        self.max_length = max_length
        self._shards = shards
        reader = ShardReader(shards, context)
        counts = np.zeros(shards.num_shards, np.int64)
        for number in reader.opening_order(np.arange(shards.num_shards)).tolist():
            counts[number] = self._ends(reader, number)[-1]
        reader.close()
        self.first_piece = np.concatenate([[0], np.cumsum(counts)])  # of each shard

    @property
    def num_samples(self) -> int:
        return int(self.first_piece[-1])

    def locate(
        self, reader: ShardReader, pieces: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64[n] pieces -> int64[n] documents, counted through all shards, and their first token."""
        documents, first = np.empty_like(pieces), np.empty_like(pieces)
        shard = np.searchsorted(self.first_piece, pieces, side="right") - 1
        for number in np.unique(shard).tolist():
            here = shard == number
            ends = self._ends(reader, number)
            local = pieces[here] - self.first_piece[number]
            document = np.searchsorted(ends, local, side="right") - 1
            documents[here] = document + self._shards.first_sample[number]
            first[here] = (local - ends[document]) * self.max_length
        return documents, first

    def of_documents(self, reader: ShardReader, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The pieces of some documents, counted through all shards: int64[n] -> int64[pieces]."""
        parts = [np.empty(0, np.int64)]
        for document in documents.tolist():
            number = int(self._shards.shard_of(np.array(document)))
            local = document - int(self._shards.first_sample[number])
            ends = self._ends(reader, number)
            parts.append(np.arange(ends[local], ends[local + 1]) + self.first_piece[number])
        return np.concatenate(parts)

    def lengths_of(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Tokens of each piece of a shard: int64[pieces]."""
        ends = self._ends(reader, number)
        lengths = np.full(int(ends[-1]), self.max_length)
        lengths[ends[1:] - 1] = reader.num_tokens_of(number) - (np.diff(ends) - 1) * self.max_length
        return lengths

    def _ends(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Sums of a shard's pieces, from 0: int64[documents + 1]."""
        shard = reader.opened(number)
        if "pieces" not in shard.sums:
            counts = np.maximum(-(-reader.num_tokens_of(number) // self.max_length), 1)
            shard.sums["pieces"] = np.concatenate([[0], np.cumsum(counts)])
        return shard.sums["pieces"]


LongDocuments = Literal["split", "truncate", "error"]


@dataclass(frozen=True, kw_only=True)
class WholeSamples:
    """Documents or packed rows, one per sample; with ``pieces``, parts of documents."""

    shards: ShardSet
    max_length: int | None = None
    pieces: DocumentPieces | None = None  # where documents longer than max_length are split
    refuse_longer: bool = False
    starts: bool = False  # of documents in packed rows
    vocab_size: int | None = None  # checked where it is given: ids that others made
    context: ReaderContext = ReaderContext()  # noqa: RUF009  frozen

    @cached_property
    def row_tokens(self) -> int:
        return self.shards.row_tokens

    @property
    def num_samples(self) -> int:
        return self.shards.num_samples if self.pieces is None else self.pieces.num_samples

    @property
    def mean_tokens(self) -> float:
        mean = self.shards.mean_tokens
        return mean if self.max_length is None else min(mean, self.max_length)

    @property
    def offsets(self) -> int:
        return 1

    def lengths_of(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Tokens of each sample of a shard: int64[samples]."""
        if self.pieces is not None:
            return self.pieces.lengths_of(reader, number)
        lengths = reader.num_tokens_of(number).astype(np.int64)
        return lengths if self.max_length is None else lengths.clip(max=self.max_length)

    def first_of(self, number: int) -> int:
        """The samples before those of a shard."""
        first = self.shards.first_sample if self.pieces is None else self.pieces.first_piece
        return int(first[number])

    def open(self) -> SampleReader:
        return SampleReader(self)


class SampleReader:
    """A WindowReader of WholeSamples."""

    def __init__(self, samples: WholeSamples) -> None:
        self._samples = samples
        self.reader = ShardReader(samples.shards, samples.context)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._samples.pieces is not None:
            documents, first = self._samples.pieces.locate(self.reader, samples)
            lengths = self.reader.num_tokens(documents) - first
        else:
            lengths = self.reader.num_tokens(samples)
        longest = self._samples.max_length
        return lengths if longest is None else lengths.clip(max=longest)

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> SampleWindow | PieceWindow:  # noqa: ARG002
        if self._samples.pieces is not None:
            return self._read_pieces(samples, self._samples.pieces)
        rows = np.arange(samples.size).reshape(samples.shape)
        starts = self._samples.starts and self._samples.row_tokens > 0
        data = self.reader.read(samples.reshape(-1), starts=starts)
        return SampleWindow(samples=self._samples, data=data, rows=rows, starts=starts)

    def _read_pieces(self, samples: npt.NDArray[np.int64], pieces: DocumentPieces) -> PieceWindow:
        """Read and decode the documents of some pieces, each once, and keep the pieces alone.

        So a window holds 4 bytes per token of its pieces, and while it is made the ids of some documents.
        """
        asked, rows = np.unique(samples, return_inverse=True)
        documents, first = pieces.locate(self.reader, asked)
        unique, document = np.unique(documents, return_inverse=True)  # ascending, as pieces are
        data = self.reader.read(unique)
        lengths = np.empty(len(asked), np.int64)
        parts: list[npt.NDArray[np.int32]] = []
        for part in decode_parts(data, np.arange(len(unique))):
            found = _decoded(self._samples, data, part)
            held = found.lengths.astype(np.int64)
            here = slice(*np.searchsorted(document, [part[0], part[-1] + 1]).tolist())
            local = document[here] - part[0]
            lengths[here] = np.minimum(held[local] - first[here], pieces.max_length)
            parts.append(found.ids[places_of((np.cumsum(held) - held)[local] + first[here], lengths[here])])
        return PieceWindow(
            ids=np.concatenate(parts),
            begin=np.cumsum(lengths) - lengths,
            lengths=lengths,
            rows=rows.reshape(samples.shape),
        )

    def close(self) -> None:
        self.reader.close()


@dataclass(frozen=True, kw_only=True)
class PieceWindow:
    """A Window of pieces, decoded."""

    ids: npt.NDArray[np.int32]
    begin: npt.NDArray[np.int64]  # int64[pieces]: where each begins in ids
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]  # int64[samples per step, steps] -> pieces

    def chunk(self, first: int, end: int) -> Chunk:
        steps = self.rows[:, first:end].T
        flat = steps.reshape(-1)
        lengths = self.lengths[flat]
        ids = self.ids[places_of(self.begin[flat], lengths)]
        return Chunk(lengths=lengths.reshape(steps.shape).T.astype(np.int32), ids=ids, num_cut=0)


@dataclass(frozen=True, kw_only=True)
class SampleWindow:
    """A Window whose samples are decoded when their chunk is asked for."""

    samples: WholeSamples
    data: SampleBytes
    rows: npt.NDArray[np.int64]  # int64[samples per step, steps] -> rows of data
    starts: bool

    def chunk(self, first: int, end: int) -> Chunk:
        rows = self.rows[:, first:end]
        if self.samples.row_tokens:
            return self._rows_chunk(rows, rows.reshape(-1))
        flat = rows.T.reshape(-1)
        found = _decoded(self.samples, self.data, flat, max_length=self.samples.max_length)
        if found.num_cut and self.samples.refuse_longer:
            self._refuse(flat)
        lengths = found.lengths.reshape(rows.T.shape).T
        return Chunk(lengths=lengths, ids=found.ids, num_cut=found.num_cut)

    def _rows_chunk(self, rows: npt.NDArray[np.int64], flat: npt.NDArray[np.int64]) -> Chunk:
        row_tokens = self.samples.row_tokens
        ids = rows_in_place(self.data, rows, row_tokens)
        lengths = self.data.num_tokens[rows].astype(np.int32)
        if self.samples.vocab_size is not None:
            stored = replace(ids, mask=None)
            for step, of_step in enumerate(rows.T):
                full = np.full(len(of_step), row_tokens, np.int32)
                _check(self.samples, self.data, stored[:, step].reshape(-1), full, of_step)
        num_starts = starts = None
        if self.starts:
            num_starts = self.data.num_starts[rows].astype(np.int32)
            starts = decode_starts(self.data, flat, row_tokens)
        return Chunk(lengths=lengths, ids=ids, row_tokens=row_tokens, num_starts=num_starts, starts=starts)

    def _refuse(self, flat: npt.NDArray[np.int64]) -> None:
        for row in flat.tolist():
            length = int(decode_samples(self.data, np.array([row])).lengths[0])
            if length > (self.samples.max_length or length):
                raise BrokenShard(
                    f"{self.samples.shards.describe(int(self.data.sample[row]))} holds {length:,} tokens, "
                    f"more than max_length={self.samples.max_length}; "
                    'long_documents="split" would keep them all, "truncate" the beginning'
                )


def _decoded(
    samples: WholeSamples, data: SampleBytes, rows: npt.NDArray[np.int64], *, max_length: int | None = None
) -> Decoded:
    """Documents, cut at a length; their ids are checked where others made them. Raises BrokenShard."""
    try:
        found = decode_samples(data, rows, max_length=max_length)
    except CannotDecode as error:
        raise _broken(samples, data, error) from None
    _check(samples, data, found.ids, found.lengths, rows)
    return found


def _check(
    samples: WholeSamples,
    data: SampleBytes,
    ids: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
) -> None:
    if samples.vocab_size is None:
        return
    try:
        check_vocab(ids, lengths, rows, samples.vocab_size)
    except CannotDecode as error:
        raise _broken(samples, data, error) from None


def _broken(samples: WholeSamples, data: SampleBytes, error: CannotDecode) -> BrokenShard:
    return BrokenShard(f"{samples.shards.describe(int(data.sample[error.row]))} holds {error}")
