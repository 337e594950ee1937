"""Runs of n or more units (words, or token ids) that documents share with an evaluation.

A unit has a key of 64 bits. The n-grams of the evaluation are hashed once, those of a shard as they come, at
5 ns a unit. Nearly all of these end at a table of bits; what is left is looked up, and each run that is found
is compared unit by unit, so that a hit is never a collision of hashes.
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
CHUNK = 1 << 17  # values hashed at once: 1 MiB stays in a core's cache
# Places of one n-gram in the evaluation that are looked at: a text of more evaluation documents is found in
# the first ones, which is enough to leave a document out.
_MOST_PLACES = 16
_BITS_PER_NGRAM = 128  # so that one n-gram in 128 passes the table by chance
_BASE = 0x9FB21C651E98DF25


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of some documents, one behind another: document i has ``keys[offsets[i]:offsets[i + 1]]``."""

    keys: Keys  # uint64[units]; equal units have equal keys
    offsets: Numbers  # int64[documents + 1]
    spell: Callable[[int, int], Sequence[Any]]  # the units from one number to another, themselves


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A document and an evaluation document that share units, and the longest run that they share."""

    document: int  # number among the documents
    eval_document: int
    begin: int  # of the longest run, among all units of the documents
    num_units: int  # of it
    share: float  # of the units of the evaluation document, those that the document holds


def _powers(base: int) -> Keys:
    factors = np.full(CHUNK + MOST_NGRAM, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(_BASE), _powers(pow(_BASE, -1, 2**64))


def scattered(values: Keys) -> Keys:
    """Scatter numbers over 64 bits, no two to the same place."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    return values * np.uint64(0xD6E8FEB86659FD93)


def hash_runs(values: Keys, begins: Any, ends: Any) -> Keys:
    """Return the hashes of ``values[begin:end]``: the sum of value j of a run times BASE**j, modulo 2**64.

    A hash is the difference of two running sums, so its cost does not depend on the run's length. ``begins``,
    ``ends``: slices or arrays of positions. At most CHUNK + MOST_NGRAM values.
    """
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _POWERS[: len(values)], out=sums[1:])
    return (sums[ends] - sums[begins]) * _INVERSES[: len(sums)][begins]


def _hashes(keys: Keys, ngram: int) -> Iterator[tuple[int, Keys]]:
    """Yield the hashes of all n-grams, some at a time, each time with the number of the first."""
    for begin in range(0, len(keys) - ngram + 1, CHUNK):
        part = keys[begin : begin + CHUNK + ngram - 1]
        yield begin, hash_runs(part, slice(0, len(part) - ngram + 1), slice(ngram, None))


class EvalIndex:
    """Where each n-gram of an evaluation stands; about 60 bytes a unit."""

    def __init__(self, units: Units, ngram: int) -> None:
        self.units, self.ngram = units, ngram
        hashes = np.concatenate([np.empty(0, np.uint64), *(found for _, found in _hashes(units.keys, ngram))])
        places = np.arange(len(hashes))
        places = places[_are_in_one_document(units, places, ngram)]
        places = places[np.argsort(hashes[places], kind="stable")]
        self._hashes, self._firsts, counts = np.unique(hashes[places], return_index=True, return_counts=True)
        self._places, self._counts = places, np.minimum(counts, _MOST_PLACES)
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
        """Return pairs: where in ``keys`` an n-gram of the evaluation begins, and where it stands there."""
        found, where = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for begin, hashes in _hashes(keys, self.ngram):
            cells, bits = self._cells(hashes)
            places = np.flatnonzero(self._table[cells] & bits)
            numbers = np.searchsorted(self._hashes, hashes[places])
            numbers[numbers == len(self._hashes)] = 0
            is_equal = self._hashes[numbers] == hashes[places]
            places, numbers = places[is_equal], numbers[is_equal]
            counts = self._counts[numbers]
            turns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            found.append(np.repeat(places, counts) + begin)
            where.append(self._places[np.repeat(self._firsts[numbers], counts) + turns])
        return np.concatenate(found), np.concatenate(where)


def _documents_at(units: Units, places: Numbers) -> Numbers:
    return np.searchsorted(units.offsets, places, side="right") - 1


def _are_in_one_document(units: Units, places: Numbers, ngram: int) -> npt.NDArray[np.bool_]:
    return places + ngram <= units.offsets[_documents_at(units, places) + 1]


def find_hits(documents: Units, index: EvalIndex, *, num_gaps: int, min_share: float) -> Iterator[Hit]:
    """Yield each pair of a document and an evaluation document that share ``index.ngram`` units in a row.

    With ``num_gaps`` a shared run goes on behind its first n-gram over as many units that differ, and ends
    with an equal one. A pair with less than ``min_share`` of the evaluation document is left out.
    """
    evals, ngram = index.units, index.ngram
    places, eval_places = index.find(documents.keys)
    is_inside = _are_in_one_document(documents, places, ngram)
    places, eval_places = places[is_inside], eval_places[is_inside]
    numbers, eval_numbers = _documents_at(documents, places), _documents_at(evals, eval_places)
    table = np.stack([numbers, eval_numbers, eval_places - places, places])
    table = table[:, np.lexsort(table[::-1])]
    # Of n-grams that follow each other on both sides the first one is enough.
    steps = np.diff(table, axis=1, prepend=-2)
    seeds = table[:, ~((steps[:3] == 0).all(axis=0) & (steps[3] == 1))].T.tolist()
    for (number, eval_number), some in itertools.groupby(seeds, key=lambda seed: seed[:2]):
        first, end = documents.offsets[number : number + 2].tolist()
        eval_first, eval_end = evals.offsets[eval_number : eval_number + 2].tolist()
        is_held = np.zeros(eval_end - eval_first, np.bool_)
        longest, run_shift, run_end = (0, 0), 0, 0
        for _, _, shift, begin in some:
            if shift == run_shift and begin < run_end:
                continue
            begin -= _num_equal_before(documents.keys[first:begin], evals.keys[eval_first : begin + shift])
            eval_begin = begin + shift
            length = min(end - begin, eval_end - eval_begin)
            is_equal = documents.keys[begin : begin + length] == evals.keys[eval_begin : eval_begin + length]
            differing = np.flatnonzero(~is_equal)[: num_gaps + 1]
            run_shift, run_end = shift, begin + int(differing[0]) if len(differing) else end
            if len(differing) > num_gaps:
                is_equal = is_equal[: differing[num_gaps]]
            is_equal = is_equal[: np.flatnonzero(is_equal)[-1] + 1]
            ours = documents.spell(begin, begin + len(is_equal))
            theirs = evals.spell(eval_begin, eval_begin + len(is_equal))
            both = itertools.compress(zip(ours, theirs, strict=True), is_equal)
            if all(one == other for one, other in both):
                is_held[eval_begin - eval_first :][: len(is_equal)] |= is_equal
                longest = max(longest, (len(is_equal), -begin))
        share = float(is_held.mean())
        if longest[0] and share >= min_share:
            num_units, begin = longest[0], -longest[1]
            yield Hit(
                document=number, eval_document=eval_number, begin=begin, num_units=num_units, share=share
            )


def _num_equal_before(ours: Keys, theirs: Keys) -> int:
    """Count the keys at the ends of both that are equal."""
    length = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[len(ours) - length :] != theirs[len(theirs) - length :])
    return length - 1 - int(differing[-1]) if len(differing) else length
