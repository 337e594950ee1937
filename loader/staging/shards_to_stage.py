"""Which shards to stage on a node: all of a data set, those its ranks read, or as many of them as fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from loader.reading.opening_order import Turn, opening_order
from loader.shards.find_shards import find_shards
from loader.shards.shard_set import DatasetShards, ShardSet
from loader.shards.staged_folder import staged_folder
from loader.staging.staged_copy import ShardToStage
from preprocess.shard_format import UsageError


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
    _refuse_foreign(shards)
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
    from loader.run_order import check_batch, group_size, make_order, rank_lanes
    from loader.sample_options import SampleOptions, make_samples
    from loader.staging.parts_read import parts_read  # torch, which takes seconds

    global_batch_size = check_batch(node.batch_size, node.global_batch_size, node.world_size)
    group = group_size(node.group_by_length, node.batch_size)
    options = SampleOptions(
        input_shards=input_shards,
        exclude_shards=exclude_shards,
        seq_len=node.seq_len,
        max_length=node.max_length,
        long_documents=node.long_documents,  # type: ignore[arg-type]  # checked there
        group=group,
    )
    shards = options.find_shards()
    _refuse_foreign(shards)
    samples = make_samples(options, shards, shards.datasets[0].spec.tokenizer)  # its EOS is all that counts
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


def _refuse_foreign(shards: ShardSet) -> None:
    foreign = [source.path_of(0) for source in shards.sources if not isinstance(source, DatasetShards)]
    if foreign:
        raise UsageError(
            f"{foreign[0]} is a tar that shardprep did not write: no manifest says what its copy must be; "
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
