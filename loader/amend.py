"""Amendments: how a loader goes on behind a state of another mixture; and what a mixture is, as text.

A state has the sources and stages that the run has had. A loader's plan is what its arguments say. Behind a
state at step N it goes on by the state's stages where the plan says the same from N on. With ``amend`` the
stages from N on are the plan's; those that ended before must be the state's. Else the state is refused, as it
always is where a source of the same name is other data. A step before the last amendment is gone on from as
it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loader.mixture import CYCLE_STEPS, Mixture, Stage, source_seed
from loader.order import Order
from loader.samples import Samples
from loader.state import OtherRun, Position, RunSteps, is_same, position_of
from loader.workers import MixedSamples, Plan
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)
_AMENDED = ("data", "num_samples", "sources", "schedule")  # what an amendment changes of a fingerprint
_Held = list[tuple[int, dict[str, int]]]  # from which step on, and each source's steps of a cycle


def go_on(
    plan: Plan, state: Mapping[str, Any], layout: Mapping[str, int], *, amend: bool
) -> tuple[Plan, Position]:
    """What a loader of a plan delivers behind a state, and from where on. Raises OtherRun, OtherTokenizer,
    BrokenShard or UsageError."""
    mine, saved = plan.fingerprint, state.get("fingerprint")
    past = None
    if isinstance(plan.order, Mixture) and isinstance(saved, Mapping):
        past = Mixture.of_sizes(saved, plan.order)
        if all(is_same(name, saved.get(name), mine.get(name)) for name in _AMENDED):
            past = None  # nothing differs
    if past is None:
        return plan, position_of(state, mine, layout, plan.run)
    assert isinstance(saved, Mapping)
    run = replace(plan.run, order_steps_per_epoch=past.steps_per_epoch)
    expected = {**mine, **{name: saved.get(name) for name in _AMENDED}}
    if not all(past.data) and {*past.names} == {*plan.order.names}:
        expected["data"] = mine["data"]  # a state of 0.1.0 has no fingerprint of each source
    position = position_of(state, expected, layout, run)
    past = _with_known_data(past, plan.order)
    step = position.epoch * past.steps_per_epoch + run.order_step(position)
    joined, stages = _joined(past, plan.order)
    now = max(step, past.amended_at)
    if _held(joined, stages, now) == _held(joined, joined.stages, now):
        joined = past
    elif not amend:
        raise OtherRun(
            f"the state is of another mixture: it has {_text(_held(joined, joined.stages, step))}; this "
            f"loader has {_text(_held(joined, stages, step))}; pass amend=True to go on with this mixture "
            "from there, make the loader as it was when the state was saved, or start without the state"
        )
    else:
        if position.num_micro:
            raise UsageError(
                f"the state was saved inside of a step, after {position.num_micro} batches, and a mixture is "
                "amended between two steps; take a state of after the optimizer's step"
            )
        _check_amendable(joined, stages, step, plan.run)
        joined = _amended(joined, stages, step)
    present = dict(zip(plan.order.names, plan.samples.sources, strict=True))
    fingerprint = {**mine, "num_samples": joined.num_samples, **joined.sizes}
    sources = tuple(present.get(name) for name in joined.names)
    for name in {name for _, counts in _held(joined, joined.stages, step) for name in counts} - {*present}:
        raise OtherRun(
            f"the steps from {step} to {joined.amended_at} have samples of {name}, which this loader has "
            "not; add it to input_shards"
        )
    return (
        Plan(order=joined, samples=MixedSamples(sources=sources), run=run, fingerprint=fingerprint),
        position,
    )


def _with_known_data(past: Mixture, mine: Mixture) -> Mixture:
    """The past with the data of each source that this loader has, also where the state does not say it.
    Raises OtherRun where a source is other data than in the state."""
    here = dict(zip(mine.names, zip(mine.orders, mine.data, strict=True), strict=True))
    known = []
    for name, then, data_then in zip(past.names, past.orders, past.data, strict=True):
        now, data_now = here.get(name, (then, data_then))
        if (now.num_samples, now.sizes) != (then.num_samples, then.sizes) or data_then not in ("", data_now):
            raise OtherRun(
                f"the source {name} is other data: {now.num_samples} samples, data {data_now} here, and "
                f"{then.num_samples}, data {data_then or 'unknown'} in the state; name added or changed data "
                "as a source of its own in input_shards, and keep this name for the data as it was"
            )
        if not data_then and {*past.names} != {*mine.names}:
            logger.warning("the state says of source %s its number of samples alone; it is the same", name)
        known.append(data_now)
    return replace(past, data=tuple(known))


def _joined(past: Mixture, plan: Mixture) -> tuple[Mixture, tuple[Stage, ...]]:
    """The past with the plan's new sources behind its own, and the plan's stages as of all of these."""
    new = [number for number, name in enumerate(plan.names) if name not in past.names]
    names = (*past.names, *(plan.names[number] for number in new))
    orders = [
        replace(plan.orders[number], seed=source_seed(plan.seed, len(past.names) + at))
        for at, number in enumerate(new)
    ]
    joined = replace(
        past,
        names=names,
        orders=(*past.orders, *orders),
        data=(*past.data, *(plan.data[number] for number in new)),
        stages=tuple(replace(stage, weights=(*stage.weights, *[0.0] * len(new))) for stage in past.stages),
        num_first=past.num_first or (len(past.names) if new else 0),
    )
    stages = []
    for stage in plan.stages:
        weights = dict(zip(plan.names, stage.weights, strict=True))
        stages.append(Stage(first_step=stage.first_step, weights=tuple(weights.get(n, 0.0) for n in names)))
    return joined, tuple(stages)


def _held(mixture: Mixture, stages: tuple[Stage, ...], first: int, end: int | None = None) -> _Held:
    """What holds in the steps of [first, end), as shares that are compared exactly."""
    found: _Held = []
    for stage in stages:
        if end is not None and stage.first_step >= end:
            break
        counts = zip(mixture.names, stage.cycle_counts.tolist(), strict=True)
        held = {name: count for name, count in counts if count}
        if found and stage.first_step <= first:
            found.clear()
        if not found or found[-1][1] != held:
            found.append((max(stage.first_step, first), held))
    return found


def _amended(past: Mixture, stages: tuple[Stage, ...], step: int) -> Mixture:
    """The past up to a step, and from there on what these stages say."""
    cut = past.round_at(step)
    number = sum(stage.first_step <= step for stage in stages) - 1
    holding = replace(
        stages[number],
        first_step=step,
        cut_end=step if cut.first_step == step else cut.first_step + len(cut.sources),
    )
    before = [stage for stage in past.stages if stage.first_step < step]
    return replace(past, stages=(*before, holding, *stages[number + 1 :]))


def _check_amendable(past: Mixture, stages: tuple[Stage, ...], step: int, run: RunSteps) -> None:
    """Raises OtherRun where stages of the plan that were over at a step are not those of the run, or
    UsageError where their steps cannot be told."""
    if run.is_ramped and len(stages) > 1:
        raise UsageError(
            "a run with batch_size_schedule can be amended by weights=, and not by weights_schedule="
        )
    number = sum(stage.first_step <= step for stage in stages) - 1
    first, end = past.amended_at, stages[number].first_step
    if first < end and _held(past, stages, first, end) != _held(past, past.stages, first, end):
        raise OtherRun(
            f"weights_schedule has other stages in the steps {first} to {end} than the state: "
            f"{_text(_held(past, stages, first, end))} here, {_text(_held(past, past.stages, first, end))} "
            "there; keep those that are over, or pass weights= alone"
        )


def _text(held: _Held) -> str:
    return "; ".join(
        f"from step {first} on "
        + ", ".join(f"{name} {count / CYCLE_STEPS:.4g}" for name, count in counts.items())
        for first, counts in held
    )


def describe(
    order: Order | Mixture, samples: Samples | MixedSamples, data: str, step: int, until: int
) -> str:
    """The tree of sources at a step of the order, with their epochs then and at a later step. ``data``: the
    fingerprint of one data set, where no sources are mixed."""
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
