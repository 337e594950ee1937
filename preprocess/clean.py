"""The command ``clean``: remove what dead attempts left in a data set's folder.

It cannot know whether an attempt on another node still writes a temporary file. So it removes only files of
shards that are done, which no attempt needs, and files that were not written to for 24 hours. An attempt that
pauses for longer fails (74), but no data is lost. It also removes logs of a verified data set.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import stat
import time
from pathlib import Path

from shardprep import errors, publishing
from shardprep.console import counted, print_lines, say, short_bytes
from shardprep.format import done, names
from shardprep.format.data_folder import LOGS_FOLDER, SUBFOLDERS, DataFolder
from shardprep.format.plan import read_plan

_TASK_LOG = re.compile(r"[0-9]+_[0-9]+\.log")
_OF_SHARD = re.compile(r"\.shard-(\d{5})\.")


def clean_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    parser.add_argument("--dry_run", action="store_true", help="print what would be removed, remove nothing")


def clean(args: argparse.Namespace) -> int:
    """Remove what dead attempts left in a data set's folder, and nothing else. Return the exit code.

    Raises NotFound, ReadWriteError, or CannotWrite if some could not be removed after all others were.
    """
    folder = DataFolder(args.output_dir)
    plan = read_plan(folder)
    # Find temporary files in all folders and, if the data set is verified, the logs of its tasks.
    removable = folder.temporaries(SUBFOLDERS)
    if folder.size_of(names.INDEX_NAME) is not None:
        with contextlib.suppress(errors.BrokenShard):  # a link
            logs = filter(_TASK_LOG.fullmatch, folder.names(LOGS_FOLDER))
            removable += [f"{LOGS_FOLDER}/{name}" for name in logs]
    if plan is None and not removable:
        found = f"no {names.PLAN_NAME} and no temporary file"
        raise errors.NotFound(path=folder, found=found, expected="the folder of a data set")
    verb = "would remove" if args.dry_run else "removed"
    removed: list[int] = []  # bytes of each path
    num_kept = 0
    failed = ""
    for name in removable:
        path = folder.path_of(name)
        try:
            num_bytes, newest = _bytes_and_newest(folder, name)
            # If the shard is not done, an attempt may still be writing the file.
            match = _OF_SHARD.match(path.name)
            is_done = False
            if plan is not None and match is not None and int(match[1]) < plan.num_shards:
                with contextlib.suppress(errors.ShardprepError, OSError):
                    is_done = done.done_manifest(folder, int(match[1]), plan.plan_id) is not None
            is_log = path.suffix == ".log"
            if time.time() - newest < publishing.STALE_AFTER_S and not is_log and not is_done:
                num_kept += 1
                continue
            if not args.dry_run:
                remove = folder.remove if is_log else folder.remove_temporary
                remove(name)
        except FileNotFoundError:
            continue  # another process removed it
        except (OSError, errors.ReadWriteError, errors.BrokenShard) as error:
            why = error.strerror if isinstance(error, OSError) else error.found
            failed = f"{path} cannot be removed: {why}"
            say(f"error: {failed}")
            continue
        removed.append(num_bytes)
        print_lines(f"{verb} {path} ({short_bytes(num_bytes)})")
    print_lines(f"{verb} {counted(len(removed), 'file')}, {short_bytes(sum(removed))}")
    if num_kept:
        when = "run this again once these are done, or 24 hours after the last write"
        print_lines(f"kept {num_kept} of shards that are not done, as attempts may still write them; {when}")
    if failed:
        raise errors.CannotWrite(f"{failed}; ask the owner to remove it", path=folder)
    return 0


def _bytes_and_newest(folder: DataFolder, name: str) -> tuple[int, float]:
    """Return the size of a file, or of all files in a folder, and when one was written last, since 1970.

    Raises FileNotFoundError, and OSError.
    """
    status = folder.status_of(name)
    if status is None:
        raise FileNotFoundError(name)
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size, status.st_mtime
    num_bytes = 0
    newest = status.st_mtime
    for inside in folder.names_below(name):
        status = folder.status_of(inside)
        if status is not None:
            num_bytes += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            newest = max(newest, status.st_mtime)
    return num_bytes, newest
