"""An open shard: its tar's handle, and where each sample lies in it. Opening checks it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shard_set import DatasetShards, ForeignTar
from loader.tar_samples import JSON, RAW, TarSamples, scan_tar
from preprocess.shard_format import BrokenShard, MissingShard, idx_path, read_idx, rerun_command

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """One tar, open for reading; close ``handle`` with ``os.close``."""

    path: Path
    handle: int
    num_bytes: int
    records: Any  # columns as in the idx, a row a sample
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW; one, or one a sample
    token_bytes: int  # of a RAW id
    row_tokens: int  # of a packed row, else 0
    remedy: str
    sums: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # what its readers keep with it

    @cached_property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample; -1 where they were not counted."""
        return np.asarray(self.records["num_tokens"], np.int64)


def open_shard(source: DatasetShards | ForeignTar, row: int) -> OpenShard:
    """Open one shard of a source.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan with the command that mends it; OSError
    where the file system fails.
    """
    if isinstance(source, ForeignTar):
        samples, path, expected = source.samples, source.path, source.tar_bytes
        remedy = "it changed since it was scanned: copy it again, and start anew"
    else:
        path, expected = source.path_of(row), int(source.tar_bytes[row])
        remedy = f"run: {rerun_command(int(source.shard_ids[row]), source.folder)}"
    handle = _open_file(path, remedy)
    try:
        _check_size(path, handle, expected, remedy)
        found: TarSamples | None = samples if isinstance(source, ForeignTar) else None
        records: Any = None
        if isinstance(source, DatasetShards):
            records, found = _records(source, row)
    except BaseException:
        os.close(handle)
        raise
    is_json = isinstance(source, DatasetShards) and source.spec.kind == "json"
    return OpenShard(
        path=path,
        handle=handle,
        num_bytes=expected,
        records=vars(found) if records is None else records,
        encoding=np.array([JSON if is_json else RAW], np.int8) if found is None else found.encoding,
        token_bytes=_token_bytes(source, found),
        row_tokens=source.row_tokens,
        remedy=remedy,
    )


def _token_bytes(source: DatasetShards | ForeignTar, found: TarSamples | None) -> int:
    if found is not None:
        return found.token_bytes
    assert isinstance(source, DatasetShards)
    return 0 if source.spec.kind == "json" else source.spec.dtype.itemsize


def _records(source: DatasetShards, row: int) -> tuple[Any, TarSamples | None]:
    """The idx, or where there is none what the tar itself tells (reading it once)."""
    shard_id = int(source.shard_ids[row])
    path, samples = idx_path(source.folder, shard_id), None
    try:
        records: Any = read_idx(source.folder, source.spec, shard_id)
        found = len(records)
    except MissingShard:
        logger.warning("%s is missing; its tar is scanned instead, as each process that opens it must", path)
        samples = scan_tar(source.path_of(row), count_tokens=True)
        records, found = None, len(samples.offset)
        if samples.row_tokens != source.row_tokens:
            raise BrokenShard(
                f"{source.path_of(row)} has rows of {samples.row_tokens} tokens, its manifest says "
                f"{source.row_tokens}"
            ) from None
    if found != source.num_samples[row]:
        raise BrokenShard(
            f"{path} has {found} of {source.num_samples[row]} samples; "
            f"run: {rerun_command(shard_id, source.folder)}"
        )
    return records, samples


def _open_file(path: Path, remedy: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; {remedy}") from None


def _check_size(path: Path, handle: int, expected: int, remedy: str) -> None:
    num_bytes = os.fstat(handle).st_size
    if num_bytes != expected:
        raise BrokenShard(f"{path} has {num_bytes} of {expected} bytes; {remedy}")
