"""``python -m lustre``: show what new files will get, and apply a layout to a folder."""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C while Python still imports waits until the command can stop cleanly
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lustre.layout as layouts
from lustre.lfs import count_osts, existing_part, file_system_of, read_targets, why_not_usable
from shardprep.command_line import Command, Program, given_words
from shardprep.console import counted, print_lines, quoted
from shardprep.errors import LustreError, NotFound, ShardprepError
from shardprep.files import is_folder, names_in, size_of_file

NUM_LOOKED_AT = 64  # finished shards, spread evenly: each is a call of lfs
_SHARD = re.compile(r"shard-\d{5}\.tar")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 wrong usage, 66 no such path, 73 if lfs fails."""
    return PROGRAM.run(given_words(argv))


def show(args: argparse.Namespace) -> int:
    """Print the lines about a path. Raises NotFound, LustreError from lfs."""
    if size_of_file(args.path) is None:
        remedy = f"shardprep lustre show {quoted(existing_part(args.path))}"
        found = "not there; a new folder will copy the layout of the one above it"
        raise NotFound(path=args.path, found=found, remedy=remedy)
    print_lines(*_lines_about(args.path))
    return 0


def _lines_about(path: Path) -> list[str]:
    """Return what new files get, how full the servers are, where shards lie. Raises LustreError.

    Only the layout must be told; whatever else lfs does not tell is a line that says so.
    """
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if reason := why_not_usable(path):
        return [*lines, f"nothing to show: {reason}"]
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
        return lines + _shard_lines(path)
    except ShardprepError as error:
        return [*lines, f"where its shards lie cannot be told: {error}"]


def _shard_lines(folder: Path) -> list[str]:
    """Ask lfs where finished tars of a folder (not below it) lie, and warn if one OST has most of them."""
    names = [name for name in names_in(folder) if _SHARD.fullmatch(name)] if is_folder(folder) else []
    if not names:
        return []
    looked_at = names[:: -(-len(names) // NUM_LOOKED_AT)]
    texts, osts = Counter[str](), Counter[int]()
    for name in looked_at:
        layout = layouts.read_layout(folder / name)
        # Without the OSTs, which differ from file to file.
        parts = tuple(replace(part, start_ost=layouts.ANY_OST, osts=()) for part in layout.components)
        texts[replace(layout, components=parts).text()] += 1
        osts.update({ost for part in layout.components for ost in part.osts})
    shards = f"{counted(len(looked_at), 'shard')} looked at"
    lines = [f"{number} of {shards} have {text}" for text, number in texts.most_common()]
    for ost, number in osts.most_common(1):
        lines.append(f"they lie on {counted(len(osts), 'OST')}; OST {ost} has most: {number}")
        # Servers take turns: an OST with so many is one that somebody named.
        if number > max(4, 2 * len(looked_at) / 3) and count_osts(folder) > 2:
            lines.append(
                f"warning: OST {ost} will serve most reads. Was a start named (lfs setstripe -i, -o)? "
                "`lfs migrate -c 1 FILE` moves a shard while nothing reads it"
            )
    return lines


def apply(args: argparse.Namespace) -> int:
    """Give a fresh, empty folder the named layout."""
    stripe = layouts.parse_stripe(args.stripe)
    if reason := why_not_usable(args.path):
        print_lines(f"nothing to do: {reason}")
        return 0
    print_lines(layouts.set_directory_layout(args.path, stripe, dry_run=args.dry_run))
    return 0


def _show_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder or a file; need not be on Lustre")


def _apply_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "A file is never changed, nor a folder that holds anything but jobs/ and logs/."
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder; need not be on Lustre")
    text = (
        "N[,SIZE][,POOL]: one stripe up to 64 MiB of a file and N from there on (-1: on every OST), such as "
        "8,4M; or options of lfs setstripe as typed, such as '-c 8' (required)"
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
