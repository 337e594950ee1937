"""What all loaders are driven by: ``PEER.py DATA ROWS.npy``, which makes DATA of the rows unless it is there.

The first batch is skipped. Then each line of its standard input is a number of seconds: so long it counts
tokens, then prints one line of JSON: tokens, CPU and wall seconds of the process, and its peak memory. The
loop only counts, so batches stay hot in cache.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH, SEQ_LEN, NUM_SHARDS = 8, 2048, 8


def run(prepare: Callable, batches: Callable) -> None:
    """Do what the command line says. ``prepare(rows, out)``; ``batches(out)`` never ends."""
    data, rows = map(Path, sys.argv[1:])
    if not data.exists():
        data.mkdir()
        # A process of its own, so that its memory is not in the peak.
        child = multiprocessing.get_context("fork").Process(
            target=prepare, args=(np.load(rows, mmap_mode="r"), data)
        )
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(child.exitcode)
    began = time.perf_counter()
    stream = batches(data)
    count(next(stream))
    first_s = time.perf_counter() - began
    for line in sys.stdin:
        print(json.dumps(turn(stream, float(line)) | {"first_batch_s": first_s}), flush=True)


def turn(stream: Iterator, seconds: float) -> dict[str, float]:
    """Tokens that are no padding, and what they cost."""
    cpu, wall, tokens, padding = time.process_time(), time.perf_counter(), 0, 0
    while time.perf_counter() - wall < seconds:
        real, places = count(next(stream))
        tokens, padding = tokens + real, padding + places - real
    return {
        "tokens": tokens,
        "padding": padding,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
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
