"""The words of texts as units, in whole arrays: 8 ns a character of English, 25 ns of Korean.

A word is what stands between white space, in lower case and the normal form NFKC, without punctuation,
symbols and control characters; what is left empty is no word. "Don't  STOP !" has the words dont and stop.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from preprocess.overlap.ngrams import CHUNK, Keys, Units, hash_runs, scattered

_DROPPED, _SPACE = 0, 1  # codes of characters; a letter's is larger


def words_as_units(texts: Sequence[str]) -> Units:
    """Take the words of texts."""
    normal = [
        text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold() for text in texts
    ]
    joined = "\n".join([*normal, ""])
    none = np.empty(0, np.int64)
    keys, begins, ends = [none.astype(np.uint64)], [none], [none]
    for first, last in _pieces(joined):
        chars = np.frombuffer(joined[first:last].encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = _codes()[chars]
        kept = np.flatnonzero(codes != _DROPPED)
        codes = codes[kept]
        edges = np.flatnonzero(np.diff(codes > _SPACE, prepend=False, append=False))
        keys.append(scattered(hash_runs(codes, edges[::2], edges[1::2])))
        begins.append(kept[edges[::2]] + first)
        ends.append(kept[edges[1::2] - 1] + first + 1)
    all_begins, all_ends = np.concatenate(begins), np.concatenate(ends)

    def spell(begin: int, end: int) -> list[str]:
        places = zip(all_begins[begin:end].tolist(), all_ends[begin:end].tolist(), strict=True)
        return ["".join(filter(_is_letter, joined[first:last])) for first, last in places]

    text_ends = np.cumsum([0, *(len(text) + 1 for text in normal)])
    return Units(
        keys=np.concatenate(keys),
        offsets=np.searchsorted(all_begins, text_ends).astype(np.int64),
        spell=spell,
    )


def _pieces(joined: str) -> Iterator[tuple[int, int]]:
    """Yield stretches of at most CHUNK characters, each behind white space, unless a word is as long."""
    begin = 0
    while begin < len(joined):
        limit = begin + CHUNK
        end = len(joined)
        if limit < end:
            end = max(joined.rfind(" ", begin, limit), joined.rfind("\n", begin, limit)) + 1 or limit
        yield begin, end
        begin = end


def _is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] in "LMN"


@functools.lru_cache(maxsize=1)
def _codes() -> Keys:
    """Return a code for each code point: uint64[code points]. Takes 0.2 s."""
    codes = scattered(np.arange(sys.maxunicode + 1, dtype=np.uint64)) | np.uint64(2)
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        if char.isspace():
            codes[number] = _SPACE
        elif not _is_letter(char):
            codes[number] = _DROPPED
    return codes
