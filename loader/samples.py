"""What a sample is, and how its bytes become token ids.

A sample is a stored document, a piece of one (``long_documents="split"``), a packed row, a row that is joined
at load (``seq_len``), or a batch of documents (``tokens_per_batch``). ``make_samples`` chooses by the user's
rules; each kind numbers its samples, and its reader gives the windows that a worker asks for.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson

from loader.chunks import Chunk, ScatteredRows
from loader.external_tars import JSON, RAW, parse_npy_header
from loader.find_shards import DatasetShards, ExternalTar, ShardSet
from loader.reading import OpenShard, ReaderContext, SampleBytes, ShardReader
from loader.workers import Samples
from shardprep.errors import BrokenShard, UsageError

DECODE_BYTES = 128 * 1024  # of text at once, so that all arrays stay in the cache
_MAX_DIGITS = 8
_OPEN, _CLOSE, _COMMA, _SPACE, _ZERO = b"[], 0"
_PAD = bytes(8)


# Bytes -> ids. JSON lists are parsed by a few passes of numpy over the text of many samples, without a Python
# object per number: 21 ns per token and 0.2 us per document, where orjson and array take 54 ns and 0.4 us.
# What is not surely a list of small numbers is left to orjson, and to its errors. Packed rows stay where they
# lie.


def parse_id_lists(texts: list[memoryview]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
    """``[1, 22]`` and the like: (numbers in each, int64[len(texts)]; all of them, int32), or None.

    None where a text is anything but digits in one pair of brackets, with commas between; behind all commas
    of the texts stands one space, or behind none.
    """
    joined = b"".join([*texts, _PAD, _PAD])
    text = np.frombuffer(joined, np.uint8)
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if sizes.min() < 2 or not ((text[starts] == _OPEN).all() and (text[ends - 1] == _CLOSE).all()):
        return None
    has_numbers = sizes > 2
    is_behind = text == _COMMA
    is_behind[ends - 1] = has_numbers
    behind = np.flatnonzero(is_behind)  # of each number the byte behind it: a comma, or its list's bracket
    num_commas = len(behind) - np.count_nonzero(has_numbers)
    num_spaces = np.count_nonzero(text.take(behind + 1) == _SPACE)
    if num_spaces not in (0, num_commas):
        return None
    until = np.searchsorted(behind, ends)
    counts = np.diff(until, prepend=0)
    first = np.empty_like(behind)  # of each number its first byte
    np.add(behind[:-1], 2 if num_spaces else 1, out=first[1:])
    first[(until - counts)[has_numbers]] = starts[has_numbers] + 1
    digits = behind - first
    if digits.size and not 1 <= int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS:
        return None
    # Every other byte is known by now, so where all digits are within the numbers nothing else is.
    if np.count_nonzero(text - np.uint8(_ZERO) < 10) != int(digits.sum()):
        return None
    return counts, _numbers(joined, first, digits)


def _numbers(
    joined: bytes, first: npt.NDArray[np.int64], digits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """The numbers that begin at the bytes ``first``; the arrays are used up.

    The eight bytes from a first digit on are one integer, put together of two whole words; what follows the
    number is shifted out of it, and three multiplications add the digits up.
    """
    words = np.frombuffer(joined, "<u8", len(joined) // 8)
    shift = ((first & 7) << 3).view(np.uint64)
    word = first >> 3
    value = words.take(word) >> shift
    word += 1
    rest = words.take(word)
    rest <<= np.subtract(np.uint64(64), shift, out=shift)  # by 64 bits: nothing is left
    value |= rest
    digits -= _MAX_DIGITS
    digits *= -8
    value <<= digits.view(np.uint64)
    value &= np.uint64(0x0F0F0F0F0F0F0F0F)
    for factor, bits, kept in (
        (2561, 8, 0x00FF00FF00FF00FF),
        (6553601, 16, 0x0000FFFF0000FFFF),
        (42949672960001, 32, 0x00000000FFFFFFFF),
    ):
        value *= np.uint64(factor)
        value >>= np.uint64(bits)
        value &= np.uint64(kept)
    return value.astype(np.int32)


class CannotDecode(ValueError):
    """The bytes of a sample are no list of token ids; the message says what they are."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row  # of the SampleBytes


def rows_in_place(data: SampleBytes, rows: npt.NDArray[np.int64], row_tokens: int) -> ScatteredRows:
    """Packed rows of one length where they lie in the buffer, the padding included.

    Those with a loss mask have NO_LABEL in the ids that it leaves out.
    """
    masks: dict[str, Any] = {}
    if (data.mask_at[rows] >= 0).any():
        masks = {"mask": data.buffer, "mask_at": data.mask_at[rows]}
    dtype = np.dtype("<i4" if data.token_bytes[0] == 4 else "<u2")
    start, beside = np.divmod(data.start[rows], dtype.itemsize)
    if beside.any():  # ids at odd bytes: no writer of ours makes them, but an idx could say so
        places = data.start[rows].reshape(-1).tolist()
        flat = [np.frombuffer(data.buffer, dtype, row_tokens, at) for at in places]
        start = np.arange(rows.size).reshape(rows.shape) * row_tokens
        return ScatteredRows(flat=np.concatenate(flat), at=start, row_tokens=row_tokens, **masks)
    ids = data.buffer[: len(data.buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
    return ScatteredRows(flat=ids, at=start, row_tokens=row_tokens, **masks)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Samples of any length, one after another."""

    lengths: npt.NDArray[np.int32]  # int32[samples]
    ids: npt.NDArray[np.int32]  # int32[sum of lengths]
    num_cut: int  # tokens left out behind max_length


def decode_samples(
    data: SampleBytes,
    rows: npt.NDArray[np.int64],
    *,
    max_length: int | None = None,
    end_ids: npt.NDArray[np.int64] | None = None,
) -> Decoded:
    """The samples of some rows of ``data``, at most ``max_length`` tokens of each.

    ``end_ids``: for each, an id to put behind it, or -1 for none. Raises CannotDecode.
    """
    lengths, ids = _whole_samples(data, rows)
    expected = data.num_tokens[rows]
    wrong = np.flatnonzero((lengths != expected) & (expected >= 0))
    if wrong.size:
        found, said = int(lengths[wrong[0]]), int(expected[wrong[0]])
        raise CannotDecode(int(rows[wrong[0]]), f"{found} ids where its idx says {said}")
    num_cut = 0
    if max_length is not None:
        kept = np.minimum(lengths, max_length)
        num_cut = int((lengths - kept).sum())
        if num_cut:
            place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            ids = ids[place < np.repeat(kept, lengths)]
        lengths = kept
    if end_ids is not None:
        ids, lengths = _with_ends(ids, lengths, end_ids.astype(np.int32))
    return Decoded(lengths=lengths.astype(np.int32), ids=ids, num_cut=num_cut)


def decode_parts(data: SampleBytes, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Rows in parts of about DECODE_BYTES of ``data``, in their order."""
    cuts = np.cumsum(data.num_bytes[rows]) // DECODE_BYTES
    return np.split(rows, np.flatnonzero(np.diff(cuts)) + 1)


def _with_ends(
    ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], end_ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Put an id behind each sample whose ``end_ids`` is none of -1."""
    puts = end_ids >= 0
    if not puts.any():
        return ids, lengths
    lengths = lengths + puts
    ended = np.empty(int(lengths.sum()), np.int32)
    is_end = np.zeros(len(ended), np.bool_)
    is_end[(np.cumsum(lengths) - 1)[puts]] = True
    ended[is_end] = end_ids[puts]
    ended[~is_end] = ids
    return ended, lengths


def _whole_samples(
    data: SampleBytes, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """(lengths int64[len(rows)], the ids of all, int32), in parts of DECODE_BYTES."""
    memory = data.buffer.data
    lengths: list[npt.NDArray[np.int64]] = []
    ids: list[npt.NDArray[np.int32]] = []
    for part in decode_parts(data, rows):
        found = None
        if (data.encoding[part] == JSON).all():
            spans = zip(data.start[part].tolist(), data.num_bytes[part].tolist(), strict=True)
            found = parse_id_lists([memory[start : start + size] for start, size in spans])
        counts, numbers = _one_by_one(data, part) if found is None else found
        lengths.append(counts)
        ids.append(numbers)
    return np.concatenate(lengths), np.concatenate(ids)


def _one_by_one(
    data: SampleBytes, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    memory = data.buffer.data
    flat = array("i")
    lengths: list[int] = []
    columns = (data.encoding, data.start, data.num_bytes, data.num_tokens, data.token_bytes)
    for row, encoding, start, num_bytes, num_tokens, token_bytes in zip(
        rows.tolist(), *(column[rows].tolist() for column in columns), strict=True
    ):
        before = len(flat)
        ids: npt.NDArray[np.integer[Any]]
        if encoding == JSON:
            _append_json(flat, memory[start : start + num_bytes], row)
        else:
            if encoding == RAW:
                ids = np.frombuffer(data.buffer, f"<u{token_bytes}", num_tokens, start)
            else:
                ids = _npy_ids(bytes(memory[start : start + num_bytes]), row)
            flat.frombytes(ids.astype(np.int32).tobytes())
        lengths.append(len(flat) - before)
    return np.array(lengths, np.int64), np.frombuffer(flat, np.int32)


def decode_starts(data: SampleBytes, rows: npt.NDArray[np.int64], row_tokens: int) -> npt.NDArray[np.int32]:
    """The places in each packed row, from 0, where a document begins: int32[starts], row after row.

    All rows at once: 5 ns per start, against 2 us per row.
    """
    at = places_of(data.starts_at[rows], data.num_starts[rows], stride=4)
    if (data.starts_at[rows] % 4).any():
        raw = data.buffer[at[:, None] + np.arange(4)]
        starts = raw.view("<u4").reshape(-1)
    else:
        whole = len(data.buffer) // 4 * 4
        starts = data.buffer[:whole].view("<u4")[at // 4]
    return (starts % row_tokens).astype(np.int32)


def places_of(
    begin: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, stride: int = 1
) -> npt.NDArray[np.int64]:
    """``begin[0], begin[0] + stride ...``: all places of some stretches, one after another."""
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    if stride > 1:
        within *= stride
    within += np.repeat(begin - stride * (np.cumsum(lengths) - lengths), lengths)
    return within


def check_vocab(
    ids: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    vocab_size: int,
) -> None:
    """Raises CannotDecode for an id that no embedding of ``vocab_size`` rows has."""
    if not ids.size or 0 <= ids.min() <= ids.max() < vocab_size:
        return
    wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    row = int(rows[np.searchsorted(np.cumsum(lengths), wrong, side="right")])
    raise CannotDecode(
        row,
        f"the id {ids[wrong]}, but the tokenizer has 0 to {vocab_size - 1}; is model_id the model that "
        "made them?",
    )


def _append_json(flat: array[int], raw: memoryview, row: int) -> None:
    try:
        flat.fromlist(orjson.loads(raw))
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise CannotDecode(row, f"no JSON list of token ids ({error}): {bytes(raw[:60])!r}") from None
    if b"e" in bytes(raw):  # of true and false, which an array takes for 1 and 0
        raise CannotDecode(row, f"no JSON list of token ids (it has true or false): {bytes(raw[:60])!r}")


def _npy_ids(raw: bytes, row: int) -> npt.NDArray[np.signedinteger[npt.NBitBase]]:
    """The ids of a one-dimensional .npy of integers, of any width and byte order."""
    header = parse_npy_header(raw)
    if header is None or len(header.shape) != 1:
        raise CannotDecode(row, f"no one-dimensional .npy of integers: {raw[:120]!r}")
    count = header.shape[0]
    if len(raw) != header.num_bytes:
        raise CannotDecode(row, f"{len(raw)} bytes of .npy, its header says {header.num_bytes}")
    ids = np.frombuffer(raw, header.dtype, count, header.data_start)
    if count and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise CannotDecode(row, f"ids from {ids.min()} to {ids.max()}")
    return ids


@contextlib.contextmanager
def _place_named(shards: ShardSet, data: SampleBytes) -> Iterator[None]:
    """Turn a CannotDecode into a BrokenShard that says where the sample lies."""
    try:
        yield
    except CannotDecode as error:
        raise BrokenShard(f"{shards.describe(int(data.sample[error.row]))} holds {error}") from None


def _sums_by_shard(
    shards: ShardSet, context: ReaderContext, count: Callable[[ShardReader, int], int]
) -> npt.NDArray[np.int64]:
    """What is counted before each shard: int64[shards + 1]. Opens every shard: 0.1 ms each, files cached."""
    reader = ShardReader(shards, context)
    counts = np.zeros(shards.num_shards, np.int64)
    for number in reader.opening_order(np.arange(shards.num_shards)).tolist():
        counts[number] = count(reader, number)
    reader.close()
    return np.concatenate([[0], np.cumsum(counts)])


class DocumentPieces:
    """Numbers the pieces through all shards, in order; an empty document is one empty piece.

    Making it opens every shard for its idx.
    """

    def __init__(self, shards: ShardSet, max_length: int, context: ReaderContext) -> None:
        self.max_length = max_length
        self._shards = shards
        self.first_piece = _sums_by_shard(shards, context, lambda *which: int(self._ends(*which)[-1]))

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
    offsets = 1

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

    def lengths_of(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Tokens of each sample of a shard: int64[samples]."""
        if self.pieces is not None:
            return self.pieces.lengths_of(reader, number)
        lengths = reader.num_tokens_of(number).astype(np.int64)
        return lengths if self.max_length is None else lengths.clip(max=self.max_length)

    @property
    def first_samples(self) -> npt.NDArray[np.int64]:
        """int64[shards + 1]: the samples before each shard."""
        return self.shards.first_sample if self.pieces is None else self.pieces.first_piece

    def decode(
        self, data: SampleBytes, rows: npt.NDArray[np.int64], max_length: int | None = None
    ) -> Decoded:
        """Documents, cut at a length; their ids are checked where others made them. Raises BrokenShard."""
        with _place_named(self.shards, data):
            found = decode_samples(data, rows, max_length=max_length)
            if self.vocab_size is not None:
                check_vocab(found.ids, found.lengths, rows, self.vocab_size)
        return found

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
            found = self._samples.decode(data, part)
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
        found = self.samples.decode(self.data, flat, max_length=self.samples.max_length)
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
            full = np.full(len(rows), row_tokens, np.int32)
            with _place_named(self.samples.shards, self.data):
                for step, of_step in enumerate(rows.T):
                    check_vocab(stored[:, step].reshape(-1), full, of_step, self.samples.vocab_size)
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


_NONE = -1  # no EOS is put


@dataclass(frozen=True)
class JoinedRows:
    """Packing at load: all documents are joined to one stream of tokens, which is cut into full rows.

    Row x is tokens ``[(offset + x S) mod T, + S)`` of the stream, found through the sums of the idx. Nothing
    is laid out beforehand, and any row can be read. An epoch leaves out T mod S tokens, others each epoch;
    documents are cut at the edges of rows. An EOS is put behind documents that lack it, and counts: in our
    shards all or none, as they were prepared; in external tars each document whose last id is not EOS.

    A worker decodes a whole window at once, each document once (twice at the edge of a block), so its memory
    is the bytes of the window and 4 bytes per token, and the first row of a window waits for all of it.
    """

    shards: ShardSet
    seq_len: int
    eos_token_id: int | None
    starts: bool = False
    vocab_size: int | None = None
    keeps_tail: bool = False  # the tokens that fill no row are a row that is not full
    context: ReaderContext = ReaderContext()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.eos_token_id is None and any(self.lacks_eos(source).any() for source in self.shards.sources):
            raise UsageError(
                "the shards have no EOS behind documents, and the tokenizer has none to put; prepare them "
                "with --append_eos, or set the tokenizer's eos_token"
            )
        if self.num_samples == 0:
            raise UsageError(
                f"{self.offsets:,} tokens make no row of seq_len={self.seq_len}; lower it, or add data"
            )

    @cached_property
    def first_token(self) -> npt.NDArray[np.int64]:
        """int64[shards + 1]: where each shard begins in the stream."""
        if self.shards.split is not None:
            return _sums_by_shard(  # of one side of a split only the idx tells the tokens
                self.shards,
                self.context,
                lambda reader, number: int(reader.num_tokens_of(number).sum() + self.puts_eos(number).sum()),
            )
        sizes = []
        for source in self.shards.sources:
            lacks = self.lacks_eos(source)
            num_eos = lacks.sum() if isinstance(source, ExternalTar) else source.num_samples * lacks
            sizes.append(source.num_tokens + num_eos)
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def puts_eos(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether an EOS is put behind each document of a shard: bool[documents]."""
        first, end = self.shards.first_sample[number : number + 2].tolist()
        source, _ = self.shards.locate(number)
        lacks = self.lacks_eos(source)
        if len(lacks) == 1:
            return np.repeat(lacks, end - first)
        return lacks[self.shards.rows_of(number, np.arange(first, end))]

    @property
    def row_tokens(self) -> int:
        return self.seq_len

    @property
    def num_samples(self) -> int:
        return -(-self.offsets // self.seq_len) if self.keeps_tail else self.offsets // self.seq_len

    @property
    def mean_tokens(self) -> float:
        return float(self.seq_len)

    @property
    def offsets(self) -> int:
        """T: tokens of the stream; an epoch's rows begin at any of them."""
        return int(self.first_token[-1])

    def lacks_eos(self, source: DatasetShards | ExternalTar) -> npt.NDArray[np.bool_]:
        """Whether documents end without EOS: bool[documents] of an external tar, else bool[1] for all."""
        if isinstance(source, DatasetShards):
            return np.array([not source.spec.append_eos])
        if self.eos_token_id is None:
            return np.ones(len(source.samples.last_id), np.bool_)
        return np.not_equal(source.samples.last_id, self.eos_token_id)

    def open(self) -> RowReader:
        return RowReader(self)

    def stream_place(self, reader: ShardReader, document: int) -> tuple[int, int]:
        """The tokens of the stream that a document is, without an EOS that is put behind it: [begin, end)."""
        number = int(self.shards.shard_of(np.array(document)))
        local = document - int(self.shards.first_sample[number])
        begin = int(self.first_token[number]) + int(self.ends_of(reader, number)[local])
        return begin, begin + int(reader.num_tokens_of(number)[local])

    def documents_of(self, reader: ShardReader, row: int, offset: int) -> list[tuple[int, int, int]]:
        """The documents of a row, for an epoch's offset: (document, first token of it, number of tokens)."""
        begin, left = (offset + row * self.seq_len) % self.offsets, self.seq_len
        found: list[tuple[int, int, int]] = []
        while left > 0:
            number = int(np.searchsorted(self.first_token, begin, side="right")) - 1
            ends = self.ends_of(reader, number)
            local = begin - int(self.first_token[number])
            document = int(np.searchsorted(ends, local, side="right")) - 1
            taken = min(left, int(ends[document + 1]) - local)
            held = int(reader.num_tokens_of(number)[document])
            first = local - int(ends[document])
            if first < held:
                sample = int(self.shards.first_sample[number]) + document
                found.append((sample, first, min(taken, held - first)))
            begin, left = (begin + taken) % self.offsets, left - taken
        return found

    def ends_of(self, reader: ShardReader, number: int) -> npt.NDArray[np.int64]:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]. Raises BrokenShard."""
        shard: OpenShard = reader.opened(number)
        if "stream" not in shard.sums:
            puts = self.puts_eos(number)
            ends = np.concatenate([[0], np.cumsum(reader.num_tokens_of(number) + puts)])
            expected = int(self.first_token[number + 1] - self.first_token[number])
            if int(ends[-1]) != expected:
                raise BrokenShard(
                    f"{shard.path}: its idx counts {int(ends[-1])} tokens, its manifest {expected}; "
                    f"{shard.remedy}"
                )
            shard.sums["stream"] = ends
            shard.sums["end_ids"] = np.where(puts, int(self.eos_token_id or 0), _NONE)
        return shard.sums["stream"]


class RowReader:
    """A WindowReader of JoinedRows."""

    def __init__(self, rows: JoinedRows) -> None:
        self._rows = rows
        self._reader = ShardReader(rows.shards, rows.context)

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(samples.shape, self._rows.seq_len, np.int64)

    def close(self) -> None:
        self._reader.close()

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> RowWindow:
        seq_len = self._rows.seq_len
        rows, inverse = np.unique(samples, return_inverse=True)
        at = np.empty(len(rows), np.int64)  # where each row begins in the decoded documents
        documents: list[npt.NDArray[np.int64]] = []
        end_ids: list[npt.NDArray[np.int64]] = []
        decoded = 0
        cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
        for first, end in self._in_opening_order(rows, offset, list(pairwise([0, *cuts, len(rows)]))):
            begin = offset + int(rows[first]) * seq_len
            skipped, held = self._join(begin, (end - first) * seq_len, documents, end_ids)
            at[first:end] = decoded + skipped + np.arange(end - first) * seq_len
            decoded += held
        ids, starts = self._decoded(np.concatenate(documents), np.concatenate(end_ids), decoded)
        at = at[inverse.reshape(samples.shape)]
        last = self._rows.offsets - (self._rows.num_samples - 1) * seq_len  # tokens of the last row
        return RowWindow(
            ids=ids,
            at=at,
            lengths=np.where(samples == self._rows.num_samples - 1, min(last, seq_len), seq_len).astype(
                np.int32
            ),
            seq_len=seq_len,
            starts=starts if self._rows.starts else None,
        )

    def _in_opening_order(
        self, rows: npt.NDArray[np.int64], offset: int, parts: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Parts of the rows, those first that begin in shards which this process opens first."""
        begins = (offset + rows[[first for first, _ in parts]] * self._rows.seq_len) % self._rows.offsets
        shards = np.searchsorted(self._rows.first_token, begins, side="right") - 1
        order = self._reader.opening_order(np.unique(shards)).tolist()
        place = {shard: number for number, shard in enumerate(order)}
        keys = [place[shard] for shard in shards.tolist()]
        return [parts[number] for number in np.argsort(keys, kind="stable").tolist()]

    def _join(
        self,
        begin: int,
        size: int,
        documents: list[npt.NDArray[np.int64]],
        end_ids: list[npt.NDArray[np.int64]],
    ) -> tuple[int, int]:
        """Append the documents of a part of the stream; tokens skipped of the first, and tokens of all."""
        edges, skipped, held = self._rows.first_token, -1, 0
        while size > 0:
            begin %= self._rows.offsets
            number = int(np.searchsorted(edges, begin, side="right")) - 1
            taken = min(size, int(edges[number + 1]) - begin)
            local = begin - int(edges[number])
            ends = self._rows.ends_of(self._reader, number)
            puts = self._reader.opened(number).sums["end_ids"]
            first = int(np.searchsorted(ends, local, side="right")) - 1
            last = int(np.searchsorted(ends, local + taken, side="left"))
            documents.append(np.arange(first, last) + self._rows.shards.first_sample[number])
            end_ids.append(puts[first:last])
            skipped = local - int(ends[first]) if skipped < 0 else skipped
            held += int(ends[last] - ends[first])
            begin, size = begin + taken, size - taken
        return skipped, held

    def _decoded(
        self, documents: npt.NDArray[np.int64], end_ids: npt.NDArray[np.int64], expected: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The ids of documents one after another, and where each begins."""
        data = self._reader.read(documents)
        every = np.arange(len(documents))
        with _place_named(self._rows.shards, data):
            found = decode_samples(data, every, end_ids=end_ids)
            if self._rows.vocab_size is not None:
                check_vocab(found.ids, found.lengths, every, self._rows.vocab_size)
        if len(found.ids) != expected:
            where = self._rows.shards.describe(int(documents[0]))
            raise BrokenShard(f"{where} and on: {len(found.ids)} tokens, expected {expected}")
        starts = np.cumsum(found.lengths, dtype=np.int64) - found.lengths
        return found.ids, starts[found.lengths > 0]


@dataclass(frozen=True, kw_only=True)
class RowWindow:
    """A Window of rows cut from decoded documents."""

    ids: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]  # int64[samples per step, steps]: where each row begins in ids
    lengths: npt.NDArray[np.int32]  # int32[samples per step, steps]: tokens of each
    seq_len: int
    starts: npt.NDArray[np.int64] | None  # where documents begin in ids, ascending

    def chunk(self, first: int, end: int) -> Chunk:
        at = self.at[:, first:end]
        flat = at.reshape(-1)
        ids = ScatteredRows(flat=self.ids, at=at, row_tokens=self.seq_len)
        lengths = self.lengths[:, first:end]
        if self.starts is None:
            return Chunk(lengths=lengths, ids=ids, row_tokens=self.seq_len)
        low = np.searchsorted(self.starts, flat)
        high = np.searchsorted(self.starts, flat + self.seq_len)
        num_starts = high - low
        starts = self.starts[places_of(low, num_starts)] - np.repeat(flat, num_starts)
        return Chunk(
            lengths=lengths,
            ids=ids,
            row_tokens=self.seq_len,
            num_starts=num_starts.astype(np.int32).reshape(at.shape),
            starts=starts.astype(np.int32),
        )


BIN_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Samples that are batches of whole documents of like length, as many as the places of a batch hold.

    The order shuffles batches and shares them out as it does documents. Which documents make a batch follows
    from the lengths in the idx alone: those of a shard are cut into bins of BIN_BATCHES batches' tokens, a
    bin is sorted by length, the longest first, and cut where another document would not fit.

    The price: documents share their batch in every epoch, all of one batch are of one bin, and the last batch
    of a bin is seldom full. A loader reads all idx when it is made: about 1 us a document, files cached.
    Raises UsageError.
    """

    documents: WholeSamples
    tokens_per_batch: int
    multiple: int = 1  # widths of batches
    num_beyond: int = 0  # tokens of a document that are no place of a batch
    offsets = 1
    row_tokens = 0

    def __post_init__(self) -> None:
        self.first_batch  # noqa: B018  computed now, so that an error comes now

    @cached_property
    def first_batch(self) -> npt.NDArray[np.int64]:
        """int64[shards + 1]: the batches before each shard."""
        documents = self.documents
        return _sums_by_shard(
            documents.shards, documents.context, lambda *which: len(self.batch_ends(*which)) - 1
        )

    @property
    def num_samples(self) -> int:
        return int(self.first_batch[-1])

    @property
    def mean_tokens(self) -> float:
        return self.documents.mean_tokens * self.documents.num_samples / max(self.num_samples, 1)

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
        if len(widths) and int(widths.max()) > self.tokens_per_batch:
            longest = int(widths.argmax())
            where = self.documents.shards.describe(int(self.documents.first_samples[number]) + longest)
            raise UsageError(
                f"{where} has {int(lengths[longest]):,} tokens, more than a batch of tokens_per_batch="
                f"{self.tokens_per_batch:,} holds; pass max_length, with long_documents='split' to keep all"
            )
        before = np.cumsum(widths) - widths
        bins = before // (BIN_BATCHES * self.tokens_per_batch)
        longest_first = np.lexsort((-widths, bins))
        bounds = [*np.flatnonzero(np.diff(bins, prepend=-1)).tolist(), len(bins)]
        descending, ends = widths[longest_first].tolist(), [0]
        for begin, end in pairwise(bounds):
            at = begin
            while at < end:
                at = min(at + self.tokens_per_batch // descending[at], end)
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
            documents[places] += self._batches.documents.first_samples[number]
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


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """What one sample is; the names are arguments of ``get_llama3_dataloader``. Raises UsageError."""

    seq_len: int | None = None
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    group: int = 1  # samples of like length side by side
    tokens_per_batch: int | None = None  # places of a batch of as many documents as fit
    batch_multiple: int = 1  # of the width of such a batch
    num_beyond: int = 0  # tokens of a document that are no place of a batch

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_length", "tokens_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        if self.long_documents not in get_args(LongDocuments):
            raise UsageError(
                f"long_documents is {self.long_documents!r}, expected {' or '.join(get_args(LongDocuments))}"
            )
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out"
            )
        if self.tokens_per_batch is not None and (self.seq_len is not None or self.group > 1):
            raise UsageError(
                f"tokens_per_batch={self.tokens_per_batch} makes batches of whole documents of like length; "
                "seq_len, which packs them, and group_by_length have no meaning beside it: leave them out"
            )

    @property
    def settings(self) -> dict[str, int]:
        """What fixes which documents make a batch, as a state has it."""
        if self.tokens_per_batch is None:
            return {}
        return {
            "batch_tokens": self.tokens_per_batch,
            "pad_to_multiple_of": self.batch_multiple,
            "num_beyond": self.num_beyond,
        }

    @property
    def needs_lengths(self) -> bool:
        """Whether the lengths of all documents must be known before the first batch."""
        is_whole = self.seq_len is None and self.group == 1 and self.tokens_per_batch is None
        return not is_whole or self.long_documents == "split"


def make_samples(
    shards: ShardSet,
    rules: SampleRules,
    *,
    eos_token_id: int | None,
    vocab_size: int | None = None,
    starts: bool = False,
    keeps_tail: bool = False,
    context: ReaderContext = ReaderContext(),  # noqa: B008  frozen
) -> Samples:
    """The samples of some shards.

    ``vocab_size``: ids are checked against it where it is given. ``starts``: whether to say where documents
    begin in packed rows. ``keeps_tail``: rows packed at load end with one that is not full. Raises UsageError
    where the rules do not fit what the shards hold.
    """
    _check_rows(rules, shards, starts)
    shared: dict[str, Any] = {
        "shards": shards, "starts": starts, "vocab_size": vocab_size, "context": context
    }  # fmt: skip
    if rules.seq_len is not None and not shards.row_tokens:
        return JoinedRows(seq_len=rules.seq_len, eos_token_id=eos_token_id, keeps_tail=keeps_tail, **shared)
    splits = rules.long_documents == "split" and rules.max_length is not None
    documents = WholeSamples(
        max_length=rules.max_length,
        pieces=DocumentPieces(shards, int(rules.max_length or 0), context) if splits else None,
        refuse_longer=rules.long_documents == "error",
        **shared,
    )
    if rules.tokens_per_batch is None:
        return documents
    return TokenBatches(
        documents=documents,
        tokens_per_batch=rules.tokens_per_batch,
        multiple=rules.batch_multiple,
        num_beyond=rules.num_beyond,
    )


def _check_rows(rules: SampleRules, shards: ShardSet, starts: bool) -> None:
    if not shards.has_rows:
        return
    rows = f"packed rows of {shards.row_tokens} tokens" if shards.row_tokens else "some packed rows"
    if rules.tokens_per_batch is not None:
        raise UsageError(
            f"tokens_per_batch={rules.tokens_per_batch} is for documents; these are {rows}, each as long as "
            "the others: pass batch_size"
        )
    if rules.max_length is not None or rules.group > 1:
        raise UsageError(
            f"max_length={rules.max_length} and group_by_length are for documents; these are {rows}: "
            "prepare them with another --seq_len"
        )
    if rules.seq_len is not None and rules.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={rules.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len"
        )
    if starts and not shards.row_tokens:
        raise UsageError("boundaries are for rows of one length; load documents and packed rows apart")
