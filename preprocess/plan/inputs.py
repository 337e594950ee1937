"""The inputs of a plan: what of the input folder is taken, and how it is cut into shards.

Each name is taken, or left out for a reason that plan.json keeps. What other tools leave beside their data is
left out by its name, as pyarrow.dataset, Spark and ``datasets`` leave it out. Files are opened only where two
names make it likely that they hold the same text.

A shard is a stretch of the inputs read as one, in the order of the plan. Files that cannot be cut (compressed
ones, mostly) come last, grouped so that the shards are even. Of the input only samples and the places between
shards are read: so planning takes seconds for terabytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fnmatch
import heapq
import itertools
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from preprocess.read import documents
from preprocess.read.documents import Documents, OpenInput, Start
from preprocess.read.lines import COMPRESSIONS, decompressed
from preprocess.read.text_fields import Transform
from shardprep.command_line import needs
from shardprep.console import counted, with_progress
from shardprep.errors import BadInput, NotFound, ShardprepError, UsageError
from shardprep.format.names import MAX_SHARDS, input_kind, known_input_kind, known_suffixes
from shardprep.format.plan import SPLITS, Cut, InputFile, PlanOptions, PrepConfig, ranges_between

_UNKNOWN = "unknown suffix"
# Reasons to leave a name out, as plan.json has them, for which a user can do something, and what.
_REMEDIES = {
    _UNKNOWN: "; --also '{pattern}' takes such files, as plain text",
    "file of a repository": "; --also '{pattern}' takes it",
    "cache of datasets": "; --also '{pattern}' takes it",
    "note of Iceberg": "; files of old snapshots are taken, too: export the table if rows were replaced",
    "hidden": "; rename what is an input",
    "begins with _": ", as Spark does; --also '{pattern}' takes it",
    "folder": "; for what it holds add --recursive",
    "link to a folder": "; for what it holds add --recursive --follow_links",
    "compressed form of a file that is taken": "; rename it if it holds something else",
    "other split": "; --split chooses",
}
_NUM_SHOWN = 3  # names per reason
_NOTES_OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# What ``Dataset.map`` and the like leave: the rows once more, as they were before, or after.
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
_COMPARED_BYTES = 64 << 10  # of text, where two files may hold the same
_DELTA_LOG = "_delta_log"


def find_inputs(input_dir: Path, options: PlanOptions) -> InputListing:
    """Say of each name in a folder whether it is an input, and why not.

    A folder is taken once: links to folders are followed behind all others, in the order of their paths, and
    one that leads to a folder that is taken already is left out; so is another name of a file that is taken.
    Raises NotFound, UsageError, and BadInput for a Delta table.
    """
    listing = InputListing(input_dir, options)
    try:
        if not input_dir.is_dir():
            raise NotFound(path=input_dir, found="no folder", expected="one that holds input files")
        listing.look_through(options)
        listing.leave_out_same_files()
        for table in listing.delta_tables:
            current, below = _files_of_delta_table(input_dir / table), f"{table}/" if table else ""
            for path in list(listing.taken):
                is_of_table = path.startswith(below) and path.endswith(".parquet")
                if is_of_table and path.removeprefix(below) not in current:
                    listing.leave_out(path, "old version in a Delta table")
    except OSError as error:
        where, found = error.filename or input_dir, f"it cannot be listed: {error.strerror}"
        raise NotFound(path=where, found=found, expected="a folder that you can read") from None
    wanted = set(filter(None, map(str.strip, options.split.split(","))))
    for path in [path for path in listing.taken if wanted and split_of(path) not in wanted]:
        listing.leave_out(path, "other split")
    listing.left_out = {reason: sorted(listing.left_out[reason]) for reason in sorted(listing.left_out)}
    if not listing.taken:
        nothing = f"--input_dir {input_dir} holds no .txt file, nor any other input ({known_suffixes()})"
        message = "; ".join([nothing, *left_out_lines(listing.left_out)])
        raise NotFound(message, path=input_dir, expected=known_suffixes())
    for each in map(str, (input_dir.resolve(), *listing.paths)):  # as a plan has them
        if each.encode(errors="ignore").decode() != each:
            found = f"an input of the name {os.fsencode(each)!r}"
            raise UsageError(path=input_dir, found=found, expected="one in UTF-8: rename it")
    return listing


class InputListing:
    """Every name in the input folder: taken, or left out, or below a folder that is left out."""

    def __init__(self, input_dir: Path, options: PlanOptions) -> None:
        # Paths are relative to the folder.
        self.taken: dict[str, tuple[bool, tuple[int, int]]] = {}  # path -> is it a link; device and inode
        self.left_out: dict[str, list[str]] = {}  # by reason
        self.follows_links = False  # whether a link to a folder was followed
        self.used_patterns: set[str] = set()  # of --also, that took something
        self.delta_tables: list[str] = []
        self._input_dir = input_dir
        # As in a shell, a hidden name needs a pattern that begins with a dot; one with _ in front likewise.
        self._also = {
            text: re.compile(("" if text[0] in "._" else "(?![._])") + fnmatch.translate(text.lower()))
            for text in filter(None, map(str.strip, options.also.split(",")))
        }

    @property
    def paths(self) -> list[Path]:
        """Return the inputs, sorted by relative path."""
        return [Path(self._input_dir, path) for path in sorted(self.taken, key=lambda path: path.split("/"))]

    def look_through(self, options: PlanOptions) -> None:
        """Take the files of all folders, and leave out the other names. Raises OSError."""
        follow_links = options.recursive and options.follow_links
        folders, links = [""], list[str]()  # to look into; the links are a heap
        seen: set[tuple[int, int]] = set()
        while folders or links:
            is_link = not folders
            folder = heapq.heappop(links) if is_link else folders.pop()
            place = self._input_dir / folder
            status = os.stat(place)  # noqa: PTH116 - as os.scandir, it names the file in its error
            if follow_links:
                if (status.st_dev, status.st_ino) in seen:
                    self.leave_out(folder, "folder that is taken already")
                    continue
                seen.add((status.st_dev, status.st_ino))
                self.follows_links |= is_link
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name == _DELTA_LOG:
                        self.delta_tables.append(folder)
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    is_file, is_folder = _is_file_or_folder(entry)
                    reason = _why_left_out(entry.name, is_file=is_file)
                    if not (is_file or is_folder):
                        self.leave_out(path, reason if reason == "hidden" else "FIFO, socket or device")
                    elif (reason == "hidden" and is_folder) or (reason and not self._is_also(entry.name)):
                        self.leave_out(path, reason)
                    elif is_file:
                        # The number of a regular file is in its folder; its status would be a round trip.
                        place_of = (status.st_dev, entry.inode())
                        if entry.is_symlink():
                            with contextlib.suppress(OSError):  # one to nothing: opening it will say so
                                place_of = (entry.stat().st_dev, entry.stat().st_ino)
                        self.taken[path] = (entry.is_symlink(), place_of)
                    elif entry.is_symlink() and not follow_links:
                        self.leave_out(path, "link to a folder")
                    elif not options.recursive:
                        self.leave_out(path, "folder")
                    elif entry.is_symlink():
                        heapq.heappush(links, path)
                    else:
                        folders.append(path)

    def _is_also(self, name: str) -> bool:
        matching = [text for text, each in self._also.items() if each.match(name.lower())]
        self.used_patterns.update(matching)
        return bool(matching)

    def leave_out_same_files(self) -> None:
        """Take a file once: not by a link to it, nor by a second name, nor in a compressed form, too."""
        first_names: dict[tuple[int, int], str] = {}
        for path in sorted(self.taken, key=lambda path: (self.taken[path][0], path.split("/"))):
            first = first_names.setdefault(self.taken[path][1], path)
            # Some file systems number files anew in each folder's listing.
            if first != path and (self._input_dir / first).samefile(self._input_dir / path):
                self.leave_out(path, "file that is taken by another name")
        first_forms: dict[str, str] = {}
        # A plain one goes before all others: shards may begin inside of it.
        for path in sorted(self.taken, key=lambda path: (bool(input_kind(path).compression), path)):
            plain = path.rpartition(".")[0] if input_kind(path).compression else path
            first = first_forms.setdefault(plain, path)
            if first == path:
                continue
            beginning = _beginning_of_text(self._input_dir / first)
            if beginning and beginning == _beginning_of_text(self._input_dir / path):
                self.leave_out(path, "compressed form of a file that is taken")

    def leave_out(self, path: str, reason: str) -> None:
        self.taken.pop(path, None)
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        self.left_out.setdefault(reason, []).append(shown)


def _files_of_delta_table(folder: Path) -> set[str]:
    """Return the data files of a table as it is now, relative to its folder. Raises BadInput."""
    log, first, why = folder / _DELTA_LOG, 0, ""
    commits = {int(path.stem): path for path in log.glob("*.json") if re.fullmatch(r"\d{20}", path.stem)}
    vectors: dict[str, Any] = {}  # data file -> its deletion vector, if it has one
    path = log  # the file that is read, for errors
    try:
        checkpoints = sorted(log.glob("*.checkpoint.parquet"))
        if 0 not in commits and checkpoints:
            from pyarrow.parquet import read_table

            path = checkpoints[-1]
            first = int(path.name.partition(".")[0]) + 1
            for added in read_table(path, columns=["add"], use_threads=False)["add"].to_pylist():
                if added is not None:
                    vectors[added["path"]] = added.get("deletionVector")
        numbers = sorted(number for number in commits if number >= first)
        if numbers != list(range(first, first + len(numbers))) or not (numbers or first):
            why = "the log has gaps, or its checkpoint has several parts"
        for path in map(commits.__getitem__, numbers):
            for line in path.read_bytes().splitlines():
                action = json.loads(line)
                if added := action.get("add"):
                    vectors[added["path"]] = added.get("deletionVector")
                elif removed := action.get("remove"):
                    vectors.pop(removed["path"], None)
        if deleted := [path for path, vector in vectors.items() if vector is not None]:
            why = f"rows of {deleted[0]} are deleted by a deletion vector"
    except ImportError:
        raise UsageError(needs("the checkpoint of a Delta table", "pyarrow")) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{path.name}: {error}"
    if why:
        found = f"a Delta table whose files do not tell its rows ({why})"
        expected = "a folder of its current rows, as deltalake's DeltaTable(...).to_pyarrow_table() gives"
        raise BadInput(path=folder, found=found, expected=expected)
    return {unquote(path) for path in vectors}


def _is_file_or_folder(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Return whether an entry is a regular file, or leads to one or to nothing, and whether to a folder."""
    if not entry.is_symlink() and entry.is_file():  # as most are, known without a round trip
        return True, False
    try:
        mode = entry.stat().st_mode
    except OSError:
        if not entry.is_symlink():
            raise
        return True, False
    return stat.S_ISREG(mode), stat.S_ISDIR(mode)


def _why_left_out(name: str, *, is_file: bool) -> str:
    """Return why nothing of this name is an input, nor holds any, or "" where it may."""
    if name.startswith("."):
        return "AppleDouble" if is_file and name.startswith("._") else "hidden"
    if name.startswith("_") and "=" not in name:  # a partition may have such a name: _year=2026
        return "begins with _"
    if not is_file:
        return ""
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
    """Return the first bytes of a file's text, or None where it cannot be read: planning will say why."""
    try:
        file = OpenInput(path)
        if not (compression := input_kind(path.name).compression):
            return file.read(0, _COMPARED_BYTES)
        span = (0, file.stamp.num_bytes)
        pieces = decompressed(file, COMPRESSIONS[compression], file.read_all, span, _COMPARED_BYTES, 0)
        return next(pieces)[0][:_COMPARED_BYTES]
    except ShardprepError:
        return None


def split_of(path: str) -> str:
    """Return the split that a name tells, as ``datasets`` reads it: wiki.valid.txt, test/a.jsonl; or ""."""
    # The nearest of its folders tells it where the file's own name does not.
    *folders, name = path.lower().split("/")
    stem = name.removesuffix(f".{name.rpartition('.')[2]}") if "." in name else name
    if input_kind(path).compression:
        stem = stem.rpartition(".")[0] or stem
    for part in (stem, *reversed(folders)):
        words = [word for word in re.split(r"[^a-z]+", part) if word not in ("", "of")]
        found = {_SPLIT_WORDS[word] for word in (*words[:1], *words[-1:]) if word in _SPLIT_WORDS}
        if len(found) == 1:
            return found.pop()
    return ""


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per reason: how many names, the first of them, and how they could be taken."""
    lines = []
    for reason, names in left_out.items():
        first = Path(names[0])
        pattern = f"*{first.suffix}" if reason == _UNKNOWN and first.suffix else first.name
        remedy = _REMEDIES.get(reason, "").format(pattern=pattern if pattern.isprintable() else "PATTERN")
        shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_NUM_SHOWN])
        lines.append(f"left out ({reason}): {len(names)}, such as {shown}{remedy}")
    return lines


NUM_THREADS = 16  # opening or reading a file is a round trip on a network file system
_MOST_AT_ONCE = 64  # files or boundaries per turn of a thread


class Weighed(NamedTuple):
    """An input, and what its format says of it."""

    file: InputFile
    text_bytes: int  # about
    is_whole: bool  # it can only be read whole


def stamp_inputs(input_dir: Path, paths: list[Path], options: PlanOptions) -> list[Weighed]:
    """Return size, mtime and sampled hash of each file, and what its format says."""
    for path in paths:  # threads that import parts of pyarrow at once fail
        documents.format_of(path.name)
    root = str(input_dir / "_")[:-1]

    def stamp(path: Path) -> Weighed:
        file = OpenInput(path)
        documents.check_is_fetched(file)
        name, now, sha256 = str(path).removeprefix(root), file.stamp, documents.sample_sha256(file)
        stamped = InputFile(path=name, num_bytes=now.num_bytes, mtime_ns=now.mtime_ns, sha256=sha256)
        return Weighed(stamped, *documents.format_of(path.name).inspect(file, options))

    # Several a turn: a future of each of a million files would take 1 GB.
    num_files = max(1, min(_MOST_AT_ONCE, -(-len(paths) // (4 * NUM_THREADS))))
    turns = [paths[first : first + num_files] for first in range(0, len(paths), num_files)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = pool.map(lambda turn: [stamp(path) for path in turn], turns)
        stamped = itertools.chain.from_iterable(found)
        every = zip(with_progress("looking at the inputs", paths, unit="files"), stamped, strict=True)
        return [weighed for _, weighed in every]


def divide_inputs(
    config: PrepConfig,
    listing: InputListing,
    num_shards: int | None,
    shard_bytes: int | None,
    say: Callable[[str], None],
) -> tuple[list[InputFile], list[Cut]]:
    """Stamp the inputs, and divide them into shards: even ones, by number or bytes, or one per file.

    Returns them in the order in which they are read, and where each shard begins (num_shards + 1).
    """
    paths = listing.paths
    for path in paths if config.is_chat else ():
        if not input_kind(path.name).format.has_fields:
            expected = "JSON lines and tables, out of which --record chat reads messages; move it away"
            raise UsageError(path=path, found="text", expected=expected)
    weighed = stamp_inputs(config.input_dir, paths, config)
    inputs = [item.file for item in weighed]
    empty = [item.path for item in inputs if not item.num_bytes]
    are_empty = f"; {len(empty)} of them are empty, such as {empty[0]}" if empty else ""
    say(f"{counted(len(paths), 'input file')} in {config.input_dir}{are_empty}")
    for line in left_out_lines(listing.left_out):
        say(line)
    num_of = Counter(split_of(item.path) for item in inputs)
    named = [name for name in SPLITS if num_of[name]]
    if len(named) > 1 and not config.split:
        shown = ", ".join(f"{name or 'no split'} {counted(n, 'file')}" for name, n in num_of.most_common())
        say(f"warning: splits by their names: {shown}; all are taken: --split {named[0]} takes one alone")
    first_paths: dict[tuple[int, str], str] = {}
    pairs = [(item.path, first_paths.setdefault((item.num_bytes, item.sha256), item.path)) for item in inputs]
    equal = [pair for pair, item in zip(pairs, inputs, strict=True) if item.num_bytes and pair[0] != pair[1]]
    if equal:
        found = f"{counted(len(equal), 'input file')} with the size and the samples of another one"
        which = f"such as {equal[0][0]} and {equal[0][1]}"
        say(f"warning: {found}, {which}; all are taken: move them away if they are copies")
    for name, value in (("num_shards", num_shards), ("shard_bytes", shard_bytes)):
        if value is not None and value < 1:
            raise UsageError.of_value(f"--{name}", value, "at least 1")
    number = num_shards or len(inputs)
    if shard_bytes:
        number = max(1, -(-sum(item.text_bytes for item in weighed) // shard_bytes))
    if number > MAX_SHARDS:
        smallest = -(-sum(item.num_bytes for item in inputs) // MAX_SHARDS)
        remedy = f"--num_shards {MAX_SHARDS}"
        expected = f"at most {MAX_SHARDS}: {remedy}, or --shard_bytes {-(-smallest // 2**20)}M"
        raise UsageError(found=f"{number} shards", expected=expected, remedy=remedy)
    if num_shards is None and shard_bytes is None:
        return inputs, [Cut(number, 0) for number in range(len(inputs) + 1)]
    # Whole files are put into shards by their size, but for plain text, whose order was promised.
    whole: list[Weighed] = []
    cut: list[Weighed] = []
    for item in weighed:
        is_grouped = item.is_whole and not input_kind(item.file.path).is_in_bytes
        (whole if is_grouped else cut).append(item)
    groups = _groups_of(weighed, whole, number)
    if number == 1 or not groups:
        cut, groups = weighed, []
    cuts = [Cut(0, 0)]
    if cut:
        cuts = _even_cuts(config.input_dir, cut, max(number - len(groups), 1), config)
    for group in groups:
        cuts.append(Cut(cuts[-1].input_number + len(group), 0))
    cuts += [cuts[-1]] * (number + 1 - len(cuts))  # more shards than files
    return [item.file for item in (*cut, *itertools.chain.from_iterable(groups))], cuts


def _groups_of(inputs: list[Weighed], whole: list[Weighed], num_shards: int) -> list[list[Weighed]]:
    """Group files of about equal text: the largest first, each into the group with the least."""
    total = sum(item.text_bytes for item in inputs)
    share = sum(item.text_bytes for item in whole) / max(1, total)
    most = num_shards if len(whole) == len(inputs) else num_shards - 1
    num_groups = min(len(whole), most, max(1, round(num_shards * share)))
    if not num_groups:
        return []
    heap: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_groups)]
    by_size = sorted(range(len(whole)), key=lambda each: (-whole[each].text_bytes, whole[each].file.path))
    for number in by_size:
        size, which, group = heap[0]
        group.append(number)
        heapq.heapreplace(heap, (size + whole[number].text_bytes, which, group))
    groups = sorted(sorted(group) for *_, group in heap if group)
    return [[whole[number] for number in group] for group in groups]


def _even_cuts(input_dir: Path, inputs: list[Weighed], num_shards: int, options: PlanOptions) -> list[Cut]:
    """Return where shards of even text begin, and where the last one ends."""
    ends = [0, *itertools.accumulate(item.text_bytes for item in inputs)]  # of text, behind each file
    targets = [ends[-1] * number // num_shards for number in range(1, num_shards)]
    if not ends[-1]:
        return [Cut(0, 0), *[Cut(len(inputs), 0)] * num_shards]
    cuts: list[Cut] = []
    if all(item.is_whole for item in inputs):
        for target in targets:  # each at the nearest end of a file
            number = bisect.bisect_right(ends, target)
            is_nearer_before = target - ends[number - 1] <= ends[number] - target
            cuts.append(Cut(number - is_nearer_before, 0))
        return [Cut(0, 0), *cuts, Cut(len(inputs), 0)]
    # For each target the first place at or behind it where a part may begin, up to the next target. Where
    # none is, the next one's is taken: so no byte is read twice.
    stretches: list[tuple[int, int, int]] = []  # (input, first byte, end): where a place is looked for
    for target, following in itertools.pairwise([*targets, ends[-1]]):
        number = bisect.bisect_right(ends, target) - 1
        begin, text_bytes = ends[number], ends[number + 1] - ends[number]
        num_bytes = inputs[number].file.num_bytes
        first, end = ((each - begin) * num_bytes // text_bytes for each in (target, following))
        stretches.append((number, first, end if following <= ends[number + 1] else sys.maxsize))

    def starts(turn: list[tuple[int, int, int]]) -> list[Start | None]:
        found: list[Start | None] = []
        for number, group in itertools.groupby(turn, key=lambda stretch: stretch[0]):
            file = OpenInput(input_dir / inputs[number].file.path)
            found += documents.format_of(file.path.name).starts(file, [each[1:] for each in group], options)
        return found

    turns = [stretches[n : n + _MOST_AT_ONCE] for n in range(0, len(stretches), _MOST_AT_ONCE)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(itertools.chain.from_iterable(pool.map(starts, turns)))
    cuts.append(Cut(len(inputs), 0))
    for (number, _, _), start in zip(reversed(stretches), reversed(found), strict=True):
        if start is not None:
            is_inside = start.byte < inputs[number].file.num_bytes
            cuts.append(Cut(number, start.byte, start.text_byte) if is_inside else Cut(number + 1, 0))
        else:
            cuts.append(cuts[-1])
    return [Cut(0, 0), *reversed(cuts)]


_GOLDEN_RATIO = 0.618034  # its multiples are spread evenly over 0 to 1


def sample_documents(
    input_dir: Path,
    inputs: Sequence[InputFile],
    options: PlanOptions,
    *,
    num_bytes: int,
    num_places: int,
    most_files: int = sys.maxsize,
    transform: Transform | None = None,
) -> Iterator[Documents]:
    """Yield about ``num_bytes`` of text, evenly from each place. What one place lacks the next one gives.

    Inputs of fewer bytes are read whole, if they are no more than ``most_files``. Of a file that can be read
    from its beginning alone (gzip), it is the head. No document comes twice, and a very long one comes whole.
    """
    ends = list(itertools.accumulate((item.num_bytes for item in inputs), initial=0))
    places, number = [Cut(0, 0)], 0  # ascending; several may be one
    has_all = ends[-1] <= num_bytes and (len(inputs) <= most_files or not ends[-1])
    for turn in range(1, 1 if has_all else num_places):
        # Each lies elsewhere in its stretch: at its beginning, equal files would show their heads alone.
        target = int(ends[-1] * (turn + (0.5 + turn * _GOLDEN_RATIO) % 1) / num_places)
        while ends[number + 1] <= target:
            number += 1
        file, byte = OpenInput(input_dir / inputs[number].path), target - ends[number]
        (start,) = documents.format_of(file.path.name).starts(file, [(byte, sys.maxsize)], options)
        if start is not None and start.byte < inputs[number].num_bytes:
            places.append(Cut(number, start.byte, start.text_byte))
        elif len(places) > 1 and places[-1].input_number == number:  # none follows in this file
            places.append(places[-1])
        else:
            places.append(Cut(number, 0))
    each, files_each = num_bytes // len(places), max(1, most_files // len(places))
    allowed = taken = 0
    for place, following in itertools.pairwise([*places, Cut(len(inputs), 0)]):
        allowed += each
        if taken >= allowed:
            continue
        # As the files are now: whether they are as they were planned is asked by those who make shards.
        ranges = ranges_between(input_dir, inputs, place, following)
        parts = (dataclasses.replace(part, planned=None) for part in ranges if part.start < part.end)
        some = list(itertools.islice(parts, files_each))
        batch_bytes = max(1, min(documents.BATCH_BYTES, each))
        found = documents.DocumentReader(options, transform).of_ranges(some, batch_bytes)
        with contextlib.closing(found):
            for batch in found:
                yield batch
                taken += sum(map(len, batch.texts)) + len(batch.bad) * documents.SHORT_LINE_BYTES
                if taken >= allowed:
                    break
