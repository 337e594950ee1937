"""The sampling order of one source: the samples that each slot delivers at each tick. Pure arithmetic.

The rules and the letters are those of the law, 2 and 3 (the docstring of ``loader.order``). Ranks and workers
only divide the slots among them, so a tick is the same ordered set of samples for any number of them.

Epoch 0 of N = 10 samples with L = 4, g = 1, blocks and windows of 2 samples and seed 0, one after another:

* Rotate by ``hash_ints(0, 0, _ROTATE) % 10``, which is 9: 9 0 1 2 3 4 5 6 7 8.
* Cut into blocks and permute them: 3 4 | 5 6 | 1 2 | 9 0 | 7 8.
* Give each of the V = 4 slots R = 2 samples: slot 0 has 3 4, slot 3 has 9 0. 7 and 8 are left out.
* Shuffle each slot's window: 3 4, 6 5, 1 2 and 0 9. A tick takes one sample of each.

>>> order = Order(num_samples=10, tick_samples=4, block_samples=2, window_samples=2, seed=0)
>>> order.samples_of(0, range(4), 0, 2).T.tolist()  # both ticks of epoch 0
[[3, 6, 1, 0], [4, 5, 2, 9]]
>>> order.samples_of(0, range(2, 4), 0, 2).T.tolist()  # what rank 1 of 2 has of them
[[1, 0], [2, 9]]
>>> order.samples_of(1, range(4), 0, 2).T.tolist()
[[9, 6, 5, 3], [8, 7, 4, 2]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.order.hashes import Int64s, hash_after, hash_array, hash_ints, permute, unpermute
from shardprep.errors import UsageError

ORDER_VERSION = 2
BLOCK_BYTES = (128 << 10, 512 << 10)  # least and most bytes of a block, the unit of reading
WINDOWS_BYTES = 128 << 20  # windows of all slots together, if blocks of the least size are small enough
# Blocks also grow with the number of slots, so that more ranks together do not open more shards.
SLOT_BLOCK_BYTES = 512
MOST_BLOCK_BYTES = 1 << 20
BLOCKS_PER_SLOT = 16  # at least, if there are enough samples: with fewer, slots would hardly mix
GROUPED_SAMPLES = 8192  # most samples of a window sorted by length: more would need less padding, more memory
GROUPED_BYTES = 64 << 20  # most bytes of such a window
# Purposes of a hash, see the law, 1.
_ROTATE = 1
_BLOCKS = 2
_WINDOWS = 3
_SLICES = 4
_OFFSET = 5

NumTokens = Callable[[Int64s], Int64s]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The sampling order of one source. Raises UsageError if N < L.

    Samples are rotated, so that each epoch leaves out others; blocks, the unit of reading, are permuted; each
    slot shuffles its windows. With grouping all slots take slices of their sorted windows in the same random
    order, so the samples of a tick have similar lengths.

    The price: this is not a uniform permutation. At any time the V M blocks of the current windows are mixed.
    They are in memory: 128 MiB for all ranks together up to L = 256. Above that, blocks grow with L up to
    1 MiB, so a step of all ranks begins as many blocks, and opens as many shards, as at L = 256. Each place
    of the global batch then takes 2 KiB times L, and 4 MiB from L = 2,048 on.
    """

    num_samples: int  # N
    tick_samples: int  # L
    block_samples: int  # K
    window_samples: int  # per slot: M K, or GROUPED_SAMPLES if they fit GROUPED_BYTES
    seed: int
    shuffle: bool = True
    group: int = 1  # g: neighbouring samples of similar length; 1: not grouped
    keeps_tail: bool = False  # fill up the last tick with repeated samples; leave none out

    def __post_init__(self) -> None:
        if self.num_samples < self.tick_samples and not self.keeps_tail:
            found = f"a data set of {self.num_samples:,} samples"
            raise UsageError(found=found, expected=f"at least {self.tick_samples:,}, a batch for each rank")
        if self.tick_samples % self.group:
            expected = f"a group_by_length that divides the global batch of {self.tick_samples}"
            raise UsageError(found=f"groups of {self.group} samples of similar length", expected=expected)
        if self.group > 1 and not self.shuffle:
            raise UsageError("group_by_length needs shuffle=True, and no validation loader has it")

    @property
    def num_slots(self) -> int:
        """Return V. Ranks and workers divide the slots among them."""
        return self.tick_samples // self.group

    @property
    def ticks_per_epoch(self) -> int:
        """Return R, which is also the samples per slot and epoch if g is 1."""
        return (self.num_samples + self.num_fillers) // self.tick_samples

    @property
    def num_left_out(self) -> int:
        """Count the samples that an epoch leaves out: fewer than a tick."""
        return 0 if self.keeps_tail else self.num_samples % self.tick_samples

    @property
    def num_fillers(self) -> int:
        """Count the places of the last tick that repeat a sample, if the tail is kept."""
        return -self.num_samples % self.tick_samples if self.keeps_tail else 0

    @property
    def window_ticks(self) -> int:
        """Return the ticks of a window."""
        return max(self.window_samples // self.group, 1)

    def is_filler(self, tick: int, slots: range) -> npt.NDArray[np.bool_] | None:
        """Return which of these slots repeat a sample at a tick: bool[len(slots)], or None if none does.

        Repeats are spread evenly: any n consecutive places have at least ``n * real // L`` new samples. So
        every batch of every rank has a new one if there are at least as many samples as batches.
        """
        if not self.num_fillers or tick + 1 < self.ticks_per_epoch:
            return None
        num_real = self.tick_samples - self.num_fillers
        return np.arange(slots.start, slots.stop) * num_real % self.tick_samples >= num_real

    def offset(self, epoch: int, count: int) -> int:
        """Return the token of a stream of ``count`` tokens at which an epoch's first row begins."""
        return hash_ints(self.seed, epoch, _OFFSET) % count if self.shuffle else 0

    def windows(self, first_tick: int) -> Iterator[tuple[int, int]]:
        """Yield (first tick, end) of each window, beginning with the one that contains ``first_tick``."""
        size = self.window_ticks
        for start in range(first_tick // size * size, self.ticks_per_epoch, size):
            yield start, min(start + size, self.ticks_per_epoch)

    def samples_of(
        self, epoch: int, slots: range, start: int, end: int, num_tokens: NumTokens | None = None
    ) -> Int64s:
        """Return the samples that slots deliver in a window from ``windows``.

        The shape is int64[len(slots) * group, end - start]: a row per place in the tick, a column per tick.
        ``num_tokens`` returns the lengths of samples, int64[n] -> int64[n]. It is required with grouping.
        """
        slot = np.arange(slots.start, slots.stop, dtype=np.int64)[:, None]
        if not self.shuffle:
            ticks = np.arange(start, end, dtype=np.int64)
            # The last tick has fewer new samples. Its places share them, and fillers repeat one.
            num_real = self.tick_samples - np.where(ticks + 1 < self.ticks_per_epoch, 0, self.num_fillers)
            return ticks * self.tick_samples + (slot * num_real // self.tick_samples)
        size = (end - start) * self.group
        # keys: uint64[slots, 1], of (seed, epoch, _WINDOWS, slot, start)
        keys = hash_after(hash_after(hash_ints(self.seed, epoch, _WINDOWS), slot), np.array([start]))
        shuffled = np.argsort(hash_array(keys, np.arange(size)), axis=1, kind="stable")
        positions = (slot * self.ticks_per_epoch + start) * self.group + shuffled
        samples = self.samples_at(epoch, positions)
        if self.group == 1:
            return samples
        assert num_tokens is not None
        lengths = num_tokens(samples.reshape(-1)).reshape(samples.shape)
        by_length = np.take_along_axis(samples, np.argsort(lengths, axis=1, kind="stable"), axis=1)
        slice_key = hash_ints(self.seed, epoch, _SLICES, start)
        slice_order = np.argsort(hash_array(slice_key, np.arange(end - start)), kind="stable")
        slices = by_length.reshape(len(slots), end - start, self.group)[:, slice_order]
        return slices.swapaxes(1, 2).reshape(len(slots) * self.group, end - start)

    def samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at positions in an epoch's sequence of permuted blocks, in the same shape.

        The positions from ``n K`` up to ``(n + 1) K`` are consecutive samples mod N.
        """
        block_samples = self.block_samples
        num_blocks = self.num_samples // block_samples  # without the short last one
        block, within = np.divmod(positions, block_samples)
        blocks, place = np.unique(block, return_inverse=True)
        whole = blocks < num_blocks
        first = blocks.copy()
        first[whole] = permute(blocks[whole], num_blocks, hash_ints(self.seed, epoch, _BLOCKS))
        first *= block_samples
        first += hash_ints(self.seed, epoch, _ROTATE) % self.num_samples
        return (first[place.reshape(block.shape)] + within) % self.num_samples

    def positions_of(self, epoch: int, samples: Int64s) -> Int64s:
        """Return the positions of samples in an epoch's sequence: the inverse of ``samples_at``."""
        rotated = (samples - hash_ints(self.seed, epoch, _ROTATE) % self.num_samples) % self.num_samples
        block, within = np.divmod(rotated, self.block_samples)
        num_blocks = self.num_samples // self.block_samples
        whole = block < num_blocks
        key = hash_ints(self.seed, epoch, _BLOCKS)
        block[whole] = unpermute(block[whole], num_blocks, key)
        return block * self.block_samples + within

    def left_out(self, epoch: int) -> Int64s:
        """Return the samples that an epoch leaves out: int64[num_left_out]."""
        first = self.num_samples - self.num_left_out
        positions = np.arange(first, self.num_samples)
        return self.samples_at(epoch, positions) if self.shuffle else positions


def choose_windows(*, num_samples: int, num_bytes: int, tick_samples: int, group: int = 1) -> tuple[int, int]:
    """Choose K and M K, the samples per block and per window. M is 16 for L up to 64, and 4 from 256 on.

    A run keeps the sizes that it began with, even if a later version would choose others.
    """
    slots = max(tick_samples // group, 1)  # Order refuses larger groups later
    blocks = min(max(1024 // slots, 4), 16)
    block_bytes = min(max(WINDOWS_BYTES // (slots * blocks), BLOCK_BYTES[0]), BLOCK_BYTES[1])
    block_bytes = max(block_bytes, min(SLOT_BLOCK_BYTES * slots, MOST_BLOCK_BYTES))
    per_block = block_bytes * num_samples // max(num_bytes, 1)  # samples of average size
    block_samples = max(1, min(per_block, num_samples // (BLOCKS_PER_SLOT * slots)))
    if group == 1:
        return block_samples, blocks * block_samples
    per_window = GROUPED_BYTES * num_samples // max(num_bytes, 1)
    return block_samples, max(min(GROUPED_SAMPLES, per_window), 4 * group) // group * group


def share(slots: range, number: int, count: int) -> range:
    """Return the consecutive slots of rank or worker ``number`` of ``count``: equally many, or one more."""
    return slots[len(slots) * number // count : len(slots) * (number + 1) // count]


def sizes_of_order(num_samples: int, num_bytes: int, tick_samples: int, group: int) -> dict[str, Any]:
    """Choose the sizes of a source's order, by their names in Order."""
    sizes = {"num_samples": num_samples, "tick_samples": tick_samples}
    block, window = choose_windows(**sizes, num_bytes=num_bytes, group=group)
    return {**sizes, "block_samples": block, "window_samples": window}
