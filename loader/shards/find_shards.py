"""What a user names -> the shards of a run.

A folder is a whole data set; shards can be excluded by name. Shards of our data sets are known by manifest or
index.json and are opened when they are needed. External tars are scanned here, once. Where ``verify`` wrote
the storage targets (OSTs) of the shards, they are read, too.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.shards.document_split import DocumentSplit
from loader.shards.input_paths import ExcludedShards, InputShards, find_inputs
from loader.shards.shard_set import DatasetShards, ExternalTar, ShardSet
from loader.shards.tar_samples import scan_tar
from shardprep.errors import NotFound, OtherTokenizer, ShardprepError, UsageError
from shardprep.format.dataset_spec import TokenizerSpec
from shardprep.format.index import DatasetIndex, merge_manifests, read_index
from shardprep.format.manifest import Manifest, manifest_ids, read_manifest
from shardprep.format.names import INDEX_NAME, OSTS_NAME, PLAN_NAME, id_ranges, manifest_path, shard_name
from shardprep.format.osts import read_osts
from shardprep.regular_files import names_in, read_beginning, size_of_file, with_retries

logger = logging.getLogger(__name__)

_SHARD_TAR = re.compile(r"shard-(\d{5})\.tar")
_COMPRESSED_TAR = re.compile(r"\.(tar\.\w+|tgz)$")
_INDEX_START = re.compile(rb'\{\s*"format":\s*"shardprep-index"')


def find_shards(
    input_shards: InputShards,
    *,
    exclude_shards: Iterable[int | str | os.PathLike[str]] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    count_tokens: bool = False,
    split: DocumentSplit | None = None,
) -> ShardSet:
    """Find what a user named, without what is excluded; an incomplete folder is refused.

    ``count_tokens``: tars without an idx are read once for the lengths of their samples. Raises NotFound,
    MissingShard, BrokenShard, UnknownVersion, UnknownMember, UsageError, or OtherTokenizer where data
    sets of different tokenizers are mixed.
    """
    excluded = ExcludedShards(exclude_shards)
    finder = _Finder(excluded, count_tokens)
    for path in find_inputs(input_shards, cache_dir):
        finder.add(path)
    excluded.check_all_found()
    shards = ShardSet(finder.sources(), split)
    _check_same_tokenizer(shards.datasets)
    _check_once(shards.datasets)
    if shards.num_samples == 0:
        side = "" if split is None else f", for {split.name} with one of {split.group} for validation"
        raise UsageError(f"{input_shards} holds no sample that is not excluded{side}")
    return shards


def find_sources(sources: Mapping[str, InputShards], **options: Any) -> dict[str, ShardSet]:
    """The shards of each named source, with the options of ``find_shards``; no shard in two of them."""
    if not sources or not all(isinstance(name, str) and name for name in sources):
        raise UsageError(
            f"input_shards names the sources {list(sources)}, expected names with shards for each"
        )
    found = {name: find_shards(shards, **options) for name, shards in sources.items()}
    datasets = [dataset for shards in found.values() for dataset in shards.datasets]
    _check_same_tokenizer(datasets)
    _check_once(datasets)
    return found


class _Finder:
    def __init__(self, excluded: ExcludedShards, count_tokens: bool) -> None:
        self._excluded = excluded
        self._count_tokens = count_tokens
        self._sources: list[DatasetShards | ExternalTar] = []
        self._of_folder: dict[str, list[int]] = {}  # shards named one by one, of our data sets
        self._is_dataset: dict[str, bool] = {}

    def add(self, path: str) -> None:
        folder, name = os.path.split(path)
        shard_id = self._our_shard_id(folder, name)
        if shard_id is not None:
            shard_ids = self._of_folder.setdefault(folder, [])
            if not self._excluded.has(path, shard_id):
                shard_ids.append(shard_id)
        elif name == INDEX_NAME:
            self._sources.append(self._whole(Path(folder)))
        elif name.endswith(".tar"):
            self._add_external(path)
        elif with_retries(f"{path} cannot be looked at", Path(path).is_dir):
            self._add_folder(Path(path))
        else:
            raise UsageError(
                f"{path} is neither a tar, a folder nor an {INDEX_NAME}; name tars as in "
                f"{Path(folder) / 'shard-*.tar'}, and decompress .tar.gz files first"
            )

    def sources(self) -> list[DatasetShards | ExternalTar]:
        named = [(Path(folder), shard_ids) for folder, shard_ids in self._of_folder.items() if shard_ids]
        return [*self._sources, *(_some_shards(folder, shard_ids) for folder, shard_ids in named)]

    def _our_shard_id(self, folder: str, name: str) -> int | None:
        """The number of a tar that belongs to a data set of ours."""
        match = _SHARD_TAR.fullmatch(name)
        if match is None:
            return None
        shard_id = int(match[1])
        if folder not in self._is_dataset:
            self._is_dataset[folder] = _has_index(Path(folder)) or _is_there(Path(folder) / PLAN_NAME)
        if self._is_dataset[folder]:
            return shard_id
        return shard_id if _is_there(manifest_path(Path(folder), shard_id)) else None

    def _add_folder(self, folder: Path) -> None:
        if _is_ours(folder):
            self._sources.append(self._whole(folder))
            return
        names = with_retries(f"{folder} cannot be listed", lambda: names_in(folder))
        for path in (folder / name for name in names if _COMPRESSED_TAR.search(name)):
            if not self._excluded.has(str(path), None):
                raise UsageError(
                    f"{path} is compressed; decompress it, or name it in exclude_shards to go without it"
                )
        tars = [folder / name for name in names if name.endswith(".tar")]
        if not tars:
            raise NotFound(f"{folder} holds no shards: no {INDEX_NAME}, no manifest and no .tar")
        for path in tars:
            self._add_external(str(path))

    def _add_external(self, path: str) -> None:
        if self._excluded.has(path, None):
            return
        samples = with_retries(
            f"{path} cannot be read", lambda: scan_tar(Path(path), count_tokens=self._count_tokens)
        )
        tar_bytes = with_retries(f"{path} cannot be looked at", lambda: Path(path).stat().st_size)
        self._sources.append(ExternalTar(path=Path(path), samples=samples, tar_bytes=tar_bytes))

    def _whole(self, folder: Path) -> DatasetShards:
        if not self._excluded:
            return _rows(folder, _index(folder))
        done = _manifest_ids(folder)
        if _has_index(folder) or not done:
            num_shards = _index(folder).spec.num_shards
        else:
            num_shards = _manifest(folder, done[0]).spec.num_shards
        kept = [
            shard_id
            for shard_id in range(num_shards)
            if not self._excluded.has(f"{folder / shard_name(shard_id)}.tar", shard_id)
        ]
        if not kept:
            raise UsageError(f"exclude_shards names all {num_shards} shards of {folder}")
        return _some_shards(folder, kept)


def _is_ours(folder: Path) -> bool:
    return _has_index(folder) or _is_there(folder / PLAN_NAME) or bool(_manifest_ids(folder))


def _has_index(folder: Path) -> bool:
    """Whether there is an index.json, and it is ours: others write files of that name, too."""
    path = folder / INDEX_NAME
    beginning = with_retries(f"{path} cannot be read", lambda: read_beginning(path, 200))
    return _INDEX_START.match(beginning) is not None


def _is_there(path: Path) -> bool:
    return with_retries(f"{path} cannot be looked at", lambda: size_of_file(path)) is not None


def _manifest_ids(folder: Path) -> list[int]:
    return with_retries(f"{folder} cannot be listed", lambda: manifest_ids(folder))


def _manifest(folder: Path, shard_id: int) -> Manifest:
    path = manifest_path(folder, shard_id)
    return with_retries(f"{path} cannot be read", lambda: read_manifest(folder, shard_id))


def _index(folder: Path) -> DatasetIndex:
    return with_retries(f"the index of {folder} cannot be read", lambda: read_index(folder))


def _some_shards(folder: Path, shard_ids: list[int]) -> DatasetShards:
    """The shards of a data set that were named one by one; the others need not be there."""
    if not _has_index(folder):
        index = merge_manifests(_manifest(folder, shard_id) for shard_id in shard_ids)
        return _rows(folder, index, np.array(shard_ids), rows=np.arange(len(shard_ids)))
    index = _index(folder)
    beyond = [shard_id for shard_id in shard_ids if shard_id >= len(index.columns)]
    if beyond:
        raise NotFound(
            f"{folder / INDEX_NAME} lists {len(index.columns)} shards, so shard {id_ranges(beyond)} is not "
            "one of them; take it out of the folder or out of input_shards"
        )
    return _rows(folder, index, np.array(shard_ids), rows=np.array(shard_ids))


def _rows(
    folder: Path,
    index: DatasetIndex,
    shard_ids: npt.NDArray[np.int64] | None = None,
    rows: npt.NDArray[np.int64] | None = None,
) -> DatasetShards:
    every = np.arange(len(index.columns))
    rows = every if rows is None else rows
    shard_ids = every if shard_ids is None else shard_ids
    osts = known_osts(folder, index.spec.num_shards)
    return DatasetShards(
        folder=folder,
        spec=index.spec,
        shard_ids=shard_ids,
        num_samples=index.column("num_samples")[rows],
        num_tokens=index.column("num_tokens")[rows],
        tar_bytes=index.column("tar_bytes")[rows],
        tar_sha256=np.array(index.tar_sha256)[rows],
        osts=None if osts is None else osts[shard_ids],
    )


def known_osts(folder: Path, num_shards: int) -> npt.NDArray[np.int64] | None:
    """The OST of each shard: int64[num_shards]; None without an osts.json, or with a broken one.

    Only the order of opening follows from it, so what is wrong with it is logged and no error.
    """
    try:
        return read_osts(folder, num_shards)
    except ShardprepError as error:
        logger.warning(
            "%s is left aside (%s); `python -m preprocess verify` writes it anew", folder / OSTS_NAME, error
        )
        return None


def _check_same_tokenizer(datasets: list[DatasetShards]) -> None:
    seen: dict[str, tuple[Path, TokenizerSpec]] = {}
    for dataset in datasets:
        seen.setdefault(dataset.spec.tokenizer.fingerprint, (dataset.folder, dataset.spec.tokenizer))
    if len(seen) > 1:
        found = "; ".join(
            f"{folder} was made with {spec.model_id} ({spec.fingerprint[:12]})"
            for folder, spec in seen.values()
        )
        raise OtherTokenizer(f"{found}; token ids of different tokenizers cannot be mixed: prepare one again")


def _check_once(datasets: list[DatasetShards]) -> None:
    """A shard named both by itself and by its folder would be seen twice."""
    seen: set[Path] = set()
    for dataset in datasets:
        if dataset.folder in seen:
            raise UsageError(
                f"{dataset.folder} is named twice, as in two sources, or as a folder and by its shards; name "
                "it once"
            )
        seen.add(dataset.folder)
