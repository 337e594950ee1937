"""How much of each shard the ranks of a node read, by the sampling order alone: no sample is read.

Nothing of the size of the data set is held. Windows are read whole, so the first and the last window count
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt

from loader.find_shards import ShardSet
from loader.order import Order
from loader.samples import JoinedRows, SampleRules, WholeSamples, make_samples
from loader.staging import NodeRanks, find_data_sets
from loader.workers import Samples, check_batch, group_size, make_order, rank_slots
from shardprep.errors import UsageError

NUM_AT_ONCE = 1 << 18  # intervals at a time: some 30 MB

Intervals = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # firsts, ends


def parts_of_ranks(
    input_shards: tuple[str, ...], exclude_shards: tuple[int | str, ...], node: NodeRanks
) -> tuple[ShardSet, npt.NDArray[np.float64]]:
    """The shards, and how much of each the ranks read: what their loaders' own Order says."""
    global_batch_size = check_batch(node.batch_size, node.global_batch_size, node.world_size)
    group = group_size(node.group_by_length, node.batch_size)
    rules = SampleRules(
        seq_len=node.seq_len,
        max_length=node.max_length,
        long_documents=node.long_documents,  # type: ignore[arg-type]  # checked there
        group=group,
    )
    if rules.long_documents != "truncate" and rules.max_length is None:
        raise UsageError(f"long_documents={rules.long_documents!r} needs max_length")
    shards = find_data_sets(input_shards, exclude_shards, count_tokens=rules.needs_lengths)
    samples = make_samples(shards, rules, eos_token_id=shards.datasets[0].spec.tokenizer.eos_token_id)
    order = make_order(samples, shards, global_batch_size, group, seed=node.seed, shuffle=node.shuffle)
    steps = order.steps_per_epoch
    end_step = (node.first_step // steps + node.num_epochs) * steps
    if node.num_steps is not None:
        end_step = node.first_step + node.num_steps
    parts = np.zeros(shards.num_shards)
    ranks = sorted(set(node.ranks))
    for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0]):  # consecutive ones at once
        of_run = [rank for _, rank in run]
        first, last = (rank_slots(order, rank, node.world_size) for rank in (of_run[0], of_run[-1]))
        parts += parts_read(order, samples, range(first.start, last.stop), node.first_step, end_step)
    return shards, parts


def parts_read(
    order: Order, samples: Samples, slots: range, first_step: int, end_step: int
) -> npt.NDArray[np.float64]:
    """How much of each shard slots read in steps ``first_step`` up to ``end_step``: float64[num_shards].

    Steps are counted through all epochs. 0: the shard is not opened; 1: as much as all of it, once.
    ``slots`` are consecutive, of one rank or of several. 10^6 blocks take 0.3 s, one core.
    """
    edges, unit = _shard_edges(samples)
    num_units = int(edges[-1])
    read = np.zeros(len(edges) - 1, np.int64)
    steps = order.steps_per_epoch
    for epoch in range(first_step // steps, -(-end_step // steps)):
        offset = order.offset(epoch, samples.offsets)
        begin, end = max(first_step - epoch * steps, 0), min(end_step - epoch * steps, steps)
        for firsts, ends in _joined(_epoch_samples(order, epoch, slots, begin, end)):
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


def _epoch_samples(order: Order, epoch: int, slots: range, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of the samples that slots read in steps of one epoch; they may go beyond N, and wrap."""
    size = order.window_steps
    start, end = begin // size * size, min(-(-end // size) * size, order.steps_per_epoch)
    if not order.shuffle:
        for first in range(start, end, NUM_AT_ONCE):
            steps = np.arange(first, min(first + NUM_AT_ONCE, end), dtype=np.int64) * order.global_batch_size
            yield steps + slots.start, steps + slots.stop
        return
    per_slot = order.steps_per_epoch * order.group
    if start == 0 and end == order.steps_per_epoch:
        yield from _blocks(order, epoch, slots.start * per_slot, slots.stop * per_slot)
        return
    for slot in slots:
        yield from _blocks(
            order, epoch, slot * per_slot + start * order.group, slot * per_slot + end * order.group
        )


def _blocks(order: Order, epoch: int, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of samples at consecutive positions, one per block; the outer blocks may be cut."""
    size = order.block_samples
    for first in range(begin // size, -(-end // size), NUM_AT_ONCE):
        positions = np.arange(first, min(first + NUM_AT_ONCE, -(-end // size)), dtype=np.int64) * size
        starts = order.samples_at(epoch, positions)
        yield (
            starts + np.maximum(begin - positions, 0),
            starts + np.minimum(end - positions, size),
        )


def _joined(parts: Iterator[Intervals]) -> Iterator[Intervals]:
    """The same intervals, at least NUM_AT_ONCE at a time but the last: thousands of slots give few each."""
    held: list[Intervals] = []
    for part in parts:
        held.append(part)
        if sum(len(firsts) for firsts, _ in held) >= NUM_AT_ONCE:
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
