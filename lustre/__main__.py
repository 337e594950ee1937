"""``python -m lustre``: show what new files will get, and apply a layout to a folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lustre.apply import set_directory_layout
from lustre.layout import StripeRequest
from lustre.lfs import existing_part, kind_of, why_not_usable
from lustre.show import report, report_json
from shardprep.command_line import Command, Program, given_words
from shardprep.console import print_lines, quoted
from shardprep.errors import NotFound


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 wrong usage, 66 no such path, 73 if lfs fails."""
    return PROGRAM.run(given_words(argv))


def show(args: argparse.Namespace) -> int:
    """Print the lines about a path. Raises NotFound, LustreError from lfs."""
    if not kind_of(args.path):
        remedy = f"shardprep lustre show {quoted(existing_part(args.path))}"
        raise NotFound(
            f"{args.path} is not there; what a new folder there will copy: {remedy}",
            path=args.path,
            remedy=remedy,
        )
    print_lines(*([json.dumps(report_json(args.path))] if args.json else report(args.path)))
    return 0


def apply(args: argparse.Namespace) -> int:
    """Give a fresh, empty folder the named layout."""
    request = StripeRequest.parse(args.stripe)
    if reason := why_not_usable(args.path):
        print_lines(f"nothing to do: {reason}")
        return 0
    line = set_directory_layout(
        args.path,
        request,
        dry_run=args.dry_run,
        existing_files_keep_theirs=args.existing_files_keep_theirs,
    )
    print_lines(line)
    return 0


def _show_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder or a file; need not be on Lustre")
    parser.add_argument("--json", action="store_true", help="layout and finished shards, for programs")


def _apply_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A file is never changed, and a folder that holds anything but jobs/ and logs/ only with "
        "--existing_files_keep_theirs."
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder; need not be on Lustre")
    text = (
        "N[,SIZE][,POOL]: one stripe up to 64 MiB of a file and N from there on (-1: on every OST), such as "
        "8,4M; or options of lfs setstripe as typed, such as '-c 8' (required)"
    )
    parser.add_argument("--stripe", metavar="LAYOUT", required=True, help=text)
    parser.add_argument("--dry_run", action="store_true", help="check everything, set nothing")
    parser.add_argument(
        "--existing_files_keep_theirs",
        action="store_true",
        help="set it although the folder holds files: they keep their layouts, new files get this one",
    )


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
