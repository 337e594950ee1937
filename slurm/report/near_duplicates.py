"""How many documents at the beginning of a shard are equal, or nearly so, to an earlier one: a hint.

Documents are compared by their token ids. Two are nearly equal if minhash says that they share at least 3/4
of their runs of five tokens; documents of fewer than 20 tokens are compared as a whole alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import read_idx
from shardprep.format.shards import ShardSamples

_MOST_TOKENS, _MOST_SAMPLES = 4_000_000, 20_000
_RUN, _LEAST_TOKENS = 5, 20
_NUM_HASHES, _NUM_BANDS, _LEAST_EQUAL = 16, 4, 12  # 4 bands of 4 hashes find 85 % of pairs that share 3/4


def near_duplicates(folder: Path, spec: DatasetSpec, shard_id: int, num_examples: int) -> dict[str, Any]:
    """The report's ``duplicates``. Raises what reading a shard raises."""
    num_tokens = read_idx(folder, spec, shard_id)["num_tokens"].astype(np.int64)
    num_samples = int(np.searchsorted(np.cumsum(num_tokens), _MOST_TOKENS)) + 1
    num_tokens = num_tokens[: min(num_samples, _MOST_SAMPLES)]
    addresses, begins = [], []
    with ShardSamples(folder, spec, shard_id, slice(len(num_tokens))) as samples:
        ids = np.concatenate([np.empty(0, np.uint32), *samples.pieces()])
        for number, first in enumerate((np.cumsum(num_tokens) - num_tokens).tolist()):
            for place, begin in enumerate(sorted({0, *samples.starts(number).tolist()})):
                address = f"{shard_id}:{number}"
                addresses.append(f"{address}:{place}" if spec.has_rows else address)
                begins.append(first + begin)
    copies, near = _equal_ones(ids, begins), dict[int, int]()
    if len(ids) >= _LEAST_TOKENS:
        near = {number: other for number, other in _near_ones(ids, begins).items() if number not in copies}
    found = [("copy", copies), ("near", near)]
    return {
        "shard": shard_id,
        "num_documents": len(begins),
        "num_copies": len(copies),
        "num_near": len(near),
        "examples": [
            {"kind": kind, "address": addresses[number], "like": addresses[other]}
            for kind, pairs in found
            for number, other in list(pairs.items())[:num_examples]
        ],
    }


def _equal_ones(ids: npt.NDArray[np.uint32], begins: list[int]) -> dict[int, int]:
    """Of each document with an earlier equal one, that one."""
    seen: dict[bytes, int] = {}
    found: dict[int, int] = {}
    for number, document in enumerate(np.split(ids, begins[1:])):
        first = seen.setdefault(document.tobytes(), number)
        if first != number:
            found[number] = first
    return found


def _near_ones(ids: npt.NDArray[np.uint32], begins: list[int]) -> dict[int, int]:
    """Of each document with an earlier one that is nearly equal, that one."""
    runs = np.zeros(len(ids), np.uint64)
    for place in range(_RUN):
        runs[: len(ids) - _RUN + 1] *= np.uint64(0x9E3779B97F4A7C15)
        runs[: len(ids) - _RUN + 1] += ids[place : len(ids) - _RUN + 1 + place]
    runs ^= runs >> np.uint64(29)
    first, last = np.array(begins), np.array([*begins[1:], len(ids)])
    in_two = (last[:, None] - np.arange(1, _RUN)).clip(0).ravel()  # where the run ends in another document
    hashes = np.empty((_NUM_HASHES, len(begins)), np.uint32)
    for number, factor in enumerate(np.random.default_rng(0).integers(1, 2**63, _NUM_HASHES, np.uint64)):
        hashed = (runs * (factor * np.uint64(2) + np.uint64(1)) >> np.uint64(32)).astype(np.uint32)
        hashed[in_two] = 0xFFFFFFFF
        hashes[number] = np.minimum.reduceat(hashed, first)
    found: dict[int, int] = {}
    long = np.flatnonzero(last - first >= _LEAST_TOKENS)
    for band in np.split(hashes[:, long], _NUM_BANDS):
        _, of_first, group = np.unique(band, axis=1, return_index=True, return_inverse=True)
        other = long[of_first[group.ravel()]]
        is_near = (hashes[:, long] == hashes[:, other]).sum(axis=0) >= _LEAST_EQUAL
        is_near &= other < long
        found |= dict(zip(long[is_near].tolist(), other[is_near].tolist(), strict=True))
    return dict(sorted(found.items()))
