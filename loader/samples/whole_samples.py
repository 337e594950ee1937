"""Samples as the shards hold them: documents, cut at a length or in pieces, and packed rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loader.reading.opening_order import Turn
from loader.reading.shard_reader import STALL_WARNING_S, SampleBytes, ShardReader
from loader.run import Run
from loader.samples.document_pieces import DocumentPieces
from loader.samples.token_ids import CannotDecode, check_vocab, decode_samples, decode_starts, rows_in_place
from loader.shards.shard_set import ShardSet
from preprocess.shard_format import BrokenShard

LongDocuments = Literal["split", "truncate", "error"]


@dataclass(frozen=True, kw_only=True)
class WholeSamples:
    """Documents or packed rows, one a sample; with ``pieces``, parts of documents."""

    shards: ShardSet
    max_length: int | None = None
    pieces: DocumentPieces | None = None  # where documents longer than max_length are split
    refuse_longer: bool = False
    starts: bool = False  # of documents in packed rows
    vocab_size: int | None = None  # checked where it is given: ids that others made
    stall_warning_s: float = STALL_WARNING_S
    turn: Turn = field(default_factory=Turn)  # of this rank, to open shards in

    @property
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

    def open(self) -> SampleReader:
        return SampleReader(self)


class SampleReader:
    """A WindowReader of WholeSamples."""

    def __init__(self, samples: WholeSamples) -> None:
        self._samples = samples
        self._reader = ShardReader(samples.shards, stall_warning_s=samples.stall_warning_s, turn=samples.turn)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._samples.pieces is not None:
            documents, first = self._samples.pieces.locate(self._reader, samples)
            lengths = self._reader.num_tokens(documents) - first
        else:
            lengths = self._reader.num_tokens(samples)
        longest = self._samples.max_length
        return lengths if longest is None else lengths.clip(max=longest)

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> SampleWindow:  # noqa: ARG002
        asked, first = samples.reshape(-1), None
        rows = np.arange(samples.size).reshape(samples.shape)
        if self._samples.pieces is not None:  # several may be of one document
            documents, first = self._samples.pieces.locate(self._reader, asked)
            asked, rows = np.unique(documents, return_inverse=True)
            first, rows = first.reshape(samples.shape), rows.reshape(samples.shape)
        starts = self._samples.starts and self._samples.row_tokens > 0
        data = self._reader.read(asked, starts=starts)
        return SampleWindow(samples=self._samples, data=data, rows=rows, first=first, starts=starts)

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True, kw_only=True)
class SampleWindow:
    """A Window whose samples are decoded when their run is asked for."""

    samples: WholeSamples
    data: SampleBytes
    rows: npt.NDArray[np.int64]  # int64[samples a step, steps] -> rows of data
    first: npt.NDArray[np.int64] | None  # likewise: token of its document at which each begins
    starts: bool

    def run(self, first: int, end: int) -> Run:
        rows = self.rows[:, first:end]
        flat = rows.reshape(-1)
        begins = None if self.first is None else self.first[:, first:end].reshape(-1)
        try:
            if self.samples.row_tokens:
                return self._rows_run(rows, flat)
            return self._documents_run(rows, flat, begins)
        except CannotDecode as error:
            where = self.samples.shards.describe(int(self.data.sample[error.row]))
            raise BrokenShard(f"{where} holds {error}") from None

    def _rows_run(self, rows: npt.NDArray[np.int64], flat: npt.NDArray[np.int64]) -> Run:
        row_tokens = self.samples.row_tokens
        ids = rows_in_place(self.data, rows, row_tokens)
        lengths = self.data.num_tokens[rows].astype(np.int32)
        if self.samples.vocab_size is not None:
            for step, of_step in enumerate(rows.T):
                self._check(ids[:, step].reshape(-1), np.full(len(of_step), row_tokens, np.int32), of_step)
        num_starts = starts = None
        if self.starts:
            num_starts = self.data.num_starts[rows].astype(np.int32)
            starts = np.concatenate(decode_starts(self.data, flat, row_tokens))
        return Run(lengths=lengths, ids=ids, num_starts=num_starts, starts=starts)

    def _documents_run(
        self, rows: npt.NDArray[np.int64], flat: npt.NDArray[np.int64], begins: npt.NDArray[np.int64] | None
    ) -> Run:
        found = decode_samples(self.data, flat, first=begins, max_length=self.samples.max_length)
        if found.num_cut and self.samples.refuse_longer:
            self._refuse(flat)
        self._check(found.ids, found.lengths, flat)
        num_cut = found.num_cut if self.samples.pieces is None else 0
        return Run(lengths=found.lengths.reshape(rows.shape), ids=found.ids, num_cut=num_cut)

    def _check(
        self, ids: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int32], flat: npt.NDArray[np.int64]
    ) -> None:
        if self.samples.vocab_size is not None:
            check_vocab(ids, lengths, flat, self.samples.vocab_size)

    def _refuse(self, flat: npt.NDArray[np.int64]) -> None:
        for row in flat.tolist():
            length = int(decode_samples(self.data, np.array([row])).lengths[0])
            if length > (self.samples.max_length or length):
                raise CannotDecode(
                    row,
                    f"{length:,} tokens, more than max_length={self.samples.max_length}; "
                    'long_documents="split" would keep them all, "truncate" the beginning',
                )
