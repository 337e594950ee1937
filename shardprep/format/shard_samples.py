"""Read the token ids of a shard's samples, and their documents, in the order of the idx.

A few megabytes are read at a time, so a shard of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
import orjson

from shardprep import errors
from shardprep.files import NOT_THERE, errors_named, with_retries
from shardprep.format import commands, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import IdxRecords, misplaced_samples, read_idx
from shardprep.format.spec import DatasetSpec

READ_BYTES = 4 << 20  # of ids per read, unless a single sample has more


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
        """Return where documents begin in a sample, ascending, [0] for a document: int64[documents]."""
        if not self.spec.has_rows:
            return np.zeros(1, np.int64)
        record = self.records[number]
        raw = self._read(int(record["starts_offset"]), 4 * int(record["num_starts"]))
        return np.frombuffer(raw, "<u4").astype(np.int64) % self.spec.seq_len

    def loss_mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which ids of a sample the assistant wrote, all ids unless it is chat: bool[tokens]."""
        record = self.records[number]
        if self.spec.record != "chat":
            return np.ones(int(record["num_tokens"]), np.bool_)
        raw = self._read(int(record["mask_offset"]), int(record["num_tokens"]))
        return np.frombuffer(raw, np.uint8).astype(np.bool_)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of all samples in order, without padding, in pieces: uint32[tokens]."""
        first = 0
        seq_len = self.spec.seq_len
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
    first = 0
    ends = records["offset"] + records["num_bytes"]
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
