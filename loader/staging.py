"""``shardprep stage DATA --to DIR``: a verified copy of a data set on a node's own disk.

The copy is a data set: the loader is given its path, ``verify DIR`` reads it whole, ``clean DIR`` removes
what a killed run left. A shard's manifest is copied last, and index.json behind all shards, so what is not
whole is refused as an incomplete data set is. Any number of processes may stage at once, without locks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from loader.find_shards import find_shards
from loader.shards import DatasetShards
from shardprep.console import Progress, print_lines, quoted, short_bytes
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    MissingShard,
    ReadWriteError,
    ShardprepError,
    UsageError,
)
from shardprep.files import (
    TEMPORARY_NAME,
    FileStamp,
    PublishedFile,
    close_read,
    make_folder,
    open_regular,
    size_of_file,
    sync_folder,
)
from shardprep.format.done import refuse_other_plan
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import INDEX_NAME, idx_path, manifest_path, remake_command, tar_path
from shardprep.signals import raise_on_stop_signals

READ_BYTES = 4 << 20
NUM_ATTEMPTS = 2
_LEFT_OUT = ("jobs",)  # of submissions and attempts, which are of DATA


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy a data set to a disk of this node, each shard compared with its manifest's hash. The copy is "
        "a data set: give the loader its path. Any number of processes may stage at once; what is there is "
        "kept."
    )
    parser.add_argument("input_shards", help="the folder of a data set")
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="folder; made if it is missing")


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where the copy is whole.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    raise_on_stop_signals("what is staged is whole")
    (source, *others) = find_shards(args.input_shards).sources
    if others or source.scanned is not None or not Path(args.input_shards).is_dir():
        raise UsageError(
            f"{args.input_shards} is no folder of a data set, and no manifest says what a copy must be; copy "
            "other tars yourself and give the loader the copies"
        )
    if args.to.resolve().is_relative_to(source.folder.resolve()):
        raise UsageError.of_value("--to", str(args.to), f"a folder outside of {source.folder}")
    make_folder(args.to, parents=True)
    refuse_other_plan(args.to, source.spec.plan_id)
    shard_ids: list[int] = source.shard_ids.tolist()
    missing = [
        num_bytes
        for shard_id, num_bytes in zip(shard_ids, (source.tar_bytes + source.idx_bytes).tolist(), strict=True)
        if size_of_file(manifest_path(args.to, shard_id)) is None
    ]
    found = os.statvfs(args.to)
    if sum(missing) > (free := found.f_bavail * found.f_frsize):
        raise CannotWrite(
            f"{len(missing)} shards of {short_bytes(sum(missing))} are still to be staged, {args.to} has "
            f"{short_bytes(free)} free; nothing was copied: make room, or choose another --to"
        )
    # Processes begin with different shards, so that nodes do not read one storage target all at once.
    first = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % len(shard_ids)
    failures: list[ShardprepError] = []
    num_copied = 0
    with Progress("staging", sum(missing)) as progress:
        for path in _other_files(source.folder):
            _copy_file(path, args.to / path.relative_to(source.folder), None, progress)
        for shard_id in [*shard_ids[first:], *shard_ids[:first]]:
            try:
                num_copied += _copy_shard(source, shard_id, args.to, progress)
            except (BrokenShard, MissingShard) as error:  # of DATA; the other shards may be whole
                failures.append(error)
                progress.say(f"error: {error}")
        if not failures and (source.folder / INDEX_NAME).exists():
            _copy_file(source.folder / INDEX_NAME, args.to / INDEX_NAME, None, progress)
    kept = len(shard_ids) - num_copied - len(failures)
    failed = f", {len(failures)} failed" if failures else f"; load {quoted(args.to)}"
    print_lines(
        f"staged {num_copied + kept} of {len(shard_ids)} shards: {num_copied} copied, {kept} kept{failed}"
    )
    return failures[0].exit_code if failures else 0


def _other_files(folder: Path) -> Iterator[Path]:
    """What a data set has beside its shards and its index: plan, tokenizer, kept ids and the like."""
    for place, folders, names in os.walk(folder):
        if place == str(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            names = [name for name in names if name != INDEX_NAME and not name.startswith("shard-")]
        yield from (Path(place, name) for name in names if not TEMPORARY_NAME.fullmatch(name))


def _copy_shard(source: DatasetShards, shard_id: int, folder: Path, progress: Progress) -> bool:
    """Copy a shard of which there is no copy yet, its manifest last; whether it was copied."""
    target = manifest_path(folder, shard_id)
    manifest: Manifest = read_manifest(source.folder, shard_id)
    sizes = (size_of_file(tar_path(folder, shard_id)), size_of_file(idx_path(folder, shard_id)))
    if size_of_file(target) is not None and sizes == (manifest.tar.num_bytes, manifest.idx.num_bytes):
        return False
    for path_of, stamp in ((tar_path, manifest.tar), (idx_path, manifest.idx)):
        path = path_of(source.folder, shard_id)
        try:
            _copy_file(path, path_of(folder, shard_id), stamp, progress)
        except BrokenShard as error:
            raise BrokenShard(
                f"{error}; run: {remake_command(shard_id, source.folder)}", path=path, found=error.found
            ) from None
    sync_folder(folder)
    _copy_file(manifest_path(source.folder, shard_id), target, None, progress)
    return True


def _copy_file(path: Path, target: Path, stamp: FileStamp | None, progress: Progress) -> None:
    """Copy a file, which appears whole or not at all; it is read twice at most where it is not as stamped."""
    make_folder(target.parent, parents=True)
    for attempt in range(NUM_ATTEMPTS):
        with PublishedFile(target) as copy:
            for block in _blocks(path):
                copy.write(block)
            found = copy.sync()
            if stamp is None or found == stamp:
                copy.publish()
                if stamp is not None:
                    progress.add(found.num_bytes)
                return
        said = f"{path} was read as {found.num_bytes} bytes of sha256 {found.sha256[:12]}, its manifest says "
        said += f"{stamp.num_bytes} of {stamp.sha256[:12]}"
        if attempt + 1 < NUM_ATTEMPTS:
            progress.say(f"warning: {said}; trying once more")
    raise BrokenShard(f"the source is broken, not the copy: {said}", path=path, found=found.num_bytes)


def _blocks(path: Path) -> Iterator[memoryview]:
    """A file in blocks of READ_BYTES; each is overwritten by the next. What was read is not kept cached."""
    buffer, done = memoryview(bytearray(READ_BYTES)), 0
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        remedy = f"shardprep verify {quoted(path.parent)}"
        raise MissingShard(f"{path} is missing; run: {remedy}", path=path, remedy=remedy) from None
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be opened: {error.strerror}", path=path) from None
    try:
        while count := os.readv(handle, [buffer]):
            yield buffer[:count]
            done += count
    except OSError as error:
        raise ReadWriteError(f"{path} cannot be read at byte {done}: {error.strerror}", path=path) from None
    finally:
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # a second read is of the disk then
        close_read(handle)
