"""An open shard: its tar, and its idx, which says where each sample lies in it. Opening checks both.

Opens shards: a staged copy where there is one, else the data set's own file.
"""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shards.shard_set import DatasetShards, ExternalTar
from loader.shards.staged_folder import is_staged
from loader.shards.tar_samples import JSON, RAW, TarSamples, scan_tar
from shardprep.errors import BrokenShard, MissingShard, ShardprepError
from shardprep.format import IdxFile, idx_path, open_idx, rerun_command, tar_path
from shardprep.regular_files import NOT_THERE, close_read, open_regular

logger = logging.getLogger(__name__)

HELD_IDX_BYTES = 256 << 10  # an idx up to this is read at opening, else what is asked for


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """One tar, open for reading. Its samples' records are in memory, or to be read from its open idx."""

    path: Path
    handle: int
    num_bytes: int
    idx: IdxFile | None  # open, where the records are not held
    held: Any  # columns as in the idx, a row a sample; None where there is ``idx``
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW; one, or one a sample
    token_bytes: int  # of a RAW id
    row_tokens: int  # of a packed row, else 0
    remedy: str
    is_copy: bool = False  # staged, so the data set has the same bytes
    sums: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # what its readers keep with it

    def file(self, *, of_idx: bool) -> tuple[Path, int]:
        """Path and handle of the tar, or of the idx that is read in parts."""
        return (self.idx.path, self.idx.handle) if of_idx and self.idx else (self.path, self.handle)

    def close(self) -> None:
        """Close tar and idx."""
        close_read(self.handle)
        if self.idx is not None:
            close_read(self.idx.handle)


def open_shard(source: DatasetShards | ExternalTar, row: int) -> OpenShard:
    """Open one shard of a source.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan with the command that mends it; OSError
    where the file system fails.
    """
    if isinstance(source, ExternalTar):
        samples, path, expected = source.samples, source.path, source.tar_bytes
        remedy = "it changed since it was scanned: copy it again, and start anew"
    else:
        path, expected = source.path_of(row), int(source.tar_bytes[row])
        remedy = f"run: {rerun_command(int(source.shard_ids[row]), source.folder)}"
    handle = _open_file(path, remedy)
    try:
        _check_size(path, handle, expected, remedy)
        found, idx, held = (samples, None, None) if isinstance(source, ExternalTar) else _records(source, row)
    except BaseException:
        close_read(handle)
        raise
    is_json = isinstance(source, DatasetShards) and source.spec.kind == "json"
    return OpenShard(
        path=path,
        handle=handle,
        num_bytes=expected,
        idx=idx,
        held=held if found is None else vars(found),
        encoding=np.array([JSON if is_json else RAW], np.int8) if found is None else found.encoding,
        token_bytes=_token_bytes(source, found),
        row_tokens=source.row_tokens,
        remedy=remedy,
    )


def _token_bytes(source: DatasetShards | ExternalTar, found: TarSamples | None) -> int:
    if found is not None:
        return found.token_bytes
    assert isinstance(source, DatasetShards)
    return 0 if source.spec.kind == "json" else source.spec.dtype.itemsize


def _records(source: DatasetShards, row: int) -> tuple[TarSamples | None, IdxFile | None, Any]:
    """What the tar itself tells, read once, where there is no idx; else the idx, or all of it if small."""
    shard_id = int(source.shard_ids[row])
    path = idx_path(source.folder, shard_id)
    try:
        idx = open_idx(source.folder, source.spec, shard_id)
    except MissingShard:
        logger.warning("%s is missing; its tar is scanned instead, as each process that opens it must", path)
        samples = scan_tar(source.path_of(row), count_tokens=True)
        if samples.row_tokens != source.row_tokens:
            raise BrokenShard(
                f"{source.path_of(row)} has rows of {samples.row_tokens} tokens, its manifest says "
                f"{source.row_tokens}"
            ) from None
        _check_num_samples(source, row, path, len(samples.offset))
        return samples, None, None
    keep = False
    try:
        _check_num_samples(source, row, path, idx.num_samples)
        if idx.num_samples * idx.dtype.itemsize <= HELD_IDX_BYTES:
            return None, None, idx.read_all()
        keep = True
        return None, idx, None
    finally:
        if not keep:
            close_read(idx.handle)


def _check_num_samples(source: DatasetShards, row: int, path: Path, found: int) -> None:
    if found != source.num_samples[row]:
        raise BrokenShard(
            f"{path} has {found} of {source.num_samples[row]} samples; "
            f"run: {rerun_command(int(source.shard_ids[row]), source.folder)}"
        )


def _open_file(path: Path, remedy: str) -> int:
    try:
        return open_regular(path)
    except NOT_THERE:
        raise MissingShard(f"{path} is missing; {remedy}") from None


def _check_size(path: Path, handle: int, expected: int, remedy: str) -> None:
    num_bytes = os.fstat(handle).st_size
    if num_bytes != expected:
        raise BrokenShard(f"{path} has {num_bytes} of {expected} bytes; {remedy}")


class ShardOpener:
    """One a process. Copies are no longer looked for once one of them failed.

    A copy that cannot be read says that its disk fails, so the others of the folder are left, too: one
    warning, and no time spent on waiting for a disk that has the same bytes elsewhere. A copy that is
    missing or of a wrong size is no copy, and looking for it costs 6 us a shard that is opened.
    """

    def __init__(self) -> None:
        self._left: set[Path] = set()  # folders of copies
        self._copies: dict[Path, DatasetShards] = {}  # by the data set's folder: the same shards as copies

    def open(self, source: DatasetShards | ExternalTar, row: int) -> OpenShard:
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
