"""``plan --stripe``: the layout that a planned folder is to have, and what is said about it.

A number N above 1 becomes a progressive layout: one stripe up to 64 MiB, N from there on. A data set has some
small files for every shard (idx, manifest, plan, tokenizer), and a plain layout of N stripes would give each
of them N objects on N OSTs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lustre.directory_layout import (
    change_text,
    dry_run_text,
    layout_of_file_system,
    set_directory_layout,
    why_leave,
    why_not,
)
from lustre.layout import Layout, read_layout
from lustre.layout_options import parse_layout_options, stripe_count
from lustre.lfs import file_system_of, kind_of
from lustre.osts import UNKNOWN, count_osts_if_told
from shardprep.errors import LustreError, LustreUsageError

SMALL_FILE_TEXT = "64M"  # up to there a file has one stripe; the small files of a data set are far below
SMALL_FILES = 5  # of a data set, beside those of each shard: plan, index, osts, and about two of a tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeWish:
    """What ``plan`` was asked for: ``stripe`` is auto, none, a number, or a layout such as 1G:1,-1:8."""

    stripe: str = "auto"
    size: str | None = None
    pool: str | None = None

    def layout(self) -> Layout | None:
        """The layout that it names; None: leave what is there. Raises LustreUsageError for what no lfs takes.

        0 too is refused: lfs takes it for 'the default', which is what ``none`` says plainly.
        """
        try:
            return self._layout()
        except LustreUsageError as error:
            text = re.sub("--(size|pool)\\b", r"--stripe_\1", str(error).replace("--pfl", "--stripe"))
            raise LustreUsageError(text) from None

    def _layout(self) -> Layout | None:
        if self.stripe in {"auto", "none"}:
            if self.size is not None or self.pool is not None:
                raise LustreUsageError(
                    "--stripe_size and --stripe_pool need a layout that they belong to; name it, such as "
                    f"--stripe 8 (--stripe is {self.stripe})"
                )
            return None
        if ":" in self.stripe:
            return parse_layout_options(pfl=self.stripe, size=self.size, pool=self.pool)
        count = stripe_count(self.stripe, "--stripe", also="auto, none, a layout such as 1G:1,-1:8, ")
        if count == 1:
            return parse_layout_options(count="1", size=self.size, pool=self.pool)
        text = f"{SMALL_FILE_TEXT}:1,-1:{count}"
        return parse_layout_options(pfl=text, size=self.size, pool=self.pool)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedShards:
    """How many shards will be written into a folder, and about how large each of their tars will be."""

    num_shards: int
    tar_bytes: int


def stripe_line(
    folder: Path,
    wish: StripeWish,
    *,
    shards: PlannedShards | None = None,
    is_planned: bool = False,
    dry_run: bool = False,
) -> str:
    """Do what ``wish`` asks for the existing directory ``folder``; one line to print.

    ``auto`` and ``none`` change nothing and never fail; ``auto`` tells what new files will get. Off
    Lustre, or without lfs, nothing is done and the line says why; likewise where the folder is planned
    already. A layout sets the default of an empty folder; a folder that has it already is left alone, and
    ``dry_run`` says what would be run. Raises LustreError (exit_code 73) where it was not done as asked,
    LustreUsageError (2) for an impossible layout.
    """
    wanted = wish.layout()
    name = f"stripe {wish.stripe}"
    if wish.stripe == "none":
        return f"{name}: the layout is left as it is"
    try:
        if reason := why_not(folder):
            return f"{name}: nothing to do, {reason}"
        if wanted is None:
            return f"{name}: left as it is; {_auto_text(folder)}"
    except (LustreError, OSError) as error:
        if wanted is not None:
            raise
        return f"{name}: left as it is; what new files get cannot be told: {error}"
    if is_planned:
        return (
            f"{name}: left as it is, since {folder} is planned already and its files keep their layouts; "
            "plan into a fresh folder, or see `python -m lustre apply --help`"
        )
    if dry_run and not kind_of(folder):
        return f"{name}: {folder} would be made, and would give new files {wanted.text()}"
    change = set_directory_layout(folder, wanted, dry_run=dry_run)
    text = (change_text if change.is_done_already or not dry_run else dry_run_text)(folder, change)
    return f"{name}: {text}{_objects_text(folder, change.after, shards)}"


def _auto_text(folder: Path) -> str:
    there = next(place for place in (folder, *folder.absolute().parents) if kind_of(place))
    layout = read_layout(there)
    reason = why_leave(layout, layout_of_file_system(there))
    text = f"new files get {layout.text()}{f'; {reason}' if reason else ''}"
    return f"{text}{start_warning(layout)}"


def start_warning(layout: Layout) -> str:
    """What a start that somebody named does to the shards; empty where the server chooses."""
    if not layout.fixed_place:
        return ""
    return (
        f"; warning: every new file lies {layout.fixed_place}: all shards would fill the same place. "
        "Another layout (--stripe N, or python -m lustre apply) ends that"
    )


def _objects_text(folder: Path, layout: Layout, shards: PlannedShards | None) -> str:
    """How many objects the files of the data set will have on the OSTs."""
    if shards is None:
        return ""
    mount = file_system_of(folder)
    pool = layout.pool
    num_osts = count_osts_if_told(folder, mount, pool) if mount else UNKNOWN
    num_small = 2 * shards.num_shards + SMALL_FILES
    large = shards.num_shards * layout.num_objects(shards.tar_bytes, num_osts)
    small = num_small * layout.num_objects(1, num_osts)
    return (
        f"; about {large + small} objects on the OSTs: {large} of {shards.num_shards} shards and {small} of "
        f"{num_small} small files"
    )


def layout_line(folder: Path) -> str | None:
    """What a task's new files get, for its log; None off Lustre and without lfs. Never raises."""
    try:
        if why_not(folder):
            return None
        layout = read_layout(folder)
    except (LustreError, OSError) as error:
        return f"note: which layout new files get cannot be told: {error}"
    return f"on Lustre, new files get {layout.text()}{start_warning(layout)}"
