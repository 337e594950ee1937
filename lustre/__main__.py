"""``python -m lustre show PATH``: what a path stands on, and the layout that new files will get."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lustre.directory_stripe import why_not
from lustre.errors import LustreError
from lustre.layout import read_layout
from lustre.mounts import file_system_of


def show(path: Path) -> list[str]:
    """The lines to print about ``path``, which need not exist yet. Raises LustreError from lfs."""
    mount = file_system_of(path)
    lines = [f"{path}: {mount.fs_type} at {mount.mount_point} ({mount.source})"] if mount else []
    if reason := why_not(path):
        return [*lines, f"nothing to show: {reason}"]
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if there != path.absolute():
        lines.append(f"{path} is not there yet; it will copy the default of {there}")
    layout = read_layout(there)
    if there.is_dir():
        origin = "its own default" if layout.is_own else "inherited, it has no default of its own"
        return [*lines, f"new files get {layout.text()} ({origin})"]
    return [*lines, f"this file has {layout.text()}"]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 for a wrong usage, 73 where lfs fails."""
    parser = argparse.ArgumentParser(prog="python -m lustre", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show_parser = commands.add_parser("show", help="file system and layout of a path; changes nothing")
    show_parser.add_argument("path", type=Path, metavar="PATH")
    args = parser.parse_args(argv)
    try:
        print("\n".join(show(args.path)))
    except LustreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
