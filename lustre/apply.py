"""Set the layout that a fresh, empty folder gives to new files. Nothing else sets any.

A file is refused, since lfs can empty it, and so is a folder that holds anything: its files would keep their
layouts. lfs may exit 0 although it did something else: the layout is read back.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lustre.layout import ALL_OSTS, MAX_STRIPE_COUNT, NO_POOL, Layout, parse_stripe, read_layout
from lustre.lfs import existing_part, lustre_mount, run_lfs, why_not_usable
from lustre.space import UNKNOWN, count_osts
from shardprep.console import counted, quoted
from shardprep.errors import LustreError, ShardprepError
from shardprep.files import is_folder, names_in, size_of_file

_OWN_FOLDERS = frozenset({"jobs", "logs"})  # hold no shard: a folder with these alone counts as empty
_KEEPER = re.compile(r"\.layout-\d+-[0-9a-f]{8}\.tmp")  # a file of ``_kept``, which a kill left behind
_WAY_ON = (
    "look at `lfs df`, `lfs quota -u $USER` and `lfs check servers`; its owner can set it, on a node that "
    "mounts the file system for writing; or keep what the site gives"
)


def set_directory_layout(folder: Path, stripe: Layout | list[str], *, dry_run: bool = False) -> str:
    """Make new files in ``folder``, on Lustre, get a layout. ``dry_run`` checks and sets nothing.

    Returns a line about it. Raises LustreError, also where the layout is another one afterwards.
    """
    _refuse_all_but_directory(folder)
    before = read_layout(folder)
    notes: list[str] = []
    num_osts = UNKNOWN
    if isinstance(stripe, Layout):
        stripe = _with_pool(stripe, before, folder)
        num_osts = count_osts(folder, stripe.components[0].pool)
        if 0 < num_osts < (most := stripe.components[-1].stripe_count):
            notes.append(f"asked for {most}, which is more than the {counted(num_osts, 'OST')} here")
        if not before.is_inherited and is_as_asked(stripe, before, num_osts):
            return "; ".join([f"{folder} has it already; new files get {before.text()}", *notes])
    command = setstripe_command(folder, stripe)
    _refuse_all_but_empty(folder, command)
    if dry_run:
        return "; ".join([f"new files get {before.text()}; would run: {command}", *notes])
    with _kept(folder):
        result = run_lfs("setstripe", *options_of(stripe), folder)
    result.checked(_WAY_ON)
    after = read_layout(folder)
    if isinstance(stripe, Layout) and not is_as_asked(stripe, after, num_osts):
        raise LustreError(
            f"{folder}: `{command}` exited 0, but new files get {after.text()}, expected {stripe.text()}; "
            "this lfs may be a site's wrapper with its own rules, or the site restricts layouts: ask the "
            "site, or keep what it gives",
            path=folder,
            found=after.text(),
            expected=stripe.text(),
        )
    return "; ".join([f"{folder}: {new_files_text(folder, after)}, before {before.text()}", *notes])


def options_of(stripe: Layout | list[str]) -> list[str]:
    return stripe.options() if isinstance(stripe, Layout) else stripe


def setstripe_command(folder: Path, stripe: Layout | list[str]) -> str:
    """Return what is run, for a shell."""
    return shlex.join(["lfs", "setstripe", *options_of(stripe), str(folder.absolute())])


def _with_pool(wanted: Layout, before: Layout, folder: Path) -> Layout:
    """Return a layout by numbers with the folder's pool, which lfs would drop. Raises LustreError."""
    if not before.has_numbers_alone:
        raise LustreError(
            f"{folder} gives new files {before.text()}, expected a layout that numbers may replace: they "
            "would drop mirrors, pools and data on the metadata server without a word. Leave it as it is, or "
            "name the whole layout as for lfs setstripe: --stripe '-c 8'",
            path=folder,
            found=before.text(),
            remedy="--stripe '-c 8'",
        )
    (had,) = before.pools
    pool = wanted.components[0].pool or had
    parts = tuple(replace(part, pool="" if pool == NO_POOL else pool) for part in wanted.components)
    return replace(wanted, components=parts)


def _refuse_all_but_directory(folder: Path) -> None:
    if size_of_file(folder) is None:
        remedy = f"mkdir -p {quoted(folder)}"
        raise LustreError(f"{folder} is not there; make an empty directory", path=folder, remedy=remedy)
    if not is_folder(folder):
        raise LustreError(
            f"{folder} is a file, expected an existing, empty directory; a file's layout is never changed "
            "here, since lfs can empty the file. Create a fresh folder and copy the file into it",
            path=folder,
            found="a file",
        )


def _refuse_all_but_empty(folder: Path, command: str) -> None:
    held = [name for name in names_in(folder) if name not in _OWN_FOLDERS and not _KEEPER.fullmatch(name)]
    if held:
        raise LustreError(
            f"{folder} holds {held[0]} and perhaps more, expected an empty directory: files that are there "
            f"would keep their old layout. Choose a fresh folder; for new files alone run: {command}",
            path=folder,
            found=held[0],
            remedy=command,
        )


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Hold a file in the folder: after EACCES lfs 2.16 and later remove an empty one. Raises LustreError."""
    keeper = folder / f".layout-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        keeper.touch(exist_ok=False)
    except OSError as error:
        raise LustreError(
            f"{folder} cannot be written to ({error.strerror}), expected a folder in which you can make "
            f"files; {_WAY_ON}",
            path=folder,
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            keeper.unlink()


def is_as_asked(wanted: Layout, found: Layout, num_osts: int) -> bool:
    """Return whether ``found`` is what ``wanted`` asks for. What that leaves open is not compared.

    Fewer stripes are taken, since OSTs may be fewer and sites cap the number, but 1 only where there is one
    OST. A place to start, which fills one OST with every file, is never asked for.
    """
    if wanted.is_composite != found.is_composite or len(wanted.components) != len(found.components):
        return False
    for want, have in zip(wanted.components, found.components, strict=True):
        most = MAX_STRIPE_COUNT if want.stripe_count == ALL_OSTS else want.stripe_count
        least = 1 if num_osts == 1 else 2
        if (
            not (have.stripe_count == want.stripe_count or least <= have.stripe_count < most)
            or want.end_bytes != have.end_bytes
            or want.stripe_bytes not in {0, have.stripe_bytes}
            or want.pool not in {"", have.pool}
            or have.is_on_mdt
            or have.is_overstriped
            or have.has_fixed_place
        ):
            return False
    return True


def stripe_line(folder: Path, stripe: str, *, is_planned: bool = False, dry_run: bool = False) -> str:
    """Do what ``plan --stripe`` asks for the directory ``folder``, and return one line to print.

    ``auto`` and ``none`` change nothing and never fail. Raises LustreError, UsageError.
    """
    name = f"stripe {stripe}"
    if stripe == "none":
        return f"{name}: the layout is left as it is"
    if stripe == "auto":
        try:
            if reason := why_not_usable(folder):
                return f"{name}: nothing to do, {reason}"
            there = existing_part(folder)
            layout = read_layout(there)
            return f"{name}: left as it is; {new_files_text(there, layout)} ({origin_text(there, layout)})"
        except (ShardprepError, OSError) as error:
            return f"{name}: left as it is; what new files get cannot be told: {error}"
    wanted = parse_stripe(stripe)
    if reason := why_not_usable(folder):
        return f"{name}: nothing to do, {reason}"
    if is_planned:
        return (
            f"{name}: left as it is, since {folder} is planned already and its files keep their layouts; "
            "plan into a fresh folder, or see `shardprep lustre apply --help`"
        )
    if dry_run and size_of_file(folder) is None:
        return f"{name}: {folder} would be made; would run: {setstripe_command(folder, wanted)}"
    return f"{name}: {set_directory_layout(folder, wanted, dry_run=dry_run)}"


def origin_text(folder: Path, layout: Layout) -> str:
    """Say whose choice the layout of a folder is, as far as lfs tells."""
    if layout.is_inherited:
        return "inherited, it has no default of its own"
    with contextlib.suppress(LustreError):
        if layout == read_layout(Path(lustre_mount(folder).mount_point)):
            return "the file system's default; lfs does not tell whether the folder has it of its own, too"
    return "its own default"


def new_files_text(folder: Path, layout: Layout) -> str:
    """Say what a layout of a folder gives to new files, and what is wrong with it."""
    if not layout.has_fixed_place:
        return f"new files get {layout.text()}"
    count = layout.components[-1].stripe_count or 1
    return (
        f"warning: new files get {layout.text()}, so each begins on an OST that somebody named, and all "
        f"shards would fill the same one; to end that: lfs setstripe -c {count} {quoted(folder)}"
    )
