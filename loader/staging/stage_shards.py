"""Stages shards: every one of a list ends up copied by this process, or by another that stages them, too.

No locks. A process skips what is staged, leaves to others what they are copying while that grows, and
copies the rest. Where two begin one shard at once, both copy it, and the first to finish removes what the
others have begun: that costs a copy.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from loader.staging.staged_copy import CannotReadSource, Progress, Say, ShardToStage, check_copy, copy_shard
from preprocess.shard_format import (
    BrokenShard,
    CannotWrite,
    NotFound,
    ReadWriteError,
    Refused,
    ShardprepError,
    shard_name,
    tar_path,
)
from preprocess.shard_format.published_file import STALE_AFTER_S, remove_temporaries

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
