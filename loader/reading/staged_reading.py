"""Opens shards: a staged copy where there is one, else the data set's own file."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from loader.reading.open_shard import OpenShard, open_shard
from loader.shards.shard_set import DatasetShards, ForeignTar
from loader.shards.staged_folder import is_staged
from preprocess.shard_format import ShardprepError, tar_path

logger = logging.getLogger(__name__)


class ShardOpener:
    """One a process. Copies are no longer looked for once one of them failed.

    A copy that cannot be read says that its disk fails, so the others of the folder are left, too: one
    warning, and no time spent on waiting for a disk that has the same bytes elsewhere. A copy that is
    missing or of a wrong size is no copy, and looking for it costs 6 us a shard that is opened.
    """

    def __init__(self) -> None:
        self._left: set[Path] = set()  # folders of copies
        self._copies: dict[Path, DatasetShards] = {}  # by the data set's folder: the same shards as copies

    def open(self, source: DatasetShards | ForeignTar, row: int) -> OpenShard:
        """Open one shard of a source; raises what ``open_shard`` does, of the data set's own files."""
        if isinstance(source, DatasetShards) and source.staged_folder is not None:
            shard = self._open_copy(source, source.staged_folder, row)
            if shard is not None:
                return shard
        return open_shard(source, row)

    def leave(self, shard: OpenShard, error: Exception) -> bool:
        """Take it that a shard cannot be read; whether it was a copy, so that opening it anew helps."""
        if shard.is_copy:
            self._leave(shard.path.parent, error)
        return shard.is_copy

    def _open_copy(self, source: DatasetShards, folder: Path, row: int) -> OpenShard | None:
        if folder in self._left:
            return None
        shard_id = int(source.shard_ids[row])
        if not is_staged(folder, shard_id, int(source.tar_bytes[row]), int(source.idx_bytes[row])):
            self._leave_unfit(folder, tar_path(folder, shard_id))
            return None
        copies = self._copies.setdefault(source.folder, replace(source, folder=folder, staged_folder=None))
        try:
            shard = open_shard(copies, row)
        except (OSError, ShardprepError) as error:
            self._leave(folder, error)
            return None
        stage = (
            f"python -m loader stage {shlex.quote(str(source.folder))} --to {shlex.quote(str(folder.parent))}"
        )
        return replace(shard, is_copy=True, remedy=f"run: {stage} --recheck")

    def _leave_unfit(self, folder: Path, tar: Path) -> None:
        """What is not there may come; the folder is left where a tar is there, or cannot be looked at."""
        try:
            tar.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._leave(folder, error)
            return
        self._leave(folder, f"{tar} or its idx is of a wrong size")

    def _leave(self, folder: Path, why: object) -> None:
        if folder not in self._left:
            self._left.add(folder)
            logger.warning(
                "a staged copy fails (%s); no copy in %s is opened any more, its shards are read elsewhere",
                why,
                folder,
            )
