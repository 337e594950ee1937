"""Folders of random names, and what of them should be an input: by os.walk, without the code under test."""

from __future__ import annotations

import fnmatch
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

INPUT = re.compile(
    r"(?ais).*\.((txt|text|jsonl|ndjson|jsonlines|json)(\.(gz|gzip|zst|zstd|xz|bz2))?|parquet|pq|arrow|ipc|feather)"
)
_OF_REPOSITORIES = (
    "README.txt", "readme.TXT", "README.ko.txt", "LICENSE.txt", "Licence.txt", "license-mit.txt",
    "requirements.txt", "requirements-dev.txt", "requirements_test.TXT", "NOTICE.txt", "Copying.txt",
    "CMakeLists.txt", "SHA256SUMS.txt", "robots.txt",
)  # fmt: skip
_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_CACHES = ("cache-1f.arrow", "cache-0a1b2c_00001_of_00002.arrow")
_ICEBERG = ("v1.metadata.json", "version-hint.text")
_STEMS = (
    "a", "b", "_a", "__b", "_c=d", "B", "part-00001", "data.v1", "가나 다", "x y", "a,b", "license_plates",
    "readmes", "noticeboard", "line\nend", "-dash", "[x]", "state",
)  # fmt: skip
_SUFFIXES = (
    ".txt", ".TXT", ".text", ".jsonl", ".JsonL", ".ndjson", ".jsonlines", ".json", ".parquet", ".PQ",
    ".arrow", ".ipc", ".Feather", ".txt.gz", ".jsonl.ZSTD", ".json.bz2", ".text.gzip", ".ndjson.xz",
    ".jsonl.zst", ".md", ".md.gz", ".LOG", ".csv", ".parquet.gz", ".tar.gz", ".gz", ".txt~", ".txt.bak",
    ".jsonl.tmp", "",
)  # fmt: skip
PATTERNS = ("", "", "*.md", "*.MD*,readme*", ".m*,.*txt", "*", "part-?????,*.log")


def random_folder(root: Path, rng: random.Random) -> None:
    """Fill the empty folder ``root``: files, folders, links, FIFOs; no link to nothing is an input.

    All files are empty, which each input format allows.
    """
    folders = [root]
    elsewhere = [root.with_name(f"{root.name} {number}") for number in range(2)]
    for file in elsewhere:
        file.touch()
    make: dict[str, Callable[[Path], object]] = {
        "file": lambda path: path.touch(),
        "folder": lambda path: (path.mkdir(), folders.append(path)),
        "file link": lambda path: path.symlink_to(rng.choice(elsewhere)),
        "folder link": lambda path: path.symlink_to(rng.choice(folders)),
        "fifo": os.mkfifo,
        "fifo link": lambda path: path.symlink_to("/dev/null"),
        "dangling": lambda path: INPUT.fullmatch(path.name) or path.symlink_to("nowhere"),
    }
    for _ in range(rng.randint(1, 40)):
        name = rng.choice(("", "", "", "", ".", "._")) + rng.choice(_STEMS) + rng.choice(_SUFFIXES)
        if rng.random() < 0.2:
            name = rng.choice(_OF_REPOSITORIES + _NOTES + _CACHES + _ICEBERG)
        path = rng.choice(folders) / name
        if not os.path.lexists(path):
            make[rng.choices([*make], (45, 20, 8, 12, 4, 3, 4))[0]](path)


def _is_taken(name: str, also: str) -> bool:
    """Return whether a file of this name is an input, by itself or by the patterns of ``--also``."""
    is_noted = name in _NOTES + _OF_REPOSITORIES + _CACHES + _ICEBERG
    if INPUT.fullmatch(name) and not _is_closed(name) and not is_noted:
        return True
    return any(
        fnmatch.fnmatchcase(name.lower(), pattern.lower()) and (name[0] not in "._" or pattern[0] in "._")
        for pattern in also.split(",")
        if pattern
    )


def _is_closed(name: str) -> bool:
    """Whether a folder of this name is not entered. None of PATTERNS asks for one that begins with _."""
    return name[0] == "." or _is_underscored(name)


def _is_underscored(name: str) -> bool:
    return name[0] == "_" and "=" not in name


TRUE_REASONS: dict[str, Callable[[Path], bool]] = {
    "unknown suffix": lambda path: not path.is_dir() and not INPUT.fullmatch(path.name),
    "file of a repository": lambda path: path.is_file() and path.name in _OF_REPOSITORIES,
    "note of datasets": lambda path: path.is_file() and path.name in _NOTES,
    "cache of datasets": lambda path: path.is_file() and path.name in _CACHES,
    "note of Iceberg": lambda path: path.is_file() and path.name in _ICEBERG,
    "hidden": lambda path: path.name[0] == ".",
    "begins with _": lambda path: _is_underscored(path.name),
    "AppleDouble": lambda path: path.name[:2] == "._" and not path.is_dir(),
    "folder": lambda path: path.is_dir() and not path.is_symlink(),
    "link to a folder": lambda path: path.is_dir() and path.is_symlink(),
    "folder that is taken already": lambda path: path.is_dir(),
    "file that is taken by another name": lambda path: path.is_file(),
    "FIFO, socket or device": lambda path: path.exists() and not path.is_file() and not path.is_dir(),
}  # others are met in no random folder: see tests/preprocess/test_input_folders.py


def check_listing(
    root: Path,
    taken: list[str],
    left_out: list[tuple[str, str]] | None,
    *,
    recursive: bool,
    follow_links: bool,
    also: str,
) -> None:
    """Compare a listing of ``root`` with an independent one; the paths are relative, reasons come first.

    ``left_out``: None where nothing was taken, and so no listing made.
    """
    folders, waiting = set[Path](), [root.resolve()]
    names, files = set[Path](), dict[Path, set[Path]]()  # all names; of them those by which a file is taken
    while waiting:
        folder = waiting.pop()
        if folder in folders:
            continue
        folders.add(folder)
        for path in folder.iterdir():
            if not path.is_dir():
                names.add(path)
                if _is_taken(path.name, also) and (path.is_file() or not path.exists()):
                    files.setdefault(path.resolve() if path.exists() else path, set()).add(path)
            elif recursive and not _is_closed(path.name) and (follow_links or not path.is_symlink()):
                waiting.append(path.resolve())
            else:
                names.add(path)
    # Of several names of one file one is taken, and that of the file itself before links to it.
    of_taken = {_place(root / path) for path in taken}
    assert len(of_taken) == len(taken) == len(files), files
    for file, its_names in files.items():
        assert len(its_names & of_taken) == 1, its_names
        assert file not in its_names or file in of_taken
    if left_out is None:
        return
    out = []
    for reason, name in left_out:
        path = root / name
        assert TRUE_REASONS[reason](path), (reason, name)
        if reason == "folder that is taken already":
            assert path.resolve() in folders, name
        else:
            out.append(_place(path))
    assert len(left_out) == len({name for _, name in left_out})
    assert sorted(out) == sorted(names - of_taken)


def _place(path: Path) -> Path:
    """The name in the real path of its folder: a folder may be met through links."""
    return path.parent.resolve() / path.name
