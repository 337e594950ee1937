"""Tar members as bytes: ustar headers, alone or many at once, equal to Python's ``tarfile``'s."""

from __future__ import annotations

import tarfile

import numpy as np
import numpy.typing as npt

from preprocess.shard_format import BLOCK_BYTES, document_key

_SIZE = slice(124, 135)  # eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits
_OCTAL_SIZE = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_OCTAL_CHECKSUM = 8 ** np.arange(5, -1, -1, dtype=np.int64)


def ustar_header(name: str, num_bytes: int) -> bytes:
    """The 512 bytes before a member: mode 0644, owner 0, mtime 0."""
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT)


def padded(num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sizes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def document_headers(
    shard_id: int, lines: npt.NDArray[np.int64], field: str, num_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Headers of one field of many documents: uint8[documents, 512].

    ``lines`` ascend. Eight digits of a line number are written at once; the rare longer ones in a
    pass of their own.
    """
    num_short = int(np.searchsorted(lines, 10**8))
    if num_short < len(lines):
        long = [
            ustar_header(f"{document_key(shard_id, line)}.{field}", size)
            for line, size in zip(lines[num_short:].tolist(), num_bytes[num_short:].tolist(), strict=True)
        ]
        tail = np.frombuffer(b"".join(long), np.uint8).reshape(-1, BLOCK_BYTES)
        head = document_headers(shard_id, lines[:num_short], field, num_bytes[:num_short])
        return np.concatenate((head, tail))
    key = document_key(shard_id, 0)
    template = np.frombuffer(ustar_header(f"{key}.{field}", 0), np.uint8).copy()
    template_sum = int(template[:148].sum()) + int(template[156:].sum()) + 8 * ord(" ")
    headers = np.broadcast_to(template, (len(lines), BLOCK_BYTES)).copy()
    digits = lines[:, None] // 10 ** np.arange(7, -1, -1, dtype=np.int64) % 10
    octals = num_bytes[:, None] // _OCTAL_SIZE % 8
    headers[:, len(key) - 8 : len(key)] += digits.astype(np.uint8)
    headers[:, _SIZE] += octals.astype(np.uint8)
    checksums = template_sum + digits.sum(axis=1) + octals.sum(axis=1)
    headers[:, _CHECKSUM] = ord("0") + checksums[:, None] // _OCTAL_CHECKSUM % 8
    return headers
