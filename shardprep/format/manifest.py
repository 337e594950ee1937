"""shard-N.json, the manifest: the content of one shard and how it was made.

It is written last. ``done`` says which shards are done. This module does not import numpy, which takes 0.1 s
to load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from shardprep import errors, files
from shardprep.files import Digest, FileStamp
from shardprep.format import commands, json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.json_files import Count, Seconds, Text
from shardprep.format.spec import DatasetSpec

_FORMAT = "shardprep-manifest"
MAX_MANIFEST_BYTES = 4 << 20  # about 3 KB, plus as much for each further source
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)
_Length = Annotated[str, Meta(pattern=r"\A[0-9]{1,19}\Z")]
LENGTH_BITS = 4  # binary digits of a length in TextCounts
# Errors of a shard that is wrong. Others mean that it could not be read or compared.
SHARD_ERRORS = (errors.BrokenShard, errors.MissingShard, errors.OtherPlan, errors.UnknownVersion)


class SourceCounts(Struct, frozen=True, kw_only=True):
    """Counts of one source: a first subfolder of the input, or a value of --source_field."""

    num_documents: Count
    num_tokens: Count  # without padding
    num_bytes: Count  # of the input files; with --source_field, of the documents' text
    num_quarantined: Count
    num_learnt_tokens: Count | None = None  # of conversations: tokens with labels; None of other records

    def to_dict(self) -> dict[str, int]:
        """Return the counts that there are."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def sum_of_sources(shards: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """Add up the counts of several shards, sorted by source."""
    sums = defaultdict[str, Counter[str]](Counter)
    for sources in shards:
        for name, counts in sources.items():
            sums[name].update(counts.to_dict())
    return {name: SourceCounts(**sums[name]) for name in sorted(sums)}


class TextCounts(Struct, frozen=True, kw_only=True):
    """Counts of the texts of one source as encoded (stripped, transformed, rendered), for reports."""

    num_bytes: Count  # as UTF-8
    num_chars: Count
    # Length in tokens -> [documents, tokens]. Lengths keep four binary digits: "22" is 22 and 23.
    lengths: dict[_Length, Annotated[list[Count], Meta(min_length=2, max_length=2)]]


def longest_of(low: int) -> int:
    """Return the largest length that TextCounts.lengths counts under ``low``, the smallest one."""
    return low + (1 << max(low.bit_length() - LENGTH_BITS, 0)) - 1


class ValidationCounts(Struct, frozen=True, kw_only=True):
    """Counts of a shard's validation samples, which come last in its idx."""

    num_samples: Count
    num_documents: Count  # with tokens
    num_tokens: Count


class ShardCounts(Struct, frozen=True, kw_only=True):
    """Counts of a shard. Equal inputs and options give equal counts."""

    num_samples: Annotated[int, Meta(ge=0, le=names.MAX_SAMPLES)]  # documents, or packed rows
    num_documents: Count
    num_tokens: Count  # without padding
    num_lines: Count  # lines or rows of the input, including empty ones
    num_empty_lines: Count  # left out because they are empty after str.strip
    num_pad_tokens: Count  # in rows that are not full
    num_documents_across_rows: Count  # documents that span several rows
    input_bytes: Count
    quarantined: dict[str, Count]  # reason -> documents left out
    # [b]: documents with 2**(b-1) <= tokens < 2**b; lengths are below 2**63
    length_histogram: Annotated[list[Count], Meta(max_length=64)]
    sources: dict[str, SourceCounts]  # sorted by name
    validation: ValidationCounts | None = None  # part of the counts above; None without --validation_fraction
    # Documents by the field of their text; empty if --text_field names one field.
    num_of_field: dict[str, Count] = field(default_factory=dict)

    @property
    def held_out(self) -> ValidationCounts:
        """Return the counts of the validation samples, which may be 0."""
        return self.validation or ValidationCounts(num_samples=0, num_documents=0, num_tokens=0)


class RunFacts(Struct, frozen=True, kw_only=True):
    """How a shard was made: where, when and at what cost. Used for reports, never for decisions."""

    engine: Text = ""
    shardprep: Text = ""
    python: Text = ""
    host: Text = ""
    slurm: dict[str, Text] = field(default_factory=dict)
    began: Seconds = 0.0  # since 1970
    wall_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    num_cpus: Annotated[int, Meta(ge=1, le=2**31)] = 1
    max_rss_bytes: Count = 0
    texts: dict[str, TextCounts] | None = None  # by source
    transform_cpu_s: Seconds = 0.0  # part of cpu_s, in the function of --transform
    libraries: dict[str, Text] = field(default_factory=dict)  # versions of what that function imported
    render_cpu_s: Seconds = 0.0  # part of cpu_s, in the process that renders conversations

    @property
    def ended(self) -> float:
        return self.began + self.wall_s

    @property
    def job_id(self) -> str:
        """Return the id of the Slurm job or of its array, or "" if no job made the shard."""
        return self.slurm.get("SLURM_ARRAY_JOB_ID") or self.slurm.get("SLURM_JOB_ID", "")


class Manifest(Struct, frozen=True, kw_only=True):
    """shard-N.json."""

    spec: DatasetSpec
    shard_id: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: RunFacts  # may vary between equal shards
    digests: FileStamp | None = None  # of --digests
    unblanked_sha256: Digest | None = None  # sha256 of the tar before blanking, see blanked.py
    blanked_sha256: Digest | None = None  # of the list of what is blanked

    def to_json(self) -> bytes:
        """Return the bytes on disk. Equal shards have equal bytes up to ``run``. Each part has a hash."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        sources = {name: counts.to_dict() for name, counts in self.counts.sources.items()}
        content["counts"]["sources"] = sources
        if not self.counts.num_of_field:
            del content["counts"]["num_of_field"]
        if self.unblanked_sha256 is None:
            del content["unblanked_sha256"]
        if self.blanked_sha256 is None:
            del content["blanked_sha256"]
        if not self.run.libraries:
            del content["run"]["libraries"]
        if not self.run.render_cpu_s:
            del content["run"]["render_cpu_s"]
        data = json_files.with_content_hash(_FORMAT, content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"


def read_manifest(folder: DataFolder, shard_id: int) -> Manifest:
    """Read a manifest. Raises MissingShard, BrokenShard, UnknownVersion or ReadWriteError."""
    name = names.manifest_name(shard_id)
    try:
        return json_files.read_file(folder, name, _FORMAT, Manifest, max_bytes=MAX_MANIFEST_BYTES)
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    except errors.BrokenShard as error:
        error.remedy = commands.shard(shard_id, folder)
        raise


def manifest_ids(folder: DataFolder) -> list[int]:
    """Return the ids of shards with a manifest in a folder, ascending."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, folder.names()) if match]


def check_shard(folder: DataFolder, shard_id: int, plan_id: str) -> Manifest:
    """Return the manifest of a shard if it is of this plan, and tar and idx have the sizes in it."""
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        found = f"shard {manifest.shard_id} of plan {manifest.spec.plan_id[:12]}"
        path = folder.path_of(names.manifest_name(shard_id))
        remedy = commands.shard_of_other_plan(shard_id, folder)
        expected = f"shard {shard_id} of plan {plan_id[:12]}"
        advice = "use a new folder for other inputs or options, or move this shard away"
        raise errors.OtherPlan(path=path, found=found, expected=expected, advice=advice, remedy=remedy)
    check_sizes(folder, manifest, ("tar", "idx"))
    return manifest


def shard_files(
    manifest: Manifest, which: Iterable[str] = tuple(names.STAMPED_NAMES)
) -> list[tuple[str, FileStamp]]:
    """Return the names of a shard's files with their stamps. ``which``: keys of these files."""
    stamps = ((names.STAMPED_NAMES[key](manifest.shard_id), getattr(manifest, key)) for key in which)
    return [(name, stamp) for name, stamp in stamps if stamp is not None]


def check_sizes(
    folder: DataFolder, manifest: Manifest, which: Iterable[str] = tuple(names.STAMPED_NAMES)
) -> None:
    """Compare the sizes of a shard's files with its manifest. ``which``: keys of these files."""
    for name, stamp in shard_files(manifest, which):
        num_bytes = folder.size_of(name)
        if num_bytes is None:
            raise commands.missing_file(folder, name, manifest.shard_id)
        if num_bytes != stamp.num_bytes:
            raise errors.BrokenShard(
                path=folder.path_of(name),
                found=f"{num_bytes} bytes",
                expected=stamp.num_bytes,
                remedy=commands.shard_without(name, manifest.shard_id, folder),
            )


def check_hashes(folder: DataFolder, manifest: Manifest, tar_sha256: str) -> None:
    """Compare the sha256 of a shard's files with its manifest. The hash of the tar is given."""
    for name, stamp in shard_files(manifest):
        try:
            sha256 = tar_sha256 if stamp is manifest.tar else folder.stamp_of(name).sha256
        except files.NOT_THERE:
            raise commands.missing_file(folder, name, manifest.shard_id) from None
        if sha256 != stamp.sha256:
            raise other_hash(folder, name, manifest.shard_id, sha256, stamp)


def other_hash(
    folder: DataFolder, name: str, shard_id: int, sha256: str, stamp: FileStamp
) -> errors.BrokenShard:
    """Build the error for a file of a shard with another sha256, ``found``, than in its manifest."""
    return errors.BrokenShard(
        path=folder.path_of(name),
        found=f"sha256 {sha256[:12]}",
        expected=stamp.sha256[:12],
        remedy=commands.shard_again(shard_id, folder),
    )


def read_side_file(folder: DataFolder, name: str, shard_id: int, stamp: FileStamp) -> bytes:
    """Return the content of a side file of a shard: ids, digests or quarantine.

    Raises MissingShard if it does not exist, and BrokenShard if its size or sha256 is not that of ``stamp``.
    """
    try:
        raw = folder.read(name, max_bytes=stamp.num_bytes)
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 != stamp.sha256:
        raise other_hash(folder, name, shard_id, sha256, stamp)
    return raw


def side_file_lines(folder: DataFolder, name: str, shard_id: int, stamp: FileStamp) -> Iterator[bytes]:
    """Yield the lines of a side file of a shard, which may be too large for memory.

    Raises as ``read_side_file``, but only after the last line: until then no line may be relied on.
    """
    digest = hashlib.sha256()
    try:
        for line in folder.lines(name):
            digest.update(line)
            yield line
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    if digest.hexdigest() != stamp.sha256:
        raise other_hash(folder, name, shard_id, digest.hexdigest(), stamp)
