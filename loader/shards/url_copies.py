"""Tars that are no local files: copied once, by webdataset, to where the loader can read at random.

    DIR/<16 digits of the URL>-part-07.tar                      an external tar
    DIR/<16 digits of the folder's URL>/shard-00000.tar ...     a shard of ours, with its manifest and idx

So a shard of ours is one wherever it came from: it has the same fingerprint, and a run may go on with it.
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

from loader.shards.tar_samples import scan_tar
from shardprep.atomic_files import PublishedFile, sync_folder
from shardprep.errors import BrokenShard, CannotWrite, NotFound, ReadWriteError, UnknownMember, UsageError
from shardprep.format.manifest import read_manifest
from shardprep.format.names import idx_path, manifest_path, tar_path
from shardprep.regular_files import FileStamp

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.-]+\.tar")
_OUR_SHARD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^?#]*)/shard-(\d{5})\.tar")
_BLOCK_BYTES = 1 << 20


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """The local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...).

    A copy that is there is taken for it, so a tar must never change under its URL. Two processes that
    copy one at a time both write it, each to a file of its own, and rename: keep ``cache_dir`` on the
    node. In one that others can write to, or own, a folder of the user's own is made. Raises UsageError
    without a ``cache_dir``, NotFound, BrokenShard, CannotWrite, ReadWriteError.
    """
    if cache_dir is None:
        raise UsageError(
            f"{url} is no local file; pass cache_dir=, a folder with room for the copies, as the order "
            "and the resume need tars that can be read at random"
        )
    wanted = Path(os.path.abspath(cache_dir))  # noqa: PTH100
    try:
        folder = _safe_folder(wanted)
        ours = _OUR_SHARD.fullmatch(url)
        if ours and (path := _our_copy(ours[1], int(ours[2]), folder / _stem(ours[1]))) is not None:
            return str(path)
        names = _NAME.findall(url)
        path = folder / f"{_stem(url)}-{names[-1] if names else 'copy.tar'}"
        if not _is_there(path):
            with _fetched(url, path) as (copy, _):
                _check_tar(url, copy.temporary)
                copy.publish()
    except OSError as error:
        raise ReadWriteError(f"{url} cannot be copied to {wanted}: {error}") from error
    return str(path)


def _our_copy(root: str, shard_id: int, folder: Path) -> Path | None:
    """The copy of a shard of ours, the tar last; None where no manifest says that it is one."""
    path = tar_path(folder, shard_id)
    if _is_there(path) and _is_there(manifest_path(folder, shard_id)):
        return path
    folder.mkdir(exist_ok=True)
    target = manifest_path(folder, shard_id)
    try:
        with _fetched(f"{root}/{target.name}", target) as (copy, _):
            copy.publish()
    except NotFound as error:
        logger.warning("%s/%s is taken for an external tar: %s", root, path.name, error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    manifest = read_manifest(folder, shard_id)
    for target, stamp in ((idx_path(folder, shard_id), manifest.idx), (path, manifest.tar)):
        with _fetched(f"{root}/{target.name}", target) as (copy, found):
            if found != stamp:
                raise BrokenShard(
                    f"what webdataset read from {root}/{target.name} has {found.num_bytes} bytes of sha256 "
                    f"{found.sha256[:12]}, its manifest says {stamp.num_bytes} of {stamp.sha256[:12]}; put "
                    "the shard's three files there anew, and try again"
                )
            copy.publish()
    return path


def _safe_folder(wanted: Path) -> Path:
    """The folder itself where it is the user's alone, else one of the user's own inside of it.

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
        raise CannotWrite(
            f"{folder} is no folder of user {os.getuid()} alone (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}), and others can write to {wanted}; name another cache_dir"
        )
    return folder


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _is_there(path: Path) -> bool:
    """Whether a copy is there; a link of that name is none of ours."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise BrokenShard(f"{path} is no regular file, so no copy of ours; remove it, and try again")
    return True


def _stem(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _fetched(url: str, target: Path) -> Iterator[tuple[PublishedFile, FileStamp]]:
    """What webdataset reads from a URL, synced under a temporary name; gone in the end unless published.

    Raises NotFound where it cannot be read, OSError where it cannot be written.
    """
    try:
        copy = PublishedFile(target)
        try:
            for block in _blocks(url):
                copy.write(block)
            yield copy, copy.sync()
        finally:
            copy.discard()
    except (CannotWrite, ReadWriteError) as error:
        raise OSError(str(error)) from error
    sync_folder(target.parent)


def _blocks(url: str) -> Iterator[bytes]:
    """Blocks of what a URL gives. Raises NotFound, for whatever reason webdataset cannot read it."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # each of gopen's openers raises errors of its own
        raise NotFound(f"{url} cannot be read by webdataset ({type(error).__name__}: {error})") from error


def _check_tar(url: str, path: Path) -> None:
    try:
        scan_tar(path)
    except UnknownMember as error:
        raise UnknownMember(f"what webdataset read from {url} cannot be loaded: {error}") from None
    except BrokenShard as error:
        raise BrokenShard(f"what webdataset read from {url} is no whole tar: {error}") from None
