"""Which shards to stage on a node: all of a data set, those its ranks read, or as many of them as fit.

What ranks read follows from the sampling order alone (``parts_read``), without reading a sample. Nothing of
the size of the data set is held. Windows are read whole, so the first and the last window count whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from loader.dataset import Samples, check_batch, group_size, make_order, rank_lanes
from loader.order import Order
from loader.reading.open_shard import Turn, opening_order
from loader.samples.joined_rows import JoinedRows
from loader.samples.make_samples import SampleRules, make_samples
from loader.samples.whole_samples import WholeSamples
from loader.shards.find_shards import find_shards
from loader.shards.shard_set import DatasetShards, ShardSet
from loader.staging.stage_shards import ShardToStage
from loader.staging.staged_copies import staged_folder
from shardprep.errors import UsageError

NUM_AT_ONCE = 1 << 18  # intervals at a time: some 30 MB

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
        for firsts, ends in _joined(_epoch_samples(order, epoch, lanes, begin, end)):
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
        for first in range(start, end, NUM_AT_ONCE):
            steps = np.arange(first, min(first + NUM_AT_ONCE, end), dtype=np.int64) * order.global_batch_size
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
    """The same intervals, at least NUM_AT_ONCE at a time but the last: thousands of lanes give few each."""
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


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a node and what fixes their order; names as in ``get_llama3_dataloader``."""

    world_size: int
    ranks: tuple[int, ...]
    batch_size: int
    global_batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    seq_len: int | None = None
    max_length: int | None = None
    long_documents: str = "truncate"
    group_by_length: bool | int = False
    first_step: int = 0  # global batch, counted through all epochs
    num_steps: int | None = None  # to the end of the epoch, if not given
    num_epochs: int = 1  # with the one of first_step

    def __post_init__(self) -> None:
        beyond = [rank for rank in self.ranks if not 0 <= rank < self.world_size]
        if beyond or not self.ranks:
            raise UsageError(f"the ranks are {self.ranks}, expected some of 0 to {self.world_size - 1}")
        if self.first_step < 0 or self.num_epochs < 1 or (self.num_steps is not None and self.num_steps < 1):
            raise UsageError(
                f"first_step={self.first_step}, num_steps={self.num_steps}, num_epochs={self.num_epochs}; "
                "expected 0 or more of the first, 1 or more of the others"
            )


@dataclass(frozen=True, kw_only=True)
class ShardsToStage:
    """The choice, in the order to copy it in, and what it was chosen from."""

    chosen: list[ShardToStage]
    num_shards: int
    num_bytes: int  # of all shards, tar and idx
    num_read: int  # shards that the ranks read; all where none were named
    read_bytes: int


def choose_shards(
    input_shards: tuple[str, ...],
    staged_dir: str | os.PathLike[str],
    *,
    exclude_shards: tuple[int | str, ...] = (),
    node_ranks: NodeRanks | None = None,
    limit_bytes: int | None = None,
    turn: Turn,
) -> ShardsToStage:
    """Of the shards named those that the ranks read, and of these what ``limit_bytes`` hold.

    Those of which the ranks read the largest part are taken then. ``turn``: of this process among all that
    stage, so that each begins with another shard. Raises what ``find_shards`` does, and UsageError for
    tars without a manifest: nothing could vouch for their copies.
    """
    if node_ranks is None:
        shards, parts = find_shards(input_shards, exclude_shards=exclude_shards), None
    else:
        shards, parts = _parts_of_ranks(input_shards, exclude_shards, node_ranks)
    _refuse_external(shards)
    every = [_to_stage(shards, number, staged_dir) for number in range(shards.num_shards)]
    read = np.arange(len(every)) if parts is None else np.flatnonzero(parts)
    kept = read
    if limit_bytes is not None:
        by_part = read if parts is None else read[np.argsort(-parts[read], kind="stable")]
        sums = np.cumsum([every[number].num_bytes for number in by_part.tolist()])
        kept = np.sort(by_part[: np.searchsorted(sums, limit_bytes, side="right")])
    kept = opening_order(kept, turn, None if shards.osts is None else shards.osts[kept])
    return ShardsToStage(
        chosen=[every[number] for number in kept.tolist()],
        num_shards=len(every),
        num_bytes=sum(shard.num_bytes for shard in every),
        num_read=len(read),
        read_bytes=sum(every[number].num_bytes for number in read.tolist()),
    )


def _parts_of_ranks(
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
    shards = find_shards(input_shards, exclude_shards=exclude_shards, count_tokens=rules.needs_lengths)
    _refuse_external(shards)
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
        first, last = (rank_lanes(order, rank, node.world_size) for rank in (of_run[0], of_run[-1]))
        parts += parts_read(order, samples, range(first.start, last.stop), node.first_step, end_step)
    return shards, parts


def _refuse_external(shards: ShardSet) -> None:
    external = [source.path_of(0) for source in shards.sources if not isinstance(source, DatasetShards)]
    if external:
        raise UsageError(
            f"{external[0]} is a tar that shardprep did not write: no manifest says what its copy must be; "
            "copy such tars yourself and give the loader the copies"
        )


def _to_stage(shards: ShardSet, number: int, staged_dir: str | os.PathLike[str]) -> ShardToStage:
    source, row = shards.locate(number)
    assert isinstance(source, DatasetShards)
    return ShardToStage(
        source=source.folder,
        folder=staged_folder(staged_dir, source.spec),
        plan_id=source.spec.plan_id,
        shard_id=int(source.shard_ids[row]),
        tar_bytes=int(source.tar_bytes[row]),
        idx_bytes=int(source.idx_bytes[row]),
    )
