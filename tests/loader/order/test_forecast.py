"""loader/order/forecast.py: counts of a run, by brute force beside its arithmetic."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from loader.order.amendment import amended
from loader.order.forecast import Forecast
from loader.order.hashes import Int64s, permute, unpermute
from loader.order.mixture import Position, Run
from loader.order.planned import SourceFacts, make_run


def lengths_of(samples: Int64s) -> Int64s:
    return samples * 7919 % 13


def random_run(drawn: random.Random) -> Run:
    names = "abc"[: drawn.randint(1, 3)]
    group = drawn.choice([1, 1, 2, 3])
    size = group * drawn.choice([2, 4, 6])
    is_validation = len(names) == group == 1 and drawn.random() < 0.5
    facts = {
        name: SourceFacts(
            data=name,
            num_samples=drawn.randint(size, 300),
            num_bytes=drawn.choice([10**3, 10**6, 10**9]),
            row_tokens=0,
            mean_tokens=1,
        )
        for name in names
    }
    most = max(1, min(4, sum(each.num_samples // size for each in facts.values())))

    def draw_weights() -> dict[str, float]:
        return {name: drawn.random() + 0.01 for name in names}

    def run_of(sizes: list[tuple[int, int]], stages: list[tuple[int, dict[str, float]]] | None) -> Run:
        return make_run(
            facts,
            sizes,
            stages,
            tick_samples=size,
            batches_per_tick=1,
            group=group,
            seed=drawn.randint(0, 99),
            shuffle=not is_validation and (group > 1 or drawn.random() < 0.8),
            keeps_tail=is_validation,
            settings={},
        )

    sizes = [(0, size if is_validation else size * drawn.randint(1, most))]
    if not is_validation and drawn.random() < 0.5:
        sizes.append((drawn.randint(1, 50), size * drawn.randint(1, most)))
    if len(names) == 1:
        return run_of(sizes, None)
    run = run_of(sizes, [(0, draw_weights()), (drawn.randint(1, 40), draw_weights())])
    if drawn.random() < 0.4:
        run, _ = amended(run, drawn.randint(1, 30), run_of(sizes[:1], [(0, draw_weights())]))
    return run


def delivered_by(run: Run, num_steps: int) -> tuple[dict[str, Counter[int]], dict[str, int]]:
    """Return how often each sample is delivered, and the first step of each source's second epoch."""
    seen = {source.name: Counter[int]() for source in run.sources}
    second: dict[str, int] = {}

    @cache
    def window_of(number: int, epoch: int, slot: int, start: int, end: int) -> Int64s:
        return run.sources[number].order.samples_of(epoch, range(slot, slot + 1), start, end, lengths_of)

    slots = range(run.order.num_slots)
    for step in range(num_steps):
        begin = run.tick_of(Position(step))
        for tick in range(begin, begin + run.ticks_in_step(step)):
            round_ = run.round_at(tick)
            pattern = run.pattern(round_, slots)
            within = tick - round_.first
            for slot in slots:
                number = pattern[slot, within]
                source = run.sources[number]
                done = int(round_.taken[number] + (pattern[slot, :within] == number).sum())
                epoch, source_tick = divmod(done, source.order.ticks_per_epoch)
                start, end = next(source.order.windows(source_tick))
                samples = window_of(int(number), epoch, slot, start, end)
                is_filler = source.order.is_filler(source_tick, range(slot, slot + 1))
                if is_filler is None or not is_filler.any():
                    seen[source.name].update(samples[:, source_tick - start].tolist())
                if epoch >= 1:
                    second.setdefault(source.name, step)
    return seen, second


@pytest.mark.parametrize("seed", range(20))
def test_a_forecast_counts_what_brute_force_counts(seed: int) -> None:
    drawn = random.Random(seed)
    run = random_run(drawn)
    num_steps = drawn.randint(1, 60)
    lengths = {source.name: lengths_of for source in run.sources}
    forecast = Forecast(run, num_steps, {}, lengths).forecast()
    seen, second = delivered_by(run, num_steps)
    for source in forecast.sources:
        times = Counter(seen[source.name].values())
        times[0] = source.num_samples - len(seen[source.name])
        assert dict(enumerate(source.times_seen)) == {
            number: times[number] for number in range(len(source.times_seen))
        }
        assert max(times) < len(source.times_seen)
        assert source.second_epoch_step == second.get(source.name)
        assert source.num_delivered == run.source_samples(Position(num_steps))[source.name]
        if not run.is_validation:
            assert source.num_delivered == seen[source.name].total()


@pytest.mark.parametrize("count", [1, 2, 17, 4097])
def test_unpermute_undoes_a_permutation(count: int) -> None:
    numbers = np.arange(count)
    assert unpermute(permute(numbers, count, key=3), count, key=3).tolist() == numbers.tolist()
