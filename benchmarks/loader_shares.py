"""Compute shares: of useful tokens in an epoch, and of one source's samples or tokens in a step."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loader import TokenLoader, get_llama3_dataloader
from loader.order.mixture import CYCLE_TICKS, ROUND_TICKS, Position, Run, Source, Stage
from loader.order.order import Order, choose_windows
from loader.read.reading import ShardReader

NUM_SOURCES, SOURCE_SAMPLES, SAMPLE_BYTES = 20, 25_600, 8192


def useful_share(folder: Path, options: Mapping[str, Any]) -> float:
    """Return the share, 0 to 1, of tokens in the first epoch's batches that are not padding."""
    with get_llama3_dataloader(folder, num_workers=0, **options) as loader:
        for _ in loader:
            pass
        return 1 - loader.metrics.padding_share


def source_variances(
    global_batch_size: int,
    spans: tuple[int, ...],
    source_samples: int = SOURCE_SAMPLES,
    blocks: tuple[int, int] | None = None,
) -> dict[int, float]:
    """Return span of steps -> variance of a source's share relative to a permutation, for sorted shards.

    Shards are sorted by NUM_SOURCES. Only the order is computed, and no data are read. The variance is over
    all consecutive spans of an epoch. ``blocks``: samples per block and per window (default: the loader's).
    """
    num_samples = NUM_SOURCES * source_samples
    block, window = blocks or choose_windows(
        num_samples=num_samples, num_bytes=SAMPLE_BYTES * num_samples, tick_samples=global_batch_size
    )
    order = Order(
        num_samples=num_samples,
        tick_samples=global_batch_size,
        block_samples=block,
        window_samples=window,
        seed=1,
    )
    slots = range(global_batch_size)
    samples = np.concatenate([order.samples_of(0, slots, *each) for each in order.windows(0)], axis=1)
    sources = samples.T[: order.ticks_per_epoch // max(spans) * max(spans)] // source_samples
    counts = np.stack([(sources == source).sum(1) for source in range(NUM_SOURCES)])
    found = {}
    for span in spans:
        drawn = span * global_batch_size
        shares = counts.reshape(NUM_SOURCES, -1, span).sum(2)
        fair = drawn / NUM_SOURCES * (1 - 1 / NUM_SOURCES)
        found[span] = float(((shares - drawn / NUM_SOURCES) ** 2).mean()) / fair
    return found


def weighted_variances(weight: float, global_batch_size: int, spans: tuple[int, ...]) -> dict[int, float]:
    """Return span of steps -> variance of a source's share relative to a full shuffle, for two sources.

    Only the mixture is computed. The variance is over all consecutive spans of 1,000 rounds.
    """
    order = Order(
        num_samples=10**6, tick_samples=global_batch_size, block_samples=10, window_samples=100, seed=1
    )
    share = round(weight * CYCLE_TICKS) / CYCLE_TICKS
    mixed = Run(
        sources=tuple(Source(name=name, data="", order=order) for name in ("one", "other")),
        stages=(
            Stage(step=0, global_batch_size=global_batch_size, weights={"one": share, "other": 1 - share}),
        ),
        batches_per_tick=1,
        seed=1,
        is_mixture=True,
    )
    firsts = range(0, 1000 * ROUND_TICKS, ROUND_TICKS)
    slots = range(global_batch_size)
    counts = np.concatenate([(mixed.pattern(mixed.round_at(n), slots) == 0).sum(0) for n in firsts])
    found = {}
    for span in spans:
        drawn = span * global_batch_size
        shares = counts[: len(counts) // span * span].reshape(-1, span).sum(1)
        found[span] = float(((shares - drawn * weight) ** 2).mean()) / (drawn * weight * (1 - weight))
    return found


def mixed_tokens(folders: Mapping[str, Path], weights: Mapping[str, float], num_steps: int) -> float:
    """Return the share, 0 to 1, of the first source's tokens in a run of some steps.

    Documents of the first source are recognized by their ids, from a run that has no other source.
    """
    options: dict[str, Any] = {"num_workers": 0, "global_batch_size": 64, "weights": weights}
    with get_llama3_dataloader(folders, 64, **options) as loader:
        for _ in steps_of(loader, num_steps):
            pass
        total = loader.metrics.num_tokens
        run, (source, *_) = loader.run, [*loader.samples.values()]
        taken = run.source_samples(Position(num_steps))
    first = next(iter(folders))
    order = run.sources[0].order
    reader = ShardReader(source.shards)
    whole, rest = divmod(taken[first] // 64, order.ticks_per_epoch)
    tokens = 0
    for epoch in range(whole + 1):
        last = order.ticks_per_epoch if epoch < whole else rest
        for start, end in order.windows(0):
            if start < last:
                samples = order.samples_of(epoch, range(64), start, end)[:, : last - start]
                tokens += int(source.num_tokens(reader, samples.reshape(-1)).sum())
    reader.close()
    return tokens / total


def mixing_costs(
    sources: Mapping[str, Any], options: Mapping[str, Any], num_turns: int, num_batches: int
) -> list[float]:
    """Return for each turn the CPU time of batches mixed .7 and .3 over that of unmixed batches."""
    weights = dict(zip(sources, (0.7, 0.3), strict=True))
    loaders = [get_llama3_dataloader(data, num_workers=0, **options) for data in sources.values()]
    loaders.append(
        get_llama3_dataloader(sources, num_workers=0, weights=weights, weights_in="samples", **options)
    )
    streams = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in loaders]
    ratios = []
    for _ in range(num_turns):
        cpu_s = []
        for stream in streams:
            began = time.process_time()
            for _ in itertools.islice(stream, num_batches):
                pass
            cpu_s.append(time.process_time() - began)
        *alone, mixed = cpu_s
        ratios.append(mixed / sum(s * share for s, share in zip(alone, weights.values(), strict=True)))
    for loader in loaders:
        loader.close()
    return ratios


def steps_of(loader: TokenLoader, num_steps: int) -> Iterator[list[bytes]]:
    """Yield the documents of each step as bytes, over any number of epochs, without accumulation."""
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(batches, num_steps):
        lengths = batch["attention_mask"].sum(1).tolist()
        yield [
            ids[:length].numpy().tobytes() for ids, length in zip(batch["input_ids"], lengths, strict=True)
        ]


def mixed_differences(
    folders: Mapping[str, Path], worlds: tuple[int, ...], num_steps: int, num_resumes: int
) -> dict[str, int]:
    """Count the steps that differ from those of one rank, by world, and for resumes at random steps.

    The schedule changes in the middle. Documents, global batch 64, no workers, one rank after the other.
    """
    names = list(folders)
    options: dict[str, Any] = {
        "num_workers": 0,
        "global_batch_size": 64,
        "weights": [
            (0, {names[0]: 0.7, names[1]: 0.3}),
            (num_steps // 2 + 1, {names[0]: 0.2, names[1]: 0.8}),
        ],
    }

    def digests(loader: TokenLoader, count: int) -> list[list[bytes]]:
        return [list(map(_digest, step)) for step in steps_of(loader, count)]

    found: dict[str, int] = {}
    whole: list[list[bytes]] = []
    for world in worlds:
        ranks = []
        for rank in range(world):
            with get_llama3_dataloader(
                folders, 64 // world, rank=rank, world_size=world, **options
            ) as loader:
                ranks.append(digests(loader, num_steps))
        steps = [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
        whole = whole or steps
        found[f"world {world}"] = sum(a != b for a, b in zip(steps, whole, strict=True))
    draw, found["resumes"] = random.Random(0), 0
    with get_llama3_dataloader(folders, 64, rank=0, world_size=1, **options) as loader:
        for step in draw.choices(range(num_steps - 3), k=num_resumes):
            loader.load_state_dict(loader.state_at(step))
            found["resumes"] += digests(loader, 3) != whole[step : step + 3]
    return found


def _digest(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()
