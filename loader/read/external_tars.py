"""Tars of other tools: one scan of their headers makes the records that an idx would have.

Tars are read, not mapped: a failed page of a map would end the process with SIGBUS. Keys are those of
webdataset: a member's name up to its first dot is the key, the rest is the field, and the members of a sample
follow each other. If lengths are needed beforehand, the scan reads all data once, at about 1 GB/s. Tars of
our packed rows are recognized by their two-dimensional ids, see docs/format.md.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, UnknownMember
from shardprep.files import open_regular
from shardprep.format.names import BLOCK_BYTES, DOC_STARTS_FIELD, LOSS_MASK_FIELD, ROW_TOKENS_FIELD

_BUFFER_BYTES = 64 << 10  # read at a time: headers of small members are close to each other
_MOST_EXTENDED_BYTES = 1 << 20  # of a long name or PAX records; a path has at most 4,096
_PIECE_BYTES = 1 << 20
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_KINDS = set(tarfile.SUPPORTED_TYPES) - {tarfile.GNUTYPE_SPARSE}  # others may contain a part of a sample
# A header of a file, or of PAX records, in which every number is octal and the name has no prefix.
_PLAIN_HEADER = re.compile(
    rb"(?s)(?P<name>.{100})"
    rb"(?:[0-7]{6}[0-7 ]\0){3}"  # mode, owner, group
    rb"(?P<size>[0-7]{11})[\0 ][0-7]{11}[\0 ]"  # and time
    rb"(?P<checksum>[0-7]{6})[\0 ]{2}"
    rb"(?P<kind>[0x]).{172}"  # link, magic, names of owner and group
    rb"(?:[0-7]{7}\0|\0{8}){2}\0.{166}"  # numbers of a device, no prefix
)
_TIME = re.compile(rb"(\d\d) [acm]time=[\d.]+\n")


class TarBytes(io.BufferedReader):
    """A tar that is read at any byte, also by tarfile. Use it in ``with``."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(open_regular(path)), _BUFFER_BYTES)
        self.path = path
        self.num_bytes = os.fstat(self.fileno()).st_size

    def at(self, first: int, end: int) -> bytes:
        """Return the bytes ``[first, end)``, fewer if the file ends before."""
        self.seek(min(first, self.num_bytes))
        return super().read(max(min(end, self.num_bytes) - first, 0))

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """Read for tarfile: a header, or a long name or PAX records of the next member."""
        if num_bytes is None or not 0 <= num_bytes <= _MOST_EXTENDED_BYTES:
            found = f"a long name of {num_bytes or 0:,} bytes at byte {self.tell() - BLOCK_BYTES}"
            raise self.broken(found, f"at most {_MOST_EXTENDED_BYTES:,} bytes")
        return super().read(num_bytes)

    def broken(self, found: str, expected: str, kind: type[BrokenShard] = BrokenShard) -> BrokenShard:
        return kind(path=self.path, found=found, expected=expected)


def tar_members(tar: TarBytes) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first byte, end) of the data of each regular file that Python's tarfile finds."""
    # tarfile reads the first member of the file that it is created with, so it gets the tar later.
    archive = tarfile.TarFile(fileobj=io.BytesIO(2 * _ZERO_BLOCK), encoding="utf-8", errors="surrogateescape")
    archive.fileobj = tar
    header = position = 0
    while len(block := tar.at(position, position + BLOCK_BYTES)) == BLOCK_BYTES and block != _ZERO_BLOCK:
        # PAX records of the whole tar may change any member.
        plain = None if archive.pax_headers else _plain_member(tar, position)
        name, first, end = plain or _unusual_member(tar, archive, position)
        header = position
        position = first + (end - first + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if name is not None and end <= tar.num_bytes:
            yield name, first, end
    if position + 2 * BLOCK_BYTES > tar.num_bytes:
        expected = "a complete tar, which ends with two zero blocks; write or copy it again"
        found = f"cut short at byte {tar.num_bytes}, in the member at byte {header} or after it"
        raise tar.broken(found, expected)
    for begin in range(position, tar.num_bytes, _PIECE_BYTES):
        if tar.at(begin, begin + _PIECE_BYTES).strip(b"\0"):
            found = f"more data after its end at byte {position}, whose samples would be lost"
            raise tar.broken(found, "one tar; if tars were joined with cat, unpack and pack them again")


def _plain_member(tar: TarBytes, position: int) -> tuple[str, int, int] | None:
    """Read an ordinary header. Return None if tarfile must read it, which takes 10 times as long.

    webdataset writes PAX records with only a time before each header. They are skipped.
    """
    for _ in range(2):
        block = tar.at(position, position + BLOCK_BYTES)
        header = _PLAIN_HEADER.fullmatch(block)
        counted = sum(block) - sum(block[148:156]) + 8 * ord(" ")  # the checksum's own bytes count as spaces
        if header is None or int(header["checksum"], 8) != counted:
            return None
        first = position + BLOCK_BYTES
        num_bytes = int(header["size"], 8)
        if header["kind"] == b"0":
            name = header["name"].partition(b"\0")[0].decode("utf-8", "surrogateescape")
            return name, first, first + num_bytes
        position += 2 * BLOCK_BYTES
        time = _TIME.fullmatch(tar.at(first, position).rstrip(b"\0"))
        if time is None or not len(time[0]) == int(time[1]) == num_bytes:
            return None
    return None


def _unusual_member(tar: TarBytes, archive: tarfile.TarFile, position: int) -> tuple[str | None, int, int]:
    """Read a header by tarfile. Return the name, or None if it is no regular file, and the data's range."""
    try:
        tar.seek(position)
        member = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, ValueError) as error:
        if tar.at(0, 2) == b"\x1f\x8b" or tar.at(0, 4) == b"\x28\xb5\x2f\xfd":
            raise tar.broken("compressed", "a tar that can be read at random; decompress it") from None
        found = f"not a tar, or a damaged one: no valid header at byte {position} ({error})"
        raise tar.broken(found, "a complete tar; write or copy it again") from None
    # If the size in PAX records is not a number, tarfile takes it for 0.
    said = member.pax_headers.get("size", str(member.size))
    if said != str(member.size):
        raise tar.broken(f"PAX records at byte {position} with a size of {said!r}", "a number")
    if member.type not in _KINDS or member.issparse() or member.size < 0:
        kind = member.type.decode("latin1")
        found = f"a member of kind {kind!r} with {member.size} bytes at byte {position}"
        raise tar.broken(found, "files, folders and links; unpack others and pack them again")
    name, num_bytes = (member.name, member.size) if member.isreg() else (None, 0)
    return name, member.offset_data, member.offset_data + num_bytes


# Exactly the headers that numpy writes for arrays of integers in C order.
_NPY_HEADER = re.compile(
    rb"(?s)\x93NUMPY\x01\0..\{ *'descr': *'([<|>=][iu][1248])' *, *'fortran_order': *False *, "
    rb"*'shape': *\( *((?:\d{1,15} *, *)*(?:\d{1,15})?) *\) *,? *\}[ \n\0]*"
)
_HEADER_BYTES = 4096

IDS_FIELD = "token_ids.npy"
JSON_FIELD = "token_ids.json"
_ROW_FIELDS = {IDS_FIELD, DOC_STARTS_FIELD, ROW_TOKENS_FIELD, LOSS_MASK_FIELD}
# Types of ids, which records name by their index here: JSON text or integers.
_WIDTHS = ("i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", ">i2", ">u2", ">i4", ">u4", ">i8", ">u8")
TOKEN_DTYPES: tuple[np.dtype[Any] | None, ...] = (None, *map(np.dtype, _WIDTHS))
JSON = 0
# The columns of an idx, and values that its manifest has for all samples of a shard.
_RECORD = np.dtype(
    [
        ("offset", np.int64),  # byte in the tar where the ids begin
        ("num_bytes", np.int64),
        ("num_tokens", np.int64),  # -1 if they were not counted
        ("starts_offset", np.int64),  # of packed rows; else 0
        ("num_starts", np.int64),
        ("mask_offset", np.int64),  # of rows with a loss mask; else 0
        ("dtype", np.int8),  # index in TOKEN_DTYPES
        ("last_id", np.int64),  # -1 if tokens were not counted or there are none
    ]
)
IdxRecords = npt.NDArray[np.void]
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's base_plus_ext
_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips such names
_MOST_DIGITS = 10  # of an id
_KEYS = "a name up to its first dot is the sample's key, and keys must differ"
_FINGERPRINTED = 16  # samples whose bytes enter a tar's fingerprint


def scan_tar(path: Path, *, count_tokens: bool = False) -> tuple[IdxRecords, int, str, int]:
    """Return the records of a tar, the tokens per packed row or 0, a hash of the tar, and its bytes.

    With ``count_tokens`` it reads all data. Raises BrokenShard, UnknownMember or OSError.
    """
    with TarBytes(path) as tar:
        samples = _samples(tar)
        if samples and {IDS_FIELD, DOC_STARTS_FIELD} <= samples[0].fields.keys():
            records, row_tokens = _packed_records(samples)
        else:
            documents = [_document_record(sample, count_tokens=count_tokens) for sample in samples]
            records = np.array(documents, _RECORD)
            row_tokens = 0
        # Hash sizes, places and the bytes of some samples.
        offset = records["offset"]
        num_bytes = records["num_bytes"]
        digest = hashlib.sha256(np.stack([offset, num_bytes]).astype("<i8").tobytes())
        for row in range(0, len(records), max(len(records) // _FINGERPRINTED, 1)):
            digest.update(tar.at(int(offset[row]), int(offset[row] + num_bytes[row])))
        return records, row_tokens, digest.hexdigest(), tar.num_bytes


def _samples(tar: TarBytes) -> list[_Sample]:
    """Return the samples of a tar. The members of a sample follow each other. Raises BrokenShard."""
    found: list[_Sample] = []
    for name, first, end in tar_members(tar):
        match = _KEY_AND_FIELD.match(name)
        if match is None or _META.match(name):
            continue
        key = match[1]
        field = match[2].lower()
        if not found or key != found[-1].key:
            found.append(_Sample(tar, key, {}))
        if field in found[-1].fields:
            raise tar.broken(f"two members {field!r} for sample {key!r}", f"one; {_KEYS}")
        found[-1].fields[field] = (first, end)
    return found


class _Sample(NamedTuple):
    """One sample of a tar: a document, or some packed rows."""

    tar: TarBytes
    key: str
    fields: dict[str, tuple[int, int]]  # first byte and end of each member

    def array(
        self, field: str, dtypes: tuple[str, ...], num_dimensions: int
    ) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return the type and shape of a .npy member, and the byte of the tar where its numbers begin."""
        first, end = self.fields[field]
        raw = self.tar.at(first, min(end, first + _HEADER_BYTES))
        header_bytes = 10 + int.from_bytes(raw[8:10], "little")
        header = _NPY_HEADER.fullmatch(raw, 0, header_bytes)
        if header is None or header_bytes > len(raw):
            raise self.broken(field, "no array of integers", "a .npy as numpy writes it")
        dtype = np.dtype(header[1].decode())
        shape = tuple(int(number) for number in header[2].split(b",") if number.strip())
        if dtype not in map(np.dtype, dtypes) or len(shape) != num_dimensions:
            expected = f"a .npy of {' or '.join(dtypes)} with {num_dimensions} dimensions"
            raise self.broken(field, f"{dtype.str}{list(shape)}", expected)
        num_bytes = header_bytes + math.prod(shape) * dtype.itemsize
        if end - first != num_bytes:
            raise self.broken(field, f"{end - first} bytes", f"{num_bytes}, as its header says")
        return dtype, shape, first + header_bytes

    def numbers(self, field: str) -> tuple[npt.NDArray[np.uint32], int]:
        """Return the numbers of a small member, uint32[n], and the byte of the tar where they begin."""
        _, _, first = self.array(field, ("<u4",), 1)
        return np.frombuffer(self.tar.at(first, self.fields[field][1]), "<u4"), first

    def broken(self, field: str, found: object, expected: str) -> BrokenShard:
        return self.tar.broken(f"{field} of sample {self.key!r} has {found}", expected)

    def wrong_fields(self, expected: str, kind: type[BrokenShard] = UnknownMember) -> BrokenShard:
        """Return the error for unexpected members. To ignore one could change training."""
        return self.tar.broken(f"sample {self.key!r} has {', '.join(sorted(self.fields))}", expected, kind)


def _document_record(sample: _Sample, *, count_tokens: bool) -> tuple[int, ...]:
    """Return the _RECORD of a document. Raises BrokenShard or UnknownMember."""
    if LOSS_MASK_FIELD in sample.fields:
        raise sample.wrong_fields(f"{LOSS_MASK_FIELD} only for packed rows")
    num_tokens = last_id = -1
    if JSON_FIELD in sample.fields:
        first, end = sample.fields[JSON_FIELD]
        if count_tokens:  # 2 us per document of 30 tokens; decoding finds text that is not a list of ids
            raw = sample.tar.at(first, end)
            last = raw.rpartition(b",")[2].strip(b"[] \t\r\n")
            num_tokens = raw.count(b",") + 1 if last else 0
            if last.isdigit() and len(last) <= _MOST_DIGITS:
                last_id = int(last)
        return first, end - first, num_tokens, 0, 0, 0, JSON, last_id
    if IDS_FIELD not in sample.fields:
        raise sample.wrong_fields(f"{JSON_FIELD} or {IDS_FIELD}; {_KEYS}", BrokenShard)
    dtype, (num_tokens,), first = sample.array(IDS_FIELD, _WIDTHS, 1)
    end = sample.fields[IDS_FIELD][1]
    if count_tokens and num_tokens:
        last_id = int(np.frombuffer(sample.tar.at(end - dtype.itemsize, end), dtype)[0])
        last_id = last_id if 0 <= last_id < 2**31 else -1
    return first, end - first, num_tokens, 0, 0, 0, TOKEN_DTYPES.index(dtype), last_id


def _packed_records(samples: list[_Sample]) -> tuple[IdxRecords, int]:
    """Return the _RECORD of each row, and the tokens per row. Reads no ids. Raises BrokenShard."""
    tables: list[IdxRecords] = []
    forms = set()
    for sample in samples:
        if not {IDS_FIELD, DOC_STARTS_FIELD} <= sample.fields.keys() <= _ROW_FIELDS:
            fields = ", ".join(sorted(_ROW_FIELDS))
            raise sample.wrong_fields(f"{IDS_FIELD}, {DOC_STARTS_FIELD} and some of {fields}")
        dtype, (num_rows, seq_len), first = sample.array(IDS_FIELD, ("<u2", "<u4"), 2)
        has_mask = LOSS_MASK_FIELD in sample.fields
        row_bytes = seq_len * dtype.itemsize
        forms.add((seq_len, dtype, has_mask))
        if len(forms) > 1 or not num_rows or not 0 < row_bytes < 2**32:
            found = f"rows of {[num_rows, seq_len]} and {'a' if has_mask else 'no'} {LOSS_MASK_FIELD}"
            raise sample.broken(IDS_FIELD, found, "one or more rows of the length, type and mask of others")
        row = np.arange(num_rows)
        records = np.zeros(num_rows, _RECORD)
        records["offset"] = first + row * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = seq_len
        records["dtype"] = TOKEN_DTYPES.index(dtype)
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
        if has_mask:
            _, mask_shape, mask_at = sample.array(LOSS_MASK_FIELD, ("u1",), 2)
            if mask_shape != (num_rows, seq_len):
                raise sample.broken(LOSS_MASK_FIELD, list(mask_shape), f"{[num_rows, seq_len]}")
            records["mask_offset"] = mask_at + row * seq_len
        tables.append(records)
    return np.concatenate(tables), seq_len
