"""The sampling order, by its promises."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.order import Order, choose_windows, hash_array, hash_ints, permute, share
from shardprep.errors import UsageError
from tests.ticks import samples_of_tick

HASH_OF_0 = 7960286522194355700
HASH_OF_1_2_3 = 9561316468229751942
HASHES_UNDER_5 = [7134611160154358618, 7958955049054603978]
PERMUTED_6 = [1, 5, 3, 2, 4, 0]
BATCHES = [[15, 29, 34, 44], [9, 39, 46, 35]]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    global_batch = draw(st.integers(1, 48))
    num_samples = draw(st.integers(global_batch, 4000))
    return Order(
        num_samples=num_samples,
        tick_samples=global_batch,
        block_samples=draw(st.integers(1, max(1, num_samples // (2 * global_batch)))),
        window_samples=draw(st.integers(1, 2 * num_samples)),
        seed=draw(st.integers(-(2**63), 2**63)),
        shuffle=draw(st.booleans()),
    )


def delivered(order: Order, epoch: int, slots: range, first_step: int = 0) -> np.ndarray:
    """What slots deliver from a step to the end of an epoch: int64[slots, steps]."""
    parts = []
    for start, end in order.windows(first_step):
        parts.append(order.samples_of(epoch, slots, start, end)[:, max(first_step - start, 0) :])
    return np.concatenate(parts, axis=1) if parts else np.empty((len(slots), 0), np.int64)


@pytest.mark.slow
@settings(max_examples=150)
@given(orders(), st.integers(0, 2**40))
def test_an_epoch_gives_each_sample_once_but_the_counted_remainder(order: Order, epoch: int) -> None:
    samples = delivered(order, epoch, range(order.tick_samples))
    assert samples.shape == (order.tick_samples, order.ticks_per_epoch)
    assert len(np.unique(samples)) == samples.size == order.num_samples - order.num_left_out
    assert 0 <= samples.min() <= samples.max() < order.num_samples
    assert 0 <= order.num_left_out < order.tick_samples


@pytest.mark.slow
@settings(max_examples=150)
@given(orders(), st.integers(0, 99), st.data())
def test_ranks_and_workers_only_share_the_slots_of_a_global_batch_out(
    order: Order, epoch: int, data: st.DataObject
) -> None:
    size = order.tick_samples
    world = data.draw(st.sampled_from([w for w in range(1, size + 1) if size % w == 0]))
    workers = data.draw(st.integers(1, size // world))
    whole = delivered(order, epoch, range(size))
    parts = []
    for rank in range(world):
        slots = share(range(size), rank, world)
        assert len(slots) == size // world
        parts += [delivered(order, epoch, share(slots, number, workers)) for number in range(workers)]
    assert np.array_equal(np.concatenate(parts), whole)


@settings(max_examples=100)
@given(orders(), st.integers(0, 99), st.data())
def test_starting_at_any_step_gives_the_rest_of_the_unbroken_epoch(
    order: Order, epoch: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, order.ticks_per_epoch - 1))
    slots = range(order.tick_samples)
    whole = delivered(order, epoch, slots)
    assert np.array_equal(delivered(order, epoch, slots, step), whole[:, step:])
    assert samples_of_tick(order, epoch, step) == whole[:, step].tolist()


def test_without_shuffle_global_batch_k_is_the_kth_slice_of_the_data_set() -> None:
    order = Order(
        num_samples=23, tick_samples=4, block_samples=2, window_samples=16 * 2, seed=1, shuffle=False
    )
    assert [samples_of_tick(order, 3, k) for k in range(5)] == [
        list(range(4 * k, 4 * k + 4)) for k in range(5)
    ]


def test_epochs_and_seeds_each_have_an_order_of_their_own() -> None:
    def first_batches(seed: int, epoch: int) -> tuple[int, ...]:
        order = Order(num_samples=1000, tick_samples=8, block_samples=4, window_samples=16 * 4, seed=seed)
        return tuple(samples_of_tick(order, epoch, 0))

    seen = {first_batches(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(seen) == 25


@pytest.mark.slow
def test_each_epoch_leaves_out_other_samples_and_none_more_often_than_chance() -> None:
    order = Order(num_samples=103, tick_samples=10, block_samples=3, window_samples=16 * 3, seed=7)
    num_epochs = 2000
    drops: Counter[int] = Counter()
    for epoch in range(num_epochs):
        left = set(range(103)) - set(delivered(order, epoch, range(10)).ravel().tolist())
        assert len(left) == 3
        drops.update(left)
    chance = 3 / 103
    sigma = math.sqrt(num_epochs * chance * (1 - chance))
    assert max(abs(drops[sample] - num_epochs * chance) for sample in range(103)) < 4.5 * sigma


@settings(max_examples=60)
@given(st.data(), st.integers(0, 99))
def test_groups_are_of_like_length_and_still_give_each_sample_once(data: st.DataObject, epoch: int) -> None:
    group, slots = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    num_samples = data.draw(st.integers(group * slots, 1500))
    order = Order(
        num_samples=num_samples,
        tick_samples=group * slots,
        block_samples=data.draw(st.integers(1, 20)),
        window_samples=data.draw(st.integers(1, 300)),
        group=group,
        seed=data.draw(st.integers(0, 99)),
    )
    lengths = hash_array(1, np.arange(num_samples)).astype(np.int64) % 1000

    def window(which: range, start: int, end: int) -> np.ndarray:
        return order.samples_of(epoch, which, start, end, lengths.__getitem__)

    seen = []
    for start, end in order.windows(0):
        whole = window(range(slots), start, end)
        seen += whole.reshape(-1).tolist()
        part = data.draw(st.integers(0, slots - 1))
        assert np.array_equal(
            window(range(part, part + 1), start, end), whole[part * group : (part + 1) * group]
        )
        slot = np.sort(lengths[whole[:group].T], axis=1)  # the slices of one slot do not overlap in length
        slot = slot[np.lexsort((slot[:, -1], slot[:, 0]))]
        assert (np.sort(slot[:-1, -1]) <= np.sort(slot[1:, 0])).all()
    assert len(set(seen)) == len(seen) == order.ticks_per_epoch * group * slots


def test_mixing_of_shards_sorted_by_source_stays_near_a_full_permutations() -> None:
    """Variance of a source's share, against a full permutation's, over one step and over 64."""
    num_samples, global_batch, num_sources = 20 * 25_600, 64, 20
    block, window = choose_windows(
        num_samples=num_samples, num_bytes=8192 * num_samples, tick_samples=global_batch
    )
    order = Order(
        num_samples=num_samples,
        tick_samples=global_batch,
        block_samples=block,
        window_samples=window,
        seed=1,
    )
    slots = delivered(order, 0, range(global_batch))
    steps = slots.T[: slots.shape[1] // 64 * 64] // (num_samples // num_sources)
    chance = 1 / num_sources
    for span, limit in ((1, 1.2), (64, 6.0)):
        counts = np.stack([(steps == source).sum(1) for source in range(num_sources)])
        shares = counts.reshape(num_sources, -1, span).sum(2)
        fair = span * global_batch * chance * (1 - chance)
        assert float(((shares - span * global_batch * chance) ** 2).mean()) / fair <= limit


def test_a_sample_meets_every_step_about_equally_often() -> None:
    order = Order(num_samples=256, tick_samples=4, block_samples=4, window_samples=16 * 4, seed=3)
    steps: Counter[int] = Counter()
    for epoch in range(1000):
        steps[int(np.argwhere(delivered(order, epoch, range(4)) == 17)[0][1]) // 8] += 1
    assert min(steps[part] for part in range(8)) > 125 - 5 * math.sqrt(125)
    assert max(steps[part] for part in range(8)) < 125 + 5 * math.sqrt(125)


def test_three_samples_and_a_batch_of_one_make_three_shuffled_batches() -> None:
    order = Order(num_samples=3, tick_samples=1, block_samples=1, window_samples=16 * 1, seed=0)
    epochs = {tuple(delivered(order, epoch, range(1))[0].tolist()) for epoch in range(60)}
    assert epochs == {(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


def test_too_few_samples_for_one_tick_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError) as error:
        Order(num_samples=7, tick_samples=8, block_samples=1, window_samples=16, seed=0)
    assert (error.value.found, error.value.expected) == ("7 samples", "8")


def test_a_billion_samples_cost_no_more_memory_than_a_window() -> None:
    order = Order(num_samples=10**9 + 7, tick_samples=64, block_samples=250, window_samples=16 * 250, seed=0)
    window = order.samples_of(0, range(8), 0, order.window_ticks)
    assert window.shape == (8, 16 * 250)
    assert len(np.unique(window)) == window.size


def test_blocks_are_as_large_as_memory_allows_unless_slots_would_get_too_few_of_them() -> None:
    kib = {"num_samples": 10**7, "num_bytes": 1024 * 10**7}
    assert choose_windows(**kib, tick_samples=8) == (512, 16 * 512)
    assert choose_windows(**kib, tick_samples=64) == (128, 16 * 128)
    assert choose_windows(**kib, tick_samples=256) == (128, 4 * 128)
    assert choose_windows(**kib, tick_samples=512) == (256, 4 * 256)
    many = {"num_samples": 10**9, "num_bytes": 1024 * 10**9}
    assert choose_windows(**many, tick_samples=2048) == (1024, 4 * 1024)
    assert choose_windows(**many, tick_samples=32_768) == (1024, 4 * 1024)
    assert choose_windows(num_samples=16 * 64 * 3, num_bytes=10**6, tick_samples=64) == (3, 48)
    assert choose_windows(num_samples=10, num_bytes=10**9, tick_samples=10) == (1, 16)
    assert choose_windows(**kib, tick_samples=64, group=32) == (512, 8192)


@pytest.mark.parametrize("global_batch", [1, 8, 32, 64, 100, 256, 1024, 4096, 32_768])
def test_windows_take_128_mib_of_all_ranks_and_from_256_samples_on_up_to_4_mib_of_each(
    global_batch: int,
) -> None:
    sample_bytes = 8192
    _, window = choose_windows(num_samples=10**9, num_bytes=sample_bytes * 10**9, tick_samples=global_batch)
    stated = 128 << 20 if global_batch <= 256 else global_batch * min(global_batch * 2048, 4 << 20)
    assert stated // 2 <= global_batch * window * sample_bytes <= stated or global_batch == 1


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_the_block_permutation_is_one(count: int, key: int) -> None:
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


def test_hashes_never_change() -> None:
    """Pinned: another value would break every resumed run."""
    assert hash_ints(0) == HASH_OF_0
    assert hash_ints(1, 2, 3) == HASH_OF_1_2_3
    assert hash_array(5, np.arange(2)).tolist() == HASHES_UNDER_5
    assert permute(np.arange(6), 6, 42).tolist() == PERMUTED_6


@pytest.mark.parametrize("count", [2, 5, 17, 256, 257, 1500])
def test_a_permutation_is_the_same_with_and_without_its_table(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = np.random.default_rng(count).integers(0, count, (3, 40))
    by_table = permute(positions, count, 7)
    monkeypatch.setattr("loader.order._TABLE_SIZE", 0)
    walked = permute(positions, count, 7)
    assert walked.shape == positions.shape
    assert walked.tolist() == by_table.tolist()
    order = Order(num_samples=50, tick_samples=4, block_samples=2, window_samples=16 * 2, seed=9)
    assert [samples_of_tick(order, 1, tick) for tick in (0, 11)] == BATCHES


def test_the_loader_draws_nothing_from_generators_whose_streams_may_change_with_a_version() -> None:
    modules = sorted((Path(__file__).parents[2] / "loader").rglob("*.py"))
    assert len(modules) > 20
    drawing = re.compile(
        r"np\.random|numpy\.random|torch\.rand(?!om\.fork_rng)|^\s*(import|from) random", re.MULTILINE
    )
    assert not [path.name for path in modules if drawing.search(path.read_text(encoding="utf-8"))]


def test_scalar_and_array_hashes_are_splitmix64() -> None:
    """The published first output of splitmix64 for the seed 0."""
    assert hash_array(0, np.zeros(1, np.int64))[0] == 0xE220A8397B1DCDAF
