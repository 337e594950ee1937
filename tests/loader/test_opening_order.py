"""Shards are opened in an order that spreads the processes of a job over shards and servers."""

from __future__ import annotations

import numpy as np
import pytest

from loader.reading import ReaderIndex, opening_order
from shardprep.errors import UsageError

SHARDS = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])


def orders(count: int, osts: list[int] | None = None) -> list[list[int]]:
    """The order of each of ``count`` processes."""
    known = None if osts is None else np.array(osts)
    return [
        opening_order(SHARDS, ReaderIndex(number=number, count=count), known).tolist()
        for number in range(count)
    ]


@pytest.mark.parametrize("osts", [None, [0, 1, 2, 3] * 3, [7] * 12, [0] * 9 + [4, 4, -1]])
@pytest.mark.parametrize("count", [1, 3, 5, 12, 40])
def test_every_process_opens_every_shard_once(count: int, osts: list[int] | None) -> None:
    for order in orders(count, osts):
        assert sorted(order) == SHARDS.tolist()


def test_nothing_to_open_is_an_empty_order() -> None:
    nothing = np.zeros(0, np.int64)
    assert opening_order(nothing, ReaderIndex()).tolist() == []
    assert opening_order(nothing, ReaderIndex(), nothing).tolist() == []


def test_without_osts_processes_begin_evenly_spread_and_go_on_upwards() -> None:
    assert [order[:2] for order in orders(4)] == [[2, 3], [7, 11], [17, 19], [29, 31]]
    assert orders(4)[3] == [29, 31, 37, 2, 3, 5, 7, 11, 13, 17, 19, 23]
    assert len({order[0] for order in orders(12)}) == 12


@pytest.mark.parametrize("osts", [[0, 1, 2, 3] * 3, [0] * 3 + [1] * 3 + [2] * 3 + [9] * 3])
def test_as_many_processes_as_osts_are_never_on_one_ost_together(osts: list[int]) -> None:
    ost_of = dict(zip(SHARDS.tolist(), osts, strict=True))
    for opened in zip(*orders(4, osts), strict=True):
        assert len({ost_of[shard] for shard in opened}) == 4


def test_more_processes_than_osts_are_spread_evenly_and_begin_with_different_shards() -> None:
    osts = [0, 1, 2, 3] * 3
    ost_of = dict(zip(SHARDS.tolist(), osts, strict=True))
    first = [order[0] for order in orders(12, osts)]
    assert sorted(first) == SHARDS.tolist()
    assert sorted(ost_of[shard] for shard in first) == sorted(osts)


def test_one_process_takes_the_osts_in_turn() -> None:
    assert orders(1, [0] * 6 + [1] * 6)[0] == [2, 17, 3, 19, 5, 23, 7, 29, 11, 31, 13, 37]


def test_an_ost_with_more_shards_gets_its_turns_throughout() -> None:
    crowded = SHARDS[:9].tolist()
    order = orders(1, [0] * 9 + [1] * 3)[0]
    places = [place for place, shard in enumerate(order) if shard not in crowded]
    assert places[0] <= 1
    assert max(np.diff([*places, len(order)])) <= 5


def test_the_workers_of_all_ranks_have_turns_of_their_own() -> None:
    readers = [
        ReaderIndex(number=rank, count=2).of_worker(worker, 3) for rank in range(2) for worker in range(3)
    ]
    assert [(each.number, each.count) for each in readers] == [(number, 6) for number in range(6)]


def test_an_impossible_turn_is_refused() -> None:
    with pytest.raises(UsageError, match="reader 4 of 4: expected 0 <= number < count"):
        ReaderIndex(number=4, count=4)
