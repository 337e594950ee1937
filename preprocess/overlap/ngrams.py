"""Runs of n or more units (words, or token ids) that documents share with an evaluation.

A unit is a number: a token id, or the number of a word among those of the evaluation, 0 for any other word.
So units are equal where their numbers are, and a hit is never a collision: hashes of n-grams only say where
to look, and there all units are compared. Nearly all n-grams end at a table of bytes, 20 ns a unit.

A word is what stands between white space, in lower case and the normal form NFKC, without punctuation,
symbols and control characters. What is left empty is no word: "Don't  STOP !" has the words dont and stop.
"""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import Numbers, TokenBatch

_BETWEEN = "\x1f"  # texts; to Python it is white space
_BASE = np.uint64(0x9FB21C651E98DF25)
# Of an n-gram, places in an evaluation, and in a document, that are looked at. A text of more evaluation
# documents is found in the first ones, and a text of one repeated word takes no time.
_MOST_PLACES = 16


class Hit(NamedTuple):
    """A document and an evaluation document that share units, and the longest run that they share."""

    document: int  # number among the documents
    eval_document: int
    begin: int  # of the longest run, in the document
    num_units: int  # of it
    share: float  # of the units of the evaluation document, those that the document holds


def words_of(texts: Iterable[str]) -> list[list[str]]:
    """Return the words of each text. Takes 25 ns a character of English, 70 ns of Korean."""
    # lower() is what NFKC and casefold() come to in ASCII, and takes a tenth of the time.
    normal = (
        text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold() for text in texts
    )
    joined = _BETWEEN.join(text.replace(_BETWEEN, " ") for text in normal)
    chars = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    kept = chars[_is_kept()[chars]].tobytes().decode("utf-32-le")
    return [text.split() for text in kept.split(_BETWEEN)]


@functools.lru_cache(maxsize=1)
def _is_kept() -> npt.NDArray[np.bool_]:
    """Return which code points are letters, marks, numbers or white space. Takes 0.2 s."""
    chars = map(chr, range(sys.maxunicode + 1))
    return np.array([char.isspace() or unicodedata.category(char)[0] in "LMN" for char in chars])


def numbered_words(
    texts: Sequence[Sequence[str]], number_of: defaultdict[str, int], *, may_add: bool
) -> TokenBatch:
    """Return the words of texts as numbers. ``may_add``: give numbers to new words, else these are 0."""
    words, offsets = itertools.chain.from_iterable(texts), np.cumsum([0, *map(len, texts)])
    numbers = map(number_of.__getitem__, words) if may_add else map(number_of.get, words, itertools.repeat(0))
    return TokenBatch(ids=np.fromiter(numbers, np.uint32, int(offsets[-1])), offsets=offsets)


def _document_of(units: TokenBatch) -> Numbers:
    """Return the document of each unit."""
    return np.repeat(np.arange(len(units.offsets) - 1), np.diff(units.offsets))


class EvalIndex:
    """Where each n-gram of an evaluation stands: about 250 bytes a unit."""

    def __init__(self, units: TokenBatch, ngram: int) -> None:
        self.units, self.ngram = units, ngram
        self._document_of = _document_of(units)
        hashes = self._hashes_of(units)
        # An n-gram that goes on in the next document is none.
        is_inside = self._document_of[: len(hashes)] == self._document_of[ngram - 1 :]
        self._places: dict[int, list[int]] = defaultdict(list)
        for place in np.flatnonzero(is_inside).tolist():
            places = self._places[int(hashes[place])]
            if len(places) < _MOST_PLACES:
                places.append(place)
        self.num_ngrams = len(self._places)  # different ones
        num_bits = max(16, (self.num_ngrams * 32).bit_length())  # one n-gram in 32 passes by chance
        self._shift = np.uint64(64 - num_bits)
        self._table = np.zeros(1 << num_bits, np.bool_)
        self._table[hashes[is_inside] >> self._shift] = True

    def _hashes_of(self, units: TokenBatch) -> npt.NDArray[np.uint64]:
        count = max(0, len(units.ids) - self.ngram + 1)
        numbers, hashes = units.ids.astype(np.uint64), np.zeros(count, np.uint64)
        for begin in range(self.ngram):
            hashes += numbers[begin : begin + count]
            hashes *= _BASE
        return hashes

    def shared(self, documents: TokenBatch) -> dict[tuple[int, int], set[int]]:
        """Return, by document and evaluation document, place there less place here of n-grams of both."""
        hashes = self._hashes_of(documents)
        places = np.flatnonzero(self._table[hashes >> self._shift])
        columns = places, _document_of(documents)[places], hashes[places]
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        times = Counter[tuple[int, int]]()
        for place, document, hashed in zip(*(column.tolist() for column in columns), strict=True):
            times[document, hashed] += 1
            if times[document, hashed] <= _MOST_PLACES:
                for eval_place in self._places.get(hashed, ()):
                    found[document, int(self._document_of[eval_place])].add(eval_place - place)
        return found


def find_hits(documents: TokenBatch, index: EvalIndex, *, num_gaps: int, min_share: float) -> Iterator[Hit]:
    """Yield each pair of a document and an evaluation document that share ``index.ngram`` units in a row.

    With ``num_gaps`` a shared run goes on behind its first n-gram over as many units that differ, and ends
    with an equal one. A pair with less than ``min_share`` of the evaluation document is left out.
    """
    evals = index.units
    for (number, eval_number), shifts in sorted(index.shared(documents).items()):
        first, end = documents.offsets[number : number + 2].tolist()
        eval_first, eval_end = evals.offsets[eval_number : eval_number + 2].tolist()
        is_held = np.zeros(eval_end - eval_first, np.bool_)
        longest = (0, 0)
        for shift in shifts:
            # All runs of this shift, also those with n-grams that were not looked at.
            low, high = max(first, eval_first - shift), min(end, eval_end - shift)
            is_equal = documents.ids[low:high] == evals.ids[low + shift : high + shift]
            edges = np.flatnonzero(np.diff(is_equal, prepend=False, append=False)).reshape(-1, 2)
            for begin, stop in edges[edges[:, 1] - edges[:, 0] >= index.ngram].tolist():
                differing = np.flatnonzero(~is_equal[stop:])
                stop = stop + int(differing[num_gaps]) if len(differing) > num_gaps else len(is_equal)
                is_same = is_equal[begin:stop]
                is_same = is_same[: np.flatnonzero(is_same)[-1] + 1]
                is_held[low + begin + shift - eval_first :][: len(is_same)] |= is_same
                longest = max(longest, (len(is_same), first - low - begin))
        num_units, begin = longest[0], -longest[1]
        if num_units and is_held.mean() >= min_share:
            yield Hit(number, eval_number, begin, num_units, float(is_held.mean()))
