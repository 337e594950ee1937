"""loader/order/order.py: the ticks of one source."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from loader.order.order import Order, choose_windows, share


def ticks_of(order: Order, epoch: int, slots: range) -> list[list[int]]:
    """Return the samples of some slots at each tick of an epoch."""
    lengths = np.arange(order.num_samples) % 7
    ticks: list[list[int]] = []
    for start, end in order.windows(0):
        ticks += order.samples_of(epoch, slots, start, end, lambda samples: lengths[samples]).T.tolist()
    return ticks


@pytest.mark.parametrize(("group", "shuffle"), [(1, True), (3, True), (1, False)])
def test_an_epoch_has_each_sample_once_but_the_rest(group: int, shuffle: bool) -> None:
    order = Order(
        num_samples=101,
        tick_samples=6,
        block_samples=4,
        window_samples=12,
        seed=1,
        shuffle=shuffle,
        group=group,
    )
    for epoch in range(3):
        samples = [*chain.from_iterable(ticks_of(order, epoch, range(order.num_slots)))]
        assert len(samples) == len(set(samples)) == 101 - order.num_left_out
        assert set(samples) <= {*range(101)}


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_ranks_divide_the_places_of_each_tick(num_ranks: int) -> None:
    order = Order(num_samples=101, tick_samples=6, block_samples=4, window_samples=8, seed=1)
    of_ranks = [ticks_of(order, 2, share(range(6), rank, num_ranks)) for rank in range(num_ranks)]
    joined = [[*chain.from_iterable(parts)] for parts in zip(*of_ranks, strict=True)]
    assert joined == ticks_of(order, 2, range(6))


def test_a_last_tick_that_is_filled_up_has_each_sample_and_marks_repeats() -> None:
    order = Order(
        num_samples=10,
        tick_samples=4,
        block_samples=1,
        window_samples=1,
        seed=0,
        shuffle=False,
        keeps_tail=True,
    )
    ticks = ticks_of(order, 0, range(4))
    repeats = order.is_filler(2, range(4))
    assert repeats is not None
    new = [sample for sample, is_repeat in zip(ticks[2], repeats, strict=True) if not is_repeat]
    assert [*chain(ticks[0], ticks[1], new)] == [*range(10)]


def test_blocks_grow_with_the_slots_so_that_a_step_opens_no_more_shards() -> None:
    million = {"num_samples": 10**8, "num_bytes": 10**12}
    blocks = {size: choose_windows(**million, tick_samples=size)[0] for size in (64, 256, 1024, 4096)}
    assert blocks == {64: 13, 256: 13, 1024: 52, 4096: 104}
