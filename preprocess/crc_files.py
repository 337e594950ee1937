"""``verify --crcs``: the crc32 of each sample's bytes, for the loader's ``read_check="crc"``.

They are taken from a tar whose sha256 was found to be right a moment ago. A shard is read once more for it,
from the page cache where it fits in, at 0.5 to 2 s of CPU per gigabyte (one core; the rest of verify takes 4
to 20, the most for JSON). A file has 4 bytes per sample, 8 per row.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.atomic_files import STALE_AFTER_S, publish_bytes, remove_temporaries
from shardprep.errors import BrokenShard, CannotWrite
from shardprep.format.idx import ChunkCrcs, crcs_dtype, crcs_header
from shardprep.format.manifest import Manifest
from shardprep.format.names import crcs_path, shard_name, tar_path
from shardprep.regular_files import NOT_THERE, close_read, errors_named, open_regular, read_regular

# Read at once: ids follow each other; what a member has besides stands before half a megabyte of ids.
_PIECE_BYTES = {"ids": 4 << 20, "starts": 16 << 10, "mask": 256 << 10}
Span = tuple[int, int]  # byte of the tar, and number of bytes


def publish_crcs(folder: Path, manifest: Manifest, records: npt.NDArray[np.void]) -> None:
    """Write crcs/shard-N.crc of a proved shard, whose idx has ``records``, unless it is there and right.

    Raises CannotWrite, ReadWriteError or BrokenShard.
    """
    shard_id = manifest.shard_id
    dtype = crcs_dtype(manifest.spec.kind)
    crcs = _crcs_of_samples(tar_path(folder, shard_id), manifest.spec.seq_len, dtype, records).tobytes()
    chunks = ChunkCrcs(dtype)
    chunks.add(crcs)
    content = crcs_header(manifest.spec, shard_id, manifest.tar.sha256) + crcs + chunks.table()
    path = crcs_path(folder, shard_id)
    if _content_of(path, len(content)) == content:
        return
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
    remove_temporaries(path.parent, shard_name(shard_id), older_than_s=STALE_AFTER_S)
    publish_bytes(path, content)


def _content_of(path: Path, num_bytes: int) -> bytes:
    """Of the file as it is; nothing where there is none of that size."""
    try:
        return read_regular(path, max_bytes=num_bytes)
    except (*NOT_THERE, BrokenShard):
        return b""


def _crcs_of_samples(
    path: Path, seq_len: int, dtype: np.dtype[Any], records: npt.NDArray[np.void]
) -> npt.NDArray[np.void]:
    """Of each record of an idx: an array of ``dtype``, see ``crcs_dtype``."""
    crcs = np.empty(len(records), dtype)
    with errors_named(path):
        handle = open_regular(path)
        try:
            for column in dtype.names or ():
                tar = _Pieces(path, handle, _PIECE_BYTES[column])
                crcs[column] = [tar.crc(*span) for span in _spans(column, seq_len, records)]
        finally:
            close_read(handle)
    return crcs


def _spans(column: str, seq_len: int, records: npt.NDArray[np.void]) -> list[Span]:
    """The bytes that a column has the crc32s of."""
    if column == "ids":
        offsets, sizes = records["offset"], records["num_bytes"]
    elif column == "starts":
        offsets, sizes = records["starts_offset"], 4 * records["num_starts"].astype(np.int64)
    else:
        offsets, sizes = records["mask_offset"], np.full(len(records), seq_len)  # a byte per token
    return list(zip(offsets.tolist(), sizes.tolist(), strict=True))


class _Pieces:
    """A tar, of which a piece is held, so that samples which follow each other share a read."""

    def __init__(self, path: Path, handle: int, piece_bytes: int) -> None:
        self._path = path
        self._handle = handle
        self._piece_bytes = piece_bytes
        self._first = 0  # byte of the tar where the piece begins
        self._piece = memoryview(b"")

    def crc(self, offset: int, num_bytes: int) -> int:
        """crc32 of some bytes of the tar. Raises BrokenShard where it ends before them; OSError."""
        crc = 0
        while num_bytes:
            part = self._part(offset, num_bytes)
            crc = zlib.crc32(part, crc)
            offset, num_bytes = offset + len(part), num_bytes - len(part)
        return crc

    def _part(self, offset: int, num_bytes: int) -> memoryview:
        """The first of some bytes, or all."""
        if not self._first <= offset < self._first + len(self._piece):
            self._first, self._piece = offset, memoryview(os.pread(self._handle, self._piece_bytes, offset))
            if not self._piece:
                raise BrokenShard(f"{self._path} ended at byte {offset} while it was read; was it replaced?")
        begin = offset - self._first
        return self._piece[begin : begin + num_bytes]
