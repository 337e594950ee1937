"""``python -m lustre``: show what new files will get, apply a layout to a folder, restore released files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lustre.apply import refuse_all_but_directory, set_directory_layout
from lustre.layout import (
    DataSize,
    choose_layout,
    layout_of_file_system,
    parse_layout_options,
    read_layout,
    why_leave,
)
from lustre.lfs import existing_part, kind_of, why_not_usable
from lustre.restore import restore as restore_files
from lustre.show import report, report_json
from lustre.space import count_osts_if_told
from shardprep.command_line import Command, Program, given_words, parse_size
from shardprep.console import print_lines, quoted, say
from shardprep.errors import NotFound


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 wrong usage, 66 no such path, 73 if lfs fails."""
    return PROGRAM.run(given_words(argv))


def show(args: argparse.Namespace) -> int:
    """Print the lines about a path. Raises NotFound, LustreError from lfs."""
    if not kind_of(args.path):
        above = quoted(existing_part(args.path))
        raise NotFound(
            f"{args.path} is not there; what a new folder there will copy: shardprep lustre show {above}"
        )
    print_lines(*([json.dumps(report_json(args.path))] if args.json else report(args.path, _size(args))))
    return 0


def apply(args: argparse.Namespace) -> int:
    """Give a fresh, empty folder the named layout, or the table's where nobody has chosen one yet."""
    folder: Path = args.path
    wanted = parse_layout_options(
        count=args.count, size=args.size, pool=args.pool, pfl=args.pfl, dom=args.dom
    )
    size = _size(args)
    if reason := why_not_usable(folder):
        print_lines(f"nothing to do: {reason}")
        return 0
    lines: list[str] = []
    if wanted is None:
        refuse_all_but_directory(folder)
        layout = read_layout(folder)
        if reason := why_leave(layout, layout_of_file_system(folder)):
            print_lines(f"left as it is, {reason}: new files get {layout.text()}")
            print_lines("to set another: --count, --size, --pool or --pfl")
            return 0
        wanted, lines = choose_layout(size, count_osts_if_told(folder))
    line = set_directory_layout(
        folder, wanted, dry_run=args.dry_run, existing_files_keep_theirs=args.existing_files_keep_theirs
    )
    print_lines(*lines, line)
    return 0


def restore(args: argparse.Namespace) -> int:
    """Bring released files back from the archive, and with ``--wait`` end when all are there."""
    if not kind_of(args.path):
        raise NotFound(f"{args.path} is not there, expected a file or a folder with released files")
    reason = why_not_usable(args.path)
    print_lines(
        f"nothing to restore: {reason}" if reason else restore_files(args.path, wait=args.wait, say=say)
    )
    return 0


def _size(args: argparse.Namespace) -> DataSize:
    shard_bytes = None if args.shard_bytes is None else parse_size(args.shard_bytes, "--shard_bytes")
    return DataSize(shard_bytes=shard_bytes, num_shards=args.num_shards, num_readers=args.num_readers)


def _show_flags(parser: argparse.ArgumentParser) -> None:
    _path_flags(parser)
    parser.add_argument("--json", action="store_true", help="layout and finished shards, for programs")


def _path_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder; need not be on Lustre")
    parser.add_argument(
        "--shard_bytes", help="size of a shard, such as 2G, to choose a layout for (default: unknown)"
    )
    parser.add_argument("--num_shards", type=int, help="how many shards (default: unknown)")
    parser.add_argument("--num_readers", type=int, help="processes that read them at once (default: unknown)")


_LAYOUT_FLAGS = {
    "-c --count": "stripes: 1 to 2000, or -1 for a stripe on every OST (default: as `show` chooses)",
    "-S --size": "stripe size: a multiple of 64K below 4G, such as 4M (default: Lustre's)",
    "-p --pool": "pool of OSTs for the stripes (default: the folder's own; none: no pool)",
    "--pfl": "END:COUNT[:SIZE] of each component, such as '1G:1,10G:4,-1:8' (default: none)",
    "--dom": "keep the first bytes, such as 64K, on the metadata server; it may keep fewer (default: none)",
}


def _apply_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without a layout it takes the one that `show` chooses, unless the site or somebody has "
        "chosen already. A file is never changed, and a folder that holds anything but jobs/ and logs/ only "
        "with --existing_files_keep_theirs."
    )
    _path_flags(parser)
    for flags, text in _LAYOUT_FLAGS.items():
        parser.add_argument(*flags.split(), help=text)
    parser.add_argument("--dry_run", action="store_true", help="check everything, set nothing")
    parser.add_argument(
        "--existing_files_keep_theirs",
        action="store_true",
        help="set it although the folder holds files: they keep their layouts, new files get this one",
    )


def _restore_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a file, or a folder with all below it")
    parser.add_argument("--wait", action="store_true", help="end when nothing is released any more")


PROGRAM = Program(
    name="python -m lustre",
    description="Layouts of folders on Lustre, and files that lie in an archive alone.",
    dashed_values=("--pfl",),
    commands={
        "show": Command(
            summary="file system, layout and OSTs of a path; changes nothing", add_flags=_show_flags, run=show
        ),
        "apply": Command(
            summary="set the layout of new files in a fresh, empty folder, and read it back",
            add_flags=_apply_flags,
            run=apply,
        ),
        "restore": Command(
            summary="bring files back from the archive behind the file system (HSM, S3 of an FSx)",
            add_flags=_restore_flags,
            run=restore,
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
