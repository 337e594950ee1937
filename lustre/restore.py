"""Files whose bytes lie in an archive alone (HSM), as in the S3 bucket behind an FSx, and bringing them back.

A released file has only its name on Lustre: its first read waits for the archive. ``lfs hsm_restore`` queues
files and returns at once; a file is there when ``lfs hsm_state`` does not call it released any more.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lustre.lfs import FILES_PER_CALL, find_files, kind_of, run_lfs
from shardprep.console import counted, quoted
from shardprep.errors import LustreError

MAX_SHOWN_FILES = 100  # looked at by ``show``: it reads metadata and brings no file back
# The client refuses a request of 24 + 32 n bytes from MDS_MAXREQSIZE / 3 = 1,706 on: 52 files pass (LU-4639).
FILES_PER_REQUEST = 50
IDLE_ROUNDS = 30  # five minutes without progress: a request may be lost, so the rest is queued again
_POLL_S = 10.0
_RELEASED = 0x4  # HS_RELEASED of Lustre's llapi
_LOST = 0x40  # HS_LOST: the archive has no copy any more


def read_states(files: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return which of these files (absolute) are released, and why others cannot be read or brought back.

    2.17 reports the files behind a failed one, 2.15 stops there: what was not told is asked for again.
    Raises LustreError where a call tells nothing of any file.
    """
    released: list[str] = []
    failed: dict[str, str] = {}
    waiting = list(files)
    while waiting:
        asked, waiting = waiting[:FILES_PER_CALL], waiting[FILES_PER_CALL:]
        result = run_lfs("hsm_state", *asked)
        found = find_files(result.stdout, asked, r": \(0x([0-9a-f]+)\)")  # /f: (0x0000000d) released exists
        untold = [file for file in asked if file not in found]
        reasons = _reasons(result.stderr, untold) if result.exit_code else {}
        if not (found or reasons):
            result.checked()
            raise LustreError(
                f"`lfs hsm_state` of {counted(len(asked), 'file')} printed {result.stdout.strip()[:200]!r}, "
                f"expected a line of each, and of {asked[0]}; is this `lfs` a site's wrapper?"
            )
        failed |= reasons
        for file, match in found.items():
            flags = int(match[1], 16)
            if flags & _RELEASED and flags & _LOST:
                failed[file] = "released, and lost in the archive: copy it anew from its source"
            elif flags & _RELEASED:
                released.append(file)
        waiting = [file for file in untold if file not in reasons] + waiting
    return released, failed


def _reasons(errors: str, files: Sequence[str]) -> dict[str, str]:
    """Of ``can't get hsm state for /f: No such file``, and 2.17's ``... for '/f' failed: No such file``."""
    found = (re.search(rf"{re.escape(file)}(?:'| failed)*: (.+)$", errors, re.MULTILINE) for file in files)
    return {file: match[1] for file, match in zip(files, found, strict=True) if match}


def released_lines(path: Path) -> list[str]:
    """Look at a file, or at up to 100 of a folder (not below it), and warn of released ones.

    Returns nothing where all are there. Raises LustreError, OSError.
    """
    files = [os.path.realpath(path)]
    if kind_of(path) == "folder":
        with os.scandir(files[0]) as entries:
            plain = (entry.path for entry in entries if entry.is_file(follow_symlinks=False))
            files = list(itertools.islice(plain, MAX_SHOWN_FILES))
    released, failed = read_states(files)
    lines = []
    if failed:
        unknown = counted(len(failed), "file")
        lines.append(f"warning: of {unknown} it is unknown whether released: {_some(failed)}")
    if released:
        found = f"{len(released)} of {counted(len(files), 'file')} looked at are released"
        wait = "their first read waits for the archive (S3, for an FSx)"
        lines.append(f"warning: {found}: {wait}. Bring them back before the job:")
        lines.append(f"  shardprep lustre restore {quoted(path)} --wait")
    return lines


def _some(failed: dict[str, str], most: int = 3) -> str:
    shown = [f"{file} ({reason})" for file, reason in itertools.islice(failed.items(), most)]
    return ", ".join(shown) + (" and more" if len(failed) > most else "")


def restore(
    path: Path, *, wait: bool, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> str:
    """Queue every released file below ``path`` for its restore, in requests of 50; returns a line about all.

    With ``wait`` it looks again until none is released any more. What fails is said, and the rest goes on;
    LustreError is raised at the end where there was one, and at once where no call of lfs works.
    """
    failed: dict[str, str] = {}

    def fail(found: dict[str, str]) -> None:
        for file in (each for each in found if each not in failed):
            say(f"error: {file}: {found[file]}")
        failed.update(found)

    def released_of(files: Sequence[str]) -> list[str]:
        released, lost = read_states(files)
        fail(lost)
        return released

    queued: list[str] = []
    num_files = 0
    files = _files_below(os.path.realpath(path), fail)
    while asked := list(itertools.islice(files, FILES_PER_CALL)):
        queued += _queue(released_of(asked), fail, is_first=not queued)
        num_files += len(asked)
        say(f"{counted(num_files, 'file')} looked at, {len(queued)} queued for their restore")
    waiting, num_idle = queued if wait else [], 0
    while waiting:
        sleep(_POLL_S)
        before, waiting = waiting, released_of(waiting)
        num_idle = num_idle + 1 if len(waiting) == len(before) else 0
        num_back = len(queued) - len(waiting) - sum(file in failed for file in queued)
        say(f"{num_back} of {counted(len(queued), 'file')} are back")
        if num_idle and not num_idle % IDLE_ROUNDS:
            waiting = _queue(waiting, fail)
    if failed:
        others = "All others are back" if wait else "All other released files are queued"
        raise LustreError(
            f"{counted(len(failed), 'path')} below {path} could not be restored: {_some(failed)}. "
            f"{others}; run this again when that is mended"
        )
    all_files = counted(num_files, "file")
    if wait:
        return f"all {all_files} are on Lustre; {len(queued)} of them were brought back"
    if not queued:
        return f"{all_files}, none of them released: nothing to restore"
    return f"{len(queued)} of {all_files} are queued; with --wait the command ends when they are there"


def _files_below(path: str, fail: Callable[[dict[str, str]], None]) -> Iterator[str]:
    """``path`` itself, or the files of its whole tree in a fixed order; links are left alone."""
    if kind_of(Path(path)) != "folder":
        yield path
        return

    def unlisted(error: OSError) -> None:
        fail({error.filename: f"cannot be listed ({error.strerror}): what is in it may stay released"})

    for folder, folders, names in os.walk(path, onerror=unlisted):
        folders.sort()
        files = (f"{folder}/{name}" for name in sorted(names))
        yield from (file for file in files if not os.path.islink(file))  # noqa: PTH114


def _queue(
    files: Sequence[str], fail: Callable[[dict[str, str]], None], *, is_first: bool = False
) -> list[str]:
    """Queue released files; returns those that were taken.

    Raises LustreError where each file of the first request is refused alike: so would be the rest.
    """
    taken: list[str] = []
    for first in range(0, len(files), FILES_PER_REQUEST):
        request = files[first : first + FILES_PER_REQUEST]
        failed = _request(request)
        taken += [file for file in request if file not in failed]
        words = {reason.replace(file, "") for file, reason in failed.items()}
        if is_first and not taken and len(request) > 1 and len(words) == 1:
            reason = failed[request[0]]
            todo = "ask the site whether its archive works"
            if re.search("not permitted|Permission denied", reason):
                todo = "restoring may be root's alone at your site: sudo, or ask; or let the first read do it"
            raise LustreError(
                f"none of the first {len(request)} released files can be queued, the first one: "
                f"{reason}; {todo}"
            )
        fail(failed)
    return taken


def _request(files: Sequence[str]) -> dict[str, str]:
    """Send one request, or its halves where it fails; returns why files were refused, each for itself."""
    result = run_lfs("hsm_restore", *files)
    if result.exit_code == 0:
        return {}
    if len(files) == 1:
        return {files[0]: f"lfs hsm_restore {result.failure}"}
    middle = len(files) // 2
    return _request(files[:middle]) | _request(files[middle:])
