"""The sources that a user names, with their weights -> the mixture and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from loader.dataset import Samples
from loader.mixed_chunks import MixedSamples
from loader.mixture import Mixture, Schedule, make_stages
from loader.order import Order, hash_ints
from loader.shards.shard_set import ShardSet
from shardprep.errors import UsageError

WeightsIn = Literal["tokens", "samples"]
_COUNTED = 1 << 20  # samples whose lengths tell the mean of a source
_SEED = 7  # what a hash is for, beside those of order.py and mixture.py


def check_mixing(
    input_shards: object,
    weights: Mapping[str, float] | None,
    schedule: Schedule | None,
    weights_in: WeightsIn,
    *,
    is_validation: bool,
    excludes: bool,
) -> bool:
    """Whether sources are mixed. Raises UsageError where the arguments do not fit each other."""
    if not isinstance(input_shards, Mapping):
        if weights is not None or schedule is not None:
            raise UsageError(
                'weights and schedule are for named sources; pass input_shards={"web": ..., "code": ...}'
            )
        return False
    if weights_in not in get_args(WeightsIn):
        raise UsageError(
            f"weights_in is {weights_in!r}, expected {' or '.join(map(repr, get_args(WeightsIn)))}"
        )
    if is_validation:
        raise UsageError("a validation loader reads one set in a fixed order; make one for each source")
    if excludes:
        raise UsageError("exclude_shards has no meaning for named sources; name the shards of each source")
    return True


def mix(
    shards: Mapping[str, ShardSet],
    samples: Sequence[Samples],
    orders: Sequence[Order],
    *,
    weights: Mapping[str, float] | None,
    schedule: Schedule | None,
    weights_in: WeightsIn,
) -> tuple[Mixture, MixedSamples]:
    """The mixture of some sources, each with its samples and its order. Raises UsageError."""
    names = tuple(shards)
    lengths = {source.row_tokens for source in samples}
    if len(lengths) > 1:
        found = ", ".join(f"{name} {source.row_tokens}" for name, source in zip(names, samples, strict=True))
        raise UsageError(
            f"sources have rows of different lengths ({found}; 0: documents), expected one length"
        )
    means = None
    if weights_in == "tokens":
        means = [_mean_tokens(part, source) for part, source in zip(shards.values(), samples, strict=True)]
    mixture = Mixture(
        names=names,
        orders=tuple(
            replace(order, seed=hash_ints(order.seed, _SEED, number)) for number, order in enumerate(orders)
        ),
        stages=make_stages(names, weights, schedule, means),
        seed=orders[0].seed,
    )
    return mixture, MixedSamples(sources=tuple(samples))


def _mean_tokens(shards: ShardSet, samples: Samples) -> float:
    """Tokens of a sample, by the manifests; else of at most a million samples, evenly chosen."""
    if samples.row_tokens:
        return float(samples.row_tokens)
    is_whole = samples.num_samples == shards.num_samples and samples.mean_tokens == shards.mean_tokens
    if is_whole and not shards.has_external and shards.split is None:
        return shards.mean_tokens
    chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, _COUNTED)).astype(np.int64)
    reader = samples.open()
    mean = float(reader.num_tokens(chosen).mean())
    reader.close()
    return max(mean, 1.0)
