"""Tars that are no local files: copied once, by webdataset, to where the loader can read at random."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from loader.shards.tar_samples import scan_tar
from preprocess.shard_format import BrokenShard, NotFound, ReadWriteError, UnknownMember, UsageError

_NAME = re.compile(r"[\w.-]+\.tar")


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """The local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...).

    A copy that is there is taken for it, so a tar must never change under its URL. Two processes that
    copy one at a time both write it, each to a file of its own, and rename: keep ``cache_dir`` on the
    node. Raises UsageError without a ``cache_dir``, NotFound, BrokenShard, ReadWriteError.
    """
    if cache_dir is None:
        raise UsageError(
            f"{url} is no local file; pass cache_dir=, a folder with room for the copies, as the order "
            "and the resume need tars that can be read at random"
        )
    names = _NAME.findall(url)
    stem = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = Path(os.path.abspath(cache_dir)) / f"{stem}-{names[-1] if names else 'copy.tar'}"  # noqa: PTH100
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch(url, temporary)
            temporary.rename(path)
        except OSError as error:
            raise ReadWriteError(f"{url} cannot be copied to {path.parent}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return str(path)


def _fetch(url: str, path: Path) -> None:
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream, path.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
    except Exception as error:  # each of gopen's openers raises errors of its own
        raise NotFound(f"{url} cannot be read by webdataset ({type(error).__name__}: {error})") from error
    try:
        scan_tar(path)
    except UnknownMember as error:
        raise UnknownMember(f"what webdataset read from {url} cannot be loaded: {error}") from None
    except BrokenShard as error:
        raise BrokenShard(f"what webdataset read from {url} is no whole tar: {error}") from None
