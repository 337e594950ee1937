"""An open shard: its tar, and its idx, which says where each sample lies in it.

Opening checks the size of the tar and the header and size of the idx. A small idx is read at once, of a large
one only the parts that are asked for. Without an idx the headers of the tar are scanned instead.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shards.shard_set import DatasetShards, ExternalTar
from loader.shards.tar_samples import JSON, RAW, TarSamples, scan_tar
from loader.staging.staged_copies import StagedCopies, recheck_command
from shardprep.errors import BrokenShard, MissingShard, ShardprepError
from shardprep.format.idx import IdxFile, open_idx
from shardprep.format.names import idx_path, rerun_command
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
    has_mask: bool  # a byte per token of each row says which have a label
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
        has_mask=source.has_mask,
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


def open_copy(copies: StagedCopies, source: DatasetShards, row: int) -> OpenShard | None:
    """The staged copy of one shard, opened; None where there is none, or it cannot be opened."""
    found = copies.find(source, row)
    if found is None:
        return None
    try:
        shard = open_shard(found, row)
    except (OSError, ShardprepError) as error:
        copies.leave(found.folder, error)
        return None
    return replace(shard, is_copy=True, remedy=f"run: {recheck_command(source, found.folder)}")
