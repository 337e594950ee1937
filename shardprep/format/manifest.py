"""shard-N.json, the manifest: what one shard holds, of which data set it is, and how it was made.

It is written last, so a shard with a right one is done. Nothing here needs numpy, which takes 0.1 s to load.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from shardprep.errors import BrokenShard, OtherPlan
from shardprep.files import NOT_THERE, Digest, FileStamp, names_in, size_of_file, stamp_file
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.json_files import (
    Count,
    Seconds,
    Text,
    as_type,
    read_file,
    with_content_hash,
)
from shardprep.format.names import (
    MAX_MANIFEST_BYTES,
    MAX_SAMPLES,
    MAX_SHARDS,
    VOUCHED_PATHS,
    manifest_path,
    missing_file,
    remake_command,
    rerun_command,
)

_FORMAT = "shardprep-manifest"
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)
_Length = Annotated[str, Meta(pattern=r"\A[0-9]{1,19}\Z")]
LENGTH_BITS = 4  # that a length keeps in TextCounts


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What one source gave: the first subfolder of the input, or what --source_field names."""

    num_documents: Count
    num_tokens: Count  # padding excluded
    num_bytes: Count  # of the input files; with --source_field, of the documents' text
    num_quarantined: Count

    def __add__(self, other: SourceCounts) -> SourceCounts:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return SourceCounts(**sums)


def sum_of_sources(shards: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """Add up the counts of several shards, in the order of the sources' names."""
    found: dict[str, SourceCounts] = {}
    for sources in shards:
        for name, counts in sources.items():
            found[name] = found[name] + counts if name in found else counts
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """The texts of one source, as they were encoded: stripped, changed, rendered; for reports alone."""

    num_bytes: Count  # as UTF-8
    num_chars: Count
    # Documents and tokens by length in tokens, rounded down to four binary digits: "22" is 22 and 23.
    lengths: dict[_Length, Annotated[list[Count], Meta(min_length=2, max_length=2)]]


def longest_of(low: int) -> int:
    """Return the largest number of tokens that is counted at ``low`` in the lengths of TextCounts."""
    return low + (1 << max(low.bit_length() - LENGTH_BITS, 0)) - 1


@dataclass(frozen=True, kw_only=True)
class ValidationCounts:
    """What of a shard is for validation by the plan's fraction: the last samples of its idx."""

    num_samples: Count
    num_documents: Count  # that have tokens
    num_tokens: Count


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What a shard holds. Equal for equal inputs and options, whatever made it."""

    num_samples: Annotated[int, Meta(ge=0, le=MAX_SAMPLES)]  # documents, or packed rows
    num_documents: Count
    num_tokens: Count  # padding excluded
    num_lines: Count  # lines or rows of the input, the empty ones included
    num_empty_lines: Count  # left out because nothing is left of them after str.strip
    num_pad_tokens: Count  # in the rows that are not full
    num_documents_across_rows: Count  # those that do not lie whole in one row
    input_bytes: Count
    quarantined: dict[str, Count]  # documents left out, by reason
    # [b]: documents of 2**(b-1) <= tokens < 2**b; lengths are below 2**63
    length_histogram: Annotated[list[Count], Meta(max_length=64)]
    sources: dict[str, SourceCounts]  # in the order of their names
    validation: ValidationCounts | None = None  # of all the above; None without a plan's fraction


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How a shard was made: where, when, and at what price. For reports, never for decisions."""

    host: Text
    slurm: dict[str, Text]
    began: Seconds  # since 1970
    wall_s: Seconds
    cpu_s: Seconds
    num_cpus: Annotated[int, Meta(ge=1, le=2**31)]
    max_rss_bytes: Count
    texts: dict[str, TextCounts] | None = None  # by source


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """shard-N.json."""

    spec: DatasetSpec
    shard_id: Annotated[int, Meta(ge=0, le=MAX_SHARDS - 1)]
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: dict[str, Any]  # what may vary between equal shards: RunFacts, engine, versions
    digests: FileStamp | None = None  # of --digests
    made_from: Digest | None = None  # sha256 of the tar before documents of it were blanked: see documents.py

    def to_json(self) -> bytes:
        """Return the bytes on disk. The part before ``run`` is equal for equal shards; each has its hash."""
        content = dataclasses.asdict(self)
        if self.made_from is None:
            del content["made_from"]
        data = with_content_hash(_FORMAT, content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"

    def facts_of_run(self, path: Path) -> RunFacts:
        """Return what reports need of ``run``. Raises BrokenShard."""
        return as_type(path, self.run, RunFacts)


@dataclass(frozen=True, kw_only=True)
class ShardMaking(RunFacts):
    """What reports need of a manifest: how a shard was made, and what it holds."""

    shard_id: int
    plan_id: str
    num_tokens: int
    input_bytes: int
    sources: Mapping[str, SourceCounts]
    tar_bytes: int
    job_id: str  # Slurm's, of the array where it was one; empty where no job made it

    @staticmethod
    def of(manifest: Manifest, path: Path) -> ShardMaking:
        """Raises BrokenShard."""
        run, counts = manifest.facts_of_run(path), manifest.counts
        return ShardMaking(
            **vars(dataclasses.replace(run, slurm={}, texts=None)),  # there may be 10^5 of them
            shard_id=manifest.shard_id,
            plan_id=manifest.spec.plan_id,
            num_tokens=counts.num_tokens,
            input_bytes=counts.input_bytes,
            sources=counts.sources,
            tar_bytes=manifest.tar.num_bytes,
            job_id=run.slurm.get("SLURM_ARRAY_JOB_ID") or run.slurm.get("SLURM_JOB_ID", ""),
        )

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.wall_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes of input per second of wall time."""
        return self.input_bytes / max(self.wall_s, 1e-3)


def read_manifest(folder: Path, shard_id: int) -> Manifest:
    """Read shard-N.json. Raises MissingShard, BrokenShard, UnknownVersion or ReadWriteError."""
    path = manifest_path(folder, shard_id)
    try:
        return read_file(path, _FORMAT, Manifest, max_bytes=MAX_MANIFEST_BYTES)
    except NOT_THERE:
        raise missing_file(path, shard_id, folder) from None
    except BrokenShard as error:
        error.remedy = rerun_command(shard_id, folder)
        raise


def manifest_ids(folder: Path) -> list[int]:
    """Return the shards that have a manifest in a folder, ascending. Raises ReadWriteError."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, names_in(folder)) if match]


def check_shard(folder: Path, shard_id: int, plan_id: str) -> Manifest:
    """Return the manifest of a shard, if it is of this plan, and tar and idx are there with their sizes.

    Whether the shard is done also depends on what verify found, see ``done.check_done``.
    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do; ReadWriteError.
    """
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        found = f"shard {manifest.shard_id} of plan {manifest.spec.plan_id[:12]}"
        expected = f"shard {shard_id} of {plan_id[:12]}"
        path, remedy = manifest_path(folder, shard_id), remake_command(shard_id, folder)
        raise OtherPlan(
            f"{path} is {found}, expected {expected}; use a new folder for other inputs or options. If it "
            f"is this file that is out of place, run: {remedy}",
            path=path,
            found=found,
            expected=expected,
            remedy=remedy,
        )
    check_sizes(folder, manifest, ("tar", "idx"))
    return manifest


def shard_files(
    folder: Path, manifest: Manifest, names: Iterable[str] = tuple(VOUCHED_PATHS)
) -> list[tuple[Path, FileStamp]]:
    """Return the files that a manifest vouches for, with what it says of each. ``names``: only these."""
    stamps = ((VOUCHED_PATHS[name](folder, manifest.shard_id), getattr(manifest, name)) for name in names)
    return [(path, stamp) for path, stamp in stamps if stamp is not None]


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str] = tuple(VOUCHED_PATHS)) -> None:
    """Compare the sizes of files that a manifest vouches for, by their names there.

    Raises MissingShard, BrokenShard, ReadWriteError.
    """
    for path, stamp in shard_files(folder, manifest, names):
        found = size_of_file(path)
        if found is None:
            raise missing_file(path, manifest.shard_id, folder)
        if found != stamp.num_bytes:
            remedy = rerun_command(manifest.shard_id, folder)
            raise BrokenShard(path=path, found=f"{found} bytes", expected=stamp.num_bytes, remedy=remedy)


def check_hashes(folder: Path, manifest: Manifest, *, tar_sha256: str = "") -> None:
    """Read a shard's files whole and compare sha256; of the tar ``tar_sha256``, where that is known.

    Raises BrokenShard, MissingShard or ReadWriteError.
    """
    for path, stamp in shard_files(folder, manifest):
        is_known = tar_sha256 and stamp is manifest.tar
        try:
            found = tar_sha256 if is_known else stamp_file(path).sha256
        except NOT_THERE:
            raise missing_file(path, manifest.shard_id, folder) from None
        if found != stamp.sha256:
            expected, remedy = stamp.sha256[:12], remake_command(manifest.shard_id, folder)
            raise BrokenShard(path=path, found=f"sha256 {found[:12]}", expected=expected, remedy=remedy)
