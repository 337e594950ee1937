"""What a user names as ``input_shards`` -> paths of tars, data set folders and index.json files that exist.

``exclude_shards`` names shards to leave out. They are left out before the sampling order is made, and a name
that fits no shard is an error.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from braceexpand import braceexpand

from loader.shards.url_copies import copy_url
from shardprep.errors import NotFound, UsageError


class ExcludedShards:
    """What ``exclude_shards`` names: a shard's number, its tar's name, or the tar's path."""

    def __init__(self, names: Iterable[int | str | os.PathLike[str]]) -> None:
        self._found: dict[int | str, set[str]] = {_key(name): set() for name in names}

    def __bool__(self) -> bool:
        return bool(self._found)

    def has(self, path: str, shard_id: int | None) -> bool:
        """Whether a tar is excluded; ``shard_id`` is its number in a data set of ours."""
        if not self._found:
            return False
        keys = (path, path.rpartition("/")[2], shard_id)
        named = [key for key in keys if key is not None and key in self._found]
        for key in named:
            self._found[key].add(path)
        return bool(named)

    def check_all_found(self) -> None:
        """Raises UsageError for a name that fits no shard, or more than one."""
        for name, paths in self._found.items():
            if not paths:
                raise UsageError(
                    f"exclude_shards names {name!r}, which is none of the shards; expected the number of a "
                    "shard of ours, or the name or path of a tar"
                )
            if len(paths) > 1:
                raise UsageError(
                    f"exclude_shards names {name!r}, which fits {' and '.join(sorted(paths)[:2])}; "
                    "name the path"
                )


def _key(name: int | str | os.PathLike[str]) -> int | str:
    """A number, a tar's name, or an absolute path."""
    if isinstance(name, int):
        return name
    text = os.fspath(name)
    return os.path.abspath(text) if "/" in text else text  # noqa: PTH100  links are not followed


InputShards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_BRACES = re.compile(r"\{([^{}]*)\}")
_URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")


def find_inputs(input_shards: InputShards, cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Every absolute path that was named, brace patterns and globs expanded, in the order given.

    What is no local file is copied to ``cache_dir`` by webdataset. Raises NotFound naming what does
    not exist, UsageError for none or for one named twice. 100,000 shards take 0.4 s, hence no Path.
    """
    named = [input_shards] if isinstance(input_shards, (str, os.PathLike)) else list(input_shards)
    names_in: dict[str, frozenset[str] | None] = {}
    paths: list[str] = []
    for name in [os.fspath(each) for each in named]:
        if _URL.match(name):
            paths += [copy_url(url, cache_dir) for url in expand_braces(name)]
        else:
            paths += _expand(name, names_in)
    if not paths:
        raise UsageError("input_shards is empty; name a folder, an index.json, tars or a pattern of tars")
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise UsageError(f"{twice} is named twice in input_shards; an epoch would see its samples twice")
    return paths


def _expand(name: str, names_in: dict[str, frozenset[str] | None]) -> list[str]:
    if _exists(_absolute(name), names_in):
        return [_absolute(name)]
    found: list[str] = []
    for pattern in expand_braces(name):
        path = _absolute(pattern)
        if _exists(path, names_in):
            found.append(path)
            continue
        matches = sorted(map(str, Path("/").glob(path[1:]))) if glob.has_magic(pattern) else []
        if not matches:
            of = "" if pattern == name else f" (of {name})"
            raise NotFound(
                f"{path} does not exist{of}; name a folder, an index.json, tars or a pattern of tars"
            )
        found += matches
    return found


def _absolute(name: str) -> str:
    """Without following links: a linked tar's manifest stands beside the link."""
    return os.path.abspath(name)  # noqa: PTH100  Path.resolve would follow them


def _exists(path: str, names_in: dict[str, frozenset[str] | None]) -> bool:
    """One listing a folder: 100,000 shards would else cost as many requests of a parallel file system."""
    folder, name = os.path.split(path)
    if folder not in names_in:
        try:
            names_in[folder] = frozenset(entry.name for entry in os.scandir(folder))
        except OSError:  # it may still be entered where it may not be listed
            names_in[folder] = None
    names = names_in[folder]
    return Path(path).exists() if names is None or not name else name in names


def expand_braces(pattern: str) -> list[str]:
    """``a{0..2}{x,y}`` as a shell expands it, the last brace fastest; zeros in front are kept.

    Each is named once. Raises UsageError for braces that hold neither a range nor a comma.
    """
    try:
        names = list(dict.fromkeys(braceexpand(pattern, escape=False)))
    except ValueError:  # unbalanced: a single brace is part of a name
        return [pattern]
    if left := _BRACES.search(names[0]):
        raise UsageError(f"{pattern!r} has the braces {left[0]!r}, expected {{00000..00009}} or {{a,b}}")
    return names
