"""shard-N.idx, where each sample of a shard lies; index.json, what each shard of a data set holds.

An idx is a file of records: 64 bytes of header, one record of fixed size per sample, and a crc32 for each 512
records. It is read, never mapped: where a file system fails, a mapped page is a SIGBUS.

ShardSamples reads a shard back: the token ids of its samples, whole or one by one, and their documents. They
come in the order of the idx, some megabytes at a time, so a shard of any size takes little memory.

index.json is all manifests merged, so that a reader opens one file and not 10^5.
"""

from __future__ import annotations

import gc
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from msgspec import Meta

from shardprep import errors
from shardprep.errors import ShardprepError
from shardprep.files import NOT_THERE, ReadFile, errors_named, size_of_file, with_retries
from shardprep.format import names
from shardprep.format.manifest import Manifest, SourceCounts, manifest_ids, read_manifest, sum_of_sources
from shardprep.format.names import Count, DatasetSpec, Text

HEADER_BYTES = 64
CHUNK_RECORDS = 512  # share a crc32, and are read together: of an idx 14 KB of documents, 20 KB of rows
CHUNK_CRC = np.dtype("<u4")
IDX_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("kind", "<u4"),  # position in IDX_DTYPES
        ("token_bytes", "<u4"),  # bytes of a token id; 0 where ids are JSON
        ("seq_len", "<u4"),  # 0 unless packed
        ("shard_id", "<u4"),
        ("plan_id", "S32"),  # the first 32 hex digits
        ("zero", "<u4"),
    ]
)
IDX_DOCUMENT = np.dtype(
    [
        ("offset", "<u8"),  # byte in the tar where the sample's ids begin (past any npy header)
        ("num_bytes", "<u4"),  # bytes of those ids
        ("num_tokens", "<u4"),  # ids in it; in a packed row, without the padding
        ("source", "<u4"),  # position of the input file in plan.json
        ("source_offset", "<u8"),  # byte where its document, or its row's first, begins there
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
# The type of a record, for each kind of samples; a new kind comes last.
IDX_DTYPES = {"json": IDX_DOCUMENT, "npy": IDX_DOCUMENT, "packed": IDX_ROW, "chat": IDX_CHAT_ROW}
READ_BYTES = 4 << 20  # of ids at once, or one sample
MAX_OFFSET = 2**62  # sums with it stay in an int64; who reads at it compares it with the tar's size


Records = npt.NDArray[np.void]  # of one of IDX_DTYPES


class ChunkCrcs:
    """The crc32 of each CHUNK_RECORDS records, taken while they are written one after another."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._chunk_bytes = CHUNK_RECORDS * dtype.itemsize
        self._crcs: list[int] = []
        self._rest = bytearray()  # of the last chunk, until it is full

    def add(self, records: bytes) -> None:
        """Take the next records, any number of them."""
        self._rest += records
        while len(self._rest) >= self._chunk_bytes:
            self._crcs.append(zlib.crc32(self._rest[: self._chunk_bytes]))
            del self._rest[: self._chunk_bytes]

    def table(self) -> bytes:
        """Return what stands behind the records."""
        last = [zlib.crc32(self._rest)] if self._rest else []
        return np.array(self._crcs + last, CHUNK_CRC).tobytes()


class IdxFile:
    """The idx of a shard, open, its header and size checked; close ``file``. Reads raise OSError."""

    def __init__(self, folder: Path, spec: DatasetSpec, shard_id: int) -> None:
        """Open it, and compare its first 64 bytes."""
        self._folder, self._shard_id, self.dtype = folder, shard_id, IDX_DTYPES[spec.kind]
        path, header = names.idx_path(folder, shard_id), idx_header(spec, shard_id)
        with ExitStack() as opened:  # an error that somebody keeps would keep it open
            try:
                self.file = opened.enter_context(ReadFile(path))
            except NOT_THERE:
                raise names.missing_file(path, shard_id, folder) from None
            found = bytes(self.file.read(0, min(HEADER_BYTES, self.file.num_bytes)))
            if len(found) < HEADER_BYTES or found[:8] != header[:8]:
                raise self._wrong(errors.BrokenShard, f"no idx: it begins {found[:8]!r}", f"{header[:8]!r}")
            values, wanted = (np.frombuffer(each, IDX_HEADER)[0] for each in (found, header))
            if (version := int(values["version"])) != names.FORMAT_VERSION:
                raise names.unknown_version(path, version)
            for name in IDX_HEADER.names or ():
                if values[name] != wanted[name]:
                    raise self._wrong(errors.OtherPlan, f"an idx for {name} {values[name]}", wanted[name])
            # The size tells how many records there are: no two numbers of records make the same size.
            chunk_bytes = CHUNK_RECORDS * self.dtype.itemsize + CHUNK_CRC.itemsize
            num_bytes = self.file.num_bytes - HEADER_BYTES
            num_chunks, rest_bytes = divmod(num_bytes, chunk_bytes)
            num_rest = max(0, rest_bytes - CHUNK_CRC.itemsize) // self.dtype.itemsize
            self.num_samples = num_chunks * CHUNK_RECORDS + num_rest
            if self.file.num_bytes != idx_num_bytes(spec.kind, self.num_samples):
                expected = f"records of {self.dtype.itemsize} bytes, with their crc32s"
                found_size = f"cut short: {num_bytes} bytes behind the header"
                raise self._wrong(errors.BrokenShard, found_size, expected)
            self._is_checked = bytearray(-(-self.num_samples // CHUNK_RECORDS))  # of each chunk
            crcs_bytes = len(self._is_checked) * CHUNK_CRC.itemsize
            crcs = self.file.read(self.file.num_bytes - crcs_bytes, crcs_bytes)
            self._crcs = np.frombuffer(crcs, CHUNK_CRC)
            opened.pop_all()

    def read(self, rows: slice) -> Records:
        """Read the records of some rows. Raises BrokenShard, OSError."""
        # The first time with their chunks, whose crc32s are compared: 10 us for 20 KB of them, where reading
        # the ids of as many rows takes 0.7 ms (one core, in the page cache).
        first, stop, size = rows.start, rows.stop, self.dtype.itemsize
        chunks = range(first // CHUNK_RECORDS, -(-stop // CHUNK_RECORDS))
        is_new = 0 in self._is_checked[chunks.start : chunks.stop]
        if is_new:
            first, stop = chunks.start * CHUNK_RECORDS, min(chunks.stop * CHUNK_RECORDS, self.num_samples)
        raw = self.file.read(HEADER_BYTES + first * size, (stop - first) * size)
        records = np.frombuffer(raw, self.dtype)
        for chunk in chunks if is_new else ():
            begin = chunk * CHUNK_RECORDS - first
            part, found = records[begin : begin + CHUNK_RECORDS], ""
            if zlib.crc32(part.tobytes()) != self._crcs[chunk]:
                found = f"damaged: another crc32 of the records from {chunk * CHUNK_RECORDS} on"
            elif (last := int(part["offset"].max())) > MAX_OFFSET:
                found = f"a sample at byte {last} of a tar"
            if found:
                raise self._wrong(errors.BrokenShard, found)
            self._is_checked[chunk] = True
        return records[rows.start - first : rows.stop - first]

    def _wrong(self, kind: type[ShardprepError], found: str, expected: object = None) -> ShardprepError:
        remedy = names.remake_command(self._shard_id, self._folder)
        return kind(path=self.file.path, found=found, expected=expected, remedy=remedy)


_Number = TypeVar("_Number", int, npt.NDArray[np.int64])


def idx_num_bytes(kind: str, num_samples: _Number) -> _Number:
    """Return the bytes of an idx: header, records and their crc32s. Of an array of numbers, an array."""
    num_chunks = -(-num_samples // CHUNK_RECORDS)
    return HEADER_BYTES + num_samples * IDX_DTYPES[kind].itemsize + num_chunks * CHUNK_CRC.itemsize


def read_idx(folder: Path, spec: DatasetSpec, shard_id: int) -> Records:
    """Return a shard's whole idx: a structured array of IDX_DTYPES, one per sample."""
    with errors_named(names.idx_path(folder, shard_id)):
        idx = IdxFile(folder, spec, shard_id)
        with idx.file:
            return idx.read(slice(0, idx.num_samples))


def misplaced_samples(spec: DatasetSpec, records: Records, tar_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which samples cannot be where an idx places them in a tar of this size: bool[samples].

    Their ids, starts and masks must lie within the tar, with the bytes that they must have, and apart; what
    belongs to a row stands near it. So whoever reads them takes memory by the tar's size at most.
    """
    tokens, size = records["num_tokens"].astype(np.int64), records["num_bytes"].astype(np.int64)
    offset = records["offset"].astype(np.int64)
    wrong = (offset < 0) | (offset > tar_bytes - size)
    if spec.kind == "json":
        wrong |= size < np.maximum(2, 2 * tokens)  # [7] is the shortest of one token
    elif spec.kind == "npy":
        wrong |= size != tokens * spec.dtype.itemsize
    else:
        row_bytes, num_starts = spec.seq_len * spec.dtype.itemsize, records["num_starts"].astype(np.int64)
        wrong |= (size != row_bytes) | (tokens < 1) | (tokens > spec.seq_len) | (num_starts > spec.seq_len)
        # A member has rows of about PACKED_MEMBER_BYTES, or one, and before them at most 9 bytes a token.
        near = 16 * max(names.PACKED_MEMBER_BYTES, row_bytes) + (1 << 20)
        places = [("starts_offset", 4 * num_starts)]
        places += [("mask_offset", np.full(len(records), spec.seq_len))] if spec.kind == "chat" else []
        for name, num_bytes in places:
            begin = records[name].astype(np.int64)
            wrong |= (begin < 0) | (begin > tar_bytes - num_bytes) | (begin < offset - near)
    in_tar = np.argsort(offset, kind="stable")
    ends = offset[in_tar] + size[in_tar]
    overlaps = ends[:-1] > offset[in_tar][1:]
    wrong[in_tar[:-1][overlaps]] = True
    return wrong


def idx_header(spec: DatasetSpec, shard_id: int) -> bytes:
    """Return the 64 bytes that begin an idx."""
    token_bytes = 0 if spec.kind == "json" else spec.token_bytes
    of_spec = ([*IDX_DTYPES].index(spec.kind), token_bytes, spec.seq_len)
    fields = (b"shardidx", names.FORMAT_VERSION, *of_spec, shard_id, spec.plan_id[:32].encode(), 0)
    return np.array([fields], IDX_HEADER).tobytes()


def samples_holding(records: Records, place: tuple[int, int], num_train: int) -> list[int]:
    """Return the samples of a shard that hold a document, the last one that begins at a place or before."""
    # Rows for validation stand behind the ``num_train`` others; either side may hold it.
    is_in_rows = "num_starts" in (records.dtype.names or ())
    if is_in_rows and 0 < num_train < len(records):
        behind = samples_holding(records[num_train:], place, 0)
        before = samples_holding(records[:num_train], place, num_train)
        return before + [num_train + number for number in behind]
    places = list(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))
    if is_in_rows and places != sorted(places):
        raise errors.UsageError(
            "rows of --pack best_fit hold documents in any order; look for a text in it instead"
        )
    nearest = max((item for item in places if item <= place), default=None)
    # A row that begins in another input may hold all that a small one has.
    if nearest is None or (not is_in_rows and nearest[0] != place[0]):
        return []
    rows = [number for number, item in enumerate(places) if item == nearest]
    if is_in_rows and rows[0]:
        rows.insert(0, rows[0] - 1)  # the document may begin in the row before
    return rows


class ShardSamples:
    """One shard, open for reading, or a part of its samples; within ``with``."""

    def __init__(self, folder: Path, spec: DatasetSpec, shard_id: int, part: slice = slice(None)) -> None:
        self.spec = spec
        self.shard_id = shard_id
        records = read_idx(folder, spec, shard_id)
        self.records = records[part]  # see IDX_DTYPES, one per sample
        self.path = names.tar_path(folder, shard_id)
        self._remedy = names.remake_command(shard_id, folder)
        try:
            with errors_named(self.path):
                self._tar = ReadFile(self.path)
        except NOT_THERE:
            raise names.missing_file(self.path, shard_id, folder) from None
        wrong = misplaced_samples(spec, records, self._tar.num_bytes)
        if wrong.any():
            self._tar.close()
            found = f"a tar of {self._tar.num_bytes} bytes, without sample {int(wrong.argmax())} of its idx"
            raise errors.BrokenShard(path=self.path, found=found, remedy=self._remedy)

    def __enter__(self) -> ShardSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def _read(self, offset: int, num_bytes: int) -> bytearray:
        """Read some bytes of the tar, again where a file system may come back."""
        return with_retries(f"{self.path} cannot be read", lambda: self._tar.read(offset, num_bytes))

    def ids(self, number: int) -> npt.NDArray[np.uint32]:
        """Return the ids of one sample, without padding: uint32[tokens]."""
        (ids,) = self._ids_of(self.records[number : number + 1])
        return ids[: int(self.records["num_tokens"][number])].astype(np.uint32)

    def starts(self, number: int) -> npt.NDArray[np.int64]:
        """Return where in a sample documents begin, ascending: int64[documents], 0 for a document."""
        if not self.spec.has_rows:
            return np.zeros(1, np.int64)
        record = self.records[number]
        raw = self._read(int(record["starts_offset"]), 4 * int(record["num_starts"]))
        return np.frombuffer(raw, "<u4").astype(np.int64) % self.spec.seq_len

    def loss_mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which ids of a sample the assistant wrote, bool[tokens]. Of what is no conversation, all."""
        record = self.records[number]
        if self.spec.record != "chat":
            return np.ones(int(record["num_tokens"]), np.bool_)
        raw = self._read(int(record["mask_offset"]), int(record["num_tokens"]))
        return np.frombuffer(raw, np.uint8).astype(np.bool_)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of all samples in order, without padding, some at a time: uint32[tokens]."""
        first, seq_len = 0, self.spec.seq_len
        for ids in self._ids_of(self.records):
            if seq_len:
                rows = ids.reshape(-1, seq_len)
                num_tokens = self.records["num_tokens"][first : first + len(rows)]
                ids = rows[np.arange(seq_len) < num_tokens[:, None]]
                first += len(rows)
            yield ids.astype(np.uint32)

    def document_lengths(self, *, rows_hold_wholes: bool) -> npt.NDArray[np.int64]:
        """Return the tokens of the documents that ``pieces`` gives one after another: int64[documents].

        In packed rows a document that goes on in the next row is one, but not with ``rows_hold_wholes``
        (``--pack best_fit``): the next row may hold others, so each piece of a longer one counts for itself.
        """
        lengths = self.records["num_tokens"].astype(np.int64)
        if not self.spec.has_rows or not len(lengths):
            return lengths
        row_begins = np.cumsum(lengths) - lengths
        begins = [row_begins if rows_hold_wholes else row_begins[:1]]
        begins += [row_begins[number] + self.starts(number) for number in range(len(lengths))]
        return np.diff(np.unique(np.concatenate(begins)), append=lengths.sum())

    def _ids_of(self, records: Records) -> Iterator[npt.NDArray[np.integer]]:
        steps = np.diff(records["offset"].astype(np.int64))  # back, where samples for validation begin
        try:
            for part in np.split(records, np.flatnonzero(steps <= 0) + 1):
                yield from ids_of(self.spec, part, self._read)
        except (ValueError, OverflowError) as error:
            found = f"token ids that cannot be read ({error})"
            raise errors.BrokenShard(path=self.path, found=found, remedy=self._remedy) from None


def ids_of(
    spec: DatasetSpec, records: Records, read: Callable[[int, int], bytearray]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield all ids of samples that stand one behind another, some at a time. ``read``: of the tar."""
    first, ends = 0, records["offset"] + records["num_bytes"]
    while first < len(records):
        begin = int(records["offset"][first])
        end = max(first + 1, int(np.searchsorted(ends, begin + READ_BYTES, side="right")))
        group = records[first:end]
        raw = read(begin, int(ends[end - 1]) - begin)
        places = group["offset"].astype(np.int64) - begin
        first = end
        if spec.kind == "json":
            sizes = group["num_bytes"].tolist()
            texts = [raw[place : place + size] for place, size in zip(places.tolist(), sizes, strict=True)]
            lists = orjson.loads(b"[" + b",".join(texts) + b"]")
            if [*map(len, lists)] != group["num_tokens"].tolist():
                raise ValueError("a list has another number of tokens than the idx says")
            ids = list(chain.from_iterable(lists))
            if not {int}.issuperset(map(type, ids)) or (ids and min(ids) < 0):
                raise ValueError("a list holds what is no token id")
            yield np.array(ids, np.int64)
        else:
            size = spec.dtype.itemsize
            counts = group["num_bytes"].astype(np.int64) // size
            shifts = places // size - np.cumsum(counts) + counts
            every = np.frombuffer(raw, spec.dtype, len(raw) // size)
            yield np.take(every, np.repeat(shifts, counts) + np.arange(counts.sum()))


MAX_INDEX_BYTES = 64 << 20  # one of 99,999 shards has 8 MB
COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes", "num_validation_samples")
_FORMAT = "shardprep-index"
_HASH_DIGITS = 16
_ShortHash = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{_HASH_DIGITS}}}\Z")]


@dataclass(frozen=True, kw_only=True)
class _IndexFile:
    """The values of index.json."""

    spec: DatasetSpec
    sources: dict[str, SourceCounts]
    columns: list[str]
    shards: list[tuple[Count, Count, Count, Count, Count, Count, _ShortHash]]  # COLUMNS, and a hash
    blanked: Text = ""


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The numbers of every shard of one data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    # The first 16 hex digits. Of a shard with blanked documents those of the tar that it was made from: by
    # them a state of the loader knows its shards, and blanking moves no sample.
    tar_sha256: tuple[str, ...]
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the whole data set, by name
    blanked: str = ""  # shards of which documents are blanked: "0-2,5"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return one of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """Return the bytes of index.json: about 70 per shard, no ``run``, so equal data gives equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        sources = {name: asdict(counts) for name, counts in self.sources.items()}
        content: dict[str, Any] = {"spec": asdict(self.spec), "sources": sources}
        content |= {"columns": [*COLUMNS, "tar_sha256"], "shards": rows}
        if self.blanked:
            content["blanked"] = self.blanked
        head = names.with_content_hash(_FORMAT, content)
        del head["shards"]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
        return f'{text},\n "shards": [\n{lines}\n]}}\n'.encode()


def _index_of(
    spec: DatasetSpec,
    rows: list[tuple[Any, ...]],
    sources: Mapping[str, SourceCounts],
    blanked: str,
    place_of: Callable[[int], tuple[Path, str]],
) -> DatasetIndex:
    """Return the index of rows of COLUMNS and a hash. ``place_of``: names a row, for an error."""
    columns = np.array([row[:-1] for row in rows], np.int64)
    samples, documents, tokens, tar_bytes, idx_bytes, validation = columns.T
    # The least bytes of a tar: two blocks a document, the ids of a row.
    sample_bytes = spec.seq_len * spec.token_bytes if spec.has_rows else 2 * names.BLOCK_BYTES
    is_cut = (tar_bytes % names.BLOCK_BYTES != 0) | (tar_bytes < 2 * names.BLOCK_BYTES)
    wrong = {
        "num_samples": samples > names.MAX_SAMPLES,
        "idx_bytes, by num_samples": idx_bytes != idx_num_bytes(spec.kind, samples),
        "tar_bytes, in whole blocks": is_cut,
        "tar_bytes, by num_samples": tar_bytes < samples.clip(0, names.MAX_SAMPLES) * sample_bytes,
        "num_documents, by num_samples": (documents != samples) & (not spec.has_rows),
        "num_tokens, by num_samples": (tokens > samples * spec.seq_len) & spec.has_rows,
        "num_validation_samples": validation > (samples if spec.validation_fraction else 0),
    }
    for what, are_wrong in wrong.items():
        if are_wrong.any():
            row = int(are_wrong.argmax())
            raise names.wrong_value(*place_of(row), columns[row].tolist(), f"other {what}")
    hashes = tuple(row[-1] for row in rows)
    return DatasetIndex(spec=spec, columns=columns, tar_sha256=hashes, sources=sources, blanked=blanked)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Stop collections where many objects are made: each goes through all there are, such as torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def merge_manifests(folder: Path, manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards of a folder, given in the order of their shards."""
    spec: DatasetSpec | None = None
    rows: list[tuple[Any, ...]] = []
    blanked: list[int] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            path = names.manifest_path(folder, manifest.shard_id)
            found, expected = f"plan {manifest.spec.plan_id[:12]}", f"{spec.plan_id[:12]}, as the others"
            remedy = names.remake_command(manifest.shard_id, folder)
            raise errors.OtherPlan(path=path, found=found, expected=expected, remedy=remedy)
        counts = manifest.counts
        numbers = (counts.num_samples, counts.num_documents, counts.num_tokens)
        files = (manifest.tar.num_bytes, manifest.idx.num_bytes)
        tar_sha256 = (manifest.made_from or manifest.tar.sha256)[:_HASH_DIGITS]
        rows.append((*numbers, *files, counts.held_out.num_samples, tar_sha256))
        blanked += [manifest.shard_id] if manifest.made_from else []
        sources.append(counts.sources)
    if spec is None:
        raise errors.MissingShard("no manifest was given")
    total, shards_blanked = sum_of_sources(sources), names.id_ranges(blanked)
    return _index_of(
        spec, rows, total, shards_blanked, lambda row: (names.manifest_path(folder, row), "counts")
    )


def read_index(folder: Path) -> DatasetIndex:
    """Return the index of a data set: index.json, or without one its manifests, merged in memory."""
    path = folder / names.INDEX_NAME
    try:
        with without_garbage_collection():
            file = names.read_file(path, _FORMAT, _IndexFile, max_bytes=MAX_INDEX_BYTES)
            if file.columns != [*COLUMNS, "tar_sha256"]:
                raise names.wrong_value(path, "columns", file.columns, f"{', '.join(COLUMNS)}, tar_sha256")
            if (num_rows := len(file.shards)) != file.spec.num_shards:
                raise names.wrong_value(path, "shards", f"{num_rows} rows", f"{file.spec.num_shards}")
            return _index_of(
                file.spec, file.shards, file.sources, file.blanked, lambda row: (path, f"shards[{row}]")
            )
    except NOT_THERE:
        present = manifest_ids(folder)
    except errors.BrokenShard as error:
        error.remedy = f"shardprep verify {errors.quoted(folder)}"
        raise
    remedy = f"shardprep run {errors.quoted(folder)}"
    if not present and size_of_file(folder / names.PLAN_NAME) is not None:
        raise errors.NotFound(path=folder, found="a plan, but no shard yet", remedy=remedy)
    if not present:
        found = f"no data set: neither {names.INDEX_NAME} nor a shard's manifest"
        raise errors.NotFound(path=folder, found=found)
    num_shards = read_manifest(folder, present[0]).spec.num_shards
    if present[-1] >= num_shards:
        path = names.manifest_path(folder, present[-1])
        expected = f"shards 0 to {num_shards - 1}; move it, with its tar and idx, to its own data set"
        raise errors.OtherPlan(path=path, found="a shard of another data set", expected=expected)
    if missing := sorted(set(range(num_shards)) - set(present)):
        found = f"{len(present)} of {num_shards} shards, without {names.id_ranges(missing)}"
        raise errors.MissingShard(path=folder, found=found, remedy=remedy)
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in present))
