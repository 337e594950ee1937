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

from shardprep.format.checked_json import read_checked, with_content_hash
from shardprep.format.names import OSTS_NAME
from shardprep.regular_files import NOT_THERE

MAX_OSTS_BYTES = 4 << 20  # of 99,999 shards: 0.5 MB


def osts_json(osts: Sequence[int]) -> bytes:
    """The bytes of osts.json; -1 stands for an OST that is not known."""
    data = with_content_hash("shardprep-osts", {"osts": list(osts)})
    return (json.dumps(data, separators=(",", ":")) + "\n").encode()


def read_osts(folder: Path, num_shards: int) -> npt.NDArray[np.int64] | None:
    """The OST of each shard: int64[num_shards]; None where there is no osts.json.

    Raises BrokenShard, UnknownVersion, ReadWriteError.
    """
    try:
        fields = read_checked(folder / OSTS_NAME, "shardprep-osts", max_bytes=MAX_OSTS_BYTES)
    except NOT_THERE:
        return None
    found = fields.list_of("osts", _is_ost, "the number of an OST, or -1")
    fields.end()
    if len(found) != num_shards:
        raise fields.wrong("osts", f"{len(found)} entries", f"those of {num_shards} shards")
    return np.array(found, np.int64)


def _is_ost(value: object) -> bool:
    return type(value) is int and -1 <= value < 1 << 31
