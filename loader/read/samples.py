"""The samples of a source.

A sample is a stored document (``Samples``), a packed row (``PackedRows``), or a row that is packed at load
time (``JoinedRows``). ``make_samples`` chooses the kind. Each kind numbers its samples and reads the windows
that a worker needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

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
    max_length: int | None = None

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
        return mean if self.max_length is None else min(mean, self.max_length)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        """Return the tokens of each document, from the idx alone: int64[n] -> int64[n]."""
        lengths = reader.num_tokens(samples)
        return lengths if self.max_length is None else lengths.clip(max=self.max_length)

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:  # noqa: ARG002
        """Read samples, int64[samples per tick, ticks]. The reader's next ``read`` invalidates the window."""
        data = reader.read(samples.T.reshape(-1), starts=self.starts)  # tick by tick, as in chunks
        return partial(self._chunk_of, data, len(samples))

    def _chunk_of(self, data: SampleBytes, tick_samples: int, first: int, end: int) -> Chunk:
        by_tick = np.arange(first * tick_samples, end * tick_samples)
        counts, ids, num_cut = self._decode(data, by_tick)
        lengths = counts.astype(np.int32).reshape(-1, tick_samples).T
        chunk = Chunk(lengths=lengths, ids=Ragged.of_joined(ids, lengths), num_cut=num_cut)
        if not self.origins:
            return chunk
        zeros = np.zeros(by_tick.size, np.int64)
        ones = np.ones(by_tick.size, np.int64)
        return self._with_documents(chunk, ones, zeros, zeros, data.sample[by_tick])

    def _decode(self, data: SampleBytes, rows: Int64s) -> tuple[Int64s, Int32s, int]:
        """Decode samples, and check the ids of other tools. Ids of blanked documents become BLANK.

        Returns the lengths, int64[samples], all ids, and the number of ids that ``max_length`` cut off.
        """
        lengths, ids = decode_samples(data, rows)
        num_cut = 0
        if self.max_length is not None and lengths.max() > self.max_length:
            kept = np.minimum(lengths, self.max_length)
            num_cut = int((lengths - kept).sum())
            ids = ids[join_ranges(np.zeros_like(lengths), lengths) < np.repeat(kept, lengths)]
            lengths = kept
        if self.shards.blank_id is not None:
            ids[ids == self.shards.blank_id] = BLANK
        if self.vocab_size is not None:
            check_vocab(data, rows, ids, lengths, self.vocab_size)
        return lengths, ids, num_cut

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
            later = np.zeros_like(shard)  # the row and the source are filled in later
            columns = [later, places, later, shard, self.shards.record_numbers(samples, shard), numbers]
        table = np.stack(columns, axis=1).astype(np.int32)
        return replace(chunk, documents=Ragged.of_joined(table, counts.reshape(chunk.lengths.T.shape).T))


@dataclass(frozen=True, kw_only=True)
class PackedRows(Samples):
    """Rows of one length that ``plan`` packed. Ids stay in the reader's buffer until their tick is needed."""

    def _chunk_of(self, data: SampleBytes, tick_samples: int, first: int, end: int) -> Chunk:
        by_tick = np.arange(first * tick_samples, end * tick_samples)
        rows = by_tick.reshape(-1, tick_samples).T
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


@dataclass(frozen=True, kw_only=True)
class JoinedRows(Samples):
    """Rows packed at load time: all documents are joined into one stream of tokens and cut into full rows.

    Row x of S tokens begins at token ``(offset + x S) mod T`` of the stream, which is found from the lengths
    in the idx. Documents that lack an EOS get one. The price: an epoch leaves out T mod S tokens, different
    ones each time, and a worker decodes a whole window at once, at 4 bytes per token.
    """

    eos_token_id: int | None
    keeps_tail: bool = False  # the remaining tokens become a row that is not full

    def __post_init__(self) -> None:
        have_eos = all(part.records is None and part.spec.append_eos for part in self.shards.parts)
        if self.eos_token_id is None and not have_eos:
            found = "shards without EOS after documents, and a tokenizer without EOS"
            raise UsageError(found=found, expected="--append_eos in plan, or a tokenizer with an eos_token")
        if self.num_samples == 0:
            raise UsageError(found=f"seq_len={self.row_tokens}", expected=f"at most {self.num_offsets:,}")

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
        for part, first in zip(self.shards.parts, self.shards.first_of_part, strict=False):
            shards = np.arange(first, first + len(part.num_samples))
            if part.records is None and self.shards.split is None:
                sizes[shards] = part.num_tokens + part.num_samples * (not part.spec.append_eos)
                continue
            for number in shards.tolist():  # 0.1 ms each
                sizes[number] = self._lengths_with_eos(reader, number).sum()
        reader.close()
        return np.concatenate([[0], np.cumsum(sizes)])

    def _lacks_eos(self, number: int, documents: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of some documents of a shard lack an EOS: bool[documents]."""
        part, _ = self.shards.locate(number)
        if part.records is None:
            return np.full(len(documents), not part.spec.append_eos)
        last_id: Int64s = part.records["last_id"][self.shards.record_numbers(documents, number)]
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
        rows, inverse = np.unique(samples, return_inverse=True)
        stream_offsets = (offset + rows * self.row_tokens) % self.num_offsets
        row_begins = np.empty(len(rows), np.int64)  # in the decoded documents
        documents: list[Int64s] = []
        lacks_eos: list[npt.NDArray[np.bool_]] = []
        num_decoded = 0
        # Consecutive rows are one span of the stream. Each process begins with a different span.
        bounds = np.array([0, *(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)])
        for span in reader.opening_order(np.arange(len(bounds) - 1)).tolist():
            first, end = bounds[span : span + 2].tolist()
            token = int(stream_offsets[first])
            num_missing = (end - first) * self.row_tokens
            span_begin = None  # in the decoded documents
            while num_missing:
                number = int(np.searchsorted(self.first_token, token, side="right")) - 1
                begin = token - int(self.first_token[number])
                num_taken = min(num_missing, int(self.first_token[number + 1]) - token)
                ends = self.ends(reader, number)
                low = int(np.searchsorted(ends, begin, side="right")) - 1
                high = int(np.searchsorted(ends, begin + num_taken, side="left"))
                if span_begin is None:  # possibly inside a document
                    span_begin = num_decoded + begin - int(ends[low])
                    row_begins[first:end] = span_begin + np.arange(end - first) * self.row_tokens
                documents.append(np.arange(low, high) + self.shards.first_sample[number])
                lacks_eos.append(self._lacks_eos(number, documents[-1]))
                num_decoded += int(ends[high] - ends[low])
                token = (token + num_taken) % self.num_offsets
                num_missing -= num_taken
        all_documents = np.concatenate(documents)
        num_tokens, ids, _ = self._decode(reader.read(all_documents), np.arange(len(all_documents)))
        lacks = np.concatenate(lacks_eos)
        ends = np.cumsum(num_tokens)
        if lacks.any():
            eos = np.full(len(ends), self.eos_token_id, np.int32)
            if self.shards.blank_id is not None and len(ids):  # the EOS of a blanked document is blank, too
                eos[(num_tokens > 0) & (ids[ends - 1] == BLANK)] = BLANK
            ids = np.insert(ids, ends[lacks], eos[lacks])
            num_tokens += lacks
        starts = np.cumsum(num_tokens) - num_tokens
        has_tokens = num_tokens > 0
        last = self.num_offsets - (self.num_samples - 1) * self.row_tokens  # tokens of the last row
        lengths = np.where(samples == self.num_samples - 1, min(last, self.row_tokens), self.row_tokens)
        row_begins = row_begins[inverse.reshape(samples.shape)]
        lengths = lengths.astype(np.int32)
        starts = starts[has_tokens]
        all_documents = all_documents[has_tokens]

        def window(first: int, end: int) -> Chunk:
            begins = row_begins[:, first:end]
            row_lengths = lengths[:, first:end]
            chunk = Chunk(lengths=row_lengths, ids=Ragged.of_rows(ids, begins, self.row_tokens))
            if not self.starts:
                return chunk
            by_tick = begins.T.reshape(-1)
            low = np.searchsorted(starts, by_tick, side="right") - 1
            counts = np.searchsorted(starts, by_tick + row_lengths.T.reshape(-1)) - low
            taken = join_ranges(low, counts)
            places = (starts[taken] - np.repeat(by_tick, counts)).clip(0)
            return self._with_documents(chunk, counts, places, np.zeros_like(places), all_documents[taken])

        return window


def make_samples(
    shards: ShardSet,
    *,
    seq_len: int | None,
    max_length: int | None,
    group: int,
    eos_token_id: int | None,
    vocab_size: int | None,
    starts: bool,
    keeps_tail: bool,
    origins: bool,
) -> Samples:
    """Choose the kind of samples, if the arguments suit the shards."""
    padded_by = "group_by_length" if group > 1 else ""  # an argument for padded documents only
    if max_length is not None:
        padded_by = f"max_length={max_length}"
    if seq_len is not None and padded_by:
        found = f"seq_len={seq_len}, which packs documents, and {padded_by}, which pads them"
        raise UsageError(found=found, expected="only one of the two")
    row_tokens = shards.row_tokens
    if shards.has_rows and not row_tokens:
        expected = "only documents, or only rows of one length; use a loader for each"
        raise UsageError(found="packed rows mixed with documents or with other rows", expected=expected)
    if row_tokens:
        given = padded_by if seq_len in (None, row_tokens) else f"seq_len={seq_len}"
        if given:
            expected = f"no such argument for packed rows of {row_tokens} tokens; plan others with --seq_len"
            raise UsageError(found=given, expected=expected, remedy="--seq_len")
        return PackedRows(
            shards=shards, row_tokens=row_tokens, vocab_size=vocab_size, starts=starts, origins=origins
        )
    if seq_len is None:
        return Samples(shards=shards, vocab_size=vocab_size, origins=origins, max_length=max_length)
    return JoinedRows(
        shards=shards,
        row_tokens=seq_len,
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
    # A max_length above the mean is ignored here: counting what it cuts would open all shards.
    is_uncut = samples.mean_tokens == shards.mean_tokens
    if samples.row_tokens or (is_uncut and not shards.has_external and shards.split is None):
        return float(samples.mean_tokens)
    num_chosen = min(samples.num_samples, _MOST_COUNTED)
    chosen = np.linspace(0, samples.num_samples - 1, num_chosen).astype(np.int64)
    reader = ShardReader(shards)
    mean = float(samples.num_tokens(reader, chosen).mean())
    reader.close()
    return max(mean, 1.0)
