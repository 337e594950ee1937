"""What a user names as ``input_shards`` -> the shards of a run.

A folder is a whole data set. Shards of our data sets are known by manifest or index.json and opened when they
are needed; tars that others wrote are scanned here, once. What is no local file is copied first.
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
from typing import Any, TypeAlias

import numpy as np
from braceexpand import braceexpand

from loader.external_tars import scan_tar
from loader.shards import DatasetShards, ShardSet, SplitName
from loader.url_copies import copy_url, is_url
from shardprep.console import quoted
from shardprep.errors import NotFound, OtherTokenizer, ReadWriteError, UsageError
from shardprep.files import (
    check_names_are_utf8,
    is_folder,
    names_in,
    read_beginning,
    size_of_file,
    with_retries,
)
from shardprep.format.index import merge_manifests, read_index
from shardprep.format.manifest import (
    manifest_ids,
    read_findings,
    read_manifest,
    refuse_found,
    refuse_other_plan,
)
from shardprep.format.names import INDEX_NAME, PLAN_NAME, TokenizerSpec, manifest_path, tar_path

Named: TypeAlias = "str | bytes | os.PathLike[str]"
InputShards: TypeAlias = "Named | Iterable[Named]"

NAMEABLE = "a folder, an index.json, tars or a pattern of tars"
_PATTERN = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_SHARD_TAR = re.compile(r"shard-(\d{5})\.tar")
_COMPRESSED_TAR = re.compile(r"\.(tar\.\w+|tgz)$")
_INDEX_START = re.compile(rb'\{\s*"format":\s*"shardprep-index"')


def find_sources(
    sources: Mapping[str, InputShards],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    count_tokens: bool = False,
    split: SplitName | None = None,
) -> dict[str, ShardSet]:
    """Find the shards of each named source. An incomplete folder is refused, and a shard in two sources.

    ``count_tokens``: tars without an idx are read once for the lengths of their samples.
    """
    if not sources or not all(isinstance(name, str) and name for name in sources):
        raise UsageError(found=f"input_shards={list(sources)}", expected="names with shards for each")
    found = {}
    for name, input_shards in sources.items():
        paths = _find_paths(input_shards, cache_dir)
        shards = found[name] = ShardSet(_shards_of(paths, count_tokens=count_tokens), split)
        if shards.num_samples == 0:
            side = "" if shards.split is None else f" for {shards.split}"
            raise UsageError(found=f"no sample{side} in {input_shards!r}", expected="one at least")
    _check_sources([dataset for shards in found.values() for dataset in shards.datasets])
    return found


def _find_paths(input_shards: InputShards, cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return every absolute path that was named, brace patterns and globs expanded, in the order given.

    What is no local file is copied to ``cache_dir``. 100,000 shards take 0.4 s, hence no Path.
    """
    named: Iterable[Any] = [input_shards]
    if isinstance(input_shards, Iterable) and not isinstance(input_shards, (str, bytes, os.PathLike)):
        named = input_shards
    paths: list[str] = []
    for each in named:
        if not isinstance(each, (str, bytes, os.PathLike)):
            expected = "the path of a folder, an index.json or a tar"
            raise UsageError(found=f"input_shards={each!r}", expected=expected)
        name = os.fsdecode(each)
        check_names_are_utf8(name)
        if is_url(name):
            paths += [copy_url(url, cache_dir) for url in _expand_braces(name)]
        else:
            paths += _expand(name)
    check_names_are_utf8(*paths)
    if not paths:
        raise UsageError(found="input_shards=[]", expected=NAMEABLE)
    for path, count in Counter(paths).items():
        if count > 1:  # an epoch would see its samples twice
            raise UsageError(path=path, found=f"named {count} times in input_shards", expected="once")
    return paths


def _expand(name: str) -> list[str]:
    """Return the paths that a name stands for: itself, where it is no pattern, or is there."""
    whole = os.path.abspath(name)  # noqa: PTH100  Path.resolve would follow links
    if _PATTERN.search(name) is None or Path(whole).exists():
        return [whole]
    found: list[str] = []
    for pattern in _expand_braces(whole):
        if not glob.has_magic(pattern) or Path(pattern).exists():
            found.append(pattern)  # of 100,000 shards each would be a request, so they are looked for later
            continue
        matches = sorted(map(str, Path("/").glob(pattern[1:])))
        if not matches:
            raise _nothing_at(pattern)
        found += matches
    return found


def _expand_braces(pattern: str) -> list[str]:
    """Expand ``a{0..2}{x,y}`` as a shell does, the last brace fastest.

    Zeros in front are kept, and each name comes once. Raises UsageError for braces that hold neither a range
    nor a comma.
    """
    try:
        names = list(dict.fromkeys(braceexpand(pattern, escape=False)))
    except ValueError:  # unbalanced: a single brace is part of a name
        return [pattern]
    if left := _BRACES.search(names[0]):
        found = f"the braces {left[0]!r}"
        raise UsageError(path=pattern, found=found, expected="{00000..00009} or {a,b}")
    return names


def _shards_of(paths: list[str], *, count_tokens: bool) -> list[DatasetShards]:
    """Return what the paths name: folders and tars of others in their order, then shards named one by one."""
    found: list[DatasetShards] = []
    named: dict[str, list[int]] = {}  # folder of one of our data sets -> shards of it that were named
    is_ours: dict[str, bool] = {}  # folder -> whether it is a data set: looked up once for 100,000 shards

    def add(path: str) -> list[str]:
        """Read what a path names. Returns the tars that are still to be added, of a folder of tars."""
        folder, name = os.path.split(path)
        shard = _SHARD_TAR.fullmatch(name)
        if shard and folder not in is_ours:
            is_ours[folder] = _is_dataset(Path(folder))
        if shard and (
            is_ours[folder] or size_of_file(manifest_path(Path(folder), int(shard[1]))) is not None
        ):
            named.setdefault(folder, []).append(int(shard[1]))
        elif size_of_file(Path(path)) is None:
            raise _nothing_at(path)
        elif name == INDEX_NAME:
            found.append(_dataset(Path(folder)))
        elif name.endswith(".tar"):
            found.append(scan_tar(Path(path), count_tokens=count_tokens))
        elif not is_folder(Path(path)):
            expected = f"a tar, a folder or an {INDEX_NAME}; decompress .tar.gz files first"
            raise UsageError(path=path, found="none of what can be loaded", expected=expected)
        elif _is_dataset(Path(path)) or manifest_ids(Path(path)):
            found.append(_dataset(Path(path)))
        else:
            return _tars_in(Path(path))
        return []

    for path in paths:
        for tar in with_retries(f"{path} cannot be read", partial(add, path)):
            with_retries(f"{tar} cannot be read", partial(add, tar))
    for folder, ids in named.items():
        attempt = partial(_dataset, Path(folder), ids)
        found.append(with_retries(f"{folder} cannot be read", attempt))
        with contextlib.suppress(ReadWriteError):  # a folder may be entered that may not be listed
            names = set(names_in(Path(folder)))
            for shard_id in ids:
                wanted = tar_path(Path(folder), shard_id)
                if wanted.name not in names:
                    raise _nothing_at(str(wanted))
    return found


def _nothing_at(path: str) -> NotFound:
    return NotFound(path=path, found="no such file or folder", expected=NAMEABLE)


def _tars_in(folder: Path) -> list[str]:
    """Return the tars of a folder that is no data set. Raises UsageError or NotFound."""
    names = names_in(folder)
    for path in (folder / name for name in names if _COMPRESSED_TAR.search(name)):
        raise UsageError(path=path, found="compressed", expected="a tar; decompress it, or name the others")
    tars = [str(folder / name) for name in names if name.endswith(".tar")]
    if not tars:
        remedy = f"shardprep plan --input_dir {quoted(folder)} --output_dir DATA --model_id MODEL"
        expected = f"an {INDEX_NAME}, manifests or tars; if these are raw texts"
        raise NotFound(path=folder, found="no shards", expected=expected, remedy=remedy)
    return tars


def _has_index(folder: Path) -> bool:
    """Return whether there is an index.json of ours: others write files of that name, too."""
    return _INDEX_START.match(read_beginning(folder / INDEX_NAME, 200)) is not None


def _is_dataset(folder: Path) -> bool:
    return _has_index(folder) or size_of_file(folder / PLAN_NAME) is not None


def _dataset(folder: Path, shard_ids: list[int] | None = None) -> DatasetShards:
    """Read a data set, or the shards of it that were named one by one. The others need not be there.

    Done-ness is asked as everywhere; the sizes of files are compared when they are opened. With an index.json
    that is four opens for a whole data set, of which plan.json and findings.json are two.
    """
    if shard_ids is None or _has_index(folder):
        index = read_index(folder)
        num_shards = len(index.columns)
        ids = rows = np.arange(num_shards) if shard_ids is None else np.array(shard_ids)
        if beyond := ids[ids >= num_shards].tolist():
            path = tar_path(folder, beyond[0])
            expected = f"one of the {num_shards} shards of the {INDEX_NAME} beside it"
            raise NotFound(path=path, found="an unknown shard", expected=expected)
    else:
        index = merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in shard_ids))
        ids, rows = np.array(shard_ids), np.arange(len(shard_ids))
    refuse_other_plan(folder, index.spec.plan_id)
    refuse_found(folder, read_findings(folder, index.spec.plan_id), ids.tolist())
    num_validation = index.column("num_validation_samples")[rows]
    return DatasetShards(
        folder=folder,
        spec=index.spec,
        shard_ids=ids,
        num_samples=index.column("num_samples")[rows],
        num_tokens=index.column("num_tokens")[rows],
        tar_bytes=index.column("tar_bytes")[rows],
        tar_sha256=np.array(index.tar_sha256)[rows],
        num_validation=num_validation if index.spec.validation_fraction else None,
        has_blanks=bool(index.blanked),
    )


def _check_sources(datasets: list[DatasetShards]) -> None:
    """Refuse data sets of different tokenizers, and one named twice, whose shards would be seen twice."""
    tokenizers: dict[str, tuple[Path, TokenizerSpec]] = {}
    folders: set[Path] = set()
    for dataset in datasets:
        tokenizers.setdefault(dataset.spec.tokenizer.fingerprint, (dataset.folder, dataset.spec.tokenizer))
        if dataset.folder in folders:
            found = "named twice: in two sources, or as a folder and by its shards"
            raise UsageError(path=dataset.folder, found=found, expected="once")
        folders.add(dataset.folder)
    if len(tokenizers) > 1:
        (_, first), (folder, other), *_ = tokenizers.values()
        raise OtherTokenizer(
            path=folder,
            found=f"made with {other.model_id} ({other.fingerprint[:12]}), which cannot be mixed",
            expected=f"the tokenizer of the others, {first.model_id} ({first.fingerprint[:12]})",
        )
