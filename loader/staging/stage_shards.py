"""Stages shards: every one of a list ends up copied by this process, or by another that stages them, too.

A copy is verified: its tar and idx have the sha256 that the manifest says. There are no locks. A process
skips what is staged, leaves to others what they are copying while that grows, and copies the rest. Where two
processes begin one shard at once, both copy it, and the first to finish removes what the others have begun:
that costs a copy.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loader.staging.staged_copies import is_staged
from shardprep.atomic_files import STALE_AFTER_S, PublishedFile, remove_temporaries, sync_folder
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    MissingShard,
    NotFound,
    OtherPlan,
    ReadWriteError,
    Refused,
    ShardprepError,
)
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import idx_path, manifest_path, remake_command, shard_name, tar_path
from shardprep.regular_files import FileStamp, close_read, file_sha256, open_regular

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


STALLED_S = 30.0  # another's copy that did not grow for so long is not waited for
POLL_S = 0.2

_TEMPORARY = re.compile(r"\.(shard-\d{5})\.(?:tar|idx)\.(.+)-(\d+)-[0-9a-f]{8}\.tmp")  # of PublishedFile
_SOURCE_FAULTS = (BrokenShard, NotFound, Refused, CannotReadSource)


@dataclass(kw_only=True)
class Staged:
    """What became of a list of shards."""

    num_found: int = 0  # there before, or copied by others
    num_copied: int = 0
    failures: list[ShardprepError] = field(default_factory=list)  # a shard each, of a bad source


def stage_shards(
    shards: list[ShardToStage], staged_dir: Path, *, recheck: bool, progress: Progress, say: Say
) -> Staged:
    """Copy the shards that are not staged, in their order; a bad source is noted and the others go on.

    ``recheck`` reads what is there, too, and copies anew what differs. Raises CannotWrite where there is
    no room for all of them, before anything is copied, and CannotWrite or ReadWriteError where writing
    fails. Whatever happens, each file under a shard's name is whole; ``kill -9`` leaves temporary files
    as well, which the next run on this node removes.
    """
    staged = Staged()
    if not shards:
        return staged
    for folder in {shard.folder for shard in shards}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{folder} cannot be made: {error.strerror}; choose another --to") from None
        _remove_dead(folder)
    if recheck:
        for shard in shards:
            _recheck(shard, staged, say)
    _check_room(shards, staged_dir)
    todo = shards
    try:
        while todo:
            left = _one_pass(todo, staged_dir, staged, progress, say)
            if len(left) == len(todo):
                time.sleep(POLL_S)
                for folder in {shard.folder for shard in left}:
                    _remove_dead(folder)
            todo = left
    finally:  # a signal can come right after a file was made, before anything knows of it
        for folder in {shard.folder for shard in shards}:
            with contextlib.suppress(OSError):  # of more weight is what ended the staging
                _remove_dead(folder, and_own=True)
    return staged


def _one_pass(
    todo: list[ShardToStage], staged_dir: Path, staged: Staged, progress: Progress, say: Say
) -> list[ShardToStage]:
    """Deal with each shard once; those that others are copying are left."""
    begun = {folder: set(_temporaries(folder)) for folder in {shard.folder for shard in todo}}
    left: list[ShardToStage] = []
    for shard in todo:
        stem = shard_name(shard.shard_id)
        if shard.is_staged:
            staged.num_found += 1
            progress(shard.num_bytes)
            if stem in begun[shard.folder]:
                remove_temporaries(shard.folder, stem, older_than_s=0)
        elif _grows(_temporaries(shard.folder).get(stem, [])):
            left.append(shard)
        else:
            try:
                if copy_shard(shard, progress, say):
                    staged.num_copied += 1
                else:
                    staged.num_found += 1
            except _SOURCE_FAULTS as error:
                staged.failures.append(error)
                say(f"error: {error}")
            except (CannotWrite, ReadWriteError) as error:
                raise type(error)(f"{error}; {_room_text(todo, staged_dir)}") from None
    return left


def _recheck(shard: ShardToStage, staged: Staged, say: Say) -> None:
    """Take a copy that is not what its manifest says out of use."""
    if not shard.is_staged:
        return
    try:
        wrong = check_copy(shard)
    except _SOURCE_FAULTS as error:
        staged.failures.append(error)
        say(f"error: {error}")
        return
    if wrong:
        say(f"warning: the copy is broken, not the source: {wrong}; it is copied anew")
        path = tar_path(shard.folder, shard.shard_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ReadWriteError(f"the broken copy {path} cannot be removed: {error.strerror}") from None


def _check_room(shards: list[ShardToStage], staged_dir: Path) -> None:
    needed_bytes, free_bytes, text = _room(shards, staged_dir)
    if needed_bytes > free_bytes:
        raise CannotWrite(
            f"{text}; nothing was copied: make room, or pass --limit_bytes to stage as many as fit; "
            "the loader reads the others where they are"
        )


def _room(shards: list[ShardToStage], staged_dir: Path) -> tuple[int, int, str]:
    """Bytes of what is not yet staged, bytes free for it, and both in words.

    What unfinished copies hold counts as free: each becomes a shard or goes. The order of the three looks
    matters, as others copy meanwhile: what they finish between them must not count as needed, or twice.
    """
    found = os.statvfs(staged_dir)
    free_bytes = found.f_bavail * found.f_frsize
    for folder in {shard.folder for shard in shards}:
        for paths in _temporaries(folder).values():
            for path in paths:
                with contextlib.suppress(OSError):
                    free_bytes += path.stat().st_blocks * 512
    missing = [shard.num_bytes for shard in shards if not shard.is_staged]
    text = (
        f"{len(missing)} shards of {size_text(sum(missing))} are still to be staged, {staged_dir} has "
        f"{size_text(free_bytes)} free; what is staged stays valid"
    )
    return sum(missing), free_bytes, text


def _room_text(shards: list[ShardToStage], staged_dir: Path) -> str:
    try:
        return _room(shards, staged_dir)[2]
    except OSError as error:
        return f"what room {staged_dir} has cannot be seen ({error.strerror}); what is staged stays valid"


def size_text(num_bytes: int) -> str:
    """``24.1 GB``, decimal; MB below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def _temporaries(folder: Path) -> dict[str, list[Path]]:
    """Unfinished copies in a folder, whosever they are: ``shard-00017`` -> paths."""
    found: dict[str, list[Path]] = {}
    for entry in os.scandir(folder):
        if match := _TEMPORARY.fullmatch(entry.name):
            found.setdefault(match[1], []).append(Path(entry.path))
    return found


def _grows(paths: list[Path]) -> bool:
    """Whether one of some unfinished copies was written to lately."""
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STALLED_S:
                return True
    return False


def _remove_dead(folder: Path, *, and_own: bool = False) -> None:
    """Remove unfinished copies of processes of this node that have ended, those a day old, and one's own.

    One that lives in another PID namespace under this host's name would be taken for dead. It loses its
    copy and ends with 74; nothing wrong comes of it.
    """
    for paths in _temporaries(folder).values():
        for path in paths:
            match = _TEMPORARY.fullmatch(path.name)
            assert match is not None
            lives = Path("/proc", match[3]).exists() and not (and_own and int(match[3]) == os.getpid())
            ended = match[2] == socket.gethostname() and not lives
            with contextlib.suppress(OSError):
                if ended or time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()
