"""index.json, which merges all manifests, so that a reader opens one file instead of 10^5."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from shardprep import errors
from shardprep.files import NOT_THERE
from shardprep.format import commands, json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import idx_num_bytes
from shardprep.format.json_files import Count, Text
from shardprep.format.manifest import Manifest, SourceCounts, manifest_ids, read_manifest, sum_of_sources
from shardprep.format.spec import DatasetSpec

COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes", "num_validation_samples")
_FORMAT = "shardprep-index"
_HASH_DIGITS = 16
_ShortHash = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{_HASH_DIGITS}}}\Z")]


@dataclass(frozen=True, kw_only=True)
class _IndexFile:
    """The content of index.json."""

    spec: DatasetSpec
    sources: dict[str, SourceCounts]
    columns: list[str]
    shards: list[tuple[Count, Count, Count, Count, Count, Count, _ShortHash]]  # COLUMNS, then a hash
    blanked: Text = ""


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The counts of all shards of a data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    # The first 16 hex digits, by which a state of the loader identifies shards. For a shard with blanked
    # documents these are of the original tar, because blanking moves no sample.
    tar_sha256: tuple[str, ...]
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the data set, by name
    blanked: str = ""  # shards with blanked documents: "0-2,5"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return one of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """Return the content of index.json, about 70 bytes per shard. Equal shards give equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        sources = {name: counts.to_dict() for name, counts in self.sources.items()}
        content: dict[str, Any] = {"spec": asdict(self.spec), "sources": sources}
        content |= {"columns": [*COLUMNS, "tar_sha256"], "shards": rows}
        if self.blanked:
            content["blanked"] = self.blanked
        head = json_files.with_content_hash(_FORMAT, content)
        del head["shards"]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
        return f'{text},\n "shards": [\n{lines}\n]}}\n'.encode()


def _index_of(
    spec: DatasetSpec,
    rows: list[tuple[Any, ...]],
    sources: Mapping[str, SourceCounts],
    blanked: str,
    place_of: Callable[[int], tuple[Path, str]],
) -> DatasetIndex:
    """Build the index from rows of COLUMNS and a hash. ``place_of``: file and place of a row, for errors."""
    # columns: int64[shards, COLUMNS]
    columns = np.array([row[:-1] for row in rows], np.int64)
    samples, documents, tokens, tar_bytes, idx_bytes, validation = columns.T
    # A document takes at least two blocks of the tar, a row at least its ids.
    sample_bytes = spec.seq_len * spec.token_bytes if spec.has_rows else 2 * names.BLOCK_BYTES
    is_cut = (tar_bytes % names.BLOCK_BYTES != 0) | (tar_bytes < 2 * names.BLOCK_BYTES)
    wrong = {
        "num_samples": samples > names.MAX_SAMPLES,
        "idx_bytes for num_samples": idx_bytes != idx_num_bytes(spec.kind, samples),
        "tar_bytes in whole blocks": is_cut,
        "tar_bytes for num_samples": tar_bytes < samples.clip(0, names.MAX_SAMPLES) * sample_bytes,
        "num_documents for num_samples": (documents != samples) & (not spec.has_rows),
        "num_tokens for num_samples": (tokens > samples * spec.seq_len) & spec.has_rows,
        "num_validation_samples": validation > (samples if spec.validation_fraction else 0),
    }
    for what, are_wrong in wrong.items():
        if are_wrong.any():
            row = int(are_wrong.argmax())
            raise json_files.wrong_value(*place_of(row), columns[row].tolist(), f"valid {what}")
    hashes = tuple(row[-1] for row in rows)
    return DatasetIndex(spec=spec, columns=columns, tar_sha256=hashes, sources=sources, blanked=blanked)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the collector while many objects are created: each run traverses all objects, also torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def merge_manifests(folder: DataFolder, manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards of a folder, given in order. Raises OtherPlan or BrokenShard."""
    spec: DatasetSpec | None = None
    rows: list[tuple[Any, ...]] = []
    blanked: list[int] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            path = folder.path_of(names.manifest_name(manifest.shard_id))
            found = f"plan {manifest.spec.plan_id[:12]}"
            expected = f"{spec.plan_id[:12]}, like the others"
            remedy = commands.shard_of_other_plan(manifest.shard_id, folder)
            raise errors.OtherPlan(path=path, found=found, expected=expected, remedy=remedy)
        counts = manifest.counts
        numbers = (counts.num_samples, counts.num_documents, counts.num_tokens)
        files = (manifest.tar.num_bytes, manifest.idx.num_bytes)
        tar_sha256 = (manifest.unblanked_sha256 or manifest.tar.sha256)[:_HASH_DIGITS]
        rows.append((*numbers, *files, counts.held_out.num_samples, tar_sha256))
        blanked += [manifest.shard_id] if manifest.unblanked_sha256 else []
        sources.append(counts.sources)
    if spec is None:
        raise errors.MissingShard("no manifest was given")
    total = sum_of_sources(sources)
    shards_blanked = names.id_ranges(blanked)
    return _index_of(
        spec, rows, total, shards_blanked, lambda row: (folder.path_of(names.manifest_name(row)), "counts")
    )


def read_index(folder: DataFolder) -> DatasetIndex:
    """Return the index of a data set: index.json, or if there is none, its manifests merged in memory.

    Raises BrokenShard also for the index of the data set before blanking, and the errors of ``read_file``.
    """
    path = folder.path_of(names.INDEX_NAME)
    try:
        with without_garbage_collection():
            file = json_files.read_file(
                folder, names.INDEX_NAME, _FORMAT, _IndexFile, max_bytes=names.MAX_INDEX_BYTES
            )
            if file.columns != [*COLUMNS, "tar_sha256"]:
                raise json_files.wrong_value(
                    path, "columns", file.columns, f"{', '.join(COLUMNS)}, tar_sha256"
                )
            _check_blanked(folder, file)
            num_rows = len(file.shards)
            if num_rows != file.spec.num_shards:
                raise json_files.wrong_value(path, "shards", f"{num_rows} rows", f"{file.spec.num_shards}")
            return _index_of(
                file.spec, file.shards, file.sources, file.blanked, lambda row: (path, f"shards[{row}]")
            )
    except NOT_THERE:
        present = manifest_ids(folder)
    except errors.BrokenShard as error:
        error.remedy = commands.on("verify", folder)
        raise
    remedy = commands.run(folder)
    if not present and folder.size_of(names.PLAN_NAME) is not None:
        raise errors.NotFound(path=folder, found="a plan without shards", remedy=remedy)
    if not present:
        found = f"not a data set: it has neither {names.INDEX_NAME} nor a manifest of a shard"
        raise errors.NotFound(path=folder, found=found)
    num_shards = read_manifest(folder, present[0]).spec.num_shards
    if present[-1] >= num_shards:
        path = folder.path_of(names.manifest_name(present[-1]))
        expected = f"shards 0 to {num_shards - 1}"
        advice = "move it with its tar and idx to its own data set"
        raise errors.OtherPlan(
            path=path, found="a shard of another data set", expected=expected, advice=advice
        )
    missing = sorted(set(range(num_shards)) - set(present))
    if missing:
        found = f"{len(present)} of {num_shards} shards, without {names.id_ranges(missing)}"
        raise errors.MissingShard(path=folder, found=found, remedy=remedy)
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in present))


def _check_blanked(folder: DataFolder, file: _IndexFile) -> None:
    """Raise BrokenShard for the index from before blanking: by it, blanked tokens would have an id."""
    if not file.blanked and folder.is_subfolder(names.BLANKED_DIR):
        path = folder.path_of(names.INDEX_NAME)
        found = f"no shards with blanked documents, but {names.BLANKED_DIR}/ is there"
        raise errors.BrokenShard(path=path, found=found)
