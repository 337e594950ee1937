"""Headers of tar members, one by one or for many documents at once."""

from __future__ import annotations

import tarfile

import numpy as np
import numpy.typing as npt

from preprocess.read.formats import Numbers
from shardprep.format import names

_SIZE = slice(124, 135)  # of a tar header: eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits
_SHIFTS = np.arange(30, -1, -3)  # to the bits of eleven octal digits


def ustar_header(name: str, num_bytes: int) -> bytes:
    """Return the 512 bytes before a member: mode 0644, owner 0, mtime 0."""
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT)


def document_headers(shard_id: int, lines: Numbers, field: str, num_bytes: Numbers) -> npt.NDArray[np.uint8]:
    """Return the headers of one field of many documents: uint8[documents, 512].

    ``lines`` ascend. Headers for line numbers of more than eight digits, which are rare, are made one by one.
    """
    if len(lines) and lines[-1] >= 10**8:
        sizes = zip(lines.tolist(), num_bytes.tolist(), strict=True)
        long = [ustar_header(f"{names.document_key(shard_id, line)}.{field}", size) for line, size in sizes]
        return np.frombuffer(b"".join(long), np.uint8).reshape(-1, names.BLOCK_BYTES)
    key = names.document_key(shard_id, 0)
    template = np.frombuffer(ustar_header(f"{key}.{field}", 0), np.uint8).copy()
    template_sum = int(template[:148].sum()) + int(template[156:].sum()) + 8 * ord(" ")
    headers = np.broadcast_to(template, (len(lines), names.BLOCK_BYTES)).copy()
    digits, rest = np.empty((len(lines), 8), np.int64), lines
    for place in range(7, -1, -1):
        digits[:, place], rest = rest - rest // 10 * 10, rest // 10
    octals = num_bytes[:, None] >> _SHIFTS & 7
    headers[:, len(key) - 8 : len(key)] += digits.astype(np.uint8)
    headers[:, _SIZE] += octals.astype(np.uint8)
    checksums = template_sum + digits.sum(axis=1) + octals.sum(axis=1)
    headers[:, _CHECKSUM] = ord("0") + (checksums[:, None] >> _SHIFTS[-6:] & 7)
    return headers
