"""The manifest of a shard, and index.json, which merges all manifests.

shard-N.json says what one shard holds and of which data set it is; a shard with a right one is done. A reader
of index.json opens one file, not 10^5.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from shardprep.console import quoted
from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherPlan
from shardprep.files import NOT_THERE, Digest, FileStamp, names_in, size_of_file, stamp_file
from shardprep.format.checked_json import Fields, is_digest, read_checked, with_content_hash
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.digests import DIGEST_BYTES
from shardprep.format.idx import MAX_SAMPLES, idx_num_bytes, least_tar_bytes
from shardprep.format.names import (
    BLOCK_BYTES,
    INDEX_NAME,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    PLAN_NAME,
    VOUCHED_PATHS,
    id_ranges,
    manifest_path,
    remake_command,
    rerun_command,
)
from shardprep.format.shard_making import SourceCounts, sources_of, sum_of_sources

_MOST_LENGTH_STEPS = 64  # of a histogram: lengths are below 2**63
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ValidationCounts:
    """What of a shard is for validation by the plan's fraction: the last samples of its idx."""

    num_samples: int
    num_documents: int  # that have tokens
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What a shard holds. Equal for equal inputs and options, whatever made it."""

    num_samples: Annotated[int, 0, MAX_SAMPLES]  # documents, or packed rows
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
    validation: ValidationCounts | None = None  # of all the above; absent without a plan's fraction


def counts_of(fields: Fields) -> ShardCounts:
    """Return the counts of a manifest. Raises BrokenShard."""
    counts = fields.all_of(ShardCounts)
    if (num_steps := len(counts.length_histogram)) > _MOST_LENGTH_STEPS:
        raise fields.wrong("length_histogram", f"a list of {num_steps}", f"at most {_MOST_LENGTH_STEPS}")
    return counts


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """shard-N.json: written last, so that its presence says the shard is done."""

    spec: DatasetSpec
    shard_id: Annotated[int, 0, MAX_SHARDS - 1]
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: dict[str, Any]  # what may vary between equal shards: engine, versions, host, times
    digests: FileStamp | None = None  # of --digests; absent without
    # sha256 of the tar before documents of it were blanked; absent where none was. See blanked.py.
    made_from: Digest | None = None

    def to_json(self) -> bytes:
        """The bytes on disk; the part before ``run`` is equal for equal shards, and each has its hash."""
        content = dataclasses.asdict(self) | {"spec": self.spec.to_json()}
        parts = ((content, "digests"), (content, "made_from"), (content["counts"], "validation"))
        for values, name in parts:
            if values[name] is None:  # as before there were any
                del values[name]
        data = with_content_hash("shardprep-manifest", content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(fields: Fields) -> Manifest:
        """Raises BrokenShard, also where counts and sizes do not agree."""
        spec = DatasetSpec.from_json(fields.fields("spec"))
        manifest = fields.all_of(
            Manifest, spec=spec, counts=counts_of(fields.fields("counts")), run=fields.run()
        )
        expected = idx_num_bytes(manifest.spec.kind, manifest.counts.num_samples)
        if manifest.idx.num_bytes != expected:
            what = f"{expected} for {manifest.counts.num_samples} samples"
            raise fields.wrong("idx.num_bytes", manifest.idx.num_bytes, what)
        counts, fraction = manifest.counts, spec.validation_fraction
        if manifest.tar.num_bytes < (least := least_tar_bytes(spec, counts.num_samples)):
            what = f"{least} or more for {counts.num_samples} samples"
            raise fields.wrong("tar.num_bytes", manifest.tar.num_bytes, what)
        num_bytes = DIGEST_BYTES * counts.num_documents  # in rows, of those that have tokens
        if manifest.digests is not None and (
            manifest.digests.num_bytes > num_bytes
            or manifest.digests.num_bytes % DIGEST_BYTES
            or (not spec.has_rows and manifest.digests.num_bytes < num_bytes)
        ):
            raise fields.wrong("digests.num_bytes", manifest.digests.num_bytes, f"{num_bytes}")
        if (counts.validation is None) == bool(fraction) or (fraction and manifest.digests is None):
            raise fields.wrong(
                "counts.validation", counts.validation, f"what a fraction of {fraction} gives, and digests"
            )
        if counts.validation is not None and any(
            value > getattr(counts, name) for name, value in vars(counts.validation).items()
        ):
            raise fields.wrong("counts.validation", vars(counts.validation), "a part of the shard's counts")
        return manifest


def read_manifest(folder: Path, shard_id: int) -> Manifest:
    """Read shard-N.json. Raises MissingShard, BrokenShard, UnknownVersion or ReadWriteError."""
    path = manifest_path(folder, shard_id)
    try:
        return Manifest.from_json(read_checked(path, "shardprep-manifest", max_bytes=MAX_MANIFEST_BYTES))
    except NOT_THERE:
        raise MissingShard(
            f"shard {shard_id:05d} is not done: {path} is missing",
            path=path,
            remedy=rerun_command(shard_id, folder),
        ) from None
    except BrokenShard as error:
        error.remedy = rerun_command(shard_id, folder)
        raise


def manifest_ids(folder: Path) -> list[int]:
    """The shards that have a manifest in a folder, ascending. Raises ReadWriteError."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, names_in(folder)) if match]


def check_shard(folder: Path, shard_id: int, plan_id: str) -> Manifest:
    """Return the manifest of a shard, if it is of this plan, and tar and idx are there with their sizes.

    Whether the shard is done also depends on what verify found, see ``done.check_done``.
    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do; ReadWriteError.
    """
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        is_shard = f"shard {manifest.shard_id} of plan {manifest.spec.plan_id[:12]}"
        expected = f"shard {shard_id} of {plan_id[:12]}"
        path, remedy = manifest_path(folder, shard_id), remake_command(shard_id, folder)
        raise OtherPlan(
            f"{path} is {is_shard}, expected {expected}; use a new folder for other inputs or options. If it "
            f"is this file that is out of place, run: {remedy}",
            path=path,
            found=is_shard,
            expected=expected,
            remedy=remedy,
        )
    check_sizes(folder, manifest, ("tar", "idx"))
    return manifest


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str] = tuple(VOUCHED_PATHS)) -> None:
    """Compare the sizes of files that a manifest vouches for, by their names there.

    Raises MissingShard, BrokenShard, ReadWriteError.
    """
    shard_id = manifest.shard_id
    for name in names:
        stamp: FileStamp | None = getattr(manifest, name)
        if stamp is None:
            continue
        path = VOUCHED_PATHS[name](folder, shard_id)
        found = size_of_file(path)
        if found is None:
            raise MissingShard(f"{path} is missing", path=path, remedy=rerun_command(shard_id, folder))
        if found != stamp.num_bytes:
            raise BrokenShard(
                f"{path} has {found} of {stamp.num_bytes} bytes",
                path=path,
                found=found,
                expected=stamp.num_bytes,
                remedy=rerun_command(shard_id, folder),
            )


def shard_files(folder: Path, manifest: Manifest) -> list[tuple[Path, FileStamp]]:
    """The files a manifest vouches for, with what it says of each."""
    stamps = ((path_of(folder, manifest.shard_id), name) for name, path_of in VOUCHED_PATHS.items())
    return [(path, stamp) for path, name in stamps if (stamp := getattr(manifest, name)) is not None]


def check_hashes(folder: Path, manifest: Manifest, *, tar_sha256: str = "") -> None:
    """Read a shard's files whole and compare sha256; of the tar ``tar_sha256``, where that is known.

    Raises BrokenShard, MissingShard or ReadWriteError.
    """
    for path, stamp in shard_files(folder, manifest):
        is_known = tar_sha256 and stamp is manifest.tar
        try:
            found = tar_sha256 if is_known else stamp_file(path).sha256
        except NOT_THERE:
            raise MissingShard(
                f"{path} is missing", path=path, remedy=rerun_command(manifest.shard_id, folder)
            ) from None
        if found != stamp.sha256:
            raise BrokenShard(
                f"{path} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}",
                path=path,
                found=found[:12],
                expected=stamp.sha256[:12],
                remedy=remake_command(manifest.shard_id, folder),
            )


MAX_INDEX_BYTES = 64 << 20  # one of 99,999 shards has 8 MB
_HASH_DIGITS = 16
_HEX = re.compile("[0-9a-f]*")
COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes")
VALIDATION_COLUMN = "num_validation_samples"  # behind COLUMNS, of a plan with a fraction for validation


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The numbers of every shard of one data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(columns_of(spec))]
    # The first 16 hex digits. Of a shard with blanked documents those of the tar that it was made from: by
    # them a state of the loader knows its shards, and blanking moves no sample.
    tar_sha256: tuple[str, ...]
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the whole data set, by name
    blanked: str = ""  # shards of which documents are blanked: "0-2,5"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One of ``columns_of(spec)``: int64[num_shards]."""
        return self.columns[:, columns_of(self.spec).index(name)]

    def to_json(self) -> bytes:
        """The bytes of index.json: about 70 per shard, and no ``run``, so equal data gives equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        content = {
            "spec": self.spec.to_json(),
            "sources": {name: dataclasses.asdict(counts) for name, counts in self.sources.items()},
            "columns": [*columns_of(self.spec), "tar_sha256"],
            "shards": rows,
        }
        if self.blanked:
            content["blanked"] = self.blanked
        head = with_content_hash("shardprep-index", content)
        del head["shards"]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
        return f'{text},\n "shards": [\n{lines}\n]}}\n'.encode()

    @staticmethod
    def from_json(fields: Fields) -> DatasetIndex:
        """Raises BrokenShard, also where the numbers of a shard do not agree."""
        spec = DatasetSpec.from_json(fields.fields("spec"))
        sources = sources_of(fields)
        names, expected = fields.texts("columns"), columns_of(spec)
        if names != [*expected, "tar_sha256"]:
            raise fields.wrong("columns", names, f"{', '.join(expected)}, tar_sha256")
        types: list[type] = [*[int] * len(expected), str]  # true and 1.0 are no numbers
        rows = fields.list_of(
            "shards",
            lambda row: type(row) is list and [*map(type, row)] == types,
            f"a list of {len(expected)} whole numbers and a hash",
        )
        blanked = fields.text("blanked") if fields.has("blanked") else ""
        fields.end()
        if len(rows) != spec.num_shards:
            raise fields.wrong("shards", f"{len(rows)} rows", f"{spec.num_shards}, one per shard")
        hashes = tuple(row[-1] for row in rows)
        if {len(each) for each in hashes} != {_HASH_DIGITS} or not _HEX.fullmatch("".join(hashes)):
            number = next(n for n, each in enumerate(hashes) if not is_digest(each, _HASH_DIGITS))
            raise fields.wrong(f"shards[{number}]", rows[number], f"{_HASH_DIGITS} hex digits at its end")
        try:
            columns = np.array([row[:-1] for row in rows], np.int64)
        except OverflowError:
            raise fields.wrong("shards", "a list with a number beyond int64", "smaller ones") from None
        index = DatasetIndex(spec=spec, columns=columns, tar_sha256=hashes, sources=sources, blanked=blanked)
        index._check_agreement(fields)
        return index

    def _check_agreement(self, fields: Fields) -> None:
        """That the numbers of each shard are possible beside one another. Raises BrokenShard."""
        samples, documents, tokens, tar_bytes, idx_bytes = self.columns[:, : len(COLUMNS)].T
        has_rows = self.spec.has_rows
        wrong = {
            "numbers, none below 0": (self.columns < 0).any(axis=1) | (samples > MAX_SAMPLES),
            "idx_bytes, by num_samples": idx_bytes != idx_num_bytes(self.spec.kind, samples),
            "tar_bytes, in whole blocks": (tar_bytes % BLOCK_BYTES != 0) | (tar_bytes < 2 * BLOCK_BYTES),
            "tar_bytes, by num_samples": tar_bytes < least_tar_bytes(self.spec, samples.clip(0, MAX_SAMPLES)),
            "num_documents, by num_samples": (documents != samples) & (not has_rows),
            "num_tokens, by num_samples": (tokens > samples * self.spec.seq_len) & has_rows,
            f"{VALIDATION_COLUMN}, by num_samples": (samples < self.columns[:, len(COLUMNS) :].T).any(axis=0),
        }
        for what, rows in wrong.items():
            if rows.any():
                number = int(rows.argmax())
                raise fields.wrong(f"shards[{number}]", self.columns[number].tolist(), f"other {what}")


def columns_of(spec: DatasetSpec) -> tuple[str, ...]:
    """The numbers of a shard that an index has."""
    return (*COLUMNS, VALIDATION_COLUMN) if spec.validation_fraction else COLUMNS


def merge_manifests(folder: Path, manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards of a folder, given in the order of their shards.

    Raises OtherPlan where they are not of one data set.
    """
    spec: DatasetSpec | None = None
    rows: list[tuple[int, ...]] = []
    hashes: list[str] = []
    blanked: list[int] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            path = manifest_path(folder, manifest.shard_id)
            raise OtherPlan(
                f"{path} belongs to plan {manifest.spec.plan_id[:12]}, the shards before it to "
                f"{spec.plan_id[:12]}; one folder holds one data set: move the shard to its own, or make it "
                "again",
                path=path,
                found=manifest.spec.plan_id[:12],
                expected=spec.plan_id[:12],
                remedy=remake_command(manifest.shard_id, folder),
            )
        counts = manifest.counts
        found = (counts.num_samples, counts.num_documents, counts.num_tokens)
        validation = () if counts.validation is None else (counts.validation.num_samples,)
        rows.append((*found, manifest.tar.num_bytes, manifest.idx.num_bytes, *validation))
        hashes.append((manifest.made_from or manifest.tar.sha256)[:_HASH_DIGITS])
        if manifest.made_from:
            blanked.append(manifest.shard_id)
        sources.append(counts.sources)
    if spec is None:
        raise MissingShard("no manifest was given")
    return DatasetIndex(
        spec=spec,
        columns=np.array(rows, np.int64),
        tar_sha256=tuple(hashes),
        sources=sum_of_sources(sources),
        blanked=id_ranges(blanked),
    )


def read_index(folder: Path) -> DatasetIndex:
    """The index of a data set: index.json, or without one its manifests, merged in memory.

    Raises NotFound, MissingShard (naming what is missing), BrokenShard, UnknownVersion, OtherPlan,
    ReadWriteError.
    """
    path = folder / INDEX_NAME
    try:
        with without_garbage_collection():
            return DatasetIndex.from_json(read_checked(path, "shardprep-index", max_bytes=MAX_INDEX_BYTES))
    except NOT_THERE:
        return _merge_folder(folder)
    except BrokenShard as error:
        error.remedy = f"shardprep verify {quoted(folder)}"
        raise


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Where many objects are made, each full collection goes through all there are, such as torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _merge_folder(folder: Path) -> DatasetIndex:
    present = manifest_ids(folder)
    if not present:
        if size_of_file(folder / PLAN_NAME) is not None:
            raise NotFound(
                f"{folder} has a plan, but no shard yet",
                path=folder,
                remedy=f"shardprep run {quoted(folder)}",
            )
        raise NotFound(f"{folder} holds no data set: neither {INDEX_NAME} nor a shard's manifest")
    first = read_manifest(folder, present[0])
    if present[-1] >= first.spec.num_shards:
        path, last = manifest_path(folder, present[-1]), first.spec.num_shards - 1
        raise OtherPlan(
            f"{path} is of no shard of this data set, which has shards 0 to {last}; move it, with its tar "
            "and idx, to the data set that it belongs to",
            path=path,
            expected=f"shards 0 to {last}",
        )
    missing = sorted(set(range(first.spec.num_shards)) - set(present))
    if missing:
        raise MissingShard(
            f"{folder} has {len(present)} of {first.spec.num_shards} shards; missing: {id_ranges(missing)}",
            path=folder,
            found=f"{len(present)} of {first.spec.num_shards} shards",
            remedy=f"shardprep run {quoted(folder)}",
        )
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in present))
