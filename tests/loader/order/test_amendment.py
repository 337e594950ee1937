"""loader/order/amendment.py: a run that goes on with other weights, sources or sizes."""

from __future__ import annotations

import numpy as np

from loader.order.amendment import amended, last_amended, with_amended_mark
from loader.order.mixture import ROUND_TICKS, Position
from tests.loader.order.test_mixture import run_of

BEFORE = run_of({"a": 0.7, "b": 0.3}, [(0, 8)])
EQUAL = run_of({"a": 0.5, "b": 0.5}, [(0, 8)])


def test_other_weights_begin_where_no_round_is_half_done() -> None:
    run, border = amended(BEFORE, 10, EQUAL)
    assert 10 <= border < 10 + ROUND_TICKS
    tick = run.tick_of(Position(border))
    assert BEFORE.round_at(tick).first == run.round_at(tick).first == tick
    assert last_amended(run) == border
    # Up to there the run is the one that began.
    for tick in range(border):
        assert np.array_equal(run.round_at(tick).sources, BEFORE.round_at(tick).sources)


def test_a_new_source_is_added_behind_the_others_with_its_own_order() -> None:
    asked = run_of({"c": 0.2, "a": 0.5, "b": 0.3}, [(0, 8)])
    run, border = amended(BEFORE, 10, asked)
    assert [(each.name, each.added_at) for each in run.sources] == [("a", 0), ("b", 0), ("c", border)]
    assert len({each.order.seed for each in run.sources}) == 3


def test_an_amendment_that_has_not_begun_is_replaced() -> None:
    once, border = amended(BEFORE, 10, EQUAL)
    again, _ = amended(once, border - 1, EQUAL)
    assert last_amended(again) >= border - 1
    back, _ = amended(once, 1, BEFORE)
    assert sum(stage.is_amended for stage in back.stages) == 1


def test_a_mark_changes_no_step() -> None:
    marked = with_amended_mark(BEFORE, 5)
    assert (last_amended(BEFORE), last_amended(marked)) == (0, 5)
    assert [*marked.stages_from(5)[0].weights] == [*BEFORE.stages_from(5)[0].weights]
