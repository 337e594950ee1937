"""Sets the layout that a fresh, empty folder gives to new files, and reads it back. Nothing else changes any.

``apply_stripe`` is ``plan --stripe auto|none|N``; both it and ``python -m lustre apply`` call
``set_directory_layout``. A folder that holds anything is refused, and so is a file: from Lustre 2.16 on
``lfs setstripe`` can empty a file. lfs may exit 0 although it did something else, so the layout is read back
and compared (``differences``).
"""

from __future__ import annotations

import errno
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from lustre.layout import (
    FILE_SYSTEM_DEFAULT,
    Layout,
    parse_layout_options,
    read_layout,
    setstripe_options,
    size_text,
    stripe_count,
)
from lustre.lfs import LfsResult, Mount, file_system_of, find_lfs, run_lfs
from lustre.osts import count_osts, fill_lines, read_fill
from shardprep.errors import LustreError

# Of file systems made since 2023-08-25: -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32
_FSX = [(100 << 20, 1), (10 << 30, 8), (100 << 30, 16), (None, 32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """What new files got before and get now; ``notes`` are lines about stripes that were not to be had."""

    before: Layout
    after: Layout
    is_done_already: bool = False
    notes: tuple[str, ...] = ()


def check_stripe(stripe: str) -> int | None:
    """The stripe count that ``auto``, ``none`` or a number asks for; None: leave the layout as it is.

    Raises LustreUsageError for anything that lfs would refuse. 0 too is refused: lfs takes it for
    'the default', which is what ``none`` says plainly.
    """
    if stripe in {"auto", "none"}:
        return None
    return stripe_count(stripe, "--stripe", also="auto, none, ")


def apply_stripe(folder: Path, stripe: str) -> str:
    """Do what ``--stripe auto|none|N`` asks for the existing directory ``folder``; one line to print.

    ``auto`` and ``none`` change nothing and never fail; ``auto`` tells what new files will get. Off
    Lustre, or without lfs, nothing is done and the line says why. N sets the default of an empty
    folder; a folder that has it already is left alone. Raises LustreError (exit_code 73) where it
    was not done as asked, LustreUsageError (2) for an impossible N.
    """
    count = check_stripe(stripe)
    if stripe == "none":
        return "stripe none: the layout is left as it is"
    if reason := why_not(folder):
        return f"stripe {stripe}: nothing to do, {reason}"
    if count is None:
        try:
            layout = read_layout(folder)
        except LustreError as error:
            return f"stripe auto: left as it is; what new files get cannot be told: {error}"
        owner = f"; {reason}" if (reason := why_leave(layout)) else ""
        return f"stripe auto: left as it is; new files get {layout.text()}{owner}"
    wanted = parse_layout_options(count=str(count))
    assert wanted is not None
    return f"stripe {stripe}: {change_text(folder, set_directory_layout(folder, wanted))}"


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
    try:
        with os.scandir(folder) as entries:
            entry = next(entries, None)
    except OSError as error:
        raise LustreError(
            f"{folder} cannot be listed ({error.strerror}), expected an empty directory that you can read"
        ) from None
    if entry is not None:
        raise LustreError(
            f"{folder} holds {entry.name} and perhaps more, expected an empty directory: files that are "
            "there would keep their old layout. Choose a fresh folder, or keep what the site gives"
        )


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


def change_text(folder: Path, change: LayoutChange) -> str:
    """For a person, on one line: what was changed."""
    if change.is_done_already:
        text = f"{folder} has it already; new files get {change.after.text()}"
    else:
        text = f"{folder} now gives new files {change.after.text()}, before {change.before.text()}"
    return "; ".join([text, *change.notes])


def why_not(folder: Path) -> str | None:
    """Why ``lfs`` can do nothing here, or None where it can."""
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return f"{folder} is on {mount.fs_type if mount else 'an unknown file system'}, not on Lustre"
    if find_lfs() is None:
        return f"{folder} is on Lustre, but there is no lfs on PATH"
    return None


def why_leave(layout: Layout) -> str | None:
    """Why what new files get is left alone unless a user names another layout; None for Lustre's plain one.

    A composite layout, a pool, several stripes or a default of the folder's own is somebody's choice.
    """
    if [(part.end_bytes, part.stripe_count) for part in layout.components] == _FSX:
        return "this is the default of FSx for Lustre, which is right for shards"
    if layout.is_composite:
        return "the site chose this progressive layout"
    if layout.is_own:
        return "this folder has a default of its own"
    if layout.components[0].pool or layout.components[0].stripe_count != 1:
        return "the site chose this default"
    return None
