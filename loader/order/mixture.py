"""A run of training: its sources, its stages, and the samples of each step.

The rules and the letters are those of the law, 4 to 6 (the docstring of ``loader.order``). Everything follows
from the stages:

* Steps are laid out in epochs of E ticks. Unused ticks are counted, too, so with one source, tick t of the
  run is always tick t % R of the source's epoch t // R.
* The ticks of a source are evenly spread, so the number of them before tick t follows from t alone.
* At the end of a round, all slots are at the same place in each source. That is why an amendment begins
  there: no sample is repeated or lost.

The price: each source has its own windows, and one with less than 1/64 of the ticks is not in every round.

Weights have three units. What the user passes as ``weights`` is of samples or of tokens, and of any sum. The
``weights`` of a Stage are shares of samples, with a sum of 1. ``Run.shares`` are ticks of 65,536.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from loader.order.hashes import Int64s, hash_after, hash_array, hash_ints
from loader.order.order import ORDER_VERSION, Order
from shardprep.errors import UsageError

ROUND_TICKS = 64  # ticks
CYCLE_TICKS = 1 << 16  # ticks
# Purposes of a hash, besides those in order.py.
_PATTERN = 6
_SEED = 7
_NEVER = 1 << 62  # the step and the tick at which the last stage ends


class Position(NamedTuple):
    """A place in a run: completed steps of all epochs, and batches of each rank in the next step."""

    # A position is made for every batch: 0.4 us as a NamedTuple, 1.2 us as a frozen dataclass.
    step: int = 0
    num_micro: int = 0

    def after(self, num_batches: int) -> Position:
        """Return the position one batch later, in a step of ``num_batches`` batches per rank."""
        if self.num_micro + 1 < num_batches:
            return Position(self.step, self.num_micro + 1)
        return Position(self.step + 1)


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    data: str  # fingerprint of its shards, 16 hex digits
    order: Order
    added_at: int = 0  # the step at which an amendment added it; 0: the run began with it
    num_bytes: int = field(default=0, compare=False)  # of its tars; 0 in the run of a state


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The weights and the global batch size from a step on."""

    step: int
    global_batch_size: int
    weights: Mapping[str, float]  # share of the samples of each source, by its name; the sum is 1
    begins_round: bool = True  # False: the weights are those of the stage before, and its round continues
    is_amended: bool = False  # whether an amendment begins here

    def __str__(self) -> str:
        shares = ", ".join(f"{_percents(weight)}% {name}" for name, weight in self.weights.items())
        mixture = "" if [*self.weights] == ["all"] else f" ({shares})"  # "all": the data have no source names
        return f"from step {self.step}: global_batch_size {self.global_batch_size}{mixture}"


def _percents(share: float) -> str:
    """Return a share in percents. 10 % is 6,554 of 65,536 ticks, so two decimals: 10, and not 10.0006."""
    rounded = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    if rounded in ("0", "100"):  # a share that is nearly nothing, or nearly all
        return f"{100 * share:.7g}"
    return rounded


class _EqualSteps(NamedTuple):
    """Steps of equal size: the rest of an epoch, or whole epochs from the beginning of one on."""

    step: int  # the first step
    epoch: int  # of the first step
    tick: int  # of that epoch, at which the first step begins
    size: int  # ticks per step
    num_steps: int  # from that tick to the end of the epoch


class _EqualShares(NamedTuple):
    """Consecutive ticks with the same shares."""

    first: int
    end: int  # _NEVER for the last ones
    shares: tuple[int, ...]  # of all sources, in ticks of CYCLE_TICKS
    taken: Int64s  # ticks of each source before them

    def taken_before(self, tick: int) -> Int64s:
        """Count the ticks of each source before one of these ticks: int64[sources]."""
        num_cycles, rest = divmod(tick - self.first, CYCLE_TICKS)
        in_cycle = np.bincount(spread(self.shares)[:rest], minlength=len(self.shares))
        return self.taken + num_cycles * np.array(self.shares, np.int64) + in_cycle


class Round(NamedTuple):
    """Consecutive ticks in which every slot takes equally many samples of a source."""

    first: int
    end: int
    sources: Int64s  # number of the source of each tick, before each slot shuffles them
    taken: Int64s  # ticks of each source before the round


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's order. ``number`` counts all sources that the run has had."""
    return hash_ints(seed, _SEED, number)


@lru_cache(maxsize=16)
def spread(shares: tuple[int, ...]) -> Int64s:
    """Return the source of each tick of CYCLE_TICKS ticks: int64[CYCLE_TICKS]."""
    # The n-th tick of a source is placed at (n + 1/2) / share of them.
    counts = np.array(shares, np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(CYCLE_TICKS) - np.repeat(np.cumsum(counts) - counts, counts)
    return source[np.lexsort((source, (2 * number + 1) / counts[source]))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The samples of each step, from sources and stages. Raises UsageError if a step exceeds an epoch."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]  # ascending from step 0
    batches_per_tick: int  # of each rank
    seed: int = 0
    is_mixture: bool = False  # sources have names and their own seeds
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings that determine the samples

    def __post_init__(self) -> None:
        largest = max(stage.global_batch_size for stage in self.stages)
        most = self.ticks_per_epoch * self.tick_samples
        if largest > most:
            found = f"a global batch of {largest} samples"
            raise UsageError(found=found, expected=f"at most {most}, the samples of an epoch")

    @property
    def order(self) -> Order:
        """Return the order of the first source. All sources have its L, group, shuffle and keeps_tail."""
        return self.sources[0].order

    @property
    def tick_samples(self) -> int:
        """Return L."""
        return self.order.tick_samples

    @property
    def is_validation(self) -> bool:
        return self.order.keeps_tail

    @cached_property
    def ticks_per_epoch(self) -> int:
        """Return E."""
        return sum(source.order.ticks_per_epoch for source in self.sources if not source.added_at)

    @cached_property
    def row_tokens(self) -> int:
        """Return the tokens per sample if all samples are rows of one length, else 0."""
        return int(self.settings.get("seq_len", 0))

    @property
    def fingerprint(self) -> dict[str, object]:
        """Return the settings that determine the order, besides sources and stages."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "shuffle": self.order.shuffle,
            "is_mixture": self.is_mixture,
            "group_by_length": self.order.group,
            "keeps_tail": self.is_validation,
            **self.settings,
        }

    # Steps and epochs.

    @cached_property
    def _equal_steps(self) -> list[_EqualSteps]:
        """Divide the run into parts with equal steps, so that a step is found without those before it.

        Example: an epoch has 10 ticks. Steps have 2 of them, and from step 7 on 4. The parts are:

        * step 0, epoch 0, tick 0, 5 steps of 2 ticks in an epoch: steps 0 to 6, up to tick 4 of epoch 1;
        * step 7, epoch 1, tick 4, 1 step of 4 ticks to the end of the epoch, which leaves 2 ticks unused;
        * step 8, epoch 2, tick 0, 2 steps of 4 ticks in an epoch: all later steps.
        """
        parts = []
        epoch = 0
        tick = 0  # of the epoch, at which the next step begins
        ends = [*(stage.step for stage in self.stages[1:]), _NEVER]
        for stage, end in zip(self.stages, ends, strict=True):
            step = stage.step
            size = stage.global_batch_size // self.tick_samples
            while step < end:
                num_steps = (self.ticks_per_epoch - tick) // size
                if not num_steps:  # the next step does not fit
                    epoch += 1
                    tick = 0
                    continue
                parts.append(_EqualSteps(step, epoch, tick, size, num_steps))
                if tick:
                    # The rest of an epoch, or less of it if the next stage begins there.
                    num_taken = min(num_steps, end - step)
                elif end == _NEVER:
                    break  # all epochs from here on have the same steps
                else:
                    # Whole epochs, and the beginning of another one up to the next stage.
                    num_taken = end - step
                num_epochs, last_step = divmod(num_taken - 1, num_steps)  # the last step within its epoch
                epoch += num_epochs
                tick += (last_step + 1) * size
                step += num_taken
        return parts

    def _steps_at(self, step: int) -> _EqualSteps:
        last = self._equal_steps[-1]  # the usual case, in each training step
        if step >= last.step:
            return last
        return self._equal_steps[bisect_right(self._equal_steps, step, key=lambda each: each.step) - 1]

    def epoch_and_tick(self, position: Position) -> tuple[int, int]:
        """Return the epoch of a position, and the number of ticks of that epoch before it."""
        equal = self._steps_at(position.step)
        num_epochs, within = divmod(position.step - equal.step, equal.num_steps)
        tick = equal.tick + within * equal.size + position.num_micro // self.batches_per_tick
        return equal.epoch + num_epochs, tick

    def epoch_of(self, step: int) -> int:
        return self.epoch_and_tick(Position(step))[0]

    def ticks_in_step(self, step: int) -> int:
        return self._steps_at(step).size

    def batches_in_step(self, step: int) -> int:
        """Return the batches of a rank in a step."""
        return self.batches_per_tick * self.ticks_in_step(step)

    def first_step(self, epoch: int) -> int:
        # An epoch begins with equal steps, or a whole number of epochs after equal steps that begin an epoch.
        equal = next(each for each in reversed(self._equal_steps) if not each.tick and each.epoch <= epoch)
        return equal.step + (epoch - equal.epoch) * equal.num_steps

    def steps_in(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def ticks_in(self, epoch: int) -> int:
        """Count the ticks that an epoch uses: all of them if its steps fill it exactly."""
        last = self.first_step(epoch + 1) - 1
        return self.epoch_and_tick(Position(last))[1] + self.ticks_in_step(last)

    def batches_before(self, position: Position) -> int:
        """Count the batches of a rank before a position, in the position's epoch."""
        tick = self.epoch_and_tick(position)[1]
        return tick * self.batches_per_tick + position.num_micro % self.batches_per_tick

    def tick_of(self, position: Position) -> int:
        """Count the ticks before a position through all epochs, including unused ticks."""
        epoch, tick = self.epoch_and_tick(position)
        return epoch * self.ticks_per_epoch + tick

    # Rounds.

    def shares(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        """Return the ticks of each source in CYCLE_TICKS. Rounding depends on the order of the sources."""
        # Round cumulative sums, so that the shares add up to CYCLE_TICKS.
        sums = [0.0, *accumulate(weights.get(source.name, 0.0) for source in self.sources)]
        return tuple(np.diff(np.rint(np.array(sums) * CYCLE_TICKS).astype(np.int64)).tolist())

    @cached_property
    def _equal_shares(self) -> list[_EqualShares]:
        found: list[_EqualShares] = []
        for stage in self.stages:
            if not stage.begins_round:
                continue
            first = self.tick_of(Position(stage.step))
            taken = np.zeros(len(self.sources), np.int64)
            if found:
                taken = found[-1].taken_before(first)
                found[-1] = found[-1]._replace(end=first)
            found.append(_EqualShares(first, _NEVER, self.shares(stage.weights), taken))
        return found

    def _shares_at(self, tick: int) -> _EqualShares:
        return self._equal_shares[bisect_right(self._equal_shares, tick, key=lambda each: each.first) - 1]

    def round_at(self, tick: int) -> Round:
        """Return the round that contains a tick. It ends early where other shares begin."""
        equal = self._shares_at(tick)
        first = tick - (tick - equal.first) % ROUND_TICKS
        end = min(first + ROUND_TICKS, equal.end)
        within = (first - equal.first) % CYCLE_TICKS  # CYCLE_TICKS is a multiple of ROUND_TICKS
        sources = spread(equal.shares)[within : within + end - first]
        return Round(first, end, sources, equal.taken_before(first))

    def only_source_at(self, tick: int) -> tuple[int, int, int] | None:
        """Return (source, its ticks before, end) if one source has all ticks from ``tick`` to ``end``."""
        equal = self._shares_at(tick)
        if CYCLE_TICKS not in equal.shares:
            return None
        source = equal.shares.index(CYCLE_TICKS)
        return source, int(equal.taken[source]) + tick - equal.first, equal.end

    def pattern(self, round_: Round, slots: range) -> Int64s:
        """Return the source of each slot at each tick of a round: int64[len(slots), ticks]."""
        # keys: uint64[slots, 1], of (seed, _PATTERN, first, slot)
        slot = np.arange(slots.start, slots.stop)[:, None]
        keys = hash_after(hash_ints(self.seed, _PATTERN, round_.first), slot)
        hashes = hash_array(keys, np.arange(len(round_.sources)))
        return round_.sources[np.argsort(hashes, axis=1, kind="stable")]

    def slot_ticks(self, tick: int) -> Int64s:
        """Count the ticks of each source that each slot takes before a tick: int64[slots, sources]."""
        round_ = self.round_at(tick)
        num_within = tick - round_.first
        # Where a round begins, all slots are at the same place in each source.
        taken = np.tile(round_.taken, (self.order.num_slots, 1))
        if (round_.sources == round_.sources[0]).all():
            taken[:, round_.sources[0]] += num_within
        elif num_within:
            pattern = self.pattern(round_, range(self.order.num_slots))[:, :num_within]
            for number in range(len(self.sources)):
                taken[:, number] += (pattern == number).sum(axis=1)
        return taken

    def _samples_before(self, tick: int) -> Int64s:
        """Count the samples of each source before a tick, including unused ticks: int64[sources]."""
        return self.slot_ticks(tick).sum(axis=0) * self.order.group

    def source_samples(self, position: Position, since: int = 0) -> dict[str, int]:
        """Count the samples of each source from a step to a position, on all ranks together.

        The price: 50 us for each epoch in between.
        """
        counts = self._samples_before(self.tick_of(position))
        counts -= self._samples_before(self.tick_of(Position(since)))
        for epoch in range(self.epoch_of(since), self.epoch_of(position.step)):
            end = (epoch + 1) * self.ticks_per_epoch
            num_unused = self.ticks_per_epoch - self.ticks_in(epoch)
            if num_unused:  # they deliver no samples
                counts -= self._samples_before(end) - self._samples_before(end - num_unused)
        return dict(zip((source.name for source in self.sources), counts.tolist(), strict=True))

    def source_epochs(self, position: Position) -> dict[str, float]:
        """Return the epochs of each source before a position: 1.5 is the middle of its second epoch."""
        sizes = [source.order.ticks_per_epoch * self.tick_samples for source in self.sources]
        epochs = (self._samples_before(self.tick_of(position)) / sizes).tolist()
        return dict(zip((source.name for source in self.sources), epochs, strict=True))

    def in_order_of(self, sources: Sequence[Source]) -> Run:
        """Return this run with its sources sorted like others, so that their shares are rounded equally."""
        places = {source.name: number for number, source in enumerate(sources)}
        ordered = sorted(self.sources, key=lambda source: places.get(source.name, len(places)))
        return replace(self, sources=tuple(ordered))

    def stages_from(self, step: int) -> list[Stage]:
        """Return the stages from a step on that change anything, with rounded weights above 0."""
        changes: list[Stage] = []
        for stage in self.stages:
            shares = zip(self.sources, self.shares(stage.weights), strict=True)
            weights = {source.name: share / CYCLE_TICKS for source, share in shares if share}
            first = max(stage.step, step)
            size = stage.global_batch_size
            rounded = Stage(step=first, global_batch_size=size, weights=weights)
            if stage.step <= step:
                changes = [rounded]
            elif replace(rounded, step=changes[-1].step) != changes[-1]:
                changes.append(rounded)
        return changes
