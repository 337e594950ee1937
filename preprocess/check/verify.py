"""``verify``: compare every shard with its manifest, write index.json and, with ``--crcs``, crcs/.

``verify --crcs``: the crc32 of each sample's bytes, for the loader's ``read_check="crc"``.

They are taken from a tar whose sha256 was found to be right a moment ago. A shard is read once more for it,
from the page cache where it fits in, at 0.5 to 2 s of CPU per gigabyte (one core; the rest of verify takes 4
to 20, the most for JSON). A file has 4 bytes per sample, 8 per row.

Proves a data set whole and writes its index.json; on Lustre osts.json, too.

The fast tier compares manifests, sizes and coverage. The full one reads every byte back: hashes, places and
every token id. A million tokens take 126 ms of CPU as JSON and 8 ms packed (one core). osts.json is a hint:
readers take an order of opening from it that spreads them over the servers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import lustre
from preprocess.check.shard_samples import ids_of, read_at
from preprocess.plan.plan_file import Plan
from preprocess.plan.tokenizer_files import check_tokenizer_files
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, ShardprepError
from shardprep.files import (
    NOT_THERE,
    STALE_AFTER_S,
    close_read,
    errors_named,
    open_regular,
    publish_bytes,
    read_regular,
    remove_temporaries,
)
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import ChunkCrcs, crcs_dtype, crcs_header, read_idx
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import (
    DatasetIndex,
    Manifest,
    check_hashes,
    check_shard,
    merge_manifests,
    osts_json,
)
from shardprep.format.names import (
    INDEX_NAME,
    OSTS_NAME,
    TAR_END,
    crcs_path,
    remake_command,
    shard_name,
    tar_path,
)

# Read at once: ids follow each other; what a member has besides stands before half a megabyte of ids.
_PIECE_BYTES = {"ids": 4 << 20, "starts": 16 << 10, "mask": 256 << 10}
Span = tuple[int, int]  # byte of the tar, and number of bytes


def publish_crcs(folder: Path, manifest: Manifest, records: npt.NDArray[np.void]) -> None:
    """Write crcs/shard-N.crc of a proved shard, whose idx has ``records``, unless it is there and right.

    Raises CannotWrite, ReadWriteError or BrokenShard.
    """
    shard_id = manifest.shard_id
    dtype = crcs_dtype(manifest.spec.kind)
    crcs = _crcs_of_samples(tar_path(folder, shard_id), manifest.spec.seq_len, dtype, records).tobytes()
    chunks = ChunkCrcs(dtype)
    chunks.add(crcs)
    content = crcs_header(manifest.spec, shard_id, manifest.tar.sha256) + crcs + chunks.table()
    path = crcs_path(folder, shard_id)
    if _content_of(path, len(content)) == content:
        return
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
    remove_temporaries(path.parent, shard_name(shard_id), older_than_s=STALE_AFTER_S)
    publish_bytes(path, content)


def _content_of(path: Path, num_bytes: int) -> bytes:
    """Of the file as it is; nothing where there is none of that size."""
    try:
        return read_regular(path, max_bytes=num_bytes)
    except (*NOT_THERE, BrokenShard):
        return b""


def _crcs_of_samples(
    path: Path, seq_len: int, dtype: np.dtype[Any], records: npt.NDArray[np.void]
) -> npt.NDArray[np.void]:
    """Of each record of an idx: an array of ``dtype``, see ``crcs_dtype``."""
    crcs = np.empty(len(records), dtype)
    with errors_named(path):
        handle = open_regular(path)
        try:
            for column in dtype.names or ():
                tar = _Pieces(path, handle, _PIECE_BYTES[column])
                crcs[column] = [tar.crc(*span) for span in _spans(column, seq_len, records)]
        finally:
            close_read(handle)
    return crcs


def _spans(column: str, seq_len: int, records: npt.NDArray[np.void]) -> list[Span]:
    """The bytes that a column has the crc32s of."""
    if column == "ids":
        offsets, sizes = records["offset"], records["num_bytes"]
    elif column == "starts":
        offsets, sizes = records["starts_offset"], 4 * records["num_starts"].astype(np.int64)
    else:
        offsets, sizes = records["mask_offset"], np.full(len(records), seq_len)  # a byte per token
    return list(zip(offsets.tolist(), sizes.tolist(), strict=True))


class _Pieces:
    """A tar, of which a piece is held, so that samples which follow each other share a read."""

    def __init__(self, path: Path, handle: int, piece_bytes: int) -> None:
        self._path = path
        self._handle = handle
        self._piece_bytes = piece_bytes
        self._first = 0  # byte of the tar where the piece begins
        self._piece = memoryview(b"")

    def crc(self, offset: int, num_bytes: int) -> int:
        """crc32 of some bytes of the tar. Raises BrokenShard where it ends before them; OSError."""
        crc = 0
        while num_bytes:
            part = self._part(offset, num_bytes)
            crc = zlib.crc32(part, crc)
            offset, num_bytes = offset + len(part), num_bytes - len(part)
        return crc

    def _part(self, offset: int, num_bytes: int) -> memoryview:
        """The first of some bytes, or all."""
        if not self._first <= offset < self._first + len(self._piece):
            self._first, self._piece = offset, memoryview(os.pread(self._handle, self._piece_bytes, offset))
            if not self._piece:
                raise BrokenShard(f"{self._path} ended at byte {offset} while it was read; was it replaced?")
        begin = offset - self._first
        return self._piece[begin : begin + num_bytes]


_NUM_THREADS = 4  # hashing releases the interpreter's lock


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A shard that is missing or broken, and how to mend it."""

    shard_id: int
    error: ShardprepError


def verify_dataset(
    folder: Path, plan: Plan, *, fast: bool, progress: Callable[[int], None], crcs: bool = False
) -> tuple[list[Problem], DatasetIndex | None]:
    """Check every shard of a plan; where all are right, publish index.json and return it.

    The fast tier checks manifests, sizes and coverage; the full one also reads every byte back:
    hashes, sample and token counts, places, every id, the tar's end. Both compare the tokenizer's files.
    ``crcs``: the full one also writes the crc32s that the loader's ``read_check`` compares.
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
                records = _check_content(folder, plan, manifest)
                if crcs:
                    publish_crcs(folder, manifest, records)
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


def _check_content(folder: Path, plan: Plan, manifest: Manifest) -> npt.NDArray[np.void]:
    """That idx and tar agree with the manifest's counts and the plan's ranges; the idx's records."""
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
    return entries


def _is_in_bytes(plan: Plan, input_number: int) -> bool:
    return input_number == len(plan.inputs) or input_kind(plan.inputs[input_number].path).is_in_bytes


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
        if spec.kind == "chat":
            wrong |= records["mask_offset"] > tar_bytes - spec.seq_len
    if wrong.any():
        raise BrokenShard(
            f"the idx of shard {shard_id:05d} places sample {int(wrong.argmax())} where it cannot be in a "
            f"tar of {tar_bytes} bytes; run: {remake_command(shard_id, folder)}"
        )


def check_ids(folder: Path, spec: DatasetSpec, shard_id: int, records: npt.NDArray[np.void]) -> None:
    """That every id is one of the vocabulary, and each JSON list has its tokens; places were checked.

    The tar is open here, so this looks at its end, too.

    A million tokens take 126 ms of CPU as JSON, 8 ms packed (one core). Raises BrokenShard or
    ReadWriteError.
    """
    path = tar_path(folder, shard_id)
    with errors_named(path):
        handle = open_regular(path)
        try:
            if read_at(handle, os.fstat(handle).st_size - len(TAR_END), len(TAR_END)) != TAR_END:
                raise BrokenShard(
                    f"{path} does not end in two zero blocks; run: {remake_command(shard_id, folder)}"
                )
            for ids in ids_of(handle, spec, records):
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


def publish_osts(folder: Path, tar_bytes: Sequence[int]) -> list[str]:
    """Ask lfs where the tars lie and publish osts.json; off Lustre nothing is done.

    Returns lines to print: the layouts that the tars (of these sizes) really have, and how evenly they lie on
    the OSTs. Never fails, as nothing depends on the file; a line says why there is none, or an old one stays.
    """
    names = [tar_path(folder, number).name for number in range(len(tar_bytes))]
    try:
        layouts = lustre.read_file_layouts(folder, names)
        if layouts is None:
            return []
        publish_bytes(folder / OSTS_NAME, osts_json([lustre.first_ost(layout) for layout in layouts]))
        return lustre.balance_of(folder, layouts, tar_bytes).lines()
    except (lustre.LustreError, ShardprepError, OSError) as error:
        return [f"note: {OSTS_NAME} is not written, shards are opened in an order without OSTs: {error}"]
