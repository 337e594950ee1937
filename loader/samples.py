"""What a sample is, and how its bytes become token ids.

A sample is a stored document, a packed row, or a row that is joined at load (``seq_len``). ``make_samples``
chooses by the user's rules; each kind numbers its samples, and reads the windows that a worker asks for.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from loader.chunks import ORIGIN, Chunk, Parts, ScatteredRows, with_origins
from loader.external_tars import JSON, RAW, parse_npy_header
from loader.find_shards import DatasetShards, ExternalTar, ShardSet, check_choice
from loader.order import Int32s, Int64s
from loader.reading import ReaderContext, SampleBytes, ShardReader
from shardprep.errors import BrokenShard, UsageError
from shardprep.format.dataset_spec import BLANK

DECODE_BYTES = 128 * 1024  # of text at once, so that all arrays stay in the cache
_MAX_DIGITS = 8
_OPEN, _CLOSE, _COMMA, _SPACE, _ZERO = b"[], 0"
_PAD = bytes(8)


# Bytes -> ids. JSON lists are parsed by a few passes of numpy over the text of many samples, without a Python
# object per number: 21 ns per token and 0.2 us per document, where orjson and array take 54 ns and 0.4 us.
# What is not surely a list of small numbers is left to orjson, and to its errors. Packed rows stay where they
# lie.


def parse_id_lists(texts: list[memoryview]) -> tuple[Int64s, Int32s] | None:
    """``[1, 22]`` and the like: (numbers in each, int64[len(texts)]; all of them, int32). None where a text
    is anything but that; behind all commas of the texts stands one space, or behind none."""
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


def _numbers(joined: bytes, first: Int64s, digits: Int64s) -> Int32s:
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


def rows_in_place(data: SampleBytes, rows: Int64s, row_tokens: int) -> ScatteredRows:
    """Packed rows of one length where they lie in the buffer, the padding included. Those with a loss mask
    have NO_LABEL in the ids that it leaves out."""
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


class Decoded(NamedTuple):
    """Samples of any length, one after another."""

    lengths: Int32s  # int32[samples]
    ids: Int32s  # int32[sum of lengths]
    num_cut: int  # tokens left out behind max_length


def decode_samples(
    data: SampleBytes, rows: Int64s, *, max_length: int | None = None, end_ids: Int64s | None = None
) -> Decoded:
    """The samples of some rows of ``data``, at most ``max_length`` tokens of each. ``end_ids``: for each, an
    id to put behind it, or -1 for none. Raises CannotDecode."""
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


def decode_parts(data: SampleBytes, rows: Int64s) -> list[Int64s]:
    """Rows in parts of about DECODE_BYTES of ``data``, in their order."""
    cuts = np.cumsum(data.num_bytes[rows]) // DECODE_BYTES
    return np.split(rows, np.flatnonzero(np.diff(cuts)) + 1)


def _with_ends(ids: Int32s, lengths: Int64s, end_ids: Int32s) -> tuple[Int32s, Int64s]:
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


def _whole_samples(data: SampleBytes, rows: Int64s) -> tuple[Int64s, Int32s]:
    """(lengths int64[len(rows)], the ids of all, int32), in parts of DECODE_BYTES."""
    memory = data.buffer.data
    lengths: list[Int64s] = []
    ids: list[Int32s] = []
    for part in decode_parts(data, rows):
        found = None
        if (data.encoding[part] == JSON).all():
            spans = zip(data.start[part].tolist(), data.num_bytes[part].tolist(), strict=True)
            found = parse_id_lists([memory[start : start + size] for start, size in spans])
        counts, numbers = _one_by_one(data, part) if found is None else found
        lengths.append(counts)
        ids.append(numbers)
    return np.concatenate(lengths), np.concatenate(ids)


def _one_by_one(data: SampleBytes, rows: Int64s) -> tuple[Int64s, Int32s]:
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


def places_of(begin: Int64s, lengths: Int64s, *, stride: int = 1) -> Int64s:
    """Return ``begin[0], begin[0] + stride ...``: all places of some stretches, one after another."""
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    if stride > 1:
        within *= stride
    within += np.repeat(begin - stride * (np.cumsum(lengths) - lengths), lengths)
    return within


def decode_starts(data: SampleBytes, rows: Int64s, row_tokens: int) -> Int32s:
    """The places in each packed row, from 0, where a document begins: int32[starts], row after row. All rows
    at once: 5 ns per start, against 2 us per row."""
    at = places_of(data.starts_at[rows], data.num_starts[rows], stride=4)
    if (data.starts_at[rows] % 4).any():
        raw = data.buffer[at[:, None] + np.arange(4)]
        starts = raw.view("<u4").reshape(-1)
    else:
        whole = len(data.buffer) // 4 * 4
        starts = data.buffer[:whole].view("<u4")[at // 4]
    return (starts % row_tokens).astype(np.int32)


def check_vocab(ids: npt.NDArray[np.integer[Any]], lengths: Int32s, rows: Int64s, vocab_size: int) -> None:
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
        raise BrokenShard(
            f"{shards.describe(sample := int(data.sample[error.row]))} holds {error}",
            path=shards.path_of(sample),
        ) from None


Window = Callable[[int, int], Chunk]  # decodes the steps from one up to another of the samples that were read


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a sample is. A process opens a reader once, and gives it with each question."""

    shards: ShardSet
    vocab_size: int | None = None  # checked where it is given: ids that others made
    context: ReaderContext = ReaderContext()  # noqa: RUF009  frozen
    origins: bool = False  # whether chunks say where each document comes from

    @property
    def row_tokens(self) -> int:
        """Of every sample where all are rows, else 0."""
        return 0

    @property
    def offsets(self) -> int:
        """An epoch draws a number below this, and gives it to ``read``."""
        return 1

    @property
    def num_samples(self) -> int:
        raise NotImplementedError

    @property
    def mean_tokens(self) -> float:
        """Of a sample, roughly."""
        raise NotImplementedError

    def open(self) -> ShardReader:
        return ShardReader(self.shards, self.context)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        """Lengths by the idx alone, int64[n]; of the samples int64[n]."""
        raise NotImplementedError

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        """Read samples, int64[samples per step, steps]; the window ends with the reader's next ``read``."""
        raise NotImplementedError

    def decode(
        self, data: SampleBytes, rows: Int64s, max_length: int | None = None, end_ids: Int64s | None = None
    ) -> Decoded:
        """Decode samples, with ids that others made checked; those of blanked documents are BLANK, and so
        is an EOS that is put behind one. Raises BrokenShard."""
        with _place_named(self.shards, data):
            found = decode_samples(data, rows, max_length=max_length, end_ids=end_ids)
            if (blank := self.shards.blank_id) is not None:
                found.ids[found.ids == blank] = BLANK
                if end_ids is not None:
                    last = (np.cumsum(found.lengths, dtype=np.int64) - 1)[
                        (end_ids >= 0) & (found.lengths > 1)
                    ]
                    found.ids[last[found.ids[last - 1] == BLANK]] = BLANK
            if self.vocab_size is not None:
                check_vocab(self._without_blanks(found.ids), found.lengths, rows, self.vocab_size)
        return found

    def _without_blanks(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        return ids if self.shards.blank_id is None else np.where(ids == BLANK, 0, ids)

    def _origins(self, samples: Int64s) -> Int32s:
        """int32[samples, ORIGIN] of the first document of each, at place 0; row and source come later."""
        stored, first = self.shards.stored(samples), self.shards.first_record
        shard = np.searchsorted(first, stored, side="right") - 1
        found = np.zeros((len(samples), len(ORIGIN)), np.int32)
        found[:, 3], found[:, 4] = shard, stored - first[shard]
        return found

    def _sums(self, count: Callable[[ShardReader, int], int]) -> Int64s:
        """What is counted before each shard: int64[shards + 1]. Opens each one: 0.1 ms, files cached."""
        reader = self.open()
        counts = np.zeros(self.shards.num_shards, np.int64)
        for number in reader.opening_order(np.arange(len(counts))).tolist():
            counts[number] = count(reader, number)
        reader.close()
        return np.concatenate([[0], np.cumsum(counts)])


LongDocuments = Literal["truncate", "error"]


@dataclass(frozen=True, kw_only=True)
class WholeSamples(Samples):
    """Documents or packed rows, one per sample. They are decoded when their chunk is asked for."""

    max_length: int | None = None
    refuse_longer: bool = False
    starts: bool = False  # of documents in packed rows

    @cached_property
    def row_tokens(self) -> int:
        return self.shards.row_tokens

    @property
    def num_samples(self) -> int:
        return int(self.shards.first_sample[-1])

    @property
    def mean_tokens(self) -> float:
        mean = self.shards.mean_tokens
        return mean if self.max_length is None else min(mean, self.max_length)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        lengths = reader.num_tokens(samples)
        return lengths if self.max_length is None else lengths.clip(max=self.max_length)

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:  # noqa: ARG002
        rows = np.arange(samples.size).reshape(samples.shape)
        data = reader.read(samples.reshape(-1), starts=(self.starts or self.origins) and self.row_tokens > 0)
        return partial(self._rows_chunk if self.row_tokens else self._documents_chunk, data, rows)

    def _documents_chunk(self, data: SampleBytes, rows: Int64s, first: int, end: int) -> Chunk:
        steps = rows[:, first:end].T
        found = self.decode(data, steps.reshape(-1), self.max_length)
        if found.num_cut and self.refuse_longer:
            self._refuse(data, steps.reshape(-1))
        chunk = Chunk(lengths=found.lengths.reshape(steps.shape).T, ids=found.ids, num_cut=found.num_cut)
        if not self.origins:
            return chunk
        ones = np.ones(chunk.lengths.shape, np.int32)
        return with_origins(chunk, ones, self._origins(data.sample[steps.reshape(-1)]))

    def _rows_chunk(self, data: SampleBytes, rows: Int64s, first: int, end: int) -> Chunk:
        rows = rows[:, first:end]
        ids = rows_in_place(data, rows, self.row_tokens)
        if (blank := self.shards.blank_id) is not None:
            ids = replace(ids, blank_id=blank)
        if self.vocab_size is not None:
            stored = replace(ids, mask=None)
            full = np.full(len(rows), self.row_tokens, np.int32)
            with _place_named(self.shards, data):
                for step, of_step in enumerate(rows.T):
                    of_rows = self._without_blanks(stored[:, step].reshape(-1))
                    check_vocab(of_rows, full, of_step, self.vocab_size)
        chunk = Chunk(lengths=data.num_tokens[rows].astype(np.int32), ids=ids, row_tokens=self.row_tokens)
        if not (self.starts or self.origins):
            return chunk
        steps = rows.T.reshape(-1)
        starts = decode_starts(data, steps, self.row_tokens)
        if self.starts:
            num_starts = data.num_starts[rows].astype(np.int32)
            chunk = replace(chunk, starts=Parts(counts=num_starts, flat=starts))
        if not self.origins:
            return chunk
        counts, places, numbers = _document_places(starts, data.num_starts[steps])
        origins = np.repeat(self._origins(data.sample[steps]), counts, axis=0)
        origins[:, 1], origins[:, 5] = places, numbers
        return with_origins(chunk, counts.reshape(rows.T.shape).T, origins)

    def _refuse(self, data: SampleBytes, rows: Int64s) -> None:
        lengths = decode_samples(data, rows).lengths
        longer = int(np.flatnonzero(lengths > (self.max_length or 0))[0])
        raise BrokenShard(
            f"{self.shards.describe(int(data.sample[rows[longer]]))} holds {int(lengths[longer]):,} tokens, "
            f"more than max_length={self.max_length}; "
            'long_documents="truncate" would keep the beginning, and seq_len= all in packed rows'
        )


def _document_places(starts: Int32s, num_starts: Int64s) -> tuple[Int64s, Int32s, Int64s]:
    """Documents of packed rows: how many each row has, where each begins, and its number in the row. One that
    goes on from another row is at 0."""
    first = np.cumsum(num_starts) - num_starts
    goes_on = np.ones(len(num_starts), np.bool_)
    has = num_starts > 0
    goes_on[has] = starts[first[has]] > 0
    counts = num_starts + goes_on
    return counts, np.insert(starts, first[goes_on], 0), places_of(np.zeros_like(counts), counts)


@dataclass(frozen=True, kw_only=True)
class JoinedRows(Samples):
    """Packing at load: all documents are joined to one stream of tokens, which is cut into full rows.

    Row x is tokens ``[(offset + x S) mod T, + S)`` of the stream, found through the sums of the idx. An EOS
    is put behind documents that lack it, and counts. The price: an epoch leaves out T mod S tokens, others
    each epoch, and a worker decodes a whole window at once: 4 bytes per token.
    """

    seq_len: int
    eos_token_id: int | None
    starts: bool = False
    keeps_tail: bool = False  # the tokens that fill no row are a row that is not full

    def __post_init__(self) -> None:
        if self.eos_token_id is None and any(self._lacks_eos(source).any() for source in self.shards.sources):
            raise UsageError(
                "the shards have no EOS behind documents, and the tokenizer has none to put; prepare them "
                "with --append_eos, or set the tokenizer's eos_token"
            )
        if self.num_samples == 0:
            raise UsageError(
                f"{self.offsets:,} tokens make no row of seq_len={self.seq_len}; lower it, or add data",
                found=f"seq_len={self.seq_len}",
                expected=f"{self.offsets:,} tokens",
            )

    @cached_property
    def first_token(self) -> Int64s:
        """int64[shards + 1]: where each shard begins in the stream."""
        if self.shards.split is not None:  # of one side of a split only the idx tells the tokens
            return self._sums(
                lambda reader, number: int(reader.num_tokens_of(number).sum() + self._puts_eos(number).sum())
            )
        sizes = []
        for source in self.shards.sources:
            lacks = self._lacks_eos(source)
            num_eos = lacks.sum() if isinstance(source, ExternalTar) else source.num_samples * lacks
            sizes.append(source.num_tokens + num_eos)
        return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def _lacks_eos(self, source: DatasetShards | ExternalTar) -> npt.NDArray[np.bool_]:
        """Whether documents end without EOS: bool[documents] of an external tar, else bool[1] for all."""
        if isinstance(source, DatasetShards):
            return np.array([not source.spec.append_eos])
        if self.eos_token_id is None:
            return np.ones(len(source.samples.last_id), np.bool_)
        return np.not_equal(source.samples.last_id, self.eos_token_id)

    def _puts_eos(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether an EOS is put behind each document of a shard: bool[documents]."""
        first, end = self.shards.first_sample[number : number + 2].tolist()
        lacks = self._lacks_eos(self.shards.locate(number)[0])
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

    def num_tokens(self, _: ShardReader, samples: Int64s) -> Int64s:
        return np.full(samples.shape, self.seq_len, np.int64)

    def _stretches(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """A part of the stream shard by shard: the shard, and the first token and the end in it."""
        while size > 0:
            begin %= self.offsets
            number = int(np.searchsorted(self.first_token, begin, side="right")) - 1
            taken = min(size, int(self.first_token[number + 1]) - begin)
            local = begin - int(self.first_token[number])
            yield number, local, local + taken
            begin, size = begin + taken, size - taken

    def _ends(self, reader: ShardReader, number: int) -> Int64s:
        """Sums of a shard's tokens from 0, EOS included: int64[documents + 1]. Raises BrokenShard."""
        shard = reader.opened(number)
        if "stream" not in shard.sums:
            puts = self._puts_eos(number)
            ends = np.concatenate([[0], np.cumsum(reader.num_tokens_of(number) + puts)])
            expected = int(self.first_token[number + 1] - self.first_token[number])
            if int(ends[-1]) != expected:
                raise BrokenShard(
                    f"{shard.tar.path}: its idx counts {int(ends[-1])} tokens, its manifest {expected}; "
                    f"{shard.remedy}"
                )
            shard.sums["stream"] = ends
            shard.sums["end_ids"] = np.where(puts, int(self.eos_token_id or 0), -1)
        return shard.sums["stream"]

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        rows, inverse = np.unique(samples, return_inverse=True)
        begins = offset + rows * self.seq_len
        at = np.empty(len(rows), np.int64)  # where each row begins in the decoded documents
        documents: list[Int64s] = []
        end_ids: list[Int64s] = []
        decoded = 0
        for first, end in self._runs(reader, rows, begins):
            at[first:end] = begins[first:end] - begins[first] + decoded
            for place, (number, *part) in enumerate(
                self._stretches(int(begins[first]), (end - first) * self.seq_len)
            ):
                ends = self._ends(reader, number)
                of_part = slice(*_documents_in(ends, *part))
                documents.append(np.arange(of_part.start, of_part.stop) + self.shards.first_sample[number])
                end_ids.append(reader.opened(number).sums["end_ids"][of_part])
                if not place:
                    at[first:end] += part[0] - ends[of_part.start]
                decoded += int(ends[of_part.stop] - ends[of_part.start])
        asked = np.concatenate(documents)
        found = self.decode(reader.read(asked), np.arange(len(asked)), end_ids=np.concatenate(end_ids))
        if len(found.ids) != decoded:
            where = self.shards.describe(int(asked[0]))
            raise BrokenShard(f"{where} and on: {len(found.ids)} tokens, expected {decoded}")
        starts = np.cumsum(found.lengths, dtype=np.int64) - found.lengths
        has_tokens = found.lengths > 0
        last = self.offsets - (self.num_samples - 1) * self.seq_len  # tokens of the last row
        lengths = np.where(samples == self.num_samples - 1, min(last, self.seq_len), self.seq_len)
        places = at[inverse.reshape(samples.shape)]
        return partial(
            self._chunk,
            found.ids,
            places,
            lengths.astype(np.int32),
            starts[has_tokens],
            asked[has_tokens],
        )

    def _runs(self, reader: ShardReader, rows: Int64s, begins: Int64s) -> list[tuple[int, int]]:
        """Consecutive rows, those first that begin in shards which this process opens first."""
        runs = list(pairwise([0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]))
        first_tokens = begins[[first for first, _ in runs]] % self.offsets
        shards = np.searchsorted(self.first_token, first_tokens, side="right") - 1
        order = reader.opening_order(np.unique(shards)).tolist()
        place = {shard: number for number, shard in enumerate(order)}
        return [run for _, run in sorted(zip(map(place.__getitem__, shards.tolist()), runs, strict=True))]

    def _chunk(
        self,
        ids: Int32s,
        places: Int64s,
        lengths: Int32s,
        starts: Int64s,
        documents: Int64s,
        first: int,
        end: int,
    ) -> Chunk:
        """Rows begin at ``places`` of the ids, int64[samples per step, steps], documents at ``starts``."""
        at = places[:, first:end]
        chunk = Chunk(
            lengths=lengths[:, first:end],
            ids=ScatteredRows(flat=ids, at=at, row_tokens=self.seq_len),
            row_tokens=self.seq_len,
        )
        steps = at.T.reshape(-1)
        if self.starts:
            low = np.searchsorted(starts, steps)
            counts = np.searchsorted(starts, steps + self.seq_len) - low
            within = starts[places_of(low, counts)] - np.repeat(steps, counts)
            counts = counts.astype(np.int32).reshape(at.T.shape).T
            chunk = replace(chunk, starts=Parts(counts=counts, flat=within.astype(np.int32)))
        if not self.origins:
            return chunk
        low = np.searchsorted(starts, steps, side="right") - 1
        counts = np.searchsorted(starts, steps + chunk.lengths.T.reshape(-1)) - low
        taken = places_of(low, counts)
        origins = self._origins(documents[taken])
        origins[:, 1] = (starts[taken] - np.repeat(steps, counts)).clip(0)
        return with_origins(chunk, counts.reshape(at.T.shape).T, origins)


def _documents_in(ends: Int64s, begin: int, end: int) -> tuple[int, int]:
    """The documents, by their ``ends`` from 0 on, that have tokens from one up to another: [first, last)."""
    first = int(np.searchsorted(ends, begin, side="right")) - 1
    return first, int(np.searchsorted(ends, end, side="left"))


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """What one sample is; the names are arguments of ``get_llama3_dataloader``. Raises UsageError."""

    seq_len: int | None = None
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    group: int = 1  # samples of like length side by side

    def __post_init__(self) -> None:
        if str(self.long_documents) == "split":  # of 0.1.0
            raise UsageError(
                'long_documents="split" was removed: pack documents with seq_len=, which keeps all tokens, '
                'or pass "truncate" or "error"',
                found='long_documents="split"',
                remedy="seq_len=",
            )
        check_choice("long_documents", self.long_documents, LongDocuments)
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out",
                found=f"seq_len={self.seq_len}",
            )

    @property
    def needs_lengths(self) -> bool:
        """Whether the lengths of all documents must be known before the first batch."""
        return self.seq_len is not None or self.group > 1


def make_samples(
    shards: ShardSet,
    rules: SampleRules,
    *,
    eos_token_id: int | None,
    vocab_size: int | None = None,
    starts: bool = False,
    keeps_tail: bool = False,
    origins: bool = False,
    context: ReaderContext = ReaderContext(),  # noqa: B008  frozen
) -> Samples:
    """The samples of some shards.

    ``vocab_size``: ids are checked against it where it is given. ``starts``: whether to say where documents
    begin in packed rows. ``keeps_tail``: rows packed at load end with one that is not full. ``origins``:
    chunks say where documents come from. Raises UsageError where the rules do not fit what the shards hold.
    """
    _check_rows(rules, shards, starts or origins)
    shared: dict[str, Any] = {
        "shards": shards,
        "vocab_size": vocab_size,
        "context": context,
        "origins": origins,
    }
    if rules.seq_len is not None and not shards.row_tokens:
        return JoinedRows(
            seq_len=rules.seq_len, eos_token_id=eos_token_id, starts=starts, keeps_tail=keeps_tail, **shared
        )
    refuses = rules.long_documents == "error"
    return WholeSamples(max_length=rules.max_length, refuse_longer=refuses, starts=starts, **shared)


def samples_of(samples: Samples, shards: ShardSet) -> Samples:
    """The samples of other shards, by the same rules."""
    return replace(samples, shards=shards)


def _check_rows(rules: SampleRules, shards: ShardSet, starts: bool) -> None:
    if not shards.has_rows:
        return
    rows = f"packed rows of {shards.row_tokens} tokens" if shards.row_tokens else "some packed rows"
    if rules.max_length is not None or rules.group > 1:
        given = "group_by_length" if rules.max_length is None else f"max_length={rules.max_length}"
        raise UsageError(
            f"{given} is for documents; these are {rows}: leave it out, or prepare them with another "
            "--seq_len",
            found=given,
            expected=rows,
            remedy="--seq_len",
        )
    if rules.seq_len is not None and rules.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={rules.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len",
            found=f"seq_len={rules.seq_len}",
            expected=rows,
            remedy="--seq_len",
        )
    if starts and not shards.row_tokens:
        raise UsageError(
            "boundaries and origins are for rows of one length; load documents and packed rows apart",
            expected="rows of one length",
        )
