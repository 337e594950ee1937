"""Runs of n or more units (words, or token ids) that documents share with an evaluation.

A unit has a key of 64 bits. The n-grams of the evaluation are hashed once; those of a shard are hashed as they
come, 15 ns a unit. Nearly all of them end at a bit table; what is left is looked up, and each run that is
found is compared unit by unit, so a hit is never a collision of hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

MOST_NGRAM = 1000
# Places of one n-gram in the evaluation that are told apart; a text that stands in more evaluation documents
# is found in the first ones.
_MOST_PLACES = 8
_CHUNK_UNITS = 1 << 17  # hashed at once: 1 MiB of keys stays in a core's cache
_BASE = 0x9FB21C651E98DF25
_BITS_PER_NGRAM = 128  # of the table, so that one n-gram in 128 passes by chance; 16 bytes of memory each


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of some documents, one behind another: document i has ``keys[offsets[i]:offsets[i + 1]]``."""

    keys: Keys  # uint64[units]; equal units have equal keys
    offsets: Numbers  # int64[documents + 1]
    spell: Callable[[int, int], Sequence[Any]]  # the units [begin, end) themselves

    def lengths(self) -> Numbers:
        """Return the number of units of each document."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A document that holds text of an evaluation document, and the longest stretch that both have."""

    document: int  # number among the documents
    eval_document: int
    begin: int  # of the longest stretch, in all units of the documents
    eval_begin: int
    num_units: int  # of it
    num_covered: int  # units of the evaluation document that the document holds


def _powers(base: int) -> Keys:
    factors = np.full(_CHUNK_UNITS + MOST_NGRAM, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def _hashes(keys: Keys, ngram: int) -> Iterator[tuple[int, Keys]]:
    """Yield where some n-grams begin and the hashes of these: sum of key[j] * BASE**j, modulo 2**64.

    It is a difference of two running sums, so its cost does not depend on n.
    """
    for begin in range(0, len(keys) - ngram + 1, _CHUNK_UNITS):
        part = keys[begin : begin + _CHUNK_UNITS + ngram - 1]
        sums = np.zeros(len(part) + 1, np.uint64)
        np.cumsum(part * _POWERS[: len(part)], out=sums[1:])
        num = len(part) - ngram + 1
        yield begin, (sums[ngram:] - sums[:num]) * _INVERSES[:num]


class EvalIndex:
    """Where each n-gram of the evaluation stands. 40 bytes a unit."""

    def __init__(self, units: Units, ngram: int) -> None:
        self.units, self.ngram = units, ngram
        hashes = np.concatenate(
            [found for _, found in _hashes(units.keys, ngram)] or [np.empty(0, np.uint64)]
        )
        places = np.arange(len(hashes))
        places = places[_are_in_one_document(units, places, ngram)]
        places = places[np.argsort(hashes[places], kind="stable")]
        self._hashes, self._firsts, counts = np.unique(hashes[places], return_index=True, return_counts=True)
        self._places, self._counts = places, np.minimum(counts, _MOST_PLACES)
        num_bits = max(16, (len(self._hashes) * _BITS_PER_NGRAM).bit_length())
        self._shift = np.uint64(64 - num_bits)
        self._table = np.zeros(1 << (num_bits - 3), np.uint8)
        cells = self._hashes >> self._shift
        np.bitwise_or.at(self._table, cells >> np.uint64(3), _bit_of(cells))

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, keys: Keys) -> tuple[Numbers, Numbers]:
        """Return each place in ``keys`` with an n-gram of the evaluation, and the place there; pair by pair."""
        found, where = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for begin, hashes in _hashes(keys, self.ngram):
            cells = hashes >> self._shift
            places = np.flatnonzero(self._table[cells >> np.uint64(3)] & _bit_of(cells))
            hashes = hashes[places]
            numbers = np.searchsorted(self._hashes, hashes)
            numbers[numbers == len(self._hashes)] = 0
            is_equal = self._hashes[numbers] == hashes
            places, numbers = places[is_equal], numbers[is_equal]
            counts = self._counts[numbers]
            # The first place of each n-gram, and those behind it, up to its count.
            turns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            found.append(np.repeat(places, counts) + begin)
            where.append(self._places[np.repeat(self._firsts[numbers], counts) + turns])
        return np.concatenate(found), np.concatenate(where)


def _bit_of(cells: Keys) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (cells & np.uint64(7)).astype(np.uint8))


def _are_in_one_document(units: Units, places: Numbers, ngram: int) -> npt.NDArray[np.bool_]:
    return places + ngram <= units.offsets[_documents_at(units, places) + 1]


def _documents_at(units: Units, places: Numbers) -> Numbers:
    return np.searchsorted(units.offsets, places, side="right") - 1


def find_hits(documents: Units, index: EvalIndex, *, num_gaps: int, min_share: float) -> Iterator[Hit]:
    """Yield each pair of a document and an evaluation document that share ``index.ngram`` units in a row.

    With ``num_gaps`` a shared stretch goes on to the right over as many units that differ; it begins with a
    whole n-gram and ends with an equal unit. A pair counts only if the document holds ``min_share`` of the
    evaluation document's units.
    """
    evals, ngram = index.units, index.ngram
    places, eval_places = index.find(documents.keys)
    is_inside = _are_in_one_document(documents, places, ngram)
    places, eval_places = places[is_inside], eval_places[is_inside]
    if not len(places):
        return
    numbers, eval_numbers = _documents_at(documents, places), _documents_at(evals, eval_places)
    order = np.lexsort((places, eval_places - places, eval_numbers, numbers))
    columns = np.stack([numbers, eval_numbers, eval_places - places, places])[:, order]
    # n-grams that follow each other on both sides are one run.
    steps = np.diff(columns, axis=1)
    firsts = np.flatnonzero(np.append(True, (steps[:3] != 0).any(axis=0) | (steps[3] != 1)))
    num_ngrams = np.diff(np.append(firsts, len(places)))
    runs = zip(*columns[:, firsts].tolist(), num_ngrams.tolist(), strict=True)
    for (number, eval_number), some in itertools.groupby(runs, key=lambda run: run[:2]):
        eval_first, eval_end = evals.offsets[eval_number : eval_number + 2].tolist()
        is_covered = np.zeros(eval_end - eval_first, np.bool_)
        longest = (0, 0, 0)
        for _, _, shift, begin, num in some:
            # As many units as can follow, or with no gaps those that were found to be equal.
            length = min(int(documents.offsets[number + 1]) - begin, eval_end - begin - shift)
            if not num_gaps:
                length = num + ngram - 1
            eval_begin = begin + shift
            is_equal = documents.keys[begin : begin + length] == evals.keys[eval_begin : eval_begin + length]
            differing = np.flatnonzero(~is_equal)
            if len(differing) > num_gaps:
                is_equal = is_equal[: differing[num_gaps]]
            is_equal = is_equal[: len(is_equal) - int(is_equal[::-1].argmax())]  # it ends with an equal unit
            if not _are_spelled_alike(documents, begin, evals, eval_begin, is_equal):
                continue
            is_covered[eval_begin - eval_first :][: len(is_equal)] |= is_equal
            if len(is_equal) > longest[0]:
                longest = (len(is_equal), begin, eval_begin)
        num_units, begin, eval_begin = longest
        num_covered = int(is_covered.sum())
        if num_units and num_covered >= min_share * len(is_covered):
            yield Hit(
                document=number,
                eval_document=eval_number,
                begin=begin,
                eval_begin=eval_begin,
                num_units=num_units,
                num_covered=num_covered,
            )


def _are_spelled_alike(
    documents: Units, begin: int, evals: Units, eval_begin: int, is_equal: npt.NDArray[np.bool_]
) -> bool:
    """Compare the units themselves where their keys are equal."""
    ours = documents.spell(begin, begin + len(is_equal))
    others = evals.spell(eval_begin, eval_begin + len(is_equal))
    return all(one == other for one, other in itertools.compress(zip(ours, others, strict=True), is_equal))
