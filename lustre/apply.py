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
from dataclasses import dataclass
from pathlib import Path

from lustre.layout import (
    ALL_OSTS,
    DOM_LIMIT_BYTES,
    FILE_SYSTEM_DEFAULT,
    NO_POOL,
    Component,
    Layout,
    layout_of_file_system,
    named_layout,
    parse_stripe_count,
    read_layout,
    setstripe_options,
    size_text,
    why_leave,
)
from lustre.lfs import existing_part, kind_of, lustre_mount, run_lfs, why_not_usable
from lustre.space import count_osts, count_osts_if_told, read_targets
from shardprep.console import counted, quoted
from shardprep.errors import LustreError, UsageError

_OWN_FOLDERS = frozenset({"jobs", "logs"})  # hold no shard: a folder with these alone counts as empty
_KEEPER = re.compile(r"\.layout-\d+-[0-9a-f]{8}\.tmp")  # a file of ``_kept``, which a kill left behind
_LEAVE_BELOW = "512 GB"  # a file: OLCF's advice for the tiers of Orion, docs.olcf.ornl.gov


def set_directory_layout(
    folder: Path, wanted: Layout, *, dry_run: bool = False, existing_files_keep_theirs: bool = False
) -> str:
    """Make new files in ``folder``, which is on Lustre, get ``wanted``; ``dry_run`` checks and sets nothing.

    Returns a line about it. Raises LustreError, also where the layout is another one afterwards.
    """
    refuse_all_but_directory(folder)
    named = {part.pool for part in wanted.components} - {"", NO_POOL}
    num_osts = {pool: count_osts(folder, pool) for pool in named}
    before = read_layout(folder)
    for pool in {*wanted.pools, before.pool} - named:
        num_osts[pool] = count_osts_if_told(folder, "" if pool == NO_POOL else pool)
    notes = []
    if before.pool and NO_POOL in wanted.pools:
        notes.append(f"pool {before.pool}, which it had, is given up")
    elif before.pool and not named:  # lfs would drop it
        wanted = wanted.with_striped(pool=before.pool)
        notes.append(f"pool {before.pool} stays (--pool {NO_POOL} would give it up)")
    notes += _limit_notes(wanted, num_osts)
    if not before.is_inherited and is_as_asked(wanted, before, num_osts):
        notes += _read_back_notes(wanted, before, num_osts)
        return "; ".join([f"{folder} has it already; new files get {before.text()}", *notes])
    notes += _refuse_tiers(folder, wanted, before)
    notes += _refuse_all_but_empty(folder, existing_files_keep_theirs=existing_files_keep_theirs)
    if dry_run:
        command = shlex.join(["lfs", "setstripe", *setstripe_options(wanted), str(folder.absolute())])
        return "; ".join([f"new files get {before.text()}; would run: {command}", *notes])
    with _kept(folder):
        result = run_lfs("setstripe", *setstripe_options(wanted), folder)
    result.checked(_what_to_do(result.exit_code, result.stdout + result.stderr, folder))
    after = read_layout(folder)
    if not is_as_asked(wanted, after, num_osts):
        raise LustreError(
            f"{folder}: `lfs {result.shown}` exited 0, but new files get {after.text()}, "
            f"expected {wanted.text()}; {_why_other(wanted, after)}"
        )
    notes += _read_back_notes(wanted, after, num_osts)
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
    num_folders = sum(kind_of(folder / name) == "folder" for name in held)
    files, folders = counted(len(held) - num_folders, "file"), counted(num_folders, "folder")
    note = f"this holds for new files alone: {files} here keep their layouts, and {folders} their defaults"
    return [f"{note}; lfs migrate moves a file to another layout"]


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


def _refuse_tiers(folder: Path, wanted: Layout, before: Layout) -> list[str]:
    """Refuse to drop tiers in silence: lfs setstripe would. Where a pool is named, say what is given up."""
    lost = [f"pool {pool}" for pool in before.pools if pool and len(before.pools) > 1]
    if before.on_mdt and not wanted.on_mdt:
        lost.insert(0, f"data on the metadata server up to {size_text(before.on_mdt.end_bytes or 0)}")
    if not lost:
        return []
    if any(wanted.pools):
        kept = {f"pool {pool}" for pool in wanted.pools}
        return [f"given up: {', '.join(name for name in lost if name not in kept)}"]
    pool = pool_for_replacement(before)
    raise LustreError(
        f"{folder} gives new files tiers ({before.text()}), expected a layout that may be replaced: lfs "
        f"setstripe would drop {', '.join(lost)} without a word. Leave it as it is (--stripe auto): that is "
        f"the advice for files below {_LEAVE_BELOW}. To replace it all the same name the pool: "
        f"--stripe_pool {pool} of plan, or --pool {pool} of apply"
    )


def pool_for_replacement(layout: Layout) -> str:
    """Return the pool that a layout with tiers gives to large files, or ``none``."""
    return layout.pools[-1] if any(layout.pools) else NO_POOL


def _limit_notes(wanted: Layout, num_osts: dict[str, int]) -> list[str]:
    """What of ``wanted`` is more than there are OSTs, or than the metadata server may keep."""
    notes = []
    for part in wanted.components:
        number, end = num_osts.get(part.pool, 0), part.end_bytes or 0
        if part.is_on_mdt and end > DOM_LIMIT_BYTES:
            notes.append(
                f"the server may keep less than {size_text(end)} of a file on the metadata server, and does "
                f"not say so: its limit (lod.*.dom_stripesize) is {size_text(DOM_LIMIT_BYTES)} where nobody "
                "raised it"
            )
        elif 0 < number < part.stripe_count:
            where = f"in pool {part.pool}" if part.pool not in {"", NO_POOL} else "here"
            osts = counted(number, "OST")
            notes.append(f"asked for {part.stripe_count}, which is more than the {osts} {where}")
    return notes


def _read_back_notes(wanted: Layout, after: Layout, num_osts: dict[str, int]) -> list[str]:
    """In what the layout that is there was accepted although it is not literally the one asked for."""
    notes = []
    for want, have in zip(wanted.components, after.components, strict=True):
        if want.stripe_count == ALL_OSTS and have.stripe_count != ALL_OSTS:
            notes.append(
                f"asked for a stripe on every OST, got {counted(have.stripe_count, 'stripe')}: a site's "
                "wrapper or the file system limits the number"
            )
        elif 0 < have.stripe_count < want.stripe_count and not num_osts.get(want.pool):
            notes.append("fewer stripes than asked for; how many OSTs there are lfs does not tell")
        if have.pool and not want.pool:
            notes.append(f"pool {have.pool} was added, which nobody asked for: a site's wrapper does that")
    return list(dict.fromkeys(notes))


def _why_other(wanted: Layout, after: Layout) -> str:
    """What made another layout of the one that was asked for, as far as it shows."""
    limit = (after.on_mdt and after.on_mdt.end_bytes) or 0
    if wanted.on_mdt and after.on_mdt and limit < (wanted.on_mdt.end_bytes or 0):
        return (
            "the server cuts what lies on the metadata server at its limit (lod.*.dom_stripesize): name "
            f"--dom {limit >> 10}K or less, or ask the site"
        )
    return (
        "this lfs may be a site's wrapper with its own rules, or the site restricts layouts: "
        "ask the site, or keep what it gives"
    )


def _what_to_do(code: int, words: str, folder: Path) -> str:
    """The way on after a failed change; with how full the OSTs are where space or quota ran out."""
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


def is_as_asked(wanted: Layout, found: Layout, num_osts: dict[str, int]) -> bool:
    """Return whether ``found`` is what ``wanted`` asks for; ``num_osts`` by pool, 0 where it is unknown.

    What ``wanted`` leaves open (default count or size, no pool) is not compared. A place to start is never
    asked for: one that is found fills one OST with every file.
    """
    shapes = [
        (each.is_composite, [(part.start_bytes, part.end_bytes, part.is_on_mdt) for part in each.components])
        for each in (wanted, found)
    ]
    return shapes[0] == shapes[1] and all(
        _is_count(want.stripe_count, have, num_osts.get(want.pool))
        and want.stripe_size_bytes in {0, have.stripe_size_bytes}
        and want.pool in {"", have.pool or NO_POOL}
        and not have.place
        for want, have in zip(wanted.striped, found.striped, strict=True)
    )


def _is_count(want: int, found: Component, num_osts: int | None) -> bool:
    """As asked, or all OSTs where there are fewer; where nobody tells how many those are, fewer but not 1.

    A stripe on every OST may be found as any number above 1, since sites cap it.
    """
    have = found.stripe_count
    if want == FILE_SYSTEM_DEFAULT:
        return True
    if found.is_overstriped and have >= ALL_OSTS:  # they share OSTs
        return False
    if want == ALL_OSTS:
        return have == want or have > 1
    return have == want or (have == min(want, num_osts) if num_osts else 1 < have < want)


def start_warning(folder: Path, layout: Layout) -> str:
    """Say what a start that somebody named does to the shards; empty where the server chooses."""
    if not layout.fixed_place:
        return ""
    keep = ""
    with contextlib.suppress(LustreError):
        keep = " --existing_files_keep_theirs" * bool(names_held(folder))
    count = layout.components[-1].stripe_count or 1
    return (
        f"warning: every new file lies {layout.fixed_place}: all shards would fill the same place. To end "
        f"that: shardprep lustre apply {quoted(folder)} --count {count}{keep}"
    )


# --- plan --stripe


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeRequest:
    """What ``plan`` was asked for: ``stripe`` is auto, none, a number, or a layout such as 1G:1,-1:8.

    A number N above 1 becomes a progressive layout, one stripe up to 64 MiB and N from there on: a plain one
    of N stripes would give each small file of a data set N objects.
    """

    stripe: str = "auto"
    size: str | None = None
    pool: str | None = None

    def layout(self) -> Layout | None:
        """Return the layout that it names; None: leave what is there. Raises UsageError."""
        if self.stripe in {"auto", "none"}:
            if self.size is not None or self.pool is not None:
                raise UsageError(
                    "--stripe_size and --stripe_pool need a layout that they belong to; name it, such as "
                    f"--stripe 8 (--stripe is {self.stripe})"
                )
            return None
        text = self.stripe
        if ":" not in text:
            also = "auto, none, a layout such as 1G:1,-1:8, "
            if parse_stripe_count(text, "--stripe", also=also) != 1:
                text = f"64M:1,-1:{text}"  # the small files of a data set are far below
        try:
            return named_layout(text, size=self.size, pool=self.pool)
        except UsageError as error:
            words = re.sub("--(size|pool)\\b", r"--stripe_\1", str(error).replace("--pfl", "--stripe"))
            raise UsageError(words) from None


def stripe_line(
    folder: Path, request: StripeRequest, *, is_planned: bool = False, dry_run: bool = False
) -> str:
    """Do what is asked for the existing directory ``folder``; returns one line to print.

    ``auto`` and ``none`` change nothing and never fail. Off Lustre, without lfs, and where the folder is
    planned already, nothing is done and the line says so. Raises LustreError, UsageError.
    """
    wanted = request.layout()
    name = f"stripe {request.stripe}"
    if request.stripe == "none":
        return f"{name}: the layout is left as it is"
    try:
        if reason := why_not_usable(folder):
            return f"{name}: nothing to do, {reason}"
        if wanted is None:
            there = existing_part(folder)
            layout = read_layout(there)
            why = why_leave(layout, layout_of_file_system(there))
            return f"{name}: left as it is; {_new_files_text(folder, layout, why)}"
    except (LustreError, OSError) as error:
        if wanted is not None:
            raise
        return f"{name}: left as it is; what new files get cannot be told: {error}"
    if is_planned:
        return (
            f"{name}: left as it is, since {folder} is planned already and its files keep their layouts; "
            "plan into a fresh folder, or see `shardprep lustre apply --help`"
        )
    if dry_run and not kind_of(folder):
        return f"{name}: {folder} would be made, and would give new files {wanted.text()}"
    return f"{name}: {set_directory_layout(folder, wanted, dry_run=dry_run)}"


def _new_files_text(folder: Path, layout: Layout, why: str | None = None) -> str:
    parts = [f"new files get {layout.text()}", why, start_warning(folder, layout)]
    return "; ".join(filter(None, parts))


def layout_line(folder: Path) -> str | None:
    """Say what a task's new files get, for its log; None off Lustre and without lfs. Never raises."""
    try:
        if why_not_usable(folder):
            return None
        return f"on Lustre, {_new_files_text(folder, read_layout(folder))}"
    except (LustreError, OSError) as error:
        return f"note: which layout new files get cannot be told: {error}"
