"""A run of training: its sources, what holds from which step on, and which samples each step takes.

A run has one source or several, each with an order of its own (order.py). A **tick** takes L samples, one for
each of its L places; a training **step** is one tick or several. A **stage** says from which step on the
sources have which shares, and how many ticks a step has. Everything else follows from the list of stages:

* An epoch has R ticks: as many as one epoch of each source that the run began with, together. It ends where
  the next step would not fit, and the ticks that are left are not used. Ticks are counted through all epochs,
  unused ones included, so tick t of a run with one source is always tick t % R of that source's epoch t // R.
* Shares are whole ticks of a cycle of 65,536, evenly spread. So how many ticks a source has had before tick t
  follows from t alone.
* A **round** is 64 ticks, in which every slot takes equally many samples of a source, each slot in an order
  of its own. Rounds are counted from the tick at which shares begin to hold, and the last round before other
  shares is laid out to end where it ends. At the end of a round all slots stand at the same place in each
  source, which is why an amendment begins there: nothing is repeated, nothing is lost.

The price: each source keeps windows of its own in memory, and one that has less than 1/64 of the ticks is in
some rounds only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.order import Int64s, Order, hash_array, hash_ints
from shardprep.errors import UsageError

ROUND = 64  # ticks
CYCLE = 1 << 16  # ticks
_PATTERN, _SEED = 6, 7  # what a hash is for, beside those of order.py


class Position(NamedTuple):
    """Where a run stands: whole steps of an epoch, and batches of a rank in the step after them."""

    # No frozen dataclass: a new position for every batch takes 0.4 us, there 1.2.
    epoch: int = 0
    step: int = 0
    num_micro: int = 0

    def after(self, num_batches: int, steps_per_epoch: int) -> Position:
        """Return the position one batch later, in a step of ``num_batches``."""
        if self.num_micro + 1 < num_batches:
            return Position(self.epoch, self.step, self.num_micro + 1)
        if self.step + 1 < steps_per_epoch:
            return Position(self.epoch, self.step + 1)
        return Position(self.epoch + 1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a run: what it is called, which data it is, and its order."""

    name: str
    data: str  # fingerprint of its shards, 16 hex digits
    order: Order
    added_at: int = 0  # the step at which an amendment added it; 0: the run began with it


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What holds from a step on."""

    step: int
    ticks_per_step: int
    shares: tuple[int, ...] | None  # ticks of each source in a cycle; None: as before, and the round goes on
    is_amended: bool = False  # an amendment begins here


class Held(NamedTuple):
    """What holds from a step on, in words that two runs can be compared by."""

    step: int
    global_batch_size: int
    shares: dict[str, int]  # by the source's name, those above 0


class _Mix(NamedTuple):
    """Ticks with the same shares, from one on up to another; ``end`` is None for the last ones."""

    first: int
    end: int | None
    shares: tuple[int, ...]  # of all sources
    taken: Int64s  # ticks of each source before it


class Round(NamedTuple):
    """Consecutive ticks in which every slot takes equally many samples of a source."""

    first: int
    end: int
    sources: Int64s  # number of the source of each tick, before slots shuffle them
    taken: Int64s  # ticks of each source before the round


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's order, by its number among all sources that the run has had."""
    return hash_ints(seed, _SEED, number)


@lru_cache(maxsize=16)
def spread(shares: tuple[int, ...]) -> Int64s:
    """Return the source of each tick of a cycle, evenly spread: int64[CYCLE].

    The n-th tick of a source stands at (n + 1/2) / its share of the cycle.
    """
    counts = np.array(shares, np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)
    return source[np.lexsort((source, (2 * number + 1) / counts[source]))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which samples each step of a run takes. Raises UsageError where a step is more than an epoch."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]  # ascending; the first one is at step 0 and has shares
    batches_per_tick: int  # of each rank
    seed: int = 0
    is_mixture: bool = False  # sources are named, and have seeds of their own

    def __post_init__(self) -> None:
        largest = max(stage.ticks_per_step for stage in self.stages)
        if largest > self.ticks_per_epoch:
            raise UsageError(
                f"a global batch is {largest * self.tick_samples} samples, and an epoch has "
                f"{self.ticks_per_epoch * self.tick_samples}; lower it, or add data"
            )

    @property
    def _order(self) -> Order:
        """Sources have equal L, g and shuffle."""
        return self.sources[0].order

    @property
    def tick_samples(self) -> int:
        """L."""
        return self._order.tick_samples

    @property
    def num_slots(self) -> int:
        return self._order.num_slots

    @property
    def group(self) -> int:
        return self._order.group

    @cached_property
    def ticks_per_epoch(self) -> int:
        return sum(source.order.ticks_per_epoch for source in self.sources if not source.added_at)

    @property
    def is_validation(self) -> bool:
        return self._order.keeps_tail

    def fillers(self, step: int, slots: range) -> npt.NDArray[np.bool_] | None:
        """Return which slots hold a sample again at a step of an epoch, of a validation set; None: none."""
        return self._order.is_filler(step, slots)

    # Steps and epochs.

    @cached_property
    def has_sizes(self) -> bool:
        """Whether steps differ in size."""
        return len({stage.ticks_per_step for stage in self.stages}) > 1

    def ticks_in_step(self, step: int) -> int:
        return self._stage(step).ticks_per_step

    def batches_in_step(self, step: int) -> int:
        """Return the batches of a rank in a step."""
        return self.batches_per_tick * self.ticks_in_step(step)

    def _stage(self, step: int) -> Stage:
        last = self.stages[-1]  # asked for each step of training
        if step >= last.step:
            return last
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def _stretches(self, first: int) -> Iterator[tuple[int, int | None, int]]:
        """Yield stretches of steps of equal size from a step on: first step, end or None, ticks per step."""
        ends = [*(stage.step for stage in self.stages[1:]), None]
        for stage, end in zip(self.stages, ends, strict=True):
            if end is None or end > first:
                yield max(stage.step, first), end, stage.ticks_per_step

    def _ticks_between(self, first: int, end: int) -> int:
        """Count the ticks of the steps in [first, end)."""
        total = 0
        for begin, stop, size in self._stretches(first):
            if begin >= end:
                break
            total += (end - begin if stop is None else min(stop, end) - begin) * size
        return total

    def _last_step_within(self, first: int, num_ticks: int) -> int:
        """Return the end of the steps from ``first`` on that fit into some ticks."""
        for begin, stop, size in self._stretches(first):
            end = begin + num_ticks // size
            if stop is None or end < stop:
                return end
            num_ticks -= (stop - begin) * size
        raise AssertionError("the last stretch has no end")

    @cached_property
    def _first_steps(self) -> list[int]:
        """First steps of epochs, as far as they were asked for; epochs in the last stage are all alike."""
        return [0]

    def first_step(self, epoch: int) -> int:
        known, last = self._first_steps, self.stages[-1]
        while len(known) <= epoch and known[-1] < last.step:
            known.append(self._last_step_within(known[-1], self.ticks_per_epoch))
        num_beyond = max(epoch + 1 - len(known), 0)
        return known[min(epoch, len(known) - 1)] + num_beyond * (self.ticks_per_epoch // last.ticks_per_step)

    def steps_in(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def ticks_in(self, epoch: int) -> int:
        """Count the ticks that an epoch uses: all of them unless the steps do not fit."""
        return self._ticks_between(self.first_step(epoch), self.first_step(epoch + 1))

    def step_of(self, position: Position) -> int:
        """Count the whole steps before a position, through all epochs."""
        return self.first_step(position.epoch) + position.step

    def position(self, step: int) -> Position:
        """Return where a step begins."""
        # An epoch has at least this many steps.
        fewest = self.ticks_per_epoch // max(stage.ticks_per_step for stage in self.stages)
        epoch = bisect_right(range(step // fewest + 1), step, key=self.first_step) - 1
        return Position(epoch=epoch, step=step - self.first_step(epoch))

    def tick_in_epoch(self, position: Position) -> int:
        first = self.first_step(position.epoch)
        return self._ticks_between(first, first + position.step) + position.num_micro // self.batches_per_tick

    def tick_of(self, position: Position) -> int:
        """Count the ticks before a position through all epochs, unused ones included."""
        return position.epoch * self.ticks_per_epoch + self.tick_in_epoch(position)

    def tick_of_step(self, step: int) -> int:
        return self.tick_of(self.position(step))

    def step_from(self, tick: int) -> int:
        """Return the first step that begins at a tick or behind it."""
        epoch, within = divmod(tick, self.ticks_per_epoch)
        first = self.first_step(epoch)
        step = min(self._last_step_within(first, within), self.first_step(epoch + 1))
        if step < self.first_step(epoch + 1) and self._ticks_between(first, step) < within:
            step += 1
        return step

    # Rounds.

    @cached_property
    def _mixes(self) -> list[_Mix]:
        mixes: list[_Mix] = []
        for stage in self.stages:
            if stage.shares is None:
                continue
            first, taken = self.tick_of_step(stage.step), np.zeros(len(self.sources), np.int64)
            if mixes:
                before = mixes[-1] = mixes[-1]._replace(end=first)
                taken = before.taken + _counts(before.shares, first - before.first)
            # Sources that were added later have no share of it.
            shares = stage.shares + (0,) * (len(self.sources) - len(stage.shares))
            mixes.append(_Mix(first, None, shares, taken))
        return mixes

    def _mix_at(self, tick: int) -> _Mix:
        return self._mixes[bisect_right(self._mixes, tick, key=lambda mix: mix.first) - 1]

    def round_at(self, tick: int) -> Round:
        """Return the round that holds a tick. The last one before other shares ends where these begin."""
        mix = self._mix_at(tick)
        first = tick - (tick - mix.first) % ROUND
        end = first + ROUND if mix.end is None else min(first + ROUND, mix.end)
        within = (first - mix.first) % CYCLE  # a cycle is a multiple of a round
        sources = spread(mix.shares)[within : within + end - first]
        return Round(first, end, sources, mix.taken + _counts(mix.shares, first - mix.first))

    def only_source_at(self, tick: int) -> tuple[int, int, int | None] | None:
        """Return the source that has all ticks from this one on: its number, how many ticks it has had, and
        the tick at which that ends, or None; None where several sources share the ticks."""
        mix = self._mix_at(tick)
        if CYCLE not in mix.shares:
            return None
        source = mix.shares.index(CYCLE)
        return source, int(mix.taken[source]) + tick - mix.first, mix.end

    def pattern(self, of_round: Round, slots: range) -> Int64s:
        """Return the source of each slot at each tick of a round: int64[len(slots), ticks]."""
        keys = [[hash_ints(self.seed, _PATTERN, of_round.first, slot)] for slot in slots]
        hashes = hash_array(np.array(keys, np.uint64), np.arange(len(of_round.sources)))
        return of_round.sources[np.argsort(hashes, axis=1, kind="stable")]

    def _samples_before(self, tick: int) -> Int64s:
        """Count the samples of each source before a tick, unused ticks included: int64[sources]."""
        of_round = self.round_at(tick)
        pattern = self.pattern(of_round, range(self.num_slots))[:, : tick - of_round.first]
        within = np.bincount(pattern.reshape(-1), minlength=len(self.sources)) * self.group
        return of_round.taken * self.tick_samples + within

    def source_samples(self, position: Position) -> dict[str, int]:
        """Count the samples of each source that were delivered before a position, all ranks together."""
        counts = self._samples_before(self.tick_of(position))
        for epoch in range(position.epoch):
            first = epoch * self.ticks_per_epoch
            if (used := self.ticks_in(epoch)) < self.ticks_per_epoch:
                unused = self._samples_before(first + self.ticks_per_epoch)
                counts = counts - unused + self._samples_before(first + used)
        return {source.name: int(count) for source, count in zip(self.sources, counts, strict=True)}

    def source_epochs(self, position: Position) -> dict[str, float]:
        """Return where each source stands, in its epochs: 1.5 is the middle of its second."""
        counts = self._samples_before(self.tick_of(position)).tolist()
        return {
            source.name: count / (source.order.ticks_per_epoch * self.tick_samples)
            for source, count in zip(self.sources, counts, strict=True)
        }

    # Amendments.

    def held_from(self, step: int, end: int | None = None) -> list[Held]:
        """Return what holds in the steps from one on, up to another; equal neighbours are one."""
        found: list[Held] = []
        shares: dict[str, int] = {}
        for stage in self.stages:
            if end is not None and stage.step >= end:
                break
            if stage.shares is not None:
                shares = {self.sources[n].name: share for n, share in enumerate(stage.shares) if share}
            held = Held(max(stage.step, step), stage.ticks_per_step * self.tick_samples, shares)
            if stage.step <= step:
                found = [held]
            elif held[1:] != found[-1][1:]:
                found.append(held)
        return found

    def last_amendment(self) -> int:
        """Return the step of the last amendment, 0 if there is none."""
        return max((stage.step for stage in self.stages if stage.is_amended), default=0)

    def amended(self, position: Position, plan: Run, sources: Sequence[Source]) -> tuple[Run, int]:
        """Return this run with what a plan holds from the next border on, and the step of that border.

        The border is the first step, from the position on, before which each round that has begun is over. An
        amendment that has not begun is replaced, and its sources are gone. ``sources`` are the plan's, with
        orders of this run's L, of which its sizes are multiples. The position is behind the first step.
        """
        tick, step = self.tick_of(position), self.step_of(position)
        begun = self.round_at(tick)
        is_begun = begun.first < tick
        free_tick = begun.end if is_begun else tick  # from which on no round has begun
        border = max(step, self.step_from(free_tick))
        while True:
            run = self._with_stages_of(plan, border, sources)
            # With other sizes a step may begin elsewhere: smaller ones may fit into the end of an epoch. What
            # is over stays so, and a round that has begun ends where it was to end.
            stays = not is_begun or run.round_at(tick)[:2] == begun[:2]
            if run.position(step) == position and run.tick_of_step(border) >= free_tick and stays:
                return run, border
            border += 1

    def _with_stages_of(self, plan: Run, step: int, sources: Sequence[Source]) -> Run:
        """Return this run up to a step, and the plan from there on."""
        kept = [source for source in self.sources if source.added_at < step]
        known = {source.name for source in kept}
        for source in sources:
            if source.name not in known:
                order = replace(source.order, seed=source_seed(self.seed, len(kept)))
                kept.append(replace(source, order=order, added_at=step))
        numbers = {source.name: number for number, source in enumerate(kept)}
        stages = [stage for stage in self.stages if stage.step < step]
        shares = self.held_from(step - 1)[0].shares
        # Where shares began to hold, a round may have been laid out to end: another one has to begin there.
        begins_round = any(stage.step == step and stage.shares is not None for stage in self.stages)
        for held in plan.held_from(step):
            goes_on = held.shares == shares and not (begins_round and held.step == step)
            stage = Stage(
                step=held.step,
                ticks_per_step=held.global_batch_size // self.tick_samples,
                shares=None if goes_on else _by_number(held.shares, numbers),
                is_amended=held.step == step,
            )
            if not goes_on or stage.ticks_per_step != stages[-1].ticks_per_step:
                stages.append(stage)
            shares = held.shares
        return replace(self, sources=tuple(kept), stages=tuple(stages))


def _by_number(shares: Mapping[str, int], numbers: Mapping[str, int]) -> tuple[int, ...]:
    of_sources = [0] * (max(numbers[name] for name in shares) + 1)
    for name, share in shares.items():
        of_sources[numbers[name]] = share
    return tuple(of_sources)


def _counts(shares: tuple[int, ...], num_ticks: int) -> Int64s:
    """Count the ticks of each source among the first ticks of shares: int64[sources]."""
    cycles, rest = divmod(num_ticks, CYCLE)
    within = np.bincount(spread(shares)[:rest], minlength=len(shares)) if rest else 0
    return cycles * np.array(shares, np.int64) + within
