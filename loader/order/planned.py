"""The run that the loader's arguments describe: sources, weights and global batch sizes by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from loader.order.checks import check_batch, whole_number
from loader.order.mixture import CYCLE_TICKS, Run, Source, Stage, source_seed
from loader.order.order import Order, sizes_of_order
from loader.order.state import MAX_STAGE_STEP
from shardprep.errors import UsageError

Weights: TypeAlias = "Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]"
Sizes: TypeAlias = "int | Sequence[tuple[int, int]]"
WeightsIn = Literal["tokens", "samples"]


def _stages(name: str, value: Any) -> Sequence[tuple[int, Any]]:
    """Return pairs of a step and the value from it on. Raises UsageError unless steps ascend from 0."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [(0, value)]
    try:
        step_name = f"a step of {name}"
        stages = [(whole_number(step_name, step, least=0, most=MAX_STAGE_STEP), held) for step, held in value]
    except (TypeError, ValueError):
        raise UsageError.of_value(name, value, "pairs of a step and the value from it on") from None
    steps = [step for step, _ in stages]
    if steps[:1] != [0] or steps != sorted(set(steps)):
        raise UsageError(found=f"{name} {steps}", expected="whole numbers that ascend from 0")
    return stages


def choose_sizes(
    global_batch_size: Sizes | None, group_by_length: bool | int, *, batch_size: int, world_size: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """Return L, which divides all sizes, the samples per group, and the sizes by step."""
    name = "global_batch_size"
    if global_batch_size is None:
        global_batch_size = batch_size * world_size
    stages = _stages(name, global_batch_size)
    sizes = [(step, whole_number(name, size, least=1)) for step, size in stages]
    given = int(group_by_length) * batch_size if isinstance(group_by_length, bool) else group_by_length
    group = whole_number("group_by_length", given, least=0) or 1
    step_samples = batch_size * world_size
    for step, size in sizes:
        if len(sizes) > 1 and size % step_samples:  # check_batch would name what divides all sizes
            found = f"global_batch_size={size} from step {step} on"
            expected = f"a multiple of batch_size {batch_size} x {world_size} ranks, {step_samples}"
            raise UsageError(found=found, expected=expected)
    tick_samples = gcd(*(size for _, size in sizes))
    check_batch(tick_samples, group, batch_size=batch_size, world_size=world_size)
    return tick_samples, group, sizes


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What the order needs to know of a source's samples."""

    data: str  # fingerprint of its shards, 16 hex digits
    num_samples: int
    num_bytes: int  # of its tars
    row_tokens: int  # tokens per sample if all are rows of one length, else 0
    mean_tokens: float  # per sample, for weights in tokens; 1 for weights in samples


def make_run(
    facts: Mapping[str, SourceFacts],
    sizes: Sequence[tuple[int, int]],
    weights: Weights | None,
    *,
    tick_samples: int,
    batches_per_tick: int,
    group: int,
    seed: int,
    shuffle: bool,
    keeps_tail: bool,
    settings: Mapping[str, object],
) -> Run:
    """Return the run that the arguments describe. ``settings``: as of Run. Raises UsageError."""
    is_mixture = weights is not None
    sources = []
    for number, (name, known) in enumerate(facts.items()):
        if is_mixture and known.num_samples < tick_samples and not keeps_tail:
            found = f"{known.num_samples:,} samples of source {name}"
            expected = f"at least {tick_samples:,}: plan it with a smaller --seq_len, or add text"
            raise UsageError(found=found, expected=expected)
        order = Order(
            **sizes_of_order(known.num_samples, known.num_bytes, tick_samples, group),
            group=group,
            seed=source_seed(seed, number) if is_mixture else seed,
            shuffle=shuffle,
            keeps_tail=keeps_tail,
        )
        sources.append(Source(name=name, data=known.data, order=order, num_bytes=known.num_bytes))
    size_at = dict(sizes)
    shares_at = {0: dict.fromkeys(facts, 1.0)}
    if weights is not None:
        lengths = {name: known.row_tokens for name, known in facts.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UsageError(found=f"rows of {found} tokens (0: documents)", expected="one length")
        means = {name: known.mean_tokens for name, known in facts.items()}
        shares_at = {step: _shares(given, means) for step, given in _stages("weights", weights)}
    stages = []
    size = size_at[0]
    shares = shares_at[0]
    for step in sorted({*size_at, *shares_at}):
        size = size_at.get(step, size)
        shares = shares_at.get(step, shares)
        begins_round = step in shares_at
        stages.append(Stage(step=step, global_batch_size=size, weights=shares, begins_round=begins_round))
    return Run(
        sources=tuple(sources),
        stages=tuple(stages),
        batches_per_tick=batches_per_tick,
        seed=seed,
        is_mixture=is_mixture,
        settings=settings,
    )


def _is_weight(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < float("inf")


def _shares(weights: object, means: Mapping[str, float]) -> dict[str, float]:
    """Return each source's share of the samples. ``means``: tokens per sample, 1 for weights in samples."""
    given = dict(weights) if isinstance(weights, Mapping) else {}
    values = [given.get(name, 0.0) for name in means]
    are_known = given.keys() <= means.keys()
    if not are_known or not all(map(_is_weight, values)) or not sum(values) > 0:
        expected = f"a dict of non-negative numbers for {', '.join(means)}, not all zero"
        raise UsageError.of_value("weights", weights, expected)
    # Weights of samples, not yet divided by their sum. They are exact fractions, with 0.1 as 1/10, so that
    # proportional weights give equal shares to the last digit.
    exact: dict[str, Fraction] = {}
    for (name, mean), value in zip(means.items(), values, strict=True):
        digits = int(value) if isinstance(value, Integral) else str(float(value))
        exact[name] = Fraction(digits) / Fraction(mean)
    total = sum(exact.values())
    shares = {name: float(weight / total) for name, weight in exact.items()}
    for name, share in shares.items():
        if 0 < share < 1 / CYCLE_TICKS:
            found = f"a weight that gives {name} {share:.2g} of the samples"
            raise UsageError(found=found, expected=f"at least one of {CYCLE_TICKS} samples, or 0")
    return shares
