"""What a loader reads, for people: its sources, their shares and epochs, and the amendments."""

from __future__ import annotations

from loader.mixture import CYCLE_STEPS, Mixture
from loader.order import Order
from loader.samples import Samples
from loader.workers import MixedSamples


def describe(
    order: Order | Mixture, samples: Samples | MixedSamples, data: str, step: int, until: int
) -> str:
    """The tree of sources at a step of the order, with their epochs then and at a later step.

    ``data``: the fingerprint of one data set, where no sources are mixed.
    """
    if not isinstance(order, Mixture):
        size = f"{order.num_samples:,} samples, about {samples.mean_tokens * samples.num_samples:.3g} tokens"
        now_and_then = (step / order.steps_per_epoch, until / order.steps_per_epoch)
        return f"one data set: {size}, data {data[:16]}, {_epochs(*now_and_then, until)}"
    held = next(stage for stage in reversed(order.stages) if stage.first_step <= step)
    shares = dict(zip(order.names, (held.cycle_counts / CYCLE_STEPS).tolist(), strict=True))
    sources = (
        dict(zip(order.names, samples.sources, strict=True)) if isinstance(samples, MixedSamples) else {}
    )
    means = {name: source.mean_tokens for name, source in sources.items() if source is not None}
    all_tokens = sum(shares[name] * mean for name, mean in means.items())
    now, then, width = order.epochs(step), order.epochs(until), max(map(len, order.names))
    lines = [f"mixture of {len(order.names)} sources at step {step}"]
    for name, of_source, found in zip(order.names, order.orders, order.data, strict=True):
        if name in means:
            tokens = f"{of_source.num_samples * means[name]:.3g} tokens"
            share = f"{shares[name]:.1%} of samples, {shares[name] * means[name] / all_tokens:.1%} of tokens"
        else:
            tokens, share = "not in this loader", "dropped"
        lines.append(
            f"  {name:{width}}  {share}; {_epochs(now[name], then[name], until)}; "
            f"{of_source.num_samples:,} samples, {tokens}, data {found or 'unknown'}"
        )
    lines.append("what held, by share of samples")
    for stage in order.stages:
        counts = zip(order.names, stage.cycle_counts.tolist(), strict=True)
        weights = ", ".join(f"{name} {count / CYCLE_STEPS:.1%}" for name, count in counts if count)
        lines.append(f"  from step {stage.first_step}{' (amended)' if stage.cut_end else ''}: {weights}")
    return "\n".join(lines)


def _epochs(now: float, then: float, until: int) -> str:
    return f"{now:.2f} epochs, {then:.2f} at step {until}"
