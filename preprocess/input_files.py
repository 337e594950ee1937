"""Which files of a folder are inputs, why others are not, and what each is stamped and weighed with.

The inputs are sorted by path. A file is opened once: its size, its mtime, a hash of 3 x 64 KiB, and what its
format says of it.
"""

from __future__ import annotations

import fnmatch
import heapq
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from preprocess.documents import SUFFIXES, format_of, format_of_input
from preprocess.formats.format import Inspected, Reading
from preprocess.inputs import InputFile, OpenInput, sample_sha256
from shardprep.errors import NotFound, UsageError

_NUM_STAT_THREADS = 16  # opening a file is a round trip on a network file system
_MOST_FILES_AT_ONCE = 64  # per turn of a thread: a turn takes as long as a small file
_NUM_SHOWN = 3  # names per reason

# Why a name is left out, and what a user can do about it. plan.json has the reasons as they stand here.
_UNKNOWN = "unknown suffix"
_REPOSITORY = "file of a repository"
_FOLDER = "folder"
_LINK = "link to a folder"
_REPEATED = "folder that is taken already"
_REMEDIES = {
    _UNKNOWN: "; --also '{pattern}' takes such files, as plain text",
    _REPOSITORY: "; --also '{pattern}' takes it",
    "note of datasets": "",
    "hidden": "; rename what is an input",
    "AppleDouble": "",
    _FOLDER: "; for what it holds add --recursive",
    _LINK: "; for what it holds add --recursive --follow_links",
    _REPEATED: "",
    "FIFO, socket or device": "",
}
# What ``datasets`` puts beside its data.
_NOTES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_REPOSITORY_NAME = re.compile(
    r"((readme|requirements)([-_.].+)?|(licen[cs]e|third[-_]party[-_]notices?)([-.].+)?|copying|copyright"
    r"|notices?|changelog|contributing|contributors|code[-_]of[-_]conduct|cmakelists|robots|checksums?"
    r"|(md5|sha1|sha256|sha512)sums?)\.txt"
)


@dataclass(frozen=True, kw_only=True)
class InputListing:
    """Every name in the input folder: taken, or left out, or below a folder that is left out."""

    paths: list[Path]  # taken, sorted by relative path
    left_out: dict[str, list[str]]  # reason -> paths relative to the folder, sorted
    num_links: int  # of the taken ones
    also: str  # the patterns of ``also`` that took something
    follow_links: bool  # whether a link to a folder was followed


def find_inputs(
    input_dir: Path, *, recursive: bool, follow_links: bool = False, also: str = ""
) -> InputListing:
    """Say of each name in a folder whether it is an input, and why not. Raises NotFound or UsageError.

    A folder is taken once: links to folders are followed behind all others, in the order of their paths, and
    one that leads to a folder that is taken already is left out. A subfolder that cannot be listed is an
    error. So is, once it is opened, a link to nothing that has the name of an input: its data is missing.

    Args:
        input_dir: the folder.
        recursive: take the input files of subfolders, too.
        follow_links: with ``recursive``, of links to folders, too.
        also: see ``PrepConfig.also``.
    """
    walk = _Walk(input_dir, recursive=recursive, follow_links=follow_links, also=also)
    try:
        if not input_dir.is_dir():
            raise NotFound(f"--input_dir {input_dir} is no folder; expected one that holds input files")
        walk.run()
    except OSError as error:
        where = error.filename or input_dir
        raise NotFound(f"--input_dir {where} cannot be listed: {error.strerror}") from None
    listing = walk.listing()
    if not listing.paths:
        nothing = f"--input_dir {input_dir} holds no .txt file, nor any other input ({SUFFIXES})"
        raise NotFound("; ".join([nothing, *left_out_lines(listing.left_out)]))
    for path in listing.paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the name of input {os.fsencode(path)!r} is not UTF-8; rename the file"
            ) from None
    return listing


def list_inputs(input_dir: Path, *, recursive: bool) -> list[Path]:
    """Return the input files of a folder, sorted by relative path. Raises NotFound or UsageError."""
    return find_inputs(input_dir, recursive=recursive).paths


class _Walk:
    def __init__(self, input_dir: Path, *, recursive: bool, follow_links: bool, also: str) -> None:
        self._input_dir = input_dir
        self._is_recursive = recursive
        self._follows = recursive and follow_links
        self._also = {text: _pattern(text) for text in also_patterns(also)}
        self._used: set[str] = set()
        self._taken: list[str] = []
        self._left_out: dict[str, list[str]] = {}
        self._num_links = self._num_followed = 0
        self._folders = [""]
        self._links: list[str] = []  # a heap
        self._seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        while self._folders or self._links:
            is_link = not self._folders
            folder = heapq.heappop(self._links) if is_link else self._folders.pop()
            place = self._input_dir / folder
            if self._follows:
                status = os.stat(place)  # noqa: PTH116 - as os.scandir, it names the file in its error
                if (status.st_dev, status.st_ino) in self._seen:
                    self._leave_out(folder, _REPEATED)
                    continue
                self._seen.add((status.st_dev, status.st_ino))
                self._num_followed += is_link
            with os.scandir(place) as entries:
                for entry in entries:
                    self._look_at(entry, f"{folder}/{entry.name}" if folder else entry.name)

    def listing(self) -> InputListing:
        taken = sorted(self._taken, key=lambda path: path.split("/"))
        return InputListing(
            paths=[Path(self._input_dir, path) for path in taken],
            left_out={reason: sorted(self._left_out[reason]) for reason in sorted(self._left_out)},
            num_links=self._num_links,
            also=",".join(sorted(self._used)),
            follow_links=self._num_followed > 0,
        )

    def _look_at(self, entry: os.DirEntry[str], path: str) -> None:
        is_link = entry.is_symlink()
        mode = _mode(entry) if is_link or not entry.is_file() else stat.S_IFREG
        if entry.name.startswith(".") and mode != stat.S_IFREG:
            self._leave_out(path, "hidden")
        elif mode == stat.S_IFDIR:
            if is_link and not self._follows:
                self._leave_out(path, _LINK)
            elif not self._is_recursive:
                self._leave_out(path, _FOLDER)
            elif is_link:
                heapq.heappush(self._links, path)
            else:
                self._folders.append(path)
        elif mode != stat.S_IFREG:
            self._leave_out(path, "FIFO, socket or device")
        elif (reason := _why_not(entry.name)) and not self._is_also_taken(entry.name):
            self._leave_out(path, reason)
        else:
            self._taken.append(path)
            self._num_links += is_link

    def _is_also_taken(self, name: str) -> bool:
        matching = [text for text, pattern in self._also.items() if pattern.match(name.lower())]
        self._used.update(matching)
        return bool(matching)

    def _leave_out(self, path: str, reason: str) -> None:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        self._left_out.setdefault(reason, []).append(shown)


def _mode(entry: os.DirEntry[str]) -> int:
    """Return the kind of what an entry is, or leads to; a regular file for a link to nothing."""
    try:
        return stat.S_IFMT(entry.stat().st_mode)
    except OSError:
        if not entry.is_symlink():
            raise
        return stat.S_IFREG


def _why_not(name: str) -> str | None:
    """Return why a file of this name is no input; None for an input."""
    if name.startswith("."):
        return "AppleDouble" if name.startswith("._") else "hidden"
    if format_of(name) is None:
        return _UNKNOWN
    if name in _NOTES:
        return "note of datasets"
    return _REPOSITORY if _REPOSITORY_NAME.fullmatch(name.lower()) else None


def also_patterns(also: str) -> list[str]:
    """Return the patterns of ``--also``, in their order, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, also.split(",")))))


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a glob pattern; as in a shell, a hidden name needs a pattern that begins with a dot."""
    return re.compile(("" if text.startswith(".") else r"(?!\.)") + fnmatch.translate(text.lower()))


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1]  # noqa: PTH122 - of many names


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per reason: how many names, the first of them, and how they could be taken."""
    lines = []
    for reason, names in left_out.items():
        first = names[0].rpartition("/")[2]
        pattern = f"*{_suffix(first)}" if reason == _UNKNOWN and _suffix(first) else first
        remedy = _REMEDIES[reason].format(pattern=pattern if pattern.isprintable() else "PATTERN")
        if reason == _UNKNOWN:
            common = Counter(_suffix(name) or "none" for name in names).most_common(_NUM_SHOWN)
            reason += f": {', '.join(f'{suffix} {number}' for suffix, number in common)}"
        shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_NUM_SHOWN])
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        lines.append(f"left out ({reason}): {len(names)}, such as {shown}{more}{remedy}")
    return lines


def stamp_inputs(
    input_dir: Path, paths: list[Path], reading: Reading, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[InputFile], list[Inspected]]:
    """Size, mtime and sampled hash of each file, and what its format says of it.

    ``progress`` is told how many more there are. Raises NotFound for one that cannot be opened or is no
    regular file, ReadWriteError where reading fails, BadInput where a file cannot be of its format.
    """

    root = str(input_dir / "_")[:-1]

    def stamp(some: list[Path]) -> list[tuple[InputFile, Inspected]]:
        return [_stamped(path, str(path).removeprefix(root), reading) for path in some]

    inputs: list[InputFile] = []
    inspected: list[Inspected] = []
    num_files = min(_MOST_FILES_AT_ONCE, -(-len(paths) // (4 * _NUM_STAT_THREADS)))
    turns = [paths[first : first + num_files] for first in range(0, len(paths), max(1, num_files))]
    with ThreadPoolExecutor(_NUM_STAT_THREADS) as pool:
        for found in pool.map(stamp, turns):
            inputs += [stamped for stamped, _ in found]
            inspected += [weighed for _, weighed in found]
            progress(len(found))
    return inputs, inspected


def _stamped(path: Path, relative: str, reading: Reading) -> tuple[InputFile, Inspected]:
    file = OpenInput(path)
    form = format_of_input(path.name)
    stamped = InputFile(
        path=relative,
        num_bytes=file.stamp.num_bytes,
        mtime_ns=file.stamp.mtime_ns,
        sha256=sample_sha256(file),
    )
    return stamped, form.inspect(file, reading)
