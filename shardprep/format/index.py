"""shard-N.idx, the positions of samples in a shard; index.json, a summary of all shards of a data set.

An idx has a header of 64 bytes, a record of fixed size per sample, and a crc32 per 512 records. It is read,
never mapped: if a file system fails, access to a mapped page ends in SIGBUS.

ShardSamples reads the token ids of a shard's samples and their documents, in the order of the idx and a few
megabytes at a time, so a shard of any size takes little memory.

index.json merges all manifests, so that a reader opens one file instead of 10^5.
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
from shardprep.files import NOT_THERE, errors_named, with_retries
from shardprep.format import commands, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest, SourceCounts, manifest_ids, read_manifest, sum_of_sources
from shardprep.format.names import Count, DatasetSpec, Text

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
READ_BYTES = 4 << 20  # of ids per read, unless a single sample has more
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
        self._folder, self._shard_id, self.dtype = folder, shard_id, IDX_DTYPES[spec.kind]
        name, header = names.idx_name(shard_id), idx_header(spec, shard_id)
        with ExitStack() as opened:  # closes the file on an error, whose traceback may keep it alive
            try:
                self.file = opened.enter_context(folder.open(name))
            except NOT_THERE:
                raise commands.missing_file(folder, name, shard_id) from None
            head = bytes(self.file.read(0, min(HEADER_BYTES, self.file.num_bytes)))
            if len(head) < HEADER_BYTES or head[:8] != header[:8]:
                raise self._error(errors.BrokenShard, f"not an idx: begins {head[:8]!r}", f"{header[:8]!r}")
            values, wanted = (np.frombuffer(each, IDX_HEADER)[0] for each in (head, header))
            if (version := int(values["version"])) != names.FORMAT_VERSION:
                raise names.unknown_version(self.file.path, version)
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
                found = f"damaged: wrong crc32 of the records from {chunk * CHUNK_RECORDS} on"
            elif (last := int(part["offset"].max())) > MAX_OFFSET:
                found = f"a sample at byte {last} of the tar"
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
    tokens, size = records["num_tokens"].astype(np.int64), records["num_bytes"].astype(np.int64)
    offset = records["offset"].astype(np.int64)
    wrong = (offset < 0) | (offset > tar_bytes - size)
    if spec.kind == "json":
        # [7] is the shortest list of one token; an id has at most ten digits, and ", " before it.
        wrong |= (size < np.maximum(2, 2 * tokens)) | (size > MAX_JSON_ID_BYTES * tokens + 2)
    elif spec.kind == "npy":
        wrong |= size != tokens * spec.dtype.itemsize
    else:
        row_bytes, num_starts = spec.seq_len * spec.dtype.itemsize, records["num_starts"].astype(np.int64)
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
    kind, token_bytes = [*IDX_DTYPES].index(spec.kind), 0 if spec.kind == "json" else spec.token_bytes
    of_shard = (spec.seq_len, shard_id, spec.plan_id[:32].encode(), 0)
    return np.array([(b"shardidx", names.FORMAT_VERSION, kind, token_bytes, *of_shard)], IDX_HEADER).tobytes()


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


class ShardSamples:
    """A shard, or some rows of its idx, open for reading within ``with``."""

    def __init__(
        self, folder: DataFolder, spec: DatasetSpec, shard_id: int, rows: slice = slice(None)
    ) -> None:
        self.spec = spec
        self.shard_id = shard_id
        records = read_idx(folder, spec, shard_id)
        self.records = records[rows]  # one of IDX_DTYPES per sample
        self.folder = folder
        name = names.tar_name(shard_id)
        self.path = folder.path_of(name)
        try:
            with errors_named(self.path):
                self._tar = folder.open(name)
        except NOT_THERE:
            raise commands.missing_file(folder, name, shard_id) from None
        wrong = misplaced_samples(spec, records, self._tar.num_bytes)
        if wrong.any():
            self._tar.close()
            found = f"{self._tar.num_bytes} bytes, with no place for sample {int(wrong.argmax())} of the idx"
            raise errors.BrokenShard(path=self.path, found=found, remedy=self._remedy())

    def _remedy(self) -> str:
        return commands.shard_again(self.shard_id, self.folder)

    def __enter__(self) -> ShardSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def _read(self, offset: int, num_bytes: int) -> bytearray:
        """Read bytes of the tar, with retries while a file system may come back."""
        return with_retries(f"{self.path} cannot be read", lambda: self._tar.read(offset, num_bytes))

    def ids(self, number: int) -> npt.NDArray[np.uint32]:
        """Return the ids of one sample, without padding: uint32[tokens]."""
        (ids,) = self._ids_of(self.records[number : number + 1])
        return ids[: int(self.records["num_tokens"][number])].astype(np.uint32)

    def starts(self, number: int) -> npt.NDArray[np.int64]:
        """Return where documents begin in a sample, ascending: int64[documents]; [0] for a document."""
        if not self.spec.has_rows:
            return np.zeros(1, np.int64)
        record = self.records[number]
        raw = self._read(int(record["starts_offset"]), 4 * int(record["num_starts"]))
        return np.frombuffer(raw, "<u4").astype(np.int64) % self.spec.seq_len

    def loss_mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which ids of a sample the assistant wrote, bool[tokens]; all ids unless it is chat."""
        record = self.records[number]
        if self.spec.record != "chat":
            return np.ones(int(record["num_tokens"]), np.bool_)
        raw = self._read(int(record["mask_offset"]), int(record["num_tokens"]))
        return np.frombuffer(raw, np.uint8).astype(np.bool_)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of all samples in order, without padding, in pieces: uint32[tokens]."""
        first, seq_len = 0, self.spec.seq_len
        for ids in self._ids_of(self.records):
            if seq_len:
                rows = ids.reshape(-1, seq_len)
                num_tokens = self.records["num_tokens"][first : first + len(rows)]
                ids = rows[np.arange(seq_len) < num_tokens[:, None]]
                first += len(rows)
            yield ids.astype(np.uint32)

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document, in the order of ``pieces``: int64[documents].

        In packed rows a document that continues in the next row counts once. Rows of ``--pack best_fit`` may
        continue a document elsewhere, see ``preprocess/export.py``.
        """
        lengths = self.records["num_tokens"].astype(np.int64)
        if not self.spec.has_rows or not len(lengths):
            return lengths
        row_begins = np.cumsum(lengths) - lengths
        begins = [row_begins[:1]]
        begins += [row_begins[number] + self.starts(number) for number in range(len(lengths))]
        return np.diff(np.unique(np.concatenate(begins)), append=lengths.sum())

    def _ids_of(self, records: IdxRecords) -> Iterator[npt.NDArray[np.integer]]:
        steps = np.diff(records["offset"].astype(np.int64))  # negative where samples for validation begin
        try:
            for ascending in np.split(records, np.flatnonzero(steps <= 0) + 1):
                yield from ids_of(self.spec, ascending, self._read)
        except (ValueError, OverflowError) as error:
            found = f"token ids that cannot be read ({error})"
            raise errors.BrokenShard(path=self.path, found=found, remedy=self._remedy()) from None


def ids_of(
    spec: DatasetSpec, records: IdxRecords, read: Callable[[int, int], bytearray]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield the ids of samples with ascending offsets, in pieces. ``read(offset, size)`` reads the tar."""
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
                raise ValueError("the number of tokens differs from the idx")
            ids = list(chain.from_iterable(lists))
            if not {int}.issuperset(map(type, ids)) or (ids and min(ids) < 0):
                raise ValueError("a list with values that are not token ids")
            yield np.array(ids, np.int64)
        else:
            size = spec.dtype.itemsize
            counts = group["num_bytes"].astype(np.int64) // size
            values = np.frombuffer(raw, spec.dtype, len(raw) // size)
            gaps = places // size - (np.cumsum(counts) - counts)  # values before each sample that are not ids
            yield np.take(values, np.repeat(gaps, counts) + np.arange(counts.sum()))


MAX_INDEX_BYTES = 64 << 20  # one of 99,999 shards has 8 MB
COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes", "num_validation_samples")
_FORMAT = "shardprep-index"
_HASH_DIGITS = 16
_ShortHash = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{_HASH_DIGITS}}}\Z")]


@dataclass(frozen=True, kw_only=True)
class _IndexFile:
    """The content of index.json."""

    spec: DatasetSpec
    sources: dict[str, SourceCounts]
    columns: list[str]
    shards: list[tuple[Count, Count, Count, Count, Count, Count, _ShortHash]]  # COLUMNS, then a hash
    blanked: Text = ""


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The counts of all shards of a data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    # The first 16 hex digits, by which a state of the loader identifies shards. For a shard with blanked
    # documents these are of the original tar, because blanking moves no sample.
    tar_sha256: tuple[str, ...]
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the data set, by name
    blanked: str = ""  # shards with blanked documents: "0-2,5"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return one of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """Return the content of index.json, about 70 bytes per shard. Equal shards give equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        sources = {name: counts.to_dict() for name, counts in self.sources.items()}
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
    """Build the index from rows of COLUMNS and a hash. ``place_of``: file and place of a row, for errors."""
    columns = np.array([row[:-1] for row in rows], np.int64)
    samples, documents, tokens, tar_bytes, idx_bytes, validation = columns.T
    # A document takes at least two blocks of the tar, a row at least its ids.
    sample_bytes = spec.seq_len * spec.token_bytes if spec.has_rows else 2 * names.BLOCK_BYTES
    is_cut = (tar_bytes % names.BLOCK_BYTES != 0) | (tar_bytes < 2 * names.BLOCK_BYTES)
    wrong = {
        "num_samples": samples > names.MAX_SAMPLES,
        "idx_bytes for num_samples": idx_bytes != idx_num_bytes(spec.kind, samples),
        "tar_bytes in whole blocks": is_cut,
        "tar_bytes for num_samples": tar_bytes < samples.clip(0, names.MAX_SAMPLES) * sample_bytes,
        "num_documents for num_samples": (documents != samples) & (not spec.has_rows),
        "num_tokens for num_samples": (tokens > samples * spec.seq_len) & spec.has_rows,
        "num_validation_samples": validation > (samples if spec.validation_fraction else 0),
    }
    for what, are_wrong in wrong.items():
        if are_wrong.any():
            row = int(are_wrong.argmax())
            raise names.wrong_value(*place_of(row), columns[row].tolist(), f"valid {what}")
    hashes = tuple(row[-1] for row in rows)
    return DatasetIndex(spec=spec, columns=columns, tar_sha256=hashes, sources=sources, blanked=blanked)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the collector while many objects are created: each run traverses all objects, also torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def merge_manifests(folder: DataFolder, manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards of a folder, given in order. Raises OtherPlan or BrokenShard."""
    spec: DatasetSpec | None = None
    rows: list[tuple[Any, ...]] = []
    blanked: list[int] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            path = folder.path_of(names.manifest_name(manifest.shard_id))
            found, expected = f"plan {manifest.spec.plan_id[:12]}", f"{spec.plan_id[:12]}, like the others"
            remedy = commands.shard_of_other_plan(manifest.shard_id, folder)
            raise errors.OtherPlan(path=path, found=found, expected=expected, remedy=remedy)
        counts = manifest.counts
        numbers = (counts.num_samples, counts.num_documents, counts.num_tokens)
        files = (manifest.tar.num_bytes, manifest.idx.num_bytes)
        tar_sha256 = (manifest.unblanked_sha256 or manifest.tar.sha256)[:_HASH_DIGITS]
        rows.append((*numbers, *files, counts.held_out.num_samples, tar_sha256))
        blanked += [manifest.shard_id] if manifest.unblanked_sha256 else []
        sources.append(counts.sources)
    if spec is None:
        raise errors.MissingShard("no manifest was given")
    total, shards_blanked = sum_of_sources(sources), names.id_ranges(blanked)
    return _index_of(
        spec, rows, total, shards_blanked, lambda row: (folder.path_of(names.manifest_name(row)), "counts")
    )


def read_index(folder: DataFolder) -> DatasetIndex:
    """Return the index of a data set: index.json, or if there is none, its manifests merged in memory."""
    path = folder.path_of(names.INDEX_NAME)
    try:
        with without_garbage_collection():
            file = names.read_file(folder, names.INDEX_NAME, _FORMAT, _IndexFile, max_bytes=MAX_INDEX_BYTES)
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
        error.remedy = commands.on("verify", folder)
        raise
    remedy = commands.run(folder)
    if not present and folder.size_of(names.PLAN_NAME) is not None:
        raise errors.NotFound(path=folder, found="a plan without shards", remedy=remedy)
    if not present:
        found = f"not a data set: it has neither {names.INDEX_NAME} nor a manifest of a shard"
        raise errors.NotFound(path=folder, found=found)
    num_shards = read_manifest(folder, present[0]).spec.num_shards
    if present[-1] >= num_shards:
        path = folder.path_of(names.manifest_name(present[-1]))
        expected = f"shards 0 to {num_shards - 1}; move it with its tar and idx to its own data set"
        raise errors.OtherPlan(path=path, found="a shard of another data set", expected=expected)
    if missing := sorted(set(range(num_shards)) - set(present)):
        found = f"{len(present)} of {num_shards} shards, without {names.id_ranges(missing)}"
        raise errors.MissingShard(path=folder, found=found, remedy=remedy)
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in present))
