"""List the inputs of a plan, and the names that are left out, with the reason.

Each name in the input folder is taken, or left out for a reason that plan.json records. Files that other
tools write beside their data are left out by name, as pyarrow.dataset, Spark and ``datasets`` do. Files are
opened only if two names suggest that they have the same text.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import heapq
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from preprocess.plan.other_files import advice_about, ascii_if_odd
from preprocess.plan.table_versions import (
    TableOfOthers,
    former_files,
    kind_of_note,
    refuse_several_builds,
    tables_around,
)
from preprocess.read.compressed import COMPRESSIONS, decompressed
from preprocess.read.inputs import OpenInput
from shardprep.errors import NotFound, ShardprepError, UsageError
from shardprep.format.inputs import input_kind, known_input_kind, known_suffixes
from shardprep.format.plan_options import PlanOptions

_UNKNOWN = "unknown suffix"
_UNDERSCORE = "begins with _"
_UNFINISHED = "unfinished folder"
# How a user can take names that are left out, by the reason in plan.json.
_REMEDIES = {
    "file of a repository": "; --also '{pattern}' takes it",
    "cache of datasets": "; --also '{pattern}' takes it",
    _UNFINISHED: "; its writer would have renamed it: rename it, or --also '{pattern}' takes it",
    "hidden": "; rename it if it is an input",
    "folder": "; --recursive takes the files in it",
    "link to a folder": "; --recursive --follow_links takes the files in it",
    "compressed form of a file that is taken": "; rename it if its text is different",
    "other split": "; --split chooses",
}
_NUM_SHOWN = 3  # names per reason
_NOTES_OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Written by ``Dataset.map`` and the like: the rows again, before or after a change.
_CACHE_OF_DATASETS = re.compile(r"cache-[\w-]+\.arrow")
_REPOSITORY_NAME = re.compile(
    r"((readme|requirements)([-_.].+)?|(licen[cs]e|third[-_]party[-_]notices?)([-.].+)?|copying|copyright"
    r"|notices?|changelog|contributing|contributors|code[-_]of[-_]conduct|cmakelists|robots|checksums?"
    r"|(md5|sha1|sha256|sha512)sums?)\.txt"
)
_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_MAY_BE_SPLIT = re.compile("|".join(_SPLIT_WORDS))
# Folders in which datasets and others write; the last step is to rename them.
_UNFINISHED_ENDINGS = (".incomplete", ".inprogress", ".partial", ".tmp", ".temp")
_COMPARED_BYTES = 64 << 10  # of the text of two files that may be equal


def find_inputs(input_dir: Path, options: PlanOptions) -> InputListing:
    """List all names in a folder: the inputs, and those that are left out, with the reason.

    Each folder and file is taken once: a link to a folder that is taken, or a second name of a file, is left
    out. Links to folders are followed last, in the order of their paths. Raises NotFound, UsageError, and
    BadInput for a table whose current files are unknown.
    """
    listing = InputListing(input_dir, options)
    try:
        if not input_dir.is_dir():
            raise NotFound(path=input_dir, found="not a folder", expected="a folder of input files")
        listing.scan(options)
        listing.leave_out_same_files()
        listing.leave_out_former_files()
    except OSError as error:
        where = error.filename or input_dir
        found = f"it cannot be listed: {error.strerror}"
        raise NotFound(path=where, found=found, expected="a folder that you can read") from None
    wanted = set(filter(None, map(str.strip, options.split.split(","))))
    for path in [path for path in listing.taken if wanted and split_of(path) not in wanted]:
        listing.leave_out(path, "other split")
    listing.left_out = {reason: sorted(listing.left_out[reason]) for reason in sorted(listing.left_out)}
    if not listing.taken:
        nothing = f"--input_dir {input_dir} has no .txt file, nor any other input ({known_suffixes()})"
        message = "; ".join([nothing, *left_out_lines(listing.left_out, input_dir)])
        raise NotFound(message, path=input_dir, expected=known_suffixes())
    for each in (str(input_dir.resolve()), str(input_dir), *listing.taken):  # as a plan has them
        if each.encode(errors="ignore").decode() != each:
            found = f"an input with the name {os.fsencode(each)!r}"
            raise UsageError(path=input_dir, found=found, expected="a name in UTF-8: rename it")
    return listing


class InputListing:
    """The names in the input folder. Those below a folder that is left out are not listed."""

    def __init__(self, input_dir: Path, options: PlanOptions) -> None:
        # Paths are relative to the input folder.
        self.taken: dict[str, tuple[bool, tuple[int, int]]] = {}  # path -> (is_link, (device, inode))
        self.left_out: dict[str, list[str]] = {}  # by reason
        self.follows_links = False  # whether a link to a folder was followed
        self.used_patterns: set[str] = set()  # patterns of --also that matched a name
        self.tables: list[TableOfOthers] = []
        self._input_dir = input_dir
        # As in a shell, only a pattern that begins with a dot matches a hidden name. The same holds for _.
        self._also = {
            text: re.compile(("" if text[0] in "._" else "(?![._])") + fnmatch.translate(text.lower()))
            for text in filter(None, map(str.strip, options.also.split(",")))
        }

    @functools.cached_property
    def paths(self) -> list[Path]:
        """Return the inputs, sorted by relative path, once all are listed."""
        return [self._input_dir / path for path in sorted(self.taken, key=lambda path: path.split("/"))]

    def scan(self, options: PlanOptions) -> None:
        """List the folder and, if asked for, its subfolders. Raises OSError."""
        follow_links = options.recursive and options.follow_links
        folders = [""]  # to list
        links = list[str]()  # to folders, to list after them; a heap
        seen: set[tuple[int, int]] = set()
        while folders or links:
            is_link = not folders
            folder = heapq.heappop(links) if is_link else folders.pop()
            place = self._input_dir / folder
            status = os.stat(place)  # noqa: PTH116 - like os.scandir, it names the file in its error
            if follow_links:
                if (status.st_dev, status.st_ino) in seen:
                    self.leave_out(folder, "folder that is taken already")
                    continue
                seen.add((status.st_dev, status.st_ino))
                self.follows_links |= is_link
            with os.scandir(place) as entries:
                for entry in entries:
                    kind = kind_of_note(entry.name)
                    if kind is not None:
                        self.tables.append(TableOfOthers(place, kind, f"{folder}/" if folder else "", ""))
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    is_file, is_folder = _is_file_or_folder(entry)
                    reason = _why_left_out(entry.name, is_file=is_file)
                    if not (is_file or is_folder):
                        self.leave_out(path, reason if reason == "hidden" else "FIFO, socket or device")
                    elif (reason == "hidden" and is_folder) or (reason and not self._matches(entry.name)):
                        self.leave_out(path, reason)
                    elif is_file:
                        # The folder lists the inode numbers of its files; a status would be a round trip.
                        file_id = (status.st_dev, entry.inode())
                        if entry.is_symlink():
                            with contextlib.suppress(OSError):  # a broken link is an error when it is opened
                                file_id = (entry.stat().st_dev, entry.stat().st_ino)
                        self.taken[path] = (entry.is_symlink(), file_id)
                    elif entry.is_symlink() and not follow_links:
                        self.leave_out(path, "link to a folder")
                    elif not options.recursive:
                        self.leave_out(path, "folder")
                    elif entry.is_symlink():
                        heapq.heappush(links, path)
                    else:
                        folders.append(path)

    def _matches(self, name: str) -> bool:
        matching = [text for text, each in self._also.items() if each.match(name.lower())]
        self.used_patterns.update(matching)
        return bool(matching)

    def leave_out_same_files(self) -> None:
        """Leave out links to, other names of, and compressed forms of files that are taken."""
        num_names = Counter(file_id for _, file_id in self.taken.values())
        several = [path for path, (_, file_id) in self.taken.items() if num_names[file_id] > 1]
        first_names: dict[tuple[int, int], str] = {}
        # Links come last, so that the file itself is taken.
        for path in sorted(several, key=lambda path: (self.taken[path][0], path.split("/"))):
            first = first_names.setdefault(self.taken[path][1], path)
            # Some file systems give other inode numbers in each listing, so an equal number proves nothing.
            if first != path and (self._input_dir / first).samefile(self._input_dir / path):
                self.leave_out(path, "file that is taken by another name")
        first_forms: dict[str, str] = {}
        for path in sorted(path for path in self.taken if input_kind(path).compression):
            plain = path.rpartition(".")[0]
            # A plain file comes first, because shards may begin inside it.
            first = first_forms.setdefault(plain, plain if plain in self.taken else path)
            if first == path:
                continue
            beginning = _beginning_of_text(self._input_dir / first)
            if beginning and beginning == _beginning_of_text(self._input_dir / path):
                self.leave_out(path, "compressed form of a file that is taken")

    def leave_out_former_files(self) -> None:
        """Leave out files that are no part of the current data of a table, see ``table_versions``."""
        refuse_several_builds(self._input_dir, self.left_out.get("note of datasets", ()))
        for table in [*tables_around(self._input_dir), *self.tables]:
            reason, former = former_files(table, self.taken)
            for path in former:
                self.leave_out(path, reason)

    def leave_out(self, path: str, reason: str) -> None:
        self.taken.pop(path, None)
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        self.left_out.setdefault(reason, []).append(shown)


def _is_file_or_folder(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Return (is_file, is_folder) of an entry, or of its link's target. A broken link counts as a file."""
    if not entry.is_symlink() and entry.is_file():  # known without a round trip, as for most entries
        return True, False
    try:
        mode = entry.stat().st_mode
    except OSError:
        if not entry.is_symlink():
            raise
        return True, False
    return stat.S_ISREG(mode), stat.S_ISDIR(mode)


def _why_left_out(name: str, *, is_file: bool) -> str:
    """Return why a file or folder of this name is left out, "" if it is not."""
    if name.startswith("."):
        return "AppleDouble" if is_file and name.startswith("._") else "hidden"
    if name.startswith("_") and "=" not in name:  # a partition may have such a name: _year=2026
        return _UNDERSCORE
    if not is_file:
        return _UNFINISHED if name.lower().endswith(_UNFINISHED_ENDINGS) else ""
    if known_input_kind(name) is None:
        return _UNKNOWN
    if name in _NOTES_OF_DATASETS:
        return "note of datasets"
    if _CACHE_OF_DATASETS.fullmatch(name):
        return "cache of datasets"
    if name.endswith(".metadata.json") or name == "version-hint.text":
        return "note of Iceberg"
    return "file of a repository" if _REPOSITORY_NAME.fullmatch(name.lower()) else ""


def _beginning_of_text(path: Path) -> bytes | None:
    """Return the beginning of a file's text, or None if it cannot be read, which is reported later."""
    try:
        file = OpenInput(path)
        compression = input_kind(path.name).compression
        if not compression:
            return file.read(0, _COMPARED_BYTES)
        span = (0, file.stamp.num_bytes)
        pieces = decompressed(file, COMPRESSIONS[compression], file.read_all, span, _COMPARED_BYTES, 0)
        return next(pieces)[0][:_COMPARED_BYTES]
    except ShardprepError:
        return None


def split_of(path: str) -> str:
    """Return the split of a path, as ``datasets`` finds it (wiki.valid.txt, test/a.jsonl), "" for none."""
    if not _MAY_BE_SPLIT.search(path.lower()):
        return ""
    # The name of the file comes first, then its folders, beginning with the nearest.
    *folders, name = path.lower().split("/")
    stem = name.removesuffix(f".{name.rpartition('.')[2]}") if "." in name else name
    if input_kind(path).compression:
        stem = stem.rpartition(".")[0] or stem
    for part in (stem, *reversed(folders)):
        words = [word for word in re.split(r"[^a-z]+", part) if word not in ("", "of")]
        named_splits = {_SPLIT_WORDS[word] for word in (*words[:1], *words[-1:]) if word in _SPLIT_WORDS}
        if len(named_splits) == 1:
            return named_splits.pop()
    return ""


def left_out_lines(left_out: Mapping[str, Sequence[str]], input_dir: Path) -> list[str]:
    """Return a line per reason: how many names are left out, the first ones, and how to take them."""
    lines = []
    for reason, names in left_out.items():
        name = Path(names[0]).name
        remedy = _REMEDIES.get(reason, "").format(pattern=name if name.isprintable() else "PATTERN")
        if reason in (_UNKNOWN, _UNDERSCORE):
            remedy = advice_about(names, input_dir, _beginning_of_text)
        shown = ", ".join(map(ascii_if_odd, names[:_NUM_SHOWN]))
        lines.append(f"left out ({reason}): {len(names)}, such as {shown}{remedy}")
    return lines
