"""The user's ``lfs setstripe -c 8 DIR``: a default for new files, set on a fresh folder, read back."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lustre.errors import LustreError, LustreUsageError
from lustre.layout import ALL_OSTS, Layout, read_layout
from lustre.lfs import find_lfs, run_lfs
from lustre.mounts import file_system_of

MAX_STRIPE_COUNT = 2000  # lfs's own limit


def check_stripe(stripe: str) -> int | None:
    """The stripe count that ``auto``, ``none`` or a number asks for; None: leave the layout as it is.

    Raises LustreUsageError for anything that lfs would refuse. 0 too is refused: lfs takes it for
    'the default', which is what ``none`` says plainly.
    """
    if stripe in {"auto", "none"}:
        return None
    count = int(stripe) if re.fullmatch(r"-1|[0-9]{1,9}", stripe) else 0
    if not (count == ALL_OSTS or 1 <= count <= MAX_STRIPE_COUNT):
        raise LustreUsageError(
            f"--stripe is {stripe!r}, expected auto, none, a number of OSTs from 1 to {MAX_STRIPE_COUNT}, "
            "or -1 for all of them"
        )
    return count


def why_not(folder: Path) -> str | None:
    """Why ``lfs`` can do nothing here, or None where it can."""
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return f"{folder} is on {mount.fs_type if mount else 'an unknown file system'}, not on Lustre"
    if find_lfs() is None:
        return f"{folder} is on Lustre, but there is no lfs on PATH"
    return None


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
            return f"stripe auto: left as it is; new files get {read_layout(folder).text()}"
        except LustreError as error:
            return f"stripe auto: left as it is; what new files get cannot be told: {error}"
    before = read_layout(folder)
    if _num_stripes(before) == count and before.is_own:
        return f"stripe {stripe}: {folder} has it already; new files get {before.text()}"
    after = set_directory_stripe(folder, count)
    found = _num_stripes(after)
    less = f"; asked for {count}, which is more than the {found} OSTs here" if found != count else ""
    return f"stripe {stripe}: {folder} now gives new files {after.text()}, before {before.text()}{less}"


def set_directory_stripe(folder: Path, count: int) -> Layout:
    """Make new files in ``folder`` get ``count`` stripes; returns the layout read back.

    ``folder`` is an existing, empty directory on Lustre; anything else is refused before lfs runs.
    ``count`` is 1 to 2000, or -1 for all OSTs; lfs silently takes fewer where there are fewer OSTs,
    and the layout returned says so. Raises LustreError where lfs failed, or the layout is another one.
    """
    check_stripe(str(count))
    _refuse_all_but_empty_directory(folder)
    result = run_lfs(["setstripe", "-c", str(count)], folder)
    result.checked(f"the owner of {folder} can set it; or choose --stripe auto")
    after = read_layout(folder)
    found = _num_stripes(after)
    if found == count or (found is not None and found < count and found == _num_osts(folder)):
        return after
    raise LustreError(
        f"{folder}: `lfs {' '.join(result.arguments)}` exited 0, but new files get {after.text()}, expected "
        f"{count} stripes; {find_lfs()} may be a site's wrapper with its own rules: ask the site, "
        "or choose --stripe auto"
    )


def _refuse_all_but_empty_directory(folder: Path) -> None:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise LustreError(
            f"{folder} is {found}, expected an existing, empty directory; a file's layout is never "
            "changed here, since lfs can empty the file. Create a fresh folder and copy the file into it"
        )
    with os.scandir(folder) as entries:
        entry = next(entries, None)
    if entry is not None:
        raise LustreError(
            f"{folder} holds {entry.name} and perhaps more, expected an empty directory: files that are "
            "there would keep their old layout. Choose a fresh folder, or --stripe auto"
        )


def _num_stripes(layout: Layout) -> int | None:
    """The stripe count of a plain layout; None for a composite one, which has no single count."""
    return None if layout.is_composite else layout.components[0].stripe_count


def _num_osts(folder: Path) -> int:
    """OSTs of the file system of ``folder``, which is known to be Lustre (elsewhere lfs says none, and 0)."""
    output = run_lfs(["osts"], folder).checked("look at `lfs check servers`")
    return len(re.findall(r"^\d+: \S+_UUID ", output, flags=re.MULTILINE))
