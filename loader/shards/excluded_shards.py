"""Shards that a user leaves out by name: before the order, and never silently."""

from __future__ import annotations

import os
from collections.abc import Iterable

from preprocess.shard_format import UsageError


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
