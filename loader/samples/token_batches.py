"""``batch_tokens``: batches of whole documents of like length, as many as a number of tokens holds, padded.

A sample is such a batch here. So the order shuffles batches and shares them out as it does documents: every
rank gets equally many, and global batch k is the same on every number of ranks. Which documents make a batch
follows from the lengths in the idx alone: those of a shard are cut into bins of BIN_BATCHES batches' tokens.
A bin is sorted by length, the longest first, and cut where another document would not fit.

The price: documents share their batch in every epoch, and all of one batch are of one bin. The last batch of
a bin is seldom full. A loader reads all idx when it is made: about 1 us a document, files cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk
from loader.reading.shard_reader import ShardReader
from loader.samples.token_ids import places_of
from loader.samples.whole_samples import PieceWindow, SampleReader, SampleWindow, WholeSamples
from shardprep.errors import UsageError

BIN_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Batches of at most ``batch_tokens`` places of the documents, or their pieces. Raises UsageError."""

    documents: WholeSamples
    batch_tokens: int
    multiple: int = 1  # widths of batches
    num_beyond: int = 0  # tokens of a document that are no place of a batch

    def __post_init__(self) -> None:
        self.first_batch  # noqa: B018  computed now, so that an error comes now

    @cached_property
    def first_batch(self) -> npt.NDArray[np.int64]:
        """int64[shards + 1]: the batches before each shard."""
        shards = self.documents.shards
        reader = ShardReader(shards, self.documents.context)
        counts = np.zeros(shards.num_shards, np.int64)
        for number in reader.opening_order(np.arange(shards.num_shards)).tolist():
            counts[number] = len(self.batch_ends(reader, number)) - 1
        reader.close()
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def row_tokens(self) -> int:
        return 0

    @property
    def num_samples(self) -> int:
        return int(self.first_batch[-1])

    @property
    def mean_tokens(self) -> float:
        return self.documents.mean_tokens * self.documents.num_samples / max(self.num_samples, 1)

    @property
    def offsets(self) -> int:
        return 1

    def open(self) -> TokenBatchReader:
        return TokenBatchReader(self)

    def batch_ends(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Sums of the documents of a shard's batches, from 0: int64[batches + 1]."""
        sums = reader.opened(number).sums
        if "batch_ends" not in sums:
            lengths = self.documents.lengths_of(reader, number)
            members, ends = self._batches(lengths, number)
            sums["batch_ends"], sums["batch_members"] = ends, members
            sums["batch_sizes"] = np.add.reduceat(lengths[members], ends[:-1]) if len(members) else members
        return sums["batch_ends"]

    def members(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """The documents of a shard, from 0, batch after batch: int64[documents]."""
        self.batch_ends(reader, number)
        return reader.opened(number).sums["batch_members"]

    def sizes(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Tokens of each batch of a shard, without padding: int64[batches]."""
        self.batch_ends(reader, number)
        return reader.opened(number).sums["batch_sizes"]

    def _batches(
        self, lengths: npt.NDArray[np.int64], number: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Documents of a shard, batch after batch, in each as they stand in the shard; and the sums."""
        widths = -(-np.maximum(lengths - self.num_beyond, 1) // self.multiple) * self.multiple
        if len(widths) and int(widths.max()) > self.batch_tokens:
            longest = int(widths.argmax())
            where = self.documents.shards.describe(self.documents.first_of(number) + longest)
            raise UsageError(
                f"{where} has {int(lengths[longest]):,} tokens, more than a batch of batch_tokens="
                f"{self.batch_tokens:,} holds; pass max_length, with long_documents='split' to keep them all"
            )
        before = np.cumsum(widths) - widths
        bins = before // (BIN_BATCHES * self.batch_tokens)
        longest_first = np.lexsort((-widths, bins))
        bounds = [*np.flatnonzero(np.diff(bins, prepend=-1)).tolist(), len(bins)]
        descending, ends = widths[longest_first].tolist(), [0]
        for begin, end in pairwise(bounds):
            at = begin
            while at < end:
                at = min(at + self.batch_tokens // descending[at], end)
                ends.append(at)
        of_batch = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        return longest_first[np.lexsort((longest_first, of_batch))], np.array(ends, np.int64)


class TokenBatchReader:
    """A WindowReader of TokenBatches."""

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches
        self._documents = SampleReader(batches.documents)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = np.empty(len(samples), np.int64)
        for number, here, local in self._by_shard(samples):
            found[here] = self._batches.sizes(self._documents.reader, number)[local]
        return found

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> TokenBatchWindow:
        flat = samples.T.reshape(-1)  # step after step
        first, counts = np.empty_like(flat), np.empty_like(flat)  # of each batch in its shard's members
        for number, here, local in self._by_shard(flat):
            ends = self._batches.batch_ends(self._documents.reader, number)
            first[here], counts[here] = ends[local], ends[local + 1] - ends[local]
        begin = np.cumsum(counts) - counts
        documents = np.empty(int(counts.sum()), np.int64)
        for number, here, _ in self._by_shard(flat):
            members = self._batches.members(self._documents.reader, number)
            places = places_of(begin[here], counts[here])
            documents[places] = members[places_of(first[here], counts[here])]
            documents[places] += self._batches.documents.first_of(number)
        window = self._documents.read(documents[None], offset)
        return TokenBatchWindow(
            documents=window,
            counts=counts.reshape(samples.shape[::-1]),
            begin=np.append(begin, len(documents)),
        )

    def close(self) -> None:
        self._documents.close()

    def _by_shard(
        self, batches: npt.NDArray[np.int64]
    ) -> list[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
        """The shards of some batches, which of them each has, and their numbers in it."""
        shard = np.searchsorted(self._batches.first_batch, batches, side="right") - 1
        found = []
        for number in self._documents.reader.opening_order(np.unique(shard)).tolist():
            here = shard == number
            found.append((number, here, batches[here] - self._batches.first_batch[number]))
        return found


@dataclass(frozen=True, kw_only=True)
class TokenBatchWindow:
    """A Window of batches."""

    documents: SampleWindow | PieceWindow  # one a step
    counts: npt.NDArray[np.int64]  # int64[steps, batches a step]: documents of each batch
    begin: npt.NDArray[np.int64]  # int64[batches + 1]: the documents before each, step after step

    def chunk(self, first: int, end: int) -> Chunk:
        """Each sample is a batch; ``starts`` says where its documents begin."""
        counts = self.counts[first:end]
        per_step = counts.shape[1]
        documents = self.documents.chunk(int(self.begin[first * per_step]), int(self.begin[end * per_step]))
        lengths = documents.lengths[0].astype(np.int64)
        places = np.cumsum(lengths) - lengths
        flat = counts.reshape(-1)
        begin = np.cumsum(flat) - flat
        sizes = np.add.reduceat(lengths, begin)
        # Chunks have starts sample after sample, and of each step after step.
        walk = np.arange(len(flat)).reshape(counts.shape).T.reshape(-1)
        starts = places - np.repeat(places[begin], flat)
        return Chunk(
            lengths=sizes.reshape(counts.shape).T.astype(np.int32),
            ids=documents.ids,
            num_cut=documents.num_cut,
            num_starts=counts.T.astype(np.int32),
            starts=starts[places_of(begin[walk], flat[walk])].astype(np.int32),
        )
