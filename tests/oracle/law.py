"""The specification of the order: which sample is in which place of which training step, in plain Python.

The loader computes the same with arrays, window by window, divided among ranks and workers. Here it is
computed number by number. Nothing is imported from the loader, so that the check shares no code with what it
checks. Terms:

* A **tick** takes L samples, one for each of its L **places**. A training step is one or more ticks.
* A **slot** is g adjacent places, which get samples of similar length (g is 1 without grouping). Each slot
  owns a part of an epoch's shuffled sequence, and reads it window by window.
* A **round** is 64 ticks in which every slot takes equally many samples of each source of a mixture. Rounds
  are counted from the step at which weights take effect; the last round before other weights may be shorter.
* An **amendment** is made before a step of a run and takes effect at a **border**: the first step at which
  all rounds that had begun are complete. From the border on, it replaces all earlier settings.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, count, pairwise
from typing import Any, NamedTuple

ROUND, CYCLE = 64, 1 << 16  # ticks
ROTATE, BLOCKS, WINDOWS, SLICES, OFFSET, PATTERN, SEED = range(1, 8)  # purposes of hashes
_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    source: str
    epoch: int  # of the source
    number: int  # in the source, from 0


def mixed(value: int) -> int:
    """Return the splitmix64 hash of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


@functools.cache
def hashed(*values: int) -> int:
    """Return one hash of several numbers."""
    state = 0
    for value in values:
        state = mixed((state + 0x9E3779B97F4A7C15 ^ value) & _MASK)
    return state


def shuffled(count: int, key: int) -> list[int]:
    """Return the numbers below ``count``, sorted by their hash with a key."""
    return sorted(range(count), key=lambda number: mixed(key ^ number))


def permuted(number: int, count: int, key: int) -> int:
    """Apply a keyed permutation of the numbers below ``count`` to a number.

    It is a Feistel network over the next power of four, repeated until the result is below ``count``.
    """
    if count < 2:
        return number
    bits = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = number >> bits, number & (1 << bits) - 1
        for turn in range(6):
            left, right = right, left ^ mixed(hashed(key, turn) ^ right) & (1 << bits) - 1
        number = left << bits | right
        if number < count:
            return number


@dataclass(frozen=True)
class Source:
    """The properties of a source that its order depends on."""

    lengths: Sequence[int]  # tokens of each sample
    num_bytes: int  # of its tars


class Order:
    """The order of one source, epoch after epoch."""

    def __init__(self, source: Source, size: int, group: int, seed: int, *, shuffle: bool = True) -> None:
        self.lengths, self.size, self.group, self.seed = source.lengths, size, group, seed
        self.shuffle, self.num_samples = shuffle, len(source.lengths)
        self.ticks_per_epoch = self.num_samples // size
        self.num_slots = size // group
        # A block is read at once. It has at most 512 KiB, less if many slots read at the same time, and few
        # enough samples that a slot has 16 blocks. Beyond 1,024 slots it grows again.
        blocks_per_window = min(max(1024 // self.num_slots, 4), 16)
        block_bytes = min(max((128 << 20) // (self.num_slots * blocks_per_window), 128 << 10), 512 << 10)
        block_bytes = max(block_bytes, min(512 * self.num_slots, 1 << 20))
        in_bytes = block_bytes * self.num_samples // source.num_bytes
        self.block = max(1, min(in_bytes, self.num_samples // (16 * self.num_slots)))
        self.window_ticks = blocks_per_window * self.block
        if group > 1:  # windows are large, because they are sorted by length
            in_bytes = (64 << 20) * self.num_samples // source.num_bytes
            self.window_ticks = max(min(8192, in_bytes), 4 * group) // group

    def samples(self, epoch: int, tick: int) -> list[int]:
        """Return the samples of a tick of an epoch, in order of places."""
        if not self.shuffle:
            return [*range(tick * self.size, (tick + 1) * self.size)]
        first = tick // self.window_ticks * self.window_ticks
        return self._window(epoch, first)[tick - first]

    @functools.cache  # noqa: B019 - for as long as the tests run
    def _window(self, epoch: int, first: int) -> list[list[int]]:
        """Return the samples of all ticks of the window that begins at tick ``first``."""
        num_ticks = min(self.window_ticks, self.ticks_per_epoch - first)
        ticks: list[list[int]] = [[] for _ in range(num_ticks)]
        walk = [*range(num_ticks)]
        if self.group > 1:
            walk = shuffled(num_ticks, hashed(self.seed, epoch, SLICES, first))
        for slot in range(self.num_slots):
            begin = (slot * self.ticks_per_epoch + first) * self.group
            drawn = shuffled(num_ticks * self.group, hashed(self.seed, epoch, WINDOWS, slot, first))
            samples = [self._at(epoch, begin + number) for number in drawn]
            if self.group > 1:
                samples.sort(key=lambda sample: self.lengths[sample])
            for tick, part in enumerate(walk):
                ticks[tick] += samples[part * self.group :][: self.group]
        return ticks

    def _at(self, epoch: int, position: int) -> int:
        """Return the sample at a position of the epoch's sequence.

        Whole blocks are permuted, the short last block stays, and everything is rotated, so that each epoch
        drops different samples.
        """
        block, within = divmod(position, self.block)
        num_blocks = self.num_samples // self.block
        if block < num_blocks:
            block = permuted(block, num_blocks, hashed(self.seed, epoch, BLOCKS))
        rotation = hashed(self.seed, epoch, ROTATE) % self.num_samples
        return (block * self.block + within + rotation) % self.num_samples

    def offset(self, epoch: int, num_tokens: int) -> int:
        """Return the token at which an epoch's rows begin, if rows are cut from one stream of tokens."""
        return hashed(self.seed, epoch, OFFSET) % num_tokens if self.shuffle else 0


Weights = Mapping[str, float]  # shares of samples


def cycle_counts(weights: Weights, names: Sequence[str]) -> list[int]:
    """Return the weights as numbers of ticks per cycle, which the order depends on."""
    exact = [Fraction(str(weights.get(name, 0))) for name in names]
    ends = [0, *(round(end * CYCLE) for end in accumulate(float(each / sum(exact)) for each in exact))]
    return [end - begin for begin, end in pairwise(ends)]


def spread(counts: Sequence[int], num_ticks: int) -> list[int]:
    """Return the sources of the first ticks of a cycle. The n-th tick of a source is at (n + 1/2) / count."""
    turns = [0] * len(counts)
    found = []
    for _ in range(num_ticks):
        _, number = min(((2 * turns[n] + 1) / counts[n], n) for n in range(len(counts)) if counts[n])
        turns[number] += 1
        found.append(number)
    return found


Stages = Sequence[tuple[int, Any]]  # (first step, setting)


def held_at(stages: Stages, step: int) -> Any:
    return [held for first, held in stages if first <= step][-1]


def _from_on(stages: Stages, step: int) -> list[tuple[int, Any]]:
    """Return the stages from a step on."""
    return [(step, held_at(stages, step)), *(stage for stage in stages if stage[0] > step)]


class Run:
    """A run: its sources, and the stages of its weights and global batch sizes, by training step.

    A run without ``weights`` has one source. An epoch has as many ticks as one epoch of each source that the
    run began with.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        sizes: Sequence[tuple[int, int]],
        weights: Sequence[tuple[int, Weights]] = (),
        seed: int = 0,
        group: int = 1,
        shuffle: bool = True,
    ) -> None:
        self.size = math.gcd(*(size for _, size in sizes))  # samples per tick
        self.is_mixture = bool(weights)
        self.sizes: list[tuple[int, int]] = [*sizes]
        self.weights: list[tuple[int, Weights]] = [*weights] or [(0, dict.fromkeys(sources, 1))]
        self.amended_at = 0  # the border of the last amendment
        self.seed, self.group, self.shuffle = seed, group, shuffle
        self.orders: dict[str, Order] = {}
        self.added_at: dict[str, int] = {}
        self._add(sources, 0)
        self.ticks_per_epoch = sum(order.ticks_per_epoch for order in self.orders.values())
        self._begins = [(0, 0)]  # epoch and tick of each step

    def _add(self, sources: Mapping[str, Source], step: int) -> None:
        for name in [name for name in sources if name not in self.orders]:
            seed = hashed(self.seed, SEED, len(self.orders)) if self.is_mixture else self.seed
            self.orders[name] = Order(sources[name], self.size, self.group, seed, shuffle=self.shuffle)
            self.added_at[name] = step

    def amended(
        self, step: int, sources: Mapping[str, Source], sizes: Stages, weights: Stages
    ) -> tuple[Run, int]:
        """Amend the run before a step with other stages, which count from step 0.

        Returns the amended run and its border.
        """
        weights = weights or self.weights
        if step == 0:  # nothing was delivered yet
            options: Any = {"seed": self.seed, "group": self.group, "shuffle": self.shuffle}
            return Run(sources, sizes=sizes, weights=weights if self.is_mixture else (), **options), 0
        first, end = self._round_at(self.tick_of(step))
        is_begun = first < self.tick_of(step)
        free = end if is_begun else first  # no round that begins here or later has begun
        border = next(later for later in count(step) if self.tick_of(later) >= free)
        while True:
            run = self._from(border, sources, sizes, weights)
            # With other sizes a step may begin at another tick. Complete and begun rounds must not change.
            is_over = run.position(step) == self.position(step) and run.tick_of(border) >= free
            if is_over and (not is_begun or run._round_at(first) == (first, end)):
                return run, border
            border += 1

    def _from(self, border: int, sources: Mapping[str, Source], sizes: Stages, weights: Stages) -> Run:
        run = copy.copy(self)
        names = [name for name in self.orders if self.added_at[name] < border]
        run.orders = {name: self.orders[name] for name in names}
        run.added_at = {name: self.added_at[name] for name in names}
        run._add(sources, border)
        run.sizes = [stage for stage in self.sizes if stage[0] < border]
        run.sizes += [(max(first, border), held) for first, held in _from_on(sizes, border)]
        run.weights = [stage for stage in self.weights if stage[0] < border]
        names = [*run.orders]
        for first, held in _from_on(weights, border):
            # A round that was planned to end at this border still does, and new rounds begin there.
            begins = first == border and any(stage[0] == border for stage in self.weights)
            if begins or cycle_counts(held, names) != cycle_counts(run.weights[-1][1], names):
                run.weights.append((first, held))
        run.amended_at = border  # also if nothing changes there
        run._begins = [(0, 0)]
        return run

    def confirmed(self, step: int, sizes: Stages, weights: Stages) -> Run:
        """Amend the run before a step, from which on it already has these stages.

        Nothing changes, but if it had others earlier, the stages that were given count from this step on.
        """
        if self.holds(self.amended_at, sizes, weights):
            return self
        run = copy.copy(self)
        run.amended_at = step
        return run

    def holds(self, step: int, sizes: Stages, weights: Stages) -> bool:
        """Return whether the run has these stages from a step on, or from its last amendment if later."""
        since = max(step, self.amended_at)
        names = [*dict.fromkeys(chain(self.orders, *(held for _, held in weights)))]

        def held(sizes: Stages, weights: Stages) -> list[tuple[int, Any]]:
            found: list[tuple[int, Any]] = []
            for first in sorted({since, *(first for first, _ in chain(sizes, weights) if first > since)}):
                both = held_at(sizes, first), cycle_counts(held_at(weights, first), names)
                if not found or found[-1][1] != both:
                    found.append((first, both))
            return found

        return held(self.sizes, self.weights) == held(sizes, weights or self.weights)

    def names_from(self, step: int) -> list[str]:
        """Return the sources that have samples from a step on."""
        held = [held_at(self.weights, step), *(held for first, held in self.weights if first > step)]
        return [name for name in self.orders if any(weights.get(name) for weights in held)]

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch and its tick at which a step begins."""
        while len(self._begins) <= step:
            epoch, tick = self._begins[-1]
            tick += self._num_ticks(len(self._begins) - 1)
            if tick + self._num_ticks(len(self._begins)) > self.ticks_per_epoch:
                epoch, tick = epoch + 1, 0  # the step does not fit into the epoch
            self._begins.append((epoch, tick))
        return self._begins[step]

    def _num_ticks(self, step: int) -> int:
        return int(held_at(self.sizes, step)) // self.size

    def tick_of(self, step: int) -> int:
        """Return the tick at which a step begins, counted over all epochs including their unused ticks."""
        epoch, tick = self.position(step)
        return epoch * self.ticks_per_epoch + tick

    def step(self, step: int) -> list[list[Sample]]:
        """Return the samples of a step: a list per tick, in order of places."""
        first = self.tick_of(step)
        return [self.tick(tick) for tick in range(first, first + self._num_ticks(step))]

    def tick(self, tick: int) -> list[Sample]:
        first, end = self._round_at(tick)
        return self._round(first, end)[tick - first]

    def _round_at(self, tick: int) -> tuple[int, int]:
        """Return (first, end) of the round of a tick. The last round of a stage ends with the stage."""
        begins = [self.tick_of(step) for step, _ in self.weights]
        stage = max(begin for begin in begins if begin <= tick)
        first = tick - (tick - stage) % ROUND
        return first, min([first + ROUND, *(begin for begin in begins if begin > first)])

    @functools.cache  # noqa: B019
    def _round(self, first: int, end: int) -> list[list[Sample]]:
        """Return all ticks of a round. Every slot has the same sources, each in its own order."""
        names = [*self.orders]
        taken = Counter[int]()  # ticks of each source before the round, the same for every slot
        # First tick of each stage, and its ticks per cycle of each source.
        stages = [(self.tick_of(step), cycle_counts(weights, names)) for step, weights in self.weights]
        stages = [stage for stage in stages if stage[0] <= first]
        for (begin, counts), (end_of_stage, _) in pairwise([*stages, (first, [])]):
            num_cycles, rest = divmod(end_of_stage - begin, CYCLE)
            taken.update({number: num_cycles * count for number, count in enumerate(counts)})
            taken.update(spread(counts, rest))
        begin, counts = stages[-1]
        within = (first - begin) % CYCLE
        held = spread(counts, within + end - first)[within:]
        ticks: list[list[Sample]] = [[] for _ in held]
        for slot in range(self.size // self.group):
            done = Counter(taken)
            for tick, at in enumerate(shuffled(len(held), hashed(self.seed, PATTERN, first, slot))):
                order = self.orders[names[held[at]]]
                epoch, within = divmod(done[held[at]], order.ticks_per_epoch)
                numbers = order.samples(epoch, within)[slot * self.group :][: self.group]
                ticks[tick] += [Sample(names[held[at]], epoch, number) for number in numbers]
                done[held[at]] += 1
        return ticks
