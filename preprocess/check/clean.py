"""``clean DATA``: removes what attempts that died left in a data set's folder, and nothing else.

A temporary file or folder has a name that no other program gives, ``.NAME.HOST-PID-HEX.tmp``. Whether its
attempt lives on another node cannot be known, so two kinds go alone: those of shards that are done, which no
attempt needs, and those that nobody has written to for 24 hours. An attempt that lives on for longer
without a write is lost (74), never data. Of a verified data set the logs of tasks go, too.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from shardprep.console import counted, print_lines, say, short_bytes
from shardprep.errors import CannotWrite, NotFound, ShardprepError
from shardprep.files import STALE_AFTER_S, TEMPORARY_NAME, is_link, names_in, remove_tree, size_of_file
from shardprep.format.attempts import LOGS_FOLDER
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.names import DIGESTS_DIR, IDS_DIR, INDEX_NAME, PLAN_NAME, QUARANTINE_DIR
from shardprep.format.plan import Plan, read_plan

_TASK_LOG = re.compile(r"[0-9]+_[0-9]+\.log")
_OF_SHARD = re.compile(r"\.shard-(\d{5})\.")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    parser.add_argument("--dry_run", action="store_true", help="print what would be removed, remove nothing")


def clean(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises NotFound where there is no data set, ReadWriteError where a folder cannot be listed, CannotWrite
    where some could not be looked at or removed; all others are gone by then.
    """
    folder: Path = args.output_dir
    plan = read_plan(folder)
    paths = [*_left_behind(folder)]
    if plan is None and not paths:
        found = f"no {PLAN_NAME} and no temporary file"
        raise NotFound(path=folder, found=found, expected="the folder of a data set")
    verb = "would remove" if args.dry_run else "removed"
    removed: list[int] = []  # bytes of each
    num_kept, failed = 0, ""
    for path in paths:
        try:
            stats = [path.lstat()]
            if stat.S_ISDIR(stats[0].st_mode):
                stats += [Path(place, name).lstat() for place, _, names in os.walk(path) for name in names]
            num_bytes = sum(each.st_size for each in stats if not stat.S_ISDIR(each.st_mode))
            age_s = time.time() - max(each.st_mtime for each in stats)
            if age_s < STALE_AFTER_S and path.suffix != ".log" and not _is_of_done_shard(path, folder, plan):
                num_kept += 1
                continue
            if not args.dry_run:
                remove_tree(path)
                if path.is_dir() and not path.is_symlink():  # of a folder it removes what it can
                    path.rmdir()  # and this says why not all
        except FileNotFoundError:
            continue  # another one cleans, too
        except OSError as error:
            failed = f"{path} cannot be removed: {error.strerror}"
            say(f"error: {failed}")
            continue
        removed.append(num_bytes)
        print_lines(f"{verb} {path} ({short_bytes(num_bytes)})")
    print_lines(f"{verb} {counted(len(removed), 'file')}, {short_bytes(sum(removed))}")
    if num_kept:
        print_lines(
            f"kept {num_kept} of shards that are not done, since attempts may still write them; they go when "
            "their shards are done, or 24 hours after the last write"
        )
    if failed:
        raise CannotWrite(f"{failed}; ask the owner of what is left", path=folder)
    return 0


def _left_behind(folder: Path) -> Iterator[Path]:
    """Yield temporaries in the folders of a data set and, where that is verified, the logs of its tasks."""
    for place in (folder, *(folder / name for name in (QUARANTINE_DIR, IDS_DIR, DIGESTS_DIR, "jobs"))):
        if place == folder or not is_link(place):
            yield from (place / name for name in names_in(place) if TEMPORARY_NAME.fullmatch(name))
    logs = folder / LOGS_FOLDER
    if size_of_file(folder / INDEX_NAME) is not None and not is_link(logs):
        yield from (logs / name for name in names_in(logs) if _TASK_LOG.fullmatch(name))


def _is_of_done_shard(path: Path, folder: Path, plan: Plan | None) -> bool:
    """Return whether a temporary is of a shard that is done. Else it may be what will mend the shard."""
    match = _OF_SHARD.match(path.name)
    if plan is None or match is None or int(match[1]) >= plan.num_shards:
        return False
    try:
        check_done(folder, int(match[1]), plan.plan_id, read_findings(folder, plan.plan_id))
    except (ShardprepError, OSError):
        return False
    return True
