"""What all loaders are driven by: ``PEER.py prepare ROWS.npy OUT`` and ``PEER.py read OUT SECONDS``.

``read`` skips the first batch, then counts tokens for some seconds and prints one line of JSON: tokens,
CPU and wall seconds of the process, and its peak memory. The loop only counts, so batches stay hot in cache.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH, SEQ_LEN, NUM_SHARDS = 8, 2048, 8


def run(prepare: Callable, batches: Callable) -> None:
    """Do what the command line says. ``prepare(rows, out)``; ``batches(out)`` never ends."""
    what, first, second = sys.argv[1:]
    if what == "prepare":
        Path(second).mkdir(parents=True)
        prepare(np.load(first, mmap_mode="r"), Path(second))
    else:
        print(json.dumps(measured(batches(Path(first)), float(second))))


def measured(stream: Iterator, seconds: float) -> dict[str, float]:
    """Tokens that are no padding, and what they cost."""
    began = time.perf_counter()
    count(next(stream))
    first_s = time.perf_counter() - began
    cpu, wall, tokens, padding = time.process_time(), time.perf_counter(), 0, 0
    while time.perf_counter() - wall < seconds:
        real, places = count(next(stream))
        tokens, padding = tokens + real, padding + places - real
    return {
        "tokens": tokens,
        "padding": padding,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "first_batch_s": first_s,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Of this program alone; ru_maxrss would begin at what the benchmark itself held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def count(batch) -> tuple[int, int]:
    """Tokens with and without padding of a batch with labels."""
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape
    assert str(ids.dtype) == str(labels.dtype) == "torch.int64"
    places = ids.numel()
    if ids.shape == (BATCH, SEQ_LEN) or "attention_mask" not in batch:
        return places, places  # rows; the last batch of an epoch may be short
    return int(batch["attention_mask"].sum()), places


def with_labels(ids) -> dict:
    """int64[batch, seq] -> ids and labels, as every training loop makes them."""
    return {"input_ids": ids, "labels": ids.clone()}


def epochs(loader) -> Iterator:
    """Again and again."""
    while True:
        yield from loader
