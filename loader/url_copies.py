"""Local copies of tars behind URLs, made once by webdataset: the loader reads at random.

CACHE/shardprep-UID/<16 digits of the URL>-part-07.tar                a tar that others wrote
CACHE/shardprep-UID/<16 digits of the folder's URL>/shard-00000.tar   one of ours, with manifest and idx

A copy that is there is taken for what its URL holds, so a tar must never change under its URL. Processes that
copy one at a time each write it, to files of their own: keep CACHE on the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from loader.external_tars import scan_tar
from shardprep.errors import BrokenShard, CannotWrite, NotFound, ReadWriteError, UnknownMember, UsageError
from shardprep.files import FileStamp, PublishedFile, sync_folder
from shardprep.format.manifest import read_manifest
from shardprep.format.names import idx_path, manifest_path, tar_path

logger = logging.getLogger(__name__)
_URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")
_NAME = re.compile(r"[\w.-]+\.tar")
_OUR_SHARD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^?#]*)/shard-(\d{5})\.tar")
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@]*@")
_EXIT_STATUS = re.compile(r": exit -?\d+")
_BLOCK_BYTES = 1 << 20


def is_url(name: str) -> bool:
    """Return whether webdataset opens a name as a URL."""
    return _URL.match(name) is not None


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...)."""
    if cache_dir is None:
        raise UsageError(
            f"{_shown(url)} is no local file; pass cache_dir=, a folder with room for the copies, as the "
            "order and the resume need tars that can be read at random",
            path=_shown(url),
            remedy="cache_dir=",
        )
    folder = Path(os.path.abspath(cache_dir), f"shardprep-{os.getuid()}")  # noqa: PTH100  resolve follows links
    try:
        _make_own_folder(folder)
        ours = _OUR_SHARD.fullmatch(url)
        if ours is not None:
            path = _copy_our_shard(ours[1], int(ours[2]), folder / _digits(ours[1]))
            if path is not None:
                return str(path)
        path = folder / f"{_digits(url)}-{['copy.tar', *_NAME.findall(url)][-1]}"
        _copy(url, path)
    except OSError as error:
        raise ReadWriteError(f"{_shown(url)} cannot be copied to {folder}: {error}") from error
    return str(path)


def _shown(url: str) -> str:
    """Return a URL for messages: without password, query and a command's words, which may be secrets."""
    if url.startswith("pipe:"):
        return f"{url.split(maxsplit=1)[0]} ..."
    place, mark, _ = url.partition("?")
    return _USER.sub(r"\1", place.partition("#")[0]) + ("?..." if mark else "")


def _digits(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _make_own_folder(folder: Path) -> None:
    """Make a folder that is the user's alone: in /tmp others could put a link where a copy is looked for."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        found_mode = f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        expected = f"a folder of user {os.getuid()} alone; name another cache_dir"
        raise CannotWrite(path=folder, found=found_mode, expected=expected)


def _copy_our_shard(root: str, shard_id: int, folder: Path) -> Path | None:
    """Copy manifest, idx and tar of a shard. None where no manifest says that it is one of ours."""
    tar, idx, manifest = (path(folder, shard_id) for path in (tar_path, idx_path, manifest_path))
    folder.mkdir(exist_ok=True)
    try:
        _copy(f"{root}/{manifest.name}", manifest)
    except NotFound as error:
        shown = _shown(f"{root}/{tar.name}")
        logger.warning("%s is taken for a tar that others wrote: %s", shown, error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    expected = read_manifest(folder, shard_id)
    _copy(f"{root}/{idx.name}", idx, expected.idx)
    _copy(f"{root}/{tar.name}", tar, expected.tar)
    return tar


def _copy(url: str, target: Path, expected: FileStamp | None = None) -> None:
    """Publish what webdataset reads from a URL, if it is not there: a manifest, a whole tar, a stamped file.

    Raises NotFound where the URL cannot be read, BrokenShard where it holds something else.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode):  # a link of that name is none of ours
            raise BrokenShard(path=target, found="no regular file", expected="a copy of ours; remove it")
        return
    with PublishedFile(target) as copy:
        for block in _blocks(url):
            copy.write(block)
        found = copy.sync()
        if expected is not None and found != expected:
            what = f"sha256 {found.sha256[:12]}"
            raise BrokenShard(
                path=_shown(url), found=what, expected=f"{expected.sha256[:12]}, as its manifest"
            )
        if expected is None and target.suffix == ".tar":
            try:
                scan_tar(copy.temporary)
            except BrokenShard as error:
                what = "cannot be loaded" if isinstance(error, UnknownMember) else "is no whole tar"
                raise type(error)(f"what webdataset read from {_shown(url)} {what}: {error}") from None
        copy.publish()
    sync_folder(target.parent)


def _blocks(url: str) -> Iterator[bytes]:
    """Read a URL block by block. Raises NotFound, for whatever reason webdataset cannot read it."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # each of gopen's openers raises errors of its own
        shown, reason = _shown(url), f": {error}"
        if shown != url:  # the error repeats the URL
            status = _EXIT_STATUS.search(str(error))
            reason = "" if status is None else status[0]
        raise NotFound(f"{shown} cannot be read by webdataset ({type(error).__name__}{reason})") from None
