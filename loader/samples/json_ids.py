"""Many JSON lists of token ids -> their numbers, without making a Python object of any.

A few passes of numpy over the text: 24 ns a token and 0.6 us a document. orjson and array take 44, and
1.5 us a document. What is not surely a list of small numbers is left to orjson, and to its errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 256 * 1024  # of text at once, so that all arrays stay in the cache
_MAX_DIGITS = 8
_OPEN, _CLOSE, _COMMA, _SPACE, _ZERO = b"[], 0"
_PAD = bytes(_MAX_DIGITS)


def parse_id_lists(texts: list[memoryview]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
    """``[1, 22]`` and the like: (numbers in each, int64[len(texts)]; all of them, int32), or None.

    None where a text is anything but digits, commas and spaces in one pair of brackets.
    """
    text = np.frombuffer(b"".join([_PAD, *texts]), np.uint8)
    ends = np.cumsum([len(_PAD), *map(len, texts)])
    digit = text - np.uint8(_ZERO) < 10
    last = np.flatnonzero(digit[:-1] > digit[1:])
    first = np.flatnonzero(digit[1:] > digit[:-1]) + 1
    commas = np.flatnonzero(text == _COMMA)
    num_known = np.count_nonzero(digit) + len(commas) + np.count_nonzero(text == _SPACE) + 2 * len(texts)
    if not (
        num_known + len(_PAD) == len(text)
        and np.count_nonzero(text == _OPEN) == np.count_nonzero(text == _CLOSE) == len(texts)
        and (text[ends[:-1]] == _OPEN).all()
        and (text[ends[1:] - 1] == _CLOSE).all()
    ):
        return None
    counts = np.diff(np.searchsorted(last, ends))
    if not _commas_between(commas, first, last, counts):
        return None
    digits = last - first + 1
    if digits.size and int(digits.max()) > _MAX_DIGITS:
        return None
    return counts, _numbers(text, last, digits)


def _commas_between(
    commas: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> bool:
    """Whether one comma stands between each two numbers of a text, and none elsewhere."""
    ends_a_text = np.zeros(len(last), np.bool_)
    ends_a_text[np.cumsum(counts)[counts > 0] - 1] = True
    before = np.flatnonzero(~ends_a_text)
    if len(before) != len(commas):
        return False
    return bool((last[before] < commas).all() and (commas < first[before + 1]).all())


def _numbers(
    text: npt.NDArray[np.uint8], last: npt.NDArray[np.int64], digits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """The eight bytes up to each number's last digit, as one integer: three multiplications add them up."""
    words = np.ndarray((len(text) - _MAX_DIGITS + 1,), "<u8", text, strides=(1,))
    value = words[last - (_MAX_DIGITS - 1)]
    other = ((_MAX_DIGITS - digits) * 8).astype(np.uint64)  # bits of what stands before the number
    value = (value >> other << other) & np.uint64(0x0F0F0F0F0F0F0F0F)
    value = value * np.uint64(2561) >> np.uint64(8)
    value = (value & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601) >> np.uint64(16)
    value = (value & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001) >> np.uint64(32)
    return value.astype(np.int32)
