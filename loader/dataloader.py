"""``get_llama3_dataloader``: makes the stages one after another; each checks its own arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from loader.batches import (
    Collate,
    PaddedBatches,
    PadToken,
    StepBatches,
    Targets,
    choose_pad_token,
    log_pad_token,
)
from loader.boundaries import Boundary, boundary_names
from loader.ranks import find_process_rank
from loader.samples import (
    Sizes,
    Weights,
    WeightsIn,
    check_mixing,
    choose_sizes,
    make_run,
    make_samples,
    whole_number,
)
from loader.shards import InputShards, ShardSet, SplitName, find_sources
from loader.token_loader import TokenLoader
from loader.tokenizer import choose_tokenizer
from shardprep.errors import UsageError
from shardprep.removed import ARGUMENTS

logger = logging.getLogger(__name__)

Padding = Literal["longest", "max_length"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_FROM_0 = ("pad_to_multiple_of", "num_workers", "rank")  # other whole numbers are 1 at least
_CHOICES = {"SplitName": SplitName, "Padding": Padding, "WeightsIn": WeightsIn, "Targets": Targets}
_PATHS = {"model_id": "a model's folder or its name on the hub", "cache_dir": "a folder"}


def _with_checks(make: _Function) -> _Function:
    """Check names and types of the arguments; numpy's numbers become Python's, as states are JSON."""
    signature = inspect.signature(make)
    known = signature.parameters

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known.keys():
            if name in ARGUMENTS:
                raise TypeError(f"get_llama3_dataloader has no argument {name!r} any more: {ARGUMENTS[name]}")
            near = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {near[0]!r}" if near else ""
            raise TypeError(
                f"get_llama3_dataloader has no argument {name!r}{hint}; its arguments: {', '.join(known)}; "
                "help(get_llama3_dataloader) explains them"
            )
        bound = signature.bind(*args, **options)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(name, value, known[name].annotation)
        return make(*bound.args, **bound.kwargs)

    return cast(_Function, call)


def _checked(name: str, value: Any, annotation: str) -> Any:
    """Return an argument as the type that it is declared with. Raises UsageError for another one."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind == "int" and name != "seed":
        return whole_number(name, value, least=0 if name in _FROM_0 else 1)
    choices = get_args(_CHOICES.get(kind))
    if name == "seed":
        is_right, expected = isinstance(value, Integral), "a whole number"
    elif kind == "bool":
        is_right, expected = value in (True, False), "True or False"
    elif choices:
        is_right, expected = value in choices, " or ".join(map(repr, choices))
    elif name in _PATHS:
        is_right, expected = isinstance(value, (str, os.PathLike)), _PATHS[name]
    else:
        is_right, expected = name != "collate_fn" or callable(value), "a function of a list of samples"
    if not is_right:
        raise UsageError.of_value(name, value, expected)
    if kind == "bool":
        return bool(value)
    return int(value) if name == "seed" else value


@_with_checks
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
    """Return batches of a data set's token ids for this rank, shuffled anew each epoch.

    Packed rows, with attention inside each document (``model`` is one of transformers'):

        loader = get_llama3_dataloader("DATA", batch_size=8, seq_len=4096, boundaries="transformers")
        for batch in loader:
            num_labels = loader.labels_per_rank(device)
            loss = model(**batch.to(device), num_items_in_batch=num_labels).loss

    Whole documents, padded; a global batch of 512 on any number of ranks, resumed behind a checkpoint:

        loader = get_llama3_dataloader("DATA", batch_size=8, global_batch_size=512, max_length=2048)
        loader.load_state_dict(checkpoint["loader"])

    Args:
        What data:
            input_shards: a folder, an index.json, a tar, a pattern (``shard-{00000..00009}.tar``, ``*``), or
                a list of these; of a mixture each source by name, ``{"web": ..., "code": ...}``. An
                incomplete folder is refused.
            model_id: the model whose tokenizer made tars that shardprep did not write. A data set brings its
                own, and another one is refused.
            cache_dir: where webdataset copies tars that are no local files.
            split: ``"validation"`` gives the documents that ``plan --validation_fraction`` chose (all of a
                data set that was planned without it), ``"train"`` the others. A validation loader gives each
                document once, in one order. Samples whose labels are all -100 fill up its last global batch.

        What a batch is:
            batch_size: samples per batch on each rank.
            global_batch_size: samples per optimizer step, on all ranks, accumulation included; or sizes by
                step, ``[(0, 256), (1000, 512)]``, which change ``loader.num_accumulated``. It fixes the
                order: keep it when the number of ranks changes. Default: batch_size x world_size.
            group_by_length: put documents of similar length side by side, in groups of this many samples;
                True: of ``batch_size``. Keep the number when you change ``batch_size``.
            padding: ``"longest"`` pads to the longest sample of a batch, ``"max_length"`` to one width.
            pad_to_multiple_of: round the width of padded batches up to a multiple of this.
            collate_fn: called with a list of ``{"input_ids": list[int]}``, in the training process. The
                default makes the same batches as transformers' DataCollatorForLanguageModeling.
            origins: add ``origins`` int64[documents, 6] to batches: row, place, source, shard, sample and
                document, which ``loader.origin`` resolves. Take them out before ``model(**batch)``.

        Order and mixing:
            seed: of the shuffle. Equal seeds give equal global batches on any number of ranks and workers.
            shuffle: False: global batch k is samples ``[k L, (k + 1) L)``, L being ``global_batch_size``.
            weights: share of each source, ``{"web": 0.7, "code": 0.3}``, or the shares by step: ``[(0,
                {...}), (80_000, {...})]``. A source has its own epochs, see ``loader.source_epochs``.
            weights_in: unit of the weights: ``"tokens"``, by the mean of each source, or ``"samples"``.
            amend: go on from a state of other weights, sources or global batch sizes, which the default
                refuses. The new ones hold from the next border on, at most 64 steps later. A source that you
                drop must stay in ``input_shards`` until then, without a weight. Sizes must be multiples of
                the run's first.

        Packing and labels:
            seq_len: pack documents into full rows of this many tokens, with EOS between documents.
            boundaries: keep attention inside each document of packed rows. ``"transformers"``: the fields
                that ``model(**batch)`` of a transformers model needs, without ``attention_mask``;
                ``check_boundaries(model, batch)`` says whether yours heeds them. For other models one or
                several of ``"position_ids"``, ``"segment_ids"``, ``"cu_seqlens"``. The first label of each
                document is -100.
            targets: ``"same"``: labels are the ids, for models that shift them, as transformers' do.
                ``"shifted"``: ``labels[:, t]`` is what follows ``input_ids[:, t]``, for loops as in Megatron,
                nanoGPT and torchtitan. Plan packed rows with a ``--seq_len`` that is one larger.
            max_length: cut documents that are not packed to this many tokens; ``loader.metrics`` counts the
                rest.

        Processes and workers:
            num_workers: processes that read, per rank. At most ``global_batch_size / (world_size x
                group_by_length)`` have work.
            prefetch_factor: chunks (up to 1 MiB) that each worker reads ahead. Default: 2.
            pin_memory: put batches into pinned memory. Default: where there is CUDA.
            persistent_workers: keep workers between epochs; they read on into the next one.
            rank: of data parallelism, with ``world_size``. Default: torch.distributed's or the launcher's. Of
                a DeviceMesh: ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.
            world_size: ranks of data parallelism.

    Returns:
        A TokenLoader; see there for epochs and for the state. Batches hold int64[batch_size, seq]
        ``input_ids``, ``labels``, -100 where there is padding, and ``attention_mask`` (not with
        ``boundaries="transformers"``).

    Raises:
        NotFound, MissingShard, BrokenShard, UnknownVersion, OtherTokenizer, UsageError: all are
        ShardprepErrors that say what was found and what to do. TypeError for an unknown argument.
    """
    is_validation = split == "validation"
    who = find_process_rank(rank, world_size)
    fields = boundary_names(boundaries)
    shifts = targets == "shifted"
    if shifts and "transformers" in fields:
        raise UsageError(
            found="targets='shifted', for a model that shifts labels itself",
            expected="other boundaries than 'transformers', or targets='same'",
        )
    if shifts and collate_fn is not None:
        raise UsageError("targets='shifted' is for the loader's own batches; leave out collate_fn or it")
    seq_len = None if seq_len is None else seq_len + shifts
    max_length = None if max_length is None else max_length + shifts
    tick_samples, group, sizes = choose_sizes(
        global_batch_size, group_by_length, batch_size=batch_size, world_size=who.world_size
    )
    if is_validation and len(sizes) > 1:
        raise UsageError(found=f"global_batch_size={global_batch_size}", expected="one size for validation")
    check_mixing(input_shards, weights, is_validation=is_validation)
    if padding == "max_length" and max_length is None:
        raise UsageError(found=f"padding={padding!r}", expected="max_length beside it")
    shards_of = find_sources(
        input_shards if isinstance(input_shards, Mapping) else {"all": input_shards},
        cache_dir=cache_dir,
        count_tokens=seq_len is not None or group > 1 or (weights is not None and weights_in == "tokens"),
        split=split,
    )
    shards = ShardSet([part for of_source in shards_of.values() for part in of_source.sources], split)
    tokenizer = choose_tokenizer(shards, model_id)
    samples = {
        name: make_samples(
            of_source,
            seq_len=seq_len,
            max_length=max_length,
            group=group,
            eos_token_id=tokenizer.eos_token_id,
            vocab_size=tokenizer.vocab_size if of_source.has_external else None,
            starts=bool(fields),
            keeps_tail=is_validation,
            origins=origins,
        )
        for name, of_source in shards_of.items()
    }
    run = make_run(
        samples,
        sizes,
        weights,
        weights_in,
        tick_samples=tick_samples,
        batches_per_tick=tick_samples // (batch_size * who.world_size),
        group=group,
        seed=seed,
        shuffle=shuffle and not is_validation,
        keeps_tail=is_validation,
        settings={
            "tokenizer": tokenizer.fingerprint,
            "seq_len": shards.row_tokens or seq_len or 0,
            "max_length": max_length or 0,
            "split": shards.split,
        },
    )
    if prefetch_factor is not None and not num_workers:
        found = f"prefetch_factor={prefetch_factor}, what workers read ahead, and none of them"
        raise UsageError(found=found, expected="num_workers of 1 at least", remedy="num_workers")
    if num_workers > (num_slots := run.order.num_slots // who.world_size):
        logger.warning(
            f"num_workers is {num_workers}, but only {num_slots} can share a rank's part of a global batch: "
            "the others are not started. A larger batch_size or global_batch_size gives work to more"
        )
        num_workers = num_slots
    has_blanks = shards.blank_id is not None
    padded = getattr(collate_fn, "batches", None)  # of a CausalLMCollator
    if not isinstance(padded, PaddedBatches):
        pad = PadToken(token="", token_id=0, reason="of a collate_fn")
        # Before a collate_fn gets samples their padding is cut off again, but where it stands for blanks.
        if collate_fn is None or has_blanks:
            pad = choose_pad_token(tokenizer)
        padded = PaddedBatches(
            pad=pad,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_to_length=max_length if padding == "max_length" else None,
            num_beyond=int(shifts),
        )
        if collate_fn is None:
            log_pad_token(pad, tokenizer.eos_token_id)
    if padded.pad.token:
        tokenizer.pads_with = padded.pad.token
    step_batches = StepBatches(
        batch_size=batch_size,
        padded=replace(padded, has_masks=shards.has_masks, has_blanks=has_blanks),
        collate_fn=collate_fn,
        boundaries=fields,
        shifts_targets=shifts,
        origins=origins,
    )
    loader = TokenLoader(
        run,
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=who,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        amend=amend,
        num_workers=num_workers,
        prefetch_factor=(prefetch_factor or 2) if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
    )
    if who.rank == 0:
        logger.info(loader.describe())
        has_end = all(data.spec.append_eos or data.spec.has_rows for data in shards.datasets)
        if not (has_end or seq_len is not None or is_validation or tokenizer.eos_token_id is None):
            logger.warning(
                "documents end without EOS, so a model fine-tuned on them never learns to stop; "
                "pass seq_len=, or plan the data with --append_eos"
            )
    return loader
