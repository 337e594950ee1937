"""``get_llama3_dataloader``: shards -> batches, as a torch DataLoader; and the log of its settings.

The settings of a loader and what follows from them, as one block of the log: rank 0 says it at INFO.

``get_llama3_dataloader``: shards -> batches, as a torch DataLoader.

The function makes the stages one after another, and each stage checks its own arguments: shards, tokenizer,
samples, sampling order, workers, collator. Making a loader reads indexes and the tokenizer, but no sample.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from loader.batches import (
    Collate,
    PaddedBatches,
    PadToken,
    SampleField,
    StepBatches,
    Targets,
    check_padding,
    check_row_lengths,
    check_sample_fields,
    check_targets,
    choose_pad_token,
    log_pad_token,
)
from loader.boundaries import Boundary, boundary_names
from loader.find_shards import (
    InputShards,
    ReadCheck,
    ShardSet,
    SizeCheck,
    SplitName,
    check_read_check,
    document_split,
    find_sources,
)
from loader.mixture import Mixture, Schedule
from loader.order import ORDER_VERSION, Order
from loader.ranks import find_process_rank
from loader.reading import STALL_WARNING_S, ReaderContext, ReaderIndex
from loader.samples import LongDocuments, SampleRules, make_samples
from loader.staged_copies import warn_of_missing_copies
from loader.state import Ramp, RunSteps, ramp_sizes
from loader.token_loader import TokenLoader
from loader.tokenizer import choose_tokenizer
from loader.workers import (
    ChunkDataset,
    MixedChunkDataset,
    MixedSamples,
    Samples,
    WeightsIn,
    check_batch,
    check_batch_tokens,
    check_mixing,
    group_size,
    make_order,
    mix,
    rank_slots,
    whole_number,
)
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from loader.find_shards import ShardSet
    from loader.token_loader import TokenLoader


def settings_block(loader: TokenLoader, shards: ShardSet) -> str:
    """What is read, what a sample and a batch are, the steps of an epoch, and who reads."""
    order, who, run = loader.order, loader.process_rank, loader.fingerprint
    micro_batches = loader.num_accumulated
    accumulated = "" if micro_batches == 1 else f" x {micro_batches} batches per step"
    data = f"{shards.num_shards:,} shards, {order.num_samples:,} samples"
    samples = f"{loader.step_batches.batch_size} per batch{accumulated} x {who.world_size} ranks"
    steps = f"{loader.run.steps_in(0):,} steps, {len(loader):,} batches per rank"
    ramps = "".join(f"; {name} {run[name]}" for name in loader.run.settings(order.global_batch_size))
    global_batch = order.global_batch_size * loader.run.order_steps_in(0)
    lines = [
        f"loader of {data}, about {shards.mean_tokens * shards.num_samples:.3g} tokens",
        f"sample: {_sample(loader)}",
        f"global batch: {global_batch} samples = {samples}{ramps}; {_padding(loader)}",
        f"epoch: {steps}; {order.num_left_out:,} samples left out, others each epoch",
        f"order: {_order(loader)}",
        f"readers: {_workers(loader)}",
        f"data {run['data'][:12]}, tokenizer {run['tokenizer'][:12]}",
    ]
    return "\n  ".join(lines)


def _sample(loader: TokenLoader) -> str:
    run, fields = loader.fingerprint, loader.step_batches.boundaries
    if run["seq_len"]:
        apart = (
            f"; boundaries {', '.join(fields)}" if fields else "; attention crosses documents (no boundaries)"
        )
        shifted = "; labels one place ahead" if loader.step_batches.shifts_targets else ""
        return f"a row of {run['seq_len']} tokens{apart}{shifted}"
    if "batch_tokens" in run:
        return f"a batch of documents of like length, of up to {run['batch_tokens']:,} tokens with padding"
    if not run["max_length"]:
        return "a whole document"
    return f"a document of up to {run['max_length']} tokens, longer ones: {run['long_documents']}"


def _padding(loader: TokenLoader) -> str:
    collate, padded = loader.step_batches.collate_fn, loader.step_batches.padded
    if padded is None:
        return f"collated by {getattr(collate, '__name__', type(collate).__name__)}"
    width = f"to {padded.pad_to_length} tokens" if padded.pad_to_length else "to the longest of a batch"
    multiple = f", to a multiple of {padded.pad_to_multiple_of}" if padded.pad_to_multiple_of else ""
    if loader.step_batches.row_tokens:
        width, multiple = "only in rows that are not full", ""
    return f"padding {width}{multiple}, with {padded.pad.token} (id {padded.pad.token_id})"


def _order(loader: TokenLoader) -> str:
    order = loader.order
    if order.keeps_tail:
        return (
            f"as the shards stand, the last batch filled up with {order.num_fillers} samples without labels"
        )
    if not order.shuffle:
        return "as the shards stand, not shuffled"
    grouped = f", samples of like length in groups of {order.group}" if order.group > 1 else ""
    mixed = f", sources mixed by {order.sizes['schedule']}" if isinstance(order, Mixture) else ""
    return f"shuffled anew each epoch, seed {order.seed}{grouped}{mixed}"


def _workers(loader: TokenLoader) -> str:
    pinned = ", pinned memory" if loader.pin_memory else ""
    if not loader.num_workers:
        return f"this process, no workers{pinned}"
    kept = "kept between epochs" if loader.persistent_workers else "started anew each epoch"
    return (
        f"{loader.num_workers} workers per rank, {loader.prefetch_factor} chunks ahead each, {kept}{pinned}"
    )


logger = logging.getLogger(__name__)

Padding = Literal["longest", "max_length"]


def get_llama3_dataloader(
    input_shards: InputShards | Mapping[str, InputShards],
    batch_size: int | None = None,
    model_id: str | os.PathLike[str] | None = None,
    *,
    batch_tokens: int | None = None,
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
    batch_size_schedule: Ramp | None = None,
    seq_len_schedule: Ramp | None = None,
    weights: Mapping[str, float] | None = None,
    schedule: Schedule | None = None,
    weights_in: WeightsIn = "tokens",
    split: SplitName | None = None,
    validation_fraction: float | None = None,
    seq_len: int | None = None,
    boundaries: Boundary | Sequence[Boundary] = (),
    targets: Targets = "same",
    max_length: int | None = None,
    long_documents: LongDocuments = "truncate",
    padding: Padding = "longest",
    pad_to_multiple_of: int | None = None,
    group_by_length: bool | int = False,
    max_batch_tokens: int | None = None,
    exclude_shards: Iterable[int | str | os.PathLike[str]] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    staged_dir: str | os.PathLike[str] | None = None,
    read_check: ReadCheck = "none",
    stall_warning_s: float = STALL_WARNING_S,
    collate_fn: Collate | None = None,
    sample_fields: Sequence[SampleField] = (),
    multiprocessing_context: Any = None,
) -> TokenLoader:
    """Batches of a data set's token ids for this rank, shuffled anew each epoch.

    Args:
        input_shards: a folder, an index.json, a tar, a pattern (``shard-{00000..00009}.tar``, ``*``), or a
            list of these. A folder is the whole data set; an incomplete one is refused. Or several sources
            to mix, by names: ``{"web": ..., "code": ...}``.
        batch_size: samples per batch on each rank.
        model_id: for tars that shardprep did not write, the model whose tokenizer made them. Our data sets
            bring their own tokenizer; given for them, it must be the same.
        batch_tokens: instead of batch_size, the most tokens of a batch, padding included: as many whole
            documents of like length as fit. All ranks get equally many batches. ``global_batch_size``,
            ``batch_size_schedule`` and ``weights_in="samples"`` count batches then. See token_batches.py.
        seed: of the shuffle. Equal seeds give equal global batches on any number of ranks and workers.
        shuffle: else global batch k is samples ``[k L, (k+1) L)``.
        num_workers: processes that read; at most the slots of a rank, of which it has
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
        batch_size_schedule: instead of it, from which step on how many samples a global batch has,
            ``[(0, 256), (1000, 512)]``. Batches stay of batch_size, and more of them are accumulated:
            ``num_accumulated``, and ``ends_step`` after the last. It is part of the state. See run_steps.py.
        seq_len_schedule: from which step on packed rows come cut to how many tokens,
            ``[(0, 1024), (1000, 4096)]``: batches then have more, shorter rows of the same tokens. It is
            part of the state. See row_lengths.py.
        weights: of each source, ``{"web": 0.7, "code": 0.3}``. Each source has epochs of its own, see
            ``source_epochs``; an epoch of the loader is as many steps as one epoch of each source together.
        schedule: instead of ``weights``: from which global step on which weights hold,
            ``[(0, {...}), (80_000, {...})]``. It is part of the state: keep it when you resume.
        weights_in: ``"tokens"`` or ``"samples"``. Tokens are counted by the mean of each source.
        split, validation_fraction: ``"train"`` leaves out about that part of the documents (one of each
            1/fraction, chosen by a hash), ``"validation"`` is these alone, or all of the shards without a
            fraction. A validation loader has one fixed order, the same each epoch, and gives each document
            once; its last global batch is filled up with samples whose labels are all -100, so all ranks
            get equally many batches. See document_split.py.
        seq_len: pack documents into full rows of so many tokens, EOS between documents; see joined_rows.py.
        boundaries: where documents begin in packed rows, so that attention stays inside of them. For
            ``model(**batch)`` of a transformers model ``"transformers"``: the names that it knows, no
            ``attention_mask``, and ``use_cache`` False. Not every model keeps documents apart by them:
            ``check_boundaries(model, batch)`` tells. For other models ``"position_ids"``,
            ``"segment_ids"``, ``"cu_seqlens"``; see boundaries.py, also for masks. The first label of each
            document is then -100, as it follows from another document.
        targets: ``"same"``: labels are the ids, and the model shifts them, as transformers' do.
            ``"shifted"``: ``labels[:, t]`` is what comes behind ``input_ids[:, t]``, for loops like those of
            Megatron, nanoGPT and torchtitan. Samples hold one token more then: ``seq_len`` and
            ``max_length`` stay the width of batches; of rows on disk, prepare them with ``--seq_len`` one
            larger. See shifted_targets.py, also for context parallelism.
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
        read_check: ``"crc"`` compares what is read of each sample with the crc32s that
            ``python -m preprocess verify DATA --crcs`` wrote, and refuses a flipped bit by tar, sample and
            bytes; a staged copy that has one is left. ``"none"`` takes ids as they are, see docs/format.md.
            Batches and state do not depend on it.
        stall_warning_s: a read that takes longer is named in the log, with its shard.
        collate_fn: instead of ``PaddedBatches``; called with a list of ``{"input_ids": list[int]}``, in
            ``num_workers`` more processes beside those that read; see collate_workers.py.
        sample_fields: what ``collate_fn`` gets of each sample beside ``input_ids``: ``"num_tokens"``;
            ``"doc_starts"``, places in it where a document begins; ``"lengths"`` of the documents in it.
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
    batch_size = check_batch_tokens(batch_tokens, batch_size, padding, max_batch_tokens)
    sizes: Ramp = RunSteps.sizes
    if batch_size_schedule is not None:
        global_batch_size, sizes = ramp_sizes(
            batch_size_schedule, global_batch_size, is_validation=split == "validation"
        )
    global_batch_size = check_batch(batch_size, global_batch_size, who.world_size)
    fields = boundary_names(boundaries)
    shifts = check_targets(targets, fields, has_collate_fn=collate_fn is not None)
    rules = SampleRules(
        seq_len=None if seq_len is None else seq_len + shifts,
        max_length=None if max_length is None else max_length + shifts,
        long_documents=long_documents,
        group=group_size(group_by_length, batch_size),
        batch_tokens=batch_tokens,
        batch_multiple=pad_to_multiple_of or 1,
        num_beyond=int(shifts),
    )
    asked_fields = check_sample_fields(
        sample_fields, has_collate_fn=collate_fn is not None, cuts_rows=seq_len_schedule is not None
    )
    side = document_split(split, validation_fraction)
    is_validation = split == "validation"
    mixes = check_mixing(
        input_shards,
        weights,
        schedule,
        weights_in,
        is_validation=is_validation,
        excludes=bool(exclude_shards),
    )
    check_padding(padding, batch_size, max_length, max_batch_tokens, long_documents)
    sources = find_sources(
        input_shards if isinstance(input_shards, Mapping) else {"all": input_shards},
        exclude_shards=exclude_shards,
        cache_dir=cache_dir,
        count_tokens=rules.needs_lengths or (mixes and weights_in == "tokens"),
        split=side,
    )
    shards = ShardSet([source for part in sources.values() for source in part.sources], side)
    warn_of_missing_copies(shards, staged_dir)
    compares_crcs = check_read_check(read_check, shards, looks=who.rank == 0)
    size_check = SizeCheck(shards) if who.rank == 0 else None
    tokenizer = choose_tokenizer(shards, model_id)
    every = [
        make_samples(
            part,
            rules,
            eos_token_id=tokenizer.special.eos_token_id,
            vocab_size=tokenizer.vocab_size if part.has_external else None,
            starts=bool(fields or asked_fields),
            keeps_tail=is_validation,
            context=ReaderContext(
                reader_index=ReaderIndex(number=who.rank, count=who.world_size),
                stall_warning_s=stall_warning_s,
                staged_dir=staged_dir,
                compares_crcs=compares_crcs,
            ),
        )
        for part in sources.values()
    ]
    orders = [
        make_order(
            of_part,
            part,
            global_batch_size,
            rules.group,
            seed=seed,
            shuffle=shuffle and not is_validation,
            keeps_tail=is_validation,
        )
        for part, of_part in zip(sources.values(), every, strict=True)
    ]
    slots = rank_slots(orders[0], who.rank, who.world_size)
    run = RunSteps(
        order_steps_per_epoch=sum(order.steps_per_epoch for order in orders),
        num_batches=len(slots) * rules.group // batch_size,
        sizes=sizes,
        row_lengths=check_row_lengths(
            seq_len_schedule, every[0].row_tokens - shifts, is_validation=is_validation
        ),
    )
    samples: Samples | MixedSamples = every[0]
    order: Order | Mixture = orders[0]
    if mixes:
        order, samples = mix(
            sources, every, orders, run, weights=weights, schedule=schedule, weights_in=weights_in
        )
    workers = _worker_options(
        num_workers,
        len(slots),
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
    )
    if collate_fn is None:
        pad = choose_pad_token(tokenizer.special)
        log_pad_token(pad, tokenizer.special.eos_token_id)
        collate_fn = PaddedBatches(
            pad=pad,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_to_length=rules.max_length if padding == "max_length" else None,
            num_beyond=int(shifts),
            max_batch_tokens=max_batch_tokens,
        )
    if isinstance(used := getattr(collate_fn, "pad", None), PadToken):
        tokenizer.pad_with(used.token)
    step_batches = StepBatches(
        batch_size=batch_size,
        row_tokens=samples.row_tokens,
        boundaries=fields,
        collate_fn=collate_fn,
        shifts_targets=shifts,
        sample_fields=asked_fields,
        has_masks=any(part.has_masks for part in sources.values()),
    )
    if size_check is not None:
        size_check.wait()
    kind_of_chunks: Any = MixedChunkDataset if mixes else ChunkDataset
    loader = TokenLoader(
        kind_of_chunks(
            samples=samples,
            order=order,
            run=run,
            slots=slots,
            endless=persistent_workers or not workers["num_workers"],
        ),
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=who,
        fingerprint=_fingerprint(rules, shards, order, run, tokenizer.fingerprint),
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        size_check=size_check,
        **workers,
    )
    if who.rank == 0:
        logger.info(settings_block(loader, shards))
    return loader


def _fingerprint(
    rules: SampleRules, shards: ShardSet, order: Order | Mixture, run: RunSteps, tokenizer: str
) -> dict[str, Any]:
    """All that fixes which sample is where, and the ramps. What else shapes a batch is not in it."""
    split = {} if shards.split is None else {"split": shards.split.name, "split_group": shards.split.group}
    return {
        "law_version": ORDER_VERSION,
        "data": shards.fingerprint,
        "tokenizer": tokenizer,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "global_batch_size": order.global_batch_size,
        "group_by_length": order.group,
        "seq_len": shards.row_tokens or rules.seq_len or 0,
        "max_length": rules.max_length or 0,
        "long_documents": rules.long_documents,
        "num_samples": order.num_samples,
        **order.sizes,
        **split,
        **run.settings(order.global_batch_size),
        **rules.settings,
        **({"keeps_tail": True} if order.keeps_tail else {}),
    }


def _worker_options(
    num_workers: int,
    num_slots: int,
    *,
    prefetch_factor: int | None,
    persistent_workers: bool,
    multiprocessing_context: Any,
) -> dict[str, Any]:
    """What torch's DataLoader wants to know of workers, of which each has a slot at least."""
    asked = whole_number("num_workers", num_workers, least=0)
    if prefetch_factor is not None:
        whole_number("prefetch_factor", prefetch_factor, least=1)
        if not asked:
            raise UsageError(
                f"prefetch_factor={prefetch_factor} says what workers read ahead, and num_workers is 0; "
                "leave it out, or pass num_workers"
            )
    if asked > num_slots:
        logger.warning(
            "num_workers is %d, but a rank's part of a global batch is %d, which no more workers can share: "
            "%d read; a larger batch_size or global_batch_size gives more of them work",
            asked,
            num_slots,
            num_slots,
        )
    count = min(asked, num_slots)
    return {
        "num_workers": count,
        "prefetch_factor": (prefetch_factor or 2) if count else None,
        "persistent_workers": persistent_workers and count > 0,
        "multiprocessing_context": multiprocessing_context if count else None,
    }
