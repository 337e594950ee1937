"""Random folders, and what a listing has to say of each name in them, without the code under test."""

from __future__ import annotations

import os
import random
from pathlib import Path

# Names of files, and why one is left out; "": it is an input.
NAMES = {
    "a.txt": "", "B.JSONL": "", "c.ndjson.ZSTD": "", "_k=v.parquet": "", "가 나.text": "", "state.txt": "",
    "license_plates.txt": "", "line\nend.jsonl": "", "[x].json.bz2": "",
    "x.csv": "unknown suffix", "notes.md": "unknown suffix", "a.txt~": "unknown suffix",
    ".m.jsonl": "hidden", "._p.jsonl": "AppleDouble", "_d.json": "begins with _",
    "README.ko.txt": "file of a repository", "requirements-dev.txt": "file of a repository",
    "dataset_info.json": "note of datasets", "cache-0a_00001_of_00002.arrow": "cache of datasets",
    "v1.metadata.json": "note of Iceberg",
}  # fmt: skip
FOLDERS = {"sub": "", "b=1": "", "data.v1": "", ".git": "hidden", "_old": "begins with _"}
# Patterns of --also, and the names of NAMES that they take besides.
PATTERNS = {
    "": (), "*.md": ("notes.md",), "*.MD,readme*": ("notes.md", "README.ko.txt"), ".m*": (".m.jsonl",),
    "_d*,*.csv": ("_d.json", "x.csv"),
}  # fmt: skip


def random_folder(root: Path, rng: random.Random) -> None:
    """Fill the empty folder ``root``. All files are empty, which each input format allows."""
    folders = [root]
    elsewhere = [root.with_name(f"{root.name} {number}") for number in range(2)]
    for file in elsewhere:
        file.touch()
    inputs = [name for name, reason in NAMES.items() if not reason]
    for _ in range(rng.randint(1, 40)):
        kind = rng.choices(["file", "folder", "file link", "folder link", "fifo"], (50, 20, 10, 12, 8))[0]
        names = [*FOLDERS] if "folder" in kind else inputs if kind == "fifo" else [*NAMES]
        path = rng.choice(folders) / rng.choice(names)
        if os.path.lexists(path):
            continue
        if kind == "file":
            path.touch()
        elif kind == "folder":
            path.mkdir()
            folders.append(path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(rng.choice(folders if kind == "folder link" else elsewhere))


def check_listing(
    root: Path,
    taken: list[str],
    told: list[tuple[str, str]],
    *,
    recursive: bool,
    follow_links: bool,
    also: str,
) -> None:
    """Compare a listing with an independent one: paths that were taken, and reasons with the others.

    Where nothing was taken, nothing needs to be told.
    """

    def reason_of(path: Path) -> str:
        if path.is_dir():
            if not FOLDERS[path.name] and path.is_symlink() and not follow_links:
                return "link to a folder"
            return FOLDERS[path.name] or ("" if recursive else "folder")
        if not path.is_file():
            return "FIFO, socket or device"
        return "" if path.name in PATTERNS[also] else NAMES[path.name]

    folders, waiting = set[Path](), [root.resolve()]
    left_out = set[tuple[str, Path]]()
    files: dict[Path, set[Path]] = {}  # the names by which a file may be taken
    while waiting:
        folder = waiting.pop()
        for path in [] if folder in folders else folder.iterdir():
            reason = reason_of(path)
            if reason:
                left_out.add((reason, path))
            elif path.is_dir():
                waiting.append(path.resolve())
            else:
                files.setdefault(path.resolve(), set()).add(path)
        folders.add(folder)
    # Of several names of one file one is taken, and that of the file itself before links to it.
    of_taken = {_place(root / path) for path in taken}
    assert len(of_taken) == len(taken) == len(files), files
    for file, names in files.items():
        assert len(names & of_taken) == 1, names
        assert file not in names or file in of_taken
        left_out |= {("file that is taken by another name", name) for name in names - of_taken}
    if not taken:
        return
    again = [name for reason, name in told if reason == "folder that is taken already"]
    assert all((root / name).resolve() in folders for name in again)
    others = [(reason, _place(root / name)) for reason, name in told if name not in again]
    assert sorted(others) == sorted(left_out)


def _place(path: Path) -> Path:
    """The name in the real path of its folder: a folder may be met through links."""
    return path.parent.resolve() / path.name
