"""What ``show`` prints about a path: file system, layout, OSTs, released files, and the layout to choose.

A released file has no bytes on Lustre but only in an archive behind it, such as the S3 bucket that is linked
to an FSx: its first read waits for the archive. At most 100 files of a folder are looked at.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lustre.directory_layout import differences, why_leave, why_not
from lustre.layout import Layout, apply_flags, read_layout
from lustre.layout_choice import Choice, choose_layout, load_text, shards_text
from lustre.lfs import Mount, file_system_of, run_lfs
from lustre.osts import count_osts, fill_lines, inactive_lines, read_fill, read_osts
from shardprep.errors import LustreError, LustreUsageError

MAX_FILES = 100  # looked at in a folder: one call of lfs; it reads metadata and brings no file back
_RELEASED = 0x4  # HS_RELEASED of Lustre's llapi
_STATE = re.compile(r"^.*: \(0x([0-9a-f]+)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """The shards that a layout is chosen for; None where it is not known."""

    shard_bytes: int | None = None
    num_shards: int | None = None
    num_readers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no data set has, with LustreUsageError."""
        for name in ("shard_bytes", "num_shards", "num_readers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LustreUsageError(f"--{name} is {value}, expected 1 or more")

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return (self.shard_bytes, self.num_shards, self.num_readers) != (None, None, None)


def report(path: Path, size: DataSize) -> list[str]:
    """The lines about ``path``, which need not exist yet; changes nothing. Raises LustreError from lfs.

    The layout must be told; how full the OSTs are and which files are released may fail, in a line.
    """
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if (reason := why_not(path)) or mount is None:
        return [*lines, f"nothing to show: {reason}"]
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if there != path.absolute():
        lines.append(f"{path} is not there yet; it will copy the default of {there}")
    layout = read_layout(there)
    lines += [_layout_line(there, layout), *_ost_lines(there, mount)]
    try:
        lines += released_lines(count_released(there), there)
    except (LustreError, OSError) as error:
        lines.append(f"which files are released cannot be told: {error}")
    if size.is_given and there.is_dir():
        lines += _choice_lines(path, layout, size, count_osts(there, mount))
    return lines


def _layout_line(path: Path, layout: Layout) -> str:
    if not path.is_dir():
        return f"this file has {layout.text()}"
    origin = "its own default" if layout.is_own else "inherited, it has no default of its own"
    return f"new files get {layout.text()} ({origin})"


def _ost_lines(path: Path, mount: Mount) -> list[str]:
    try:
        return [*fill_lines(read_fill(mount)), *inactive_lines(read_osts(path))]
    except LustreError as error:
        return [f"how full the OSTs are cannot be told: {error}"]


def _choice_lines(path: Path, layout: Layout, size: DataSize, num_osts: int) -> list[str]:
    choice = choose_layout(shard_bytes=size.shard_bytes, num_shards=size.num_shards, num_osts=num_osts)
    lines = choice_lines(choice, size)
    leave = why_leave(layout)
    command = f"python -m lustre apply {shlex.quote(str(path))} {apply_flags(choice.layout)}"
    kept = f"but {leave}: left alone. To have it all the same, " if leave else ""
    if differences(choice.layout, layout, {"": num_osts}):
        lines.append(f"  {kept}in a fresh, empty folder: {command}")
    else:
        lines.append("  new files get that already")
    if size.num_readers is not None and size.num_shards is not None:
        text = load_text(
            layout if leave else choice.layout,
            shard_bytes=size.shard_bytes or 1,
            num_shards=size.num_shards,
            num_readers=size.num_readers,
            num_osts=num_osts,
        )
        lines.append(f"  {text}")
    return lines


def choice_lines(choice: Choice, size: DataSize) -> list[str]:
    """The choice for a person: what, why, and whose advice."""
    return [
        f"for {shards_text(size.shard_bytes, size.num_shards)}: {choice.layout.text()}",
        f"  why: {choice.why}",
        f"  source: {choice.source}",
    ]


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
