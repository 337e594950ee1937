"""index.json: all manifests of a data set merged, so that a reader opens one file, not 10^5."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherPlan
from shardprep.format.checked_json import Fields, is_digest, read_checked, with_content_hash
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import MAX_SAMPLES, idx_num_bytes
from shardprep.format.manifest import Manifest, manifest_ids, read_manifest
from shardprep.format.names import BLOCK_BYTES, INDEX_NAME, id_ranges, rerun_command, shard_name
from shardprep.format.source_counts import SourceCounts, sources_of, sum_of_sources
from shardprep.regular_files import NOT_THERE

MAX_INDEX_BYTES = 64 << 20  # one of 99,999 shards has 8 MB
_HASH_DIGITS = 16
_HEX = re.compile("[0-9a-f]*")
COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes")
_ROW_TYPES = [int] * len(COLUMNS) + [str]


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The numbers of every shard of one data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    tar_sha256: tuple[str, ...]  # the first 16 hex digits
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # of the whole data set, by name

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """The bytes of index.json: about 70 per shard, and no ``run``, so equal data gives equal bytes."""
        rows = [[*row, sha] for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)]
        content = {
            "spec": self.spec.to_json(),
            "sources": {name: dataclasses.asdict(counts) for name, counts in self.sources.items()},
            "columns": [*COLUMNS, "tar_sha256"],
            "shards": rows,
        }
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
        names = fields.texts("columns")
        if names != [*COLUMNS, "tar_sha256"]:
            raise fields.wrong("columns", names, f"{', '.join(COLUMNS)}, tar_sha256")
        rows = fields.list_of("shards", _is_row, f"a list of {len(COLUMNS)} whole numbers and a hash")
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
        index = DatasetIndex(spec=spec, columns=columns, tar_sha256=hashes, sources=sources)
        index._check_agreement(fields)
        return index

    def _check_agreement(self, fields: Fields) -> None:
        """That the numbers of each shard are possible beside one another. Raises BrokenShard."""
        samples, documents, tokens, tar_bytes, idx_bytes = self.columns.T
        has_rows = self.spec.has_rows
        wrong = {
            "numbers, none below 0": (self.columns < 0).any(axis=1) | (samples > MAX_SAMPLES),
            "idx_bytes, by num_samples": idx_bytes != idx_num_bytes(self.spec.kind, samples),
            "tar_bytes, in whole blocks": (tar_bytes % BLOCK_BYTES != 0) | (tar_bytes < 2 * BLOCK_BYTES),
            "num_documents, by num_samples": (documents != samples) & (not has_rows),
            "num_tokens, by num_samples": (tokens > samples * self.spec.seq_len) & has_rows,
        }
        for what, rows in wrong.items():
            if rows.any():
                number = int(rows.argmax())
                raise fields.wrong(f"shards[{number}]", self.columns[number].tolist(), f"other {what}")


def _is_row(value: Any) -> bool:
    """Whether the values of a row of ``shards`` are of the right types; true and 1.0 are no numbers."""
    return type(value) is list and [*map(type, value)] == _ROW_TYPES


def merge_manifests(manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards, given in the order of their shards.

    Raises OtherPlan where they are not of one data set.
    """
    spec: DatasetSpec | None = None
    rows: list[tuple[int, ...]] = []
    hashes: list[str] = []
    sources: list[Mapping[str, SourceCounts]] = []
    for manifest in manifests:
        spec = spec or manifest.spec
        if manifest.spec != spec:
            raise OtherPlan(
                f"{shard_name(manifest.shard_id)} belongs to plan {manifest.spec.plan_id[:12]}, "
                f"the shards before it to {spec.plan_id[:12]}; one folder holds one data set"
            )
        counts = manifest.counts
        rows.append(
            (
                counts.num_samples,
                counts.num_documents,
                counts.num_tokens,
                manifest.tar.num_bytes,
                manifest.idx.num_bytes,
            )
        )
        hashes.append(manifest.tar.sha256[:_HASH_DIGITS])
        sources.append(counts.sources)
    if spec is None:
        raise MissingShard("no manifest was given")
    return DatasetIndex(
        spec=spec,
        columns=np.array(rows, np.int64),
        tar_sha256=tuple(hashes),
        sources=sum_of_sources(sources),
    )


def read_index(folder: Path) -> DatasetIndex:
    """The index of a data set: index.json, or without one its manifests, merged in memory.

    Raises NotFound where there is no data set, MissingShard naming what an incomplete one
    lacks, BrokenShard, UnknownVersion, OtherPlan or ReadWriteError.
    """
    path = folder / INDEX_NAME
    try:
        with _without_garbage_collection():
            return DatasetIndex.from_json(read_checked(path, "shardprep-index", max_bytes=MAX_INDEX_BYTES))
    except NOT_THERE:
        return _merge_folder(folder)
    except BrokenShard as error:
        raise BrokenShard(f"{error}; run: python -m preprocess verify {shlex.quote(str(folder))}") from None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """One list per shard would start several full collections, which look at all that torch imported, too.

    Of 99,999 shards they take longer than all the rest.
    """
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
        raise NotFound(f"{folder} holds no data set: neither {INDEX_NAME} nor a shard's manifest")
    first = read_manifest(folder, present[0])
    missing = sorted(set(range(first.spec.num_shards)) - set(present))
    if missing:
        raise MissingShard(
            f"{folder} has {len(present)} of {first.spec.num_shards} shards; missing: {id_ranges(missing)}; "
            f"run: python -m preprocess run {folder} (or one: {rerun_command(missing[0], folder)})"
        )
    return merge_manifests(read_manifest(folder, shard_id) for shard_id in present)
