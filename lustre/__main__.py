"""``python -m lustre``: show the layout that new files get, and apply a layout to a folder."""

from __future__ import annotations

if __name__ == "__main__":
    from shardprep import begin_command

    begin_command()

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lustre.layout as layouts
from lustre.lfs import existing_part, file_system_of, why_not_usable
from lustre.targets import count_osts, read_targets
from shardprep.command_line import Command, Program, given_words
from shardprep.console import counted, print_lines, quoted
from shardprep.errors import LustreError, NotFound, ShardprepError
from shardprep.files import is_folder, names_in, size_of_file

MAX_LOOKED_AT = 64  # finished shards, spread evenly; each one takes a call of lfs
_SHARD = re.compile(r"shard-\d{5}\.tar")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 wrong usage, 66 no such path, 73 if lfs fails."""
    return PROGRAM.run(given_words(argv))


def show(args: argparse.Namespace) -> int:
    """Print the layout of new files, how full the servers are, and the OSTs of shards.

    Raises NotFound, and LustreError if the layout is unknown. Other unknown facts are printed as such.
    """
    path = args.path
    if size_of_file(path) is None:
        remedy = f"shardprep lustre show {quoted(existing_part(path))}"
        found = "does not exist; a new folder will inherit the layout of its parent"
        raise NotFound(path=path, found=found, remedy=remedy)
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    reason = why_not_usable(path)
    if reason:
        print_lines(*lines, f"nothing to show: {reason}")
        return 0
    layout = layouts.read_layout(path)
    if is_folder(path):
        lines.append(f"{layouts.new_files_text(path, layout)} ({layouts.origin_text(path, layout)})")
    else:
        lines.append(f"this file has {layout.text()}")
    try:
        lines += read_targets(path).lines()
    except LustreError as error:
        lines.append(f"how full OSTs and MDTs are is unknown: {error}")
    try:
        lines += _shard_lines(path)
    except ShardprepError as error:
        lines.append(f"the OSTs of its shards are unknown: {error}")
    print_lines(*lines)
    return 0


def _shard_lines(folder: Path) -> list[str]:
    """Ask lfs for the OSTs of finished tars in a folder itself, and warn if one OST has most of them."""
    names = [name for name in names_in(folder) if _SHARD.fullmatch(name)] if is_folder(folder) else []
    if not names:
        return []
    looked_at = names[:: -(-len(names) // MAX_LOOKED_AT)]
    texts = Counter[str]()
    osts = Counter[int]()
    for name in looked_at:
        layout = layouts.read_layout(folder / name)
        # Leave out the OSTs, which differ between files.
        parts = tuple(replace(part, start_ost=layouts.ANY_OST, osts=()) for part in layout.components)
        texts[replace(layout, components=parts).text()] += 1
        of_file: set[int] = set()
        for part in layout.components:
            of_file.update(part.osts)
        osts.update(of_file)
    shards = f"{counted(len(looked_at), 'shard')} looked at"
    lines = [f"{number} of {shards} have {text}" for text, number in texts.most_common()]
    for ost, number in osts.most_common(1):
        lines.append(f"they are on {counted(len(osts), 'OST')}; OST {ost} has most: {number}")
        # Lustre spreads files over OSTs, so a fixed start is the likely cause.
        if number > max(4, 2 * len(looked_at) / 3) and count_osts(folder) > 2:
            how = "`lfs migrate -c 1 FILE` moves a shard while nothing reads it"
            lines.append(f"warning: OST {ost} will serve most reads: was a start OST set (-i, -o)? {how}")
    return lines


def apply(args: argparse.Namespace) -> int:
    """Set the layout of a fresh, empty folder."""
    stripe = layouts.parse_stripe(args.stripe)
    reason = why_not_usable(args.path)
    if reason:
        print_lines(f"nothing to do: {reason}")
        return 0
    print_lines(layouts.set_directory_layout(args.path, stripe, dry_run=args.dry_run))
    return 0


def _show_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder or a file; need not be on Lustre")


def _apply_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Never changes a file, nor a folder that contains anything but jobs/ and logs/."
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder; need not be on Lustre")
    text = (
        "N[,SIZE][,POOL]: one stripe for the first 64 MiB of a file and N stripes after them (-1: on every "
        "OST), such as 8,4M; or options of lfs setstripe, such as '-c 8' (required)"
    )
    parser.add_argument("--stripe", metavar="LAYOUT", required=True, help=text)
    parser.add_argument("--dry_run", action="store_true", help="check everything, set nothing")


PROGRAM = Program(
    name="python -m lustre",
    description="Layouts of folders on Lustre.",
    dashed_values=("--stripe",),
    commands={
        "show": Command(
            summary="file system, layout and OSTs of a path; changes nothing", add_flags=_show_flags, run=show
        ),
        "apply": Command(
            summary="set the layout of new files in a fresh, empty folder, and read it back",
            add_flags=_apply_flags,
            run=apply,
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
