"""The storage targets (OSTs) of a data set's shards, where ``verify`` found them on Lustre."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocess.shard_format import OSTS_NAME, ShardprepError, read_osts

logger = logging.getLogger(__name__)


def known_osts(folder: Path, num_shards: int) -> npt.NDArray[np.int64] | None:
    """The OST of each shard: int64[num_shards]; None without an osts.json, or with a broken one.

    Only the order of opening follows from it, so what is wrong with it is logged and no error.
    """
    try:
        return read_osts(folder, num_shards)
    except ShardprepError as error:
        logger.warning(
            "%s is left aside (%s); `python -m preprocess verify` writes it anew", folder / OSTS_NAME, error
        )
        return None
