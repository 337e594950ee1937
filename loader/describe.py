"""A loader in words: what it reads and delivers, and where each source of its run stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.run import CYCLE, Position, Run

if TYPE_CHECKING:
    from loader.shards import ShardSet
    from loader.token_loader import TokenLoader


def describe(run: Run, now: Position, until: Position) -> str:
    """Return the sources with their epochs now and at a later position, and what holds by step, as text."""
    step, later_step = run.step_of(now), run.step_of(until)
    shares = run.held_from(step)[0].shares
    epochs, later = run.source_epochs(now), run.source_epochs(until)
    tokens_of = {
        source.name: shares.get(source.name, 0) * source.samples.mean_tokens
        for source in run.sources
        if source.samples is not None
    }
    lines = [f"{len(run.sources)} {'sources' if len(run.sources) > 1 else 'source'} at step {step}"]
    width = max(len(source.name) for source in run.sources)
    for source in run.sources:
        name, num_samples = source.name, source.order.num_samples
        share, tokens = "dropped", "not in this loader"
        if source.samples is not None:
            of_tokens = tokens_of[name] / max(sum(tokens_of.values()), 1)
            share = f"{shares.get(name, 0) / CYCLE:.1%} of samples, {of_tokens:.1%} of tokens"
            tokens = f"about {num_samples * source.samples.mean_tokens:.3g} tokens"
        lines.append(
            f"  {name:{width}}  {share}; {epochs[name]:.2f} epochs, {later[name]:.2f} at step {later_step}; "
            f"{num_samples:,} samples, {tokens}, data {source.data}"
        )
    amended = {stage.step for stage in run.stages if stage.is_amended}
    lines.append("what holds, by share of samples")
    lines += [f"  {held}{' (amended)' if held.step in amended else ''}" for held in run.held_from(0)]
    rules = dict.fromkeys(samples.shards.split_words for samples in run.samples)
    return "\n".join([*lines, *filter(None, rules)])


def settings_block(loader: TokenLoader, shards: ShardSet) -> str:
    """Say what is read, what a sample and a batch are, the steps of an epoch, the order, and who reads."""
    run, step_batches, of_run = loader.run, loader.step_batches, loader.fingerprint
    num_batches = run.batches_in_step(0)
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
    order = "as the shards stand, not shuffled"
    if run.is_validation:
        order = f"as the shards stand, the last batch with {run.order.num_fillers} samples without labels"
    elif run.order.shuffle:
        order = f"shuffled anew each epoch, seed {run.seed}"
        order += f", samples of similar length in groups of {run.order.group}" if run.order.group > 1 else ""
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
        f"order: {order}",
        *map(str, run.held_from(0)),
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
