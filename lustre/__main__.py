"""``python -m lustre``: show what new files will get, and apply a layout to a folder."""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C while Python still imports waits until the command can stop cleanly
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lustre.apply import set_directory_layout
from lustre.layout import parse_stripe
from lustre.lfs import existing_part, why_not_usable
from lustre.show import report
from shardprep.command_line import Command, Program, given_words
from shardprep.console import print_lines, quoted
from shardprep.errors import NotFound
from shardprep.files import size_of_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 wrong usage, 66 no such path, 73 if lfs fails."""
    return PROGRAM.run(given_words(argv))


def show(args: argparse.Namespace) -> int:
    """Print the lines about a path. Raises NotFound, LustreError from lfs."""
    if size_of_file(args.path) is None:
        remedy = f"shardprep lustre show {quoted(existing_part(args.path))}"
        raise NotFound(
            f"{args.path} is not there; what a new folder there will copy: {remedy}",
            path=args.path,
            remedy=remedy,
        )
    print_lines(*report(args.path))
    return 0


def apply(args: argparse.Namespace) -> int:
    """Give a fresh, empty folder the named layout."""
    stripe = parse_stripe(args.stripe)
    if reason := why_not_usable(args.path):
        print_lines(f"nothing to do: {reason}")
        return 0
    print_lines(set_directory_layout(args.path, stripe, dry_run=args.dry_run))
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
