"""``verify``: prove a data set whole and write index.json.

The fast tier compares manifests, sizes and coverage. The full one reads every byte back, once: hashes, places
and every token id, at 4 to 20 s of CPU per gigabyte (one core; the most for JSON).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, OtherPlan, ReadWriteError, ShardprepError
from shardprep.files import (
    RETRIED,
    HashedFile,
    errors_named,
    publish_bytes,
    with_retries,
)
from shardprep.format.dataset_spec import BLANK, blank_id
from shardprep.format.done import Finding, refuse_found
from shardprep.format.idx import misplaced_samples, read_idx
from shardprep.format.index import DatasetIndex, merge_manifests
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import Manifest, ValidationCounts, check_hashes, check_shard, check_sizes
from shardprep.format.names import (
    DIGEST_BYTES,
    INDEX_NAME,
    TAR_END,
    remake_command,
    tar_path,
)
from shardprep.format.plan import Plan
from shardprep.format.shards import ids_of
from shardprep.format.tokenizer_files import check_tokenizer_files

Records = npt.NDArray[np.void]
_NUM_THREADS = 4  # hashing releases the interpreter's lock


class _Wrong(Exception):
    """What is wrong with a shard that counts as done, and so must be made anew."""

    def __init__(self, what: str, kind: type[ShardprepError] = BrokenShard) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A shard that is missing or broken, and how to mend it."""

    shard_id: int
    error: ShardprepError


def verify_dataset(
    folder: Path,
    plan: Plan,
    *,
    fast: bool,
    progress: Callable[[int], None],
    standing: Mapping[int, Finding] | None = None,
) -> tuple[list[Problem], DatasetIndex | None]:
    """Check every shard of a plan; where all are right, publish index.json and return it.

    The fast tier checks manifests, sizes and coverage; the full one also reads every byte back:
    hashes, sample and token counts, places, every id, the tar's end. Both compare the tokenizer's files.
    ``standing``: what a more thorough verify found, which this one cannot take back. A shard that cannot be
    read is tried again, and then a problem of ReadWriteError, which says nothing of the shard.
    ``progress`` is told each shard's tar bytes. Raises NotFound or OtherTokenizer for a changed tokenizer,
    and what publishing raises.
    """
    tokenizer = partial(check_tokenizer_files, folder, plan.tokenizer_files)
    with_retries(f"the tokenizer in {folder} cannot be read", tokenizer)
    problems: list[Problem] = []
    manifests: list[Manifest] = []
    sizes = plan.shard_bytes()

    is_away = threading.Event()  # the file system, so that not every shard waits until it is back

    def read(shard_id: int) -> Manifest:
        manifest = check_shard(folder, shard_id, plan.plan_id)
        check_sizes(folder, manifest)
        _check_coverage(plan, manifest, sizes[shard_id])
        if not fast:
            _check_bytes(folder, plan, manifest)
        refuse_found(folder, standing or {}, [shard_id])
        return manifest

    def check(shard_id: int) -> Manifest | Problem:
        try:
            if is_away.is_set():
                return read(shard_id)
            return with_retries(f"shard {shard_id:05d} cannot be read", partial(read, shard_id))
        except _Wrong as wrong:
            text = f"{wrong}; run: {remake_command(shard_id, folder)}"
            return Problem(shard_id=shard_id, error=wrong.kind(text))
        except ShardprepError as error:
            if isinstance(error.__context__, OSError) and error.__context__.errno in RETRIED:
                is_away.set()
            return Problem(shard_id=shard_id, error=error)
        except OSError as error:
            return Problem(shard_id=shard_id, error=ReadWriteError(f"{error.filename}: {error.strerror}"))

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
    index = merge_manifests(folder, manifests)
    publish_bytes(folder / INDEX_NAME, index.to_json())
    return [], index


def _check_coverage(plan: Plan, manifest: Manifest, planned_bytes: int) -> None:
    """That a shard was made of exactly the bytes that the plan gives it, for this spec."""
    name, found = f"shard {manifest.shard_id:05d}", manifest.counts.input_bytes
    if manifest.spec != plan.spec:
        raise _Wrong(f"the manifest of {name} describes another data set than plan.json", OtherPlan)
    if found != planned_bytes:
        raise _Wrong(f"{name} was made of {found} input bytes, the plan gives it {planned_bytes}")
    for what in ("ids", "digests"):
        if (is_there := getattr(manifest, what) is not None) != (what in plan.options.side_files()):
            has = "some" if is_there else "no"
            raise _Wrong(f"the manifest of {name} has {has} {what}, other than the plan")


def _check_bytes(folder: Path, plan: Plan, manifest: Manifest) -> None:
    """Compare every byte of a shard's files with its hash, and what they hold; the tar is read once.

    A wrong hash is told before what follows from it. Raises BrokenShard, MissingShard or ReadWriteError.
    """
    path = tar_path(folder, manifest.shard_id)
    with errors_named(path), HashedFile(path) as tar:
        try:
            records = _check_idx(folder, plan, manifest)
            _check_ids(manifest, tar, records)
        except (ShardprepError, _Wrong):
            check_hashes(folder, manifest, tar_sha256=tar.sha256())
            raise
        check_hashes(folder, manifest, tar_sha256=tar.sha256())


def _check_idx(folder: Path, plan: Plan, manifest: Manifest) -> Records:
    """That an idx agrees with the manifest's counts and the plan's ranges; its records."""
    shard_id, counts = manifest.shard_id, manifest.counts
    entries = read_idx(folder, plan.spec, shard_id)
    found = (len(entries), int(entries["num_tokens"].sum(dtype=np.int64)))
    if found != (counts.num_samples, counts.num_tokens):
        raise _Wrong(
            f"the idx of shard {shard_id:05d} has {found[0]} samples of {found[1]} tokens, its manifest says "
            f"{counts.num_samples} of {counts.num_tokens}"
        )
    _check_places(manifest, entries)
    sides = _check_sides(plan, manifest, entries)
    if len(entries):
        begin, stop = plan.cuts[shard_id], plan.cuts[shard_id + 1]
        (first, start), (last, end) = (begin.input_number, begin.byte), (stop.input_number, stop.byte)
        places = list(zip(entries["source"].tolist(), entries["source_offset"].tolist(), strict=True))
        in_order = plan.options.pack == "best_fit" or all(
            places[side] == sorted(places[side]) for side in sides
        )
        # A row, or a byte of a compressed file's text, cannot be compared with a boundary.
        before = (first, start if _is_in_bytes(plan, first) else 0)
        behind = (last, end) if not end or _is_in_bytes(plan, last) else (last + 1, 0)
        if not in_order or min(places) < before or max(places) >= behind:
            raise _Wrong(f"the idx of shard {shard_id:05d} names sources outside of its part of the plan")
    return entries


def _check_sides(plan: Plan, manifest: Manifest, records: Records) -> tuple[slice, slice]:
    """The rows for training and those for validation, once both, and the digests, are as many as is said."""
    shard_id, counts = manifest.shard_id, manifest.counts
    validation = counts.validation or ValidationCounts(num_samples=0, num_documents=0, num_tokens=0)
    first = counts.num_samples - validation.num_samples
    begin_in = records["num_starts"] if plan.spec.has_rows else np.ones(len(records), np.int64)
    num_begun, held = int(begin_in.sum()), slice(first, None)
    found = (int(begin_in[held].sum()), int(records["num_tokens"][held].sum(dtype=np.int64)))
    num_digests = num_begun if manifest.digests is None else manifest.digests.num_bytes // DIGEST_BYTES
    if found != (validation.num_documents, validation.num_tokens) or num_digests != num_begun:
        raise _Wrong(
            f"the idx of shard {shard_id:05d} has {found[0]} documents of {found[1]} tokens for validation, "
            f"and {num_begun} documents in all; its manifest says {validation.num_documents} of "
            f"{validation.num_tokens}, and {num_digests} digests"
        )
    return slice(0, first), held


def _is_in_bytes(plan: Plan, input_number: int) -> bool:
    return input_number == len(plan.inputs) or input_kind(plan.inputs[input_number].path).is_in_bytes


def _check_places(manifest: Manifest, records: Records) -> None:
    """That ids, starts and masks lie within the tar, with the bytes that they must have."""
    shard_id, tar_bytes = manifest.shard_id, manifest.tar.num_bytes
    wrong = misplaced_samples(manifest.spec, records, tar_bytes)
    if wrong.any():
        raise _Wrong(
            f"the idx of shard {shard_id:05d} places sample {int(wrong.argmax())} where it cannot be in a "
            f"tar of {tar_bytes} bytes"
        )


def _check_ids(manifest: Manifest, tar: HashedFile, records: Records) -> None:
    """Check that every id is in the vocabulary or blank, each JSON list has its tokens, the tar its end.

    Places were checked. A million tokens take 126 ms of CPU as JSON, 8 ms packed (one core). Raises _Wrong,
    BrokenShard or ReadWriteError.
    """
    # In the tar they stand as in the idx, but for samples for validation.
    spec = manifest.spec
    records = records[np.argsort(records["offset"], kind="stable")]
    try:
        for ids in ids_of(spec, records, tar.read):
            if manifest.made_from is not None:
                ids = ids[(ids != BLANK) & (ids != blank_id(spec.tokenizer.vocab_size))]
            if len(ids) and int(ids.max()) >= spec.tokenizer.vocab_size:
                raise _Wrong(
                    f"{tar.path} holds the token id {int(ids.max())}, the vocabulary has "
                    f"{spec.tokenizer.vocab_size}"
                )
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"{tar.path} holds token ids that cannot be read ({error})") from None
    if tar.read(tar.num_bytes - len(TAR_END), len(TAR_END)) != TAR_END:
        raise _Wrong(f"{tar.path} does not end in two zero blocks")
