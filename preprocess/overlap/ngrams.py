"""Runs of n or more units (words, or token ids) that documents share with an evaluation.

A unit has a key of 64 bits. The n-grams of the evaluation are hashed once, those of a shard as they come, at
5 ns a unit. Nearly all of these end at a table of bits; what is left is looked up, and each run that is found
is compared unit by unit, so that a hit is never a collision of hashes.

A word is what stands between white space, in lower case and the normal form NFKC, without punctuation,
symbols and control characters; what is left empty is no word. "Don't  STOP !" has the words dont and stop.
Taking words costs 8 ns a character of English, 25 ns of Korean.
"""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

MOST_NGRAM = 1000
_CHUNK = 1 << 17  # values hashed at once: 1 MiB stays in a core's cache
# Places of one n-gram that are looked at, in the evaluation, and in a document. A text of more evaluation
# documents is found in the first ones, and a text of one repeated word takes no time.
_MOST_PLACES = 16
_BITS_PER_NGRAM = 128  # so that one n-gram in 128 passes the table by chance
_BASE = 0x9FB21C651E98DF25
_DROPPED, _SPACE = 0, 1  # codes of characters; a letter's is larger


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of some documents, one behind another: document i has ``keys[offsets[i]:offsets[i + 1]]``."""

    keys: Keys  # uint64[units]; equal units have equal keys
    offsets: Numbers  # int64[documents + 1]
    spell: Callable[[int, int], Sequence[Any]]  # the units from one number to another, themselves


class Hit(NamedTuple):
    """A document and an evaluation document that share units, and the longest run that they share."""

    document: int  # number among the documents
    eval_document: int
    begin: int  # of the longest run, among all units of the documents
    num_units: int  # of it
    share: float  # of the units of the evaluation document, those that the document holds


def _powers(base: int) -> Keys:
    factors = np.full(_CHUNK + MOST_NGRAM, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def _scattered(values: Keys) -> Keys:
    """Scatter numbers over 64 bits, no two to the same place."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    return values * np.uint64(0xD6E8FEB86659FD93)


def _hash_runs(values: Keys, begins: Any, ends: Any) -> Keys:
    """Return the hashes of ``values[begin:end]``: the sum of value j of a run times BASE**j, modulo 2**64.

    A hash is the difference of two running sums, so its cost does not depend on the run's length. ``begins``,
    ``ends``: slices or arrays of positions. At most _CHUNK + MOST_NGRAM values.
    """
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _POWERS[: len(values)], out=sums[1:])
    return (sums[ends] - sums[begins]) * _INVERSES[: len(sums)][begins]


def _hashes(keys: Keys, ngram: int) -> Iterator[tuple[int, Keys]]:
    """Yield the hashes of all n-grams, some at a time, each time with the number of the first."""
    for begin in range(0, len(keys) - ngram + 1, _CHUNK):
        part = keys[begin : begin + _CHUNK + ngram - 1]
        yield begin, _hash_runs(part, slice(0, len(part) - ngram + 1), slice(ngram, None))


def tokens_as_units(ids: npt.NDArray[np.uint32], offsets: Numbers) -> Units:
    """Take the ids of documents."""
    keys = _scattered(ids.astype(np.uint64))
    return Units(keys=keys, offsets=offsets, spell=lambda begin, end: ids[begin:end].tolist())


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
        keys.append(_scattered(_hash_runs(codes, edges[::2], edges[1::2])))
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
    """Yield stretches of at most _CHUNK characters, each behind white space, unless a word is as long."""
    begin = 0
    while begin < len(joined):
        limit = begin + _CHUNK
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
    codes = _scattered(np.arange(sys.maxunicode + 1, dtype=np.uint64)) | np.uint64(2)
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        if char.isspace():
            codes[number] = _SPACE
        elif not _is_letter(char):
            codes[number] = _DROPPED
    return codes


class EvalIndex:
    """Where each n-gram of an evaluation stands; about 60 bytes a unit."""

    def __init__(self, units: Units, ngram: int) -> None:
        self.units, self.ngram = units, ngram
        hashes = np.concatenate([np.empty(0, np.uint64), *(found for _, found in _hashes(units.keys, ngram))])
        places = np.arange(len(hashes))
        places = places[_are_in_one_document(units, places, ngram)]
        self.places = places[np.argsort(hashes[places], kind="stable")]
        self._hashes, self.firsts, counts = np.unique(
            hashes[self.places], return_index=True, return_counts=True
        )
        self.counts = np.minimum(counts, _MOST_PLACES)
        num_bits = max(16, (len(self._hashes) * _BITS_PER_NGRAM).bit_length())
        self._shift = np.uint64(64 - num_bits)
        self._table = np.zeros(1 << (num_bits - 3), np.uint8)
        np.bitwise_or.at(self._table, *self._cells(self._hashes))

    def __len__(self) -> int:
        """Return the number of different n-grams."""
        return len(self._hashes)

    def _cells(self, hashes: Keys) -> tuple[Keys, npt.NDArray[np.uint8]]:
        """Return byte and bit of each hash in the table."""
        cells = hashes >> self._shift
        bits = np.left_shift(np.uint8(1), (cells & np.uint64(7)).astype(np.uint8))
        return cells >> np.uint64(3), bits

    def find(self, keys: Keys) -> tuple[Numbers, Numbers]:
        """Return where in ``keys`` n-grams of the evaluation begin, and their numbers.

        The n-gram of number k stands at ``places[firsts[k]:firsts[k] + counts[k]]`` in the evaluation.
        """
        found, found_numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for begin, hashes in _hashes(keys, self.ngram):
            cells, bits = self._cells(hashes)
            places = np.flatnonzero(self._table[cells] & bits)
            numbers = np.searchsorted(self._hashes, hashes[places])
            numbers[numbers == len(self._hashes)] = 0
            is_equal = self._hashes[numbers] == hashes[places]
            found.append(places[is_equal] + begin)
            found_numbers.append(numbers[is_equal])
        return np.concatenate(found), np.concatenate(found_numbers)


def _documents_at(units: Units, places: Numbers) -> Numbers:
    return np.searchsorted(units.offsets, places, side="right") - 1


def _are_in_one_document(units: Units, places: Numbers, ngram: int) -> npt.NDArray[np.bool_]:
    return places + ngram <= units.offsets[_documents_at(units, places) + 1]


def _turns(counts: Numbers) -> Numbers:
    """Return 0 to count - 1 for each count, one behind another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _shared_diagonals(documents: Units, index: EvalIndex) -> Numbers:
    """Return document, evaluation document, and place there less place here of each n-gram that both have.

    int64[n, 3], in the order of the columns, each row once.
    """
    places, ngrams = index.find(documents.keys)
    is_inside = _are_in_one_document(documents, places, index.ngram)
    places, ngrams = places[is_inside], ngrams[is_inside]
    numbers = _documents_at(documents, places)
    order = np.lexsort((places, ngrams, numbers))
    is_other = np.diff(np.stack([numbers, ngrams])[:, order], axis=1, prepend=-1).any(axis=0)
    repeats = np.diff(np.flatnonzero(is_other), append=len(order))
    kept = order[_turns(repeats) < _MOST_PLACES]
    counts = index.counts[ngrams[kept]]
    eval_places = index.places[np.repeat(index.firsts[ngrams[kept]], counts) + _turns(counts)]
    shifts = eval_places - np.repeat(places[kept], counts)
    table = np.stack([np.repeat(numbers[kept], counts), _documents_at(index.units, eval_places), shifts])
    table = table[:, np.lexsort(table[::-1])]
    return table[:, np.diff(table, axis=1, prepend=-1).any(axis=0)].T


def find_hits(documents: Units, index: EvalIndex, *, num_gaps: int, min_share: float) -> Iterator[Hit]:
    """Yield each pair of a document and an evaluation document that share ``index.ngram`` units in a row.

    With ``num_gaps`` a shared run goes on behind its first n-gram over as many units that differ, and ends
    with an equal one. A pair with less than ``min_share`` of the evaluation document is left out.
    """
    evals = index.units
    diagonals = _shared_diagonals(documents, index).tolist()
    for (number, eval_number), some in itertools.groupby(diagonals, key=lambda row: row[:2]):
        first, end = documents.offsets[number : number + 2].tolist()
        eval_first, eval_end = evals.offsets[eval_number : eval_number + 2].tolist()
        is_held = np.zeros(eval_end - eval_first, np.bool_)
        longest = (0, 0)
        for _, _, shift in some:
            # All runs of this shift, also those with n-grams that were not looked at.
            low, high = max(first, eval_first - shift), min(end, eval_end - shift)
            is_equal = documents.keys[low:high] == evals.keys[low + shift : high + shift]
            edges = np.flatnonzero(np.diff(is_equal, prepend=False, append=False)).reshape(-1, 2)
            for begin, stop in edges[edges[:, 1] - edges[:, 0] >= index.ngram].tolist():
                differing = np.flatnonzero(~is_equal[stop:])
                stop = stop + int(differing[num_gaps]) if len(differing) > num_gaps else len(is_equal)
                is_same = is_equal[begin:stop]
                is_same = is_same[: np.flatnonzero(is_same)[-1] + 1]
                begin += low
                ours = documents.spell(begin, begin + len(is_same))
                theirs = evals.spell(begin + shift, begin + shift + len(is_same))
                both = itertools.compress(zip(ours, theirs, strict=True), is_same)
                if all(one == other for one, other in both):
                    is_held[begin + shift - eval_first :][: len(is_same)] |= is_same
                    longest = max(longest, (len(is_same), -begin))
        num_units, begin = longest[0], -longest[1]
        if num_units and is_held.mean() >= min_share:
            yield Hit(number, eval_number, begin, num_units, float(is_held.mean()))
