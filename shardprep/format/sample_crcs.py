"""crcs/shard-N.crc: the crc32 of what the loader reads of each sample; a file of records.

``verify --crcs`` writes it of a tar whose sha256 is right, and the loader's ``read_check="crc"`` compares. It
is no part of the data set: nothing else needs it, and it may be deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardprep.errors import BrokenShard, MissingShard, UnknownVersion
from shardprep.format.checked_json import version_message
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import IDX_KINDS, RecordFile, open_records
from shardprep.format.names import FORMAT_VERSION, crcs_command, crcs_path
from shardprep.regular_files import NOT_THERE

CRCS_MAGIC = b"shardcrc"
CRCS_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("kind", "<u4"),  # IDX_KINDS
        ("shard_id", "<u4"),
        ("tar_sha256", "S16"),  # the first 16 hex digits
        ("zero", "V28"),
    ]
)
CRCS_DOCUMENT = np.dtype([("ids", "<u4")])  # of the num_bytes at the offset that the idx has
CRCS_ROW = np.dtype([("ids", "<u4"), ("starts", "<u4")])  # of its part of doc_starts, too
CRCS_CHAT_ROW = np.dtype([("ids", "<u4"), ("starts", "<u4"), ("mask", "<u4")])  # and of loss_mask
_DTYPES = {"packed": CRCS_ROW, "chat": CRCS_CHAT_ROW}
TAR_DIGITS = 16


def crcs_dtype(kind: str) -> np.dtype[Any]:
    """Of a record: CRCS_DOCUMENT, CRCS_ROW or CRCS_CHAT_ROW."""
    return _DTYPES.get(kind, CRCS_DOCUMENT)


def crcs_header(spec: DatasetSpec, shard_id: int, tar_sha256: str) -> bytes:
    """The 64 bytes that begin a file of crc32s; of the tar's sha256, the first 16 hex digits count."""
    digits = tar_sha256[:TAR_DIGITS].encode()
    fields = (CRCS_MAGIC, FORMAT_VERSION, IDX_KINDS.index(spec.kind), shard_id, digits, bytes(28))
    return np.array([fields], CRCS_HEADER).tobytes()


def open_crcs(folder: Path, spec: DatasetSpec, shard_id: int, tar_sha256: str) -> RecordFile:
    """Open the crc32s of a shard's samples, and check that they are of this tar.

    Raises MissingShard, UnknownVersion or BrokenShard; OSError where the file system fails.
    """
    path, remedy = crcs_path(folder, shard_id), f"run: {crcs_command(folder)}"
    expected = crcs_header(spec, shard_id, tar_sha256)

    def check_header(header: bytes) -> None:
        if len(header) < len(expected) or not header.startswith(CRCS_MAGIC):
            raise BrokenShard(f"{path} begins {header[:8]!r}, expected {CRCS_MAGIC!r}; {remedy}")
        found = np.frombuffer(header, CRCS_HEADER)[0]
        if (version := int(found["version"])) != FORMAT_VERSION:
            raise UnknownVersion(version_message(path, version))
        if header != expected:
            raise BrokenShard(
                f"{path} is of shard {int(found['shard_id'])}, kind {int(found['kind'])} and a tar of sha256 "
                f"{bytes(found['tar_sha256'])[:12]!r}; expected shard {shard_id} and {tar_sha256[:12]}; "
                f"{remedy}"
            )

    try:
        return open_records(RecordFile, path, crcs_dtype(spec.kind), check_header=check_header, remedy=remedy)
    except NOT_THERE:
        raise MissingShard(f'{path} is missing, and read_check is "crc"; {remedy}') from None
