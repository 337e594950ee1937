"""Proves a data set whole and writes its index.json; on Lustre osts.json, too.

The fast tier compares manifests, sizes and coverage. The full one reads every byte back: hashes, places and
every token id. A million tokens take 126 ms of CPU as JSON and 8 ms packed (one core). osts.json is a hint:
readers take an order of opening from it that spreads them over the servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

import lustre
from preprocess.plan import Plan
from preprocess.tokenizer_files import check_tokenizer_files
from shardprep.atomic_files import publish_bytes
from shardprep.errors import BrokenShard, ReadWriteError, Refused, ShardprepError
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import read_idx
from shardprep.format.index import DatasetIndex, merge_manifests
from shardprep.format.manifest import Manifest, check_hashes, check_shard
from shardprep.format.names import (
    INDEX_NAME,
    OSTS_NAME,
    TAR_END,
    offset_unit,
    remake_command,
    tar_path,
)
from shardprep.format.osts import osts_json
from shardprep.regular_files import errors_named, open_regular

READ_BYTES = 4 << 20  # at once; a document of gigabytes is read in such pieces
_NUM_THREADS = 4  # hashing releases the interpreter's lock


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A shard that is missing or broken, and how to mend it."""

    shard_id: int
    error: ShardprepError


def verify_dataset(
    folder: Path, plan: Plan, *, fast: bool, progress: Callable[[int], None]
) -> tuple[list[Problem], DatasetIndex | None]:
    """Check every shard of a plan; where all are right, publish index.json and return it.

    The fast tier checks manifests, sizes and coverage; the full one also reads every byte back:
    hashes, sample and token counts, places, every id, the tar's end. Both compare the tokenizer's files.
    ``progress`` is told each shard's tar bytes. Raises NotFound or OtherTokenizer for a changed tokenizer,
    and what publishing raises.
    """
    check_tokenizer_files(folder, plan.tokenizer_files)
    problems: list[Problem] = []
    manifests: list[Manifest] = []
    sizes = plan.shard_bytes()

    def check(shard_id: int) -> Manifest | Problem:
        try:
            manifest = check_shard(folder, shard_id, plan.plan_id)
            _check_coverage(folder, plan, manifest, sizes[shard_id])
            if not fast:
                check_hashes(folder, manifest)
                _check_content(folder, plan, manifest)
        except ShardprepError as error:
            return Problem(shard_id=shard_id, error=error)
        except OSError as error:
            return Problem(shard_id=shard_id, error=ReadWriteError(f"{error.filename}: {error.strerror}"))
        return manifest

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for result in pool.map(check, range(plan.num_shards)):
            if isinstance(result, Problem):
                problems.append(result)
                progress(0)
            else:
                manifests.append(result)
                progress(result.tar.num_bytes)
    if problems:
        return problems, None
    index = merge_manifests(manifests)
    publish_bytes(folder / INDEX_NAME, index.to_json())
    return [], index


def _check_coverage(folder: Path, plan: Plan, manifest: Manifest, planned_bytes: int) -> None:
    """That a shard was made of exactly the bytes that the plan gives it, for this spec."""
    if manifest.spec != plan.spec:
        raise Refused(
            f"the manifest of shard {manifest.shard_id:05d} describes another data set than plan.json; "
            f"run: {remake_command(manifest.shard_id, folder)}"
        )
    if manifest.counts.input_bytes != planned_bytes:
        raise BrokenShard(
            f"shard {manifest.shard_id:05d} was made of {manifest.counts.input_bytes} input bytes, the plan "
            f"gives it {planned_bytes}; run: {remake_command(manifest.shard_id, folder)}"
        )


def _check_content(folder: Path, plan: Plan, manifest: Manifest) -> None:
    """That idx and tar agree with the manifest's counts and the plan's ranges."""
    shard_id, counts = manifest.shard_id, manifest.counts
    entries = read_idx(folder, plan.spec, shard_id)
    found = (len(entries), int(entries["num_tokens"].sum(dtype=np.int64)))
    if found != (counts.num_samples, counts.num_tokens):
        raise BrokenShard(
            f"the idx of shard {shard_id:05d} has {found[0]} samples of {found[1]} tokens, its manifest says "
            f"{counts.num_samples} of {counts.num_tokens}; run: {remake_command(shard_id, folder)}"
        )
    check_places(folder, plan.spec, shard_id, entries)
    check_ids(folder, plan.spec, shard_id, entries)
    with tar_path(folder, shard_id).open("rb") as file:
        file.seek(-len(TAR_END), 2)
        if file.read() != TAR_END:
            raise BrokenShard(
                f"{tar_path(folder, shard_id)} does not end in two zero blocks; run: "
                f"{remake_command(shard_id, folder)}"
            )
    if len(entries):
        (first, start), (last, end) = plan.boundaries[shard_id], plan.boundaries[shard_id + 1]
        places = list(zip(entries["source"].tolist(), entries["source_offset"].tolist(), strict=True))
        in_order = plan.options.pack == "best_fit" or places == sorted(places)
        # A row, or a byte of a compressed file's text, cannot be compared with a boundary.
        before = (first, start if _is_in_bytes(plan, first) else 0)
        behind = (last, end) if not end or _is_in_bytes(plan, last) else (last + 1, 0)
        if not in_order or min(places) < before or max(places) >= behind:
            raise BrokenShard(
                f"the idx of shard {shard_id:05d} names sources outside of its part of the plan; "
                f"run: {remake_command(shard_id, folder)}"
            )


def _is_in_bytes(plan: Plan, input_number: int) -> bool:
    return input_number == len(plan.inputs) or offset_unit(plan.inputs[input_number].path) == "byte"


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


def publish_osts(folder: Path, num_shards: int) -> str | None:
    """Ask lfs where each tar begins and publish osts.json; off Lustre nothing is done.

    Never fails, as nothing depends on the file; the line that it returns says why there is none, or an old
    one is left.
    """
    try:
        osts = lustre.first_osts(folder, [tar_path(folder, number).name for number in range(num_shards)])
        if osts is not None:
            publish_bytes(folder / OSTS_NAME, osts_json(osts))
    except (lustre.LustreError, ShardprepError) as error:
        return f"note: {OSTS_NAME} is not written, shards are opened in an order without OSTs: {error}"
    return None
