"""Which shards some lanes read in a range of steps, and how much of each: pure, by the law of the order.

Nothing of the size of the data set is held. Windows are read whole, so the first and the last count whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from loader.dataset import Samples
from loader.order import Order
from loader.samples.joined_rows import JoinedRows
from loader.samples.whole_samples import WholeSamples
from preprocess.shard_format import UsageError

CHUNK = 1 << 18  # intervals at a time: some 30 MB

Intervals = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # firsts, ends


def parts_read(
    order: Order, samples: Samples, lanes: range, first_step: int, end_step: int
) -> npt.NDArray[np.float64]:
    """How much of each shard lanes read in steps ``first_step`` up to ``end_step``: float64[num_shards].

    Steps are counted through all epochs. 0: the shard is not opened; 1: as much as all of it, once.
    ``lanes`` are consecutive, of one rank or of several. 10^6 blocks take 0.3 s, one core.
    """
    edges, unit = _shard_edges(samples)
    num_units = int(edges[-1])
    read = np.zeros(len(edges) - 1, np.int64)
    steps = order.steps_per_epoch
    for epoch in range(first_step // steps, -(-end_step // steps)):
        offset = order.offset(epoch, samples.offsets)
        begin, end = max(first_step - epoch * steps, 0), min(end_step - epoch * steps, steps)
        for firsts, ends in _in_chunks(_epoch_samples(order, epoch, lanes, begin, end)):
            firsts, ends = _unwrapped(firsts, ends, order.num_samples)
            begins = (offset + firsts * unit) % num_units
            read += _overlaps(edges, *_unwrapped(begins, begins + (ends - firsts) * unit, num_units))
    return read / np.maximum(np.diff(edges), 1)


def _shard_edges(samples: Samples) -> tuple[npt.NDArray[np.int64], int]:
    """Where each shard begins, int64[num_shards + 1], in samples or tokens; how many of these a sample is."""
    if isinstance(samples, JoinedRows):
        return samples.first_token, samples.seq_len
    if isinstance(samples, WholeSamples):
        return (samples.shards.first_sample if samples.pieces is None else samples.pieces.first_piece), 1
    raise UsageError(f"{type(samples).__name__} is not known to lie in shards")


def _epoch_samples(order: Order, epoch: int, lanes: range, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of the samples that lanes read in steps of one epoch; they may go beyond N, and wrap."""
    size = order.window_steps
    start, end = begin // size * size, min(-(-end // size) * size, order.steps_per_epoch)
    if not order.shuffle:
        for first in range(start, end, CHUNK):
            steps = np.arange(first, min(first + CHUNK, end), dtype=np.int64) * order.global_batch_size
            yield steps + lanes.start, steps + lanes.stop
        return
    per_lane = order.steps_per_epoch * order.group
    if start == 0 and end == order.steps_per_epoch:
        yield from _blocks(order, epoch, lanes.start * per_lane, lanes.stop * per_lane)
        return
    for lane in lanes:
        yield from _blocks(
            order, epoch, lane * per_lane + start * order.group, lane * per_lane + end * order.group
        )


def _blocks(order: Order, epoch: int, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of samples at consecutive positions, one a block; the outer blocks may be cut."""
    size = order.block_samples
    for first in range(begin // size, -(-end // size), CHUNK):
        positions = np.arange(first, min(first + CHUNK, -(-end // size)), dtype=np.int64) * size
        starts = order.samples_at(epoch, positions)
        yield (
            starts + np.maximum(begin - positions, 0),
            starts + np.minimum(end - positions, size),
        )


def _in_chunks(parts: Iterator[Intervals]) -> Iterator[Intervals]:
    """The same intervals, at least CHUNK at a time but the last: thousands of lanes give few each."""
    held: list[Intervals] = []
    for part in parts:
        held.append(part)
        if sum(len(firsts) for firsts, _ in held) >= CHUNK:
            yield np.concatenate([part[0] for part in held]), np.concatenate([part[1] for part in held])
            held = []
    if held:
        yield np.concatenate([part[0] for part in held]), np.concatenate([part[1] for part in held])


def _unwrapped(firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], total: int) -> Intervals:
    """Intervals modulo ``total``, none longer than it, as intervals below it."""
    firsts, ends = np.where(firsts >= total, [firsts - total, ends - total], [firsts, ends])
    beyond = ends[ends > total] - total
    return np.concatenate([firsts, np.zeros_like(beyond)]), np.concatenate([np.minimum(ends, total), beyond])


def _overlaps(
    edges: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How much of each stretch between edges the intervals cover, counted as often as they do."""
    return np.diff(_covered_below(edges, firsts) - _covered_below(edges, ends))


def _covered_below(edges: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """At each edge the sum of ``edge - begin`` over the begins below it."""
    begins = np.sort(begins)
    sums = np.concatenate([[0], np.cumsum(begins)])
    below = np.searchsorted(begins, edges)
    return np.asarray(edges * below - sums[below], np.int64)
