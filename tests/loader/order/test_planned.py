"""loader/order/planned.py: weights and sizes as the arguments give them."""

from __future__ import annotations

import pytest

from loader import UsageError
from loader.order.planned import SourceFacts, choose_sizes, make_run


def weights_of(weights: object, means: dict[str, float], num_samples: int = 999) -> dict[str, float]:
    facts = {
        name: SourceFacts(data="", num_samples=num_samples, num_bytes=9999, row_tokens=0, mean_tokens=mean)
        for name, mean in means.items()
    }
    given: object = weights
    run = make_run(
        facts,
        [(0, 4)],
        given,  # type: ignore[arg-type]
        tick_samples=4,
        batches_per_tick=1,
        group=1,
        seed=0,
        shuffle=True,
        keeps_tail=False,
        settings={},
    )
    return dict(run.stages[0].weights)


def test_proportional_weights_are_equal_to_the_last_digit() -> None:
    one = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert weights_of({"a": 0.1, "b": 0.2, "c": 0.7}, one) == weights_of({"a": 1, "b": 2, "c": 7}, one)


def test_weights_in_tokens_are_divided_by_the_mean_tokens_of_samples() -> None:
    assert weights_of({"a": 1, "b": 1}, {"a": 300.0, "b": 100.0}) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize("weights", [{}, {"a": 0, "b": 0}, {"a": -1, "b": 2}, {"z": 1}, {"a": 1e-6, "b": 1}])
def test_weights_that_give_no_shares_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        weights_of(weights, {"a": 1.0, "b": 1.0})


def test_a_source_that_is_too_small_is_named() -> None:
    with pytest.raises(UsageError) as error:
        weights_of({"chat": 1}, {"chat": 1.0}, num_samples=3)
    assert error.value.found == "3 samples of source chat"


def test_a_tick_is_the_greatest_common_divisor_of_all_sizes() -> None:
    sizes = [(0, 64), (100, 96)]
    assert choose_sizes(sizes, False, batch_size=8, world_size=2) == (32, 1, sizes)
    assert choose_sizes(None, True, batch_size=8, world_size=2) == (16, 8, [(0, 16)])
