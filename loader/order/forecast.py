"""What a run will deliver, counted before it begins. The order is arithmetic, so nothing is simulated.

All counts are exact, but tokens: of documents these are samples times the mean of their source. The price:
0.2 s for each epoch of the run if a tick has 30,000 slots; memory for the samples that an epoch leaves out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loader.order.hashes import Int64s
from loader.order.mixture import CYCLE_TICKS, Position, Run, Source, Stage
from loader.order.order import NumTokens

_SLOTS_AT_ONCE = 1024  # whose windows are computed together: some 10 MB


@dataclass(frozen=True, kw_only=True)
class SourceForecast:
    """A source at the end of the steps."""

    name: str
    num_samples: int  # that the source has: documents or rows
    num_delivered: int  # on all ranks together, as ``loader.source_samples`` counts them
    num_tokens: float  # that were delivered: of rows, with their padding; of documents, by their mean
    epochs: float  # as ``loader.source_epochs`` counts them
    # How many samples were delivered 0, 1, 2, ... times.
    times_seen: tuple[int, ...]
    second_epoch_step: int | None  # the first step with a sample of its second epoch; None: no step


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """A stage, or the part of it before the last step."""

    step: int
    global_batch_size: int
    num_tokens: float  # before the step
    asked: Mapping[str, float]  # shares of samples before they are rounded; a state has rounded ones
    given: Mapping[str, float]  # shares as the order has them: whole ticks of 65,536
    text: str


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What a run delivers in its first steps, by source and by stage."""

    num_steps: int
    sources: tuple[SourceForecast, ...]
    stages: tuple[StageForecast, ...]


@dataclass(frozen=True)
class _Unused:
    """Ticks at the end of an epoch of the run that no step takes. The arrays are int64[slots, sources]."""

    end: int  # tick of the run
    begins: Int64s  # ticks of each source that a slot has taken before them
    ends: Int64s


class Forecast:
    """Counts what a run delivers before its step ``num_steps``.

    ``num_tokens``: functions that return lengths of samples, by source; needed if samples are grouped.
    """

    def __init__(self, run: Run, num_steps: int, num_tokens: Mapping[str, NumTokens] | None = None) -> None:
        self._run = run
        self._num_steps = num_steps
        self._num_tokens = num_tokens or {}

    def forecast(self, mean_tokens: Mapping[str, float]) -> RunForecast:
        """Return all counts. ``mean_tokens``: of a sample of each source; a source that lacks them has 0."""
        epochs = self._run.source_epochs(Position(self._num_steps))
        sources = []
        for number, source in enumerate(self._run.sources):
            num_delivered = int(self._delivered_before(self._end_tick)[number])
            sources.append(
                SourceForecast(
                    name=source.name,
                    num_samples=source.order.num_samples,
                    num_delivered=num_delivered,
                    num_tokens=num_delivered * mean_tokens.get(source.name, 0.0),
                    epochs=epochs[source.name],
                    times_seen=self._times_seen(number, source),
                    second_epoch_step=self._second_epoch_step(number, source),
                )
            )
        stages = [stage for stage in self._run.stages if stage.step < self._num_steps]
        means = np.array([mean_tokens.get(source.name, 0.0) for source in self._run.sources])
        return RunForecast(
            num_steps=self._num_steps,
            sources=tuple(sources),
            stages=tuple(self._stage(stage, means) for stage in stages),
        )

    def _stage(self, stage: Stage, means: npt.NDArray[np.float64]) -> StageForecast:
        names = [source.name for source in self._run.sources]
        shares = self._run.shares(stage.weights)
        delivered = self._delivered_before(self._run.tick_of(Position(stage.step)))
        return StageForecast(
            step=stage.step,
            global_batch_size=stage.global_batch_size,
            num_tokens=float(delivered @ means),
            asked={name: stage.weights.get(name, 0.0) for name in names},
            given={name: share / CYCLE_TICKS for name, share in zip(names, shares, strict=True)},
            text=str(stage),
        )

    # Ticks of the run.

    @cached_property
    def _end_tick(self) -> int:
        """Return the tick of the run after the last step. Ticks that are not used follow it, if any."""
        if not self._num_steps:
            return 0
        last = self._num_steps - 1
        return self._run.tick_of(Position(last)) + self._run.ticks_in_step(last)

    @cached_property
    def _end(self) -> Int64s:
        return self._slot_ticks(self._end_tick)

    @cached_property
    def _unused(self) -> list[_Unused]:
        """Return the unused ticks of each epoch of the run that is over."""
        run = self._run
        found = []
        for epoch in range((max(self._end_tick, 1) - 1) // run.ticks_per_epoch):
            end = (epoch + 1) * run.ticks_per_epoch
            num_unused = run.ticks_per_epoch - run.ticks_in(epoch)
            if num_unused:
                found.append(_Unused(end, self._slot_ticks(end - num_unused), self._slot_ticks(end)))
        return found

    def _slot_ticks(self, tick: int) -> Int64s:
        """Count the ticks of each source that a slot has taken before a tick: int64[slots, sources]."""
        run = self._run
        round_ = run.round_at(tick)
        num_within = tick - round_.first
        # taken: int64[slots, sources]; all slots are at the same tick of each source where a round begins
        taken = np.tile(round_.taken, (run.order.num_slots, 1))
        if len(set(round_.sources.tolist())) == 1:
            taken[:, round_.sources[0]] += num_within
        elif num_within:
            pattern = run.pattern(round_, range(run.order.num_slots))[:, :num_within]
            for number in range(len(run.sources)):
                taken[:, number] += (pattern == number).sum(axis=1)
        return taken

    def _delivered_before(self, tick: int) -> Int64s:
        """Count the samples of each source that steps deliver before a tick: int64[sources]."""
        ticks = self._end if tick == self._end_tick else self._slot_ticks(tick)
        counts = ticks.sum(axis=0)
        for unused in self._unused:
            if unused.end <= tick:
                counts = counts - (unused.ends - unused.begins).sum(axis=0)
        return counts * self._run.order.group

    def _step_of(self, tick: int) -> int | None:
        """Return the step that takes a tick; None if none does."""
        run = self._run
        steps = range(self._num_steps)
        step = bisect_right(steps, tick, key=lambda step: run.tick_of(Position(step))) - 1
        return step if tick < run.tick_of(Position(step)) + run.ticks_in_step(step) else None

    def _second_epoch_step(self, number: int, source: Source) -> int | None:
        run = self._run
        size = source.order.ticks_per_epoch

        def is_past_epoch(tick: int) -> bool:
            """Return whether a slot is past the first epoch when the round of a tick ends."""
            round_ = run.round_at(tick)
            return bool(round_.taken[number] + (round_.sources == number).sum() > size)

        tick = bisect_left(range(self._end_tick), True, key=is_past_epoch)
        while tick < self._end_tick:
            round_ = run.round_at(tick)
            if (round_.sources == number).any():
                is_taken = run.pattern(round_, range(run.order.num_slots)) == number
                # past: bool[slots, ticks]
                past = is_taken & (round_.taken[number] + np.cumsum(is_taken, axis=1) > size)
                for each in (round_.first + np.flatnonzero(past.any(axis=0))).tolist():
                    step = self._step_of(each)
                    if step is not None and each < self._end_tick:
                        return step
            tick = round_.end
        return None

    # Samples of a source.

    def _times_seen(self, number: int, source: Source) -> tuple[int, ...]:
        """Count the samples that were delivered 0, 1, 2, ... times.

        Nearly all samples were delivered once in each epoch that is over. So those are listed that were
        missed: left out by an epoch, or in ticks that no step takes. In the last epoch the others are
        counted, and the place of each missed one is looked up.
        """
        order = source.order
        reached = self._end[:, number]
        if not reached.any():
            return (order.num_samples,)
        last = (int(reached.max()) - 1) // order.ticks_per_epoch  # the epoch of the slot that is ahead
        begin = last * order.ticks_per_epoch
        gaps = [(unused.begins[:, number], unused.ends[:, number]) for unused in self._unused]
        gaps.append((reached, np.maximum(reached, begin)))  # of slots that are still in the epoch before
        missed = [np.zeros(0, np.int64)]
        missed += [order.left_out(epoch) for epoch in range(last)]
        for begins, ends in gaps:
            missed += self._samples_between(source, begins, ends)
        samples, num_missed = np.unique(np.concatenate(missed), return_counts=True)
        ticks = np.maximum(reached - begin, 0)
        is_reached = self._is_reached(source, last, samples, ticks)
        num_reached = min(int(ticks.sum()) * order.group, order.num_samples)  # the last tick may repeat some
        num_other = num_reached - int(is_reached.sum())
        counts = np.bincount(last + is_reached - num_missed, minlength=last + 2)
        counts[last + 1] += num_other
        counts[last] += order.num_samples - len(samples) - num_other
        return tuple(counts.tolist())

    def _samples_between(self, source: Source, begins: Int64s, ends: Int64s) -> Iterator[Int64s]:
        """Yield the samples of slots between ticks of the source, int64[slots], through its epochs."""
        order = source.order
        size = order.ticks_per_epoch
        if not (begins < ends).any():
            return
        for epoch in range(int(begins.min()) // size, -(-int(ends.max()) // size)):
            first = (begins - epoch * size).clip(0, size)
            end = (ends - epoch * size).clip(0, size)
            for slots in _parts(range(order.num_slots)):
                here = slice(slots.start, slots.stop)
                if not (first[here] < end[here]).any():
                    continue
                for start, stop in order.windows(int(first[here].min())):
                    if start >= end[here].max():
                        break
                    ticks = np.arange(start, stop)
                    # is_wanted: bool[slots, ticks]
                    is_wanted = (ticks >= first[here, None]) & (ticks < end[here, None])
                    samples = order.samples_of(epoch, slots, start, stop, self._num_tokens.get(source.name))
                    yield samples[np.repeat(is_wanted, order.group, axis=0)]

    def _is_reached(
        self, source: Source, epoch: int, samples: Int64s, ticks: Int64s
    ) -> npt.NDArray[np.bool_]:
        """Return which samples lie before ``ticks``, int64[slots], of an epoch: bool[samples]."""
        order = source.order
        if not order.shuffle:
            tick, place = np.divmod(samples, order.tick_samples)
            return tick < ticks[place]
        slot, position = np.divmod(order.positions_of(epoch, samples), order.ticks_per_epoch * order.group)
        is_left_out = slot >= order.num_slots
        slot[is_left_out] = 0
        start = position // order.group // order.window_ticks * order.window_ticks
        end = np.minimum(start + order.window_ticks, order.ticks_per_epoch)
        is_reached = (end <= ticks[slot]) & ~is_left_out
        is_inside = (start < ticks[slot]) & (end > ticks[slot]) & ~is_left_out
        # Each slot is inside one window, which is drawn as far as the slot has got.
        begin = epoch * order.ticks_per_epoch
        starts = ticks // order.window_ticks * order.window_ticks
        drawn = [np.zeros(0, np.int64), *self._samples_between(source, begin + starts, begin + ticks)]
        is_reached[is_inside] = np.isin(samples[is_inside], np.concatenate(drawn))
        return is_reached


def _parts(slots: range) -> Iterator[range]:
    for first in range(0, len(slots), _SLOTS_AT_ONCE):
        yield slots[first : first + _SLOTS_AT_ONCE]
