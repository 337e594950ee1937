"""The arithmetic of runs: steps, epochs, shares and rounds, compared with counting one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.order import Order
from loader.run import CYCLE, ROUND, Position, Run, Source, Stage, spread
from shardprep.errors import UsageError


def make_run(
    stages: Sequence[tuple[int, int, tuple[int, ...] | None]],
    num_sources: int = 1,
    ticks_per_epoch: int = 100,
    size: int = 4,
) -> Run:
    """Return a run of sources of equal size; a stage is its step, ticks per step and shares."""
    order = Order(
        num_samples=ticks_per_epoch * size // num_sources,
        tick_samples=size,
        block_samples=2,
        window_samples=8,
        seed=1,
    )
    return Run(
        sources=tuple(Source(name=f"s{n}", data="", order=order) for n in range(num_sources)),
        stages=tuple(
            Stage(
                step=step,
                ticks_per_step=ticks,
                weights=None if shares is None else {f"s{n}": s / CYCLE for n, s in enumerate(shares)},
            )
            for step, ticks, shares in stages
        ),
        batches_per_tick=2,
        seed=5,
        is_mixture=True,
    )


def test_positions_steps_and_ticks_are_those_of_counting_one_by_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        firsts = [0, *sorted(draw.sample(range(1, 60), draw.randrange(4)))]
        stages = [(first, draw.randint(1, 6), (CYCLE,) if not first else None) for first in firsts]
        ticks_per_epoch = draw.randint(6, 25)
        run = make_run(stages, ticks_per_epoch=ticks_per_epoch)
        epoch = step = tick = 0
        for number in range(150):
            size = run.ticks_in_step(number)
            if tick + size > ticks_per_epoch:
                assert (run.steps_in(epoch), run.ticks_in(epoch)) == (step, tick)
                epoch, step, tick = epoch + 1, 0, 0
            assert run.begin(number) == (epoch, tick)
            assert run.first_step(epoch) + step == number
            assert run.step_from(epoch * ticks_per_epoch + tick) == number
            assert size == 1 or run.step_from(epoch * ticks_per_epoch + tick + 1) == number + 1
            step, tick = step + 1, tick + size
        again = make_run(stages, ticks_per_epoch=ticks_per_epoch)
        assert again.begin(149) == run.begin(149), "asked for at once"


def test_a_step_that_is_more_than_an_epoch_is_refused() -> None:
    with pytest.raises(UsageError):
        make_run([(0, 1, (CYCLE,)), (5, 11, None)], ticks_per_epoch=10)


@pytest.mark.parametrize("shares", [(32768, 19661, 13100, 7), (65535, 1), (0, 65536), (1, 0, 65535)])
def test_a_source_is_never_two_ticks_from_its_share(shares: tuple[int, ...]) -> None:
    sources = spread(shares)
    assert np.bincount(sources, minlength=len(shares)).tolist() == list(shares)
    taken = np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0)
    expected = np.arange(1, CYCLE + 1)[:, None] * np.array(shares) / CYCLE
    assert np.abs(taken - expected).max() < 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rounds_follow_each_other_and_every_slot_has_each_source_equally_often(data: st.DataObject) -> None:
    firsts = [0, *sorted(data.draw(st.sets(st.integers(1, 300), max_size=3)))]
    cuts = [data.draw(st.integers(0, CYCLE)) for _ in firsts]
    run = make_run([(first, 1, (cut, CYCLE - cut)) for first, cut in zip(firsts, cuts, strict=True)], 2)
    tick, taken = 0, np.zeros(2, np.int64)
    while tick < 500:
        of_round = run.round_at(tick)
        assert run.round_at(of_round.end - 1)[:2] == of_round[:2] == (tick, of_round.end)
        assert of_round.end - tick == ROUND or of_round.end in firsts
        assert of_round.taken.tolist() == taken.tolist()
        pattern = run.pattern(of_round, range(4))
        counts = [np.bincount(of_slot, minlength=2).tolist() for of_slot in pattern]
        assert counts == [counts[0]] * 4
        taken, tick = taken + counts[0], of_round.end


def test_a_sources_share_of_a_tick_varies_as_in_a_full_shuffle() -> None:
    num_slots, share = 64, round(0.3 * CYCLE)
    run = make_run([(0, 1, (CYCLE - share, share))], 2, ticks_per_epoch=1000, size=num_slots)
    patterns = [run.pattern(run.round_at(first), range(num_slots)) for first in range(0, 400 * ROUND, ROUND)]
    counts = np.concatenate([(pattern == 1).sum(axis=0) for pattern in patterns])
    assert counts.mean() == pytest.approx(0.3 * num_slots, rel=0.01)
    assert 0.8 < counts.var() / (num_slots * 0.7 * 0.3) < 1.05


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_amendment_holds_from_the_first_step_at_which_no_round_is_half_done(data: st.DataObject) -> None:
    """Whatever the sizes of steps: all that was delivered stays where it was, also if it is amended again."""
    ticks = st.integers(1, 7)

    def some_stages(least: int) -> list[tuple[int, int, tuple[int, ...] | None]]:
        stages: list[tuple[int, int, tuple[int, ...] | None]] = []
        for first in [0, *sorted(data.draw(st.sets(st.integers(least, least + 90), max_size=2)))]:
            share = data.draw(st.integers(0, CYCLE))
            has_shares = not first or data.draw(st.booleans())
            stages.append((first, data.draw(ticks), (share, CYCLE - share) if has_shares else None))
        return stages

    size = data.draw(st.sampled_from([20, 64, 100]))
    run = make_run(some_stages(1), 2, ticks_per_epoch=size)
    for _ in range(3):
        step = data.draw(st.integers(1, 200))
        position = Position(step)
        plan = make_run(some_stages(step + 1), 2, ticks_per_epoch=size)
        amended, border = run.amended(position, plan)
        assert amended.begin(step) == run.begin(step)
        assert step <= border <= step + 2 * ROUND
        tick = 0
        while tick < run.tick_of(position):
            old, new = run.round_at(tick), amended.round_at(tick)
            assert [*map(str, old)] == [*map(str, new)]
            tick = old.end
        run = amended


def test_samples_that_an_epoch_does_not_use_are_not_counted() -> None:
    run = make_run([(0, 3, (CYCLE // 2, CYCLE // 2))], 2, ticks_per_epoch=100)
    assert run.ticks_in(0) == 99
    for step in (33, 34, 80, 200):
        counts = run.source_samples(Position(step))
        assert sum(counts.values()) == step * 3 * 4


def test_equal_steps_of_epochs_follow_each_other_without_a_gap() -> None:
    run = make_run([(0, 1, (CYCLE,)), (7, 3, None), (40, 2, None)], ticks_per_epoch=50)
    sizes: Counter[int] = Counter()
    for step, later in pairwise(range(300)):
        end = run.tick_of_step(step) + run.ticks_in_step(step)
        assert end <= run.tick_of_step(later)
        sizes[run.tick_of_step(later) - end] += 1
    assert max(sizes) < 3, "less than a step is left at the end of an epoch"
