"""What ``show`` prints about a path: file system, layout, OSTs, released files, and the layout to choose."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from lustre.directory_layout import differences, why_not
from lustre.directory_stripe import why_leave
from lustre.errors import LustreError, LustreUsageError
from lustre.layout import Layout, read_layout
from lustre.layout_choice import Choice, choose_layout, load_text, shards_text
from lustre.mounts import Mount, file_system_of
from lustre.osts import count_osts, fill_lines, inactive_lines, read_fill, read_osts
from lustre.released_files import count_released, released_lines
from lustre.wanted_layout import apply_flags


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
