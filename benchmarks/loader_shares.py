"""Shares: of an epoch's places the useful tokens, of a step's samples those of one source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loader import get_llama3_dataloader
from loader.order import Order, choose_windows

NUM_SOURCES, SOURCE_SAMPLES, SAMPLE_BYTES = 20, 25_600, 8192


def useful_share(folder: Path, options: Mapping[str, Any]) -> float:
    """Tokens that are no padding, of all places of the first epoch's batches: 0 to 1."""
    with get_llama3_dataloader(folder, num_workers=0, **options) as loader:
        for _ in loader:
            pass
        return 1 - loader.metrics.padding_share


def source_variances(global_batch_size: int, spans: tuple[int, ...]) -> dict[int, float]:
    """Shards sorted by NUM_SOURCES: by span of steps, the variance of a source's share over a permutation's.

    By the order alone, no data are read; a span's shares are those of all consecutive spans of an epoch.
    """
    num_samples = NUM_SOURCES * SOURCE_SAMPLES
    block, window = choose_windows(
        num_samples=num_samples, num_bytes=SAMPLE_BYTES * num_samples, global_batch_size=global_batch_size
    )
    order = Order(
        num_samples=num_samples,
        global_batch_size=global_batch_size,
        block_samples=block,
        window_samples=window,
        seed=1,
    )
    lanes = range(global_batch_size)
    samples = np.concatenate([order.samples_of(0, lanes, *each) for each in order.windows(0)], axis=1)
    sources = samples.T[: order.steps_per_epoch // max(spans) * max(spans)] // SOURCE_SAMPLES
    counts = np.stack([(sources == source).sum(1) for source in range(NUM_SOURCES)])
    found = {}
    for span in spans:
        drawn = span * global_batch_size
        shares = counts.reshape(NUM_SOURCES, -1, span).sum(2)
        fair = drawn / NUM_SOURCES * (1 - 1 / NUM_SOURCES)
        found[span] = float(((shares - drawn / NUM_SOURCES) ** 2).mean()) / fair
    return found
