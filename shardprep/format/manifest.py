"""shard-N.json: what one shard holds and of which data set it is. A shard with a right one is done."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.errors import BrokenShard, MissingShard, OtherPlan
from shardprep.format.checked_json import Fields, read_checked, with_content_hash
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import MAX_SAMPLES, idx_num_bytes
from shardprep.format.names import (
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    ids_path,
    idx_path,
    manifest_path,
    quarantine_path,
    remake_command,
    rerun_command,
    tar_path,
)
from shardprep.format.source_counts import SourceCounts, sources_of
from shardprep.regular_files import NOT_THERE, FileStamp, names_in, size_of_file, stamp_file

# What the first manifests of this version say of their run, which has no hash there. Nothing is added.
_RUN_WITHOUT_HASH = frozenset(
    {
        *("engine", "shardprep", "python", "host", "slurm"),
        *("num_cpus", "began", "wall_s", "cpu_s", "max_rss_bytes"),
    }
)
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What a shard holds. Equal for equal inputs and options, whatever made it."""

    num_samples: int  # documents, or packed rows
    num_documents: int
    num_tokens: int  # padding excluded
    num_lines: int  # lines or rows of the input, the empty ones included
    num_empty_lines: int  # left out because nothing is left of them after str.strip
    num_filtered: int  # documents left out by --min_chars and --max_chars
    num_pad_tokens: int  # in the rows that are not full
    num_documents_across_rows: int  # those that do not lie whole in one row
    input_bytes: int
    quarantined: dict[str, int]  # documents left out, by reason
    length_histogram: list[int]  # [b]: documents of 2**(b-1) <= tokens < 2**b
    sources: dict[str, SourceCounts]  # in the order of their names

    @staticmethod
    def from_json(fields: Fields) -> ShardCounts:
        """Raises BrokenShard."""
        counts = ShardCounts(
            num_samples=fields.whole("num_samples", 0, MAX_SAMPLES),
            num_documents=fields.whole("num_documents"),
            num_tokens=fields.whole("num_tokens"),
            num_lines=fields.whole("num_lines"),
            num_empty_lines=fields.whole("num_empty_lines"),
            num_filtered=fields.whole("num_filtered"),
            num_pad_tokens=fields.whole("num_pad_tokens"),
            num_documents_across_rows=fields.whole("num_documents_across_rows"),
            input_bytes=fields.whole("input_bytes"),
            quarantined=fields.each("quarantined", Fields.whole),
            length_histogram=fields.wholes("length_histogram"),
            sources=sources_of(fields),
        )
        fields.end()
        return counts


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """shard-N.json: written last, so that its presence says the shard is done."""

    spec: DatasetSpec
    shard_id: int
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: dict[str, Any]  # what may vary between equal shards: engine, versions, host, times

    def to_json(self) -> bytes:
        """The bytes on disk; the part before ``run`` is equal for equal shards, and each has its hash."""
        content = dataclasses.asdict(self) | {"spec": self.spec.to_json()}
        data = with_content_hash("shardprep-manifest", content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(fields: Fields) -> Manifest:
        """Raises BrokenShard, also where counts and sizes do not agree."""
        manifest = Manifest(
            spec=DatasetSpec.from_json(fields.fields("spec")),
            shard_id=fields.whole("shard_id", 0, MAX_SHARDS - 1),
            counts=ShardCounts.from_json(fields.fields("counts")),
            tar=fields.stamp("tar"),
            idx=fields.stamp("idx"),
            quarantine=fields.or_none("quarantine", fields.stamp),
            ids=fields.or_none("ids", fields.stamp),
            run=fields.run(_RUN_WITHOUT_HASH),
        )
        fields.end()
        expected = idx_num_bytes(manifest.spec.kind, manifest.counts.num_samples)
        if manifest.idx.num_bytes != expected:
            what = f"{expected} for {manifest.counts.num_samples} samples"
            raise fields.wrong("idx.num_bytes", manifest.idx.num_bytes, what)
        return manifest


def read_manifest(folder: Path, shard_id: int) -> Manifest:
    """Read shard-N.json. Raises MissingShard, BrokenShard, UnknownVersion or ReadWriteError."""
    path = manifest_path(folder, shard_id)
    try:
        return Manifest.from_json(read_checked(path, "shardprep-manifest", max_bytes=MAX_MANIFEST_BYTES))
    except NOT_THERE:
        raise MissingShard(
            f"shard {shard_id:05d} is not done: {path} is missing; run: {rerun_command(shard_id, folder)}"
        ) from None
    except BrokenShard as error:
        raise BrokenShard(f"{error}; run: {rerun_command(shard_id, folder)}") from None


def manifest_ids(folder: Path) -> list[int]:
    """The shards that have a manifest in a folder, ascending. Raises ReadWriteError."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, names_in(folder)) if match]


def check_shard(folder: Path, shard_id: int, plan_id: str) -> Manifest:
    """Whether a shard is done: a manifest of this plan, and its files there with their sizes.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do; ReadWriteError.
    """
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        raise OtherPlan(
            f"{manifest_path(folder, shard_id)} is shard {manifest.shard_id} of plan "
            f"{manifest.spec.plan_id[:12]}, expected shard {shard_id} of {plan_id[:12]}; "
            "use a new folder for other inputs or options. If it is this file that is out of place, "
            f"run: {remake_command(shard_id, folder)}"
        )
    for path, stamp in shard_files(folder, manifest):
        found = size_of_file(path)
        if found is None:
            raise MissingShard(f"{path} is missing; run: {rerun_command(shard_id, folder)}")
        if found != stamp.num_bytes:
            raise BrokenShard(
                f"{path} has {found} of {stamp.num_bytes} bytes; run: {rerun_command(shard_id, folder)}"
            )
    return manifest


def shard_files(folder: Path, manifest: Manifest) -> list[tuple[Path, FileStamp]]:
    """The files a manifest vouches for, with what it says of each."""
    shard_id = manifest.shard_id
    files = [(tar_path(folder, shard_id), manifest.tar), (idx_path(folder, shard_id), manifest.idx)]
    if manifest.quarantine is not None:
        files.append((quarantine_path(folder, shard_id), manifest.quarantine))
    if manifest.ids is not None:
        files.append((ids_path(folder, shard_id), manifest.ids))
    return files


def check_hashes(folder: Path, manifest: Manifest) -> None:
    """Read a shard's files whole and compare sha256. Raises BrokenShard, MissingShard or ReadWriteError."""
    for path, stamp in shard_files(folder, manifest):
        try:
            found = stamp_file(path).sha256
        except NOT_THERE:
            raise MissingShard(
                f"{path} is missing; run: {rerun_command(manifest.shard_id, folder)}"
            ) from None
        if found != stamp.sha256:
            raise BrokenShard(
                f"{path} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}; "
                f"run: {remake_command(manifest.shard_id, folder)}"
            )
