"""Set the layout that a fresh, empty folder gives to new files, and read it back. Nothing else sets any.

A file is refused, since lfs can empty it, and so is a folder that holds anything, unless the user says that
its files keep their layouts. lfs may exit 0 although it did something else: the layout is read back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lustre.layout import (
    ALL_OSTS,
    NO_POOL,
    Component,
    Layout,
    StripeRequest,
    layout_of_file_system,
    read_layout,
    why_leave,
)
from lustre.lfs import existing_part, kind_of, lustre_mount, run_lfs, why_not_usable
from lustre.space import UNKNOWN, count_osts, count_osts_if_told, read_targets
from shardprep.console import counted, quoted
from shardprep.errors import LustreError

_OWN_FOLDERS = frozenset({"jobs", "logs"})  # hold no shard: a folder with these alone counts as empty
_KEEPER = re.compile(r"\.layout-\d+-[0-9a-f]{8}\.tmp")  # a file of ``_kept``, which a kill left behind


def set_directory_layout(
    folder: Path, request: StripeRequest, *, dry_run: bool = False, existing_files_keep_theirs: bool = False
) -> str:
    """Make new files in ``folder``, which is on Lustre, get a layout; ``dry_run`` checks and sets nothing.

    Returns a line about it. Raises LustreError, also where the layout is another one afterwards.
    """
    refuse_all_but_directory(folder)
    before = read_layout(folder)
    wanted, notes = request.layout, []
    num_osts = UNKNOWN
    if wanted:
        if lost := before.only_typed():
            raise LustreError(
                f"{folder} gives new files {before.text()}, expected a layout that may be replaced: a number "
                f"of stripes would drop {' and '.join(lost)}. Leave it as it is, or name the whole layout as "
                "for lfs setstripe: --stripe '-c 8'"
            )
        if wanted.pool:
            num_osts = count_osts(folder, wanted.pool)  # refuses a pool that is not there, or is empty
        elif before.pool and request.gives_up_pool:
            notes.append(f"pool {before.pool}, which it had, is given up")
        elif before.pool:  # lfs would drop it
            parts = tuple(replace(part, pool=before.pool) for part in wanted.components)
            wanted = replace(wanted, components=parts)
            request = replace(request, layout=wanted)
            notes.append(f"pool {before.pool} stays (--stripe N,{NO_POOL} would give it up)")
        num_osts = num_osts or count_osts_if_told(folder, wanted.pool)
        most = wanted.components[-1].stripe_count
        if 0 < num_osts < most:
            notes.append(f"asked for {most}, which is more than the {counted(num_osts, 'OST')} here")
        if not before.is_inherited and is_as_asked(wanted, before, num_osts):
            return "; ".join([f"{folder} has it already; new files get {before.text()}", *notes])
    notes += _refuse_all_but_empty(folder, existing_files_keep_theirs=existing_files_keep_theirs)
    if dry_run:
        command = shlex.join(["lfs", "setstripe", *request.words(), str(folder.absolute())])
        return "; ".join([f"new files get {before.text()}; would run: {command}", *notes])
    with _kept(folder):
        result = run_lfs("setstripe", *request.words(), folder)
    result.checked(_what_to_do(result.exit_code, result.stdout + result.stderr, folder))
    after = read_layout(folder)
    if wanted and not is_as_asked(wanted, after, num_osts):
        raise LustreError(
            f"{folder}: `lfs {result.shown}` exited 0, but new files get {after.text()}, expected "
            f"{wanted.text()}; this lfs may be a site's wrapper with its own rules, or the site restricts "
            "layouts: ask the site, or keep what it gives"
        )
    if wanted and after.pool and not wanted.pool:
        notes.append(f"pool {after.pool} was added, which nobody asked for: a site's wrapper does that")
    if warning := start_warning(folder, after):
        notes.append(warning)
    return "; ".join([f"{folder} now gives new files {after.text()}, before {before.text()}", *notes])


def refuse_all_but_directory(folder: Path) -> None:
    """Raise LustreError for a file, and for what is not there."""
    kind = kind_of(folder)
    if not kind:
        raise LustreError(
            f"{folder} is not there, expected an existing, empty directory; "
            f"create it: mkdir -p {quoted(folder)}"
        )
    if kind != "folder":
        raise LustreError(
            f"{folder} is a file, expected an existing, empty directory; a file's layout is never changed "
            "here, since lfs can empty the file. Create a fresh folder and copy the file into it"
        )


def names_held(folder: Path) -> list[str]:
    """List what makes a folder not empty: all but its jobs and logs. Raises LustreError."""
    try:
        with os.scandir(folder) as entries:
            return [
                entry.name
                for entry in entries
                if not (entry.name in _OWN_FOLDERS and entry.is_dir()) and not _KEEPER.fullmatch(entry.name)
            ]
    except OSError as error:
        raise LustreError(
            f"{folder} cannot be listed ({error.strerror}), expected an empty directory that you can read"
        ) from None


def _refuse_all_but_empty(folder: Path, *, existing_files_keep_theirs: bool) -> list[str]:
    """Refuse a folder that holds something, unless its files keep their layouts; returns a note on them."""
    held = names_held(folder)
    if not held:
        return []
    if not existing_files_keep_theirs:
        raise LustreError(
            f"{folder} holds {min(held)} and perhaps more, expected an empty directory: files that are "
            "there would keep their old layout. Choose a fresh folder, or keep what the site gives; "
            "for new files alone: shardprep lustre apply ... --existing_files_keep_theirs"
        )
    names = counted(len(held), "name")
    return [f"new files alone get it: {names} here keep their layouts; lfs migrate moves a file to another"]


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Hold a file in the folder meanwhile: after EACCES lfs 2.16 and later remove it if it is empty.

    With the folder its ACLs and project id would be gone. Raises LustreError where no file can be made.
    """
    keeper = folder / f".layout-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        keeper.touch(exist_ok=False)
    except OSError as error:
        raise LustreError(
            f"{folder} cannot be written to ({error.strerror}), expected a folder in which you can make "
            f"files; {_what_to_do(error.errno or 0, '', folder)}"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            keeper.unlink()


def _what_to_do(code: int, words: str, folder: Path) -> str:
    """Return the way on after a failed change; how full the OSTs are where space or quota ran out."""
    if code == errno.EROFS or "Read-only file system" in words:
        return "the file system is mounted read-only here: run this on a node that mounts it for writing"
    if code == errno.EDQUOT or "quota exceeded" in words:
        return f"look at `lfs quota -u $USER {lustre_mount(folder).mount_point}`"
    if code == errno.ENOSPC or "No space left" in words:
        try:
            return "; ".join(["free some space", *read_targets(folder).lines()])
        except LustreError as error:
            return f"free some space; how full the OSTs are is unknown: {error}"
    if code == errno.EREMOTEIO:
        return "an OST is inactive; look at `lfs check servers`, and try again when it is back"
    return f"the owner of {folder} can set it; or keep what the site gives"


def is_as_asked(wanted: Layout, found: Layout, num_osts: int) -> bool:
    """Return whether ``found`` is what ``wanted`` asks for; ``num_osts`` may be UNKNOWN.

    What ``wanted`` leaves open (default count or size, no pool) is not compared. A place to start is never
    asked for: one that is found fills one OST with every file.
    """
    if wanted.is_composite != found.is_composite or len(wanted.components) != len(found.components):
        return False
    if found.num_mirrors > 1:
        return False
    for want, have in zip(wanted.components, found.components, strict=True):
        if (want.start_bytes, want.end_bytes) != (have.start_bytes, have.end_bytes) or have.is_on_mdt:
            return False
        if have.place or not _is_count(want.stripe_count, have, num_osts):
            return False
        if want.stripe_size_bytes not in {0, have.stripe_size_bytes}:
            return False
        if want.pool not in {"", have.pool}:
            return False
    return True


def _is_count(want: int, found: Component, num_osts: int) -> bool:
    """Compare as asked, or all OSTs where there are fewer; where nobody tells how many, fewer but not 1.

    A stripe on every OST may be found as any number above 1, since sites cap it.
    """
    have = found.stripe_count
    if found.is_overstriped and have >= ALL_OSTS:  # they share OSTs
        return False
    if want == ALL_OSTS:
        return have == want or have > 1
    return have == want or (have == min(want, num_osts) if num_osts != UNKNOWN else 1 < have < want)


def start_warning(folder: Path, layout: Layout) -> str:
    """Say what a start that somebody named does to the shards; empty where the server chooses."""
    if not layout.fixed_place:
        return ""
    keep = ""
    with contextlib.suppress(LustreError):
        keep = " --existing_files_keep_theirs" if names_held(folder) else ""
    count = layout.components[-1].stripe_count or 1
    return (
        f"warning: every new file lies {layout.fixed_place}: all shards would fill the same place. To end "
        f"that: shardprep lustre apply {quoted(folder)} --stripe '-c {count}'{keep}"
    )


# --- plan --stripe


def stripe_line(folder: Path, stripe: str, *, is_planned: bool = False, dry_run: bool = False) -> str:
    """Do what ``plan --stripe`` asks for the directory ``folder``; returns one line to print.

    ``auto`` and ``none`` change nothing and never fail. Off Lustre, without lfs, and where the folder is
    planned already, nothing is done and the line says so. Raises LustreError, UsageError.
    """
    name = f"stripe {stripe}"
    if stripe == "none":
        return f"{name}: the layout is left as it is"
    request = None if stripe == "auto" else StripeRequest.parse(stripe)
    try:
        if reason := why_not_usable(folder):
            return f"{name}: nothing to do, {reason}"
        if request is None:
            there = existing_part(folder)
            layout = read_layout(there)
            why = why_leave(layout, layout_of_file_system(there))
            return f"{name}: left as it is; {_new_files_text(folder, layout, why)}"
    except (LustreError, OSError) as error:
        if request is not None:
            raise
        return f"{name}: left as it is; what new files get cannot be told: {error}"
    if is_planned:
        return (
            f"{name}: left as it is, since {folder} is planned already and its files keep their layouts; "
            "plan into a fresh folder, or see `shardprep lustre apply --help`"
        )
    if dry_run and not kind_of(folder):
        command = shlex.join(["lfs", "setstripe", *request.words(), str(folder.absolute())])
        return f"{name}: {folder} would be made; would run: {command}"
    return f"{name}: {set_directory_layout(folder, request, dry_run=dry_run)}"


def _new_files_text(folder: Path, layout: Layout, why: str | None = None) -> str:
    parts = [f"new files get {layout.text()}", why, start_warning(folder, layout)]
    return "; ".join(part for part in parts if part)


def layout_line(folder: Path) -> str | None:
    """Say what a task's new files get, for its log; None off Lustre and without lfs. Never raises."""
    try:
        if why_not_usable(folder):
            return None
        return f"on Lustre, {_new_files_text(folder, read_layout(folder))}"
    except (LustreError, OSError) as error:
        return f"note: which layout new files get cannot be told: {error}"
