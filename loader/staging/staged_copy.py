"""A verified copy of one shard: tar and idx, with the sha256 that the manifest vouches for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loader.shards.staged_folder import is_staged
from preprocess.shard_format import (
    BrokenShard,
    FileStamp,
    Manifest,
    MissingShard,
    OtherPlan,
    ReadWriteError,
    idx_path,
    manifest_path,
    read_manifest,
    remake_command,
    shard_name,
    tar_path,
)
from preprocess.shard_format.manifest import file_sha256
from preprocess.shard_format.published_file import PublishedFile, remove_temporaries, sync_folder
from preprocess.shard_format.regular_files import close_read, open_regular

READ_BYTES = 4 << 20
NUM_ATTEMPTS = 2

Say = Callable[[str], None]
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ShardToStage:
    """A shard of a data set of ours, and the folder its copy belongs in."""

    source: Path  # the data set's folder
    folder: Path
    plan_id: str
    shard_id: int
    tar_bytes: int
    idx_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of both files."""
        return self.tar_bytes + self.idx_bytes

    @property
    def is_staged(self) -> bool:
        """Whether its copy is there, by names and sizes."""
        return is_staged(self.folder, self.shard_id, self.tar_bytes, self.idx_bytes)


class CannotReadSource(ReadWriteError):
    """The data set's file cannot be read; others may be."""


def copy_shard(shard: ShardToStage, progress: Progress, say: Say) -> bool:
    """Copy a shard unless another process did meanwhile; whether the copy is this one's.

    sha256 is computed of what is read, so a GiB costs 1.3-2.1 s of CPU (one core with SHA instructions, from
    disk to disk); what is wrong is read once more. ``progress`` is told bytes as they are written.
    Leaves the whole pair, or an idx at most. Raises MissingShard, OtherPlan or BrokenShard where the
    source is wrong, CannotReadSource where it cannot be read, and CannotWrite or ReadWriteError of the copy.
    """
    manifest = _manifest(shard)
    files = ((idx_path, manifest.idx), (tar_path, manifest.tar))  # in the order of their appearance
    with contextlib.ExitStack() as held:
        copies = []
        for path_of, stamp in files:
            source = path_of(shard.source, shard.shard_id)
            target = path_of(shard.folder, shard.shard_id)
            copies.append(_verified(source, target, stamp, shard, progress, say, held))
        try:
            for copy in copies:
                copy.publish()
        except ReadWriteError:
            if shard.is_staged:  # whoever finished first removed what the others had begun
                return False
            raise
        sync_folder(shard.folder)
        remove_temporaries(shard.folder, shard_name(shard.shard_id), older_than_s=0)
    return True


def check_copy(shard: ShardToStage) -> str:
    """What is wrong with a copy that is there, by reading it whole; empty where nothing is."""
    manifest = _manifest(shard)
    for path_of, stamp in ((tar_path, manifest.tar), (idx_path, manifest.idx)):
        path = path_of(shard.folder, shard.shard_id)
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                found = file_sha256(file)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found != stamp.sha256:
            return f"{path} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}"
    return ""


def _manifest(shard: ShardToStage) -> Manifest:
    """The manifest in the data set's folder, which must be of the plan and sizes that the index has."""
    try:
        manifest = read_manifest(shard.source, shard.shard_id)
    except ReadWriteError as error:
        raise CannotReadSource(str(error)) from None
    found = manifest.spec.plan_id, manifest.tar.num_bytes, manifest.idx.num_bytes
    expected = shard.plan_id, shard.tar_bytes, shard.idx_bytes
    if found != expected:
        raise OtherPlan(
            f"{manifest_path(shard.source, shard.shard_id)} is of plan {found[0][:12]}, a tar of {found[1]} "
            f"and an idx of {found[2]} bytes; the data set's index says {expected[0][:12]}, {expected[1]} "
            f"and {expected[2]}; run: python -m preprocess verify {shard.source}"
        )
    return manifest


def _verified(
    source: Path,
    target: Path,
    stamp: FileStamp,
    shard: ShardToStage,
    progress: Progress,
    say: Say,
    held: contextlib.ExitStack,
) -> PublishedFile:
    """A synced copy under its temporary name, of the right content; ``held`` discards it."""
    seen: list[str] = []
    for attempt in range(NUM_ATTEMPTS):
        copy = PublishedFile(target)
        held.callback(copy.discard)
        try:
            for block in _blocks(source):
                copy.write(block)
                progress(len(block))
        except CannotReadSource as error:
            if attempt + 1 == NUM_ATTEMPTS:
                raise
            say(f"warning: {error}; trying once more")
        else:
            found = copy.sync()
            if found == stamp:
                return copy
            seen.append(f"{found.num_bytes} bytes of sha256 {found.sha256[:12]}")
            say(f"warning: {source} was read as {seen[-1]}, expected {stamp.sha256[:12]}")
        progress(-copy.num_bytes)
        copy.discard()
    raise BrokenShard(_blame(source, seen, stamp, shard))


def _blame(source: Path, seen: list[str], stamp: FileStamp, shard: ShardToStage) -> str:
    """Who is at fault: the file where it is read alike, else what lies between it and here."""
    expected = f"its manifest says {stamp.num_bytes} bytes of {stamp.sha256[:12]}"
    if len(seen) == NUM_ATTEMPTS and len(set(seen)) == 1:
        return (
            f"the source is broken, not the copy: {source} is {seen[0]} in {NUM_ATTEMPTS} reads, {expected}; "
            f"run: {remake_command(shard.shard_id, shard.source)}"
        )
    return (
        f"{source} is read differently each time ({', then '.join(seen)}), {expected}; the way to it or this "
        f"node's memory is at fault: try on another node, then: python -m preprocess verify {shard.source}"
    )


def _blocks(path: Path) -> Iterator[memoryview]:
    """A file in blocks of READ_BYTES; each is overwritten by the next. What was read is not kept cached."""
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; run: python -m preprocess verify {path.parent}") from None
    except OSError as error:
        raise CannotReadSource(f"{path} cannot be opened: {error.strerror}") from None
    done = 0
    try:
        while count := os.readv(handle, [buffer]):
            yield buffer[:count]
            done += count
    except OSError as error:
        raise CannotReadSource(f"{path} cannot be read at byte {done}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # a second read is of the disk then
        close_read(handle)
