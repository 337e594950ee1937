"""Sets the layout of new files in a fresh, empty folder and reads it back: the one place that changes any."""

from __future__ import annotations

import errno
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from lustre.byte_sizes import size_text
from lustre.errors import LustreError
from lustre.layout import FILE_SYSTEM_DEFAULT, Layout, read_layout
from lustre.lfs import LfsResult, find_lfs, run_lfs
from lustre.mounts import Mount, file_system_of
from lustre.osts import count_osts, fill_lines, read_fill
from lustre.wanted_layout import setstripe_options


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """What new files got before and get now; ``notes`` are lines about stripes that were not to be had."""

    before: Layout
    after: Layout
    is_done_already: bool = False
    notes: tuple[str, ...] = ()


def why_not(folder: Path) -> str | None:
    """Why ``lfs`` can do nothing here, or None where it can."""
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return f"{folder} is on {mount.fs_type if mount else 'an unknown file system'}, not on Lustre"
    if find_lfs() is None:
        return f"{folder} is on Lustre, but there is no lfs on PATH"
    return None


def set_directory_layout(folder: Path, wanted: Layout, *, dry_run: bool = False) -> LayoutChange:
    """Make new files in ``folder``, which is on Lustre, get ``wanted``; ``dry_run`` checks and sets nothing.

    ``folder`` is an existing, empty directory; anything else is refused before lfs is asked to change
    it, unless it has the layout already. lfs silently takes fewer stripes where there are fewer OSTs;
    the notes tell. Raises LustreError (exit_code 73) where lfs failed, or the layout is another one.
    """
    _refuse_all_but_directory(folder)
    num_osts = {part.pool: 0 for part in wanted.components if part.pattern != "mdt"}
    mount = file_system_of(folder)
    assert mount is not None
    num_osts = {pool: count_osts(folder, mount, pool) for pool in num_osts}
    notes = tuple(_clamp_notes(wanted, num_osts))
    before = read_layout(folder)
    if before.is_own and not differences(wanted, before, num_osts):
        return LayoutChange(before=before, after=before, is_done_already=True, notes=notes)
    _refuse_all_but_empty(folder)
    if dry_run:
        return LayoutChange(before=before, after=wanted, notes=notes)
    result = run_lfs(["setstripe", *setstripe_options(wanted)], folder)
    result.checked(_what_to_do(result, folder, mount))
    after = read_layout(folder)
    if found := differences(wanted, after, num_osts):
        raise LustreError(
            f"{folder}: `lfs {' '.join(result.arguments)}` exited 0, but new files get {after.text()}, "
            f"expected {wanted.text()} ({'; '.join(found)}); {find_lfs()} may be a site's wrapper with its "
            "own rules, or the site restricts layouts: ask the site, or keep what it gives"
        )
    return LayoutChange(before=before, after=after, notes=notes)


def differences(wanted: Layout, found: Layout, num_osts: dict[str, int]) -> list[str]:
    """In what ``found`` is not as ``wanted``, component by component; empty where it is.

    What ``wanted`` leaves open (the file system's default count or size, no pool) is not compared. A
    count above the OSTs there are (``num_osts``, by pool) may be found as asked, or as all of them.
    """
    if (wanted.is_composite, len(wanted.components)) != (found.is_composite, len(found.components)):
        return [f"{len(found.components)} component(s), expected {len(wanted.components)}"]
    lines = []
    for number, (want, have) in enumerate(zip(wanted.components, found.components, strict=True), start=1):
        name = f"component {number}: " if wanted.is_composite else ""
        if (want.start_bytes, want.end_bytes) != (have.start_bytes, have.end_bytes):
            lines.append(
                f"{name}bytes {have.start_bytes} to {have.end_bytes}, "
                f"expected {want.start_bytes} to {want.end_bytes}"
            )
        if (want.pattern == "mdt") != (have.pattern == "mdt"):
            lines.append(f"{name}pattern {have.pattern or 'none'}, expected {want.pattern}")
        if want.pattern == "mdt":
            continue
        counts = {want.stripe_count, min(want.stripe_count, num_osts.get(want.pool) or want.stripe_count)}
        if want.stripe_count != FILE_SYSTEM_DEFAULT and have.stripe_count not in counts:
            lines.append(f"{name}{have.stripe_count} stripes, expected {want.stripe_count}")
        if want.stripe_size_bytes not in {0, have.stripe_size_bytes}:
            sizes = f"{size_text(have.stripe_size_bytes)}, expected {size_text(want.stripe_size_bytes)}"
            lines.append(f"{name}stripes of {sizes}")
        if want.pool not in {"", have.pool}:
            lines.append(f"{name}pool {have.pool or 'none'}, expected {want.pool}")
    return lines


def _clamp_notes(wanted: Layout, num_osts: dict[str, int]) -> list[str]:
    notes = []
    for part in wanted.components:
        number = num_osts.get(part.pool, 0)
        if 0 < number < part.stripe_count and part.pattern != "mdt":
            where = f"in pool {part.pool}" if part.pool else "here"
            notes.append(f"asked for {part.stripe_count}, which is more than the {number} OSTs {where}")
    return notes


def _what_to_do(result: LfsResult, folder: Path, mount: Mount) -> str:
    """The way on after a failed change; with how full the OSTs are where space or quota ran out."""
    words = result.stdout + result.stderr
    if result.exit_code == errno.EDQUOT or "quota exceeded" in words:
        return f"look at `lfs quota -u $USER {mount.mount_point}`"
    if result.exit_code == errno.ENOSPC or "No space left" in words:
        try:
            return "; ".join(["free some space", *fill_lines(read_fill(mount))])
        except LustreError as error:
            return f"free some space; how full the OSTs are cannot be told: {error}"
    if result.exit_code == errno.EREMOTEIO:
        return "an OST is inactive; look at `lfs check servers`, and try again when it is back"
    return f"the owner of {folder} can set it; or keep what the site gives"


def _refuse_all_but_directory(folder: Path) -> None:
    if folder.is_dir():
        return
    if not folder.exists():
        raise LustreError(
            f"{folder} is not there, expected an existing, empty directory; "
            f"create it: mkdir -p {shlex.quote(str(folder))}"
        )
    raise LustreError(
        f"{folder} is a file, expected an existing, empty directory; a file's layout is never changed "
        "here, since lfs can empty the file. Create a fresh folder and copy the file into it"
    )


def _refuse_all_but_empty(folder: Path) -> None:
    with os.scandir(folder) as entries:
        entry = next(entries, None)
    if entry is not None:
        raise LustreError(
            f"{folder} holds {entry.name} and perhaps more, expected an empty directory: files that are "
            "there would keep their old layout. Choose a fresh folder, or keep what the site gives"
        )
