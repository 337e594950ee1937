"""``clean DATA``: removes what attempts that died left in a data set's folder, and nothing else.

A temporary file or folder has a name that no other program gives, ``.NAME.HOST-PID-HEX.tmp``. Whether its
attempt lives on another node cannot be known, so two kinds go alone: those of shards that are done, which no
attempt needs, and those that nobody has written to for 24 hours. An attempt that lives on for longer
without a write is lost (74), never data.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardprep.console import counted, short_bytes
from shardprep.errors import CannotWrite, NotFound, ShardprepError
from shardprep.files import (
    STALE_AFTER_S,
    TEMPORARY_NAME,
    is_folder,
    is_link,
    names_in,
    remove_tree,
    size_of_file,
)
from shardprep.format.attempts import LOGS_FOLDER
from shardprep.format.done import check_done, read_findings
from shardprep.format.names import DIGESTS_DIR, IDS_DIR, INDEX_NAME, QUARANTINE_DIR
from shardprep.format.plan import Plan

_SUBFOLDERS = (QUARANTINE_DIR, IDS_DIR, DIGESTS_DIR, "jobs")
_TASK_LOG = re.compile(r"[0-9]+_[0-9]+\.log")
_OF_SHARD = re.compile(r"\.shard-(\d{5})\.")


class Temporary(NamedTuple):
    """What an attempt left: a file, or a folder with all in it."""

    path: Path
    num_bytes: int
    age_s: float  # since the last write
    shard_id: int | None  # None: it is of no shard


class Cleaning(NamedTuple):
    """What goes, and what stays because its attempt may live."""

    removed: list[Temporary]
    kept: list[Temporary]


def _temporary(path: Path) -> Temporary:
    """Raises OSError, FileNotFoundError where it went meanwhile."""
    status = path.lstat()
    num_bytes, latest = status.st_size, status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        inside = [Path(place, name).lstat() for place, _, names in os.walk(path) for name in names]
        num_bytes = sum(each.st_size for each in inside)
        latest = max([latest, *(each.st_mtime for each in inside)])
    match = _OF_SHARD.match(path.name)
    return Temporary(path, num_bytes, time.time() - latest, int(match[1]) if match else None)


def clean(folder: Path, plan: Plan | None, *, dry_run: bool = False, say: Callable[[str], None]) -> Cleaning:
    """Remove the temporaries of done shards, and those that are older than 24 hours.

    Without a plan no shard is done. A shard's manifest is read only where it has a temporary. Raises NotFound
    where there is no folder, ReadWriteError where one cannot be listed, CannotWrite where some could not be
    looked at or removed; all others are gone by then.
    """
    if not is_folder(folder):
        raise NotFound(
            f"{folder} is no folder, expected that of a data set", path=folder, expected="that of a data set"
        )
    own = (folder / name for name in _SUBFOLDERS)
    places = [folder, *(path for path in own if not is_link(path))]
    paths = [place / name for place in places for name in names_in(place) if TEMPORARY_NAME.fullmatch(name)]
    removed: list[Temporary] = []
    kept: list[Temporary] = []
    # Of a verified data set also the logs of tasks, a file each.
    logs = folder / LOGS_FOLDER
    if plan and size_of_file(folder / INDEX_NAME) is not None and not is_link(logs):
        paths += [logs / name for name in names_in(logs) if _TASK_LOG.fullmatch(name)]
    is_done = functools.cache(functools.partial(_is_done, folder, plan))
    failed = ""
    for path in paths:
        try:
            item = _temporary(path)
            is_log = path.parent == logs
            if item.age_s < STALE_AFTER_S and not is_log and not is_done(item.shard_id):
                kept.append(item)
                continue
            if not dry_run:
                _remove(path)
        except FileNotFoundError:
            continue  # another one cleans, too
        except OSError as error:
            failed = failed or f"{path} cannot be removed: {error.strerror}"
            say(f"error: {path} cannot be removed: {error.strerror}")
            continue
        removed.append(item)
    if failed:
        raise CannotWrite(f"{failed}; {len(removed)} others were removed; ask the owner of what is left")
    return Cleaning(removed, kept)


def _remove(path: Path) -> None:
    remove_tree(path)
    if path.is_dir() and not path.is_symlink():  # of a folder it removes what it can
        raise OSError(errno.ENOTEMPTY, "something in it cannot be removed", str(path))


def _is_done(folder: Path, plan: Plan | None, shard_id: int | None) -> bool:
    """Whatever is wrong with a shard, its temporaries may be what will mend it."""
    if plan is None or shard_id is None or shard_id >= plan.num_shards:
        return False
    try:
        check_done(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id))
    except (ShardprepError, OSError):
        return False
    return True


def cleaning_lines(cleaning: Cleaning, *, dry_run: bool = False) -> list[str]:
    """For a person: what went, and what stays until when."""
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {item.path} ({short_bytes(item.num_bytes)})" for item in cleaning.removed]
    freed = short_bytes(sum(item.num_bytes for item in cleaning.removed))
    lines.append(f"{verb} {counted(len(cleaning.removed), 'temporary file')}, {freed}")
    if cleaning.kept:
        oldest = max(item.age_s for item in cleaning.kept) / 3600
        lines.append(
            f"kept {len(cleaning.kept)} of shards that are not done, since attempts may still write them; "
            "they go when their shards are done, or 24 hours after the last write (the oldest: "
            f"{max(0, oldest):.1f} hours)"
        )
    return lines
