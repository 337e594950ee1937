"""Check the shards of a data set against their manifests and the plan.

A fast check compares manifests, sizes and coverage. A full check also reads every byte, once, to check
hashes, places and all token ids: 4 to 20 s of CPU per gigabyte (one core; most for JSON).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from shardprep import errors, files
from shardprep.console import with_progress
from shardprep.format import commands, done, manifest, names
from shardprep.format.blanked import read_blanked
from shardprep.format.data_folder import DataFolder
from shardprep.format.done import Finding
from shardprep.format.idx import misplaced_samples, read_idx
from shardprep.format.inputs import input_kind
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan
from shardprep.format.shard_samples import ids_of
from shardprep.format.spec import BLANK, blank_id

IdxRecords = npt.NDArray[np.void]
Problems = dict[int, errors.ShardprepError]  # by shard
_NUM_THREADS = 4  # hashing releases the interpreter's lock


def check_shards(
    folder: DataFolder, plan: Plan, *, is_fast: bool, standing: Mapping[int, Finding]
) -> tuple[list[Manifest], Problems]:
    """Return the manifests of the shards that are right, and the problems of the others.

    ``standing`` are findings of a more thorough verify, which this one cannot clear. A shard that cannot be
    read is tried again. Then its problem is a ReadWriteError, which says nothing about the shard.
    """
    check = _ShardCheck(folder, plan, is_fast=is_fast, standing=standing)
    ids = range(plan.num_shards)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        results = dict(zip(with_progress("verifying", ids), pool.map(check.result, ids), strict=True))
    problems = {number: result for number, result in results.items() if not isinstance(result, Manifest)}
    return [result for result in results.values() if isinstance(result, Manifest)], problems


class _ShardCheck:
    """Checks one shard after the other. Threads share it."""

    def __init__(
        self, folder: DataFolder, plan: Plan, *, is_fast: bool, standing: Mapping[int, Finding]
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._is_fast = is_fast
        self._standing = standing
        self._input_bytes = plan.shard_bytes()
        self._blanked = frozenset(names.ids_of_ranges(plan.options.blanked) if plan.options.blanked else ())
        # Set once the file system failed: later shards do not wait for it.
        self._is_failing = threading.Event()

    def result(self, shard_id: int) -> Manifest | errors.ShardprepError:
        """Return the manifest of a shard that is right, else its problem."""
        try:
            if self._is_failing.is_set():
                return self._checked(shard_id)
            what = f"shard {shard_id:05d} cannot be read"
            return files.with_retries(what, partial(self._checked, shard_id))
        except errors.ShardprepError as error:
            if isinstance(error, (errors.BrokenShard, errors.OtherPlan)) and error.remedy is None:
                error.remedy = commands.shard_again(shard_id, self._folder)
            if isinstance(error.__context__, OSError) and error.__context__.errno in files.RETRIED:
                self._is_failing.set()
            return error
        except OSError as error:
            return errors.ReadWriteError(f"{error.filename}: {error.strerror}")

    def _checked(self, shard_id: int) -> Manifest:
        """Return the manifest of a shard that is right. Raises ShardprepError or OSError."""
        shard = manifest.check_shard(self._folder, shard_id, self._plan.plan_id)
        manifest.check_sizes(self._folder, shard)
        self._check_is_planned(shard)
        _check_blanked(self._folder, self._plan, shard, is_planned=shard_id in self._blanked)
        if not self._is_fast:
            self._check_content(shard)
        done.refuse_found(self._folder, self._standing, [shard_id])
        return shard

    def _check_is_planned(self, shard: Manifest) -> None:
        """Check that a shard was made for this spec, from exactly the bytes that the plan assigns to it."""
        name = f"shard {shard.shard_id:05d}"
        num_bytes = shard.counts.input_bytes
        planned_bytes = self._input_bytes[shard.shard_id]
        if shard.spec != self._plan.spec:
            raise errors.OtherPlan(f"the manifest of {name} describes another data set than plan.json")
        if num_bytes != planned_bytes:
            what = f"was made from {num_bytes} input bytes, but the plan has {planned_bytes}"
            raise errors.BrokenShard(f"{name} {what}")
        for what in ("ids", "digests"):
            is_there = getattr(shard, what) is not None
            if is_there != (what in self._plan.options.side_files()):
                has = "has" if is_there else "has no"
                raise errors.BrokenShard(f"the manifest of {name} {has} {what}, unlike the plan")

    def _check_content(self, shard: Manifest) -> None:
        """Read every byte of the tar once, and check the idx, the token ids and the hashes."""
        tar_name = names.tar_name(shard.shard_id)
        path = self._folder.path_of(tar_name)
        with files.errors_named(path), self._folder.open_hashed(tar_name) as tar:
            try:
                _check_ids(shard, tar, _check_idx(self._folder, self._plan, shard))
            finally:  # a wrong hash is reported instead of what follows from it
                manifest.check_hashes(self._folder, shard, tar.sha256())


def _check_blanked(folder: DataFolder, plan: Plan, shard: Manifest, *, is_planned: bool) -> None:
    """Check that a shard is the blanked one if the plan says so, and that its list is this data set's.

    A blanked data set and the one that it was made from have the same id.
    """
    name = f"shard {shard.shard_id:05d}"
    if is_planned != (shard.unblanked_sha256 is not None):
        what = "is not blanked, but the plan says so" if is_planned else "is blanked, unlike the plan"
        remedy = commands.shard_again(shard.shard_id, folder)
        raise errors.BrokenShard(f"{name} {what}", remedy=remedy)
    if is_planned:
        listed = read_blanked(folder, plan, shard.shard_id)
        if listed.unblanked_sha256 != shard.unblanked_sha256:
            path = folder.path_of(names.blanked_name(shard.shard_id))
            found = f"unblanked_sha256 {listed.unblanked_sha256[:12]}"
            raise errors.BrokenShard(path=path, found=found, expected=f"{shard.unblanked_sha256}"[:12])
        if shard.blanked_sha256 not in (None, listed.sha256()):
            remedy = commands.shard_again(shard.shard_id, folder)
            raise errors.BrokenShard(f"{name} has other documents blanked than its list names", remedy=remedy)


def _check_idx(folder: DataFolder, plan: Plan, shard: Manifest) -> IdxRecords:
    """Check that an idx agrees with the manifest, the plan and the tar's size. Return its records."""
    name = f"the idx of shard {shard.shard_id:05d}"
    records = read_idx(folder, plan.spec, shard.shard_id)
    # Ids, starts and masks must be inside the tar and have the right size.
    misplaced = misplaced_samples(shard.spec, records, shard.tar.num_bytes)
    if misplaced.any():
        where = f"where it cannot be in a tar of {shard.tar.num_bytes} bytes"
        raise errors.BrokenShard(f"{name} places sample {int(misplaced.argmax())} {where}")
    _check_counts(plan, shard, records)
    if len(records) and not _is_in_plan(plan, shard, records):
        raise errors.BrokenShard(f"{name} names sources outside of its part of the plan")
    return records


def _num_train(shard: Manifest) -> int:
    """Return the number of samples before those for validation, which come last in an idx."""
    return shard.counts.num_samples - shard.counts.held_out.num_samples


def _check_counts(plan: Plan, shard: Manifest, records: IdxRecords) -> None:
    """Check that an idx has as many samples, tokens and documents as the manifest says."""
    counts = shard.counts
    validation = counts.held_out
    num_train = _num_train(shard)
    # num_tokens, begin_in: int64[samples], its tokens, and the documents that begin in it
    num_tokens = records["num_tokens"].astype(np.int64)
    begin_in = records["num_starts"] if plan.spec.has_rows else np.ones(len(records), np.int64)
    num_begun = int(begin_in.sum())
    num_digests = num_begun if shard.digests is None else shard.digests.num_bytes // names.DIGEST_BYTES
    for what, number, expected in (
        ("samples", len(records), counts.num_samples),
        ("tokens", int(num_tokens.sum()), counts.num_tokens),
        ("documents for validation", int(begin_in[num_train:].sum()), validation.num_documents),
        ("tokens for validation", int(num_tokens[num_train:].sum()), validation.num_tokens),
        ("documents with digests", num_begun, num_digests),
    ):
        if number != expected:
            found = f"the idx of shard {shard.shard_id:05d} has {number} {what}"
            raise errors.BrokenShard(f"{found}, its manifest says {expected}")


def _is_in_plan(plan: Plan, shard: Manifest, records: IdxRecords) -> bool:
    """Return whether samples begin in the shard's part of the plan, in the order of the inputs."""
    begin = plan.cuts[shard.shard_id]
    end = plan.cuts[shard.shard_id + 1]
    num_train = _num_train(shard)
    places = [*zip(records["input_number"].tolist(), records["input_offset"].tolist(), strict=True)]
    if plan.options.pack != "best_fit":
        for side in (places[:num_train], places[num_train:]):
            if side != sorted(side):
                return False
    # Rows, and bytes of decompressed text, cannot be compared with the file's bytes in the plan.
    first = (begin.input_number, begin.byte)
    stop = (end.input_number, end.byte)
    if begin.byte and not input_kind(plan.inputs[begin.input_number].path).is_in_bytes:
        first = (begin.input_number, 0)
    if end.byte and not input_kind(plan.inputs[end.input_number].path).is_in_bytes:
        stop = (end.input_number + 1, 0)
    return min(places) >= first and max(places) < stop


def _check_ids(shard: Manifest, tar: files.HashedFile, records: IdxRecords) -> None:
    """Check that ids are in the vocabulary or blank, JSON lists have their lengths, and the tar its end.

    A million tokens take 126 ms of CPU as JSON, 8 ms packed (one core).
    """
    # The tar has the order of the idx, except for samples for validation.
    spec = shard.spec
    vocab_size = shard.spec.tokenizer.vocab_size
    records = records[np.argsort(records["offset"], kind="stable")]
    try:
        for ids in ids_of(spec, records, tar.read):
            if shard.unblanked_sha256 is not None:
                ids = ids[(ids != BLANK) & (ids != blank_id(vocab_size))]
            if len(ids) and ids.max() >= vocab_size:
                found = f"{tar.path} contains the token id {ids.max()}"
                raise errors.BrokenShard(f"{found}, the vocabulary has {vocab_size}")
    except (ValueError, OverflowError) as error:
        raise errors.BrokenShard(f"{tar.path} contains token ids that cannot be read ({error})") from None
    if tar.read(tar.num_bytes - len(names.TAR_END), len(names.TAR_END)) != names.TAR_END:
        raise errors.BrokenShard(f"{tar.path} does not end in two zero blocks")
