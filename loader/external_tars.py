"""Tars that have no idx: their members and samples, by one scan of the headers.

A header that says nothing unusual is read here, in about 5 us; all others by Python's tarfile, as webdataset
does. The bytes of the tar are read, not mapped: a failing page of a map would end the process with SIGBUS.

Keys are formed as webdataset forms them: a member's name up to its first dot is the key, the rest is the
field, and members of one sample stand together. Where lengths are needed beforehand a scan reads everything
once, at about 1 GB/s. Tars of our packed rows are known by their two-dimensional ids, see docs/format.md.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import adler32

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, UnknownMember
from shardprep.files import ReadFile
from shardprep.format.names import BLOCK_BYTES, DOC_STARTS_FIELD, LOSS_MASK_FIELD, ROW_TOKENS_FIELD

_BUFFER_BYTES = 64 << 10  # read at once: headers of small members lie near each other
_MOST_EXTENDED_BYTES = 1 << 20  # of a long name or PAX records; a path has 4,096 at most
_PIECE_BYTES = 1 << 20
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_KINDS = b"\x0001234567xgLK"  # files, links, folders, devices; and headers that say more of the next one
_SIZE = re.compile(r"\d{1,18}")
_TIME = re.compile(rb"(\d\d) [acm]time=[\d.]+\n")
# Records that change which bytes a member has; a global one would change all members.
_LAYOUT_KEYS = {"path", "size", "hdrcharset"}


class _RawBytes(io.RawIOBase):
    """A ReadFile as a stream: its errors name the path, and a file that became shorter is one."""

    def __init__(self, file: ReadFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position}[whence]
        return self._position

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target)[: max(self._file.num_bytes - self._position, 0)]
        num_bytes = self._file.read_some(view, self._position) if view else 0
        self._position += num_bytes
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()


class TarBytes(io.BufferedReader):
    """The bytes of a tar, as tarfile asks for them, and at any place. Use it in ``with``."""

    def __init__(self, path: Path) -> None:
        file = ReadFile(path)
        super().__init__(_RawBytes(file), _BUFFER_BYTES)
        self.path, self.num_bytes = path, file.num_bytes

    def at(self, first: int, end: int) -> bytes:
        """Return the bytes from one up to another, or to the end that the file had when it was opened."""
        self.seek(first)
        return super().read(max(min(end, self.num_bytes) - first, 0))

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """Read a header, or what one says of the next member, as tarfile asks."""
        if num_bytes is None or not 0 <= num_bytes <= _MOST_EXTENDED_BYTES:
            raise self.broken(
                f"is damaged: the long name at byte {self.tell() - BLOCK_BYTES} has {num_bytes or 0:,} "
                f"bytes, expected at most {_MOST_EXTENDED_BYTES:,}"
            )
        return super().read(num_bytes)

    def broken(
        self, found: str, remedy: str = "write or copy it again", *, expected: str | None = None
    ) -> BrokenShard:
        """Return the error to raise for a tar that cannot be read."""
        wanted = "" if expected is None else f", expected {expected}"
        message = f"{self.path} {found}{wanted}; {remedy}"
        return BrokenShard(message, path=self.path, found=found, expected=expected)


def tar_members(tar: TarBytes) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset and size of the data) of every regular file of a tar.

    They are the same as Python's tarfile finds. Raises BrokenShard for any other tar.
    """
    archive = tarfile.TarFile(
        fileobj=io.BytesIO(bytes(2 * BLOCK_BYTES)), encoding="utf-8", errors="surrogateescape"
    )
    archive.fileobj = tar
    position = 0
    while True:
        block = tar.at(position, position + BLOCK_BYTES)
        if block == _ZERO_BLOCK:
            _check_end(tar, position)
            return
        if len(block) < BLOCK_BYTES:
            raise tar.broken(
                f"is cut short at byte {tar.num_bytes}", expected="the two zero blocks that close a tar"
            )
        begin = position
        if block[156] == ord("x") and _says_a_time_alone(block, tar.at(position + 512, position + 1024)):
            begin += 2 * BLOCK_BYTES
        header = _plain_header(tar.at(begin, begin + BLOCK_BYTES), "0")
        if header is None:
            name, data, num_bytes, is_file = _unusual_member(tar, archive, block, position)
        else:
            name, data, num_bytes, is_file = header[0], begin + BLOCK_BYTES, header[1], True
        if data + num_bytes > tar.num_bytes:
            raise tar.broken(
                f"is cut short: the member at byte {position} needs {data + num_bytes} bytes, the file has "
                f"{tar.num_bytes}"
            )
        position = data + (num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if is_file:
            yield name, data, num_bytes


def _says_a_time_alone(block: bytes, records: bytes) -> bool:
    """Return whether a PAX header has one record, a time, as webdataset writes before each member."""
    header, record = _plain_header(block, "x"), _TIME.fullmatch(records.rstrip(b"\0"))
    return header is not None and record is not None and header[1] == int(record[1]) == len(record[0])


def _plain_header(block: bytes, kind: str) -> tuple[str, int] | None:
    """Return name and size of a header of this kind, None where tarfile has to look: bytes[512]. 5 us."""
    if len(block) < BLOCK_BYTES or block[156] != ord(kind) or block[345]:
        return None
    said, size = block[148:154], block[124:135]
    if not (said.isdigit() and size.isdigit() and block[135] in b"\0 " and block[154] in b"\0 "):
        return None
    if b"8" in size or b"9" in size or b"8" in said or b"9" in said:
        return None
    # Adler's lower half is 1 + the sum modulo 65,521, which no 256 bytes reach; 20 times as fast as sum.
    parts = adler32(block[:148]), adler32(block[156:356]), adler32(block[356:])
    counted = sum(part & 0xFFFF for part in parts) - 3 + 8 * ord(" ")
    if int(said, 8) != counted or not _are_numbers(block[100:124] + block[136:148] + block[329:345]):
        return None
    return block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape"), int(size, 8)


@lru_cache(maxsize=256)  # most members of a tar have the same
def _are_numbers(fields: bytes) -> bool:
    """Return whether mode, owner, group, time and device are numbers: tarfile ends where one is none."""
    try:
        for start, end in pairwise((0, 8, 16, 24, 36, 44, 52)):
            tarfile.nti(fields[start:end])  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        return False
    return True


def _unusual_member(
    tar: TarBytes, archive: tarfile.TarFile, block: bytes, position: int
) -> tuple[str, int, int, bool]:
    """Return name, first byte and size of the data, and whether it is a regular file.

    tarfile reads the header, and those before it that say more of the member. Raises BrokenShard.
    """
    try:
        _check_kind(tar, tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").type, position)
        tar.seek(position)
        member = tarfile.TarInfo.fromtarfile(archive)
    except tarfile.SubsequentHeaderError:  # type: ignore[attr-defined]
        raise tar.broken(f"is damaged: behind the header at byte {position} no whole one stands") from None
    except tarfile.HeaderError as error:
        if position == 0 and (block[:2] == b"\x1f\x8b" or block[:4] == b"\x28\xb5\x2f\xfd"):
            raise tar.broken("is compressed", "decompress it, as the loader reads at random") from None
        raise tar.broken(
            f"is no tar, or is damaged: at byte {position} stands no member's header of a right checksum and "
            f"numbers ({error})"
        ) from None
    _check_kind(tar, member.type, member.offset)
    records, shared = member.pax_headers, archive.pax_headers
    has_size = _SIZE.fullmatch(records.get("size", "0"))
    if member.size < 0 or not has_size or not _LAYOUT_KEYS.isdisjoint(shared) or "hdrcharset" in records:
        what = f"PAX records {records} {shared}" if records or shared else f"a size of {member.size} bytes"
        raise tar.broken(
            f"is damaged: the header at byte {position} has {what}, expected a whole number of bytes, and "
            "none for all members"
        )
    if member.sparse is not None or any(key.startswith("GNU.sparse.") for key in records):
        _check_kind(tar, tarfile.GNUTYPE_SPARSE, position)
    is_file = member.isreg()
    return member.name, member.offset_data, member.size if is_file else 0, is_file


def _check_kind(tar: TarBytes, kind: bytes, position: int) -> None:
    if kind not in _KINDS:
        raise tar.broken(
            f"has a member of kind {kind.decode('latin1')!r} at byte {position}, expected files, folders and "
            "links",
            "sparse files and parts of volumes cannot be read: unpack and pack them again",
        )


def _check_end(tar: TarBytes, position: int) -> None:
    """Raise BrokenShard unless two zero blocks end a tar, and nothing but zeros stands behind them."""
    if position + 2 * BLOCK_BYTES > tar.num_bytes:
        raise tar.broken("is cut short: only one of the two zero blocks that close a tar is there")
    for first in range(position, tar.num_bytes, _PIECE_BYTES):
        if tar.at(first, first + _PIECE_BYTES).strip(b"\0"):
            raise tar.broken(
                f"goes on behind its end at byte {position}, so samples would be lost",
                "were tars joined with cat? Unpack and pack them again",
            )


_FIELDS = re.compile(
    rb"\{ *'descr': *'([<|>=][iu][1248])' *, *'fortran_order': *False *, "
    rb"*'shape': *\( *((?:\d{1,15} *, *)*(?:\d{1,15})?) *\) *,? *\}[ \n\0]*"
)
_VERSIONS = (b"\x01\0", b"\x02\0", b"\x03\0")
_HEADER_BYTES = 4096


class NpyHeader(NamedTuple):
    """What an array of integers says of itself."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_start: int  # byte of the file where the numbers begin

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole file."""
        return self.data_start + math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(raw: bytes) -> NpyHeader | None:
    """Return the header that ``raw`` begins with, or None where it is none of an integer array in C order.

    Only a whole header counts, with nothing before, between or behind its fields that numpy does not write.
    """
    size_bytes = 2 if raw[6:7] == b"\x01" else 4
    data_start = 8 + size_bytes + int.from_bytes(raw[8 : 8 + size_bytes], "little")
    match = _FIELDS.fullmatch(raw, 8 + size_bytes, data_start)
    is_npy = raw.startswith(b"\x93NUMPY") and raw[6:8] in _VERSIONS and data_start <= len(raw)
    if not is_npy or match is None:
        return None
    shape = tuple(int(part) for part in match[2].split(b",") if part.strip())
    return NpyHeader(np.dtype(match[1].decode()), shape, data_start)


IDS_FIELD = "token_ids.npy"
JSON_FIELD = "token_ids.json"
_ROW_FIELDS = {IDS_FIELD, DOC_STARTS_FIELD, ROW_TOKENS_FIELD, LOSS_MASK_FIELD}
# How the ids of a sample lie, by the number of this table: as JSON text, or as integers.
_WIDTHS = ("i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", ">i2", ">u2", ">i4", ">u4", ">i8", ">u8")
TOKEN_DTYPES: tuple[np.dtype[Any] | None, ...] = (None, *map(np.dtype, _WIDTHS))
JSON = 0
# Columns as in an idx, and what its manifest says of all samples of a shard.
_RECORD = np.dtype(
    [
        ("offset", np.int64),  # byte in the tar where the ids begin
        ("num_bytes", np.int64),
        ("num_tokens", np.int64),  # -1 where they were not counted
        ("starts_offset", np.int64),  # of packed rows; else 0
        ("num_starts", np.int64),
        ("mask_offset", np.int64),  # of rows with a loss mask; else 0
        ("dtype", np.int8),  # its number in TOKEN_DTYPES
        ("last_id", np.int64),  # -1 where tokens were not counted, or there are none
    ]
)
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's base_plus_ext
_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips such names
_MOST_DIGITS = 10  # of an id
_FINGERPRINTED = 16  # samples whose bytes enter a tar's fingerprint


@dataclass(frozen=True, kw_only=True)
class ScannedTar:
    """Where the token ids of a tar's samples lie."""

    path: Path
    num_bytes: int  # of the tar
    records: npt.NDArray[np.void]  # of _RECORD, one per sample, in tar order
    fingerprint: str  # of sizes, places and some samples' bytes; the path is outside it
    row_tokens: int = 0  # of packed rows, else 0

    @property
    def has_mask(self) -> bool:
        """Return whether rows say which of their tokens have a label."""
        return bool(self.records["mask_offset"].any())


def scan_tar(path: Path, *, count_tokens: bool = False) -> ScannedTar:
    """Index a tar by its headers, with ``count_tokens`` by its data, too.

    Raises BrokenShard; UnknownMember for a member that would change the training; OSError.
    """
    with TarBytes(path) as tar:
        samples = _samples(tar)
        row_tokens = 0
        if samples and samples[0].is_packed:
            records, row_tokens = _packed_records(samples)
        else:
            records = np.zeros(len(samples), _RECORD)
            for number, sample in enumerate(samples):
                records[number] = _document_record(sample, count_tokens=count_tokens)
        return ScannedTar(
            path=path,
            num_bytes=tar.num_bytes,
            records=records,
            fingerprint=_fingerprint(tar, records),
            row_tokens=row_tokens,
        )


def _samples(tar: TarBytes) -> list[_Sample]:
    """Return the samples of a tar, whose members stand together. Raises BrokenShard."""
    found: list[_Sample] = []
    for name, offset, num_bytes in tar_members(tar):
        match = _KEY_AND_FIELD.match(name)
        if match is None or _META.match(name):
            continue
        key, field = match[1], match[2].lower()
        if not found or key != found[-1].key:
            found.append(_Sample(tar, key, {}))
        if field in found[-1].fields:
            raise tar.broken(
                f"has two members {field!r} for sample {key!r}",
                "what stands before a name's first dot is the sample's key, and keys must differ",
            )
        found[-1].fields[field] = (offset, num_bytes)
    return found


class _Sample(NamedTuple):
    """One sample of a tar: a document, or some packed rows."""

    tar: TarBytes
    key: str
    fields: dict[str, tuple[int, int]]  # offset and size of each member

    @property
    def is_packed(self) -> bool:
        """Return whether the ids are rows, ``[rows, seq_len]``."""
        if IDS_FIELD not in self.fields or DOC_STARTS_FIELD not in self.fields:
            return False
        header = self._header(IDS_FIELD)
        return header is not None and len(header.shape) == 2

    def array(self, field: str, dtypes: tuple[str, ...], num_dimensions: int) -> NpyHeader:
        """Return the header of an array of one of some types, which must have the member's size."""
        header, num_bytes = self._header(field), self.fields[field][1]
        is_right = header is not None and header.dtype in map(np.dtype, dtypes)
        if header is None or not is_right or len(header.shape) != num_dimensions:
            found = "no array of integers" if header is None else f"{header.dtype.str}{list(header.shape)}"
            kinds = "integers" if dtypes == _WIDTHS else " or ".join(dtypes)
            raise self.broken(field, found, f"a .npy of {kinds} with {num_dimensions} dimensions")
        if header.num_bytes != num_bytes:
            raise self.broken(field, f"{num_bytes} bytes", f"{header.num_bytes}, as its header says")
        return header

    def numbers(self, field: str) -> tuple[npt.NDArray[np.uint32], int]:
        """Return the numbers of a small member, uint32[n], and the byte of the tar where they begin."""
        begin = self.fields[field][0] + self.array(field, ("<u4",), 1).data_start
        return np.frombuffer(self.tar.at(begin, sum(self.fields[field])), "<u4"), begin

    def broken(self, field: str, found: object, expected: str) -> BrokenShard:
        """Return the error to raise for a member."""
        return BrokenShard(
            f"{self.tar.path}: {field} of sample {self.key!r} has {found}, expected {expected}",
            path=self.tar.path,
            found=str(found),
            expected=expected,
        )

    def unknown(self, expected: str) -> UnknownMember:
        """Return the error to raise for members that cannot be left out."""
        found = ", ".join(sorted(self.fields))
        return UnknownMember(
            f"{self.tar.path}: sample {self.key!r} has the fields {found}, expected {expected}; leaving one "
            "out could change the training",
            path=self.tar.path,
            found=found,
            expected=expected,
        )

    def _header(self, field: str) -> NpyHeader | None:
        offset, num_bytes = self.fields[field]
        return parse_npy_header(self.tar.at(offset, offset + min(num_bytes, _HEADER_BYTES)))


def _document_record(sample: _Sample, *, count_tokens: bool) -> tuple[int, ...]:
    """Return the _RECORD of a document. Raises BrokenShard or UnknownMember."""
    if LOSS_MASK_FIELD in sample.fields:
        raise sample.unknown(f"no {LOSS_MASK_FIELD} but of packed rows")
    if JSON_FIELD in sample.fields:
        offset, num_bytes = sample.fields[JSON_FIELD]
        num_tokens = last_id = -1
        if count_tokens:
            num_tokens, last_id = _count_json(sample.tar.at(offset, offset + num_bytes))
        return offset, num_bytes, num_tokens, 0, 0, 0, JSON, last_id
    if IDS_FIELD not in sample.fields:
        raise sample.tar.broken(
            f"has the fields {', '.join(sorted(sample.fields))} for sample {sample.key!r}",
            "what stands before a name's first dot is the sample's key",
            expected=f"{JSON_FIELD} or {IDS_FIELD}",
        )
    header, last_id = sample.array(IDS_FIELD, _WIDTHS, 1), -1
    end = sum(sample.fields[IDS_FIELD])
    if count_tokens and header.shape[0]:
        last = int(np.frombuffer(sample.tar.at(end - header.dtype.itemsize, end), header.dtype)[0])
        last_id = last if 0 <= last < 2**31 else -1
    begin = sample.fields[IDS_FIELD][0] + header.data_start
    return begin, end - begin, header.shape[0], 0, 0, 0, TOKEN_DTYPES.index(header.dtype), last_id


def _count_json(raw: bytes) -> tuple[int, int]:
    """Return the number of ids of a JSON list, and the last one or -1. 2 us a document of 30 tokens.

    What is no list of ids is found when it is decoded.
    """
    last = raw.rpartition(b",")[2].strip(b"[] \t\r\n")
    is_id = last.isdigit() and len(last) <= _MOST_DIGITS
    return (raw.count(b",") + 1 if last else 0), (int(last) if is_id else -1)


def _packed_records(samples: list[_Sample]) -> tuple[npt.NDArray[np.void], int]:
    """Return the _RECORD of each row, and the tokens of a row. No ids are read."""
    parts, forms = [], set()
    for sample in samples:
        if sample.fields.keys() - _ROW_FIELDS or IDS_FIELD not in sample.fields:
            raise sample.unknown(f"some of {', '.join(sorted(_ROW_FIELDS))}")
        if DOC_STARTS_FIELD not in sample.fields:
            raise sample.broken(DOC_STARTS_FIELD, "no such member", "where documents begin")
        ids = sample.array(IDS_FIELD, ("<u2", "<u4"), 2)
        num_rows, seq_len = ids.shape
        forms.add((seq_len, ids.dtype, LOSS_MASK_FIELD in sample.fields))
        if len(forms) > 1 or not num_rows or not 0 < seq_len * ids.dtype.itemsize < 2**32:
            mask = f"{'a' if LOSS_MASK_FIELD in sample.fields else 'no'} {LOSS_MASK_FIELD}"
            raise sample.broken(IDS_FIELD, f"rows of {list(ids.shape)} and {mask}", "rows as before it")
        parts.append(_rows_of_member(sample, ids))
    return np.concatenate(parts), forms.pop()[0]


def _rows_of_member(sample: _Sample, ids: NpyHeader) -> npt.NDArray[np.void]:
    """Return the _RECORD of each row of one member. Raises BrokenShard."""
    num_rows, seq_len = ids.shape
    row, row_bytes = np.arange(num_rows), seq_len * ids.dtype.itemsize
    records = np.zeros(num_rows, _RECORD)
    records["offset"] = sample.fields[IDS_FIELD][0] + ids.data_start + row * row_bytes
    records["num_bytes"] = row_bytes
    records["num_tokens"] = seq_len
    records["dtype"] = TOKEN_DTYPES.index(ids.dtype)
    records["last_id"] = -1
    starts, starts_at = sample.numbers(DOC_STARTS_FIELD)
    if not (starts < num_rows * seq_len).all() or (starts[1:] <= starts[:-1]).any():
        expected = f"ascending numbers below {num_rows * seq_len}"
        raise sample.broken(DOC_STARTS_FIELD, f"{starts[:4].tolist()} ...", expected)
    bounds = np.searchsorted(starts, np.arange(num_rows + 1) * seq_len)
    records["num_starts"] = np.diff(bounds)
    records["starts_offset"] = starts_at + bounds[:-1] * starts.itemsize
    if ROW_TOKENS_FIELD in sample.fields:
        tokens, _ = sample.numbers(ROW_TOKENS_FIELD)
        if tokens.shape != (num_rows,) or not 0 < tokens.min() <= tokens.max() <= seq_len:
            expected = f"{num_rows} numbers from 1 to {seq_len}"
            raise sample.broken(ROW_TOKENS_FIELD, f"{tokens[:4].tolist()} ...", expected)
        records["num_tokens"] = tokens
    if LOSS_MASK_FIELD in sample.fields:
        mask = sample.array(LOSS_MASK_FIELD, ("u1",), 2)
        if mask.shape != ids.shape:
            raise sample.broken(LOSS_MASK_FIELD, list(mask.shape), str(list(ids.shape)))
        records["mask_offset"] = sample.fields[LOSS_MASK_FIELD][0] + mask.data_start + row * seq_len
    return records


def _fingerprint(tar: TarBytes, records: npt.NDArray[np.void]) -> str:
    offset, num_bytes = records["offset"], records["num_bytes"]
    digest = hashlib.sha256(np.stack([offset, num_bytes]).astype("<i8").tobytes())
    for row in range(0, len(records), max(len(records) // _FINGERPRINTED, 1)):
        digest.update(tar.at(int(offset[row]), int(offset[row] + num_bytes[row])))
    return digest.hexdigest()
