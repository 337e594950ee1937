"""Amendments: how a loader goes on behind a state of another mixture or other sizes; and these as text.

A state has the sources, stages and sizes that the run has had. A loader's plan is what its arguments say.
Behind a state at step N it goes on by the state's where the plan says the same from N on. With ``amend``
those from N on are the plan's; stages that ended before must be the state's. Else the state is refused, as it
always is where a source of the same name is other data. A step before the last amendment is gone on from as
it was. The order stays that of the run's first global batch, of which all others are multiples.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from loader.mixture import CYCLE_STEPS, Mixture, Stage, source_seed
from loader.order import Order
from loader.samples import Samples, samples_of
from loader.shards import ShardSet
from loader.state import OtherRun, Position, RunSteps, SizeHistory, are_equal, check_run, position_of
from loader.workers import MixedSamples, Plan, check_batch, make_order, rank_slots
from shardprep.errors import BrokenShard, UsageError

logger = logging.getLogger(__name__)
_MIXTURE = ("data", "num_samples", "sources", "schedule")  # what an amendment of it changes of a fingerprint
_PART = re.compile(r" \+\d+$")  # of a name: behind it which later part of its source this is
_Stages = Sequence[tuple[int, Any]]  # from which step on, and what holds then
_Shares = Sequence[tuple[int, dict[str, int]]]  # likewise: each source's steps of a cycle


class _Schedule(NamedTuple):
    """The stages of a loader's arguments beside those of a state."""

    words: str  # of a difference, with {there} and {here}
    argument: str  # that gives them
    instead: str  # what to pass in its place
    mine: _Stages
    saved: _Stages
    text: Callable[[_Stages], str]

    def differs(self, step: int) -> bool:
        """Whether they differ from a step on."""
        return _held(self.mine, step) != _held(self.saved, step)

    def difference(self, step: int) -> str:
        there, here = self.text(_held(self.saved, step)), self.text(_held(self.mine, step))
        return self.words.format(there=there, here=here)

    def check_over(self, first: int, step: int) -> None:
        """Raises OtherRun where stages that were over at a step are not those of the run from ``first`` on,
        its last amendment."""
        end = max(begin for begin, _ in self.mine if begin <= step)
        here, there = _held(self.mine, first, end), _held(self.saved, first, end)
        if first < end and here != there:
            raise OtherRun(
                f"{self.argument} has other stages in the steps {first} to {end} than the state: "
                f"{self.text(here)} here, {self.text(there)} there; keep those that are over, or pass "
                f"{self.instead} alone"
            )


def go_on(
    plan: Plan, state: Mapping[str, Any], layout: Mapping[str, int], *, amend: bool
) -> tuple[Plan, Position, bool]:
    """What a loader of a plan delivers behind a state, from where on, and whether that amends the run. Raises
    OtherRun, OtherTokenizer, BrokenShard or UsageError."""
    saved = state.get("fingerprint") if isinstance(state, Mapping) else None
    plan = _in_blocks_of(saved, plan) if isinstance(saved, Mapping) else plan
    own = SizeHistory.of_fingerprint(plan.fingerprint)
    history = SizeHistory.of_fingerprint(saved) if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or history is None or own is None or plan.order.keeps_tail:
        return plan, position_of(state, plan.fingerprint, layout, plan.run), False
    plan = _in_parts(plan, saved)
    plan_run, plan = plan.run, _in_blocks_of(saved, _laid_out(plan, own, history, layout))
    past = _past_mixture(plan, saved)
    expected = _expected(plan, saved, past)
    check_run(state, expected)
    run = _run_of(history, plan.run, past)
    position = position_of(state, expected, layout, run)
    step, order_step = run.step_of(position), run.total_order_steps(position)
    last = max(step, run.amended_at)
    sizes = _size_schedule(own, history)
    found = [sizes.difference(last)] if sizes.differs(last) else []
    order = plan.order
    if past is not None:
        _check_data(past, plan.order)
        order = past
        _, _, mixed = _joined(past, plan.order, plan_run, run)
        if mixed.differs(max(order_step, past.amended_at)):
            found.append(mixed.difference(order_step))
    if found and not amend:
        raise OtherRun(
            f"{'; '.join(found)}; pass amend=True to go on so from step {step} on, make the loader as it was "
            "when the state was saved, or start without the state",
            found="; ".join(found),
            remedy="amend=True",
        )
    if found:
        if position.num_micro:
            raise UsageError(
                f"the state was saved inside of a step, after {position.num_micro} batches, and a run is "
                "amended between two steps; take a state of after the optimizer's step"
            )
        run = _amended_run(run, own, history, position)
        position = run.position(step)
        order_step = run.total_order_steps(position)
        if past is not None:
            joined, stages, mixed = _joined(past, plan.order, plan_run, run)
            if mixed.differs(order_step):
                mixed.check_over(past.amended_at, order_step)
                order = _amended(joined, stages, order_step)
    samples = plan.samples if past is None else _samples_of(order, plan, order_step)
    fingerprint = {**plan.fingerprint, "num_samples": order.num_samples, **order.sizes}
    fingerprint["global_batch_size"] = run.history(history.order_batch_size)
    plan = replace(plan, order=order, samples=samples, run=run, fingerprint=fingerprint)
    return plan, position, bool(found)


def _in_blocks_of(saved: Mapping[str, Any], plan: Plan) -> Plan:
    """The plan with the blocks and windows of a state's run, which another version may have chosen."""
    order: Order | Mixture = plan.order
    if isinstance(order, Mixture):
        past = Mixture.of_sizes(saved, order)
        known = {} if past is None else dict(zip(past.names, past.orders, strict=True))
        orders = (
            _with_blocks(each, known[name].sizes) if name in known else each
            for name, each in zip(order.names, order.orders, strict=True)
        )
        order = replace(order, orders=tuple(orders))
    else:
        order = _with_blocks(order, saved)
    return replace(plan, order=order, fingerprint={**plan.fingerprint, **order.sizes})


def _with_blocks(order: Order, sizes: Mapping[str, Any]) -> Order:
    block, window = sizes.get("block_samples"), sizes.get("window_samples")
    if not (isinstance(block, int) and isinstance(window, int) and min(block, window) > 0):
        return order
    return replace(order, block_samples=block, window_samples=window)


def _in_parts(plan: Plan, saved: Mapping[str, Any]) -> Plan:
    """The plan with each source cut as the state's run has had it: folders that were added to a source later
    are a source of their own, NAME +1, with a share of the weight that follows from its samples."""
    order = plan.order
    past = Mixture.of_sizes(saved, order) if isinstance(order, Mixture) else None
    if past is None or saved.get("sources") == plan.fingerprint["sources"]:
        return plan
    known = dict(zip(past.names, past.data, strict=True))
    names, samples, orders, data = list[str](), list[Samples](), list[Order](), list[str]()
    shares: list[tuple[int, float]] = []  # of each part: its source's number in the plan, its share of it
    for number, (name, of_whole, sha) in enumerate(zip(order.names, order.orders, order.data, strict=True)):
        whole = plan.samples.sources[number]
        parts = _parts_of(name, whole.shards, known) if known.get(name) not in (None, "", sha) else {}
        cut = {part: samples_of(whole, shards) for part, shards in parts.items()} or {name: whole}
        total = sum(each.num_samples for each in cut.values())
        for part, each in cut.items():
            names.append(part)
            samples.append(each)
            shares.append((number, each.num_samples / total))
            data.append(each.shards.fingerprint[:16] if parts else sha)
            orders.append(_order_like(of_whole, each, order.global_batch_size) if parts else of_whole)
    if len(names) == len(order.names):
        return plan
    stages = [
        replace(stage, weights=tuple(stage.weights[number] * share for number, share in shares))
        for stage in order.stages
    ]
    for stage in stages:
        for name, weight, count in zip(names, stage.weights, stage.cycle_counts.tolist(), strict=True):
            if weight and not count:
                raise UsageError(
                    f"by their part of the weight the folders {name} would be less than one of {CYCLE_STEPS} "
                    "samples; name them as a source with a weight of its own"
                )
    made = replace(order, names=tuple(names), orders=tuple(orders), data=tuple(data), stages=tuple(stages))
    fingerprint = {**plan.fingerprint, "num_samples": made.num_samples, **made.sizes}
    return replace(plan, order=made, samples=MixedSamples(sources=tuple(samples)), fingerprint=fingerprint)


def _parts_of(name: str, shards: ShardSet, known: Mapping[str, str]) -> dict[str, ShardSet]:
    """The parts of a source that a state knows by their data, and as the last one what it does not know; none
    where its first part is not there."""
    found, first = dict[str, ShardSet](), 0
    earlier = [part for part in known if part == name or _PART.sub("", part) == name]
    for part in earlier:
        if (end := shards.end_of(first, known[part])) is not None:
            found[part], first = shards.of_sources(first, end), end
    if name not in found:
        return {}
    if first < len(shards.sources):
        found[f"{name} +{len(earlier)}"] = shards.of_sources(first, len(shards.sources))
    return found


def _order_like(order: Order, samples: Samples, size: int) -> Order:
    """The order of other samples, or in other global batches."""
    return make_order(samples, samples.shards, size, order.group, seed=order.seed, shuffle=order.shuffle)


def _samples_of(order: Mixture, plan: Plan, step: int) -> MixedSamples:
    """The plan's samples of each source of a mixture. Raises OtherRun where it lacks some that are needed
    from a step on."""
    present = dict(zip(plan.order.names, plan.samples.sources, strict=True))
    needed = {name for _, counts in _held(_shares(order, order.stages), step) for name in counts}
    for name in sorted(needed - {*present}):
        raise OtherRun(
            f"the steps from {step} to {order.amended_at} have samples of {name}, which this loader has not; "
            "add it to input_shards"
        )
    return MixedSamples(sources=tuple(present.get(name) for name in order.names))


def _laid_out(plan: Plan, own: SizeHistory, history: SizeHistory, layout: Mapping[str, int]) -> Plan:
    """The plan with the order of a state's first global batch. Raises OtherRun where that cannot be."""
    order, size, world_size = plan.order, history.order_batch_size, layout["world_size"]
    if size == order.global_batch_size:
        return plan
    is_mixed = isinstance(order, Mixture)
    orders, sources = (order.orders, plan.samples.sources) if is_mixed else ([order], [plan.samples])
    try:
        check_batch(layout["batch_size"], size, world_size)
        made = [_order_like(each, source, size) for each, source in zip(orders, sources, strict=True)]
        rank_slots(made[0], 0, world_size)
    except UsageError as error:
        raise OtherRun(
            f"{_size_schedule(own, history).difference(0)}; the order of the state has global "
            f"batches of {size}, and any later size is a multiple of it, in equal batches: {error}",
            found=error.found,
            expected=error.expected,
        ) from None
    run = replace(
        plan.run,
        order_steps_per_epoch=sum(each.steps_per_epoch for each in made),
        num_batches=size // (layout["batch_size"] * world_size),
        sizes=RunSteps.sizes,
    )
    order = replace(order, global_batch_size=size, orders=tuple(made)) if is_mixed else made[0]
    fingerprint = {**plan.fingerprint, "global_batch_size": size, **order.sizes}
    return replace(plan, order=order, run=run, fingerprint=fingerprint)


def _past_mixture(plan: Plan, saved: Mapping[str, Any]) -> Mixture | None:
    """The mixture of a state: the plan's where nothing differs; None for one data set, or for none."""
    if not isinstance(plan.order, Mixture):
        return None
    if all(are_equal(saved.get(name), plan.fingerprint.get(name)) for name in _MIXTURE):
        return plan.order
    return Mixture.of_sizes(saved, plan.order)


def _expected(plan: Plan, saved: Mapping[str, Any], past: Mixture | None) -> dict[str, Any]:
    """What a state that may be amended has: what an amendment changes is its own."""
    expected = {**plan.fingerprint, "global_batch_size": saved["global_batch_size"]}
    if past is not None and past is not plan.order:
        expected |= {name: saved.get(name) for name in _MIXTURE}
    return expected


def _run_of(history: SizeHistory, run: RunSteps, past: Mixture | None) -> RunSteps:
    """The steps of a state's run, for a loader of the same order. Raises BrokenShard."""
    found = replace(
        run,
        order_steps_per_epoch=run.order_steps_per_epoch if past is None else past.steps_per_epoch,
        sizes=tuple((step, size // history.order_batch_size) for step, size in history.sizes),
        amended=history.amended,
    )
    for step, epoch in history.amended:
        if not found.first_step(epoch) <= step <= found.first_step(epoch + 1):
            raise BrokenShard(f"the state is damaged: its step {step} is not in epoch {epoch}")
    return found


def _size_schedule(own: SizeHistory, history: SizeHistory) -> _Schedule:
    return _Schedule(
        "global_batch_size {there} in the state, {here} here",
        "batch_size_schedule",
        "global_batch_size",
        own.sizes,
        history.sizes,
        _ramp_text,
    )


def _ramp_text(held: _Stages) -> str:
    if len(held) == 1:
        return str(held[0][1])
    return ", ".join(f"{size} from step {step} on" for step, size in held)


def _amended_run(run: RunSteps, own: SizeHistory, history: SizeHistory, position: Position) -> RunSteps:
    """The run with the sizes of a plan from a position on. Raises OtherRun or UsageError."""
    step, least = run.step_of(position), history.order_batch_size
    schedule = _size_schedule(own, history)
    if not schedule.differs(step):
        return run
    schedule.check_over(run.amended_at, step)
    sizes = _held(own.sizes, step)
    for first, size in sizes:
        if size % least:
            raise OtherRun(
                f"the global batch is {size} here from step {first} on, and the order of the state was laid "
                f"out in global batches of {least}: expected a multiple of {least}, such as "
                f"{max(size // least, 1) * least} or {(size // least + 1) * least}; pass one of these, or "
                "start without the state"
            )
    return replace(
        run,
        sizes=(*_before(run.sizes, step), *((first, size // least) for first, size in sizes)),
        amended=(*_before(run.amended, step), (step, position.epoch)),
    )


def _before(stages: _Stages, step: int) -> _Stages:
    return [each for each in stages if each[0] < step]


def _held(stages: _Stages, first: int, end: int | None = None) -> _Stages:
    """What holds in the steps of [first, end)."""
    found: list[tuple[int, Any]] = []
    for step, value in stages:
        if end is not None and step >= end:
            break
        if found and step <= first:
            found.clear()
        if not found or found[-1][1] != value:
            found.append((max(step, first), value))
    return found


def _check_data(past: Mixture, mine: Mixture) -> None:
    """Raises OtherRun where a source is other data than in the state."""
    here = dict(zip(mine.names, zip(mine.orders, mine.data, strict=True), strict=True))
    for name, then, data_then in zip(past.names, past.orders, past.data, strict=True):
        now, data_now = here.get(name, (then, data_then))
        if (now.num_samples, now.sizes, data_now) != (then.num_samples, then.sizes, data_then):
            raise OtherRun(
                f"the source {name} is other data: {now.num_samples} samples, data {data_now} here, and "
                f"{then.num_samples}, data {data_then} in the state; put added "
                "folders behind those that it had, and name changed data as a source of its own"
            )


def _joined(
    past: Mixture, plan: Mixture, plan_run: RunSteps, run: RunSteps
) -> tuple[Mixture, tuple[Stage, ...], _Schedule]:
    """The past with the plan's new sources behind its own, the plan's stages as of all of these, at the steps
    of a run that may have other sizes, and the weights of both, by steps of the order."""
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
        first_step = run.first_of_order(plan_run.step_from(stage.first_step))
        stages.append(Stage(first_step=first_step, weights=tuple(weights.get(n, 0.0) for n in names)))
    mine, saved = _shares(joined, stages), _shares(joined, joined.stages)
    words = "the state is of another mixture: it has {there}; this loader has {here}"
    mixed = _Schedule(words, "weights_schedule", "weights=", mine, saved, _shares_text)
    return joined, tuple(stages), mixed


def _shares(mixture: Mixture, stages: Sequence[Stage]) -> _Shares:
    """The stages of a mixture, with shares that are compared exactly."""
    found = []
    for stage in stages:
        counts = zip(mixture.names, stage.cycle_counts.tolist(), strict=True)
        found.append((stage.first_step, {name: count for name, count in counts if count}))
    return found


def _amended(joined: Mixture, stages: tuple[Stage, ...], step: int) -> Mixture:
    """The run up to a step, and from there on what these stages say."""
    cut = joined.round_at(step)
    number = sum(stage.first_step <= step for stage in stages) - 1
    holding = replace(
        stages[number],
        first_step=step,
        cut_end=step if cut.first_step == step else cut.first_step + len(cut.sources),
    )
    before = [stage for stage in joined.stages if stage.first_step < step]
    return replace(joined, stages=(*before, holding, *stages[number + 1 :]))


def _shares_text(held: _Stages) -> str:
    return "; ".join(
        f"from step {first} on "
        + ", ".join(f"{name} {count / CYCLE_STEPS:.4g}" for name, count in counts.items())
        for first, counts in held
    )


def describe(plan: Plan, data: str, step: int, until: int) -> str:
    """The tree of sources at a step of the order, with their epochs then and at a later step, and the sizes
    where they change. ``data``: the fingerprint of one data set, where no sources are mixed."""
    order, samples = plan.order, plan.samples
    if isinstance(order, Mixture):
        lines = _mixture_lines(order, samples.sources, step, until)
    else:
        size = f"{order.num_samples:,} samples, about {samples.mean_tokens * samples.num_samples:.3g} tokens"
        epochs = _epochs(step / order.steps_per_epoch, until / order.steps_per_epoch, until)
        lines = [f"one data set: {size}, data {data[:16]}, {epochs}"]
    return "\n".join([*lines, *_size_lines(plan)])


def _size_lines(plan: Plan) -> list[str]:
    run, lines = plan.run, []
    amended = {step for step, _ in run.amended}
    if len(run.sizes) > 1 or amended:
        lines.append("global batches, by step of training")
        for first, size in run.sizes:
            samples = size * plan.order.global_batch_size
            lines.append(f"  from step {first}{' (amended)' if first in amended else ''}: {samples} samples")
    return lines


def _mixture_lines(order: Mixture, samples: Sequence[Samples | None], step: int, until: int) -> list[str]:
    held = next(stage for stage in reversed(order.stages) if stage.first_step <= step)
    shares = dict(zip(order.names, (held.cycle_counts / CYCLE_STEPS).tolist(), strict=True))
    sources = dict(zip(order.names, samples, strict=True))
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
            f"{of_source.num_samples:,} samples, {tokens}, data {found}"
        )
    lines.append("what held, by share of samples")
    for stage, (first, counts) in zip(order.stages, _shares(order, order.stages), strict=True):
        weights = ", ".join(f"{name} {count / CYCLE_STEPS:.1%}" for name, count in counts.items())
        lines.append(f"  from step {first}{' (amended)' if stage.cut_end else ''}: {weights}")
    return lines


def _epochs(now: float, then: float, until: int) -> str:
    return f"{now:.2f} epochs, {then:.2f} at step {until}"
