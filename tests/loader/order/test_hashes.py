"""loader/order/hashes.py: our own hash, and permutations without a table."""

from __future__ import annotations

import numpy as np
import pytest

from loader.order.hashes import hash_array, hash_ints, permute


def test_a_hash_never_changes() -> None:
    # The first and the second number of splitmix64 with seed 0.
    assert hash_array(0, np.arange(1)).tolist() == [0xE220A8397B1DCDAF]
    assert hash_ints(0) == 0x6E789E6AA1B965F4
    assert hash_ints(1, 2, 3) != hash_ints(3, 2, 1)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 4096, 4097, 10_000])
def test_a_permutation_has_each_number_once(count: int) -> None:
    numbers = permute(np.arange(count), count, key=7)
    assert sorted(numbers.tolist()) == [*range(count)]
    if count > 3:
        assert numbers.tolist() != permute(np.arange(count), count, key=8).tolist()
