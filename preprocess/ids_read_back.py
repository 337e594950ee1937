"""Reads every token id of a shard back and compares it with the size of the vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.shard_format import (
    BrokenShard,
    DatasetSpec,
    remake_command,
    tar_path,
)
from preprocess.shard_format.regular_files import errors_named, open_regular

READ_BYTES = 4 << 20  # at once; a document of gigabytes is read in such pieces


def check_places(folder: Path, spec: DatasetSpec, shard_id: int, records: npt.NDArray[np.void]) -> None:
    """That ids, and starts of documents, lie within the tar with the bytes that they must have.

    ``records``: the shard's idx. Raises BrokenShard.
    """
    tar_bytes = tar_path(folder, shard_id).stat().st_size
    tokens, size = records["num_tokens"].astype(np.int64), records["num_bytes"]
    wrong = records["offset"] + size > tar_bytes
    if spec.kind == "json":
        wrong |= size < np.maximum(2, 2 * tokens)  # [7] is the shortest of one token
    elif spec.kind == "npy":
        wrong |= size != tokens * spec.dtype.itemsize
    else:
        wrong |= (size != spec.seq_len * spec.dtype.itemsize) | (tokens < 1) | (tokens > spec.seq_len)
        wrong |= records["starts_offset"] > tar_bytes - 4 * records["num_starts"].astype(np.int64)
    if wrong.any():
        raise BrokenShard(
            f"the idx of shard {shard_id:05d} places sample {int(wrong.argmax())} where it cannot be in a "
            f"tar of {tar_bytes} bytes; run: {remake_command(shard_id, folder)}"
        )


def check_ids(folder: Path, spec: DatasetSpec, shard_id: int, records: npt.NDArray[np.void]) -> None:
    """That every id is one of the vocabulary, and each JSON list has its tokens; places were checked.

    A million tokens take 126 ms of CPU as JSON, 8 ms packed (one core). Raises BrokenShard or
    ReadWriteError.
    """
    path = tar_path(folder, shard_id)
    with errors_named(path):
        handle = open_regular(path)
        try:
            for ids in _ids_of(handle, spec, records):
                if len(ids) and int(ids.max()) >= spec.tokenizer.vocab_size:
                    raise BrokenShard(
                        f"{path} holds the token id {int(ids.max())}, the vocabulary has "
                        f"{spec.tokenizer.vocab_size}; run: {remake_command(shard_id, folder)}"
                    )
        except (ValueError, OverflowError) as error:
            raise BrokenShard(
                f"{path} holds token ids that cannot be read ({error}); "
                f"run: {remake_command(shard_id, folder)}"
            ) from None
        finally:
            os.close(handle)


def _ids_of(
    handle: int, spec: DatasetSpec, records: npt.NDArray[np.void]
) -> Iterator[npt.NDArray[np.integer]]:
    """All ids, some at a time. Raises ValueError where they are none."""
    first = 0
    ends = records["offset"] + records["num_bytes"]
    while first < len(records):
        begin = int(records["offset"][first])
        last = int(np.searchsorted(ends, begin + READ_BYTES, side="right"))
        group = records[first : max(last, first + 1)]
        if last <= first:
            yield from _long_document(handle, spec, begin, int(ends[first]), int(group["num_tokens"][0]))
        else:
            raw = _read(handle, begin, int(ends[last - 1]) - begin)
            yield _ids_in(raw, spec, group, begin)
        first += len(group)


def _ids_in(
    raw: bytes, spec: DatasetSpec, group: npt.NDArray[np.void], begin: int
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
    if [*map(len, lists)] != group["num_tokens"].tolist():
        raise ValueError("a list has another number of tokens than the idx says")
    ids = list(chain.from_iterable(lists))
    if not {int}.issuperset(map(type, ids)) or (ids and min(ids) < 0):
        raise ValueError("a list holds what is no token id")
    return np.array(ids, np.int64)


def _long_document(
    handle: int, spec: DatasetSpec, begin: int, end: int, num_tokens: int
) -> Iterator[npt.NDArray[np.integer]]:
    """The ids of a document in pieces of READ_BYTES; a JSON list is cut at its commas."""
    if spec.kind != "json":
        for place in range(begin, end, READ_BYTES):
            yield np.frombuffer(_read(handle, place, min(READ_BYTES, end - place)), spec.dtype)
        return
    rest, num_found = b"", 0
    for place in range(begin, end, READ_BYTES):
        text = rest + _read(handle, place, min(READ_BYTES, end - place))
        head, _, rest = (text, b"", b"") if place + READ_BYTES >= end else text.rpartition(b", ")
        ids = orjson.loads(b"[" + head.removeprefix(b"[").removesuffix(b"]") + b"]")
        num_found += len(ids)
        yield np.array(ids, np.int64)
    if num_found != num_tokens:
        raise ValueError("a list has another number of tokens than the idx says")


def _read(handle: int, offset: int, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes and (part := os.pread(handle, num_bytes, offset)):  # reads may be short
        parts.append(part)
        offset, num_bytes = offset + len(part), num_bytes - len(part)
    if num_bytes:
        raise ValueError(f"it ends at byte {offset}")
    return b"".join(parts)
