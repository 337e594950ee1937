"""Where staged copies of a data set lie, and whether a shard's are there.

    DIR/<first 16 digits of the plan id>/shard-00000.tar, shard-00000.idx

Equal plans give equal bytes, so one folder serves every copy of a data set, and no other data set. The idx
appears first and the tar after it, both by rename and verified, so a pair of the right sizes is whole.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

from loader.shards.shard_set import DatasetShards, ExternalTar
from shardprep.format import DatasetSpec, idx_path, tar_path

logger = logging.getLogger(__name__)

PLAN_DIGITS = 16


def staged_folder(staged_dir: str | os.PathLike[str], spec: DatasetSpec) -> Path:
    """The folder of a data set's copies; absolute, links not followed."""
    return Path(os.path.abspath(staged_dir)) / spec.plan_id[:PLAN_DIGITS]  # noqa: PTH100


def is_staged(folder: Path, shard_id: int, tar_bytes: int, idx_bytes: int) -> bool:
    """Whether both files of a shard are there with these sizes. 6 us; an error of the disk counts as no."""
    try:
        return (
            os.stat(tar_path(folder, shard_id)).st_size == tar_bytes  # noqa: PTH116  half the time of Path.stat
            and os.stat(idx_path(folder, shard_id)).st_size == idx_bytes  # noqa: PTH116
        )
    except OSError:
        return False


def with_copies(
    source: DatasetShards | ExternalTar, staged_dir: str | os.PathLike[str] | None
) -> DatasetShards | ExternalTar:
    """The same shards, which are to be looked for in ``staged_dir``, too; external tars have no copies.

    Nothing staged on this node is a warning: its ranks are slower, and nothing else is wrong.
    """
    if staged_dir is None or isinstance(source, ExternalTar):
        return source
    folder = staged_folder(staged_dir, source.spec)
    try:
        why = "" if stat.S_ISDIR(folder.stat().st_mode) else f"{folder} is no folder"
    except OSError as error:
        why = str(error)
    if why:
        logger.warning(
            "staged_dir=%s holds no copies of %s on this node (%s); what is not there when it is "
            "opened is read from %s. To stage: python -m loader stage %s --to %s",
            staged_dir, source.folder, why, source.folder, source.folder, staged_dir,
        )  # fmt: skip
    return replace(source, staged_folder=folder)
