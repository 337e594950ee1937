"""Local copies of tars behind URLs, made once by webdataset: the loader reads at random.

DIR/<16 digits of the URL>-part-07.tar                      a tar that others wrote
DIR/<16 digits of the folder's URL>/shard-00000.tar ...     a shard of ours, with its manifest and idx
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


def shown_url(url: str) -> str:
    """Return a URL for messages: without password, query and a command's words, which may be secrets."""
    if url.startswith("pipe:"):
        return f"{url.split(maxsplit=1)[0]} ..."
    place, mark, _ = url.partition("?")
    return _USER.sub(r"\1", place.partition("#")[0]) + ("?..." if mark else "")


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...).

    A copy that is there is taken for it, so a tar must never change under its URL. Processes that copy one at
    a time each write it, to files of their own: keep ``cache_dir`` on the node.
    """
    if cache_dir is None:
        raise UsageError(
            f"{shown_url(url)} is no local file; pass cache_dir=, a folder with room for the copies, as the "
            "order and the resume need tars that can be read at random",
            path=shown_url(url),
            remedy="cache_dir=",
        )
    wanted = Path(os.path.abspath(cache_dir))  # noqa: PTH100  Path.resolve would follow links
    try:
        folder = _safe_folder(wanted)
        ours = _OUR_SHARD.fullmatch(url)
        if ours is not None:
            path = _copy_our_shard(ours[1], int(ours[2]), folder / _digits(ours[1]))
            if path is not None:
                return str(path)
        names = _NAME.findall(url) or ["copy.tar"]
        path = folder / f"{_digits(url)}-{names[-1]}"
        if not _is_there(path):
            _fetch(url, path)
    except OSError as error:
        raise ReadWriteError(f"{shown_url(url)} cannot be copied to {wanted}: {error}") from error
    return str(path)


def _digits(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _copy_our_shard(root: str, shard_id: int, folder: Path) -> Path | None:
    """Copy manifest, idx and tar of a shard. None where no manifest says that it is one of ours."""
    path, manifest = tar_path(folder, shard_id), manifest_path(folder, shard_id)
    if _is_there(path) and _is_there(manifest):
        return path
    folder.mkdir(exist_ok=True)
    try:
        _fetch(f"{root}/{manifest.name}", manifest)
    except NotFound as error:
        shown = shown_url(f"{root}/{path.name}")
        logger.warning("%s is taken for a tar that others wrote: %s", shown, error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    expected = read_manifest(folder, shard_id)
    idx = idx_path(folder, shard_id)
    _fetch(f"{root}/{idx.name}", idx, expected.idx)
    _fetch(f"{root}/{path.name}", path, expected.tar)  # last: with it the copy is whole
    return path


def _safe_folder(wanted: Path) -> Path:
    """Make and return the folder where it is the user's alone, else one of the user's own inside of it.

    Elsewhere, as right under /tmp, others could put a file or a link where a copy is looked for.
    """
    wanted.mkdir(parents=True, exist_ok=True)
    if _is_own(wanted.stat()):
        return wanted
    folder = wanted / f"shardprep-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        expected = (
            f"a folder of user {os.getuid()} alone, as others can write to {wanted}; name another cache_dir"
        )
        found_mode = f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        raise CannotWrite(path=folder, found=found_mode, expected=expected)
    return folder


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _is_there(path: Path) -> bool:
    """Return whether a copy is there. A link of that name is none of ours."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise BrokenShard(path=path, found="no regular file", expected="a copy of ours; remove it")
    return True


def _fetch(url: str, target: Path, stamp: FileStamp | None = None) -> None:
    """Publish what webdataset reads from a URL: a file as stamped, or a whole tar, or a manifest.

    Raises NotFound where it cannot be read, BrokenShard where it is another one, OSError where it cannot be
    written.
    """
    try:
        with PublishedFile(target) as copy:
            for block in _blocks(url):
                copy.write(block)
            found = copy.sync()
            if stamp is None and target.suffix == ".tar":
                try:
                    scan_tar(copy.temporary)
                except BrokenShard as error:
                    what = "cannot be loaded" if isinstance(error, UnknownMember) else "is no whole tar"
                    message = f"what webdataset read from {shown_url(url)} {what}: {error}"
                    raise type(error)(message) from None
            elif stamp not in (None, found):
                raise BrokenShard(
                    path=shown_url(url),
                    found=f"{found.num_bytes} bytes of sha256 {found.sha256[:12]}",
                    expected=f"{stamp.num_bytes} bytes of {stamp.sha256[:12]}, as its manifest says",
                )
            copy.publish()
    except (CannotWrite, ReadWriteError) as error:
        raise OSError(str(error)) from error
    sync_folder(target.parent)


def _blocks(url: str) -> Iterator[bytes]:
    """Read a URL block by block. Raises NotFound, for whatever reason webdataset cannot read it."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # each of gopen's openers raises errors of its own
        shown = shown_url(url)
        if shown == url:
            raise NotFound(f"{url} cannot be read by webdataset ({type(error).__name__}: {error})") from error
        status = _EXIT_STATUS.search(str(error))  # the rest repeats the URL
        reason = f"{type(error).__name__}{status[0] if status else ''}"
        raise NotFound(f"{shown} cannot be read by webdataset ({reason})") from None
