"""``verify --crcs``: the crc32 of each sample's bytes, for the loader's ``read_check="crc"``.

They are taken from a tar whose sha256 was found to be right a moment ago. A shard is read once more for it,
from the page cache where it fits in, at 0.5 to 2 s of CPU per gigabyte (one core; the rest of verify takes 4
to 20, the most for JSON). A file has 4 bytes per sample, 8 per row.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.atomic_files import STALE_AFTER_S, publish_bytes, remove_temporaries
from shardprep.errors import BrokenShard, CannotWrite
from shardprep.format.manifest import Manifest
from shardprep.format.names import crcs_path, shard_name, tar_path
from shardprep.format.record_chunks import ChunkCrcs
from shardprep.format.sample_crcs import crcs_dtype, crcs_header
from shardprep.regular_files import NOT_THERE, close_read, errors_named, open_regular, read_regular

_IDS_BYTES = 4 << 20  # read at once
_STARTS_BYTES = 16 << 10  # those of one member stand together, before half a megabyte of ids
Span = tuple[int, int]  # byte of the tar, and number of bytes


def publish_crcs(folder: Path, manifest: Manifest, records: npt.NDArray[np.void]) -> None:
    """Write crcs/shard-N.crc of a proved shard, whose idx has ``records``, unless it is there and right.

    Raises CannotWrite, ReadWriteError or BrokenShard.
    """
    shard_id = manifest.shard_id
    crcs = _crcs_of_samples(tar_path(folder, shard_id), manifest.spec.kind, records).tobytes()
    chunks = ChunkCrcs(crcs_dtype(manifest.spec.kind))
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


def _crcs_of_samples(path: Path, kind: str, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """CRCS_DOCUMENT[samples] or CRCS_ROW[samples]."""
    crcs = np.empty(len(records), crcs_dtype(kind))
    with errors_named(path):
        handle = open_regular(path)
        try:
            ids = _Pieces(path, handle, _IDS_BYTES)
            crcs["ids"] = [ids.crc(*span) for span in _spans(records["offset"], records["num_bytes"])]
            if kind == "packed":
                starts = _Pieces(path, handle, _STARTS_BYTES)
                num_bytes = 4 * records["num_starts"].astype(np.int64)
                crcs["starts"] = [starts.crc(*span) for span in _spans(records["starts_offset"], num_bytes)]
        finally:
            close_read(handle)
    return crcs


def _spans(offsets: npt.NDArray[np.integer], num_bytes: npt.NDArray[np.integer]) -> list[Span]:
    return list(zip(offsets.tolist(), num_bytes.tolist(), strict=True))


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
