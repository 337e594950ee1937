"""``get_llama3_dataloader``, which builds the parts of a loader one after another."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from loader.batch.batches import Collate, StepBatches, Targets, choose_padder
from loader.batch.boundaries import boundary_names
from loader.batch.fields import Boundary
from loader.options import LoaderOptions, Padding
from loader.order.mixture import Run
from loader.order.planned import Sizes, Weights, WeightsIn, choose_sizes, make_run
from loader.other_loaders import ARGUMENTS
from loader.ranks import find_process_rank
from loader.read.finding import InputShards, find_sources
from loader.read.samples import Samples, facts_of, make_samples
from loader.read.shards import DatasetShards, ShardSet, SplitName
from loader.read.tokenizer import LoaderTokenizer, choose_tokenizer
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _refuses_unknown_names(make: _Function) -> _Function:
    """Decorate a function to raise a TypeError that names the argument which was perhaps meant."""
    known = inspect.signature(make).parameters

    @wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known.keys():
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "its arguments:"
            if name in ARGUMENTS:
                hint = f"{ARGUMENTS[name]}."
            message = f"get_llama3_dataloader has no argument {name!r}: {hint}"
            raise TypeError(f"{message} It has {', '.join(known)}")
        return make(*args, **options)

    return cast(_Function, call)


@_refuses_unknown_names
def get_llama3_dataloader(
    input_shards: InputShards | Mapping[str, InputShards],
    batch_size: int,
    model_id: str | os.PathLike[str] | None = None,
    *,
    split: SplitName | None = None,
    global_batch_size: Sizes | None = None,
    group_by_length: bool | int = False,
    padding: Padding = "longest",
    pad_to_multiple_of: int | None = None,
    collate_fn: Collate | None = None,
    origins: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    weights: Weights | None = None,
    weights_in: WeightsIn = "tokens",
    amend: bool = False,
    seq_len: int | None = None,
    boundaries: Boundary | Sequence[Boundary] = (),
    targets: Targets = "same",
    max_length: int | None = None,
    num_workers: int = 4,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenLoader:
    """Return a loader of this rank's batches of token ids, with another order in each epoch.

    Packed rows, with attention inside each document (``model`` is a transformers model on ``device``):

        loader = get_llama3_dataloader("DATA", batch_size=8, seq_len=4096, boundaries="transformers")
        for batch in loader:
            num_labels = loader.labels_per_rank(device)
            loss = model(**batch.to(device), num_items_in_batch=num_labels).loss

    Whole documents, padded. A global batch of 512 on any number of ranks, resumed from a checkpoint:

        loader = get_llama3_dataloader("DATA", batch_size=8, global_batch_size=512, max_length=2048)
        loader.load_state_dict(checkpoint["loader"])  # saved as {"loader": loader.state_dict(), ...}

    Args:
        What data:
            input_shards: a data set's folder, an index.json, a tar or its URL, a pattern
                (``shard-{00000..00009}.tar``, ``*``), or a list of these. A mixture is a dict of them by
                source name, ``{"web": ..., "code": ...}``. An incomplete folder is refused.
            model_id: folder or hub name of the model whose tokenizer made tars that shardprep did not write.
                Default for these: meta-llama/Meta-Llama-3-8B. A data set has its own tokenizer, and another
                one is refused.
            cache_dir: folder for copies of the tars that URLs name. URLs need it.
            split: ``"validation"`` selects the documents that ``plan --validation_fraction`` held out,
                ``"train"`` the others. A validation loader yields each document once, in the same order each
                epoch. Samples whose labels are all -100 fill its last global batch.

        What a batch is:
            batch_size: samples per batch on each rank.
            global_batch_size: samples per optimizer step, over all ranks and accumulated batches; or sizes by
                step, ``[(0, 256), (1000, 512)]``, which change ``loader.num_accumulated``. It determines the
                order: keep it when the number of ranks changes. Default: batch_size x world_size.
            group_by_length: put documents of similar length next to each other, in groups of this many
                samples; True: of ``batch_size``. Keep the number when you change ``batch_size``.
            padding: ``"longest"`` pads to the longest sample of a batch, ``"max_length"`` to ``max_length``.
            pad_to_multiple_of: round the width of padded batches up to a multiple of this.
            collate_fn: called with a list of ``{"input_ids": list[int]}``, in the training process. The
                default makes the same batches as transformers' DataCollatorForLanguageModeling.
            origins: add ``origins``, int64[documents, 6], to batches: row, place, source, shard, sample and
                document, which ``loader.origin`` resolves. Remove it before ``model(**batch)``.

        Order and mixing:
            seed: equal seeds give equal global batches, on any number of ranks and workers.
            shuffle: if False, global batch k is samples ``[k L, (k + 1) L)``, L being ``global_batch_size``.
            weights: share of each source, ``{"web": 0.7, "code": 0.3}``, or shares by step, ``[(0, {...}),
                (80_000, {...})]``. Each source has its own epochs, see ``loader.source_epochs``.
            weights_in: unit of the weights: ``"samples"`` or ``"tokens"``, by each source's mean length.
            amend: accept a state of other weights, sources or global batch sizes, which is otherwise refused.
                The new ones apply from the next border, at most 64 steps later. Until then keep a dropped
                source in ``input_shards``, without a weight.

        Packing and labels:
            seq_len: pack documents into full rows of this many tokens, with EOS between documents.
            boundaries: keep attention inside each document of packed rows. ``"transformers"`` gives the
                fields that ``model(**batch)`` of a transformers model needs for it, without
                ``attention_mask``. For other models pass one or several of ``"position_ids"``,
                ``"segment_ids"``, ``"cu_seqlens"``. The first label of each document is -100. Default:
                attention crosses documents.
            targets: with ``"same"`` labels equal the ids, for models that shift them, like transformers'.
                With ``"shifted"`` ``labels[:, t]`` is the token after ``input_ids[:, t]``, for loops like
                those of Megatron, nanoGPT and torchtitan; plan packed rows with a ``--seq_len`` one larger.
            max_length: truncate unpacked documents to this many tokens. ``loader.metrics.num_cut_tokens``
                counts the tokens that are cut off.

        Processes and workers:
            num_workers: reading processes per rank; 0: the training process reads. Workers beyond
                ``global_batch_size / (world_size x group_by_length)`` have no work.
            prefetch_factor: chunks of up to 1 MiB that each worker reads ahead. Default: 2.
            pin_memory: copy batches into pinned memory. Default: True if CUDA is available.
            persistent_workers: keep workers between epochs; they read ahead into the next one.
            rank: data-parallel rank, with ``world_size``. Default: torch.distributed's or the launcher's. For
                a DeviceMesh: ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.
            world_size: number of data-parallel ranks.

    Returns:
        A TokenLoader. Its batches have ``input_ids``, ``labels`` (-100 in padding) and ``attention_mask``
        (not with ``boundaries="transformers"``), each int64[batch_size, seq]; see Batch for other fields. A
        ``collate_fn`` may return anything.

    Raises:
        TypeError: an argument is unknown.
        ShardprepError: UsageError for a wrong value; NotFound, MissingShard, BrokenShard or UnknownVersion
            for the data; OtherTokenizer for ``model_id``; ReadWriteError or CannotWrite for the disk.
    """
    return make_loader(LoaderOptions(**locals()))


def make_loader(options: LoaderOptions) -> TokenLoader:
    """Do the work of ``get_llama3_dataloader``."""
    # What the arguments ask of this rank. The order takes ``tick_samples`` at a time, on all ranks together.
    process_rank = find_process_rank(options.rank, options.world_size)
    boundaries = boundary_names(options.boundaries)
    options.refuse_unshiftable(boundaries)
    tick_samples, group, sizes = choose_sizes(
        options.global_batch_size,
        options.group_by_length,
        batch_size=options.batch_size,
        world_size=process_rank.world_size,
    )
    if options.is_validation and len(sizes) > 1:
        found = f"global_batch_size={options.global_batch_size}"
        raise UsageError(found=found, expected="one size for validation")
    options.refuse_wrong_sources()
    options.refuse_no_width()

    # The shards, their tokenizer, and the samples in them.
    by_source = _shards_by_source(options, group)
    datasets: list[DatasetShards] = []
    for each in by_source.values():
        datasets += each.datasets
    shards = ShardSet(datasets, options.split)
    tokenizer = choose_tokenizer(shards, options.model_id)
    needs_starts = bool(boundaries) or options.origins
    samples = {
        name: _samples_of(source_shards, options, group, tokenizer, needs_starts=needs_starts)
        for name, source_shards in by_source.items()
    }

    # Which sample is when.
    facts = {name: facts_of(each, counts_tokens=options.counts_tokens) for name, each in samples.items()}
    run = make_run(
        facts,
        sizes,
        options.weights,
        tick_samples=tick_samples,
        batches_per_tick=tick_samples // (options.batch_size * process_rank.world_size),
        group=group,
        seed=options.seed,
        shuffle=options.shuffle and not options.is_validation,
        keeps_tail=options.is_validation,
        settings={
            "tokenizer": tokenizer.fingerprint,
            "seq_len": shards.row_tokens or options.row_tokens or 0,
            "max_length": options.most_tokens or 0,
            "split": shards.split,
        },
    )

    # How samples become batches.
    num_workers = _usable_workers(options, run, process_rank.world_size)
    padder = choose_padder(
        options.collate_fn,
        tokenizer,
        pad_to_multiple_of=options.pad_to_multiple_of,
        pad_to_length=options.most_tokens if options.padding == "max_length" else None,
        num_cut_columns=options.num_cut_columns,
        has_masks=shards.has_masks,
        has_blanks=shards.blank_id is not None,
    )
    if padder.pad.token:
        tokenizer.pads_with = padder.pad.token
    step_batches = StepBatches(
        batch_size=options.batch_size,
        padder=padder,
        collate_fn=options.collate_fn,
        boundaries=boundaries,
        shifts_targets=options.targets == "shifted",
        origins=options.origins,
    )
    pin_memory = options.pin_memory
    if pin_memory is None:
        pin_memory = torch.cuda.is_available()
    loader = TokenLoader(
        run,
        samples=samples,
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=process_rank,
        pin_memory=pin_memory,
        amend=options.amend,
        num_workers=num_workers,
        prefetch_factor=(options.prefetch_factor or 2) if num_workers else None,
        persistent_workers=options.persistent_workers and num_workers > 0,
    )
    if process_rank.rank == 0:
        logger.info(loader.describe())
        _warn_of_no_eos(shards, options, tokenizer)
    return loader


def _shards_by_source(options: LoaderOptions, group: int) -> dict[str, ShardSet]:
    """Find the shards of each source. One without a name is ``"all"``."""
    sources: Any = options.input_shards
    if not isinstance(sources, Mapping):
        sources = {"all": sources}
    needs_lengths = options.seq_len is not None or group > 1 or options.counts_tokens
    return find_sources(sources, cache_dir=options.cache_dir, count_tokens=needs_lengths, split=options.split)


def _samples_of(
    shards: ShardSet, options: LoaderOptions, group: int, tokenizer: LoaderTokenizer, *, needs_starts: bool
) -> Samples:
    options.refuse_wrong_lengths(shards, group)
    samples = make_samples(
        shards,
        row_tokens=options.row_tokens,
        most_tokens=options.most_tokens,
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size if shards.has_external else None,
        starts=needs_starts,
        keeps_tail=options.is_validation,
        origins=options.origins,
    )
    if not samples.num_samples:  # all documents together are shorter than a row
        most = samples.num_offsets - options.num_cut_columns
        raise UsageError(found=f"seq_len={options.seq_len}", expected=f"at most {most:,}")
    return samples


def _usable_workers(options: LoaderOptions, run: Run, world_size: int) -> int:
    """Return how many workers to start: at most one per slot of the rank."""
    num_workers = options.num_workers
    if options.prefetch_factor is not None and not num_workers:
        found = f"prefetch_factor={options.prefetch_factor}, but no workers that could read ahead"
        raise UsageError(found=found, expected="num_workers of at least 1", remedy="num_workers")
    num_slots = run.order.num_slots // world_size
    if num_workers <= num_slots:
        return num_workers
    problem = f"num_workers={num_workers}, but only {num_slots} can share a rank's part of a global batch"
    logger.warning(f"{problem}, so {num_slots} are started. A larger global_batch_size can use more")
    return num_slots


def _warn_of_no_eos(shards: ShardSet, options: LoaderOptions, tokenizer: LoaderTokenizer) -> None:
    """Log a warning for documents without EOS that are not packed."""
    if options.seq_len is not None or options.is_validation or tokenizer.eos_token_id is None:
        return
    if not all(data.spec.append_eos or data.spec.has_rows for data in shards.with_idx):
        problem = "documents end without EOS, so a model fine-tuned on them never learns to stop"
        logger.warning(f"{problem}; pass seq_len=, or plan the data with --append_eos")
