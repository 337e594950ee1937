"""What a worker does: reads its lanes window by window and sends runs of steps.

A run is a few steps of a worker's lanes as one compact tensor, so that a worker sends 1 MiB at a
time, not a batch. Workers share the rank's lanes out; every worker taking each n-th step instead
would read everything n times. The memory of a rank is the windows of its lanes, see order.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.order import Order, share
from loader.run import Run

RUN_BYTES = 1 << 20  # of a run; a worker's message costs about 150 us whatever its size
MAX_RUN_STEPS = 256


class Window(Protocol):
    """The samples of one window, read: int64[samples a step, steps] of them were asked for."""

    def run(self, first: int, end: int) -> Run:
        """Its steps from ``first`` up to ``end``, decoded."""


class WindowReader(Protocol):
    """Reads samples. One a process; a window ends with the next ``read``."""

    def num_tokens(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Lengths without reading the ids: int64[n] -> int64[n]."""

    def read(self, samples: npt.NDArray[np.int64], offset: int) -> Window:
        """int64[samples a step, steps]; ``offset`` is the epoch's, below ``Samples.offsets``."""

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


class RunDataset(IterableDataset[Any]):
    """Runs of this rank's lanes from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and step; shared with the workers, so that the parent can send
    persistent ones elsewhere. Items are a run of each worker in turn, packed; unpacked without workers.

    Each process keeps its reader from one ``iter`` to the next, until ``close``: another one would open
    the shards anew, and a window's memory, touched for the first time, costs more than reading it.
    """

    def __init__(self, *, samples: Samples, order: Order, lanes: range, endless: bool) -> None:
        self.samples = samples
        self.order = order
        self.lanes = lanes
        self.endless = endless
        self.position = torch.zeros(2, dtype=torch.int64)
        self._reader: WindowReader | None = None
        self._close_reader: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[torch.Tensor | Run]:
        worker = get_worker_info()
        lanes = self.lanes if worker is None else share(self.lanes, worker.id, worker.num_workers)
        if self._reader is None:
            self._reader = self.samples.open()
            self._close_reader = weakref.finalize(self, self._reader.close)
        epoch, step = self.position.tolist()
        for number in count(epoch) if self.endless else (epoch,):
            runs = self._epoch_runs(self._reader, number, step if number == epoch else 0, lanes)
            yield from runs if worker is None else map(Run.pack, runs)

    def close(self) -> None:
        """Close the files that this process has open; the next ``iter`` opens them again."""
        if self._close_reader is not None:
            self._close_reader()
        self._reader = self._close_reader = None

    def _epoch_runs(self, reader: WindowReader, epoch: int, step: int, lanes: range) -> Iterator[Run]:
        run_steps = self._run_steps()
        offset = self.order.offset(epoch, self.samples.offsets)
        for start, end in self.order.windows(step):
            samples = self.order.samples_of(epoch, lanes, start, end, reader.num_tokens)
            window = reader.read(samples, offset)  # whole: what is left of it would be many small reads
            for first in range(max(step - start, 0), end - start, run_steps):
                yield window.run(first, min(first + run_steps, end - start))
            del window  # before the next one is read: half the memory

    def _run_steps(self) -> int:
        """Steps a run, from what all workers know alike: their runs must agree.

        Rows that are not sent take no memory until their step, see ScatteredRows.
        """
        worker = get_worker_info()
        if worker is None and self.samples.row_tokens:
            return MAX_RUN_STEPS
        lanes = -(-len(self.lanes) // (worker.num_workers if worker else 1))
        step_bytes = 4 * lanes * self.order.group * (self.samples.row_tokens or self.samples.mean_tokens)
        return max(1, min(MAX_RUN_STEPS, int(RUN_BYTES // step_bytes)))
