"""The sizes of all tars, looked at once, by rank 0: what is missing is known at the start, not hours in."""

from __future__ import annotations

import logging
import os
import shlex
import threading
from dataclasses import dataclass
from pathlib import Path

from loader.shards.shard_set import DatasetShards, ShardSet
from shardprep.errors import BrokenShard, MissingShard, ShardprepError
from shardprep.format.names import shard_name
from shardprep.id_ranges import id_ranges

logger = logging.getLogger(__name__)

WAIT_S = 0.5
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A tar that is not there, or has not the bytes that its manifest says."""

    path: Path
    shard_id: int
    found_bytes: int | None  # None: not there
    expected_bytes: int


class SizeCheck:
    """Compares every tar of our data sets with its manifest's size, in a thread of its own.

    For rank 0 alone: a look at 99,999 files costs 1 s on a local disk, but a call of a metadata server
    each on Lustre, which all ranks together would swamp. ``wait`` takes half a second at most, so that a
    loader is made quickly; what is found later is raised where the next run of batches is fetched. The
    other ranks learn nothing of it: they wait in their next collective, until the launcher, which sees rank
    0 end, ends them (torchrun and ``srun --kill-on-bad-exit`` do). External tars were scanned already.
    """

    def __init__(self, shards: ShardSet) -> None:
        self._datasets = shards.datasets
        self.error: ShardprepError | None = None  # set once a tar was found missing or of a wrong size
        self._thread = threading.Thread(target=self._look, name="size check", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Give it a moment to end; raise MissingShard or BrokenShard where it found one by then."""
        self._thread.join(WAIT_S)
        if self.error is not None:
            raise self.error

    def _look(self) -> None:
        for source in self._datasets:
            try:
                misfits = find_misfits(source)
            except OSError as error:  # reading tries again, and will tell
                logger.warning("the sizes of the tars in %s cannot be looked at: %s", source.folder, error)
                continue
            if misfits:
                self.error = _refusal(source, misfits)
                return


def find_misfits(source: DatasetShards) -> list[Misfit]:
    """The tars of a data set's shards that are missing or of a wrong size, in their order.

    One listing of the folder, whose order a Lustre client reads attributes ahead in, and a stat a file.
    """
    names = [f"{shard_name(shard_id)}.tar" for shard_id in source.shard_ids.tolist()]
    expected = dict(zip(names, source.tar_bytes.tolist(), strict=True))
    folder = os.open(source.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(folder) as entries:
            found = {entry.name: _size(entry.name, folder) for entry in entries if entry.name in expected}
    finally:
        os.close(folder)
    if found == expected:
        return []
    return [
        Misfit(
            path=source.folder / name,
            shard_id=shard_id,
            found_bytes=None if found.get(name, -1) < 0 else found[name],
            expected_bytes=expected[name],
        )
        for name, shard_id in zip(names, source.shard_ids.tolist(), strict=True)
        if found.get(name, -1) != expected[name]
    ]


def _size(name: str, folder: int) -> int:
    """Bytes of a file; -1 where it is gone, or a link to nothing."""
    try:
        return os.stat(name, dir_fd=folder).st_size
    except FileNotFoundError:
        return -1


def _refusal(source: DatasetShards, misfits: list[Misfit]) -> ShardprepError:
    missing = [misfit for misfit in misfits if misfit.found_bytes is None]
    named = (missing or misfits)[:_NUM_NAMED]
    lines = "; ".join(map(_line, named))
    kind = MissingShard if missing else BrokenShard
    ids = id_ranges(misfit.shard_id for misfit in misfits)
    folder = shlex.quote(str(source.folder))
    return kind(
        f"{source.folder}: of {len(source.shard_ids)} tars {len(missing)} are missing and "
        f"{len(misfits) - len(missing)} have not their manifest's size: {lines}"
        f"{'; ...' if len(misfits) > len(named) else ''}; copy them anew, or make them again: "
        f"python -m preprocess run {folder}{f' --shards {ids}' if len(ids) <= 200 else ''}"
    )


def _line(misfit: Misfit) -> str:
    if misfit.found_bytes is None:
        return f"{misfit.path.name} is missing"
    return f"{misfit.path.name} has {misfit.found_bytes} of {misfit.expected_bytes} bytes"
