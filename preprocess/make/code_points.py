"""Code points that Unicode versions may classify differently, so that engines may disagree about them."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
import numpy.typing as npt

from preprocess.read.formats import Texts

# Code points that Unicode versions after 14 may classify as letters or digits, so engines of different ages
# may disagree. Below U+10000: those that this Python does not assign, and _ASSIGNED_SINCE_14 (Unicode 15 to
# 18), except _NEVER_ASSIGNED (with U+0378, because the probe has it). Above: all except _SURE_ABOVE.
_ASSIGNED_SINCE_14 = (
    "558 58b-58c 5c8-5c9 88f 897 b53-b54 c5c cdc cf3 ece 1acf-1af0 1b4e-1b4f 1b7f 1c89-1c8a 208f 209d-209f "
    "20c1-20c4 2427-2429 2b96 2e60-2e63 2ffc-2fff 31e4-31e5 31ef a7cb-a7cf a7d2 a7d4 a7da-a7dd a7e2 a7f1 "
    "ab6c-ab6d fbc3-fbd2 fd90-fd91 fdc8-fdce"
)
_NEVER_ASSIGNED = (0x378, *range(0xFDD0, 0xFDF0), 0xFFFE, 0xFFFF)
_SURE_ABOVE = (
    (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B738), (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1), (0x2F800, 0x2FA1D), (0x30000, 0x3134A), (0xE0000, 0xE0FFF), (0xF0000, 0x10FFFF),
)  # fmt: skip


@functools.cache
def is_new_code_point() -> npt.NDArray[np.bool_]:
    """Return whether engines may classify a code point differently: bool[0x110000]. Takes 10 ms, once."""
    is_new = np.ones(0x110000, np.bool_)
    is_new[:0x10000] = [unicodedata.category(point) == "Cn" for point in map(chr, range(0x10000))]
    for given in _ASSIGNED_SINCE_14.split():
        first, _, last = given.partition("-")
        is_new[int(first, 16) : int(last or first, 16) + 1] = True
    is_new[list(_NEVER_ASSIGNED)] = False
    for begin, end in _SURE_ABOVE:
        is_new[begin : end + 1] = False
    return is_new


def texts_with_new_code_points(texts: Texts) -> list[int]:
    """Return the indices of texts that have a code point of ``is_new_code_point``: 1 ns per character."""
    is_beyond_ascii = np.frombuffer(texts.joined, np.int8) < 0
    num_beyond = np.count_nonzero(is_beyond_ascii)
    if not num_beyond:
        return []
    if num_beyond < len(is_beyond_ascii) // 8:
        characters = np.frombuffer(texts.joined, np.uint8)[is_beyond_ascii].tobytes().decode()
    else:
        characters = texts.characters or texts.joined.decode()
    units = np.frombuffer(characters.encode("utf-16-le"), "<u2")
    # Most Korean characters are syllables, from U+AC00 on: a comparison takes a tenth of a look-up.
    others = units[(units >= 0x80) & (units - np.uint16(0xAC00) >= 11172)]
    if not _is_unsure_unit().take(others).any():
        return []

    def has_new(text: str) -> bool:
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        return bool(is_new_code_point().take(points, mode="clip").any())

    return [n for n, text in enumerate(texts) if has_new(text.decode())] if has_new(characters) else []


@functools.cache
def _is_unsure_unit() -> npt.NDArray[np.bool_]:
    """Return whether a UTF-16 unit may be such a code point or half of one: bool[0x10000]."""
    is_unsure = is_new_code_point()[:0x10000].copy()
    is_unsure[0xD800:0xE000] = True
    return is_unsure
