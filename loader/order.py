"""The sampling order: which sample comes when, and in which slot. Pure arithmetic.

A data set is N samples. A **global batch** is L of them: what all ranks together train on in one step. A
**slot** is one of V = L / g equal parts of an epoch's shuffled sequence; a global batch takes the next g
samples of each slot, and an epoch has R = N // L of them (g is 1 but for grouping by length). Ranks and
workers only share the slots out, so global batch k is the same ordered set on any number of them, and a
position in a run is one integer. Random numbers come from a hash of our own: numpy's streams may differ
between its versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardprep.errors import UsageError

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
FEISTEL_ROUNDS = 6
_TABLE_SIZE = 4096  # up to which all of a permutation is worked out at once


def hash_ints(*values: int) -> int:
    """One 64-bit hash of a row of integers: splitmix64, chained."""
    state = 0
    for value in values:
        state = _mix((state + _GOLDEN ^ value) & _MASK)
    return state


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ state >> 30) * _FIRST) & _MASK
    state = ((state ^ state >> 27) * _SECOND) & _MASK
    return state ^ state >> 31


def hash_array(key: npt.NDArray[np.uint64] | int, values: Int64s) -> npt.NDArray[np.uint64]:
    """splitmix64 of every value under a key: uint64, in the shape that the two broadcast to."""
    state = np.asarray(key, np.uint64) ^ values.astype(np.uint64)
    state = state + np.uint64(_GOLDEN)
    state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
    return state ^ state >> np.uint64(31)


def permute(positions: Int64s, count: int, key: int) -> Int64s:
    """Where a keyed permutation of ``range(count)`` sends some positions; same shape as they.

    A Feistel network over the next power of four, walked until it lands below ``count``
    (fewer than four steps on average), so nothing of size ``count`` is held unless it is small.
    """
    if count < 2:
        return positions.copy()
    if count <= _TABLE_SIZE:
        return _permutation(count, key)[positions]
    return _walk(positions.reshape(-1), count, partial(_feistel, count=count, key=key)).reshape(
        positions.shape
    )


@lru_cache(maxsize=8)
def _permutation(count: int, key: int) -> Int64s:
    """All of a small one: int64[count]. It is kept, for all windows of an epoch ask for the same."""
    whole = _feistel(np.arange(1 << 2 * _half_bits(count)), count, key)
    return _walk(np.arange(count), count, whole.__getitem__)


def _walk(positions: Int64s, count: int, sent: Callable[[Int64s], Int64s]) -> Int64s:
    """Where positions come to below ``count``, if they are sent on until they do: int64[n] -> int64[n]."""
    found = sent(positions)
    walking = np.flatnonzero(found >= count)
    while walking.size:
        found[walking] = sent(found[walking])
        walking = walking[found[walking] >= count]
    return found


def _feistel(values: Int64s, count: int, key: int) -> Int64s:
    """Where the network sends values below the power of four: int64[n] -> int64[n]."""
    half = np.int64(_half_bits(count))
    mask = (np.int64(1) << half) - 1
    left, right = values >> half, values & mask
    for round_ in range(FEISTEL_ROUNDS):
        sent = hash_array(hash_ints(key, round_), right).astype(np.int64) & mask
        left, right = right, left ^ sent
    return left << half | right


def _half_bits(count: int) -> int:
    return ((count - 1).bit_length() + 1) // 2


ORDER_VERSION = 2
BLOCK_BYTES = (128 << 10, 512 << 10)  # of a shard, at least and at most: the unit of reading
WINDOWS_BYTES = 128 << 20  # of all slots together, where blocks of the least size allow it
SLOT_BLOCK_BYTES, MOST_BLOCK_BYTES = (
    512,
    1 << 20,
)  # blocks grow with the slots, so that all ranks open no more
BLOCKS_PER_SLOT = 16  # at least so many where there are samples enough, else slots would hardly mix
GROUPED_SAMPLES = 8192  # of a window that is sorted by length: padding falls with it, memory rises
GROUPED_BYTES = 64 << 20  # of such a window at most
_ROTATE, _BLOCKS, _WINDOWS, _SLICES, _OFFSET = 1, 2, 3, 4, 5  # what a hash is for

NumTokens = Callable[[Int64s], Int64s]


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """What the order of one data set and that of a mixture have in common: the global batch and its slots."""

    global_batch_size: int  # L
    seed: int
    shuffle: bool = True
    group: int = 1  # g: samples of like length side by side; 1 for any length
    keeps_tail: bool = False  # the last global batch is filled up with samples that stand in it already

    @property
    def num_slots(self) -> int:
        """V: what ranks and workers share out."""
        return self.global_batch_size // self.group

    def is_filler(self, step: int, slots: range) -> npt.NDArray[np.bool_] | None:  # noqa: ARG002
        """Which of these slots hold a sample again at a step of an epoch: bool[len(slots)]; None for none."""
        return None


@dataclass(frozen=True, kw_only=True)
class Order(BatchOrder):
    """The sampling order for one data set, global batch and seed. Raises UsageError where N < L.

    1. The data set is rotated by hash(seed, epoch) mod N, so each epoch leaves out other samples.
    2. It is cut into blocks of K samples, the unit of reading, which are permuted; the short last one stays.
    3. In a slot windows of M blocks are permuted sample by sample, or, grouped by length, sorted by it and
    cut
       into slices of g, which all slots walk in one order: a global batch is of one length.

    The price: no uniform permutation. What is mixed at any time is the V M blocks of the windows, which are
    in memory: 128 MiB of all ranks up to L = 256. From there on blocks grow with L up to 1 MiB, so that a
    step of all ranks begins as many blocks, and opens as many shards, as at L = 256. Each place of the global
    batch holds 2 KiB times L then, from L = 2,048 on 4 MiB. Without ``shuffle`` global batch k is samples
    ``[k L, (k+1) L)``.
    """

    num_samples: int  # N
    block_samples: int  # K
    window_samples: int  # M K, of a slot

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch_size and not self.keeps_tail:
            raise UsageError(
                f"the data set has {self.num_samples:,} samples, but one batch for every rank takes "
                f"{self.global_batch_size:,}; lower batch_size, use fewer ranks, or add data",
                found=f"{self.num_samples:,} samples",
                expected=f"{self.global_batch_size:,}",
            )
        if self.global_batch_size % self.group:
            raise UsageError(
                f"groups of {self.group} samples of like length do not divide the global batch of "
                f"{self.global_batch_size}; pass a group_by_length that divides it",
                found=f"groups of {self.group}",
                expected=f"the global batch of {self.global_batch_size}",
            )
        if self.group > 1 and not self.shuffle:
            raise UsageError("group_by_length reorders samples, shuffle=False forbids it; leave one out")

    @property
    def steps_per_epoch(self) -> int:
        """R: global batches an epoch, and samples a slot delivers in it."""
        return (self.num_samples + self.num_fillers) // self.global_batch_size

    @property
    def num_left_out(self) -> int:
        """Samples an epoch leaves out; fewer than a global batch."""
        return 0 if self.keeps_tail else self.num_samples % self.global_batch_size

    @property
    def num_fillers(self) -> int:
        """Places of the last global batch that hold a sample again, where the tail is kept."""
        return -self.num_samples % self.global_batch_size if self.keeps_tail else 0

    def is_filler(self, step: int, slots: range) -> npt.NDArray[np.bool_] | None:
        """Spread evenly: each part of n places has ``n * real // global_batch_size`` samples at least. So
        every batch of every rank has one where there are as many samples as batches."""
        if not self.num_fillers or step + 1 < self.steps_per_epoch:
            return None
        num_real = self.global_batch_size - self.num_fillers
        return np.arange(slots.start, slots.stop) * num_real % self.global_batch_size >= num_real

    @property
    def window_steps(self) -> int:
        """Steps after which every slot goes on to its next window."""
        return max(self.window_samples // self.group, 1)

    @property
    def sizes(self) -> dict[str, int]:
        """What follows from data and version, and must be the same where a run is resumed."""
        return {"block_samples": self.block_samples, "window_samples": self.window_samples}

    def offset(self, epoch: int, count: int) -> int:
        """The token below ``count`` at which an epoch's rows begin, where rows are cut from a stream."""
        return hash_ints(self.seed, epoch, _OFFSET) % count if self.shuffle else 0

    def windows(self, first_step: int) -> Iterator[tuple[int, int]]:
        """The windows of an epoch from the one that holds ``first_step``: (first step, end)."""
        size = self.window_steps
        for start in range(first_step // size * size, self.steps_per_epoch, size):
            yield start, min(start + size, self.steps_per_epoch)

    def samples_of(
        self, epoch: int, slots: range, start: int, end: int, num_tokens: NumTokens | None = None
    ) -> Int64s:
        """The samples that slots deliver in one window, as ``windows`` cuts them.

        int64[len(slots) * group, end - start]: row = place in the global batch, column = step.
        ``num_tokens`` tells samples' lengths, int64[n] -> int64[n]; needed where they are grouped.
        """
        slot = np.arange(slots.start, slots.stop, dtype=np.int64)[:, None]
        if not self.shuffle:
            steps = np.arange(start, end, dtype=np.int64)
            num_real = self.global_batch_size - np.where(
                steps + 1 < self.steps_per_epoch, 0, self.num_fillers
            )
            return steps * self.global_batch_size + slot * num_real // self.global_batch_size
        size = (end - start) * self.group
        step = np.arange(size, dtype=np.int64)
        keys = [[hash_ints(self.seed, epoch, _WINDOWS, number, start)] for number in slots]
        shuffled = np.argsort(hash_array(np.array(keys, np.uint64), step), axis=1, kind="stable")
        positions = (slot * self.steps_per_epoch + start) * self.group + shuffled
        samples = self.samples_at(epoch, positions)
        if self.group == 1:
            return samples
        assert num_tokens is not None
        lengths = num_tokens(samples.reshape(-1)).reshape(samples.shape)
        by_length = np.take_along_axis(samples, np.argsort(lengths, axis=1, kind="stable"), axis=1)
        slice_key = hash_ints(self.seed, epoch, _SLICES, start)
        walk = np.argsort(hash_array(slice_key, np.arange(end - start)), kind="stable")
        slices = by_length.reshape(len(slots), end - start, self.group)[:, walk]
        return slices.swapaxes(1, 2).reshape(len(slots) * self.group, end - start)

    def step_samples(self, epoch: int, step: int, num_tokens: NumTokens | None = None) -> Int64s:
        """Global batch ``step`` of an epoch, every rank's part of it: int64[global_batch_size]."""
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step {step} is outside the epoch's {self.steps_per_epoch} steps")
        start, end = next(self.windows(step))
        return self.samples_of(epoch, range(self.num_slots), start, end, num_tokens)[:, step - start]

    def samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        """The samples that stand at positions of an epoch's shuffled sequence of blocks; same shape.
        Positions from ``n block_samples`` up to the next such number are consecutive samples, mod N."""
        block_samples = self.block_samples
        num_blocks = self.num_samples // block_samples  # without the short last one
        block, within = np.divmod(positions, block_samples)
        if num_blocks < _TABLE_SIZE:
            blocks, place = np.arange(num_blocks + 1), block
        else:
            blocks, place = np.unique(block, return_inverse=True)
        whole = blocks < num_blocks
        first = blocks.copy()
        first[whole] = permute(blocks[whole], num_blocks, hash_ints(self.seed, epoch, _BLOCKS))
        first *= block_samples
        first += hash_ints(self.seed, epoch, _ROTATE) % self.num_samples
        return (first[place.reshape(block.shape)] + within) % self.num_samples


def choose_windows(
    *, num_samples: int, num_bytes: int, global_batch_size: int, group: int = 1
) -> tuple[int, int]:
    """K and M K: samples of a block and of a slot's window. M is 16 for L up to 64, 4 from 256 on.

    A run keeps those that it began with, also where a later version would choose others.
    """
    slots = max(global_batch_size // group, 1)  # Order refuses a group that is larger
    blocks = min(max(1024 // slots, 4), 16)
    block_bytes = min(max(WINDOWS_BYTES // (slots * blocks), BLOCK_BYTES[0]), BLOCK_BYTES[1])
    block_bytes = max(block_bytes, min(SLOT_BLOCK_BYTES * slots, MOST_BLOCK_BYTES))
    filling = block_bytes * num_samples // max(num_bytes, 1)
    block_samples = max(1, min(filling, num_samples // (BLOCKS_PER_SLOT * slots)))
    if group == 1:
        return block_samples, blocks * block_samples
    fitting = GROUPED_BYTES * num_samples // max(num_bytes, 1)
    return block_samples, max(min(GROUPED_SAMPLES, fitting), 4 * group) // group * group


def share(slots: range, part: int, num_parts: int) -> range:
    """One of ``num_parts`` consecutive parts of some slots; their sizes differ by one at most."""
    first = slots.start + len(slots) * part // num_parts
    return range(first, slots.start + len(slots) * (part + 1) // num_parts)
