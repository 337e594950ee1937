"""Local copies of tars behind URLs.

The loader reads at random, so a URL is copied first, by webdataset:

CACHE/shardprep-UID/<16 digits of the URL>-part-07.tar                a tar that others wrote
CACHE/shardprep-UID/<16 digits of the folder's URL>/shard-00000.tar   one of ours, with manifest and idx

An existing copy is used as it is, so the tar behind a URL must never change. Processes that copy one URL at
the same time each write their own file: keep CACHE on the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loader.read.external_tars import scan_tar
from shardprep import publishing
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    NotFound,
    ReadWriteError,
    UsageError,
)  # fmt: skip
from shardprep.files import FileStamp
from shardprep.format import manifest as manifests
from shardprep.format import names
from shardprep.format.data_folder import DataFolder

logger = logging.getLogger(__name__)

URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")  # as webdataset decides
_NAME_IN_URL = re.compile(r"[\w.-]+\.tar")
_URL_OF_OUR_SHARD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^?#]*)/shard-(\d{5})\.tar")
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@]*@")
_EXIT_STATUS = re.compile(r": exit -?\d+")
_BLOCK_BYTES = 1 << 20  # read from a URL at once


def _publish(
    blocks: Iterable[bytes | bytearray],
    target: Path,
    source: str,
    stamp: FileStamp | None = None,
    is_unknown_tar: bool = False,
) -> None:
    """Publish a copy atomically. Raises BrokenShard if it is not as stamped, or is a tar that cannot load."""
    with publishing.PublishedFile(target) as copy:
        for block in blocks:
            copy.write(memoryview(block))
        found = copy.sync()
        if stamp is not None and found != stamp:
            expected = f"{stamp.sha256[:12]} of its manifest"
            raise BrokenShard(path=source, found=f"sha256 {found.sha256[:12]}", expected=expected)
        try:
            if is_unknown_tar:
                scan_tar(copy.temporary)
        except BrokenShard as error:
            raise type(error)(f"what webdataset read from {source} cannot be loaded: {error}") from None
        copy.rename_into_place()
    publishing.sync_folder(target.parent)  # the name must survive a power cut before the manifest's does


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the path of a URL's copy, made by webdataset (``https:``, ``s3:``, ``pipe:`` ...) if missing."""
    if cache_dir is None:
        remedy = "cache_dir="
        expected = f"{remedy}, a folder with space for copies, as shuffling and resuming read tars at random"
        raise UsageError(path=_shown(url), found="not a local file", expected=expected, remedy=remedy)
    folder = Path(os.path.abspath(cache_dir), f"shardprep-{os.getuid()}")  # noqa: PTH100  resolve follows links
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        # In a shared folder such as /tmp others could plant a link at the name of a copy.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            found = f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}"
            expected = f"a folder of user {os.getuid()} that others cannot write to; pass another cache_dir"
            raise CannotWrite(path=folder, found=found, expected=expected)
        ours = _URL_OF_OUR_SHARD.fullmatch(url)
        if ours:
            path = _copy_our_shard(ours[1], int(ours[2]), folder / _digits(ours[1]))
            if path is not None:
                return str(path)
        path = folder / f"{_digits(url)}-{['copy.tar', *_NAME_IN_URL.findall(url)][-1]}"
        _copy_unless_there(url, path, is_unknown_tar=True)
    except OSError as error:
        raise ReadWriteError(f"{_shown(url)} cannot be copied to {folder}: {error}") from error
    return str(path)


def _shown(url: str) -> str:
    """Return a URL for messages, without parts that may be secret: password, query, a command's words."""
    if url.startswith("pipe:"):
        return f"{url.split(maxsplit=1)[0]} ..."
    place, mark, _ = url.partition("?")
    query = "?..." if mark else ""
    return _USER.sub(r"\1", place.partition("#")[0]) + query


def _digits(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _copy_our_shard(root: str, shard_id: int, path: Path) -> Path | None:
    """Copy the manifest, idx and tar of a shard. Returns None if there is no manifest, so it is not ours."""
    folder = DataFolder(path)
    manifest_name = names.manifest_name(shard_id)
    path.mkdir(exist_ok=True)
    try:
        _copy_unless_there(f"{root}/{manifest_name}", path / manifest_name)
    except NotFound as error:
        logger.warning("reading a shard as a tar that others wrote, for want of its manifest: %s", error)
        with contextlib.suppress(OSError):
            path.rmdir()
        return None
    stamped = manifests.shard_files(manifests.read_manifest(folder, shard_id), ("idx", "tar"))
    for name, stamp in stamped:
        _copy_unless_there(f"{root}/{name}", path / name, stamp)
    return path / names.tar_name(shard_id)


def _copy_unless_there(url: str, target: Path, stamp: FileStamp | None = None, **options: Any) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode):  # such as a link that somebody planted
            raise BrokenShard(path=target, found="not a regular file", expected="a copy; remove it")
        return
    _publish(_blocks(url), target, _shown(url), stamp, **options)


def _blocks(url: str) -> Iterator[bytes]:
    """Yield the blocks of a URL. Raises NotFound if webdataset cannot read it, for any reason."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # each of gopen's openers raises its own types
        shown = _shown(url)
        reason = f": {error}"
        if shown != url:  # the error repeats the URL
            status = _EXIT_STATUS.search(str(error))
            reason = "" if status is None else status[0]
        raise NotFound(f"{shown} cannot be read by webdataset ({type(error).__name__}{reason})") from None
