"""Words and token ids as ``Units``, in whole arrays: 20 ns a character of text, 2 ns an id.

A word is what stands between white space, in lower case and the normal form NFKC, without punctuation,
symbols and control characters. What is left empty is no word: ``"Don't  stop !"`` has the words dont, stop.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from preprocess.overlap.ngrams import Keys, Numbers, Units

_DROPPED, _LETTER, _SPACE = range(3)
_MULTIPLIER, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_WEIGHTS = 1 << 10  # of characters by their place in a word; a longer word begins anew with the first one


def tokens_as_units(ids: npt.NDArray[np.uint32], offsets: Numbers) -> Units:
    """Take ids of documents; different ids have different keys."""
    return Units(keys=_mixed(ids.astype(np.uint64)), offsets=offsets, spell=lambda a, b: ids[a:b].tolist())


def words_as_units(texts: Sequence[str]) -> Units:
    """Take the words of texts."""
    normal = [_normal_text(text) for text in texts]
    joined = "\n".join([*normal, ""])
    chars = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _kinds()[chars]
    is_kept = kinds != _DROPPED
    # A word may not reach over the end of its text, where a line end stands.
    text_ends = np.cumsum(is_kept)[np.cumsum([len(text) + 1 for text in normal]) - 1]
    chars, is_letter = chars[is_kept], kinds[is_kept] == _LETTER
    edges = np.flatnonzero(np.diff(is_letter, prepend=False))  # the last character is a line end
    begins, ends = edges[::2], edges[1::2]
    lengths = ends - begins
    weights = _weights()
    turns = np.arange(len(chars), dtype=np.int32)
    turns = turns[is_letter] - np.repeat(begins, lengths).astype(np.int32)
    sums = _mixed(chars[is_letter].astype(np.uint64)) * weights[turns & (_WEIGHTS - 1)]
    firsts = np.cumsum(lengths) - lengths
    keys = _mixed(np.add.reduceat(sums, firsts)) if len(firsts) else np.empty(0, np.uint64)

    def spell(begin: int, end: int) -> list[str]:
        places = zip(begins[begin:end].tolist(), ends[begin:end].tolist(), strict=True)
        return [chars[first:last].tobytes().decode("utf-32-le", "surrogatepass") for first, last in places]

    offsets = np.concatenate([[0], np.searchsorted(begins, text_ends)])
    return Units(keys=keys, offsets=offsets.astype(np.int64), spell=spell)


def _normal_text(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _mixed(values: Keys) -> Keys:
    """Scatter values over 64 bits; no two of them to the same one."""
    values = (values + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(32)
    values *= _SECOND
    return values


@functools.lru_cache(maxsize=1)
def _kinds() -> npt.NDArray[np.uint8]:
    """Return what each code point is: uint8[code points]. 0.1 s."""
    kinds = np.full(sys.maxunicode + 1, _DROPPED, np.uint8)
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if char.isspace():
            kinds[code] = _SPACE
        elif unicodedata.category(char)[0] in "LMN":
            kinds[code] = _LETTER
    return kinds


@functools.lru_cache(maxsize=1)
def _weights() -> Keys:
    return np.cumprod(np.full(_WEIGHTS, _SECOND, np.uint64))
