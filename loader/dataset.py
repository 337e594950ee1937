"""What a worker does: it reads its lanes window by window and sends chunks of steps.

A chunk is a few steps of a worker's lanes as one compact tensor. So a worker sends 1 MiB at a time, not a
batch. Workers share the lanes of the rank; if every worker took each n-th step instead, all of them together
would read everything n times. The memory of a rank is the windows of its lanes, see order.py.

``make_order``, ``rank_lanes`` and ``check_batch`` turn samples and batch sizes into the sampling order and
the lanes that a rank has in it. ``Samples``, ``WindowReader`` and ``Window`` are what samples/ offers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.chunks import Chunk
from loader.mixture import Mixture
from loader.order import Order, choose_windows, share
from loader.run_steps import RunSteps
from loader.shards.shard_set import ShardSet
from shardprep.errors import UsageError

CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us whatever its size
MAX_CHUNK_STEPS = 256


class Window(Protocol):
    """The samples of one window, read: int64[samples per step, steps] of them were asked for."""

    def chunk(self, first: int, end: int) -> Chunk:
        """Its steps from ``first`` up to ``end``, decoded."""


class WindowReader(Protocol):
    """Reads samples. One per process; a window ends with the next ``read``."""

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Lengths without reading the ids: int64[n] -> int64[n]."""

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> Window:
        """int64[samples per step, steps]; ``offset`` is the epoch's, below ``Samples.offsets``."""

    def close(self) -> None:
        """Close every file."""


class Samples(Protocol):
    """What a sample is: a document, a piece of one, or a row."""

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where all are rows, else 0."""

    @property
    def num_samples(self) -> int: ...

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample, roughly."""

    @property
    def offsets(self) -> int:
        """An epoch draws an offset below this; 1 where there is nothing to draw."""

    def open(self) -> WindowReader:
        """A reader for this process."""


class ChunkDataset(IterableDataset[Any]):
    """Runs of this rank's lanes from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and step; shared with the workers, so that the parent can send
    persistent ones elsewhere. Items are a chunk of each worker in turn, packed; unpacked without workers.

    Each process keeps its reader from one ``iter`` to the next, until ``close``: another one would open
    the shards anew, and a window's memory, touched for the first time, costs more than reading it.
    """

    def __init__(self, *, samples: Samples, order: Order, run: RunSteps, lanes: range, endless: bool) -> None:
        self.samples = samples
        self.order = order
        self.run = run
        self.lanes = lanes
        self.endless = endless
        self.position = torch.zeros(2, dtype=torch.int64)
        self._reader: WindowReader | None = None
        self._close_reader: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[torch.Tensor | Chunk]:
        worker = get_worker_info()
        lanes = self.lanes if worker is None else share(self.lanes, worker.id, worker.num_workers)
        if self._reader is None:
            self._reader = self.samples.open()
            self._close_reader = weakref.finalize(self, self._reader.close)
        epoch, step = self.position.tolist()
        for number in count(epoch) if self.endless else (epoch,):
            chunks = self._epoch_chunks(self._reader, number, step if number == epoch else 0, lanes)
            yield from chunks if worker is None else map(Chunk.pack, chunks)

    def close(self) -> None:
        """Close the files that this process has open; the next ``iter`` opens them again."""
        if self._close_reader is not None:
            self._close_reader()
        self._reader = self._close_reader = None

    def _epoch_chunks(self, reader: WindowReader, epoch: int, step: int, lanes: range) -> Iterator[Chunk]:
        chunk_steps = self._chunk_steps()
        offset = self.order.offset(epoch, self.samples.offsets)
        last = self.run.order_steps_of(epoch)
        for start, end in self.order.windows(step):
            if start >= last:
                return
            samples = self.order.samples_of(epoch, lanes, start, end, reader.num_tokens)
            window = reader.read(samples, offset)  # whole: what is left of it would be many small reads
            num_steps = min(end, last) - start
            for first in range(max(step - start, 0), num_steps, chunk_steps):
                yield window.chunk(first, min(first + chunk_steps, num_steps))
            del window  # before the next one is read: half the memory

    def _chunk_steps(self) -> int:
        """Steps per chunk, from what all workers know alike: their chunks must agree.

        Rows that are not sent take no memory until their step, see ScatteredRows.
        """
        worker = get_worker_info()
        if worker is None and self.samples.row_tokens:
            return MAX_CHUNK_STEPS
        lanes = -(-len(self.lanes) // (worker.num_workers if worker else 1))
        step_bytes = 4 * lanes * self.order.group * (self.samples.row_tokens or self.samples.mean_tokens)
        return max(1, min(MAX_CHUNK_STEPS, int(CHUNK_BYTES // step_bytes)))


def make_order(
    samples: Samples,
    shards: ShardSet,
    global_batch_size: int,
    group: int,
    *,
    seed: int,
    shuffle: bool,
    keeps_tail: bool = False,
) -> Order:
    """Their sampling order. Raises UsageError where there are too few, or a group does not fit."""
    block_samples, window_samples = choose_windows(
        num_samples=samples.num_samples,
        num_bytes=shards.tar_bytes,
        global_batch_size=global_batch_size,
        group=group,
    )
    return Order(
        num_samples=samples.num_samples,
        global_batch_size=global_batch_size,
        block_samples=block_samples,
        window_samples=window_samples,
        group=group,
        seed=seed,
        shuffle=shuffle,
        keeps_tail=keeps_tail,
    )


def rank_lanes(order: Order | Mixture, rank: int, world_size: int) -> range:
    """The lanes of one rank. Raises UsageError where the ranks cannot share them evenly."""
    if order.num_lanes % world_size:
        fitting = [n for n in range(1, order.num_lanes + 1) if order.num_lanes % n == 0]
        raise UsageError(
            f"a global batch of {order.global_batch_size} in groups of {order.group} makes {order.num_lanes} "
            f"lanes, which {world_size} ranks cannot share; the ranks can be {fitting}, "
            "or group_by_length less"
        )
    return share(range(order.num_lanes), rank, world_size)


def group_size(group_by_length: bool | int, batch_size: int) -> int:
    """Samples of a group: ``True`` stands for batch_size, ``False`` for groups of one."""
    if group_by_length is True:
        return batch_size
    return whole_number("group_by_length", group_by_length, least=0) or 1


def check_batch(batch_size: int, global_batch_size: int | None, world_size: int) -> int:
    """The global batch size, by default batch_size x world_size. Raises UsageError for no multiple of it."""
    batch_size = whole_number("batch_size", batch_size, least=1)
    step = batch_size * world_size
    if global_batch_size is None:
        return step
    global_batch_size = whole_number("global_batch_size", global_batch_size, least=1)
    if global_batch_size < step or global_batch_size % step:
        fitting = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * world_size) == 0]
        worlds = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * batch_size) == 0]
        raise UsageError(
            f"global_batch_size {global_batch_size} is no multiple of batch_size {batch_size} x "
            f"{world_size} ranks; with these ranks batch_size can be {fitting or 'nothing'}, with this "
            f"batch_size the ranks can be {worlds or 'nothing'}"
        )
    return global_batch_size


def check_batch_tokens(
    batch_tokens: int | None, batch_size: int | None, padding: str, max_batch_tokens: int | None
) -> int:
    """The samples of a batch, of which one is a batch with ``batch_tokens``. Raises UsageError."""
    if (batch_tokens is None) == (batch_size is None):
        raise UsageError(
            f"batch_size is {batch_size} and batch_tokens {batch_tokens}; pass one of them: samples of "
            "a batch, or its most tokens, padding included"
        )
    if batch_tokens is not None and (padding == "max_length" or max_batch_tokens is not None):
        raise UsageError(
            "batch_tokens says how large a padded batch is; leave out max_batch_tokens, and "
            "padding='max_length'"
        )
    return 1 if batch_size is None else batch_size


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int. Raises UsageError for what is none, or less than ``least``."""
    try:
        number = index(value)  # type: ignore[arg-type]  # what has no __index__ raises TypeError
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least {least}") from None
    if number < least:
        raise UsageError(f"{name} is {number}, expected at least {least}")
    return number
