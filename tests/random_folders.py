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


def _name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(_OF_REPOSITORIES + _NOTES + _CACHES + _ICEBERG)
    return rng.choice(("", "", "", "", ".", "._")) + rng.choice(_STEMS) + rng.choice(_SUFFIXES)


def random_folder(root: Path, rng: random.Random) -> None:
    """Fill the empty folder ``root``: files, folders, links, FIFOs; no link to nothing is an input.

    All files are empty, which each input format allows.
    """
    folders = [root]
    elsewhere = [root.with_name(f"{root.name} {number}") for number in range(2)]
    for file in elsewhere:
        file.touch()
    for _ in range(rng.randint(1, 40)):
        path = rng.choice(folders) / _name(rng)
        if os.path.lexists(path):
            continue
        kind = rng.choices(
            ("file", "folder", "file link", "folder link", "fifo", "fifo link", "dangling"),
            (45, 20, 8, 12, 4, 3, 4),
        )[0]
        if kind == "folder":
            path.mkdir()
            folders.append(path)
        elif kind == "folder link":
            path.symlink_to(rng.choice(folders))
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "file link":
            path.symlink_to(rng.choice(elsewhere))
        elif kind == "fifo link":
            path.symlink_to("/dev/null")
        elif kind == "dangling":
            if not INPUT.fullmatch(path.name):
                path.symlink_to("nowhere")
        else:
            path.touch()


def _is_also(name: str, also: str) -> bool:
    patterns = [pattern.strip() for pattern in also.split(",") if pattern.strip()]
    return any(
        fnmatch.fnmatchcase(name.lower(), pattern.lower()) and (name[0] not in "._" or pattern[0] in "._")
        for pattern in patterns
    )


def _is_usual(name: str) -> bool:
    """Whether a file of this name is taken without ``--also``."""
    is_noted = name in _NOTES + _OF_REPOSITORIES + _CACHES + _ICEBERG
    return not _is_underscored(name) and name[0] != "." and INPUT.fullmatch(name) is not None and not is_noted


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
    # These three are met in no random folder: see tests/preprocess/test_input_folders.py.
    "compressed form of a file that is taken": lambda _: False,
    "other split": lambda _: False,
    "hidden": lambda path: path.name[0] == ".",
    "begins with _": lambda path: _is_underscored(path.name),
    "AppleDouble": lambda path: path.name[:2] == "._" and not path.is_dir(),
    "folder": lambda path: path.is_dir() and not path.is_symlink(),
    "link to a folder": lambda path: path.is_dir() and path.is_symlink(),
    "folder that is taken already": lambda path: path.is_dir(),
    "file that is taken by another name": lambda path: path.is_file(),
    "FIFO, socket or device": lambda path: path.exists() and not path.is_file() and not path.is_dir(),
}


def _folders_taken(root: Path, *, recursive: bool, follow_links: bool) -> set[Path]:
    """The real path of every folder whose files count."""
    found, waiting = set[Path](), [root.resolve()]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        for folder, inner, _ in os.walk(place):
            found.add(Path(folder))
            visible = [Path(folder, name) for name in inner if recursive and not _is_closed(name)]
            inner[:] = [path.name for path in visible if not path.is_symlink()]
            if follow_links:
                waiting += [path.resolve() for path in visible if path.is_symlink()]
    return found


def wrong_of(
    root: Path,
    taken: list[str],
    left_out: dict[str, list[str]],
    *,
    recursive: bool,
    follow_links: bool,
    also: str,
) -> str | None:
    """What is not right in a listing of ``root``, given relative paths; None where all is."""
    folders = _folders_taken(root, recursive=recursive, follow_links=follow_links)
    expected, names = set[Path](), set[Path]()
    for path in (path for folder in folders for path in folder.iterdir()):
        if path.is_dir():
            is_entered = recursive and not _is_closed(path.name) and (follow_links or not path.is_symlink())
            if not is_entered:
                names.add(path)
            continue
        names.add(path)
        if (path.is_file() or not path.exists()) and (_is_usual(path.name) or _is_also(path.name, also)):
            expected.add(path)
    of_taken = list(map(_place, [root / path for path in taken]))
    # Of several names of one file one is taken, and that of the file itself before links to it.
    files: dict[object, set[Path]] = {}
    for path in expected:
        files.setdefault(path.resolve() if path.exists() else path, set()).add(path)
    own = [path for path in files if path in expected]
    if len(of_taken) != len(set(of_taken)) or not set(of_taken).issuperset(own):
        return f"taken twice, or wrongly: {sorted(set(of_taken) ^ expected)}"
    if [len(names.intersection(of_taken)) for names in files.values()] != [1] * len(files):
        return f"taken twice, or wrongly: {sorted(set(of_taken) ^ expected)}"
    if not set(of_taken) <= expected:
        return f"wrongly taken: {sorted(set(of_taken) - expected)}"
    expected = set(of_taken)
    again = [root / path for path in left_out.get("folder that is taken already", ())]
    if bad := [path for path in again if path.resolve() not in folders]:
        return f"not taken already: {bad}"
    out = [root / path for paths in left_out.values() for path in paths]
    of_out = list(map(_place, set(out) - set(again)))
    if len(out) != len(set(out)) or len(of_out) != len(set(of_out)) or set(of_out) & expected:
        return "left out twice, or taken and left out"
    if set(of_out) | expected != names:
        return f"neither taken nor left out, or not there: {sorted(set(of_out) ^ (names - expected))}"
    reasons = [(reason, root / path) for reason, paths in left_out.items() for path in paths]
    untrue = [(reason, path) for reason, path in reasons if not TRUE_REASONS[reason](path)]
    return f"not true: {untrue}" if untrue else None


def _place(path: Path) -> Path:
    """The name in the real path of its folder: a folder may be met through links."""
    return path.parent.resolve() / path.name
