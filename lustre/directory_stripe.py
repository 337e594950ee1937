"""``plan --stripe auto|none|N``: the user's ``lfs setstripe -c 8 DIR``, on a fresh folder and read back."""

from __future__ import annotations

from pathlib import Path

from lustre.directory_layout import LayoutChange, set_directory_layout, why_not
from lustre.errors import LustreError
from lustre.layout import Layout, read_layout
from lustre.wanted_layout import parse_layout_options, stripe_count


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


def change_text(folder: Path, change: LayoutChange) -> str:
    """For a person, on one line: what was changed."""
    if change.is_done_already:
        text = f"{folder} has it already; new files get {change.after.text()}"
    else:
        text = f"{folder} now gives new files {change.after.text()}, before {change.before.text()}"
    return "; ".join([text, *change.notes])


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


# Of file systems made since 2023-08-25: -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32
_FSX = [(100 << 20, 1), (10 << 30, 8), (100 << 30, 16), (None, 32)]
