"""``get_llama3_dataloader``: shards -> batches, as a torch DataLoader."""

from __future__ import annotations

import os
from typing import Any

import torch

from loader.collate import CausalLMCollator
from loader.dataset import RunDataset
from loader.input_paths import InputShards
from loader.order import Order, choose_block_samples, share
from loader.process_rank import ProcessRank, find_process_rank
from loader.shard_set import ShardSet, open_shards
from loader.token_loader import Collate, TokenLoader
from loader.tokenizer_choice import choose_tokenizer
from preprocess.shard_format import UsageError


def get_llama3_dataloader(
    input_shards: InputShards,
    batch_size: int,
    model_id: str | os.PathLike[str] | None = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 4,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    collate_fn: Collate | None = None,
    multiprocessing_context: Any = None,
) -> TokenLoader:
    """Batches of a data set's token ids for this rank, shuffled anew each epoch.

    Args:
        input_shards: a folder, an index.json, a tar, a pattern (``shard-{00000..00009}.tar``, ``*``), or a
            list of these. A folder is the whole data set; an incomplete one is refused.
        batch_size: samples a batch on each rank.
        model_id: for tars that shardprep did not write, the model whose tokenizer made them. Our data sets
            bring their own tokenizer; given for them, it must be the same.
        seed: of the shuffle. Equal seeds give equal global batches on any number of ranks and workers.
        shuffle: else global batch k is samples ``[k L, (k+1) L)``.
        num_workers: processes that read; at most the samples a rank takes in a step, more would idle.
        prefetch_factor: runs (up to 1 MiB of batches) that each worker reads ahead; 2 if there are workers.
        pin_memory: batches in pinned memory; where there is CUDA, if not given.
        persistent_workers: keep workers between epochs; they read on into the next one.
        rank, world_size: of data parallelism; found by ``find_process_rank`` if not given.
        global_batch_size: samples of an optimizer's step, all ranks and accumulation together. It alone
            fixes the order, so keep it when the number of ranks changes. Default: batch_size x world_size.
        max_length: documents are cut there, and the rest of them is left out. Not for packed rows.
        pad_to_multiple_of: widths of padded batches.
        collate_fn: instead of ``CausalLMCollator``; called in this process with a list of
            ``{"input_ids": list[int]}``.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``, as DataLoader takes it.

    Returns:
        A TokenLoader; see there for epochs. Batches hold int64[batch_size, seq] ``input_ids``,
        ``attention_mask`` and ``labels``, -100 where there is padding.

    Raises:
        NotFound, MissingShard, BrokenShard, UnknownVersion, OtherTokenizer, UsageError: all are
        ShardprepErrors that say what was found and what to do.
    """
    who = find_process_rank(rank, world_size)
    global_batch_size = _check_batch(batch_size, global_batch_size, who)
    shards = open_shards(input_shards)
    _check_max_length(max_length, shards)
    tokenizer = choose_tokenizer(shards, model_id)
    block_samples = choose_block_samples(
        num_samples=shards.num_samples, num_bytes=shards.tar_bytes, global_batch_size=global_batch_size
    )
    order = Order(
        num_samples=shards.num_samples,
        global_batch_size=global_batch_size,
        block_samples=block_samples,
        seed=seed,
        shuffle=shuffle,
    )
    lanes = share(range(global_batch_size), who.rank, who.world_size)
    num_workers = min(num_workers, len(lanes))
    runs = RunDataset(
        shards=shards,
        order=order,
        lanes=lanes,
        endless=persistent_workers and num_workers > 0,
        max_length=max_length,
        vocab_size=max(tokenizer.get_vocab().values()) + 1
        if len(shards.datasets) < len(shards.sources)
        else None,
    )
    return TokenLoader(
        runs,
        tokenizer=tokenizer,
        batch_size=batch_size,
        process_rank=who,
        collate_fn=collate_fn or CausalLMCollator(tokenizer, pad_to_multiple_of=pad_to_multiple_of),
        num_workers=num_workers,
        prefetch_factor=(prefetch_factor or 2) if num_workers else None,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        persistent_workers=persistent_workers and num_workers > 0,
        multiprocessing_context=multiprocessing_context if num_workers else None,
    )


def _check_batch(batch_size: int, global_batch_size: int | None, who: ProcessRank) -> int:
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, expected at least 1")
    step = batch_size * who.world_size
    if global_batch_size is None:
        return step
    if global_batch_size < step or global_batch_size % step:
        fitting = [n for n in range(1, batch_size + 1) if global_batch_size % (n * who.world_size) == 0]
        raise UsageError(
            f"global_batch_size {global_batch_size} is no multiple of batch_size {batch_size} x "
            f"{who.world_size} ranks; with it batch_size can be {fitting or 'nothing: change the ranks'}"
        )
    return global_batch_size


def _check_max_length(max_length: int | None, shards: ShardSet) -> None:
    if max_length is None:
        return
    if shards.row_tokens:
        raise UsageError(
            f"max_length={max_length} is for documents; these are packed rows of {shards.row_tokens} tokens: "
            "prepare them with another --seq_len"
        )
    if max_length < 1:
        raise UsageError(f"max_length is {max_length}, expected at least 1")
