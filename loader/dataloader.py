"""What makes a sample of the shards: options, their checks, and the Samples that follow.

``get_llama3_dataloader``: shards -> batches, as a torch DataLoader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from loader.batches import CausalLMCollator, Collate, StepBatches
from loader.boundaries import Boundary, check_boundaries
from loader.dataset import (
    ChunkDataset,
    Samples,
    check_batch,
    group_size,
    make_order,
    rank_lanes,
    whole_number,
)
from loader.order import LAW_VERSION, Order
from loader.process_rank import find_process_rank
from loader.reading.shard_reader import STALL_WARNING_S, Turn
from loader.samples.joined_rows import JoinedRows
from loader.samples.whole_samples import DocumentPieces, LongDocuments, WholeSamples
from loader.shards.find_shards import find_shards
from loader.shards.input_paths import InputShards
from loader.shards.shard_set import ShardSet
from loader.shards.size_check import SizeCheck
from loader.token_loader import TokenLoader
from loader.tokenizer import choose_tokenizer, fingerprint_of
from shardprep.errors import UsageError

Padding = Literal["longest", "max_length"]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """See ``get_llama3_dataloader``, whose arguments these are."""

    input_shards: InputShards
    exclude_shards: Iterable[int | str | os.PathLike[str]] = ()
    cache_dir: str | os.PathLike[str] | None = None
    seq_len: int | None = None
    boundaries: tuple[str, ...] = ()
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    padding: Padding = "longest"
    group: int = 1
    stall_warning_s: float = STALL_WARNING_S
    turn: Turn = field(default_factory=Turn)
    staged_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_boundaries(self.boundaries)
        for name in ("seq_len", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        for name, kind in (("long_documents", LongDocuments), ("padding", Padding)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(get_args(kind))}")
        if self.max_length is None and (self.padding == "max_length" or self.long_documents != "truncate"):
            raise UsageError(
                f"padding={self.padding!r} with long_documents={self.long_documents!r} needs max_length"
            )
        if self.seq_len is not None and (self.max_length is not None or self.group > 1):
            raise UsageError(
                f"seq_len={self.seq_len} packs documents into full rows; max_length and group_by_length are "
                "for padded documents: leave one side out"
            )

    def find_shards(self) -> ShardSet:
        """The shards that are named and not excluded, with the lengths of documents where they are needed."""
        needs_lengths = self.seq_len is not None or self.group > 1 or self.long_documents == "split"
        return find_shards(
            self.input_shards,
            exclude_shards=self.exclude_shards,
            cache_dir=self.cache_dir,
            count_tokens=needs_lengths,
            staged_dir=self.staged_dir,
        )


def make_samples(options: SampleOptions, shards: ShardSet, tokenizer: Any) -> Samples:
    """The samples of some shards. Raises UsageError where the options do not fit what they hold."""
    made_by_others = len(shards.datasets) < len(shards.sources)
    shared: dict[str, Any] = {
        "shards": shards,
        "starts": bool(options.boundaries),
        "vocab_size": max(tokenizer.get_vocab().values()) + 1 if made_by_others else None,
        "stall_warning_s": options.stall_warning_s,
        "turn": options.turn,
    }
    _check_rows(options, shards)
    if options.seq_len is not None and not shards.row_tokens:
        return JoinedRows(seq_len=options.seq_len, eos_token_id=tokenizer.eos_token_id, **shared)
    splits = options.long_documents == "split" and options.max_length is not None
    return WholeSamples(
        max_length=options.max_length,
        pieces=DocumentPieces(shards, int(options.max_length or 0), options.turn) if splits else None,
        refuse_longer=options.long_documents == "error",
        **shared,
    )


def _check_rows(options: SampleOptions, shards: ShardSet) -> None:
    if not shards.has_rows:
        return
    rows = f"packed rows of {shards.row_tokens} tokens" if shards.row_tokens else "some packed rows"
    if options.max_length is not None or options.group > 1:
        raise UsageError(
            f"max_length={options.max_length} and group_by_length are for documents; these are {rows}: "
            "prepare them with another --seq_len"
        )
    if options.seq_len is not None and options.seq_len != shards.row_tokens:
        raise UsageError(
            f"seq_len={options.seq_len}, but these are {rows}; leave it out, or prepare them "
            "with that --seq_len"
        )
    if options.boundaries and not shards.row_tokens:
        raise UsageError("boundaries are for rows of one length; load documents and packed rows apart")


logger = logging.getLogger(__name__)


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
    device_mesh: Any = None,
    process_group: Any = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    boundaries: Boundary | Sequence[Boundary] = (),
    max_length: int | None = None,
    long_documents: LongDocuments = "truncate",
    padding: Padding = "longest",
    pad_to_multiple_of: int | None = None,
    group_by_length: bool | int = False,
    max_batch_tokens: int | None = None,
    exclude_shards: Iterable[int | str | os.PathLike[str]] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    staged_dir: str | os.PathLike[str] | None = None,
    stall_warning_s: float = STALL_WARNING_S,
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
        num_workers: processes that read; at most the lanes of a rank, of which it has
            ``global_batch_size / (world_size x group_by_length)``: more would idle, and a warning says so.
        prefetch_factor: chunks (up to 1 MiB of batches) that each worker reads ahead; 2 if there are workers.
        pin_memory: batches in pinned memory; where there is CUDA, if not given.
        persistent_workers: keep workers between epochs; they read on into the next one.
        rank, world_size: of data parallelism; found by ``find_process_rank`` if not given. ``iter()`` refuses
            a rank that was found and is another one by then.
        device_mesh, process_group: instead of them, the data-parallel dimension of a DeviceMesh, as
            ``mesh["dp"]``, or its group: with tensor or pipeline parallelism, where ranks share data.
        global_batch_size: L, samples of an optimizer's step, all ranks and accumulation together. It alone
            fixes the order, so keep it when the number of ranks changes. Default: batch_size x world_size.
        seq_len: pack documents into full rows of so many tokens, EOS between documents; see joined_rows.py.
        boundaries: where documents begin in packed rows, so that attention stays inside of them. For
            ``model(**batch)`` of a transformers model ``"transformers"``: the names that it knows, no
            ``attention_mask``, and ``use_cache`` False. For other models ``"position_ids"``,
            ``"segment_ids"``, ``"cu_seqlens"``; see boundaries.py, also for masks. The first label of each
            document is then -100, as it follows from another document.
        max_length: tokens of a document; what happens to longer ones is ``long_documents``.
        long_documents: ``"truncate"`` leaves the rest out and counts it in ``metrics``, ``"split"`` makes
            it samples of its own, ``"error"`` refuses.
        padding: ``"longest"`` of a batch, or ``"max_length"`` for one width.
        pad_to_multiple_of: widths of padded batches.
        group_by_length: documents of like length side by side, in groups of so many; True: of batch_size.
            It enters the order: give the number to resume with another batch_size.
        max_batch_tokens: a padded batch of more is refused, before it is too large for the GPU.
        exclude_shards: numbers or tars of shards to leave out, before the order, which is then another one.
        cache_dir: where webdataset copies tars that are no local files; see docs/format.md.
        staged_dir: a folder on this node that ``python -m loader stage DATA --to`` may have filled. A shard
            is read from ``staged_dir/<plan id, 16 digits>/`` where its tar and idx are there with the right
            sizes, else from where it was found; likewise after a copy failed. Batches and state do not
            change. A folder without copies is a warning.
        stall_warning_s: a read that takes longer is named in the log, with its shard.
        collate_fn: instead of ``CausalLMCollator``; called in this process with a list of
            ``{"input_ids": list[int]}``.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"`` (Python 3.14's default), as
            DataLoader takes it. The last two run the training script's top again in each worker: keep what
            trains behind ``if __name__ == "__main__":``.

    Returns:
        A TokenLoader; see there for epochs and for the state. Batches hold int64[batch_size, seq]
        ``input_ids``, ``labels``, -100 where there is padding, and ``attention_mask`` (not with
        ``boundaries="transformers"``).

    Raises:
        NotFound, MissingShard, BrokenShard, UnknownVersion, OtherTokenizer, UsageError: all are
        ShardprepErrors that say what was found and what to do.
    """
    who = find_process_rank(rank, world_size, device_mesh=device_mesh, process_group=process_group)
    global_batch_size = check_batch(batch_size, global_batch_size, who.world_size)
    options = SampleOptions(
        input_shards=input_shards,
        exclude_shards=tuple(exclude_shards),
        cache_dir=cache_dir,
        staged_dir=staged_dir,
        seq_len=seq_len,
        boundaries=(boundaries,) if isinstance(boundaries, str) else tuple(boundaries),
        max_length=max_length,
        long_documents=long_documents,
        padding=padding,
        group=group_size(group_by_length, batch_size),
        stall_warning_s=stall_warning_s,
        turn=Turn(number=who.rank, count=who.world_size),
    )
    _check_batch_tokens(batch_size, max_length, max_batch_tokens)
    shards = options.find_shards()
    size_check = SizeCheck(shards) if who.rank == 0 else None
    tokenizer = choose_tokenizer(shards, model_id)
    samples = make_samples(options, shards, tokenizer)
    order = make_order(samples, shards, global_batch_size, options.group, seed=seed, shuffle=shuffle)
    lanes = rank_lanes(order, who.rank, who.world_size)
    workers = _worker_options(
        num_workers,
        len(lanes),
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
    )
    collate_fn = collate_fn or CausalLMCollator(
        tokenizer,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_to_length=max_length if padding == "max_length" else None,
        max_batch_tokens=max_batch_tokens,
    )
    fingerprint = _fingerprint(options, shards, order, fingerprint_of(shards, tokenizer))
    if isinstance(collate_fn, CausalLMCollator):
        tokenizer.pad_token = collate_fn.pad.token
    if size_check is not None:
        size_check.wait()
    return TokenLoader(
        ChunkDataset(
            samples=samples,
            order=order,
            lanes=lanes,
            endless=persistent_workers or not workers["num_workers"],
        ),
        step_batches=StepBatches(
            batch_size=batch_size,
            row_tokens=samples.row_tokens,
            boundaries=options.boundaries,
            collate_fn=collate_fn,
        ),
        tokenizer=tokenizer,
        process_rank=who,
        fingerprint=fingerprint,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        size_check=size_check,
        **workers,
    )


def _fingerprint(options: SampleOptions, shards: ShardSet, order: Order, tokenizer: str) -> dict[str, Any]:
    """All that fixes which sample is where. What only shapes a batch, as padding, is not in it."""
    return {
        "law_version": LAW_VERSION,
        "data": shards.fingerprint,
        "tokenizer": tokenizer,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "global_batch_size": order.global_batch_size,
        "group_by_length": order.group,
        "seq_len": shards.row_tokens or options.seq_len or 0,
        "max_length": options.max_length or 0,
        "long_documents": options.long_documents,
        "num_samples": order.num_samples,
        "block_samples": order.block_samples,
        "window_samples": order.window_samples,
    }


def _check_batch_tokens(batch_size: int, max_length: int | None, max_batch_tokens: int | None) -> None:
    if max_batch_tokens is not None and batch_size * (max_length or 1) > max_batch_tokens:
        raise UsageError(
            f"batch_size {batch_size} x max_length {max_length} can make {batch_size * (max_length or 1):,} "
            f"tokens, max_batch_tokens is {max_batch_tokens:,}; lower one of them"
        )


def _worker_options(
    num_workers: int,
    num_lanes: int,
    *,
    prefetch_factor: int | None,
    persistent_workers: bool,
    multiprocessing_context: Any,
) -> dict[str, Any]:
    """What torch's DataLoader wants to know of workers, of which each has a lane at least."""
    asked = whole_number("num_workers", num_workers, least=0)
    if prefetch_factor is not None:
        whole_number("prefetch_factor", prefetch_factor, least=1)
        if not asked:
            raise UsageError(
                f"prefetch_factor={prefetch_factor} says what workers read ahead, and num_workers is 0; "
                "leave it out, or pass num_workers"
            )
    if asked > num_lanes:
        logger.warning(
            "num_workers is %d, but a rank's part of a global batch is %d, which no more workers can share: "
            "%d read; a larger batch_size or global_batch_size gives more of them work",
            asked,
            num_lanes,
            num_lanes,
        )
    count = min(asked, num_lanes)
    return {
        "num_workers": count,
        "prefetch_factor": (prefetch_factor or 2) if count else None,
        "persistent_workers": persistent_workers and count > 0,
        "multiprocessing_context": multiprocessing_context if count else None,
    }
