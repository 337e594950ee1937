"""``shardprep stage DATA --to DIR``: a verified copy of a data set on a node's own disk.

The copy is a data set: the loader is given its path, ``verify DIR`` reads it whole, ``clean DIR`` removes
what a killed run left. A shard's manifest is copied last, and index.json behind all shards, so what is not
whole is refused as an incomplete data set is. Any number of processes may stage at once, without locks.
"""

from __future__ import annotations

import argparse
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from shardprep.console import Progress, print_lines, quoted, say, short_bytes
from shardprep.errors import BrokenShard, CannotWrite, MissingShard, ShardprepError, UsageError
from shardprep.files import (
    NOT_THERE,
    TEMPORARY_NAME,
    FileStamp,
    PublishedFile,
    ReadFile,
    errors_named,
    is_folder,
    make_folder,
    publish_bytes,
    size_of_file,
    sync_folder,
)
from shardprep.format.index import read_index
from shardprep.format.manifest import (
    done_manifest,
    read_findings,
    read_manifest,
    refuse_found,
    refuse_other_plan,
    shard_files,
)
from shardprep.format.names import (
    DIGESTS_DIR,
    IDS_DIR,
    INDEX_NAME,
    QUARANTINE_DIR,
    manifest_path,
    remake_command,
)

READ_BYTES = 4 << 20
_OF_SHARDS = (QUARANTINE_DIR, IDS_DIR, DIGESTS_DIR)  # copied with their shards
_LEFT_OUT = ("jobs",)  # of submissions and attempts, which are of DATA


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy a data set to a disk of this node, each shard compared with its manifest's hash. The copy is "
        "a data set: give the loader its path. Any number of processes may stage at once; what is there is "
        "kept."
    )
    parser.add_argument("input_shards", metavar="DATA", type=Path, help="the folder of a data set")
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="folder; made if it is missing")


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where the copy is whole.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    folder, target = args.input_shards, args.to
    if size_of_file(folder) is not None and not is_folder(folder):
        expected = "the folder of a data set; copy other tars yourself and give the loader the copies"
        raise UsageError(path=folder, found="no folder of a data set", expected=expected)
    if target.resolve().is_relative_to(folder.resolve()):
        raise UsageError.of_value("--to", str(target), f"a folder outside of {folder}")
    index = read_index(folder)
    plan_id, num_shards = index.spec.plan_id, index.spec.num_shards
    refuse_other_plan(folder, plan_id)
    refuse_found(folder, read_findings(folder, plan_id), range(num_shards))
    make_folder(target, parents=True)
    refuse_other_plan(target, plan_id)
    missing = [each for each in range(num_shards) if done_manifest(target, each, plan_id, {}) is None]
    num_bytes = int((index.column("tar_bytes") + index.column("idx_bytes"))[missing].sum())
    found = os.statvfs(target)
    if num_bytes > (free := found.f_bavail * found.f_frsize):
        room = f"room for {len(missing)} shards of {short_bytes(num_bytes)}"
        expected = f"{room}, or another --to; nothing was copied"
        raise CannotWrite(path=target, found=f"{short_bytes(free)} free", expected=expected)
    # Processes begin with different shards, so that nodes do not read one storage target all at once.
    first = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % max(1, len(missing))
    failures: list[ShardprepError] = []
    progress = Progress("staging", num_bytes)
    for path in _other_files(folder):
        _copy_file(path, target / path.relative_to(folder))
    for shard_id in [*missing[first:], *missing[:first]]:
        try:
            _copy_shard(folder, shard_id, target, progress)
        except (BrokenShard, MissingShard) as error:  # of DATA; the other shards may be whole
            failures.append(error)
            say(f"error: {error}")
    if not failures and os.path.lexists(folder / INDEX_NAME):  # a link to nothing is refused
        _copy_file(folder / INDEX_NAME, target / INDEX_NAME)
    num_copied, num_kept = len(missing) - len(failures), num_shards - len(missing)
    failed = f", {len(failures)} failed" if failures else f"; load {quoted(target)}"
    print_lines(
        f"staged {num_copied + num_kept} of {num_shards} shards: {num_copied} copied, {num_kept} kept{failed}"
    )
    return failures[0].exit_code if failures else 0


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield what a data set has beside its shards and its index: the plan, the tokenizer and the like."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave out the folder, without a word

    with errors_named(folder):
        for place, folders, names in os.walk(folder, onerror=fail):
            if place == str(folder):
                folders[:] = [name for name in folders if name not in (*_OF_SHARDS, *_LEFT_OUT)]
                names = [name for name in names if name != INDEX_NAME and not name.startswith("shard-")]
            yield from (Path(place, name) for name in names if not TEMPORARY_NAME.fullmatch(name))


def _copy_shard(folder: Path, shard_id: int, target: Path, progress: Progress) -> None:
    """Copy a shard's files, its manifest last. Raises BrokenShard where one is not as the manifest says."""
    manifest = read_manifest(folder, shard_id)
    for path, stamp in shard_files(folder, manifest):
        found = _copy_file(path, target / path.relative_to(folder), stamp)
        if found != stamp:
            expected, remedy = stamp.sha256[:12], remake_command(shard_id, folder)
            raise BrokenShard(
                path=path, found=f"sha256 {found.sha256[:12]}", expected=expected, remedy=remedy
            )
        if stamp in (manifest.tar, manifest.idx):
            progress.add(stamp.num_bytes)
    # As it was read: DATA's may have changed since.
    publish_bytes(manifest_path(target, shard_id), manifest.to_json())


def _copy_file(path: Path, target: Path, stamp: FileStamp | None = None) -> FileStamp:
    """Copy a file, which appears whole or, where it is not as stamped, not at all; returns its stamp."""
    make_folder(target.parent, parents=True)
    try:
        with errors_named(path), ReadFile(path) as file, PublishedFile(target) as copy:
            for offset in range(0, file.num_bytes, READ_BYTES):
                copy.write(memoryview(file.read(offset, min(READ_BYTES, file.num_bytes - offset))))
            found = copy.sync()
            if stamp is None or found == stamp:
                copy.publish()
                sync_folder(target.parent)  # its name outlasts a power cut, before a manifest's does
            return found
    except NOT_THERE:
        remedy = f"shardprep verify {quoted(path.parent)}"
        raise MissingShard(f"{path} is missing", path=path, remedy=remedy) from None
