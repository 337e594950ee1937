"""Files whose bytes lie in an archive alone (HSM), as in the S3 bucket behind an FSx, and bringing them back.

A released file has only its name on Lustre: its first read waits for the archive. ``lfs hsm_restore`` queues
files and returns at once; a file is there when ``lfs hsm_state`` does not call it released any more.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import kind_of, run_lfs
from shardprep.errors import LustreError

MAX_FILES = 100  # looked at by `show`: one call of lfs; it reads metadata and brings no file back
BATCH = 1000  # names a call: AWS's advice is 1,000 to 5,000
_RELEASED = 0x4  # HS_RELEASED of Lustre's llapi
_LOST = 0x40  # HS_LOST: the archive has no copy any more
_POLL_S = 10.0
_IDLE_ROUNDS = 30  # five minutes without progress: a request may be lost, so the rest is queued again
_STATE = re.compile(r": \(0x([0-9a-f]+)\)")
_ASK = "look at the path, and at `lfs check servers`"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedFiles:
    """Of ``num_files`` looked at, ``num_released`` have no bytes on Lustre."""

    num_files: int
    num_released: int


def count_released(path: Path) -> ReleasedFiles:
    """Look at a file, or at up to 100 files of a folder (not below it). Raises LustreError from lfs."""
    path = Path(os.path.realpath(path))
    files = list(itertools.islice(_files_in(path), MAX_FILES)) if kind_of(path) == "folder" else [path]
    released, lost = released_of(files)
    return ReleasedFiles(num_files=len(files), num_released=len(released) + len(lost))


def _files_in(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def released_of(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Those without bytes on Lustre, and those whose copy in the archive is lost, too. One call of lfs."""
    if not files:
        return [], []
    *others, last = (str(file.absolute()) for file in files)
    output = run_lfs(["hsm_state", *others], last).checked(_ASK)
    states = hsm_flags(output, [*others, last])
    released = [(Path(file), flags) for file, flags in states.items() if flags & _RELEASED]
    return (
        [file for file, flags in released if not flags & _LOST],
        [file for file, flags in released if flags & _LOST],
    )


def hsm_flags(output: str, paths: Sequence[str]) -> dict[str, int]:
    """Of lines such as ``/f: (0x0000000d) released exists archived, archive_id:1``.

    The flags are read off the number behind the path, since a file's name may hold the words.
    """
    flags: dict[str, int] = {}
    lines = iter(output.split("\n"))
    for path in paths:
        for line in lines:
            if line.startswith(path) and (match := _STATE.match(line, len(path))):
                flags[path] = int(match[1], 16)
                break
        else:
            raise LustreError(
                f"`lfs hsm_state` of {len(paths)} files printed {output.strip()[:200]!r}, expected a line of "
                f"each, and of {path}; is this `lfs` a site's wrapper?"
            )
    return flags


def released_lines(found: ReleasedFiles, path: Path) -> list[str]:
    """A warning for a person, with the command that brings the files back; empty where all are there."""
    if not found.num_released:
        return []
    wait = "their first read waits for the archive (S3, for an FSx). Bring them back before the job:"
    return [
        f"warning: {found.num_released} of {found.num_files} files looked at are released: {wait}",
        f"  python -m lustre restore {shlex.quote(str(path))} --wait",
    ]


def files_below(path: Path) -> Iterator[Path]:
    """``path`` itself, or the files of its whole tree in a fixed order; links are left alone.

    Raises LustreError where a folder cannot be listed: what is in it would silently stay released.
    """
    if kind_of(path) != "folder":
        yield path
        return

    def refuse(error: OSError) -> None:
        raise LustreError(
            f"{error.filename} cannot be listed ({error.strerror}), expected folders that you can read; "
            "ask its owner, or restore the folders that you can read one by one"
        )

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            if not file.is_symlink():
                yield file


def restore(
    path: Path,
    *,
    wait: bool,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    batch: int = BATCH,
) -> str:
    """Queue every released file below ``path`` for its restore, in batches; returns a line about all.

    With ``wait`` it looks again until none is released any more, and queues those again that the archive
    gave up. Raises LustreError from lfs: what was queued by then is restored all the same.
    """
    path = Path(os.path.realpath(path))
    num_files = num_queued = 0
    waiting: list[Path] = []
    lost: list[Path] = []
    for files in _batches(files_below(path), batch):
        released, without_copy = released_of(files)
        _queue(released)
        num_files += len(files)
        num_queued += len(released)
        waiting += released
        lost += without_copy
        say(f"{num_files} files looked at, {num_queued} queued for their restore")
    if wait:
        lost += _wait(waiting, say, sleep, batch)
    if lost:
        raise LustreError(
            f"{len(lost)} of {num_files} files, {lost[0]} the first, are released and lost in the archive "
            "(lfs hsm_state), expected a copy there; copy them anew from their source. All others are "
            f"{'back' if wait else 'queued'}"
        )
    if wait:
        return f"all {num_files} files are on Lustre; {num_queued} of them were brought back"
    if not num_queued:
        return f"{num_files} files, none of them released: nothing to restore"
    return f"{num_queued} of {num_files} files are queued; with --wait the command ends when they are there"


def _queue(files: list[Path]) -> None:
    if files:
        *others, last = (str(file.absolute()) for file in files)
        what = "restoring may be root's alone at your site: sudo, or ask; or let the first read bring it back"
        run_lfs(["hsm_restore", *others], last).checked(what)


def _wait(
    waiting: list[Path], say: Callable[[str], None], sleep: Callable[[float], None], batch: int
) -> list[Path]:
    """Look until none is released any more; returns those that turned out to be lost."""
    num_all, num_idle = len(waiting), 0
    all_lost: list[Path] = []
    while waiting:
        sleep(_POLL_S)
        left: list[Path] = []
        for files in _batches(iter(waiting), batch):
            released, lost = released_of(files)
            left += released
            all_lost += lost
        num_idle = num_idle + 1 if len(left) == len(waiting) else 0
        waiting = left
        say(f"{num_all - len(waiting)} of {num_all} files are back")
        if waiting and num_idle and not num_idle % _IDLE_ROUNDS:
            for files in _batches(iter(waiting), batch):
                _queue(files)
    return all_lost


def _batches(files: Iterator[Path], size: int) -> Iterator[list[Path]]:
    while part := list(itertools.islice(files, size)):
        yield part
