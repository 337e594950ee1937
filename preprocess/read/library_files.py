"""Tell files of Python, of installed libraries and of shardprep from the files of a user."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import sys
import sysconfig

from shardprep import HOME

OUR_PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")


def absolute(path: str) -> str:
    """Return the absolute path, links not followed, or the path itself if the current folder was removed."""
    with contextlib.suppress(OSError):
        return os.path.abspath(path)  # noqa: PTH100
    return path


def is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


@functools.cache
def _library_folders() -> list[str]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(HOME / name) for name in OUR_PACKAGES]
    return [*folders, *map(os.path.realpath, folders)]


def is_library(path: str) -> bool:
    """Return whether a file belongs to Python, to an installed library or to shardprep."""
    parts = path.split("/")
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(is_below(path, folder) for folder in _library_folders())


def is_installed(name: str) -> bool:
    """Return whether a top-level module is an installed library."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec is not None and spec.origin is not None and is_library(spec.origin)


def version_of(name: str) -> str:
    """Return the version of an imported library, or "" if it does not say it."""
    version = getattr(sys.modules[name], "__version__", None)
    if not isinstance(version, str):
        from importlib import metadata  # takes 20 ms, and is rarely needed

        try:
            version = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            version = ""
    return version.encode("utf-8", "backslashreplace").decode()
