"""Which sample goes where: the law of the order, pure.

A data set is N samples, numbered through all its shards. A **global batch** is L samples, one
from each of L **lanes**, in the order of the lanes. Lane ``l`` is the positions ``[l R, (l+1) R)``
of a shuffled sequence, R = N // L, so an epoch has R global batches, and fewer than L samples are
left out of it. The shuffled sequence of an epoch:

1. the data set is rotated by hash(seed, epoch) mod N, so each epoch leaves out other samples;
2. it is cut into blocks of K samples, the unit of reading, and the blocks are permuted (the short
   last block stays last);
3. inside a lane, windows of M blocks are permuted sample by sample.

All of it follows from N, L, K and the seed. Ranks and workers only share the lanes out, so global
batch k is the same ordered set whatever their number, and a position in the run is one integer,
``epoch * R + step``.

The price: the shuffle is no uniform permutation. Neighbours of a shard meet within a lane's window,
so what is mixed at any time is the L * M blocks of the windows. Without ``shuffle`` global batch k is
samples ``[k L, (k+1) L)`` and every epoch leaves out the last N mod L.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.integer_hash import hash_array, hash_ints, permute
from preprocess.shard_format import UsageError

LAW_VERSION = 1
BLOCK_BYTES = 512 * 1024  # of a shard; what a packed member holds, so a block is one or two reads
BLOCKS_A_LANE = 16  # at least so many where there are samples enough, else lanes would hardly mix
_ROTATE, _BLOCKS, _WINDOWS = 1, 2, 3  # what a hash is for


@dataclass(frozen=True, kw_only=True)
class Order:
    """The law for one data set, global batch and seed. Raises UsageError where N < L."""

    num_samples: int  # N
    global_batch_size: int  # L, which is also the number of lanes
    block_samples: int  # K
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UsageError(f"the global batch is {self.global_batch_size} samples, expected at least 1")
        if self.num_samples < self.global_batch_size:
            raise UsageError(
                f"the data set has {self.num_samples:,} samples, but one batch for every rank takes "
                f"{self.global_batch_size:,}; lower batch_size, use fewer ranks, or add data"
            )

    @property
    def steps_per_epoch(self) -> int:
        """R: global batches an epoch, and samples a lane delivers in it."""
        return self.num_samples // self.global_batch_size

    @property
    def num_left_out(self) -> int:
        """Samples an epoch leaves out; fewer than a global batch."""
        return self.num_samples % self.global_batch_size

    @property
    def window_steps(self) -> int:
        """M K: steps after which every lane goes on to its next window."""
        blocks = min(max(1024 // self.global_batch_size, 4), 16)
        return blocks * self.block_samples

    def windows(self, first_step: int) -> Iterator[tuple[int, int]]:
        """The windows of an epoch from the one that holds ``first_step``: (first step, end)."""
        size = self.window_steps
        for start in range(first_step // size * size, self.steps_per_epoch, size):
            yield start, min(start + size, self.steps_per_epoch)

    def window_samples(self, epoch: int, lanes: range, start: int, end: int) -> npt.NDArray[np.int64]:
        """The samples that lanes deliver in one window, as ``windows`` cuts them.

        int64[len(lanes), end - start]: row = lane, column = step.
        """
        lane = np.arange(lanes.start, lanes.stop, dtype=np.int64)[:, None]
        if not self.shuffle:
            return np.arange(start, end, dtype=np.int64) * self.global_batch_size + lane
        step = np.arange(end - start, dtype=np.int64)
        keys = [[hash_ints(self.seed, epoch, _WINDOWS, number, start)] for number in lanes]
        shuffled = np.argsort(hash_array(np.array(keys, np.uint64), step), axis=1, kind="stable")
        return self._samples_at(epoch, lane * self.steps_per_epoch + start + shuffled)

    def step_samples(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Global batch ``step`` of an epoch, every rank's part of it: int64[global_batch_size]."""
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step {step} is outside the epoch's {self.steps_per_epoch} steps")
        start, end = next(self.windows(step))
        window = self.window_samples(epoch, range(self.global_batch_size), start, end)
        return window[:, step - start]

    def _samples_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples that stand at positions of an epoch's shuffled sequence of blocks."""
        block_samples = self.block_samples
        num_blocks = self.num_samples // block_samples  # without the short last one
        slot = positions // block_samples
        first, inverse = np.unique(slot, return_inverse=True)
        whole = first < num_blocks
        block = first.copy()
        block[whole] = permute(first[whole], num_blocks, hash_ints(self.seed, epoch, _BLOCKS))
        start = (block * block_samples)[inverse.reshape(slot.shape)]
        rotation = hash_ints(self.seed, epoch, _ROTATE) % self.num_samples
        return (start + positions % block_samples + rotation) % self.num_samples


def choose_block_samples(*, num_samples: int, num_bytes: int, global_batch_size: int) -> int:
    """K: samples that fill BLOCK_BYTES of a shard, and few enough for BLOCKS_A_LANE blocks a lane."""
    filling = BLOCK_BYTES * num_samples // max(num_bytes, 1)
    return max(1, min(filling, num_samples // (BLOCKS_A_LANE * global_batch_size)))


def share(lanes: range, part: int, num_parts: int) -> range:
    """One of ``num_parts`` consecutive parts of some lanes; their sizes differ by one at most."""
    first = lanes.start + len(lanes) * part // num_parts
    return range(first, lanes.start + len(lanes) * (part + 1) // num_parts)
