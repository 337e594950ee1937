"""The settings of a loader and what follows from them, as one block of the log: rank 0 says it at INFO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.mixture import Mixture

if TYPE_CHECKING:
    from loader.shards.shard_set import ShardSet
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
