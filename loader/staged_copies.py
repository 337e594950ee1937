"""Where staged copies of a data set lie, and which of them a process reads.

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

from loader.find_shards import DatasetShards, ShardSet
from shardprep.console import quoted
from shardprep.files import NOT_THERE
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.names import idx_path, tar_path

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


def warn_of_missing_copies(shards: ShardSet, staged_dir: str | os.PathLike[str] | None) -> None:
    """Log a warning for each data set of which nothing is staged on this node.

    Copies that lie in a folder of another user are warned of, too: who owns it decides what is read.
    """
    for source in () if staged_dir is None else shards.datasets:
        folder = staged_folder(str(staged_dir), source.spec)
        try:
            found = folder.stat()
            why = "" if stat.S_ISDIR(found.st_mode) else f"{folder} is no folder"
            if found.st_uid not in (os.getuid(), 0):
                logger.warning(
                    "the staged copies in %s belong to user %s, this process to user %s; what they hold is "
                    "not compared with the data set when it is read",
                    folder, found.st_uid, os.getuid(),
                )  # fmt: skip
        except OSError as error:
            why = str(error)
        if why:
            logger.warning(
                "staged_dir=%s holds no copies of %s on this node (%s); what is not there when it is "
                "opened is read from %s. To stage: shardprep stage %s --to %s",
                staged_dir, source.folder, why, source.folder, source.folder, staged_dir,
            )  # fmt: skip


class StagedCopies:
    """The copies that a process may read, one object per process.

    Once a copy cannot be read, its disk fails, so the other copies of that folder are left, too, with one
    warning. A copy that is missing or of a wrong size is no copy. A look costs 6 us per shard that is opened.
    """

    def __init__(self, staged_dir: str | os.PathLike[str]) -> None:
        self._staged_dir = staged_dir
        self._left: set[Path] = set()  # folders of copies
        self._copies: dict[Path, DatasetShards] = {}  # by the data set's folder: the same shards as copies

    def find(self, source: DatasetShards, row: int) -> DatasetShards | None:
        """The data set as it lies in the folder of copies, if this shard has a copy there."""
        folder = staged_folder(self._staged_dir, source.spec)
        if folder in self._left:
            return None
        shard_id = int(source.shard_ids[row])
        if not is_staged(folder, shard_id, int(source.tar_bytes[row]), int(source.idx_bytes[row])):
            tar = tar_path(folder, shard_id)
            try:
                tar.lstat()
                self.leave(folder, f"{tar} or its idx is of a wrong size")
            except NOT_THERE:  # it may come
                pass
            except OSError as error:
                self.leave(folder, error)
            return None
        return self._copies.setdefault(source.folder, replace(source, folder=folder))

    def leave(self, folder: Path, why: object) -> None:
        """Open no copy of a folder any more; the first time is a warning."""
        if folder not in self._left:
            self._left.add(folder)
            logger.warning(
                "a staged copy fails (%s); no copy in %s is opened any more, its shards are read elsewhere",
                why,
                folder,
            )


def recheck_command(source: DatasetShards, folder: Path) -> str:
    """The command that mends the copies of a data set in a folder."""
    words = quoted(source.folder), quoted(folder.parent)
    return f"shardprep stage {words[0]} --to {words[1]} --recheck"
