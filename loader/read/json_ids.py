"""Token ids from the bytes of samples: JSON lists, and integers of any width.

JSON lists are parsed by a few passes of numpy over the text of many samples, without a Python object per
number: 21 ns per token and 0.2 us per document, against 54 ns and 0.4 us with orjson and array. Any other
text is left to msgspec, which names the error.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, MsgspecError
from msgspec.json import Decoder

from loader.order.hashes import Int32s, Int64s
from loader.read.chunks import Integers
from loader.read.external_tars import JSON, TOKEN_DTYPES
from loader.read.reading import SampleBytes
from shardprep.format.spec import BLANK

DECODE_BYTES = 128 * 1024  # of text at a time, so that all arrays stay in the cache
_MAX_DIGITS = 8
_OPEN, _CLOSE, _COMMA, _SPACE, _ZERO = b"[], 0"
_PAD = bytes(8)


def parse_id_lists(texts: list[memoryview]) -> tuple[Int64s, Int32s] | None:
    """Parse texts like ``[1, 22]`` to (numbers per text, int64[len(texts)], and all numbers, int32).

    Return None if a text has another form. A space must follow either every comma of all texts, or none.
    """
    joined = b"".join([*texts, _PAD, _PAD])
    text = np.frombuffer(joined, np.uint8)
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if sizes.min() < 2 or not ((text[starts] == _OPEN).all() and (text[ends - 1] == _CLOSE).all()):
        return None
    has_numbers = sizes > 2
    ends_number = text == _COMMA
    ends_number[ends - 1] = has_numbers
    number_ends = np.flatnonzero(ends_number)  # the byte after each number: a comma or a closing bracket
    num_commas = len(number_ends) - np.count_nonzero(has_numbers)
    num_spaces = np.count_nonzero(text.take(number_ends + 1) == _SPACE)
    if num_spaces not in (0, num_commas):
        return None
    num_before = np.searchsorted(number_ends, ends)  # numbers up to the end of each text
    counts = np.diff(num_before, prepend=0)
    begins = np.empty_like(number_ends)  # the first byte of each number
    separator_bytes = 2 if num_spaces else 1
    np.add(number_ends[:-1], separator_bytes, out=begins[1:])
    begins[(num_before - counts)[has_numbers]] = starts[has_numbers] + 1
    digits = number_ends - begins
    if digits.size and not 1 <= int(digits.min()) <= int(digits.max()) <= _MAX_DIGITS:
        return None
    # All bytes outside of numbers are checked by now. With enough digits, numbers have no other bytes.
    if np.count_nonzero(text - np.uint8(_ZERO) < 10) != int(digits.sum()):
        return None
    return counts, _parse_numbers(joined, begins, digits)


def _parse_numbers(joined: bytes, first: Int64s, digits: Int64s) -> Int32s:
    """Return the numbers that begin at the bytes ``first``. Overwrites ``digits``.

    The eight bytes from a first digit on are combined from two words into one integer. The bytes that follow
    the number are shifted out. Three multiplications combine neighbours: digits, pairs of digits, and fours.
    """
    words = np.frombuffer(joined, "<u8", len(joined) // 8)
    shift = ((first & 7) << 3).view(np.uint64)
    word = first >> 3
    value = words.take(word) >> shift
    word += 1
    rest = words.take(word)
    rest <<= np.subtract(np.uint64(64), shift, out=shift)  # a shift by 64 bits leaves 0
    value |= rest
    digits -= _MAX_DIGITS
    digits *= -8
    value <<= digits.view(np.uint64)
    value &= np.uint64(0x0F0F0F0F0F0F0F0F)
    for factor, bits, kept in (
        (2561, 8, 0x00FF00FF00FF00FF),  # 10 << 8 | 1
        (6553601, 16, 0x0000FFFF0000FFFF),  # 100 << 16 | 1
        (42949672960001, 32, 0x00000000FFFFFFFF),  # 10_000 << 32 | 1
    ):
        value *= np.uint64(factor)
        value >>= np.uint64(bits)
        value &= np.uint64(kept)
    return value.astype(np.int32)


def join_ranges(begin: Int64s, lengths: Int64s) -> Int64s:
    """Return ``range(begin[i], begin[i] + lengths[i])`` for each i, one after another."""
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    within += np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
    return within


def decode_samples(data: SampleBytes, numbers: Int64s) -> tuple[Int64s, Int32s]:
    """Decode samples to (lengths, int64[len(numbers)], and all ids, int32), in portions of DECODE_BYTES."""
    memory = data.buffer.data
    decoded: list[tuple[Int64s, Int32s]] = []
    cuts = np.cumsum(data.num_bytes[numbers]) // DECODE_BYTES
    for portion in np.split(numbers, np.flatnonzero(np.diff(cuts)) + 1):
        found = None
        if (data.dtype[portion] == JSON).all():
            spans = zip(data.start[portion].tolist(), data.num_bytes[portion].tolist(), strict=True)
            found = parse_id_lists([memory[start : start + size] for start, size in spans])
        if found is None:
            found = _decode_one_by_one(data, portion)
        decoded.append(found)
    lengths, ids = (np.concatenate(each) for each in zip(*decoded, strict=True))
    expected = data.num_tokens[numbers]
    wrong = np.flatnonzero((lengths != expected) & (expected >= 0))
    if wrong.size:
        first = int(wrong[0])
        raise data.broken(int(numbers[first]), f"{lengths[first]} ids, but its idx says {expected[first]}")
    return lengths, ids


_ID_LIST_DECODER = Decoder(list[Annotated[int, Meta(ge=-(2**31), lt=2**31)]])


def _decode_one_by_one(data: SampleBytes, numbers: Int64s) -> tuple[Int64s, Int32s]:
    decoded: list[Int32s] = []
    for number in numbers.tolist():
        start = int(data.start[number])
        num_bytes = int(data.num_bytes[number])
        dtype = TOKEN_DTYPES[data.dtype[number]]
        if dtype is None:
            raw = bytes(data.buffer[start : start + num_bytes])
            try:
                decoded.append(np.array(_ID_LIST_DECODER.decode(raw), np.int32))
            except MsgspecError as error:
                raise data.broken(number, f"no JSON list of token ids ({error}): {raw[:60]!r}") from None
            continue
        ids = np.frombuffer(data.buffer, dtype, num_bytes // dtype.itemsize, start)
        if dtype.itemsize == 8 and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise data.broken(number, f"ids from {ids.min()} to {ids.max()}")
        decoded.append(ids.astype(np.int32))
    return np.array([len(each) for each in decoded], np.int64), np.concatenate(decoded)


def check_vocab(
    data: SampleBytes, numbers: Int64s, ids: Integers, lengths: Integers, vocab_size: int
) -> None:
    """Raise BrokenShard for an id outside of ``range(vocab_size)``, except BLANK of blanked documents."""
    if not ids.size or 0 <= ids.min() <= ids.max() < vocab_size:
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if data.shards.blank_id is not None:
        wrong &= ids != BLANK
    if wrong.any():
        at = int(wrong.argmax())
        number = int(numbers[np.searchsorted(np.cumsum(lengths), at, side="right")])
        expected = f"the tokenizer has 0 to {vocab_size - 1}; is model_id the model that made them?"
        raise data.broken(number, f"the id {ids[at]}, but {expected}")
