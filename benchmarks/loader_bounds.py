"""Measure the lower bound of each stage of the loader, alone, per 16,384 tokens.

    python benchmarks/loader_bounds.py DATA [DATA ...]

DATA is a data set of packed rows, or of documents with JSON ids, whose first shard is in the page cache. This
prints a line of JSON: folder -> stage -> microseconds of CPU per batch of 8 rows of 2,048 tokens, or per as
many tokens of documents. ``make bench_loader`` prints them beside the speed that the loader reaches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from loader_data_sets import BATCH_TOKENS

from loader.read.json_ids import DECODE_BYTES, parse_id_lists
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.names import tar_name

_NUM_ROWS = 8
_PARSE, _READ = "JSON to ids alone", "read from the page cache"
_WIDEN, _LABELS, _TENSORS = "widen to int64", "a copy for the labels", "two tensors"
_NUM_BATCHES = 300


def bounds_us(folder: Path) -> dict[str, float]:
    """Return the microseconds of CPU of each stage, per BATCH_TOKENS."""
    spec = read_index(DataFolder(folder)).spec
    records = read_idx(DataFolder(folder), spec, 0)
    fd = os.open(folder / tar_name(0), os.O_RDONLY)
    try:
        found = _rows(fd, records) if spec.has_rows else _documents(fd, records)
    finally:
        os.close(fd)
    ids = np.arange(BATCH_TOKENS, dtype=np.uint32).reshape(_NUM_ROWS, -1)
    wide = ids.astype(np.int64)
    found[_WIDEN] = _each_us(lambda: ids.astype(np.int64))
    found[_LABELS] = _each_us(wide.copy)
    found[_TENSORS] = _each_us(lambda: (torch.from_numpy(wide), torch.from_numpy(wide)))
    return found


def _rows(fd: int, records: np.ndarray) -> dict[str, float]:
    """Read rows one by one, in random order."""
    row_bytes = int(records["num_bytes"][0])
    chosen = np.random.default_rng(1).integers(len(records), size=_NUM_ROWS)
    places = records["offset"][chosen].tolist()
    return {_READ: _each_us(lambda: [os.pread(fd, row_bytes, place) for place in places])}


def _documents(fd: int, records: np.ndarray) -> dict[str, float]:
    """Read the ids of consecutive documents in one call, with the bytes between them, and parse them."""
    ends = np.cumsum(records["num_bytes"])
    held = records[: int(np.searchsorted(ends, DECODE_BYTES))]
    begin = int(held["offset"][0])
    num_bytes = int(held["offset"][-1]) + int(held["num_bytes"][-1]) - begin
    text = memoryview(os.pread(fd, num_bytes, begin))
    places = zip((held["offset"] - begin).tolist(), held["num_bytes"].tolist(), strict=True)
    lists = [text[place : place + size] for place, size in places]
    scale = BATCH_TOKENS / int(held["num_tokens"].sum())
    return {
        _READ: scale * _each_us(lambda: os.pread(fd, num_bytes, begin)),
        _PARSE: scale * _each_us(lambda: parse_id_lists(lists)),
    }


def _each_us(call: Callable[[], object]) -> float:
    """Return the microseconds of CPU per call."""
    call()
    began = time.process_time()
    for _ in range(_NUM_BATCHES):
        call()
    return (time.process_time() - began) / _NUM_BATCHES * 1e6


def main() -> int:
    torch.set_num_threads(1)
    print(json.dumps({name: bounds_us(Path(name)) for name in sys.argv[1:]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
