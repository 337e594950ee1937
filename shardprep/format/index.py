"""index.json: all manifests of a data set merged, so that a reader opens one file and not 10^5."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherPlan, quoted
from shardprep.files import NOT_THERE, size_of_file
from shardprep.format.idx import idx_num_bytes
from shardprep.format.json_files import Count, Text, read_file, with_content_hash, wrong_value
from shardprep.format.manifest import Manifest, SourceCounts, manifest_ids, read_manifest, sum_of_sources
from shardprep.format.names import (
    BLOCK_BYTES,
    INDEX_NAME,
    MAX_SAMPLES,
    PLAN_NAME,
    DatasetSpec,
    id_ranges,
    manifest_path,
    remake_command,
)

MAX_INDEX_BYTES = 64 << 20  # one of 99,999 shards has 8 MB
COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes", "num_validation_samples")
_FORMAT = "shardprep-index"
_HASH_DIGITS = 16
_ShortHash = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{_HASH_DIGITS}}}\Z")]


@dataclass(frozen=True, kw_only=True)
class _IndexFile:
    """The values of index.json."""

    spec: DatasetSpec
    sources: dict[str, SourceCounts]
    columns: list[str]
    shards: list[tuple[Count, Count, Count, Count, Count, Count, _ShortHash]]
    blanked: Text = ""


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The numbers of every shard of one data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    # The first 16 hex digits. Of a shard with blanked documents those of the tar that it was made from: by
    # them a state of the loader knows its shards, and blanking moves no sample.
    tar_sha256: tuple[str, ...]
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the whole data set, by name
    blanked: str = ""  # shards of which documents are blanked: "0-2,5"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return one of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """Return the bytes of index.json: about 70 per shard, no ``run``, so equal data gives equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        content: dict[str, Any] = {
            "spec": dataclasses.asdict(self.spec),
            "sources": {name: dataclasses.asdict(counts) for name, counts in self.sources.items()},
            "columns": [*COLUMNS, "tar_sha256"],
            "shards": rows,
        }
        if self.blanked:
            content["blanked"] = self.blanked
        head = with_content_hash(_FORMAT, content)
        del head["shards"]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
        return f'{text},\n "shards": [\n{lines}\n]}}\n'.encode()


def _read_index_file(path: Path) -> DatasetIndex:
    """Read index.json. Raises FileNotFoundError, BrokenShard, also where a shard's numbers do not agree."""
    with without_garbage_collection():
        file = read_file(path, _FORMAT, _IndexFile, max_bytes=MAX_INDEX_BYTES)
        columns = np.array([row[:-1] for row in file.shards], np.int64).reshape(-1, len(COLUMNS))
    if file.columns != [*COLUMNS, "tar_sha256"]:
        raise wrong_value(path, "columns", file.columns, f"{', '.join(COLUMNS)}, tar_sha256")
    if len(columns) != file.spec.num_shards:
        raise wrong_value(path, "shards", f"{len(columns)} rows", f"{file.spec.num_shards}, one per shard")
    _check_numbers(file.spec, columns, lambda row: (path, f"shards[{row}]"))
    hashes = tuple(row[-1] for row in file.shards)
    return DatasetIndex(
        spec=file.spec, columns=columns, tar_sha256=hashes, sources=file.sources, blanked=file.blanked
    )


def _check_numbers(
    spec: DatasetSpec, columns: npt.NDArray[np.int64], place_of: Callable[[int], tuple[Path, str]]
) -> None:
    """Check that the numbers of each shard are possible beside one another. Raises BrokenShard."""
    samples, documents, tokens, tar_bytes, idx_bytes, validation = columns.T
    # The least bytes of a tar: two blocks a document, the ids of a row.
    sample_bytes = spec.seq_len * spec.token_bytes if spec.has_rows else 2 * BLOCK_BYTES
    wrong = {
        "num_samples": samples > MAX_SAMPLES,
        "idx_bytes, by num_samples": idx_bytes != idx_num_bytes(spec.kind, samples),
        "tar_bytes, in whole blocks": (tar_bytes % BLOCK_BYTES != 0) | (tar_bytes < 2 * BLOCK_BYTES),
        "tar_bytes, by num_samples": tar_bytes < samples.clip(0, MAX_SAMPLES) * sample_bytes,
        "num_documents, by num_samples": (documents != samples) & (not spec.has_rows),
        "num_tokens, by num_samples": (tokens > samples * spec.seq_len) & spec.has_rows,
        "num_validation_samples": validation > (samples if spec.validation_fraction else 0),
    }
    for what, rows in wrong.items():
        if rows.any():
            row = int(rows.argmax())
            raise wrong_value(*place_of(row), columns[row].tolist(), f"other {what}")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Stop collections where many objects are made: each goes through all there are, such as torch's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def merge_manifests(folder: Path, manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards of a folder, given in the order of their shards.

    Raises OtherPlan where they are not of one data set.
    """
    spec: DatasetSpec | None = None
    rows: list[tuple[int, ...]] = []
    shard_ids: list[int] = []
    hashes: list[str] = []
    blanked: list[int] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            raise OtherPlan(
                path=manifest_path(folder, manifest.shard_id),
                found=f"a shard of plan {manifest.spec.plan_id[:12]}",
                expected=f"{spec.plan_id[:12]}, as the others: move it away, or make it again",
                remedy=remake_command(manifest.shard_id, folder),
            )
        counts = manifest.counts
        num_validation = counts.validation.num_samples if counts.validation else 0
        found = (counts.num_samples, counts.num_documents, counts.num_tokens)
        rows.append((*found, manifest.tar.num_bytes, manifest.idx.num_bytes, num_validation))
        hashes.append((manifest.made_from or manifest.tar.sha256)[:_HASH_DIGITS])
        blanked += [manifest.shard_id] if manifest.made_from else []
        sources.append(counts.sources)
        shard_ids.append(manifest.shard_id)
    if spec is None:
        raise MissingShard("no manifest was given")
    columns = np.array(rows, np.int64)
    _check_numbers(spec, columns, lambda row: (manifest_path(folder, shard_ids[row]), "counts"))
    return DatasetIndex(
        spec=spec,
        columns=columns,
        tar_sha256=tuple(hashes),
        sources=sum_of_sources(sources),
        blanked=id_ranges(blanked),
    )


def read_index(folder: Path) -> DatasetIndex:
    """Return the index of a data set: index.json, or without one its manifests, merged in memory.

    Raises NotFound, MissingShard (naming what is missing), BrokenShard, UnknownVersion, OtherPlan,
    ReadWriteError.
    """
    try:
        return _read_index_file(folder / INDEX_NAME)
    except NOT_THERE:
        present = manifest_ids(folder)
    except BrokenShard as error:
        error.remedy = f"shardprep verify {quoted(folder)}"
        raise
    remedy = f"shardprep run {quoted(folder)}"
    if not present:
        if size_of_file(folder / PLAN_NAME) is not None:
            raise NotFound(path=folder, found="a plan, but no shard yet", remedy=remedy)
        raise NotFound(path=folder, found=f"no data set: neither {INDEX_NAME} nor a shard's manifest")
    num_shards = read_manifest(folder, present[0]).spec.num_shards
    if present[-1] >= num_shards:
        expected = f"shards 0 to {num_shards - 1}; move it, with its tar and idx, to its own data set"
        path = manifest_path(folder, present[-1])
        raise OtherPlan(path=path, found="a shard of another data set", expected=expected)
    if missing := sorted(set(range(num_shards)) - set(present)):
        found = f"{len(present)} of {num_shards} shards, without {id_ranges(missing)}"
        raise MissingShard(path=folder, found=found, remedy=remedy)
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in present))
