"""Describe a loader for people: its sources, their shares and fingerprints, the order and all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loader.order.mixture import Position, Run
from loader.read.samples import Samples


def describe(
    headline: str,
    run: Run,
    now: Position,
    samples: Mapping[str, Samples],
    boundaries: Sequence[str],
) -> str:
    """Return the text of ``TokenLoader.describe``. ``samples``: of the sources that the loader can read."""
    num_left_out = sum(source.order.num_left_out for source in run.sources)
    left_out = "no samples left out"
    if num_left_out:
        left_out = f"{num_left_out:,} samples left out, different ones each epoch"
    lines = [
        headline,
        f"sample: {_sample(run, boundaries)}",
        f"order: {_order(run)}",
        f"epoch: {run.steps_in(run.epoch_of(now.step)):,} steps, {left_out}",
    ]
    lines += _sources(run, now, samples)
    amended_steps = {stage.step for stage in run.stages if stage.is_amended}
    for stage in run.stages_from(0):
        lines.append(f"{stage}, amended" if stage.step in amended_steps else str(stage))
    names = {source.name for source in run.sources}
    splits = {each.shards.split_text for name, each in samples.items() if name in names}
    lines += sorted(splits - {""})
    return "\n  ".join(lines)


def _sample(run: Run, boundaries: Sequence[str]) -> str:
    if run.row_tokens:
        attention = "attention crosses documents (no boundaries)"
        if boundaries:
            attention = f"boundaries {', '.join(boundaries)}"
        return f"a row of {run.row_tokens} tokens; {attention}"
    max_length = run.settings["max_length"]
    if max_length:
        return f"a document, of at most {max_length} tokens"
    return "a document of any length"


def _order(run: Run) -> str:
    order = "that of the shards, not shuffled"
    if run.order.shuffle:
        order = f"shuffled with seed {run.seed}"
    if run.order.group > 1:
        order += f", samples of similar length in groups of {run.order.group}"
    return order


def _sources(run: Run, now: Position, samples: Mapping[str, Samples]) -> list[str]:
    """Return a line for each source of the run. One that the loader cannot read was dropped."""
    epochs = run.source_epochs(now)
    weights = run.stages_from(now.step)[0].weights
    tokens: dict[str, float] = {}  # of each source, in an average sample of the mixture
    for source in run.sources:
        if source.name in samples:
            tokens[source.name] = weights.get(source.name, 0) * samples[source.name].mean_tokens
    all_tokens = sum(tokens.values()) or 1
    lines: list[str] = []
    for source in run.sources:
        name = source.name
        share = "dropped"
        num_tokens = ""
        if name in tokens:
            share = f"{weights.get(name, 0):.1%} of samples, {tokens[name] / all_tokens:.1%} of tokens"
            num_tokens = f" of about {samples[name].mean_tokens:.3g} tokens"
        lines.append(
            f"source {name}: {share}; {epochs[name]:.2f} epochs so far; "
            f"{source.order.num_samples:,} samples{num_tokens}, data {source.data}"
        )
    return lines
