"""loader/order/mixture.py: steps, shares and rounds of a run."""

from __future__ import annotations

import numpy as np
import pytest

from loader.order.mixture import CYCLE_TICKS, ROUND_TICKS, Position, Run, spread
from loader.order.planned import SourceFacts, make_run


def run_of(weights: dict[str, float], sizes: list[tuple[int, int]], num_samples: int = 5_000) -> Run:
    facts = SourceFacts(data="", num_samples=num_samples, num_bytes=1 << 20, row_tokens=0, mean_tokens=1)
    return make_run(
        dict.fromkeys(weights, facts),
        sizes,
        weights,
        tick_samples=8,
        batches_per_tick=1,
        group=1,
        seed=3,
        shuffle=True,
        keeps_tail=False,
        settings={},
    )


@pytest.mark.parametrize("shares", [(6554, 58982), (1, 65535), (21845, 21845, 21846)])
def test_at_any_tick_a_source_is_within_a_tick_of_its_share(shares: tuple[int, ...]) -> None:
    sources = spread(shares)
    for number, share in enumerate(shares):
        taken = np.cumsum(sources == number)
        exact = np.arange(1, CYCLE_TICKS + 1) * share / CYCLE_TICKS
        assert abs(taken - exact).max() <= 1
        assert taken[-1] == share


def test_in_a_round_each_slot_takes_equally_many_samples_of_a_source() -> None:
    run = run_of({"a": 0.7, "b": 0.3}, [(0, 8)])
    for tick in (0, 100, 700):
        round_ = run.round_at(tick)
        assert round_.first % ROUND_TICKS == 0
        pattern = run.pattern(round_, range(8))
        counts = {tuple(np.bincount(row, minlength=2)) for row in pattern}
        assert counts == {tuple(np.bincount(round_.sources, minlength=2))}
        assert len({tuple(row) for row in pattern.tolist()}) > 1


def test_a_step_that_does_not_fit_begins_the_next_epoch() -> None:
    run = run_of({"a": 1}, [(0, 8 * 5)], num_samples=8 * 58)  # the example of mixture.py
    assert (run.ticks_per_epoch, run.steps_in(0), run.ticks_in(0)) == (58, 11, 55)
    assert run.epoch_and_tick(Position(11)) == (1, 0)
    assert run.tick_of(Position(11)) == 58
