"""Local copies: of a data set on a node's own disk (``stage``), and of the tars that URLs name.

``shardprep stage DATA --to DIR`` makes a data set: the loader is given its path, ``verify DIR`` reads it
whole, ``clean DIR`` removes what a killed run left. A shard's manifest is copied last, and index.json behind
all shards, so what is not whole is refused. Any number of processes may stage at once, without locks.

A URL is copied by webdataset, as the loader reads at random:

CACHE/shardprep-UID/<16 digits of the URL>-part-07.tar                a tar that others wrote
CACHE/shardprep-UID/<16 digits of the folder's URL>/shard-00000.tar   one of ours, with manifest and idx

A copy that is there is taken for what its URL holds, so a tar must never change under its URL. Processes that
copy one at a time each write it, to files of their own: keep CACHE on the node.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import re
import socket
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loader.external_tars import scan_tar
from shardprep import files
from shardprep.console import Progress, print_lines, quoted, say, short_bytes
from shardprep.errors import BrokenShard, CannotWrite, MissingShard, NotFound, ReadWriteError, UsageError
from shardprep.files import FileStamp
from shardprep.format import manifest as manifests
from shardprep.format import names
from shardprep.format.index import read_index

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
_OF_SHARDS = (names.QUARANTINE_DIR, names.IDS_DIR, names.DIGESTS_DIR)  # copied with their shards
_LEFT_OUT = ("jobs",)  # of submissions and attempts, which are of DATA
URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")  # what webdataset opens as one
_NAME_IN_URL = re.compile(r"[\w.-]+\.tar")
_URL_OF_OUR_SHARD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^?#]*)/shard-(\d{5})\.tar")
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@]*@")
_EXIT_STATUS = re.compile(r": exit -?\d+")
_BLOCK_BYTES = 1 << 20  # of a URL at once


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy a data set to a disk of this node, each shard compared with its manifest's hash. Give the "
        "loader the path of the copy. Any number of processes may stage at once; what is there is kept."
    )
    parser.add_argument("input_shards", metavar="DATA", type=Path, help="the folder of a data set")
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="folder; made if it is missing")


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where the copy is whole."""
    folder, target = args.input_shards, args.to
    if files.size_of_file(folder) is not None and not files.is_folder(folder):
        expected = "the folder of a data set; copy other tars yourself and give the loader the copies"
        raise UsageError(path=folder, found="no folder of a data set", expected=expected)
    if target.resolve().is_relative_to(folder.resolve()):
        raise UsageError.of_value("--to", str(target), f"a folder outside of {folder}")
    index = read_index(folder)
    plan_id, num_shards = index.spec.plan_id, index.spec.num_shards
    manifests.refuse_other_plan(folder, plan_id)
    manifests.refuse_found(folder, manifests.read_findings(folder, plan_id), range(num_shards))
    files.make_folder(target, parents=True)
    manifests.refuse_other_plan(target, plan_id)
    missing = [n for n in range(num_shards) if manifests.done_manifest(target, n, plan_id, {}) is None]
    num_bytes = int((index.column("tar_bytes") + index.column("idx_bytes"))[missing].sum())
    found = os.statvfs(target)
    if num_bytes > (free := found.f_bavail * found.f_frsize):
        room = f"room for {len(missing)} shards of {short_bytes(num_bytes)}"
        expected = f"{room}, or another --to; nothing was copied"
        raise CannotWrite(path=target, found=f"{short_bytes(free)} free", expected=expected)
    # Processes begin with different shards, so that nodes do not read one storage target all at once.
    first = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % max(1, len(missing))
    failures: list[BrokenShard | MissingShard] = []
    progress = Progress("staging", num_bytes)
    for path in _other_files(folder):
        _copy_file(path, target / path.relative_to(folder))
    for shard_id in [*missing[first:], *missing[:first]]:
        try:
            _copy_shard(folder, shard_id, target, progress)
        except (BrokenShard, MissingShard) as error:  # of DATA; the other shards may be whole
            failures.append(error)
            say(f"error: {error}")
    if not failures and os.path.lexists(folder / names.INDEX_NAME):  # a link to nothing is refused
        _copy_file(folder / names.INDEX_NAME, target / names.INDEX_NAME)
    num_copied, num_kept = len(missing) - len(failures), num_shards - len(missing)
    counts = f"{num_copied + num_kept} of {num_shards} shards: {num_copied} copied, {num_kept} kept"
    end = f", {len(failures)} failed" if failures else f"; load {quoted(target)}"
    print_lines(f"staged {counts}{end}")
    return failures[0].exit_code if failures else 0


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield what a data set has beside its shards and its index: the plan, the tokenizer and the like."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave out the folder, without a word

    with files.errors_named(folder):
        for place, folders, found in os.walk(folder, onerror=fail):
            if place == str(folder):
                folders[:] = [name for name in folders if name not in (*_OF_SHARDS, *_LEFT_OUT)]
                found = [name for name in found if name != names.INDEX_NAME and not name.startswith("shard-")]
            yield from (Path(place, name) for name in found if not files.TEMPORARY_NAME.fullmatch(name))


def _copy_shard(folder: Path, shard_id: int, target: Path, progress: Progress) -> None:
    """Copy a shard's files, its manifest last. Raises BrokenShard where one is not as the manifest says."""
    manifest = manifests.read_manifest(folder, shard_id)
    remedy = names.remake_command(shard_id, folder)
    for path, stamp in manifests.shard_files(folder, manifest):
        _copy_file(path, target / path.relative_to(folder), stamp, remedy)
        if stamp in (manifest.tar, manifest.idx):
            progress.add(stamp.num_bytes)
    # As it was read: DATA's may have changed since.
    files.publish_bytes(names.manifest_path(target, shard_id), manifest.to_json())


def _copy_file(path: Path, target: Path, stamp: FileStamp | None = None, remedy: str | None = None) -> None:
    files.make_folder(target.parent, parents=True)
    try:
        with files.errors_named(path), files.ReadFile(path) as file:
            starts = range(0, file.num_bytes, READ_BYTES)
            blocks = (file.read(start, min(READ_BYTES, file.num_bytes - start)) for start in starts)
            _publish(blocks, target, str(path), stamp, remedy)
    except files.NOT_THERE:
        remedy = f"shardprep verify {quoted(path.parent)}"
        raise MissingShard(f"{path} is missing", path=path, remedy=remedy) from None


def _publish(
    blocks: Iterable[bytes | bytearray],
    target: Path,
    source: str,
    stamp: FileStamp | None = None,
    remedy: str | None = None,
    is_unknown_tar: bool = False,
) -> None:
    """Write a copy, which appears whole or, where it is not as stamped or cannot be loaded, not at all."""
    with files.PublishedFile(target) as copy:
        for block in blocks:
            copy.write(memoryview(block))
        found = copy.sync()
        if stamp is not None and found != stamp:
            what, expected = f"sha256 {found.sha256[:12]}", f"{stamp.sha256[:12]}, as its manifest"
            raise BrokenShard(path=source, found=what, expected=expected, remedy=remedy)
        try:
            if is_unknown_tar:
                scan_tar(copy.temporary)
        except BrokenShard as error:
            raise type(error)(f"what webdataset read from {source} cannot be loaded: {error}") from None
        copy.publish()
    files.sync_folder(target.parent)  # its name outlasts a power cut, before a manifest's does


# Copies of what URLs name.


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """Return the local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...)."""
    if cache_dir is None:
        remedy = "cache_dir="
        expected = f"{remedy}, a folder with room for copies, as order and resume read tars at random"
        raise UsageError(path=_shown(url), found="no local file", expected=expected, remedy=remedy)
    folder = Path(os.path.abspath(cache_dir), f"shardprep-{os.getuid()}")  # noqa: PTH100  resolve follows links
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        # In /tmp others could put a link where a copy is looked for, so the folder must be the user's alone.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            found = f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}"
            expected = f"a folder of user {os.getuid()} alone; name another cache_dir"
            raise CannotWrite(path=folder, found=found, expected=expected)
        if ours := _URL_OF_OUR_SHARD.fullmatch(url):
            path = _copy_our_shard(ours[1], int(ours[2]), folder / _digits(ours[1]))
            if path is not None:
                return str(path)
        path = folder / f"{_digits(url)}-{['copy.tar', *_NAME_IN_URL.findall(url)][-1]}"
        _copy_unless_there(url, path, is_unknown_tar=True)
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


def _copy_our_shard(root: str, shard_id: int, folder: Path) -> Path | None:
    """Copy manifest, idx and tar of a shard. None where no manifest says that it is one of ours."""
    manifest = names.manifest_path(folder, shard_id)
    folder.mkdir(exist_ok=True)
    try:
        _copy_unless_there(f"{root}/{manifest.name}", manifest)
    except NotFound as error:
        logger.warning("a shard is taken for a tar that others wrote: %s", error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    stamped = manifests.shard_files(folder, manifests.read_manifest(folder, shard_id), ("idx", "tar"))
    for path, stamp in stamped:
        _copy_unless_there(f"{root}/{path.name}", path, stamp)
    return names.tar_path(folder, shard_id)


def _copy_unless_there(url: str, target: Path, stamp: FileStamp | None = None, **options: Any) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode):  # a link of that name is none of ours
            raise BrokenShard(path=target, found="no regular file", expected="a copy of ours; remove it")
        return
    _publish(_blocks(url), target, _shown(url), stamp, **options)


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
