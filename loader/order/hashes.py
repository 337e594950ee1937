"""Hashes and permutations of the order: our own, since numpy's may change between its versions."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
_TABLE_SIZE = 4096  # largest permutation that is computed as a whole
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
FEISTEL_ROUNDS = 6


def hash_ints(*values: int) -> int:
    """Hash a sequence of integers to 64 bits by chained splitmix64."""
    state = 0
    for value in values:
        state = ((state + _GOLDEN ^ value) + _GOLDEN) & _MASK
        state = ((state ^ state >> 30) * _FIRST) & _MASK
        state = ((state ^ state >> 27) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def hash_array(key: npt.NDArray[np.uint64] | int, values: Int64s) -> npt.NDArray[np.uint64]:
    """Hash each value with a key by splitmix64: uint64, in the shape to which the two broadcast."""
    state = np.asarray(key, np.uint64) ^ values.astype(np.uint64)
    state += np.uint64(_GOLDEN)
    state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
    return state ^ state >> np.uint64(31)


def hash_after(state: npt.NDArray[np.uint64] | int, values: Int64s) -> npt.NDArray[np.uint64]:
    """Continue ``hash_ints`` with each value: ``hash_after(hash_ints(a), [b])`` is ``[hash_ints(a, b)]``."""
    # At least one dimension: numpy warns of scalars that overflow.
    return hash_array(np.atleast_1d(np.asarray(state, np.uint64)) + np.uint64(_GOLDEN), values)


def permute(positions: Int64s, count: int, key: int) -> Int64s:
    """Apply a keyed permutation of ``range(count)`` to positions, in the same shape.

    It applies a Feistel network over the next power of four until the value is below ``count``, fewer than
    four times on average. So it needs no table of ``count`` numbers, unless ``count`` is small.
    """
    if count < 2:
        return positions.copy()
    half = ((count - 1).bit_length() + 1) // 2  # half the bits of a value
    if count <= _TABLE_SIZE:
        return _permutation(count, half, key)[positions]
    found = _feistel(positions.reshape(-1), half, key)
    walking = np.flatnonzero(found >= count)
    while walking.size:
        found[walking] = _feistel(found[walking], half, key)
        walking = walking[found[walking] >= count]
    return found.reshape(positions.shape)


def unpermute(permuted: Int64s, count: int, key: int) -> Int64s:
    """Undo ``permute``: int64[n] -> int64[n]."""
    if count < 2:
        return permuted.copy()
    half = ((count - 1).bit_length() + 1) // 2
    positions = _feistel_back(permuted, half, key)
    walking = np.flatnonzero(positions >= count)
    while walking.size:
        positions[walking] = _feistel_back(positions[walking], half, key)
        walking = walking[positions[walking] >= count]
    return positions


@lru_cache(maxsize=8)
def _permutation(count: int, half: int, key: int) -> Int64s:
    """Compute a small permutation, int64[count]. It is cached, since all windows of an epoch use it."""
    # Apply the network to all values at once: repeating it for ever fewer values takes five times as long.
    whole = _feistel(np.arange(1 << 2 * half), half, key)
    found = whole[:count].copy()
    while (walking := np.flatnonzero(found >= count)).size:
        found[walking] = whole[found[walking]]
    return found


def _feistel(values: Int64s, half: int, key: int) -> Int64s:
    """Apply the network once to values of ``2 * half`` bits: int64[n] -> int64[n]."""
    mask = (1 << half) - 1
    left = values >> half
    right = values & mask
    for round_ in range(FEISTEL_ROUNDS):
        sent = hash_array(hash_ints(key, round_), right).astype(np.int64) & mask
        left, right = right, left ^ sent
    return left << half | right


def _feistel_back(values: Int64s, half: int, key: int) -> Int64s:
    """Undo ``_feistel``: int64[n] -> int64[n]."""
    mask = (1 << half) - 1
    left = values >> half
    right = values & mask
    for round_ in reversed(range(FEISTEL_ROUNDS)):
        sent = hash_array(hash_ints(key, round_), left).astype(np.int64) & mask
        left, right = right ^ sent, left
    return left << half | right
