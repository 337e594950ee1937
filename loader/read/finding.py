"""Find the shards that ``input_shards`` names.

A folder is a whole data set. Shards of our data sets are known from a manifest or index.json. Tars of other
tools are scanned here, once.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from braceexpand import braceexpand

from loader.read.external_tars import scan_tar
from loader.read.shards import VALIDATION, DatasetShards, ShardSet, SplitName
from loader.read.urls import URL, copy_url
from shardprep.command_line import check_names_are_utf8
from shardprep.errors import BrokenShard, NotFound, OtherTokenizer, ReadWriteError, UsageError
from shardprep.files import is_folder, size_of_file, with_retries
from shardprep.format import commands, done, names
from shardprep.format import manifest as manifests
from shardprep.format.data_folder import DataFolder
from shardprep.format.index import merge_manifests, read_index
from shardprep.format.spec import DatasetSpec, TokenizerSpec

PathOrUrl: TypeAlias = "str | bytes | os.PathLike[str]"
InputShards: TypeAlias = "PathOrUrl | Iterable[PathOrUrl]"
_EXPECTED = "a folder, an index.json, tars or a pattern of tars"
_PATTERN = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_SHARD_TAR = re.compile(r"shard-(\d{5})\.tar")
_COMPRESSED_TAR = re.compile(r"\.(tar\.\w+|tgz)$")
_INDEX_START = re.compile(rb'\{\s*"format":\s*"shardprep-index"')


def find_sources(
    sources: Mapping[str, InputShards],
    *,
    cache_dir: str | os.PathLike[str] | None,
    count_tokens: bool,
    split: SplitName | None,
) -> dict[str, ShardSet]:
    """Find the shards of each named source. ``count_tokens``: read tars without an idx once, completely."""
    if not sources or not all(isinstance(name, str) and name for name in sources):
        raise UsageError(found=f"input_shards={list(sources)}", expected="names with shards for each")
    is_for_validation = split == "validation" and is_named_validation(sources)
    if is_for_validation:
        sources = {"all": sources[VALIDATION]}
    found = {}
    for name, input_shards in sources.items():
        paths = _find_paths(input_shards, cache_dir)
        datasets = _shards_of(paths, count_tokens=count_tokens)
        shards = ShardSet(datasets, split)
        if split == "train":
            shards.refuse_unplanned()
        if split == "validation" and not is_for_validation:
            shards.refuse_training_sets()
        found[name] = shards
        if shards.num_samples == 0:
            side = "" if shards.split is None else f" for {shards.split}"
            raise UsageError(found=f"no sample{side} in {input_shards!r}", expected="at least one")
    with_idx: list[DatasetShards] = []
    for shards in found.values():
        with_idx += shards.with_idx
    _check_sources(with_idx)
    return found


def is_named_validation(input_shards: object) -> bool:
    """Return whether the only source is named ``validation``: all its documents are for validation."""
    return isinstance(input_shards, Mapping) and [*input_shards] == [VALIDATION]


def _find_paths(input_shards: InputShards, cache_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return absolute paths in the order given, with patterns expanded. 100,000 paths take 0.4 s."""
    named: Any = input_shards
    if isinstance(named, (str, bytes, os.PathLike)) or not isinstance(named, Iterable):
        named = [input_shards]
    paths: list[str] = []
    for each in named:
        if not isinstance(each, (str, bytes, os.PathLike)):
            raise UsageError.of_value("input_shards", each, "the path of a folder, an index.json or a tar")
        name = os.fsdecode(each)
        check_names_are_utf8(name)
        if URL.match(name):
            paths += [copy_url(url, cache_dir) for url in _expand_braces(name)]
        else:
            paths += _expand(name)
    check_names_are_utf8(*paths)
    if not paths:
        raise UsageError(found="input_shards=[]", expected=_EXPECTED)
    for path, count in Counter(paths).items():
        if count > 1:  # an epoch would see its samples twice
            raise UsageError(path=path, found=f"named {count} times in input_shards", expected="once")
    return paths


def _expand(name: str) -> list[str]:
    """Expand a name to paths. A name that exists is a path, even if it looks like a pattern."""
    whole = os.path.abspath(name)  # noqa: PTH100  Path.resolve would follow links
    if _PATTERN.search(name) is None or Path(whole).exists():
        return [whole]
    found: list[str] = []
    for pattern in _expand_braces(whole):
        if not glob.has_magic(pattern) or Path(pattern).exists():
            found.append(pattern)  # checked later, since 100,000 shards would be as many requests here
            continue
        matches = sorted(map(str, Path("/").glob(pattern[1:])))
        if not matches:
            raise _not_found(pattern)
        found += matches
    return found


def _expand_braces(pattern: str) -> list[str]:
    """Expand ``a{0..2}{x,y}`` as a shell does, the last brace fastest, without duplicates."""
    try:
        expanded = list(dict.fromkeys(braceexpand(pattern, escape=False)))
    except ValueError:  # an unbalanced brace is part of a name
        return [pattern]
    left = _BRACES.search(expanded[0])
    if left:
        raise UsageError(path=pattern, found=f"braces {left[0]}", expected="{00000..00009} or {a,b}")
    return expanded


def _shards_of(paths: list[str], *, count_tokens: bool) -> list[DatasetShards]:
    """Return the shards at some paths, in the order that ShardSet describes."""
    found: list[DatasetShards] = []
    named: dict[str, list[int]] = {}  # folder of a data set -> its shards that were named
    is_ours: dict[str, bool] = {}  # folder -> whether it is a data set: looked up once for 100,000 shards

    def read(path: str) -> list[DatasetShards]:
        folder, name = os.path.split(path)
        shard = _SHARD_TAR.fullmatch(name)
        if shard:
            if folder not in is_ours:
                is_ours[folder] = _is_dataset(DataFolder(folder))
            shard_id = int(shard[1])
            manifest_name = names.manifest_name(shard_id)
            if is_ours[folder] or DataFolder(folder).status_of(manifest_name) is not None:
                named.setdefault(folder, []).append(shard_id)
                return []
        if size_of_file(Path(path)) is None:
            raise _not_found(path)
        if name == names.INDEX_NAME:
            return [_dataset(DataFolder(folder))]
        if name.endswith(".tar"):
            return [_external_tar(Path(path), count_tokens=count_tokens)]
        if not is_folder(Path(path)):
            expected = f"a tar, a folder or an {names.INDEX_NAME}; decompress .tar.gz files first"
            raise UsageError(path=path, found="a file that cannot be loaded", expected=expected)
        data = DataFolder(path)
        if _is_dataset(data) or manifests.manifest_ids(data):
            return [_dataset(data)]
        inside = data.names()
        compressed = next(filter(_COMPRESSED_TAR.search, inside), None)
        if compressed:
            expected = "a tar; decompress it, or name only the tars to read"
            raise UsageError(path=Path(path, compressed), found="compressed", expected=expected)
        tars = [Path(path, name) for name in inside if name.endswith(".tar")]
        if not tars:
            remedy = commands.plan(os.path.abspath(path), "DATA")  # noqa: PTH100 - Path.resolve() would follow links
            expected = f"an {names.INDEX_NAME}, manifests or tars; if these are texts to prepare"
            raise NotFound(path=path, found="no shards", expected=expected, remedy=remedy)
        return [_external_tar(tar, count_tokens=count_tokens) for tar in tars]

    for path in paths:
        found += with_retries(f"{path} cannot be read", partial(read, path))
    for folder, ids in named.items():
        data = DataFolder(folder)
        found.append(with_retries(f"{folder} cannot be read", partial(_dataset, data, ids)))
        with contextlib.suppress(ReadWriteError):  # some folders can be read but not listed
            inside = set(data.names())
            for wanted in map(names.tar_name, ids):
                if wanted not in inside:
                    raise _not_found(str(data.path_of(wanted)))
    return found


def _external_tar(path: Path, *, count_tokens: bool) -> DatasetShards:
    """Scan a tar of another tool. Its fingerprint hashes sizes, places and some ids, but not its path."""
    records, row_tokens, sha256, num_bytes = scan_tar(path, count_tokens=count_tokens)
    record: Literal["packed", "chat"] = "chat" if records["mask_offset"].any() else "packed"
    counted = records["num_tokens"]
    # Estimate uncounted tokens as 4 bytes each.
    num_tokens = int(counted.sum()) if (counted >= 0).all() else num_bytes // 4
    special_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # of an unknown tokenizer
    spec = DatasetSpec(
        plan_id=sha256,
        num_shards=1,
        record=record if row_tokens else "documents",
        token_format="npy" if row_tokens else "json",
        seq_len=row_tokens,
        append_eos=False,
        tokenizer=TokenizerSpec(model_id="", fingerprint="", vocab_size=2**31, **special_ids),
    )
    return DatasetShards(
        folder=DataFolder(path.parent),
        spec=spec,
        shard_ids=np.zeros(1, np.int64),
        num_samples=np.array([len(records)]),
        num_validation=np.array([len(records)]),
        num_tokens=np.array([num_tokens]),
        tar_bytes=np.array([num_bytes]),
        tar_sha256=np.array([sha256[:16]]),
        scanned_tar=path,
        records=records,
    )


def _not_found(path: str) -> NotFound:
    return NotFound(path=path, found="no such file or folder", expected=_EXPECTED)


def _has_index(folder: DataFolder) -> bool:
    """Return whether a folder has our index.json. Other tools also write files of that name."""
    try:
        return _INDEX_START.match(folder.read_beginning(names.INDEX_NAME, 200)) is not None
    except BrokenShard:  # a link, as in caches of the hub, or a folder
        return False


def _is_dataset(folder: DataFolder) -> bool:
    return _has_index(folder) or folder.size_of(names.PLAN_NAME) is not None


def _dataset(folder: DataFolder, shard_ids: list[int] | None = None) -> DatasetShards:
    """Read a data set, or only those shards of it that were named. The others need not exist.

    With an index.json this opens four files. The sizes of other files are checked when they are opened.
    """
    if shard_ids is None or _has_index(folder):
        index = read_index(folder)
        num_shards = len(index.columns)
        ids = rows = np.arange(num_shards) if shard_ids is None else np.array(shard_ids)
        beyond = ids[ids >= num_shards].tolist()
        if beyond:
            path = folder.path_of(names.tar_name(beyond[0]))
            expected = f"one of the {num_shards} shards of the {names.INDEX_NAME} beside it"
            raise NotFound(path=path, found="an unknown shard", expected=expected)
    else:
        index = merge_manifests(folder, (manifests.read_manifest(folder, shard_id) for shard_id in shard_ids))
        ids = np.array(shard_ids)
        rows = np.arange(len(shard_ids))
    done.refuse_other_plan(folder, index.spec.plan_id)
    done.refuse_found(folder, done.read_findings(folder, index.spec.plan_id), ids.tolist())
    folder.close()  # a loader may have thousands of data sets
    is_planned = index.spec.validation_fraction > 0
    return DatasetShards(
        folder=folder,
        spec=index.spec,
        shard_ids=ids,
        num_samples=index.column("num_samples")[rows],
        num_tokens=index.column("num_tokens")[rows],
        tar_bytes=index.column("tar_bytes")[rows],
        tar_sha256=np.array(index.tar_sha256)[rows],
        num_validation=index.column("num_validation_samples" if is_planned else "num_samples")[rows],
        has_blanks=bool(index.blanked),
    )


def _check_sources(datasets: list[DatasetShards]) -> None:
    """Refuse data sets of different tokenizers, and data sets named twice, whose samples would repeat."""
    for folder, count in Counter(dataset.folder for dataset in datasets).items():
        if count > 1:
            found = "named twice: in two sources, or as a folder and by its shards"
            raise UsageError(path=folder, found=found, expected="once")
    for dataset in datasets:
        first = datasets[0].spec.tokenizer
        other = dataset.spec.tokenizer
        if other.fingerprint != first.fingerprint:
            found = f"made with {other.model_id} ({other.fingerprint[:12]}), which cannot be mixed"
            expected = f"the tokenizer of the others, {first.model_id} ({first.fingerprint[:12]})"
            raise OtherTokenizer(path=dataset.folder, found=found, expected=expected)
