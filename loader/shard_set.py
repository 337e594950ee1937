"""All shards of a run as one sequence of samples: which tar holds sample g, and where in it.

Two kinds of shards: those of our data sets, known by manifest or index.json and opened when needed,
and tars of others, whose headers are scanned once, here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loader.input_paths import InputShards, find_inputs
from loader.tar_samples import TarSamples, scan_tar
from preprocess.shard_format import (
    INDEX_NAME,
    PLAN_NAME,
    DatasetIndex,
    DatasetSpec,
    NotFound,
    OtherTokenizer,
    TokenizerSpec,
    UsageError,
    id_ranges,
    idx_path,
    manifest_path,
    merge_manifests,
    read_index,
    read_manifest,
    tar_path,
)

_SHARD_TAR = re.compile(r"shard-(\d{5})\.tar")
_INDEX_START = re.compile(rb'\{\s*"format":\s*"shardprep-index"')


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """Shards of one of our data sets, all or some; the arrays have a row a shard."""

    folder: Path
    spec: DatasetSpec
    shard_ids: npt.NDArray[np.int64]
    num_samples: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    tar_bytes: npt.NDArray[np.int64]

    def tar(self, row: int) -> Path:
        return tar_path(self.folder, int(self.shard_ids[row]))


@dataclass(frozen=True, kw_only=True)
class ForeignTar:
    """A tar that others wrote, with its headers scanned."""

    path: Path
    samples: TarSamples
    tar_bytes: int


class ShardSet:
    """Shards in the order they were named; sample g is counted through all of them."""

    def __init__(self, sources: Iterable[DatasetShards | ForeignTar]) -> None:
        self.sources = tuple(sources)
        counts = [
            source.num_samples
            if isinstance(source, DatasetShards)
            else np.array([len(source.samples.offset)])
            for source in self.sources
        ]
        # Shard s is row s - source_first[i] of source i.
        self.source_first = np.cumsum([0, *map(len, counts)])
        self.first_sample = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    @property
    def tar_bytes(self) -> int:
        return sum(int(np.sum(source.tar_bytes)) for source in self.sources)

    @property
    def datasets(self) -> list[DatasetShards]:
        """Those sources that are data sets of ours."""
        return [source for source in self.sources if isinstance(source, DatasetShards)]

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where all are packed rows of one length, else 0."""
        lengths = {source.spec.seq_len if isinstance(source, DatasetShards) else 0 for source in self.sources}
        return lengths.pop() if len(lengths) == 1 else 0

    @property
    def mean_tokens(self) -> float:
        """Tokens a sample, roughly: tars of others count as 4 bytes a token."""
        num_tokens = sum(
            int(source.num_tokens.sum()) if isinstance(source, DatasetShards) else source.tar_bytes // 4
            for source in self.sources
        )
        return max(num_tokens / max(self.num_samples, 1), 1.0)

    def locate(self, shard: int) -> tuple[DatasetShards | ForeignTar, int]:
        """The source of a shard, counted through all sources, and its row there."""
        number = int(np.searchsorted(self.source_first, shard, side="right")) - 1
        return self.sources[number], shard - int(self.source_first[number])

    def shard_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The shard of each sample, counted through all sources; same shape."""
        return np.searchsorted(self.first_sample, samples, side="right") - 1

    def describe(self, sample: int) -> str:
        """``sample 17 of DATA/shard-00003.tar``, for messages."""
        shard = int(self.shard_of(np.array(sample)))
        source, row = self.locate(shard)
        path = source.path if isinstance(source, ForeignTar) else source.tar(row)
        return f"sample {sample - int(self.first_sample[shard])} of {path}"


def open_shards(input_shards: InputShards) -> ShardSet:
    """Find what a user named. A folder or index.json is a whole data set; an incomplete one is refused.

    Raises NotFound, MissingShard, BrokenShard, UnknownVersion, UnknownMember, UsageError, or
    OtherTokenizer where data sets of different tokenizers are mixed.
    """
    sources: list[DatasetShards | ForeignTar] = []
    of_folder: dict[Path, list[int]] = {}  # shards named one by one, of our data sets
    is_dataset: dict[Path, bool] = {}
    for path in find_inputs(input_shards):
        shard_id = _our_shard_id(path, is_dataset)
        if shard_id is not None:
            of_folder.setdefault(path.parent, []).append(shard_id)
        elif path.name == INDEX_NAME:
            sources.append(_rows(path.parent, read_index(path.parent)))
        elif path.is_dir():
            sources += _open_folder(path)
        elif path.suffix == ".tar":
            sources.append(_foreign(path))
        else:
            raise UsageError(
                f"{path} is neither a tar, a folder nor an {INDEX_NAME}; name tars as in "
                f"{path.parent / 'shard-*.tar'}, and decompress .tar.gz files first"
            )
    sources += [_some_shards(folder, shard_ids) for folder, shard_ids in of_folder.items()]
    shards = ShardSet(sources)
    _check_same_tokenizer(shards.datasets)
    _check_once(shards.datasets)
    if shards.num_samples == 0:
        raise UsageError(f"{input_shards} holds no sample")
    return shards


def _our_shard_id(path: Path, is_dataset: dict[Path, bool]) -> int | None:
    """The number of a tar that belongs to a data set of ours; ``is_dataset`` remembers its folder."""
    match = _SHARD_TAR.fullmatch(path.name)
    if match is None:
        return None
    folder, shard_id = path.parent, int(match[1])
    if folder not in is_dataset:
        is_dataset[folder] = _has_index(folder) or (folder / PLAN_NAME).exists()
    marks = (manifest_path(folder, shard_id), idx_path(folder, shard_id))
    return shard_id if is_dataset[folder] or any(mark.exists() for mark in marks) else None


def _open_folder(folder: Path) -> list[DatasetShards | ForeignTar]:
    if _is_ours(folder):
        return [_rows(folder, read_index(folder))]
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise NotFound(f"{folder} holds no shards: no {INDEX_NAME}, no manifest and no .tar")
    return [_foreign(path) for path in tars]


def _is_ours(folder: Path) -> bool:
    return (
        _has_index(folder)
        or (folder / PLAN_NAME).exists()
        or any(folder.glob("shard-[0-9][0-9][0-9][0-9][0-9].json"))
        or any(folder.glob("shard-[0-9][0-9][0-9][0-9][0-9].idx"))
    )


def _has_index(folder: Path) -> bool:
    """Whether there is an index.json, and it is ours: others write files of that name, too."""
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            return _INDEX_START.match(file.read(200)) is not None
    except FileNotFoundError:
        return False


def _foreign(path: Path) -> ForeignTar:
    return ForeignTar(path=path, samples=scan_tar(path), tar_bytes=path.stat().st_size)


def _some_shards(folder: Path, shard_ids: list[int]) -> DatasetShards:
    """The shards of a data set that were named one by one; the others need not be there."""
    if not _has_index(folder):
        index = merge_manifests(read_manifest(folder, shard_id) for shard_id in shard_ids)
        return _rows(folder, index, np.array(shard_ids), rows=np.arange(len(shard_ids)))
    index = read_index(folder)
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
    return DatasetShards(
        folder=folder,
        spec=index.spec,
        shard_ids=every if shard_ids is None else shard_ids,
        num_samples=index.column("num_samples")[rows],
        num_tokens=index.column("num_tokens")[rows],
        tar_bytes=index.column("tar_bytes")[rows],
    )


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
            raise UsageError(f"{dataset.folder} is named as a folder and by its shards; name it once")
        seen.add(dataset.folder)
