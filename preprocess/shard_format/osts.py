"""osts.json: on which Lustre storage target (OST) each tar begins, for the order in which readers open them.

A hint, no part of the data set: it differs between copies, and without it, or with a wrong one, shards are
opened in another order, and nothing else changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocess.shard_format.errors import BrokenShard
from preprocess.shard_format.manifest import parse_json
from preprocess.shard_format.names import FORMAT_VERSION, OSTS_NAME


def osts_json(osts: Sequence[int]) -> bytes:
    """The bytes of osts.json; -1 stands for an OST that is not known."""
    head = {"format": "shardprep-osts", "version": FORMAT_VERSION, "osts": list(osts)}
    return (json.dumps(head, separators=(",", ":")) + "\n").encode()


def read_osts(folder: Path, num_shards: int) -> npt.NDArray[np.int64] | None:
    """The OST of each shard: int64[num_shards]; None where there is no osts.json.

    Raises BrokenShard, UnknownVersion; OSError where the file system fails.
    """
    path = folder / OSTS_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    found = parse_json(path, raw, "shardprep-osts").get("osts")
    if not isinstance(found, list) or len(found) != num_shards or not all(map(_is_ost, found)):
        what = f"{len(found)} entries" if isinstance(found, list) else type(found).__name__
        raise BrokenShard(f"{path} holds {what}, expected the numbers of the OSTs of {num_shards} shards")
    return np.array(found, np.int64)


def _is_ost(value: object) -> bool:
    return type(value) is int and -1 <= value < 1 << 31
