"""``verify``: prove a data set whole and write index.json; on Lustre osts.json; with ``--crcs`` crcs/.

The fast tier compares manifests, sizes and coverage. The full one reads every byte back, once: hashes, places
and every token id. ``--crcs`` takes the crc32 of each sample's bytes in the same read, for the loader's
``read_check="crc"``, at 0.5 to 2 s of CPU per gigabyte (one core; the rest takes 4 to 20, the most for JSON).
osts.json is a hint: readers take an order of opening from it that spreads them over the servers.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import lustre
from preprocess.plan.plan_file import Plan
from preprocess.plan.tokenizer_files import check_tokenizer_files
from shardprep.errors import BrokenShard, OtherPlan, ReadWriteError, ShardprepError
from shardprep.files import (
    NOT_THERE,
    RETRIED,
    STALE_AFTER_S,
    HashedFile,
    errors_named,
    make_subfolder,
    publish_bytes,
    read_regular,
    remove_temporaries,
    with_retries,
)
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.digests import DIGEST_BYTES
from shardprep.format.done import Finding, refuse_found
from shardprep.format.idx import ChunkCrcs, crcs_dtype, crcs_header, misplaced_samples, read_idx
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import (
    DatasetIndex,
    Manifest,
    ValidationCounts,
    check_hashes,
    check_shard,
    check_sizes,
    merge_manifests,
    osts_json,
)
from shardprep.format.names import (
    CRCS_DIR,
    INDEX_NAME,
    OSTS_NAME,
    TAR_END,
    crcs_path,
    remake_command,
    shard_name,
    tar_path,
)
from shardprep.format.shards import RawIds, ids_of, raw_ids
from shardprep.format.withdrawals import read_left_out, read_withdrawals

Records = npt.NDArray[np.void]
_NUM_THREADS = 4  # hashing releases the interpreter's lock


def _publish_crcs(folder: Path, manifest: Manifest, crcs: Records) -> None:
    """Write crcs/shard-N.crc of a proved shard unless it is there and right.

    Raises CannotWrite, ReadWriteError or BrokenShard.
    """
    shard_id, chunks = manifest.shard_id, ChunkCrcs(crcs.dtype)
    chunks.add(crcs.tobytes())
    head = crcs_header(manifest.spec, shard_id, manifest.tar.sha256)
    content = head + crcs.tobytes() + chunks.table()
    path = crcs_path(folder, shard_id)
    with contextlib.suppress(*NOT_THERE, BrokenShard):
        if read_regular(path, max_bytes=len(content)) == content:
            return
    make_subfolder(folder, CRCS_DIR)
    remove_temporaries(path.parent, shard_name(shard_id), older_than_s=STALE_AFTER_S)
    publish_bytes(path, content)


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
    crcs: bool = False,
    standing: Mapping[int, Finding] | None = None,
) -> tuple[list[Problem], DatasetIndex | None]:
    """Check every shard of a plan; where all are right, publish index.json and return it.

    The fast tier checks manifests, sizes and coverage; the full one also reads every byte back:
    hashes, sample and token counts, places, every id, the tar's end. Both compare the tokenizer's files.
    ``standing``: what a more thorough verify found, which this one cannot take back. A shard that cannot be
    read is tried again, and then a problem of ReadWriteError, which says nothing of the shard.
    ``crcs``: the full one also writes the crc32s that the loader's ``read_check`` compares.
    ``progress`` is told each shard's tar bytes. Raises NotFound or OtherTokenizer for a changed tokenizer,
    BrokenShard for lists of withdrawn documents that are not as they were, and what publishing raises.
    """
    tokenizer = partial(check_tokenizer_files, folder, plan.tokenizer_files)
    with_retries(f"the tokenizer in {folder} cannot be read", tokenizer)
    read_withdrawals(folder, plan.plan_id)
    read_left_out(folder, plan.options.rewritten)
    problems: list[Problem] = []
    manifests: list[Manifest] = []
    sizes = plan.shard_bytes()

    is_away = threading.Event()  # the file system, so that not every shard waits until it is back

    def read(shard_id: int) -> Manifest:
        manifest = check_shard(folder, shard_id, plan.plan_id)
        check_sizes(folder, manifest)
        _check_coverage(plan, manifest, sizes[shard_id])
        if not fast:
            _check_bytes(folder, plan, manifest, crcs=crcs)
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
    index = merge_manifests(manifests)
    publish_bytes(folder / INDEX_NAME, index.to_json())
    return [], index


def _check_coverage(plan: Plan, manifest: Manifest, planned_bytes: int) -> None:
    """That a shard was made of exactly the bytes that the plan gives it, for this spec."""
    name, found = f"shard {manifest.shard_id:05d}", manifest.counts.input_bytes
    if manifest.spec != plan.spec:
        raise _Wrong(f"the manifest of {name} describes another data set than plan.json", OtherPlan)
    if found != planned_bytes:
        raise _Wrong(f"{name} was made of {found} input bytes, the plan gives it {planned_bytes}")
    for what in ("ids", "digests", "fields"):
        if (is_there := getattr(manifest, what) is not None) != (what in plan.options.side_files()):
            has = "some" if is_there else "no"
            raise _Wrong(f"the manifest of {name} has {has} {what}, other than the plan")


def _check_bytes(folder: Path, plan: Plan, manifest: Manifest, *, crcs: bool) -> None:
    """Compare every byte of a shard's files with its hash, and what they hold; the tar is read once.

    A wrong hash is told before what follows from it. Raises BrokenShard, MissingShard or ReadWriteError.
    """
    path = tar_path(folder, manifest.shard_id)
    with errors_named(path), HashedFile(path) as tar:
        try:
            records = _check_idx(folder, plan, manifest)
            found = _check_ids(manifest.spec, tar, records, crcs=crcs)
        except (ShardprepError, _Wrong):
            check_hashes(folder, manifest, tar_sha256=tar.sha256())
            raise
        check_hashes(folder, manifest, tar_sha256=tar.sha256())
    if crcs:
        _publish_crcs(folder, manifest, found)


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
        (first, start), (last, end) = plan.boundaries[shard_id], plan.boundaries[shard_id + 1]
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


def _check_ids(spec: DatasetSpec, tar: HashedFile, records: Records, *, crcs: bool) -> Records:
    """That every id is one of the vocabulary, each JSON list has its tokens, and the tar has its end.

    Places were checked. Returns the crc32s of all samples; with ``crcs`` alone they are filled in. A million
    tokens take 126 ms of CPU as JSON, 8 ms packed (one core). Raises _Wrong, BrokenShard or ReadWriteError.
    """
    in_tar = np.argsort(records["offset"], kind="stable")  # as the idx, but for samples for validation
    records = records[in_tar]
    found = np.zeros(len(records), crcs_dtype(spec.kind))
    raws = _read_forward(tar, records, spec.seq_len, found if crcs else None)
    try:
        for ids in ids_of(spec, records, raws):
            if len(ids) and int(ids.max()) >= spec.tokenizer.vocab_size:
                raise _Wrong(
                    f"{tar.path} holds the token id {int(ids.max())}, the vocabulary has "
                    f"{spec.tokenizer.vocab_size}"
                )
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"{tar.path} holds token ids that cannot be read ({error})") from None
    if tar.read(tar.num_bytes - len(TAR_END), len(TAR_END)) != TAR_END:
        raise _Wrong(f"{tar.path} does not end in two zero blocks")
    return found[np.argsort(in_tar)]


def _read_forward(tar: HashedFile, records: Records, seq_len: int, crcs: Records | None) -> Iterator[RawIds]:
    """The bytes of all ids in their order, and of each sample the crc32s that ``crcs`` has.

    Document starts and loss masks stand before the ids of their member, so they are read first, and the tar
    forgets what no later sample needs.
    """
    places = [
        name for name in ("offset", "starts_offset", "mask_offset") if name in (records.dtype.names or ())
    ]
    first_needed = np.minimum.reduce([records[name] for name in places]).astype(np.int64)
    first_needed = np.minimum.accumulate(first_needed[::-1])[::-1]
    others = [name for name in ("starts", "mask") if crcs is not None and name in (crcs.dtype.names or ())]
    for raw in raw_ids(records, tar.read):
        if crcs is not None:
            group, data = records[raw.rows], memoryview(raw.data)
            begins = group["offset"].astype(np.int64) - raw.begin
            spans = list(zip(begins.tolist(), (begins + group["num_bytes"]).tolist(), strict=True))
            is_begin = spans[0][0] == 0
            for column in others if is_begin else ():
                sizes = 4 * group["num_starts"] if column == "starts" else np.full(len(group), seq_len)
                parts = zip(group[f"{column}_offset"].tolist(), sizes.tolist(), strict=True)
                crcs[column][raw.rows] = [zlib.crc32(tar.read(*part)) for part in parts]
            before = 0 if is_begin else int(crcs["ids"][raw.rows.start])
            crcs["ids"][raw.rows] = [zlib.crc32(data[max(begin, 0) : end], before) for begin, end in spans]
        yield raw
        is_end = raw.is_last and raw.rows.stop < len(records)
        tar.forget(int(first_needed[raw.rows.stop]) if is_end else raw.begin)


def publish_osts(folder: Path, tar_bytes: Sequence[int]) -> list[str]:
    """Ask lfs where the tars lie and publish osts.json; off Lustre nothing is done.

    Returns lines to print: the layouts that the tars (of these sizes) really have, and how evenly they lie on
    the OSTs. Never fails, as nothing depends on the file; a line says why there is none, or an old one stays.
    """
    names = [tar_path(folder, number).name for number in range(len(tar_bytes))]
    try:
        balance = lustre.read_balance(folder, dict(zip(names, tar_bytes, strict=True)))
        if balance is None:
            return []
        publish_bytes(folder / OSTS_NAME, osts_json(balance.first_osts))
        return balance.lines()
    except (lustre.LustreError, ShardprepError, OSError) as error:
        return [f"note: {OSTS_NAME} is not written, shards are opened in an order without OSTs: {error}"]
