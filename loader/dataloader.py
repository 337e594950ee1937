"""``get_llama3_dataloader``: makes the stages one after another; each checks its own arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypeVar, cast

import torch

from loader.batches import (
    Collate,
    PaddedBatches,
    PadToken,
    StepBatches,
    Targets,
    check_padding,
    check_targets,
    choose_pad_token,
    log_pad_token,
)
from loader.boundaries import Boundary, boundary_names
from loader.find_shards import (
    InputShards,
    ShardSet,
    SplitName,
    check_choice,
    find_sources,
)
from loader.mixture import Mixture, Schedule
from loader.order import ORDER_VERSION, Order
from loader.ranks import find_process_rank
from loader.reading import ReaderContext, ReaderIndex
from loader.samples import LongDocuments, SampleRules, Samples, make_samples
from loader.state import Ramp, RunSteps, ramp_sizes
from loader.token_loader import TokenLoader
from loader.tokenizer import choose_tokenizer
from loader.workers import (
    MixedSamples,
    Plan,
    WeightsIn,
    check_batch,
    check_mixing,
    group_size,
    make_order,
    mix,
    rank_slots,
    whole_number,
)
from shardprep.errors import UsageError
from shardprep.removed import ARGUMENTS


def settings_block(loader: TokenLoader, shards: ShardSet) -> str:
    """What is read, what a sample and a batch are, the steps of an epoch, and who reads."""
    order, who, run = loader.order, loader.process_rank, loader.fingerprint
    micro_batches = loader.num_accumulated
    accumulated = "" if micro_batches == 1 else f" x {micro_batches} batches per step"
    data = f"{shards.num_shards:,} shards, {order.num_samples:,} samples"
    samples = f"{loader.step_batches.batch_size} per batch{accumulated} x {who.world_size} ranks"
    steps = f"{loader.run.steps_in(0):,} steps, {len(loader):,} batches per rank"
    ramp = f"; global_batch_size {run['global_batch_size']}" if loader.run.is_ramped else ""
    global_batch = order.global_batch_size * loader.run.order_steps_in(0)
    lines = [
        f"loader of {data}, about {shards.mean_tokens * shards.num_samples:.3g} tokens",
        f"sample: {_sample(loader)}",
        f"global batch: {global_batch} samples = {samples}{ramp}; {_padding(loader)}",
        f"epoch: {steps}; {order.num_left_out:,} samples left out, others each epoch",
        f"order: {_order(loader)}",
        *filter(None, [shards.split_words]),
        f"readers: {_workers(loader)}",
        f"data {run['data'][:12]}, tokenizer {run['tokenizer'][:12]}",
    ]
    return "\n  ".join(lines)


def _sample(loader: TokenLoader) -> str:
    run, fields = loader.fingerprint, loader.step_batches.boundaries
    if run["seq_len"]:
        apart = f"boundaries {', '.join(fields)}" if fields else "attention crosses documents (no boundaries)"
        shifted = "; labels one place ahead" if loader.step_batches.shifts_targets else ""
        return f"a row of {run['seq_len']} tokens; {apart}{shifted}"
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
_Function = TypeVar("_Function", bound=Callable[..., Any])


def arguments_by_group(docstring: str) -> dict[str, dict[str, str]]:
    """The arguments that a docstring of this module explains: group -> name -> text."""
    groups: dict[str, dict[str, str]] = {}
    text = inspect.cleandoc(docstring).partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    for group in re.split(r"^ {4}(?=\S)", text, flags=re.MULTILINE)[1:]:
        name, _, arguments = group.partition(":\n")
        items = re.split(r"^ {8}(?=\S)", arguments, flags=re.MULTILINE)[1:]
        explained = (item.partition(": ") for item in items)
        groups[name] = {argument: " ".join(words.split()) for argument, _, words in explained}
    return groups


def _with_hints(make: _Function) -> _Function:
    """Answer an unknown argument with the nearest name, and all by group; one that went, with what to do."""
    known = inspect.signature(make).parameters

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known.keys():
            if name in ARGUMENTS:
                raise TypeError(f"get_llama3_dataloader has no argument {name!r} any more: {ARGUMENTS[name]}")
            near = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {near[0]!r}" if near else ""
            groups = arguments_by_group(make.__doc__ or "").items()
            every = "; ".join(f"{group.lower()}: {', '.join(names)}" for group, names in groups)
            raise TypeError(f"get_llama3_dataloader has no argument {name!r}{hint}; its arguments: {every}")
        return make(*args, **options)

    return cast(_Function, call)


@_with_hints
def get_llama3_dataloader(
    input_shards: InputShards | Mapping[str, InputShards],
    batch_size: int,
    model_id: str | os.PathLike[str] | None = None,
    *,
    split: SplitName | None = None,
    global_batch_size: int | None = None,
    batch_size_schedule: Ramp | None = None,
    group_by_length: bool | int = False,
    padding: Padding = "longest",
    pad_to_multiple_of: int | None = None,
    collate_fn: Collate | None = None,
    origins: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    weights: Mapping[str, float] | None = None,
    weights_schedule: Schedule | None = None,
    weights_in: WeightsIn = "tokens",
    amend: bool = False,
    seq_len: int | None = None,
    boundaries: Boundary | Sequence[Boundary] = (),
    targets: Targets = "same",
    max_length: int | None = None,
    long_documents: LongDocuments = "truncate",
    num_workers: int = 4,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
    multiprocessing_context: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    device_mesh: Any = None,
    process_group: Any = None,
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
                a list of these. A folder is the whole data set; an incomplete one is refused. Or several
                sources to mix, by name: ``{"web": ..., "code": ...}``.
            model_id: for tars that shardprep did not write, the model whose tokenizer made them. A data set
                brings its own tokenizer; if you pass the model too, it must be the same.
            split: ``"train"`` leaves out the documents that ``"validation"`` gives: those that
                ``plan --validation_fraction`` chose. Of data sets that were planned without it
                ``"validation"`` gives all. A validation loader has one fixed order and gives each document
                once. It fills its last global batch up with samples whose labels are all -100, so that all
                ranks get equally many batches.

        What a batch is:
            batch_size: samples per batch on each rank.
            global_batch_size: samples of one optimizer step, on all ranks, accumulation included. It alone
                fixes the order: keep it when the number of ranks changes, or see ``amend``. Default:
                batch_size x world_size.
            batch_size_schedule: instead of ``global_batch_size``, its size from a step on: ``[(0, 256),
                (1000, 512)]``. Batches stay of ``batch_size``, and more of them are accumulated: see
                ``loader.num_accumulated`` and ``loader.ends_step``. It is part of the state.
            group_by_length: documents of similar length side by side, in groups of this many samples; True:
                of ``batch_size``. It is part of the order: pass the number if you resume with another
                ``batch_size``.
            padding: ``"longest"`` pads to the longest sample of a batch, ``"max_length"`` to one width.
            pad_to_multiple_of: round the width of padded batches up to a multiple of this.
            collate_fn: called with a list of ``{"input_ids": list[int]}``, in the training process. Default:
                ``input_ids``, ``attention_mask`` and ``labels``, bit for bit as transformers'
                DataCollatorForLanguageModeling makes them.
            origins: True: batches have ``origins`` int64[documents, 6]: row and place in the batch, then
                source, shard, sample and document, which ``loader.origin`` resolves to file and byte. Take
                them out before ``model(**batch)``.

        Order and mixing:
            seed: of the shuffle. Equal seeds give equal global batches on any number of ranks and workers.
            shuffle: False: global batch k is samples ``[k L, (k + 1) L)``, L being ``global_batch_size``.
            weights: share of each source, ``{"web": 0.7, "code": 0.3}``. Each source has its own epochs, see
                ``loader.source_epochs``.
            weights_schedule: instead of ``weights``, the weights from a global step on: ``[(0, {...}),
                (80_000, {...})]``. It is part of the state: keep it when you resume.
            weights_in: weights are shares of ``"tokens"``, by the mean of each source, or of ``"samples"``.
            amend: go on from a state of other weights, sources, folders of a source, ``global_batch_size`` or
                schedules: these hold from its step on, and each source goes on at its own place. Global
                batches must be multiples of the run's first one. The default refuses such a state, and says
                what differs.

        Packing and labels:
            seq_len: pack documents into full rows of this many tokens, with EOS between documents.
            boundaries: keep attention inside each document of packed rows. ``"transformers"``: the fields
                that ``model(**batch)`` of a transformers model needs, no ``attention_mask``, and
                ``use_cache`` 0. Not every model keeps documents apart by them: ``check_boundaries(model,
                batch)`` tells. For other models one or several of ``"position_ids"``, ``"segment_ids"``,
                ``"cu_seqlens"``. The first label of each document is -100.
            targets: ``"same"``: labels are the ids, and the model shifts them, as transformers' models do.
                ``"shifted"``: ``labels[:, t]`` is what follows ``input_ids[:, t]``, for loops like those of
                Megatron, nanoGPT and torchtitan. Plan packed rows with a ``--seq_len`` that is one larger.
            max_length: tokens at which documents that are not packed are cut; see ``long_documents``.
            long_documents: ``"truncate"`` drops the rest and counts it in ``loader.metrics``, ``"error"``
                refuses.

        Processes and workers:
            num_workers: processes that read, on each rank; more than ``global_batch_size / (world_size x
                group_by_length)`` would idle.
            prefetch_factor: chunks (up to 1 MiB of batches) that each worker reads ahead. Default: 2.
            pin_memory: batches in pinned memory. Default: where there is CUDA.
            persistent_workers: keep workers between epochs; they read on into the next one.
            multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"`` (Python 3.14's default). The
                last two run the top of the training script again in each worker: keep what trains behind ``if
                __name__ == "__main__":``.
            rank: of data parallelism. Default: of torch.distributed, or of the launcher.
            world_size: number of ranks of data parallelism. Default: likewise.
            device_mesh: instead of both, the data-parallel dimension of a DeviceMesh, ``mesh["dp"]``.
            process_group: instead of both, the data-parallel process group.

        Storage:
            cache_dir: where webdataset copies tars that are no local files.

    Returns:
        A TokenLoader; see there for epochs and for the state. Batches hold int64[batch_size, seq]
        ``input_ids``, ``labels``, -100 where there is padding, and ``attention_mask`` (not with
        ``boundaries="transformers"``).

    Raises:
        NotFound, MissingShard, BrokenShard, UnknownVersion, OtherTokenizer, UsageError: all are
        ShardprepErrors that say what was found and what to do. TypeError for an unknown argument.
    """
    _check_types(locals())
    is_validation = split == "validation"
    who = find_process_rank(rank, world_size, device_mesh=device_mesh, process_group=process_group)
    sizes: Ramp = RunSteps.sizes
    if batch_size_schedule is not None:
        global_batch_size, sizes = ramp_sizes(
            batch_size_schedule, global_batch_size, is_validation=is_validation
        )
    global_batch_size = check_batch(batch_size, global_batch_size, who.world_size)
    fields = boundary_names(boundaries)
    shifts = check_targets(targets, fields, has_collate_fn=collate_fn is not None)
    rules = SampleRules(
        seq_len=None if seq_len is None else seq_len + shifts,
        max_length=None if max_length is None else max_length + shifts,
        long_documents=long_documents,
        group=group_size(group_by_length, batch_size),
    )
    if split is not None:
        check_choice("split", split, SplitName)
    mixes = check_mixing(input_shards, weights, weights_schedule, weights_in, is_validation=is_validation)
    check_padding(padding, max_length, long_documents)
    sources = find_sources(
        input_shards if isinstance(input_shards, Mapping) else {"all": input_shards},
        cache_dir=cache_dir,
        count_tokens=rules.needs_lengths or (mixes and weights_in == "tokens"),
        split=split,
    )
    shards = ShardSet([source for part in sources.values() for source in part.sources], split)
    context = ReaderContext(reader_index=ReaderIndex(number=who.rank, count=who.world_size))
    tokenizer = choose_tokenizer(shards, model_id)
    every = [
        make_samples(
            part,
            rules,
            eos_token_id=tokenizer.special.eos_token_id,
            vocab_size=tokenizer.vocab_size if part.has_external else None,
            starts=bool(fields),
            keeps_tail=is_validation,
            origins=origins,
            context=context,
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
    )
    samples: Samples | MixedSamples = every[0]
    order: Order | Mixture = orders[0]
    if mixes:
        order, samples = mix(
            sources,
            every,
            orders,
            run,
            weights=weights,
            weights_schedule=weights_schedule,
            weights_in=weights_in,
        )
    workers = _worker_options(
        num_workers,
        len(slots),
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        multiprocessing_context=multiprocessing_context,
    )
    pad = getattr(collate_fn, "pad", None)
    if collate_fn is None:
        pad = choose_pad_token(tokenizer.special)
        log_pad_token(pad, tokenizer.special.eos_token_id)
        collate_fn = PaddedBatches(
            pad=pad,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_to_length=rules.max_length if padding == "max_length" else None,
            num_beyond=int(shifts),
        )
    if isinstance(pad, PadToken):
        tokenizer.pad_with(pad.token)
    pad_for_blanks = None
    if any(part.blank_id is not None for part in sources.values()):
        token = pad if isinstance(pad, PadToken) else choose_pad_token(tokenizer.special)
        pad_for_blanks = token.token_id
    step_batches = StepBatches(
        batch_size=batch_size,
        row_tokens=samples.row_tokens,
        boundaries=fields,
        collate_fn=collate_fn,
        shifts_targets=shifts,
        origins=origins,
        has_masks=any(part.has_masks for part in sources.values()),
        pad_for_blanks=pad_for_blanks,
    )
    fingerprint = _fingerprint(rules, shards, order, run, tokenizer.fingerprint)
    loader = TokenLoader(
        Plan(order=order, samples=samples, run=run, fingerprint=fingerprint),
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=who,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        amend=amend,
        **workers,
    )
    if who.rank == 0:
        logger.info(settings_block(loader, shards))
        ends = [data.spec.append_eos or data.spec.has_rows for data in shards.datasets]
        if seq_len is not None and tokenizer.ends_with_eos and not all(ends):
            logger.warning(
                "the tokenizer ended each document with EOS by itself, and seq_len= puts another one "
                "behind it; plan into a new folder, which will know"
            )
        has_end = seq_len is not None or all(ends) or tokenizer.ends_with_eos
        if not (has_end or is_validation or tokenizer.special.eos_token_id is None):
            logger.warning(
                "documents end without EOS, so a model fine-tuned on them never learns to stop; "
                "pass seq_len=, or plan the data with --append_eos"
            )
    return loader


def _fingerprint(
    rules: SampleRules, shards: ShardSet, order: Order | Mixture, run: RunSteps, tokenizer: str
) -> dict[str, Any]:
    """All that fixes which sample is where, and the ramps. What else shapes a batch is not in it."""
    split = {} if shards.split is None else {"split": shards.split}
    return {
        "law_version": ORDER_VERSION,
        "data": shards.fingerprint,
        "tokenizer": tokenizer,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "global_batch_size": run.history(order.global_batch_size),
        "seq_len": shards.row_tokens or rules.seq_len or 0,
        "group_by_length": order.group,
        "max_length": rules.max_length or 0,
        "long_documents": rules.long_documents,
        "num_samples": order.num_samples,
        **order.sizes,
        **split,
        **({"keeps_tail": True} if order.keeps_tail else {}),
    }


_FROM_0 = ("pad_to_multiple_of", "num_workers", "rank")  # other whole numbers are 1 at least
# By an argument's name, or by the type in the signature.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (lambda value: isinstance(value, Integral), "a whole number"),
    "model_id": (
        lambda value: isinstance(value, (str, os.PathLike)),
        "a model's folder or its name on the hub",
    ),
    "collate_fn": (callable, "a function of a list of samples"),
    "bool": (lambda value: value in (True, False), "True or False"),
}


def _check_types(given: Mapping[str, Any]) -> None:
    """Raises UsageError for the first argument that is of no type that it may have."""
    for name, parameter in inspect.signature(get_llama3_dataloader).parameters.items():
        value, kind = given[name], parameter.annotation.removesuffix(" | None")
        if value is None and kind != parameter.annotation:
            continue
        is_right, expected = _EXPECTED.get(name) or _EXPECTED.get(kind) or (None, "")
        if is_right is not None and not is_right(value):
            raise UsageError.of_value(name, value, expected)
        if is_right is None and kind == "int":
            whole_number(name, value, least=int(name not in _FROM_0))


def _worker_options(
    num_workers: int,
    num_slots: int,
    *,
    prefetch_factor: int | None,
    persistent_workers: bool,
    multiprocessing_context: Any,
) -> dict[str, Any]:
    """What torch's DataLoader wants to know of workers, of which each has a slot at least."""
    asked = operator.index(num_workers)
    if prefetch_factor is not None and not asked:
        raise UsageError(
            f"prefetch_factor={prefetch_factor} says what workers read ahead, and num_workers is 0; "
            "leave it out, or pass num_workers",
            found=f"prefetch_factor={prefetch_factor}",
            remedy="num_workers",
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
