"""The samples of a source.

A sample is a stored document (``Samples``), a packed row (``PackedRows``), or a row that is packed at load
time (``JoinedRows``). ``make_samples`` chooses the kind. Each kind numbers its samples and reads the windows
that a worker needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from loader.order.hashes import Int32s, Int64s
from loader.order.planned import SourceFacts
from loader.read.chunks import NO_LABEL, Chunk, Integers, Ragged, Window
from loader.read.external_tars import TOKEN_DTYPES
from loader.read.json_ids import check_vocab, decode_samples, join_ranges
from loader.read.reading import SampleBytes, ShardReader
from loader.read.shards import ShardSet
from shardprep.errors import BrokenShard, UsageError
from shardprep.format.spec import BLANK

_MOST_COUNTED = 1 << 20  # samples from which the mean length of a source is computed


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Stored documents, one per sample. Each process opens one reader and passes it to every call."""

    shards: ShardSet
    row_tokens: int = 0  # tokens per sample if all samples are rows, else 0
    vocab_size: int | None = None  # ids from it on are refused; None: not checked, in shards of our own
    starts: bool = False  # whether chunks contain the places where documents begin in rows
    origins: bool = False  # whether chunks also contain the origin of each document
    most_tokens: int | None = None  # to which documents are truncated

    @property
    def num_offsets(self) -> int:
        """Return how many offsets an epoch can have. ``read`` gets the epoch's."""
        return 1

    @property
    def num_samples(self) -> int:
        return self.shards.num_samples

    @property
    def mean_tokens(self) -> float:
        """Return the approximate mean of the tokens per sample."""
        mean = self.row_tokens or self.shards.mean_tokens
        return mean if self.most_tokens is None else min(mean, self.most_tokens)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        """Return the tokens of each document, from the idx alone: int64[n] -> int64[n]."""
        lengths = reader.num_tokens(samples)
        return lengths if self.most_tokens is None else lengths.clip(max=self.most_tokens)

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:  # noqa: ARG002
        """Read samples, int64[samples per tick, ticks]. The reader's next ``read`` overwrites the window."""
        data = reader.read(samples.T.reshape(-1), starts=self.starts)  # tick by tick, as in chunks
        return partial(self._chunk_of, data, len(samples))

    def _chunk_of(self, data: SampleBytes, worker_samples: int, first: int, end: int) -> Chunk:
        """Return ticks of a window. ``worker_samples``: of a tick, read by this process."""
        by_tick = np.arange(first * worker_samples, end * worker_samples)
        counts, ids, num_cut_tokens = self._decode(data, by_tick)
        lengths = counts.astype(np.int32).reshape(-1, worker_samples).T
        chunk = Chunk(lengths=lengths, ids=Ragged.of_joined(ids, lengths), num_cut_tokens=num_cut_tokens)
        if not self.origins:
            return chunk
        zeros = np.zeros(by_tick.size, np.int64)
        ones = np.ones(by_tick.size, np.int64)
        return self._with_documents(chunk, ones, zeros, zeros, data.sample[by_tick])

    def _decode(self, data: SampleBytes, numbers: Int64s) -> tuple[Int64s, Int32s, int]:
        """Decode samples, and check the ids of other tools. Ids of blanked documents become BLANK.

        ``numbers``: of the samples in ``data``. Returns the lengths, int64[samples], all ids, and the number
        of ids that were cut off.
        """
        lengths, ids = decode_samples(data, numbers)
        num_cut_tokens = 0
        if self.most_tokens is not None and lengths.max() > self.most_tokens:
            kept = np.minimum(lengths, self.most_tokens)
            num_cut_tokens = int((lengths - kept).sum())
            ids = ids[join_ranges(np.zeros_like(lengths), lengths) < np.repeat(kept, lengths)]
            lengths = kept
        if self.shards.blank_id is not None:
            ids[ids == self.shards.blank_id] = BLANK
        if self.vocab_size is not None:
            check_vocab(data, numbers, ids, lengths, self.vocab_size)
        return lengths, ids, num_cut_tokens

    def _with_documents(
        self, chunk: Chunk, counts: Int64s, places: Integers, numbers: Int64s, samples: Int64s
    ) -> Chunk:
        """Add the documents of a chunk's samples, tick by tick. ``counts``: documents per sample.

        The other arrays have a value per document: its place in this chunk's sample, its number in the stored
        sample, and the number of that sample. A document that continues from another row is at place 0.
        """
        columns = [places]
        if self.origins:
            shard = self.shards.shard_of(samples)
            later = np.zeros_like(shard)  # the row of the batch and the source are filled in later
            columns = [later, places, later, shard, self.shards.record_numbers(samples, shard), numbers]
        table = np.stack(columns, axis=1).astype(np.int32)
        documents = Ragged.of_joined(table, counts.reshape(chunk.lengths.T.shape).T)
        return replace(chunk, documents=documents, has_origins=self.origins)


@dataclass(frozen=True, kw_only=True)
class PackedRows(Samples):
    """Rows of one length that ``plan`` packed. Ids stay in the reader's buffer until their tick is needed."""

    def _chunk_of(self, data: SampleBytes, worker_samples: int, first: int, end: int) -> Chunk:
        by_tick = np.arange(first * worker_samples, end * worker_samples)
        rows = by_tick.reshape(-1, worker_samples).T
        differs = data.dtype != data.dtype[0]
        if differs.any():
            raise data.broken(int(differs.argmax()), "ids of another width than other rows")
        # Ids of 4 bytes become signed, since masks set the sign bit (NO_LABEL).
        is_wide = TOKEN_DTYPES[data.dtype[0]] == np.dtype("<u4")
        dtype = np.dtype("<i4") if is_wide else np.dtype("<u2")
        flat = data.buffer[: len(data.buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
        ids = Ragged.of_rows(flat, data.start[rows] // dtype.itemsize, self.row_tokens)
        if self.shards.blank_id not in (None, BLANK):  # in 2-byte ids it is 65535
            ids = ids.joined()
            ids.flats[0][ids.flats[0] == self.shards.blank_id] = BLANK
        if self.vocab_size is not None:
            full = np.full(rows.size, self.row_tokens, np.int32)
            check_vocab(data, by_tick, ids.joined().flats[0], full, self.vocab_size)
        mask_at = data.mask_at[by_tick]
        if (mask_at >= 0).any():  # some rows have a loss mask
            ids = ids.joined()
            has_no_label = sliding_window_view(data.buffer, self.row_tokens)[mask_at] == 0
            has_no_label[mask_at < 0] = False
            ids.flats[0][has_no_label.reshape(-1)] |= NO_LABEL
        chunk = Chunk(lengths=data.num_tokens[rows].astype(np.int32), ids=ids)
        if not self.starts:
            return chunk
        # All rows at once take 5 ns per start; one by one they would take 2 us per row.
        num_starts = data.num_starts[by_tick]
        starts = data.buffer[: len(data.buffer) // 4 * 4].view("<u4")
        starts = starts[join_ranges(data.starts_at[by_tick] // 4, num_starts)] % self.row_tokens
        # A row in which no document begins at the first token continues a document of another row.
        is_continued = np.ones(len(by_tick), np.bool_)
        is_continued[np.repeat(np.arange(len(by_tick)), num_starts)[starts == 0]] = False
        counts = num_starts + is_continued
        places = np.insert(starts, (np.cumsum(num_starts) - num_starts)[is_continued], 0)
        numbers = join_ranges(np.zeros_like(counts), counts)
        return self._with_documents(chunk, counts, places, numbers, np.repeat(data.sample[by_tick], counts))


class _RowPlaces(NamedTuple):
    """The documents from which rows are cut, in the order in which they are read."""

    documents: Int64s  # samples of the ShardSet: int64[documents]
    lacks_eos: npt.NDArray[np.bool_]  # bool[documents]
    row_begins: Int64s  # where each row begins in the tokens of all documents, with EOS: int64[rows]


class _JoinedWindow(NamedTuple):
    """A decoded window: all documents one after another, and where the rows are."""

    ids: Int32s
    documents: Int64s  # those that have tokens
    document_begins: Int64s  # in ``ids``
    row_begins: Int64s  # in ``ids``: int64[samples per tick, ticks]
    lengths: Int32s  # tokens of each row: int32[samples per tick, ticks]


@dataclass(frozen=True, kw_only=True)
class JoinedRows(Samples):
    """Rows packed at load time: all documents are joined into one stream of tokens and cut into full rows.

    Here a sample is a row; the ShardSet's samples are its documents. Row x of S tokens begins at token
    ``(offset + x S) mod T`` of the stream, which is found from the lengths in the idx. Documents that lack an
    EOS get one. The price: an epoch leaves out T mod S tokens, different ones each time, and a worker decodes
    a whole window at once, at 4 bytes per token.
    """

    eos_token_id: int | None
    keeps_tail: bool = False  # the remaining tokens become a row that is not full

    def __post_init__(self) -> None:
        have_eos = all(each.records is None and each.spec.append_eos for each in self.shards.datasets)
        if self.eos_token_id is None and not have_eos:
            found = "shards without EOS after documents, and a tokenizer without EOS"
            raise UsageError(found=found, expected="--append_eos in plan, or a tokenizer with an eos_token")

    @property
    def num_offsets(self) -> int:
        """Return T, the tokens of the stream. The rows of an epoch may begin at any of them."""
        return int(self.first_token[-1])

    @property
    def num_samples(self) -> int:
        whole, rest = divmod(self.num_offsets, self.row_tokens)
        return whole + (self.keeps_tail and rest > 0)

    @cached_property
    def first_token(self) -> Int64s:
        """Return the token at which each shard begins in the stream, and T: int64[shards + 1]."""
        sizes = np.zeros(self.shards.num_shards, np.int64)
        reader = ShardReader(self.shards)
        for dataset, first in zip(self.shards.datasets, self.shards.first_of_dataset, strict=False):
            shards = np.arange(first, first + len(dataset.num_samples))
            if dataset.records is None and self.shards.split is None:
                sizes[shards] = dataset.num_tokens + dataset.num_samples * (not dataset.spec.append_eos)
                continue
            for number in shards.tolist():  # 0.1 ms each
                sizes[number] = self._lengths_with_eos(reader, number).sum()
        reader.close()
        return np.concatenate([[0], np.cumsum(sizes)])

    def _lacks_eos(self, number: int, documents: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of some documents of a shard lack an EOS: bool[documents]."""
        dataset, _ = self.shards.locate(number)
        if dataset.records is None:
            return np.full(len(documents), not dataset.spec.append_eos)
        last_id: Int64s = dataset.records["last_id"][self.shards.record_numbers(documents, number)]
        return last_id != self.eos_token_id

    def _lengths_with_eos(self, reader: ShardReader, number: int) -> Int64s:
        """Return the tokens of each document of a shard, including EOS: int64[documents]."""
        documents = np.arange(*self.shards.first_sample[number : number + 2])
        return reader.num_tokens_of(number) + self._lacks_eos(number, documents)

    def ends(self, reader: ShardReader, number: int) -> Int64s:
        """Return the cumulative tokens of a shard's documents, including EOS: int64[documents + 1]."""
        shard = reader.opened(number)
        if "stream" not in shard.cached:
            ends = np.concatenate([[0], np.cumsum(self._lengths_with_eos(reader, number))])
            expected = int(self.first_token[number + 1] - self.first_token[number])
            if int(ends[-1]) != expected:
                found = f"an idx that counts {int(ends[-1])} tokens"
                raise BrokenShard(path=shard.tar.path, found=found, expected=expected, remedy=shard.remedy)
            shard.cached["stream"] = ends
        return shard.cached["stream"]

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        # rows: int64[rows], ascending; inverse: the place of each sample in them
        rows, inverse = np.unique(samples, return_inverse=True)
        places = self._look_up(reader, rows, offset)
        data = reader.read(places.documents)
        num_tokens, ids, _ = self._decode(data, np.arange(len(places.documents)))
        num_tokens, ids = self._insert_eos(num_tokens, ids, places.lacks_eos)
        has_tokens = num_tokens > 0
        num_in_last_row = self.num_offsets - (self.num_samples - 1) * self.row_tokens
        is_last = samples == self.num_samples - 1
        lengths = np.where(is_last, min(num_in_last_row, self.row_tokens), self.row_tokens)
        window = _JoinedWindow(
            ids=ids,
            documents=places.documents[has_tokens],
            document_begins=(np.cumsum(num_tokens) - num_tokens)[has_tokens],
            row_begins=places.row_begins[inverse.reshape(samples.shape)],
            lengths=lengths.astype(np.int32),
        )
        return partial(self._chunk_of_joined, window)

    def _look_up(self, reader: ShardReader, rows: Int64s, offset: int) -> _RowPlaces:
        """Find the documents of ascending rows."""
        documents: list[Int64s] = []
        lacks_eos: list[npt.NDArray[np.bool_]] = []
        row_begins = np.empty(len(rows), np.int64)
        num_found = 0  # tokens of the documents so far
        for first, end, shards in self.spans(reader, rows, offset):
            span_begin = None  # among the tokens of all documents
            for number, begin, stop in shards:
                document_ends = self.ends(reader, number)
                low = int(np.searchsorted(document_ends, begin, side="right")) - 1
                high = int(np.searchsorted(document_ends, stop, side="left"))
                if span_begin is None:  # possibly inside a document
                    span_begin = num_found + begin - int(document_ends[low])
                documents.append(np.arange(low, high) + self.shards.first_sample[number])
                lacks_eos.append(self._lacks_eos(number, documents[-1]))
                num_found += int(document_ends[high] - document_ends[low])
            assert span_begin is not None
            row_begins[first:end] = span_begin + np.arange(end - first) * self.row_tokens
        return _RowPlaces(np.concatenate(documents), np.concatenate(lacks_eos), row_begins)

    def spans(
        self, reader: ShardReader, rows: Int64s, offset: int
    ) -> Iterator[tuple[int, int, Iterator[tuple[int, int, int]]]]:
        """Yield each span of consecutive rows: its first and end in ``rows``, and its shards (_shards_of).

        Each process begins with a different span.
        """
        # bounds: where spans begin in ``rows``, and its length
        bounds = np.array([0, *(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)])
        for span in reader.opening_order(np.arange(len(bounds) - 1)).tolist():
            first, end = bounds[span : span + 2].tolist()
            first_token = (offset + int(rows[first]) * self.row_tokens) % self.num_offsets
            yield first, end, self._shards_of(first_token, (end - first) * self.row_tokens)

    def _shards_of(self, token: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards of a span of the circular stream, and the first and end of its tokens in each."""
        while num_tokens:
            number = int(np.searchsorted(self.first_token, token, side="right")) - 1
            begin = token - int(self.first_token[number])
            num_taken = min(num_tokens, int(self.first_token[number + 1]) - token)
            yield number, begin, begin + num_taken
            token = (token + num_taken) % self.num_offsets
            num_tokens -= num_taken

    def _insert_eos(
        self, num_tokens: Int64s, ids: Int32s, lacks_eos: npt.NDArray[np.bool_]
    ) -> tuple[Int64s, Int32s]:
        """Return the lengths and the ids of documents that all end with an EOS."""
        if not lacks_eos.any():
            return num_tokens, ids
        ends = np.cumsum(num_tokens)
        eos = np.full(len(ends), self.eos_token_id, np.int32)
        if self.shards.blank_id is not None and len(ids):  # the EOS of a blanked document is blank, too
            eos[(num_tokens > 0) & (ids[ends - 1] == BLANK)] = BLANK
        return num_tokens + lacks_eos, np.insert(ids, ends[lacks_eos], eos[lacks_eos])

    def _chunk_of_joined(self, window: _JoinedWindow, first: int, end: int) -> Chunk:
        begins = window.row_begins[:, first:end]
        lengths = window.lengths[:, first:end]
        chunk = Chunk(lengths=lengths, ids=Ragged.of_rows(window.ids, begins, self.row_tokens))
        if not self.starts:
            return chunk
        # by_tick: int64[rows], where the rows begin, tick by tick; low: the document at that token
        by_tick = begins.T.reshape(-1)
        low = np.searchsorted(window.document_begins, by_tick, side="right") - 1
        counts = np.searchsorted(window.document_begins, by_tick + lengths.T.reshape(-1)) - low
        taken = join_ranges(low, counts)
        places = (window.document_begins[taken] - np.repeat(by_tick, counts)).clip(0)
        return self._with_documents(chunk, counts, places, np.zeros_like(places), window.documents[taken])


def make_samples(
    shards: ShardSet,
    *,
    row_tokens: int | None,
    most_tokens: int | None,
    eos_token_id: int | None,
    vocab_size: int | None,
    starts: bool,
    keeps_tail: bool,
    origins: bool,
) -> Samples:
    """Choose the kind of samples. ``row_tokens``: of rows that are packed at load, None without such."""
    if shards.row_tokens:
        return PackedRows(
            shards=shards,
            row_tokens=shards.row_tokens,
            vocab_size=vocab_size,
            starts=starts,
            origins=origins,
        )
    if row_tokens is None:
        return Samples(shards=shards, vocab_size=vocab_size, origins=origins, most_tokens=most_tokens)
    return JoinedRows(
        shards=shards,
        row_tokens=row_tokens,
        vocab_size=vocab_size,
        starts=starts,
        origins=origins,
        eos_token_id=eos_token_id,
        keeps_tail=keeps_tail,
    )


def facts_of(samples: Samples, *, counts_tokens: bool) -> SourceFacts:
    """Return what the order needs to know. ``counts_tokens``: the mean length, for weights in tokens."""
    return SourceFacts(
        data=samples.shards.fingerprint[:16],
        num_samples=samples.num_samples,
        num_bytes=samples.shards.tar_bytes,
        row_tokens=samples.row_tokens,
        mean_tokens=_mean_tokens(samples) if counts_tokens else 1.0,
    )


def _mean_tokens(samples: Samples) -> float:
    """Return the mean tokens per sample, from the manifests or from a million evenly spaced samples."""
    shards = samples.shards
    # A limit above the mean is ignored here: counting what it cuts would open all shards.
    is_uncut = samples.mean_tokens == shards.mean_tokens
    if samples.row_tokens or (is_uncut and not shards.has_external and shards.split is None):
        return float(samples.mean_tokens)
    num_chosen = min(samples.num_samples, _MOST_COUNTED)
    chosen = np.linspace(0, samples.num_samples - 1, num_chosen).astype(np.int64)
    reader = ShardReader(shards)
    mean = float(samples.num_tokens(reader, chosen).mean())
    reader.close()
    return max(mean, 1.0)
