"""A loader in words: what it reads and delivers, and where each source of its run stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.run import CYCLE, Held, Position
from loader.sources import Plan

if TYPE_CHECKING:
    from loader.shards import ShardSet
    from loader.token_loader import TokenLoader


def describe(plan: Plan, now: Position, until: Position) -> str:
    """Return the tree of sources, with their epochs now and at a later position, and what holds by step."""
    run = plan.run
    held = run.held_from(run.step_of(now))[0]
    shares = {source.name: held.shares.get(source.name, 0) / CYCLE for source in run.sources}
    samples = {source.name: each for source, each in zip(run.sources, plan.samples, strict=True)}
    means = {name: each.mean_tokens for name, each in samples.items() if each is not None}
    all_tokens = sum(shares[name] * mean for name, mean in means.items())
    epochs, later = run.source_epochs(now), run.source_epochs(until)
    width = max(map(len, shares))
    lines = [f"{len(run.sources)} sources at step {run.step_of(now)}"]
    if not run.is_mixture:
        lines = [f"one data set at step {run.step_of(now)}"]
    for source in run.sources:
        name, num_samples = source.name, source.order.num_samples
        tokens, share = "not in this loader", "dropped"
        if name in means:
            tokens = f"about {num_samples * means[name]:.3g} tokens"
            of_tokens = shares[name] * means[name] / all_tokens if all_tokens else 0.0
            share = f"{shares[name]:.1%} of samples, {of_tokens:.1%} of tokens"
        lines.append(
            f"  {name:{width}}  {share}; {epochs[name]:.2f} epochs, {later[name]:.2f} at step "
            f"{run.step_of(until)}; {num_samples:,} samples, {tokens}, data {source.data}"
        )
    amended = {stage.step for stage in run.stages if stage.is_amended}
    lines.append("what holds, by share of samples")
    for each in run.held_from(0):
        mark = " (amended)" if each.step in amended else ""
        lines.append(f"  from step {each.step}{mark}: {_held(each)}")
    rules = dict.fromkeys(each.shards.split_words for each in plan.present)
    return "\n".join([*lines, *filter(None, rules)])


def _held(held: Held) -> str:
    weights = ", ".join(f"{name} {share / CYCLE:.1%}" for name, share in held.shares.items())
    return f"{weights}; global batches of {held.global_batch_size}"


def settings_block(loader: TokenLoader, shards: ShardSet) -> str:
    """Say what is read, what a sample and a batch are, the steps of an epoch, and who reads."""
    who, run = loader.process_rank, loader.run
    held = run.held_from(0)
    num_batches = run.batches_in_step(0)
    accumulated = "" if num_batches == 1 else f" x {num_batches} batches per step"
    batches = f"{loader.step_batches.batch_size} per batch{accumulated} x {who.world_size} ranks"
    later = "".join(f"; from step {each.step} on {_held(each)}" for each in held[1:])
    tokens = shards.mean_tokens * shards.num_samples
    num_samples = sum(source.order.num_samples for source in run.sources)
    num_left_out = sum(source.order.num_left_out for source in run.sources)
    left_out = f"{num_left_out:,} samples left out, others each epoch"
    lines = [
        f"loader of {shards.num_shards:,} shards, {num_samples:,} samples, about {tokens:.3g} tokens",
        f"sample: {_sample(loader)}",
        f"global batch: {held[0].global_batch_size} samples = {batches}{later}; {_padding(loader)}",
        f"epoch: {run.steps_in(0):,} steps, {len(loader):,} batches per rank; {left_out}",
        f"order: {_order(loader)}",
        *filter(None, [shards.split_words]),
        f"readers: {_workers(loader)}",
        f"data {shards.fingerprint[:12]}, tokenizer {loader.fingerprint['tokenizer'][:12]}",
    ]
    return "\n  ".join(lines)


def _sample(loader: TokenLoader) -> str:
    fingerprint, fields = loader.fingerprint, loader.step_batches.boundaries
    if fingerprint["seq_len"]:
        apart = f"boundaries {', '.join(fields)}" if fields else "attention crosses documents (no boundaries)"
        shifted = "; labels one place ahead" if loader.step_batches.shifts_targets else ""
        return f"a row of {fingerprint['seq_len']} tokens; {apart}{shifted}"
    if not fingerprint["max_length"]:
        return "a whole document"
    return f"a document, cut at {fingerprint['max_length']} tokens"


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
    run = loader.run
    order = run.sources[0].order
    if order.keeps_tail:
        return (
            f"as the shards stand, the last batch filled up with {order.num_fillers} samples without labels"
        )
    if not order.shuffle:
        return "as the shards stand, not shuffled"
    grouped = f", samples of similar length in groups of {order.group}" if order.group > 1 else ""
    mixed = f", sources mixed by {_held(run.held_from(0)[0])}" if run.is_mixture else ""
    return f"shuffled anew each epoch, seed {run.seed}{grouped}{mixed}"


def _workers(loader: TokenLoader) -> str:
    pinned = ", pinned memory" if loader.pin_memory else ""
    if not loader.num_workers:
        return f"this process, no workers{pinned}"
    kept = "kept between epochs" if loader.persistent_workers else "started anew each epoch"
    return (
        f"{loader.num_workers} workers per rank, {loader.prefetch_factor} chunks ahead each, {kept}{pinned}"
    )
