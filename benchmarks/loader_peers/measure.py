"""Drive a loader: ``PEER.py DATA ROWS.npy``, which first makes DATA of the rows unless it exists.

The first batch is skipped. Then each line of standard input is a number of seconds for which it counts
tokens. It answers with a line of JSON: tokens, CPU and wall seconds of the process, and its peak memory. The
loop only counts, so batches stay in the CPU cache.
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
    """Run the command line with ``prepare(rows, out)`` and ``batches(out)``, which never ends."""
    data, rows = map(Path, sys.argv[1:])
    if not data.exists():
        data.mkdir()
        # In a separate process, so that its memory does not count in the peak.
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
    """Count tokens that are not padding, and their cost."""
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
    """Return the peak of this program. ru_maxrss would begin at the memory of the benchmark."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def count(batch) -> tuple[int, int]:
    """Return the tokens of a batch with labels, without and with padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape
    assert str(ids.dtype) == str(labels.dtype) == "torch.int64"
    places = ids.numel()
    if ids.shape == (BATCH, SEQ_LEN) or "attention_mask" not in batch:
        return places, places  # rows; the last batch of an epoch may be short
    return int(batch["attention_mask"].sum()), places


def with_labels(ids) -> dict:
    """Return int64[batch, seq] as ids and labels, like every training loop."""
    return {"input_ids": ids, "labels": ids.clone()}


def epochs(loader) -> Iterator:
    """Yield the batches of endless epochs."""
    while True:
        yield from loader
