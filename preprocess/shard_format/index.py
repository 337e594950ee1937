"""index.json: all manifests of a data set merged, so that a reader opens one file, not 10^5."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocess.shard_format.errors import BrokenShard, MissingShard, NotFound, OtherPlan
from preprocess.shard_format.manifest import DatasetSpec, Manifest, parse_json, read_manifest
from preprocess.shard_format.names import FORMAT_VERSION, INDEX_NAME, rerun_command, shard_name

COLUMNS = ("num_samples", "num_documents", "num_tokens", "tar_bytes", "idx_bytes")


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The numbers of every shard of one data set; row N is shard N."""

    spec: DatasetSpec
    columns: npt.NDArray[np.int64]  # int64[num_shards, len(COLUMNS)]
    tar_sha256: tuple[str, ...]  # the first 16 hex digits

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One of COLUMNS: int64[num_shards]."""
        return self.columns[:, COLUMNS.index(name)]

    def to_json(self) -> bytes:
        """The bytes of index.json: about 70 a shard, and no ``run``, so equal data gives equal bytes."""
        head = {
            "format": "shardprep-index",
            "version": FORMAT_VERSION,
            "spec": dataclasses.asdict(self.spec),
            "columns": [*COLUMNS, "tar_sha256"],
        }
        rows = (
            json.dumps([*row, sha], separators=(",", ":"))
            for row, sha in zip(self.columns.tolist(), self.tar_sha256, strict=True)
        )
        text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "shards": [\n'
        return (text + ",\n".join(rows) + "\n]}\n").encode()


def merge_manifests(manifests: Iterable[Manifest]) -> DatasetIndex:
    """Merge the manifests of all shards, given in the order of their shards.

    Raises OtherPlan where they are not of one data set.
    """
    spec: DatasetSpec | None = None
    rows: list[tuple[int, ...]] = []
    hashes: list[str] = []
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
        hashes.append(manifest.tar.sha256[:16])
    if spec is None:
        raise MissingShard("no manifest was given")
    return DatasetIndex(spec=spec, columns=np.array(rows, np.int64), tar_sha256=tuple(hashes))


def read_index(folder: Path) -> DatasetIndex:
    """The index of a data set: index.json, or without one its manifests, merged in memory.

    Raises NotFound where there is no data set, MissingShard naming what an incomplete one
    lacks, BrokenShard, UnknownVersion or OtherPlan.
    """
    path = folder / INDEX_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return _merge_folder(folder)
    try:
        with _without_garbage_collection():
            data = parse_json(path, raw, "shardprep-index")
            rows = data["shards"]
            index = DatasetIndex(
                spec=DatasetSpec.from_json(data["spec"]),
                columns=np.array([row[:-1] for row in rows], np.int64).reshape(len(rows), len(COLUMNS)),
                tar_sha256=tuple(row[-1] for row in rows),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenShard(
            f"{path} is not a whole index ({error!r}); run: python -m preprocess verify {folder}"
        ) from None
    if data["columns"] != [*COLUMNS, "tar_sha256"] or len(rows) != index.spec.num_shards:
        raise BrokenShard(
            f"{path} has {len(rows)} of {index.spec.num_shards} shards in columns {data['columns']}; "
            f"run: python -m preprocess verify {folder}"
        )
    return index


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A list a shard would start several full collections, which look at all that torch imported, too.

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
    present = sorted(int(path.stem[6:]) for path in folder.glob("shard-[0-9][0-9][0-9][0-9][0-9].json"))
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


def id_ranges(ids: Iterable[int]) -> str:
    """``0-2,5,7-9``: sorted ids as sbatch's --array and --shards write them."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
