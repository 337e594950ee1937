"""Proves a data set whole and writes its index.json."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from preprocess.ids_read_back import check_ids, check_places
from preprocess.shard_format import (
    INDEX_NAME,
    TAR_END,
    BrokenShard,
    DatasetIndex,
    Manifest,
    ReadWriteError,
    Refused,
    ShardprepError,
    check_hashes,
    check_shard,
    merge_manifests,
    read_idx,
    remake_command,
    tar_path,
)
from preprocess.shard_format.published_file import publish_bytes
from preprocess.shard_plan import Plan
from preprocess.tokenizer_files import check_tokenizer_files

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
        (first, start), (last, end) = plan.cuts[shard_id], plan.cuts[shard_id + 1]
        places = list(zip(entries["source"].tolist(), entries["source_offset"].tolist(), strict=True))
        in_order = plan.options["pack"] == "best_fit" or places == sorted(places)
        if not in_order or min(places) < (first, start) or max(places) >= (last, end):
            raise BrokenShard(
                f"the idx of shard {shard_id:05d} names sources outside of its part of the plan; "
                f"run: {remake_command(shard_id, folder)}"
            )
