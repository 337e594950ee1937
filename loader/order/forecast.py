"""What a run will deliver, counted before it begins. The order is arithmetic, so nothing is simulated.

All counts are exact, but tokens: of documents these are samples times the mean of their source. The price:
0.1 s for each epoch of the run if a tick has 30,000 slots; memory for the samples that an epoch leaves out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from loader.order.hashes import Int64s
from loader.order.mixture import CYCLE_TICKS, Position, Run, Stage
from loader.order.order import NumTokens

_SLOTS_AT_ONCE = 1024  # whose windows are computed together: some 10 MB
_Size = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class SourceForecast:
    """A source at the end of the steps."""

    name: str
    num_samples: _Size  # that the source has: documents or rows
    num_delivered: int  # on all ranks together, as ``loader.source_samples`` counts them
    num_tokens: float  # that were delivered: of rows, with their padding; of documents, by their mean
    epochs: float  # as ``loader.source_epochs`` counts them
    times_seen: tuple[int, ...]  # how many samples were delivered 0, 1, 2, ... times
    second_epoch_step: int | None  # the first step with a sample of its second epoch; None: no step


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """A stage, or the part of it before the last step."""

    step: int
    global_batch_size: _Size
    num_tokens: float  # before the step, as ``epochs``
    epochs: Mapping[str, float]
    asked: Mapping[str, float]  # shares of samples before they are rounded; a state has rounded ones
    given: Mapping[str, float]  # shares as the order has them: whole ticks of 65,536
    text: str


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What a run delivers in its first steps, by source and by stage."""

    num_steps: _Size
    sources: tuple[SourceForecast, ...]
    stages: Annotated[tuple[StageForecast, ...], Meta(min_length=1)]


class _Unused(NamedTuple):
    """Ticks at the end of an epoch of the run that no step takes."""

    end: int  # tick of the run
    begins: Int64s  # ticks that each slot has taken of each source before them: int64[slots, sources]
    ends: Int64s


class Forecast:
    """Counts what a run delivers before its step ``num_steps``.

    ``mean_tokens``: of a sample of each source; one that is missing has 0. ``num_tokens``: functions that
    return lengths of samples, by source; needed if samples are grouped.
    """

    def __init__(
        self,
        run: Run,
        num_steps: int,
        mean_tokens: Mapping[str, float],
        num_tokens: Mapping[str, NumTokens],
    ) -> None:
        self._run = run
        self._num_steps = num_steps
        self._mean_tokens = mean_tokens
        self._num_tokens = num_tokens
        self._slot_ticks = lru_cache(16)(run.slot_ticks)
        self._unused: list[_Unused] = []
        for epoch in range(run.epoch_of(num_steps)):
            end = (epoch + 1) * run.ticks_per_epoch
            begin = end - run.ticks_per_epoch + run.ticks_in(epoch)
            if begin < end:
                self._unused.append(_Unused(end, run.slot_ticks(begin), run.slot_ticks(end)))

    def forecast(self) -> RunForecast:
        """Return all counts."""
        return RunForecast(
            num_steps=self._num_steps,
            sources=tuple(self._source(number) for number in range(len(self._run.sources))),
            stages=tuple(self._stage(stage) for stage in self._run.stages if stage.step < self._num_steps),
        )

    def _source(self, number: int) -> SourceForecast:
        source = self._run.sources[number]
        epoch_ticks = source.order.ticks_per_epoch

        def num_repeated(step: int) -> int:
            return self._num_before(step + 1, number, since=epoch_ticks)

        step = bisect_left(range(self._num_steps), 1, key=num_repeated)
        return SourceForecast(
            name=source.name,
            num_samples=source.order.num_samples,
            num_delivered=self._num_before(self._num_steps, number),
            num_tokens=self._num_tokens_before(self._num_steps, number),
            epochs=self._run.source_epochs(Position(self._num_steps))[source.name],
            times_seen=self._times_seen(number),
            second_epoch_step=None if step == self._num_steps else step,
        )

    def _stage(self, stage: Stage) -> StageForecast:
        names = [source.name for source in self._run.sources]
        shares = self._run.shares(stage.weights)
        return StageForecast(
            step=stage.step,
            global_batch_size=stage.global_batch_size,
            num_tokens=sum(self._num_tokens_before(stage.step, number) for number in range(len(names))),
            epochs=self._run.source_epochs(Position(stage.step)),
            asked={name: stage.weights.get(name, 0.0) for name in names},
            given={name: share / CYCLE_TICKS for name, share in zip(names, shares, strict=True)},
            text=str(stage),
        )

    def _num_tokens_before(self, step: int, number: int) -> float:
        mean = self._mean_tokens.get(self._run.sources[number].name, 0.0)
        return mean * self._num_before(step, number)

    def _num_before(self, step: int, number: int, *, since: int = 0) -> int:
        """Count the samples that a source delivers before a step, from its tick ``since`` of each slot on."""

        def num_ticks(taken: Int64s) -> int:
            return int((taken[:, number] - since).clip(0).sum())

        tick = self._run.tick_of(Position(step))
        count = num_ticks(self._slot_ticks(tick))
        for unused in self._unused:
            if unused.end <= tick:
                count -= num_ticks(unused.ends) - num_ticks(unused.begins)
        return count * self._run.order.group

    def _times_seen(self, number: int) -> tuple[int, ...]:
        """Count the samples that were delivered 0, 1, 2, ... times.

        Nearly all samples were delivered once in each epoch that is over. So those are listed that were
        missed: left out by an epoch, or in ticks that no step takes. In the last epoch the others are
        counted, and the place of each missed one is looked up.
        """
        order = self._run.sources[number].order
        end = self._run.tick_of(Position(self._num_steps))
        reached = self._slot_ticks(end)[:, number]
        last = max(int(reached.max()) - 1, 0) // order.ticks_per_epoch  # epoch of the slot that is ahead
        begin = last * order.ticks_per_epoch
        missed = [np.zeros(0, np.int64)]
        missed += [order.left_out(epoch) for epoch in range(last)]
        for unused in self._unused:
            missed += self._samples_between(number, unused.begins[:, number], unused.ends[:, number])
        # of slots that are still in the epoch before
        missed += self._samples_between(number, reached, np.maximum(reached, begin))
        samples, num_missed = np.unique(np.concatenate(missed), return_counts=True)
        ticks = np.maximum(reached - begin, 0)
        is_reached = self._is_reached(number, last, samples, ticks)
        num_reached = min(int(ticks.sum()) * order.group, order.num_samples)  # the last tick may repeat some
        num_other = num_reached - int(is_reached.sum())
        counts = np.bincount(last + is_reached - num_missed, minlength=last + 2)
        counts[last + 1] += num_other
        counts[last] += order.num_samples - len(samples) - num_other
        return tuple(counts.tolist())

    def _samples_between(self, number: int, begins: Int64s, ends: Int64s) -> Iterator[Int64s]:
        """Yield the samples of slots between ticks of a source, int64[slots], through its epochs."""
        source = self._run.sources[number]
        order = source.order
        tick = int(begins.min())
        while tick < ends.max():
            epoch, within = divmod(tick, order.ticks_per_epoch)
            start, stop = next(order.windows(within))
            tick += stop - within
            ticks = np.arange(tick - (stop - start), tick)
            for first in range(0, order.num_slots, _SLOTS_AT_ONCE):
                slots = range(order.num_slots)[first : first + _SLOTS_AT_ONCE]
                here = slice(slots.start, slots.stop)
                # is_wanted: bool[slots, ticks]
                is_wanted = (ticks >= begins[here, None]) & (ticks < ends[here, None])
                if is_wanted.any():
                    samples = order.samples_of(epoch, slots, start, stop, self._num_tokens.get(source.name))
                    yield samples[np.repeat(is_wanted, order.group, axis=0)]

    def _is_reached(self, number: int, epoch: int, samples: Int64s, ticks: Int64s) -> npt.NDArray[np.bool_]:
        """Return which samples lie before ``ticks``, int64[slots], of an epoch: bool[samples]."""
        order = self._run.sources[number].order
        if not order.shuffle:
            tick, place = np.divmod(samples, order.tick_samples)
            return tick < ticks[place]
        slot, position = np.divmod(order.positions_of(epoch, samples), order.ticks_per_epoch * order.group)
        start = position // order.group // order.window_ticks * order.window_ticks
        # Each slot is inside one window at most, whose rest is drawn. No slot has what the epoch leaves out.
        begin = epoch * order.ticks_per_epoch
        ends = -(-ticks // order.window_ticks) * order.window_ticks
        ends = np.minimum(ends, order.ticks_per_epoch)
        rest = np.concatenate([samples[:0], *self._samples_between(number, begin + ticks, begin + ends)])
        is_begun = start < np.append(ticks, 0)[np.minimum(slot, order.num_slots)]
        return is_begun & ~np.isin(samples, rest, assume_unique=True)
