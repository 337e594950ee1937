"""A shard read back: the token ids of its samples, whole or one by one, and their documents.

The ids come in the order of the idx, in pieces of some megabytes, so a shard of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from shardprep.errors import BrokenShard, MissingShard
from shardprep.files import NOT_THERE, ReadFile, errors_named, with_retries
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import misplaced_samples, read_idx
from shardprep.format.names import remake_command, rerun_command, tar_path

READ_BYTES = 4 << 20  # at once; a document of gigabytes is read in such pieces


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
            remedy = rerun_command(shard_id, folder)
            raise MissingShard(path=self.path, found="missing", remedy=remedy) from None
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
        """Some bytes of the tar, tried again where a file system may come back."""
        return with_retries(f"{self.path} cannot be read", lambda: self._tar.read(offset, num_bytes))

    def ids(self, number: int) -> npt.NDArray[np.uint32]:
        """The ids of one sample, without padding: uint32[tokens]."""
        ids = list(self._ids_of(self.records[number : number + 1]))
        return np.concatenate(ids)[: int(self.records["num_tokens"][number])].astype(np.uint32)

    def starts(self, number: int) -> npt.NDArray[np.int64]:
        """The places in a sample where documents begin, ascending: int64[documents]; 0 for a document."""
        if not self.spec.has_rows:
            return np.zeros(1, np.int64)
        record = self.records[number]
        raw = self._read(int(record["starts_offset"]), 4 * int(record["num_starts"]))
        return np.frombuffer(raw, "<u4").astype(np.int64) % self.spec.seq_len

    def loss_mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Which ids of a sample the assistant wrote, bool[tokens]; of what is no conversation, all."""
        record = self.records[number]
        if self.spec.record != "chat":
            return np.ones(int(record["num_tokens"]), np.bool_)
        raw = self._read(int(record["mask_offset"]), int(record["num_tokens"]))
        return np.frombuffer(raw, np.uint8).astype(np.bool_)

    def pieces(self) -> Iterator[npt.NDArray[np.uint32]]:
        """The ids of all samples in order, without padding, some at a time: uint32[tokens] arrays."""
        first, seq_len = 0, self.spec.seq_len
        for ids in self._ids_of(self.records):
            if seq_len:  # whole rows, but for rows of megabytes
                place = first + np.arange(len(ids))
                ids = ids[place % seq_len < self.records["num_tokens"][place // seq_len]]
                first += len(place)
            yield ids.astype(np.uint32)

    def document_lengths(self, *, rows_hold_wholes: bool) -> npt.NDArray[np.int64]:
        """Tokens of the documents that ``pieces`` gives one after another: int64[documents].

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
                yield from ids_of(self.spec, part, raw_ids(part, self._read))
        except (ValueError, OverflowError) as error:
            found = f"it holds token ids that cannot be read ({error})"
            raise BrokenShard(path=self.path, found=found, remedy=self._remedy) from None


class RawIds(NamedTuple):
    """The bytes of the ids of samples that follow each other, or a part of a long sample's."""

    rows: slice  # of the records
    begin: int  # byte of the tar
    data: bytearray
    is_last: bool = True  # nothing of the last sample follows


def raw_ids(records: npt.NDArray[np.void], read: Callable[[int, int], bytearray]) -> Iterator[RawIds]:
    """All bytes of the ids of consecutive samples, about READ_BYTES at a time."""
    first = 0
    ends = records["offset"] + records["num_bytes"]
    while first < len(records):
        begin = int(records["offset"][first])
        last = int(np.searchsorted(ends, begin + READ_BYTES, side="right"))
        if last > first:
            yield RawIds(slice(first, last), begin, read(begin, int(ends[last - 1]) - begin))
            first = last
            continue
        end = int(ends[first])
        for place in range(begin, end, READ_BYTES):
            stop = min(place + READ_BYTES, end)
            yield RawIds(slice(first, first + 1), place, read(place, stop - place), stop == end)
        first += 1


def ids_of(
    spec: DatasetSpec, records: npt.NDArray[np.void], raws: Iterable[RawIds]
) -> Iterator[npt.NDArray[np.integer]]:
    """All ids of consecutive samples, some at a time; of packed rows with their padding.

    Raises ValueError where they are none. Of a long JSON list, each piece is cut at its last comma.
    """
    rest, num_found = b"", 0  # of a long list: what is not parsed yet, and the ids before it
    for raw in raws:
        group = records[raw.rows]
        begin = int(group["offset"][0])
        if raw.begin == begin and raw.is_last:
            yield _ids_in(raw.data, spec, group, begin)
        elif spec.kind != "json":
            yield np.frombuffer(raw.data, spec.dtype)
        else:
            text = rest + raw.data
            head, _, rest = (text, b"", b"") if raw.is_last else text.rpartition(b", ")
            ids = orjson.loads(b"[" + head.removeprefix(b"[").removesuffix(b"]") + b"]")
            num_found += len(ids)
            yield np.array(ids, np.int64)
            if raw.is_last:
                _check_count([num_found], group)
                num_found = 0


def _check_count(found: list[int], group: npt.NDArray[np.void]) -> None:
    if found != group["num_tokens"].tolist():
        raise ValueError("a list has another number of tokens than the idx says")


def _ids_in(
    raw: bytearray, spec: DatasetSpec, group: npt.NDArray[np.void], begin: int
) -> npt.NDArray[np.integer]:
    """The ids of consecutive samples, given the bytes of the tar from the first of them on."""
    places = group["offset"].astype(np.int64) - begin
    if spec.kind != "json":
        size = spec.dtype.itemsize
        counts = group["num_bytes"].astype(np.int64) // size
        shifts = places // size - np.cumsum(counts) + counts
        every = np.frombuffer(raw, spec.dtype, len(raw) // size)
        return np.take(every, np.repeat(shifts, counts) + np.arange(counts.sum()))
    sizes = group["num_bytes"].tolist()
    texts = [raw[place : place + size] for place, size in zip(places.tolist(), sizes, strict=True)]
    lists = orjson.loads(b"[" + b",".join(texts) + b"]")
    _check_count([*map(len, lists)], group)
    ids = list(chain.from_iterable(lists))
    if not {int}.issuperset(map(type, ids)) or (ids and min(ids) < 0):
        raise ValueError("a list holds what is no token id")
    return np.array(ids, np.int64)
