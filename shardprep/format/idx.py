"""shard-N.idx: where the samples of a shard are in its tar, and where their documents begin.

An idx has a header of 64 bytes, a record of fixed size per sample, and a crc32 per 512 records. It is read,
never mapped: if a file system fails, access to a mapped page ends in SIGBUS.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep import errors
from shardprep.files import NOT_THERE, errors_named
from shardprep.format import commands, json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.spec import DatasetSpec

HEADER_BYTES = 64


CHUNK_RECORDS = 512  # per crc32, and read together: 14 KB for documents, 20 KB for rows


CHUNK_CRC = np.dtype("<u4")


IDX_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("kind", "<u4"),  # position of the key in IDX_DTYPES
        ("token_bytes", "<u4"),  # bytes per token id; 0 for JSON
        ("seq_len", "<u4"),  # 0 unless packed
        ("shard_id", "<u4"),
        ("plan_id", "S32"),  # the first 32 hex digits
        ("zero", "<u4"),
    ]
)


IDX_DOCUMENT = np.dtype(
    [
        ("offset", "<u8"),  # byte in the tar where the sample's ids begin, after any npy header
        ("num_bytes", "<u4"),  # bytes of those ids
        ("num_tokens", "<u4"),  # without padding
        ("input_number", "<u4"),  # position of the input file in plan.json
        ("input_offset", "<u8"),  # byte of that file, or row of a table, where its (first) document begins
    ]
)


IDX_ROW = np.dtype(
    [
        *IDX_DOCUMENT.descr,
        ("starts_offset", "<u8"),  # byte in the tar of the row's part of doc_starts
        ("num_starts", "<u4"),  # documents that begin in the row
    ]
)


# mask_offset: byte in the tar of the row's part of loss_mask, a byte per token
IDX_CHAT_ROW = np.dtype([*IDX_ROW.descr, ("mask_offset", "<u8")])


# Kind of samples -> dtype of a record. New kinds go last.
IDX_DTYPES = {"json": IDX_DOCUMENT, "npy": IDX_DOCUMENT, "packed": IDX_ROW, "chat": IDX_CHAT_ROW}


MAX_JSON_ID_BYTES = 12  # of a token id in a list, so that a list takes no more memory than its tokens


MAX_OFFSET = 2**62  # so that sums stay in an int64; readers also compare offsets with the tar's size


IdxRecords = npt.NDArray[np.void]  # of one of IDX_DTYPES


class ChunkCrcs:
    """Computes the crc32 of each CHUNK_RECORDS records while they are written in order."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._chunk_bytes = CHUNK_RECORDS * dtype.itemsize
        self._crcs: list[int] = []
        self._rest = bytearray()  # the beginning of an incomplete chunk

    def add(self, records: bytes) -> None:
        """Add the next records, any number of them."""
        self._rest += records
        while len(self._rest) >= self._chunk_bytes:
            self._crcs.append(zlib.crc32(self._rest[: self._chunk_bytes]))
            del self._rest[: self._chunk_bytes]

    def table(self) -> bytes:
        """Return the bytes that follow the records in the file."""
        last = [zlib.crc32(self._rest)] if self._rest else []
        return np.array(self._crcs + last, CHUNK_CRC).tobytes()


class IdxFile:
    """An open idx with a checked header and size. The caller closes ``file``."""

    def __init__(self, folder: DataFolder, spec: DatasetSpec, shard_id: int) -> None:
        """Open it. Raises MissingShard, BrokenShard, UnknownVersion, OtherPlan or OSError."""
        self._folder = folder
        self._shard_id = shard_id
        self.dtype = IDX_DTYPES[spec.kind]
        name = names.idx_name(shard_id)
        header = idx_header(spec, shard_id)
        with ExitStack() as opened:  # closes the file on an error, whose traceback may keep it alive
            try:
                self.file = opened.enter_context(folder.open(name))
            except NOT_THERE:
                raise commands.missing_file(folder, name, shard_id) from None
            head = bytes(self.file.read(0, min(HEADER_BYTES, self.file.num_bytes)))
            if len(head) < HEADER_BYTES or head[:8] != header[:8]:
                raise self._error(errors.BrokenShard, f"not an idx: begins {head[:8]!r}", f"{header[:8]!r}")
            values, wanted = (np.frombuffer(each, IDX_HEADER)[0] for each in (head, header))
            version = int(values["version"])
            if version != json_files.FORMAT_VERSION:
                raise json_files.unknown_version(self.file.path, version)
            for name in IDX_HEADER.names or ():
                if values[name] != wanted[name]:
                    raise self._error(errors.OtherPlan, f"an idx for {name} {values[name]}", wanted[name])
            # The size gives the number of records: each number of records has a different size.
            chunk_bytes = CHUNK_RECORDS * self.dtype.itemsize + CHUNK_CRC.itemsize
            num_bytes = self.file.num_bytes - HEADER_BYTES
            num_chunks, rest_bytes = divmod(num_bytes, chunk_bytes)
            num_rest = max(0, rest_bytes - CHUNK_CRC.itemsize) // self.dtype.itemsize
            self.num_samples = num_chunks * CHUNK_RECORDS + num_rest
            if self.file.num_bytes != idx_num_bytes(spec.kind, self.num_samples):
                expected = f"records of {self.dtype.itemsize} bytes, with their crc32s"
                found_size = f"cut short: {num_bytes} bytes after the header"
                raise self._error(errors.BrokenShard, found_size, expected)
            self._is_checked = bytearray(-(-self.num_samples // CHUNK_RECORDS))  # of each chunk
            crcs_bytes = len(self._is_checked) * CHUNK_CRC.itemsize
            crcs = self.file.read(self.file.num_bytes - crcs_bytes, crcs_bytes)
            self._crcs = np.frombuffer(crcs, CHUNK_CRC)
            opened.pop_all()

    def read(self, rows: slice) -> IdxRecords:
        """Read the records of some rows. Raises BrokenShard or OSError."""
        # The first read of a chunk reads all of it and checks its crc32, which takes 10 us per 20 KB; reading
        # the ids of as many rows takes 0.7 ms (one core, page cache).
        first = rows.start
        stop = rows.stop
        size = self.dtype.itemsize
        chunks = range(first // CHUNK_RECORDS, -(-stop // CHUNK_RECORDS))
        is_new = 0 in self._is_checked[chunks.start : chunks.stop]
        if is_new:
            first = chunks.start * CHUNK_RECORDS
            stop = min(chunks.stop * CHUNK_RECORDS, self.num_samples)
        raw = self.file.read(HEADER_BYTES + first * size, (stop - first) * size)
        records = np.frombuffer(raw, self.dtype)
        for chunk in chunks if is_new else ():
            begin = chunk * CHUNK_RECORDS - first
            part = records[begin : begin + CHUNK_RECORDS]
            found = ""
            if zlib.crc32(part.tobytes()) != self._crcs[chunk]:
                found = f"damaged: wrong crc32 of the records from {chunk * CHUNK_RECORDS} on"
            elif part["offset"].max() > MAX_OFFSET:
                found = f"a sample at byte {part['offset'].max()} of the tar"
            if found:
                raise self._error(errors.BrokenShard, found)
            self._is_checked[chunk] = True
        return records[rows.start - first : rows.stop - first]

    def _error(self, kind: type[errors.ShardprepError], found: str, expected: object = None) -> Exception:
        remedy = commands.shard_again(self._shard_id, self._folder)
        return kind(path=self.file.path, found=found, expected=expected, remedy=remedy)


_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def idx_num_bytes(kind: str, num_samples: _Number) -> _Number:
    """Return the size of an idx in bytes: header, records and crc32s. Arrays are accepted."""
    num_chunks = -(-num_samples // CHUNK_RECORDS)
    return HEADER_BYTES + num_samples * IDX_DTYPES[kind].itemsize + num_chunks * CHUNK_CRC.itemsize


def read_idx(folder: DataFolder, spec: DatasetSpec, shard_id: int) -> IdxRecords:
    """Return a shard's idx as a structured array of one of IDX_DTYPES, a record per sample."""
    with errors_named(folder.path_of(names.idx_name(shard_id))):
        idx = IdxFile(folder, spec, shard_id)
        with idx.file:
            return idx.read(slice(0, idx.num_samples))


def misplaced_samples(spec: DatasetSpec, records: IdxRecords, tar_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which samples cannot be where the idx says, in a tar of this size: bool[samples].

    Ids, starts and masks must be inside the tar and have the right size. Ids must not overlap, and a row's
    starts and mask must be close to its ids. So reading takes no more memory than the size of the tar.
    """
    tokens = records["num_tokens"].astype(np.int64)
    size = records["num_bytes"].astype(np.int64)
    offset = records["offset"].astype(np.int64)
    wrong = (offset < 0) | (offset > tar_bytes - size)
    if spec.kind == "json":
        # [7] is the shortest list of one token; an id has at most ten digits, and ", " before it.
        wrong |= (size < np.maximum(2, 2 * tokens)) | (size > MAX_JSON_ID_BYTES * tokens + 2)
    elif spec.kind == "npy":
        wrong |= size != tokens * spec.dtype.itemsize
    else:
        row_bytes = spec.seq_len * spec.dtype.itemsize
        num_starts = records["num_starts"].astype(np.int64)
        wrong |= (size != row_bytes) | (tokens < 1) | (tokens > spec.seq_len) | (num_starts > spec.seq_len)
        # A member has rows of about PACKED_MEMBER_BYTES, or one row, after at most 9 bytes per token.
        max_distance = 16 * max(names.PACKED_MEMBER_BYTES, row_bytes) + (1 << 20)
        sizes = {"starts_offset": 4 * num_starts}
        if spec.kind == "chat":
            sizes["mask_offset"] = np.full(len(records), spec.seq_len)
        for name, num_bytes in sizes.items():
            begin = records[name].astype(np.int64)
            wrong |= (begin < 0) | (begin > tar_bytes - num_bytes) | (begin < offset - max_distance)
    in_tar = np.argsort(offset, kind="stable")
    ends = offset[in_tar] + size[in_tar]
    overlaps = ends[:-1] > offset[in_tar][1:]
    wrong[in_tar[:-1][overlaps]] = True
    return wrong


def idx_header(spec: DatasetSpec, shard_id: int) -> bytes:
    """Return the header of an idx: 64 bytes."""
    kind = [*IDX_DTYPES].index(spec.kind)
    token_bytes = 0 if spec.kind == "json" else spec.token_bytes
    of_shard = (spec.seq_len, shard_id, spec.plan_id[:32].encode(), 0)
    return np.array(
        [(b"shardidx", json_files.FORMAT_VERSION, kind, token_bytes, *of_shard)], IDX_HEADER
    ).tobytes()


def samples_containing(records: IdxRecords, place: tuple[int, int], num_train: int) -> list[int]:
    """Return the samples of the last document that begins at or before ``place``, (input, offset)."""
    # Rows for validation follow the ``num_train`` others. The document may be on either side.
    is_in_rows = "num_starts" in (records.dtype.names or ())
    if is_in_rows and 0 < num_train < len(records):
        train = samples_containing(records[:num_train], place, num_train)
        validation = samples_containing(records[num_train:], place, 0)
        return train + [num_train + number for number in validation]
    places = list(zip(records["input_number"].tolist(), records["input_offset"].tolist(), strict=True))
    if is_in_rows and places != sorted(places):
        raise errors.UsageError("rows of --pack best_fit have documents in any order; search for a text")
    nearest = max((item for item in places if item <= place), default=None)
    # A row that begins in an earlier input may contain all of a small input.
    if nearest is None or (not is_in_rows and nearest[0] != place[0]):
        return []
    rows = [number for number, item in enumerate(places) if item == nearest]
    if is_in_rows and rows[0]:
        rows.insert(0, rows[0] - 1)  # the document may begin in the previous row
    return rows
