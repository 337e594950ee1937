"""The law of the order: which sample stands in which place of which training step. Plain Python, for reading.

The loader computes the same with arrays, window by window, shared out among ranks and workers. Here it is
written out number by number, and nothing is imported from the loader: a check shares no code with what it
checks. The words:

* A **tick** takes L samples, one for each of its L **places**. A training step is one tick or several.
* A **slot** is g neighbouring places, which hold samples of similar length (g is 1 without grouping). Each
  slot owns a stretch of an epoch's shuffled sequence, and walks through it window by window.
* A **round** is 64 ticks in which every slot takes equally many samples of each source of a mixture.
* An amendment begins at a **border**: at a multiple of 64 steps since the last change of the weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

ROUND, CYCLE = 64, 1 << 16  # ticks
ROTATE, BLOCKS, WINDOWS, SLICES, OFFSET, PATTERN, SEED = range(1, 8)  # what a hash is for
_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    source: str
    epoch: int  # of the source
    number: int  # in the source, from 0 on


def mixed(value: int) -> int:
    """Return the splitmix64 of a number of 64 bits."""
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
    """Return the numbers below ``count``, sorted by their hash under a key."""
    return sorted(range(count), key=lambda number: mixed(key ^ number))


def permuted(number: int, count: int, key: int) -> int:
    """Return where a keyed permutation of the numbers below ``count`` sends one: a Feistel network over the
    next power of four, repeated until it lands below ``count``."""
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
    """What the order of a source depends on."""

    lengths: Sequence[int]  # tokens of each sample
    num_bytes: int  # of its tars


class Order:
    """The order of one source, epoch after epoch."""

    def __init__(self, source: Source, size: int, group: int, seed: int, *, shuffle: bool = True) -> None:
        self.lengths, self.size, self.group, self.seed = source.lengths, size, group, seed
        self.shuffle, self.num_samples = shuffle, len(source.lengths)
        self.ticks_per_epoch = self.num_samples // size
        self.num_slots = size // group
        # A block is read at once. It has at most 512 KiB, less where many slots read at the same time, and
        # so few samples that a slot has 16 of them. Beyond 1,024 slots it grows again.
        blocks_per_window = min(max(1024 // self.num_slots, 4), 16)
        block_bytes = min(max((128 << 20) // (self.num_slots * blocks_per_window), 128 << 10), 512 << 10)
        block_bytes = max(block_bytes, min(512 * self.num_slots, 1 << 20))
        in_bytes = block_bytes * self.num_samples // source.num_bytes
        self.block = max(1, min(in_bytes, self.num_samples // (16 * self.num_slots)))
        self.window_ticks = blocks_per_window * self.block
        if group > 1:  # large windows, because they are sorted by length
            in_bytes = (64 << 20) * self.num_samples // source.num_bytes
            self.window_ticks = max(min(8192, in_bytes), 4 * group) // group
        self._windows: dict[tuple[int, int], list[list[int]]] = {}

    def samples(self, epoch: int, tick: int) -> list[int]:
        """Return the samples of a tick of an epoch, by place."""
        if not self.shuffle:
            return [*range(tick * self.size, (tick + 1) * self.size)]
        first = tick // self.window_ticks * self.window_ticks
        if (epoch, first) not in self._windows:
            self._windows[epoch, first] = self._window(epoch, first)
        return self._windows[epoch, first][tick - first]

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
        """Return the sample at a position of the epoch's sequence: whole blocks are permuted, the short last
        one stays, and all is rotated, so that each epoch leaves out other samples."""
        block, within = divmod(position, self.block)
        num_blocks = self.num_samples // self.block
        if block < num_blocks:
            block = permuted(block, num_blocks, hashed(self.seed, epoch, BLOCKS))
        rotation = hashed(self.seed, epoch, ROTATE) % self.num_samples
        return (block * self.block + within + rotation) % self.num_samples

    def offset(self, epoch: int, num_tokens: int) -> int:
        """Return the token at which the epoch's rows begin, where rows are cut from one stream of tokens."""
        return hashed(self.seed, epoch, OFFSET) % num_tokens if self.shuffle else 0


Weights = Mapping[str, float]  # shares of samples


def cycle_counts(weights: Weights, names: Sequence[str]) -> list[int]:
    """Return the weights as ticks of a cycle: what the order depends on."""
    exact = [Fraction(str(weights.get(name, 0))) for name in names]
    ends = [0, *(round(end * CYCLE) for end in accumulate(float(each / sum(exact)) for each in exact))]
    return [end - begin for begin, end in pairwise(ends)]


def spread(counts: Sequence[int], num_ticks: int) -> list[int]:
    """Return the sources of the first ticks of a cycle: the n-th tick of a source stands at (n + 1/2) / its
    count of the cycle."""
    turns = [0] * len(counts)
    found = []
    for _ in range(num_ticks):
        _, number = min(((2 * turns[n] + 1) / counts[n], n) for n in range(len(counts)) if counts[n])
        turns[number] += 1
        found.append(number)
    return found


class Run:
    """A run: its sources, and the stages of its weights and of its sizes, by training step.

    Without ``weights`` it has one source, whose order ends where an epoch does. The steps of a mixture go on
    through all epochs, of which each has as many ticks as one epoch of all first sources together.
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
        self.size = math.gcd(*(size for _, size in sizes))  # of a tick
        self.sizes = [*sizes]
        self.weights = [*weights]
        self.seed, self.group, self.shuffle = seed, group, shuffle
        self.orders: dict[str, Order] = {}
        self._add(sources)
        self.ticks_per_epoch = sum(order.ticks_per_epoch for order in self.orders.values())
        self._begins = [(0, 0)]  # epoch and tick of each step
        self._rounds: dict[tuple[int, int], list[list[Sample]]] = {}

    def _add(self, sources: Mapping[str, Source]) -> None:
        for name in [name for name in sources if name not in self.orders]:
            seed = hashed(self.seed, SEED, len(self.orders)) if self.weights else self.seed
            self.orders[name] = Order(sources[name], self.size, self.group, seed, shuffle=self.shuffle)

    def amend(
        self,
        step: int,
        sources: Mapping[str, Source],
        *,
        sizes: Sequence[tuple[int, int]] = (),
        weights: Sequence[tuple[int, Weights]] = (),
    ) -> None:
        """From a border on let other sizes or weights hold; each source goes on where it stands."""
        assert self.is_border(step)
        epoch, tick = self.position(step)
        if weights:
            self.weights = [*(stage for stage in self.weights if stage[0] < step), *weights]
            self._add(sources)
        if sizes:
            self.sizes = [*(stage for stage in self.sizes if stage[0] < step), *sizes]
            del self._begins[step:]
            self._begins.append(self._fitting(epoch, tick, step))
        self._rounds.clear()

    def is_border(self, step: int) -> bool:
        """Return whether a step begins a round, counted in steps and in ticks, since the last change."""
        of_weights = [first for first, _ in self.weights if first <= step]
        of_any = of_weights + [first for first, _ in self.sizes if first <= step]
        for changed in (max(of_weights, default=0), max(of_any)):
            if (step - changed) % ROUND or (self.tick_of(step) - self.tick_of(changed)) % ROUND:
                return False
        return True

    def weights_change_after(self, step: int) -> bool:
        return any(first > step for first, _ in self.weights)

    def has_other_weights(self, step: int, weights: Weights) -> bool:
        """Return whether the weights differ from those that hold at a step."""
        held = [held for first, held in self.weights if first <= step][-1]
        names = [*dict.fromkeys([*held, *weights])]
        return cycle_counts(held, names) != cycle_counts(weights, names)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the tick in it, at which a step begins."""
        while len(self._begins) <= step:
            epoch, tick = self._begins[-1]
            next_step = len(self._begins)
            self._begins.append(self._fitting(epoch, tick + self._num_ticks(next_step - 1), next_step))
        return self._begins[step]

    def _fitting(self, epoch: int, tick: int, step: int) -> tuple[int, int]:
        """An epoch ends where the next step would not fit."""
        if tick + self._num_ticks(step) > self.ticks_per_epoch:
            return epoch + 1, 0
        return epoch, tick

    def _num_ticks(self, step: int) -> int:
        return [size for first, size in self.sizes if first <= step][-1] // self.size

    def tick_of(self, step: int) -> int:
        """Return the tick at which a step begins, counted through all epochs, unused ticks included."""
        epoch, tick = self.position(step)
        return epoch * self.ticks_per_epoch + tick

    def step(self, step: int) -> list[list[Sample]]:
        """Return the samples of a step: of each tick, by place."""
        first = self.tick_of(step)
        return [self.tick(tick) for tick in range(first, first + self._num_ticks(step))]

    def tick(self, tick: int) -> list[Sample]:
        if not self.weights:
            ((name, order),) = self.orders.items()
            epoch, tick = divmod(tick, order.ticks_per_epoch)
            return [Sample(name, epoch, number) for number in order.samples(epoch, tick)]
        first, end = self._round_at(tick)
        if (first, end) not in self._rounds:
            self._rounds[first, end] = self._round(first, end)
        return self._rounds[first, end][tick - first]

    def _stages(self) -> list[tuple[int, list[int]]]:
        """Return the first tick of each stage, and its ticks of each source in a cycle."""
        names = [*self.orders]
        return [(self.tick_of(step), cycle_counts(weights, names)) for step, weights in self.weights]

    def _round_at(self, tick: int) -> tuple[int, int]:
        """Return the ticks [first, end) of a round: the last one of a stage ends where the stage does."""
        begins = [begin for begin, _ in self._stages()]
        stage = max(begin for begin in begins if begin <= tick)
        first = tick - (tick - stage) % ROUND
        return first, min([first + ROUND, *(begin for begin in begins if begin > first)])

    def _round(self, first: int, end: int) -> list[list[Sample]]:
        """Return all ticks of a round. Each slot has the same sources, in an order of its own."""
        names = [*self.orders]
        taken = Counter[int]()  # ticks of each source before the round, the same for every slot
        stages = [stage for stage in self._stages() if stage[0] <= first]
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
