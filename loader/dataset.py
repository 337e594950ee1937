"""What a worker does: it reads its lanes window by window and sends chunks of steps.

A chunk is a few steps of a worker's lanes as one compact tensor. So a worker sends 1 MiB at a time, not a
batch. Workers share the lanes of the rank; if every worker took each n-th step instead, all of them together
would read everything n times. The memory of a rank is the windows of its lanes, see order.py.

``make_order``, ``rank_lanes`` and ``check_batch`` turn samples and batch sizes into the sampling order and
the lanes that a rank has in it. ``Samples``, ``WindowReader`` and ``Window`` are what samples/ offers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import IterableDataset, get_worker_info

from loader.mixture import Mixture
from loader.order import Order, choose_windows, share
from loader.shards.shard_set import ShardSet
from shardprep.errors import UsageError

NO_LABEL = np.int32(-(2**31))  # set in an id that is seen and not learnt: no id is below 0 else
ID_BITS = 2**31 - 1  # the id without it

_HEAD = 4  # samples a step, steps, tokens cut, document starts (-1: none were asked for)


@dataclass(frozen=True, kw_only=True)
class ScatteredRows:
    """Rows of one length anywhere in a flat array, gathered when their step is asked for.

    A process that reads for itself never lays a whole chunk out: the 64 KiB of a step stay in its cache,
    the 1 MiB of a chunk would not.
    """

    flat: npt.NDArray[np.integer[Any]]
    at: npt.NDArray[np.int64]  # int64[samples a step, steps]: where in flat each row begins
    row_tokens: int
    mask: npt.NDArray[np.uint8] | None = None  # 1 where a token has a label; None: all have
    mask_at: npt.NDArray[np.int64] | None = None  # likewise: where in mask each row begins; -1: all have

    @cached_property
    def _view(self) -> npt.NDArray[np.integer[Any]]:
        return sliding_window_view(self.flat, self.row_tokens)

    def __getitem__(self, places: Any) -> npt.NDArray[np.integer[Any]]:
        """As of an array ``[samples a step, steps, row_tokens]``; always a copy.

        With a mask int32, NO_LABEL in the tokens that have none.
        """
        rows: npt.NDArray[np.integer[Any]] = self._view[self.at[places]]
        if self.mask is None or self.mask_at is None:
            return rows
        at = self.mask_at[places]
        without = sliding_window_view(self.mask, self.row_tokens)[at] == 0
        without[at < 0] = False
        return np.where(without, rows.astype(np.int32) | NO_LABEL, rows.astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Where documents, and the padding of rows, begin in the flattened batch; each row begins one."""

    begins: npt.NDArray[np.int64]  # int64[edges], ascending
    sizes: npt.NDArray[np.int64]  # int64[edges]: places up to the next one
    longest: int  # of the sizes
    shape: tuple[int, int]  # rows and width of the batch


@dataclass(frozen=True, kw_only=True)
class RowEdges:
    """The edges of many rows of one width, found at once: 15 ns each, where a batch alone costs 30 us."""

    width: int
    _begins: npt.NDArray[np.int64]
    _sizes: npt.NDArray[np.int64]
    _bounds: list[int]  # of each row's edges, and the end
    _longest: list[int]  # size in each row

    @staticmethod
    def of_rows(
        starts: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[Any],
        width: int,
    ) -> RowEdges:
        """Documents begin at the places ``starts[i]`` of ``rows[i]``; ``lengths``: tokens of each row."""
        row_begins = np.arange(len(lengths), dtype=np.int64) * width
        short = np.flatnonzero(lengths < width)
        begins = np.concatenate([row_begins, rows * width + starts, row_begins[short] + lengths[short]])
        begins.sort()
        begins = begins[np.diff(begins, prepend=-1) > 0]
        sizes = np.diff(begins, append=len(lengths) * width)
        first = np.searchsorted(begins, row_begins)
        return RowEdges(
            width=width,
            _begins=begins,
            _sizes=sizes,
            _bounds=[*first.tolist(), len(begins)],
            _longest=np.maximum.reduceat(sizes, first).tolist(),
        )

    def part(self, first: int, end: int) -> Edges:
        """Those of some consecutive rows, as a batch of their own."""
        edges = slice(self._bounds[first], self._bounds[end])
        return Edges(
            begins=self._begins[edges] - first * self.width,
            sizes=self._sizes[edges],
            longest=max(self._longest[first:end]),
            shape=(end - first, self.width),
        )


def joined_edges(parts: Sequence[Edges]) -> Edges:
    """Those of the batch that has the parts' rows one under another; all have one width."""
    if len(parts) == 1:
        return parts[0]
    width = parts[0].shape[1]
    num_rows = np.cumsum([0, *(part.shape[0] for part in parts)]).tolist()
    begins = [part.begins + row * width for part, row in zip(parts, num_rows, strict=False)]
    return Edges(
        begins=np.concatenate(begins),
        sizes=np.concatenate([part.sizes for part in parts]),
        longest=max(part.longest for part in parts),
        shape=(num_rows[-1], width),
    )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive steps of some lanes."""

    lengths: npt.NDArray[np.int32]  # int32[samples a step, steps], tokens of each sample
    # int32[samples a step, steps, row_tokens]; or of samples of any length flat, one step after another
    ids: npt.NDArray[np.int32] | ScatteredRows
    row_tokens: int = 0  # of every sample where all are rows
    num_cut: int = 0  # tokens left out behind max_length
    num_starts: npt.NDArray[np.int32] | None = None  # int32[samples a step, steps]
    starts: npt.NDArray[np.int32] | None = None  # flat: places in each row where a document begins

    @property
    def num_steps(self) -> int:
        return int(self.lengths.shape[1])

    def is_full(self, step: int) -> bool:
        """Whether no row of a step holds padding."""
        return self._shortest[step] == self.row_tokens

    @cached_property
    def _shortest(self) -> list[int]:
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def ids_of(self, step: int) -> npt.NDArray[np.int32]:
        """The ids of one step's samples, one after another, where ``ids`` is flat."""
        assert isinstance(self.ids, np.ndarray)
        first, end = self._step_bounds[step : step + 2]
        return self.ids[first:end]

    @cached_property
    def _step_bounds(self) -> list[int]:
        bounds: list[int] = np.cumsum([0, *self.lengths.sum(axis=0, dtype=np.int64).tolist()]).tolist()
        return bounds

    def starts_of(self, step: int) -> list[npt.NDArray[np.int32]]:
        """Where documents begin in each row of one step, of a chunk that says it."""
        assert self.starts is not None
        first, end = self._start_bounds[0][step], self._start_bounds[1][step]
        return [self.starts[start:stop] for start, stop in zip(first, end, strict=True)]

    @cached_property
    def _start_bounds(self) -> tuple[list[list[int]], list[list[int]]]:
        """Where each row's part of ``starts`` begins, and where it ends: of each step a list.

        Two lists a step, not one a row: thousands would bring on full garbage collections, of 0.1 s each.
        """
        assert self.num_starts is not None
        ends = np.cumsum(self.num_starts.reshape(-1), dtype=np.int64).reshape(self.num_starts.shape)
        first, end = np.stack([ends - self.num_starts, ends]).swapaxes(1, 2).tolist()
        return first, end

    def edges(self, step: int, first: int, end: int) -> Edges:
        """Where documents begin in some rows of one step, of a chunk of rows."""
        begin = step * len(self.lengths)
        return self._row_edges.part(begin + first, begin + end)

    @cached_property
    def _row_edges(self) -> RowEdges:
        """Of all rows, step after step."""
        assert self.starts is not None
        assert self.num_starts is not None
        row_of = np.arange(self.lengths.size).reshape(self.lengths.shape[::-1]).T
        rows = np.repeat(row_of.reshape(-1), self.num_starts.reshape(-1))
        return RowEdges.of_rows(self.starts, rows, self.lengths.T.reshape(-1), self.row_tokens)

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        num_starts = -1 if self.starts is None else len(self.starts)
        head = np.array([*self.lengths.shape, self.num_cut, num_starts], np.int32)
        parts = [head, self.lengths.reshape(-1)]
        if self.starts is not None and self.num_starts is not None:
            parts += [self.num_starts.reshape(-1), self.starts]
        ids = self.ids[:].reshape(-1).astype(np.int32, copy=False)
        return torch.from_numpy(np.concatenate([*parts, ids]))

    @staticmethod
    def unpack(packed: torch.Tensor, row_tokens: int) -> Chunk:
        """What ``pack`` packed; ``row_tokens`` is 0 where samples have lengths of their own."""
        flat = packed.numpy()
        lanes, steps, num_cut, num_starts = flat[:_HEAD].tolist()
        size = lanes * steps
        lengths, rest = flat[_HEAD : _HEAD + size].reshape(lanes, steps), flat[_HEAD + size :]
        counts = starts = None
        if num_starts >= 0:
            counts, starts = rest[:size].reshape(lanes, steps), rest[size : size + num_starts]
            rest = rest[size + num_starts :]
        return Chunk(
            lengths=lengths,
            ids=rest.reshape(lanes, steps, row_tokens) if row_tokens else rest,
            row_tokens=row_tokens,
            num_cut=num_cut,
            num_starts=counts,
            starts=starts,
        )


def split_ids(joined: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """The ids of each sample, where they stand one after another."""
    bounds = [0, *np.cumsum(lengths).tolist()]
    return [joined[first:end] for first, end in pairwise(bounds)]


CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us whatever its size
MAX_CHUNK_STEPS = 256


class Window(Protocol):
    """The samples of one window, read: int64[samples a step, steps] of them were asked for."""

    def chunk(self, first: int, end: int) -> Chunk:
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


class ChunkDataset(IterableDataset[Any]):
    """Runs of this rank's lanes from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and step; shared with the workers, so that the parent can send
    persistent ones elsewhere. Items are a chunk of each worker in turn, packed; unpacked without workers.

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
        for start, end in self.order.windows(step):
            samples = self.order.samples_of(epoch, lanes, start, end, reader.num_tokens)
            window = reader.read(samples, offset)  # whole: what is left of it would be many small reads
            for first in range(max(step - start, 0), end - start, chunk_steps):
                yield window.chunk(first, min(first + chunk_steps, end - start))
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
    return batch_size if group_by_length is True else int(group_by_length) or 1


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


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int. Raises UsageError for what is none, or less than ``least``."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least {least}") from None
    if number < least:
        raise UsageError(f"{name} is {number}, expected at least {least}")
    return number
