"""A shard read back: the token ids of its samples, whole or one by one, and their documents.

The ids come in the order of the idx, some megabytes at a time, so a shard of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from shardprep.errors import BrokenShard
from shardprep.files import NOT_THERE, ReadFile, errors_named, with_retries
from shardprep.format.idx import misplaced_samples, read_idx
from shardprep.format.names import DatasetSpec, missing_file, remake_command, tar_path

READ_BYTES = 4 << 20  # at once, or one sample


class ShardSamples:
    """One shard, open for reading, or a part of its samples; within ``with``.

    Raises MissingShard, BrokenShard or ReadWriteError, at opening and at reading.
    """

    def __init__(self, folder: Path, spec: DatasetSpec, shard_id: int, part: slice = slice(None)) -> None:
        self.spec = spec
        self.shard_id = shard_id
        records = read_idx(folder, spec, shard_id)
        self.records = records[part]  # see idx_dtype, one per sample
        self.path = tar_path(folder, shard_id)
        self._remedy = remake_command(shard_id, folder)
        try:
            with errors_named(self.path):
                self._tar = ReadFile(self.path)
        except NOT_THERE:
            raise missing_file(self.path, shard_id, folder) from None
        wrong = misplaced_samples(spec, records, self._tar.num_bytes)
        if wrong.any():
            self._tar.close()
            found = f"a tar of {self._tar.num_bytes} bytes"
            expected = f"sample {int(wrong.argmax())} where its idx places it"
            raise BrokenShard(path=self.path, found=found, expected=expected, remedy=self._remedy)

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
        """Return where in a sample documents begin, ascending: int64[documents]; 0 for a document."""
        if not self.spec.has_rows:
            return np.zeros(1, np.int64)
        record = self.records[number]
        raw = self._read(int(record["starts_offset"]), 4 * int(record["num_starts"]))
        return np.frombuffer(raw, "<u4").astype(np.int64) % self.spec.seq_len

    def loss_mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which ids of a sample the assistant wrote, bool[tokens]; of what is no conversation, all."""
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

    def _ids_of(self, records: npt.NDArray[np.void]) -> Iterator[npt.NDArray[np.integer]]:
        steps = np.diff(records["offset"].astype(np.int64))  # back, where samples for validation begin
        try:
            for part in np.split(records, np.flatnonzero(steps <= 0) + 1):
                yield from ids_of(self.spec, part, self._read)
        except (ValueError, OverflowError) as error:
            found = f"it holds token ids that cannot be read ({error})"
            raise BrokenShard(path=self.path, found=found, remedy=self._remedy) from None


def ids_of(
    spec: DatasetSpec, records: npt.NDArray[np.void], read: Callable[[int, int], bytearray]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield all ids of samples that stand one behind another, some samples at a time; rows with padding.

    ``read``: gives bytes of the tar, by the first and their number. Raises ValueError for what is no id.
    """
    first, ends = 0, records["offset"] + records["num_bytes"]
    while first < len(records):
        begin = int(records["offset"][first])
        end = max(first + 1, int(np.searchsorted(ends, begin + READ_BYTES, side="right")))
        group = records[first:end]
        raw = read(begin, int(ends[end - 1]) - begin)
        places = group["offset"].astype(np.int64) - begin
        yield _json_ids(raw, places, group) if spec.kind == "json" else _binary_ids(raw, places, group, spec)
        first = end


def _json_ids(
    raw: bytearray, places: npt.NDArray[np.int64], group: npt.NDArray[np.void]
) -> npt.NDArray[np.int64]:
    sizes = group["num_bytes"].tolist()
    texts = [raw[place : place + size] for place, size in zip(places.tolist(), sizes, strict=True)]
    lists = orjson.loads(b"[" + b",".join(texts) + b"]")
    if [*map(len, lists)] != group["num_tokens"].tolist():
        raise ValueError("a list has another number of tokens than the idx says")
    ids = list(chain.from_iterable(lists))
    if not {int}.issuperset(map(type, ids)) or (ids and min(ids) < 0):
        raise ValueError("a list holds what is no token id")
    return np.array(ids, np.int64)


def _binary_ids(
    raw: bytearray, places: npt.NDArray[np.int64], group: npt.NDArray[np.void], spec: DatasetSpec
) -> npt.NDArray[np.integer]:
    size = spec.dtype.itemsize
    counts = group["num_bytes"].astype(np.int64) // size
    shifts = places // size - np.cumsum(counts) + counts
    every = np.frombuffer(raw, spec.dtype, len(raw) // size)
    return np.take(every, np.repeat(shifts, counts) + np.arange(counts.sum()))
