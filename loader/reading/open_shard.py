"""An open shard: its tar, and its idx, which says where each sample lies in it.

Opening checks the size of the tar and the header and size of the idx. A small idx is read at once, of a large
one only the parts that are asked for. Without an idx the headers of the tar are scanned instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loader.shards.shard_set import DatasetShards, ExternalTar
from loader.shards.tar_samples import JSON, RAW, TarSamples, scan_tar
from loader.staging.staged_copies import StagedCopies, recheck_command
from shardprep.errors import BrokenShard, MissingShard, ShardprepError
from shardprep.format.idx import IdxFile, RecordFile, open_idx
from shardprep.format.names import idx_path, rerun_command
from shardprep.format.sample_crcs import open_crcs
from shardprep.regular_files import NOT_THERE, close_read, open_regular

logger = logging.getLogger(__name__)

Part = Literal["tar", "idx", "crcs"]  # a file of a shard
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
    crcs: RecordFile | None  # open, where they are to be compared
    is_copy: bool = False  # staged, so the data set has the same bytes
    sums: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # what its readers keep with it

    def records_of(self, part: Part) -> RecordFile | None:
        """The idx that is read in parts, or the crc32s; None where there is none, and of the tar."""
        return {"tar": None, "idx": self.idx, "crcs": self.crcs}[part]

    def file(self, part: Part) -> tuple[Path, int]:
        """Path and handle of a part that is open; else of the tar."""
        records = self.records_of(part)
        return (self.path, self.handle) if records is None else (records.path, records.handle)

    def close(self) -> None:
        """Close every file."""
        close_read(self.handle)
        for records in (self.idx, self.crcs):
            if records is not None:
                close_read(records.handle)


def open_shard(source: DatasetShards | ExternalTar, row: int, *, crcs_from: Path | None = None) -> OpenShard:
    """Open one shard of a source; with ``crcs_from``, the crc32s that lie in this data set, too.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan with the command that mends it; OSError
    where the file system fails.
    """
    if isinstance(source, ExternalTar):
        path, expected = source.path, source.tar_bytes
        remedy = "it changed since it was scanned: copy it again, and start anew"
    else:
        path, expected = source.path_of(row), int(source.tar_bytes[row])
        remedy = f"run: {rerun_command(int(source.shard_ids[row]), source.folder)}"
    with contextlib.ExitStack() as opened:  # closes what is open where something fails
        handle = _open_file(path, remedy)
        opened.callback(close_read, handle)
        _check_size(path, handle, expected, remedy)
        found: TarSamples | None
        idx, held, crcs = None, None, None
        if isinstance(source, ExternalTar):
            found = source.samples
        else:
            found, idx, held = _records(source, row, needs_idx=crcs_from is not None)
            if idx is not None:
                opened.callback(close_read, idx.handle)
            crcs = None if crcs_from is None else _crcs(source, row, crcs_from)
        opened.pop_all()
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
        crcs=crcs,
    )


def _token_bytes(source: DatasetShards | ExternalTar, found: TarSamples | None) -> int:
    if found is not None:
        return found.token_bytes
    assert isinstance(source, DatasetShards)
    return 0 if source.spec.kind == "json" else source.spec.token_bytes


def _crcs(source: DatasetShards, row: int, folder: Path) -> RecordFile:
    """The crc32s of a shard's samples, open. Raises BrokenShard where they are of another number of them."""
    shard_id = int(source.shard_ids[row])
    crcs = open_crcs(folder, source.spec, shard_id, str(source.tar_sha256[row]))
    if crcs.num_samples != source.num_samples[row]:
        close_read(crcs.handle)
        raise BrokenShard(
            f"{crcs.path} has the crc32s of {crcs.num_samples} of {source.num_samples[row]} samples; "
            f"{crcs.remedy}"
        )
    return crcs


def _records(
    source: DatasetShards, row: int, *, needs_idx: bool
) -> tuple[TarSamples | None, IdxFile | None, Any]:
    """What the tar itself tells, read once, where there is no idx; else the idx, or all of it if small."""
    shard_id = int(source.shard_ids[row])
    path = idx_path(source.folder, shard_id)
    try:
        idx = open_idx(source.folder, source.spec, shard_id)
    except MissingShard:
        if needs_idx:  # its places are what the crc32s are of
            raise
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


def open_copy(
    copies: StagedCopies, source: DatasetShards, row: int, *, crcs_from: Path | None = None
) -> OpenShard | None:
    """The staged copy of one shard, opened; None where there is none, or it cannot be opened."""
    found = copies.find(source, row)
    if found is None:
        return None
    try:
        shard = open_shard(found, row, crcs_from=crcs_from)
    except (OSError, ShardprepError) as error:
        copies.leave(found.folder, error)
        return None
    return replace(shard, is_copy=True, remedy=f"run: {recheck_command(source, found.folder)}")
