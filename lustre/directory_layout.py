"""Sets the layout that a fresh, empty folder gives to new files, and reads it back. Nothing else changes any.

Both ``plan --stripe`` and ``python -m lustre apply`` call ``set_directory_layout``. A file is refused: from
Lustre 2.16 on ``lfs setstripe`` can empty it. A folder that holds anything is refused, too, unless the user
says that its files keep their layouts. lfs may exit 0 although it did something else, so the layout is read
back and compared (``differences``).
"""

from __future__ import annotations

import errno
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from lustre.layout import ALL_OSTS, FILE_SYSTEM_DEFAULT, Component, Layout, read_layout, size_text
from lustre.layout_options import DOM_LIMIT_BYTES, NO_POOL, setstripe_options
from lustre.lfs import LfsResult, Mount, file_system_of, find_lfs, kind_of, run_lfs
from lustre.osts import count_osts, count_osts_if_told, fill_lines, read_fill
from shardprep.errors import LustreError

# Of file systems made since 2023-08-25: -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32
_FSX = [(100 << 20, 1), (10 << 30, 8), (100 << 30, 16), (None, 32)]
OWN_FOLDERS = frozenset({"jobs", "logs"})  # hold no shard: a folder with these alone counts as empty


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """What new files got before and get now; ``notes`` are lines about what else follows."""

    before: Layout
    after: Layout
    is_done_already: bool = False
    notes: tuple[str, ...] = ()


def set_directory_layout(
    folder: Path, wanted: Layout, *, dry_run: bool = False, existing_files_keep_theirs: bool = False
) -> LayoutChange:
    """Make new files in ``folder``, which is on Lustre, get ``wanted``; ``dry_run`` checks and sets nothing.

    ``folder`` is an existing directory, and empty unless ``existing_files_keep_theirs``; anything else is
    refused before lfs is asked to change it, unless it has the layout already. A pool that it has stays
    where ``wanted`` names none: lfs alone would drop it. lfs silently takes fewer stripes where there are
    fewer OSTs; the notes tell. Raises LustreError (exit_code 73) where lfs failed, or the layout is
    another one.
    """
    _refuse_all_but_directory(folder)
    mount = file_system_of(folder)
    assert mount is not None
    named = {part.pool for part in wanted.components if part.pool not in {"", NO_POOL}}
    num_osts = {pool: count_osts(folder, mount, pool) for pool in named}
    before = read_layout(folder)
    wanted, notes = _with_pool(wanted, before)
    num_osts |= {
        pool: count_osts_if_told(folder, mount, "" if pool == NO_POOL else pool)
        for pool in {part.pool for part in wanted.components if not part.is_on_mdt} - named
    }
    notes += [*_clamp_notes(wanted, num_osts), *_dom_notes(wanted)]
    if not before.is_inherited and not differences(wanted, before, num_osts):
        return LayoutChange(before=before, after=before, is_done_already=True, notes=tuple(notes))
    held = _refuse_all_but_empty(folder, existing_files_keep_theirs=existing_files_keep_theirs)
    notes += _kept_notes(folder, held)
    if dry_run:
        return LayoutChange(before=before, after=wanted, notes=tuple(notes))
    result = run_lfs(["setstripe", *setstripe_options(wanted)], folder)
    if result.exit_code:
        _tell_if_gone(folder, result)
        result.checked(_what_to_do(result, folder, mount))
    after = read_layout(folder)
    if found := differences(wanted, after, num_osts):
        raise LustreError(
            f"{folder}: `lfs {' '.join(result.arguments)}` exited 0, but new files get {after.text()}, "
            f"expected {wanted.text()} ({'; '.join(found)}); {_why_other(wanted, after)}"
        )
    for want, have in zip(wanted.components, after.components, strict=True):
        if 0 < have.stripe_count < want.stripe_count and not num_osts[want.pool]:
            notes.append("fewer stripes than asked for; how many OSTs there are lfs does not tell")
    return LayoutChange(before=before, after=after, notes=tuple(notes))


def _refuse_all_but_directory(folder: Path) -> None:
    kind = kind_of(folder)
    if kind == "folder":
        return
    if not kind:
        raise LustreError(
            f"{folder} is not there, expected an existing, empty directory; "
            f"create it: mkdir -p {shlex.quote(str(folder))}"
        )
    raise LustreError(
        f"{folder} is a file, expected an existing, empty directory; a file's layout is never changed "
        "here, since lfs can empty the file. Create a fresh folder and copy the file into it"
    )


def _refuse_all_but_empty(folder: Path, *, existing_files_keep_theirs: bool) -> list[str]:
    """Names in the folder; more than those of its jobs and logs are refused unless files keep theirs."""
    try:
        with os.scandir(folder) as entries:
            held = [entry.name for entry in entries if not (entry.name in OWN_FOLDERS and entry.is_dir())]
    except OSError as error:
        raise LustreError(
            f"{folder} cannot be listed ({error.strerror}), expected an empty directory that you can read"
        ) from None
    if held and not existing_files_keep_theirs:
        raise LustreError(
            f"{folder} holds {min(held)} and perhaps more, expected an empty directory: files that are "
            "there would keep their old layout. Choose a fresh folder, or keep what the site gives; "
            "for new files alone: python -m lustre apply ... --existing_files_keep_theirs"
        )
    return held


def _kept_notes(folder: Path, held: list[str]) -> list[str]:
    if not held:
        return []
    num_folders = sum(kind_of(folder / name) == "folder" for name in held)
    line = (
        f"this holds for new files alone: {len(held) - num_folders} file(s) here keep their layouts, and "
        f"{num_folders} folder(s) their defaults; lfs migrate moves a file to another layout"
    )
    return [line]


def _with_pool(wanted: Layout, before: Layout) -> tuple[Layout, list[str]]:
    """``wanted`` with the folder's pool where it names none, and a line about it."""
    pools = {part.pool for part in wanted.components if not part.is_on_mdt}
    if not before.pool or pools - {"", NO_POOL}:
        return wanted, []
    if NO_POOL in pools:
        return wanted, [f"pool {before.pool}, which it had, is given up"]
    parts = [part if part.is_on_mdt else replace(part, pool=before.pool) for part in wanted.components]
    kept = replace(wanted, components=tuple(parts))
    return kept, [f"pool {before.pool} stays (--pool {NO_POOL} would give it up)"]


def _clamp_notes(wanted: Layout, num_osts: dict[str, int]) -> list[str]:
    notes = []
    for part in wanted.components:
        number = num_osts.get(part.pool, 0)
        if 0 < number < part.stripe_count and not part.is_on_mdt:
            where = f"in pool {part.pool}" if part.pool not in {"", NO_POOL} else "here"
            notes.append(f"asked for {part.stripe_count}, which is more than the {number} OSTs {where}")
    return notes


def _dom_notes(wanted: Layout) -> list[str]:
    end = wanted.components[0].end_bytes
    if not wanted.components[0].is_on_mdt or end is None or end <= DOM_LIMIT_BYTES:
        return []
    line = (
        f"the server may keep less than {size_text(end)} of a file on the metadata server, and does not say "
        f"so: its limit (lod.*.dom_stripesize) is {size_text(DOM_LIMIT_BYTES)} where nobody raised it"
    )
    return [line]


def _why_other(wanted: Layout, after: Layout) -> str:
    """What made another layout of the one that was asked for, as far as it shows."""
    want, have = wanted.components[0], after.components[0]
    if want.is_on_mdt and have.is_on_mdt and (have.end_bytes or 0) < (want.end_bytes or 0):
        return (
            f"the server cuts what lies on the metadata server at its limit (lod.*.dom_stripesize): name "
            f"--dom {(have.end_bytes or 0) >> 10}K or less, or ask the site"
        )
    return (
        f"{find_lfs()} may be a site's wrapper with its own rules, or the site restricts layouts: "
        "ask the site, or keep what it gives"
    )


def _tell_if_gone(folder: Path, result: LfsResult) -> None:
    """From 2.16 on lfs removes an empty directory where the server answered EACCES to setstripe."""
    if not kind_of(folder):
        raise LustreError(
            f"{folder} is gone: `lfs {result.shown}` {result.failure}, and then removed the empty folder, "
            f"expected to leave it; create it again (mkdir {shlex.quote(str(folder))}), and keep what the "
            "site gives, or let its owner set the layout"
        )


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
    count above the OSTs there are (``num_osts``, by pool) may be found as asked, or as all of them. A place
    to start is never asked for: one that is found fills one OST with every file.
    """
    if len(wanted.mirrors) != len(found.mirrors):
        return [f"{len(found.mirrors)} mirrors, expected {len(wanted.mirrors)}"]
    if (wanted.is_composite, len(wanted.components)) != (found.is_composite, len(found.components)):
        return [f"{len(found.components)} component(s), expected {len(wanted.components)}"]
    lines = []
    for number, (want, have) in enumerate(zip(wanted.components, found.components, strict=True), start=1):
        name = f"component {number}: " if wanted.is_composite else ""
        lines += [f"{name}{words}" for words in _component_differences(want, have, num_osts)]
    return lines


def _component_differences(want: Component, have: Component, num_osts: dict[str, int]) -> list[str]:
    lines = []
    if (want.start_bytes, want.end_bytes) != (have.start_bytes, have.end_bytes):
        lines.append(
            f"bytes {have.start_bytes} to {have.end_bytes}, expected {want.start_bytes} to {want.end_bytes}"
        )
    if want.is_on_mdt != have.is_on_mdt:
        lines.append(f"pattern {have.pattern or 'none'}, expected {want.pattern}")
    if want.is_on_mdt:
        return lines
    if have.extension_bytes:
        lines.append("it grows piece by piece (SEL), expected a fixed component")
    if want.stripe_count != FILE_SYSTEM_DEFAULT and not _is_count(want, have, num_osts.get(want.pool)):
        lines.append(f"{have.stripe_count} stripes, expected {want.stripe_count}")
    if have.is_overstriped and want.stripe_count != FILE_SYSTEM_DEFAULT and have.stripe_count >= ALL_OSTS:
        lines.append("stripes that may share an OST (overstriped), expected one per OST")
    if want.stripe_size_bytes not in {0, have.stripe_size_bytes}:
        lines.append(
            f"stripes of {size_text(have.stripe_size_bytes)}, expected {size_text(want.stripe_size_bytes)}"
        )
    if have.place:
        lines.append(f"every file {have.place}, expected a place that the server chooses")
    pool = "" if want.pool == NO_POOL else want.pool
    if have.pool != pool and want.pool:
        lines.append(f"pool {have.pool or 'none'}, expected {pool or 'none'}")
    return lines


def _is_count(want: Component, have: Component, num_osts: int | None) -> bool:
    """As asked, or all OSTs where there are fewer; where nobody tells how many those are, fewer but not 1."""
    if have.stripe_count == want.stripe_count or not num_osts:
        return have.stripe_count == want.stripe_count or 1 < have.stripe_count < want.stripe_count
    return have.stripe_count == min(want.stripe_count, num_osts)


def change_text(folder: Path, change: LayoutChange) -> str:
    """For a person, on one line: what was changed."""
    if change.is_done_already:
        text = f"{folder} has it already; new files get {change.after.text()}"
    else:
        text = f"{folder} now gives new files {change.after.text()}, before {change.before.text()}"
    return "; ".join([text, *change.notes])


def dry_run_text(folder: Path, change: LayoutChange) -> str:
    """For a person, on one line: what would be changed, and by which command."""
    command = shlex.join(["lfs", "setstripe", *setstripe_options(change.after), str(folder.absolute())])
    return "; ".join([f"new files get {change.before.text()}; would run: {command}", *change.notes])


def why_not(folder: Path) -> str | None:
    """Why ``lfs`` can do nothing here, or None where it can."""
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return f"{folder} is on {mount.fs_type if mount else 'an unknown file system'}, not on Lustre"
    if find_lfs() is None:
        return f"{folder} is on Lustre, but there is no lfs on PATH"
    return None


def why_leave(layout: Layout, of_file_system: Layout | None = None) -> str | None:
    """Why what new files get is left alone unless a user names another layout; None for Lustre's plain one.

    A composite layout, a pool, several stripes, a start or a default of the folder's own is somebody's
    choice; whose, shows where the file system's root has the same (``of_file_system``).
    """
    if [(part.end_bytes, part.stripe_count) for part in layout.components] == _FSX:
        return "this is the default of FSx for Lustre, which is right for shards"
    who = "the site" if layout == of_file_system else "somebody"
    if layout.is_composite:
        kind = "mirrored layout" if len(layout.mirrors) > 1 else "progressive layout"
        return f"{who} chose this {kind}"
    if not layout.is_inherited and layout != of_file_system:
        return "this folder has a default of its own"
    part = layout.components[0]
    if part.pool or part.stripe_count != 1 or part.place:
        return "the site chose this default"
    return None


def layout_of_file_system(folder: Path) -> Layout | None:
    """What the root of the file system gives to new files; None where that cannot be read."""
    mount = file_system_of(folder)
    try:
        return read_layout(Path(mount.mount_point)) if mount else None
    except LustreError:
        return None
