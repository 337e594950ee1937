"""A small run that repeats each source as often as a large one: the shards, weights and sizes of a proxy.

A run with ``scale`` of the samples and of the steps has the same epochs. Shards are whole, so a source has
up to half a shard too few or too many; the forecast of the proxy's own loader has the exact epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.order.forecast import RunForecast
from loader.read.samples import Samples
from loader.read.shards import ShardSet
from shardprep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Arguments of the loader of a small run, and its steps."""

    num_steps: int
    input_shards: Mapping[str, list[str]]  # by source
    weights: list[tuple[int, Mapping[str, float]]]  # of samples
    global_batch_size: list[tuple[int, int]]

    def arguments(self, *, is_mixture: bool) -> dict[str, Any]:
        """Return the arguments in which the proxy's loader differs from one of all data."""
        data: Any = self.input_shards
        if not is_mixture:
            (data,) = self.input_shards.values()
            return {"input_shards": data, "global_batch_size": self.global_batch_size}
        mixture = {"input_shards": data, "weights": self.weights, "weights_in": "samples"}
        return {**mixture, "global_batch_size": self.global_batch_size}


def proxy_of(
    large: RunForecast, samples: Mapping[str, Samples], *, scale: float, step_samples: object
) -> Proxy:
    """Return the proxy of a run whose sources are ``samples``. Raises UsageError.

    ``step_samples``: its global batch size; None: as the large run's.
    """
    if not isinstance(step_samples, int | None):
        raise UsageError.of_value("--global_batch_size", step_samples, "one number with --like")
    sizes = {source.name: source.num_samples for source in large.sources}
    sizes_here = {name: each.num_samples for name, each in samples.items()}
    if sizes_here != sizes:
        expected = f"{sizes}, those of --like; give the same DATA and --seq_len"
        raise UsageError(found=f"samples of sources {sizes_here}", expected=expected)
    weights = []
    step_sizes = []
    wanted = 0.0  # samples of the proxy, to the end of the stage
    done = 0
    step = 0
    ends = [*(stage.step for stage in large.stages[1:]), large.num_steps]
    for stage, end in zip(large.stages, ends, strict=True):
        size = step_samples or stage.global_batch_size
        wanted += (end - stage.step) * stage.global_batch_size * scale
        num_steps = round((wanted - done) / size)
        if num_steps < 1:  # too short at this scale
            continue
        weights.append((step, stage.asked))
        step_sizes.append((step, size))
        step += num_steps
        done += num_steps * size
    if not step:
        expected = "a scale that leaves at least one step, or a smaller --global_batch_size"
        raise UsageError.of_value("--scale", scale, expected)
    shards = {name: _first_shards(samples[name].shards, scale * size) for name, size in sizes.items()}
    return Proxy(num_steps=step, input_shards=shards, weights=weights, global_batch_size=step_sizes)


def _first_shards(shards: ShardSet, num_samples: float) -> list[str]:
    """Return the first shards that have about so many samples, at least one: paths or patterns of tars."""
    num_left = max(int(np.abs(shards.first_sample - num_samples).argmin()), 1)
    paths = []
    for dataset in shards.datasets:
        ids = dataset.shard_ids[:num_left]
        num_left -= len(ids)
        if dataset.records is None and len(ids) > 1 and int(ids[-1] - ids[0]) == len(ids) - 1:
            paths.append(f"{dataset.folder}/shard-{{{ids[0]:05d}..{ids[-1]:05d}}}.tar")
        else:
            paths += [str(dataset.path_of(row)) for row in range(len(ids))]
    return paths
