"""Makes a run of the loader's arguments: the order of each source, weights, sizes of global batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd
from numbers import Integral, Real
from operator import index
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from loader.order import Order, choose_windows
from loader.run import CYCLE, Run, Source, Stage, source_seed
from loader.samples import Samples
from loader.shards import check_choice
from shardprep.errors import UsageError

Weights: TypeAlias = "Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]"
Sizes: TypeAlias = "int | Sequence[tuple[int, int]]"
WeightsIn = Literal["tokens", "samples"]
_MOST_COUNTED = 1 << 20  # samples whose lengths tell the mean of a source


def whole_number(name: str, value: object, *, least: int) -> int:
    """Return the value as an int. Raises UsageError for what is none, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError.of_value(name, value, f"a whole number of at least {least}")
    if (number := index(value)) < least:
        raise UsageError.of_value(name, number, f"at least {least}")
    return number


def _stages(name: str, value: Any) -> Sequence[tuple[int, Any]]:
    """Return pairs of a step and what holds from it on. Raises UsageError unless steps ascend from 0."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [(0, value)]
    try:
        steps = [step for step, _ in value]
    except (TypeError, ValueError):
        raise UsageError.of_value(name, value, "pairs of a step and what holds from it on") from None
    are_steps = all(isinstance(step, Integral) and not isinstance(step, bool) for step in steps)
    if not are_steps or steps[:1] != [0] or any(step >= later for step, later in pairwise(steps)):
        raise UsageError(found=f"{name} {steps}", expected="whole numbers that ascend from 0")
    return [(int(step), held) for step, held in value]


def choose_sizes(
    global_batch_size: Sizes | None, group: int, *, batch_size: int, world_size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return L, which all sizes are multiples of, and the global batch size by step. Raises UsageError."""
    name = "global_batch_size"
    stages = _stages(name, batch_size * world_size if global_batch_size is None else global_batch_size)
    sizes = [(step, whole_number(name, size, least=1)) for step, size in stages]
    tick_samples = gcd(*(size for _, size in sizes))
    check_batch(tick_samples, group, batch_size=batch_size, world_size=world_size)
    return tick_samples, sizes


def check_batch(global_batch_size: int, group: int, *, batch_size: int, world_size: int) -> None:
    """Raise UsageError unless a global batch is equally many batches and slots of each rank."""
    if global_batch_size % (batch_size * world_size):
        raise UsageError(
            found=f"global_batch_size={global_batch_size}",
            expected=f"a multiple of batch_size {batch_size} x {world_size} ranks, {batch_size * world_size}",
        )
    num_slots, rest = divmod(global_batch_size, group)
    if not rest and num_slots % world_size:  # Order refuses other groups
        raise UsageError(
            found=f"{world_size} ranks, which cannot share {num_slots} groups of {group} samples evenly",
            expected=[n for n in range(1, num_slots + 1) if num_slots % n == 0],
        )


def group_size(group_by_length: bool | int, batch_size: int) -> int:
    """Return the samples of a group: ``True`` stands for batch_size, ``False`` for groups of one."""
    if isinstance(group_by_length, bool):
        return batch_size if group_by_length else 1
    return whole_number("group_by_length", group_by_length, least=0) or 1


def sizes_of_order(samples: Samples, tick_samples: int, group: int) -> dict[str, Any]:
    """Return the sizes in a source's order, by their names in Order."""
    num_samples, num_bytes = samples.num_samples, samples.shards.tar_bytes
    block_samples, window_samples = choose_windows(
        num_samples=num_samples, num_bytes=num_bytes, tick_samples=tick_samples, group=group
    )
    return {
        "num_samples": num_samples,
        "tick_samples": tick_samples,
        "block_samples": block_samples,
        "window_samples": window_samples,
    }


def make_run(
    samples: Mapping[str, Samples],
    sizes: Sequence[tuple[int, int]],
    weights: Sequence[tuple[int, Mapping[str, float]]],
    *,
    tick_samples: int,
    group: int,
    seed: int,
    shuffle: bool,
    keeps_tail: bool,
    is_mixture: bool,
    **others: Any,
) -> Run:
    """Return the run that the arguments say. ``others``: fields of Run. Raises UsageError."""
    sources = []
    for number, (name, of_source) in enumerate(samples.items()):
        order = Order(
            **sizes_of_order(of_source, tick_samples, group),
            group=group,
            seed=source_seed(seed, number) if is_mixture else seed,
            shuffle=shuffle,
            keeps_tail=keeps_tail,
        )
        data = of_source.shards.fingerprint[:16]
        sources.append(Source(name=name, data=data, order=order, samples=of_source))
    size_at, weights_at = dict(sizes), dict(weights)
    stages, size, held = [], sizes[0][1], weights[0][1]
    for step in sorted({*size_at, *weights_at}):
        size, held = size_at.get(step, size), weights_at.get(step, held)
        begins_round = step in weights_at
        stages.append(Stage(step=step, global_batch_size=size, weights=held, begins_round=begins_round))
    return Run(sources=tuple(sources), stages=tuple(stages), seed=seed, is_mixture=is_mixture, **others)


def check_mixing(
    input_shards: object, weights: Weights | None, weights_in: WeightsIn, *, is_validation: bool
) -> bool:
    """Return whether sources are mixed. Raises UsageError where the arguments do not fit each other."""
    if not isinstance(input_shards, Mapping):
        if weights is not None:
            remedy = 'input_shards={"web": ..., "code": ...}'
            raise UsageError(found="weights of no named sources", expected=remedy, remedy=remedy)
        return False
    check_choice("weights_in", weights_in, WeightsIn)
    if is_validation:
        raise UsageError(found='split="validation" of several sources', expected="one loader for each source")
    if weights is None:
        raise UsageError(found="input_shards that names sources", expected="weights=, for each a weight")
    return True


def weights_of_samples(
    samples: Mapping[str, Samples], weights: Weights | None, weights_in: WeightsIn
) -> list[tuple[int, dict[str, float]]]:
    """Return the share of samples of each source, by step. Raises UsageError."""
    if weights is None:
        return [(0, dict.fromkeys(samples, 1.0))]
    lengths = {name: of_source.row_tokens for name, of_source in samples.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(found=f"rows of {found} tokens (0: documents)", expected="one length")
    means = dict.fromkeys(samples, 1.0)
    if weights_in == "tokens":
        means = {name: _mean_tokens(of_source) for name, of_source in samples.items()}
    return [(step, _shares(of_stage, means)) for step, of_stage in _stages("weights", weights)]


def _shares(weights: object, means: Mapping[str, float]) -> dict[str, float]:
    """Return the share of samples of each source. ``means``: tokens of a sample, or 1."""
    given = dict(weights) if isinstance(weights, Mapping) else {}
    values = [given.get(name, 0.0) for name in means]
    are_numbers = all(isinstance(value, Real) and 0 <= float(value) < float("inf") for value in values)
    if given.keys() - means.keys() or not are_numbers or not sum(values) > 0:
        expected = f"a dict of non-negative numbers for {', '.join(means)}, not all zero"
        raise UsageError(found=f"weights={weights!r}", expected=expected)
    of_samples = {}
    for (name, mean), value in zip(means.items(), values, strict=True):
        # Exactly, and 0.1 as 1/10: weights in equal proportions are equal shares to the last digit.
        exact = Fraction(int(value) if isinstance(value, Integral) else str(float(value)))
        of_samples[name] = exact / Fraction(mean)
    shares = {name: float(value / sum(of_samples.values())) for name, value in of_samples.items()}
    for name, share in shares.items():
        if 0 < share < 1 / CYCLE:
            raise UsageError(found=f"so small a weight of {name}", expected=f"one of {CYCLE} samples, or 0")
    return shares


def _mean_tokens(samples: Samples) -> float:
    """Return the tokens of a sample, by the manifests or by a million samples, evenly chosen."""
    shards = samples.shards
    if samples.row_tokens:
        return float(samples.row_tokens)
    is_whole = samples.num_samples == shards.num_samples and samples.mean_tokens == shards.mean_tokens
    if is_whole and not shards.has_external and shards.split is None:
        return shards.mean_tokens
    num_chosen = min(samples.num_samples, _MOST_COUNTED)
    chosen = np.linspace(0, samples.num_samples - 1, num_chosen).astype(np.int64)
    reader = samples.open()
    mean = float(samples.num_tokens(reader, chosen).mean())
    reader.close()
    return max(mean, 1.0)
