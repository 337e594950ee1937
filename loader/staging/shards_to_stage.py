"""Which shards to stage on a node: all of a data set, those its ranks read, or as many of them as fit."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from loader.reading.open_shard import Turn, opening_order
from loader.shards.find_shards import find_shards
from loader.shards.shard_set import DatasetShards, ShardSet
from loader.staging.stage_shards import ShardToStage
from loader.staging.staged_copies import staged_folder
from shardprep.errors import UsageError


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
        shards, parts = find_data_sets(input_shards, exclude_shards), None
    else:
        from loader.staging.parts_read import parts_of_ranks  # its imports have torch: seconds

        shards, parts = parts_of_ranks(input_shards, exclude_shards, node_ranks)
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


def find_data_sets(
    input_shards: tuple[str, ...], exclude_shards: tuple[int | str, ...], *, count_tokens: bool = False
) -> ShardSet:
    """The shards named, as ``find_shards`` finds them. Raises UsageError for a tar without a manifest."""
    shards = find_shards(input_shards, exclude_shards=exclude_shards, count_tokens=count_tokens)
    external = [source.path_of(0) for source in shards.sources if not isinstance(source, DatasetShards)]
    if external:
        raise UsageError(
            f"{external[0]} is a tar that shardprep did not write: no manifest says what its copy must be; "
            "copy such tars yourself and give the loader the copies"
        )
    return shards


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
