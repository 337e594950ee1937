"""Random numbers that never change: an integer hash of our own, and a permutation made of it.

numpy's Generator streams may differ between its versions, and a resumed run must not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
FEISTEL_ROUNDS = 6


def hash_ints(*values: int) -> int:
    """One 64-bit hash of a row of integers: splitmix64, chained."""
    state = 0
    for value in values:
        state = _mix((state + _GOLDEN ^ value) & _MASK)
    return state


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ state >> 30) * _FIRST) & _MASK
    state = ((state ^ state >> 27) * _SECOND) & _MASK
    return state ^ state >> 31


def hash_array(key: npt.NDArray[np.uint64] | int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of every value under a key: uint64, in the shape that the two broadcast to."""
    state = np.asarray(key, np.uint64) ^ values.astype(np.uint64)
    state = state + np.uint64(_GOLDEN)
    state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
    return state ^ state >> np.uint64(31)


def permute(positions: npt.NDArray[np.int64], count: int, key: int) -> npt.NDArray[np.int64]:
    """Where a keyed permutation of ``range(count)`` sends some positions; same shape as they.

    A Feistel network over the next power of four, walked until it lands below ``count``
    (fewer than four steps on average), so nothing of size ``count`` is ever held.
    """
    if count < 2:
        return positions.copy()
    half = np.int64(((count - 1).bit_length() + 1) // 2)
    mask = np.int64((1 << int(half)) - 1)
    keys = [hash_ints(key, round_) for round_ in range(FEISTEL_ROUNDS)]
    result = positions.copy()
    flat = result.reshape(-1)
    walking = np.arange(flat.size)
    while walking.size:
        left, right = flat[walking] >> half, flat[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (hash_array(round_key, right).astype(np.int64) & mask)
        flat[walking] = left << half | right
        walking = walking[flat[walking] >= count]
    return result
