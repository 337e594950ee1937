"""Writes osts.json, from which readers take an order of opening that spreads them over the servers."""

from __future__ import annotations

from pathlib import Path

import lustre
from preprocess.shard_format import OSTS_NAME, ShardprepError, osts_json, tar_path
from preprocess.shard_format.published_file import publish_bytes


def publish_osts(folder: Path, num_shards: int) -> str | None:
    """Ask lfs where each tar begins and publish osts.json; off Lustre nothing is done.

    Never fails, as nothing depends on the file; the line that it returns says why there is none, or an old
    one is left.
    """
    try:
        osts = lustre.first_osts(folder, [tar_path(folder, number).name for number in range(num_shards)])
        if osts is not None:
            publish_bytes(folder / OSTS_NAME, osts_json(osts))
    except (lustre.LustreError, ShardprepError) as error:
        return f"note: {OSTS_NAME} is not written, shards are opened in an order without OSTs: {error}"
    return None
