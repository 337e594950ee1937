"""Files whose bytes are not on Lustre but in an archive behind it, such as the S3 bucket linked to an FSx."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import run_lfs

MAX_FILES = 100  # looked at in a folder: one call of lfs; it reads metadata and brings no file back
_RELEASED = 0x4  # HS_RELEASED of Lustre's llapi
_STATE = re.compile(r"^.*: \(0x([0-9a-f]+)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedFiles:
    """Of ``num_files`` looked at, ``num_released`` have no bytes on Lustre."""

    num_files: int
    num_released: int


def count_released(path: Path) -> ReleasedFiles:
    """Look at a file, or at up to 100 files of a folder (not below it). Raises LustreError from lfs."""
    files = [path] if path.is_file() else _some_files(path)
    if not files:
        return ReleasedFiles(num_files=0, num_released=0)
    *others, last = (str(file.absolute()) for file in files)
    output = run_lfs(["hsm_state", *others], last).checked("look at the path, and at `lfs check servers`")
    return ReleasedFiles(num_files=len(files), num_released=count_released_states(output))


def count_released_states(output: str) -> int:
    """Lines of ``lfs hsm_state`` such as ``/f: (0x0000000d) released exists archived, archive_id:1``.

    The flags are read off the number, since a file's name may hold the words.
    """
    return sum(bool(int(flags, 16) & _RELEASED) for flags in _STATE.findall(output))


def released_lines(found: ReleasedFiles, path: Path) -> list[str]:
    """A warning for a person, with the command that brings the files back; empty where all are there."""
    if not found.num_released:
        return []
    wait = "their first read waits for the archive (S3, for an FSx). Bring them back before the job:"
    names = f"find {shlex.quote(str(path))} -type f -print0"
    return [
        f"warning: {found.num_released} of {found.num_files} files looked at are released: {wait}",
        f"  {names} | xargs -0 -n 1000 lfs hsm_restore    (docs/lustre.md says how to see that it is done)",
    ]


def _some_files(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        files = (Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False))
        return list(itertools.islice(files, MAX_FILES))
