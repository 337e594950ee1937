"""A loader in words: what it reads and delivers, and where each source of its run stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.run import CYCLE, Held, Position
from loader.sources import Plan

if TYPE_CHECKING:
    from loader.shards import ShardSet
    from loader.token_loader import TokenLoader


def describe(plan: Plan, now: Position, until: Position) -> str:
    """Return the sources with their epochs now and at a later position, and what holds by step, as text."""
    run, step, later_step = plan.run, plan.run.step_of(now), plan.run.step_of(until)
    held = run.held_from(step)[0]
    epochs, later = run.source_epochs(now), run.source_epochs(until)
    weighed = {
        source.name: held.shares.get(source.name, 0) * samples.mean_tokens
        for source, samples in zip(run.sources, plan.samples, strict=True)
        if samples is not None
    }
    lines = [f"{len(run.sources)} {'sources' if len(run.sources) > 1 else 'source'} at step {step}"]
    width = max(len(source.name) for source in run.sources)
    for source, samples in zip(run.sources, plan.samples, strict=True):
        name, num_samples = source.name, source.order.num_samples
        share, tokens = "dropped", "not in this loader"
        if samples is not None:
            of_tokens = weighed[name] / max(sum(weighed.values()), 1)
            share = f"{held.shares.get(name, 0) / CYCLE:.1%} of samples, {of_tokens:.1%} of tokens"
            tokens = f"about {num_samples * samples.mean_tokens:.3g} tokens"
        lines.append(
            f"  {name:{width}}  {share}; {epochs[name]:.2f} epochs, {later[name]:.2f} at step {later_step}; "
            f"{num_samples:,} samples, {tokens}, data {source.data}"
        )
    amended = {stage.step for stage in run.stages if stage.is_amended}
    lines.append("what holds, by share of samples")
    lines += [
        f"  from step {each.step}{' (amended)' if each.step in amended else ''}: {_words(each)}"
        for each in run.held_from(0)
    ]
    rules = dict.fromkeys(samples.shards.split_words for samples in plan.present)
    return "\n".join([*lines, *filter(None, rules)])


def _words(held: Held) -> str:
    shares = ", ".join(f"{name} {share / CYCLE:.1%}" for name, share in held.shares.items())
    return f"{shares}; global batches of {held.global_batch_size}"


def settings_block(loader: TokenLoader, shards: ShardSet) -> str:
    """Say what is read, what a sample and a batch are, the steps of an epoch, the order, and who reads."""
    run, step_batches, of_run = loader.run, loader.step_batches, loader.fingerprint
    order, num_batches = run.sources[0].order, run.batches_in_step(0)
    num_samples = sum(source.order.num_samples for source in run.sources)
    num_left_out = sum(source.order.num_left_out for source in run.sources)
    if of_run["seq_len"]:
        fields = ", ".join(step_batches.boundaries)
        apart = f"boundaries {fields}" if fields else "attention crosses documents (no boundaries)"
        sample = f"a row of {of_run['seq_len']} tokens; {apart}"
        sample += "; labels one place ahead" if step_batches.shifts_targets else ""
    else:
        max_length = of_run["max_length"]
        sample = f"a document, cut at {max_length} tokens" if max_length else "a whole document"
    accumulated = "" if num_batches == 1 else f" x {num_batches} batches per step"
    batches = f"{step_batches.batch_size} per batch{accumulated} x {loader.process_rank.world_size} ranks"
    if run.is_validation:
        shuffled = f"as the shards stand, the last batch with {order.num_fillers} samples without labels"
    elif order.shuffle:
        shuffled = f"shuffled anew each epoch, seed {run.seed}"
        shuffled += f", samples of similar length in groups of {order.group}" if order.group > 1 else ""
    else:
        shuffled = "as the shards stand, not shuffled"
    readers = "this process, no workers"
    if loader.num_workers:
        kept = "kept between epochs" if loader.persistent_workers else "started anew each epoch"
        readers = f"{loader.num_workers} workers per rank, {loader.prefetch_factor} chunks ahead each, {kept}"
    tokens = f"about {shards.mean_tokens * shards.num_samples:.3g} tokens"
    left_out = f"{num_left_out:,} samples left out, others each epoch"
    lines = [
        f"loader of {shards.num_shards:,} shards, {num_samples:,} samples, {tokens}",
        f"sample: {sample}",
        f"global batch: {batches}; {_padding(loader)}",
        f"epoch: {run.steps_in(0):,} steps, {len(loader):,} batches per rank; {left_out}",
        f"order: {shuffled}",
        *(f"from step {held.step}: {_words(held)}" for held in run.held_from(0)),
        *filter(None, [shards.split_words]),
        f"readers: {readers}{', pinned memory' if loader.pin_memory else ''}",
        f"data {shards.fingerprint[:12]}, tokenizer {of_run['tokenizer'][:12]}",
    ]
    return "\n  ".join(lines)


def _padding(loader: TokenLoader) -> str:
    collate, padded = loader.step_batches.collate_fn, loader.step_batches.padded
    if not loader.step_batches.is_own:
        return f"collated by {getattr(collate, '__name__', type(collate).__name__)}"
    width = f"to {padded.pad_to_length} tokens" if padded.pad_to_length else "to the longest of a batch"
    width += f", to a multiple of {padded.pad_to_multiple_of}" if padded.pad_to_multiple_of else ""
    if loader.step_batches.row_tokens:
        width = "only in rows that are not full"
    return f"padding {width}, with {padded.pad.token} (id {padded.pad.token_id})"
