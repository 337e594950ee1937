"""A loader in words: what an epoch is, where each source of its run stands, and what holds by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.run import CYCLE

if TYPE_CHECKING:
    from loader.token_loader import TokenLoader


def describe(loader: TokenLoader) -> str:
    """Return what a loader reads and delivers, and where each source stands now, as text."""
    run, now = loader.run, loader.progress.delivered
    step, epoch, epochs = now.step, run.epoch_of(now.step), run.source_epochs(now)
    shares = run.held_from(step)[0].shares
    tokens_of = {  # in a cycle
        source.name: shares.get(source.name, 0) * source.samples.mean_tokens
        for source in run.sources
        if source.samples is not None
    }
    sample = f"a document, of at most {run.settings['max_length'] or 'any number of'} tokens"
    if run.row_tokens:
        fields = ", ".join(loader.step_batches.boundaries)
        apart = f"boundaries {fields}" if fields else "attention crosses documents (no boundaries)"
        sample = f"a row of {run.row_tokens} tokens; {apart}"
    order = f"shuffled with seed {run.seed}" if run.order.shuffle else "as the shards stand, not shuffled"
    if run.order.group > 1:
        order += f", samples of similar length in groups of {run.order.group}"
    num_left_out = sum(source.order.num_left_out for source in run.sources)
    lines = [
        f"{loader!r}, at step {step}",
        f"sample: {sample}",
        f"order: {order}",
        f"epoch: {run.steps_in(epoch):,} steps; {num_left_out:,} samples are left out, others each epoch",
    ]
    for source in run.sources:
        name, num_samples = source.name, source.order.num_samples
        share, num_tokens = "dropped", ""
        if source.samples is not None:
            of_tokens = tokens_of[name] / max(sum(tokens_of.values()), 1)
            share = f"{shares.get(name, 0) / CYCLE:.1%} of samples, {of_tokens:.1%} of tokens"
            num_tokens = f" of about {source.samples.mean_tokens:.3g} tokens"
        lines.append(
            f"source {name}: {share}; {epochs[name]:.2f} epochs so far; {num_samples:,} samples{num_tokens}, "
            f"data {source.data}"
        )
    amended = {stage.step for stage in run.stages if stage.is_amended}
    lines += [f"{held}{' (amended)' if held.step in amended else ''}" for held in run.held_from(0)]
    lines += filter(None, dict.fromkeys(samples.shards.split_words for samples in run.samples))
    return "\n  ".join(lines)
