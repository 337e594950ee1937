"""Shards are opened in an order that spreads the processes of a job over shards and servers."""

from __future__ import annotations

import numpy as np
import pytest

from loader.reading import ReaderIndex, opening_order
from shardprep.errors import UsageError

SHARDS = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])


def orders(count: int) -> list[list[int]]:
    """The order of each of ``count`` processes."""
    indices = [ReaderIndex(number=number, count=count) for number in range(count)]
    return [opening_order(SHARDS, index).tolist() for index in indices]


@pytest.mark.parametrize("count", [1, 3, 5, 12, 40])
def test_every_process_opens_every_shard_once(count: int) -> None:
    for order in orders(count):
        assert sorted(order) == SHARDS.tolist()


def test_nothing_to_open_is_an_empty_order() -> None:
    nothing = np.zeros(0, np.int64)
    assert opening_order(nothing, ReaderIndex()).tolist() == []


def test_processes_begin_evenly_spread_and_go_on_upwards() -> None:
    assert [order[:2] for order in orders(4)] == [[2, 3], [7, 11], [17, 19], [29, 31]]
    assert orders(4)[3] == [29, 31, 37, 2, 3, 5, 7, 11, 13, 17, 19, 23]
    assert len({order[0] for order in orders(12)}) == 12


def test_the_workers_of_all_ranks_have_turns_of_their_own() -> None:
    readers = [
        ReaderIndex(number=rank, count=2).of_worker(worker, 3) for rank in range(2) for worker in range(3)
    ]
    assert [(each.number, each.count) for each in readers] == [(number, 6) for number in range(6)]


def test_an_impossible_turn_is_refused() -> None:
    with pytest.raises(UsageError, match="reader 4 of 4: expected 0 <= number < count"):
        ReaderIndex(number=4, count=4)
