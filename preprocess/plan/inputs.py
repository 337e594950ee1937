"""List the inputs of a plan, and cut them into shards.

Each name in the input folder is taken, or left out for a reason that plan.json records. Files that other
tools write beside their data are left out by name, as pyarrow.dataset, Spark and ``datasets`` do. Files are
opened only if two names suggest that they have the same text.

The inputs, in the order of the plan, are one sequence of bytes, and a shard is a range of it. Files that
cannot be cut (mostly compressed ones) come last, in groups that make the shards even. Only samples of the
input, and the places between shards, are read, so planning takes seconds for terabytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fnmatch
import heapq
import itertools
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from preprocess.plan.looks import Look, lines_about, look_at, refuse_unusable
from preprocess.plan.other_files import advice_about, ascii_if_odd
from preprocess.plan.table_versions import (
    TableOfOthers,
    former_files,
    kind_of_note,
    refuse_several_builds,
    tables_around,
)
from preprocess.read import documents, encodings, formats, inputs
from preprocess.read.compressed import COMPRESSIONS, decompressed
from preprocess.read.documents import DocumentBatch
from preprocess.read.encodings import Sample
from preprocess.read.fields import text_fields_of
from preprocess.read.formats import Inspected, Start
from preprocess.read.inputs import OpenInput
from preprocess.read.transform import Transform
from shardprep.console import counted, with_progress
from shardprep.errors import BadInput, NotFound, ShardprepError, UsageError
from shardprep.format.inputs import input_kind, known_input_kind, known_suffixes
from shardprep.format.names import MAX_SHARDS
from shardprep.format.plan import Cut, InputFile, ranges_between
from shardprep.format.plan_options import SPLITS, PlanOptions, PrepConfig

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
    for each in map(str, (input_dir.resolve(), *listing.paths)):  # as a plan has them
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

    @property
    def paths(self) -> list[Path]:
        """Return the inputs, sorted by relative path."""
        return [Path(self._input_dir, path) for path in sorted(self.taken, key=lambda path: path.split("/"))]

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
        first_names: dict[tuple[int, int], str] = {}
        # Links come last, so that the file itself is taken.
        for path in sorted(self.taken, key=lambda path: (self.taken[path][0], path.split("/"))):
            first = first_names.setdefault(self.taken[path][1], path)
            # Some file systems give other inode numbers in each listing, so an equal number proves nothing.
            if first != path and (self._input_dir / first).samefile(self._input_dir / path):
                self.leave_out(path, "file that is taken by another name")
        first_forms: dict[str, str] = {}
        # A plain file comes first, because shards may begin inside it.
        for path in sorted(self.taken, key=lambda path: (bool(input_kind(path).compression), path)):
            plain = path.rpartition(".")[0] if input_kind(path).compression else path
            first = first_forms.setdefault(plain, path)
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
        if not (compression := input_kind(path.name).compression):
            return file.read(0, _COMPARED_BYTES)
        span = (0, file.stamp.num_bytes)
        pieces = decompressed(file, COMPRESSIONS[compression], file.read_all, span, _COMPARED_BYTES, 0)
        return next(pieces)[0][:_COMPARED_BYTES]
    except ShardprepError:
        return None


def split_of(path: str) -> str:
    """Return the split of a path, as ``datasets`` finds it (wiki.valid.txt, test/a.jsonl), "" for none."""
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


NUM_THREADS = 16  # opening or reading a file is a round trip on a network file system
_MAX_AT_ONCE = 64  # files or boundaries per task of a thread


class Weighed(NamedTuple):
    """An input file, and what its format found in it."""

    file: InputFile
    text_bytes: int  # estimated
    is_whole: bool  # whether it can only be read whole
    look: Look  # what its samples show


def stamp_inputs(
    input_dir: Path, paths: list[Path], options: PlanOptions, *, looks: bool = True, refuses: bool = True
) -> list[Weighed]:
    """Return size, mtime and sampled hash of each file, and what its format found in it.

    ``looks``: also look at the samples. Then BadInput names all files of which nothing can be made; with
    ``refuses`` also those that a reader would not refuse, but leave out record by record.
    """
    fields = text_fields_of(options)
    kept_names: dict[frozenset[str], frozenset[str]] = {}
    for path in paths:  # import pyarrow before the threads start, which would fail if several imported it
        formats.format_of(path.name)
    root = str(input_dir / "_")[:-1]

    def stamp(path: Path) -> Weighed:
        file = OpenInput(path)
        size = file.stamp.num_bytes
        if size <= inputs.MOST_POINTER_BYTES and (command := inputs.fetch_command(file.read(0, size))):
            expected = f"the file itself; run in its repository: {command}"
            raise BadInput(path=path, found="a pointer to a file that was not fetched", expected=expected)
        name = str(path).removeprefix(root)
        kind = input_kind(path.name)
        here = fields.of_file(name)
        samples = inputs.samples_of(file)
        inspected = Inspected(text_bytes=size, is_whole=True)
        look = Look()
        try:
            inspected = formats.format_of_kind(kind).inspect(file, here)
        except BadInput as error:
            if not looks:
                raise
            look = Look(problem=error)
        if looks and look.problem is None and kind.format.is_text:
            texts = encodings.samples_as_texts(samples)
            if kind.compression:
                texts = [Sample(inspected.head, is_last=False)]
            look = look_at(path, name, kind, texts, here)
            if not refuses and look.problem is not None:
                look = look._replace(problem=None, note=f"{name}: {look.problem.found}")
        # Equal names of fields are kept once, or those of 10^5 files would take 0.1 GB.
        names = frozenset(inspected.names) or look.names
        look = look._replace(names=kept_names.setdefault(names, names))
        stamped = InputFile(
            path=name,
            num_bytes=size,
            mtime_ns=file.stamp.mtime_ns,
            sha256=inputs.sha256_of_samples(samples),
            encoding=look.encoding,
        )
        return Weighed(stamped, inspected.text_bytes, inspected.is_whole, look)

    # Several files per task: a million futures would take 1 GB.
    num_files = max(1, min(_MAX_AT_ONCE, -(-len(paths) // (4 * NUM_THREADS))))
    tasks = [paths[first : first + num_files] for first in range(0, len(paths), num_files)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        batches = pool.map(lambda task: [stamp(path) for path in task], tasks)
        stamped = itertools.chain.from_iterable(batches)
        weighed = [next(stamped) for _ in with_progress("looking at the inputs", paths, unit="files")]
    looks_by_name = [(item.file.path, item.look) for item in weighed]
    refuse_unusable([(name, look.problem) for name, look in looks_by_name if look.problem is not None])
    return weighed


def divide_inputs(
    config: PrepConfig,
    listing: InputListing,
    num_shards: int | None,
    shard_bytes: int | None,
    say: Callable[[str], None],
    *,
    looks: bool = True,
) -> tuple[list[InputFile], list[Cut]]:
    """Stamp the inputs, and divide them into even shards, by number or bytes, or into one shard per file.

    Returns the inputs in the order of reading, and the num_shards + 1 cuts between shards.
    """
    paths = listing.paths
    for path in paths:
        if config.is_chat and not input_kind(path.name).format.has_fields:
            expected = "JSON lines and tables, from which --record chat reads messages; move it away"
            raise UsageError(path=path, found="text", expected=expected)
    refuses = config.max_bad_fraction < 1
    weighed = stamp_inputs(config.input_dir, paths, config, looks=looks, refuses=refuses)
    inputs = [item.file for item in weighed]
    empty = [item.path for item in inputs if not item.num_bytes]
    are_empty = f"; {len(empty)} of them are empty, such as {empty[0]}" if empty else ""
    say(f"{counted(len(paths), 'input file')} in {config.input_dir}{are_empty}")
    for line in left_out_lines(listing.left_out, config.input_dir):
        say(line)
    for line in lines_about(
        [(item.file.path, input_kind(item.file.path), item.look) for item in weighed], config
    ):
        say(line)
    num_files = Counter(split_of(item.path) for item in inputs)
    named = [name for name in SPLITS if num_files[name]]
    if len(named) > 1 and not config.split:
        shown = ", ".join(f"{name or 'no split'} {counted(n, 'file')}" for name, n in num_files.most_common())
        say(f"warning: splits by their names: {shown}; all are taken: --split {named[0]} takes only this one")
    first_paths: dict[tuple[int, str], str] = {}
    equal: list[str] = []  # pairs of paths
    for each in inputs:
        first = first_paths.setdefault((each.num_bytes, each.sha256), each.path)
        if each.num_bytes and first != each.path:
            equal.append(f"{each.path} and {first}")
    if equal:
        copies = f"{counted(len(equal), 'input file')} with the same size and samples as another"
        say(f"warning: {copies}, such as {equal[0]}; all are taken: move them away if they are copies")
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
    # Files that are read whole are grouped by size, except for plain text, whose order was promised.
    whole: list[Weighed] = []
    cut: list[Weighed] = []
    for item in weighed:
        is_grouped = item.is_whole and not input_kind(item.file.path).is_in_bytes
        (whole if is_grouped else cut).append(item)
    groups = _groups_of(weighed, whole, number)
    if number == 1 or not groups:
        cut = weighed
        groups = []
    cuts = [Cut(0, 0)]
    if cut:
        cuts = _even_cuts(config.input_dir, cut, max(number - len(groups), 1), config)
    for group in groups:
        cuts.append(Cut(cuts[-1].input_number + len(group), 0))
    cuts += [cuts[-1]] * (number + 1 - len(cuts))  # more shards than files
    return [item.file for item in (*cut, *itertools.chain.from_iterable(groups))], cuts


def _groups_of(inputs: list[Weighed], whole: list[Weighed], num_shards: int) -> list[list[Weighed]]:
    """Put files into groups of about equal text: the largest file first, each into the smallest group."""
    total = sum(item.text_bytes for item in inputs)
    share = sum(item.text_bytes for item in whole) / max(1, total)
    most = num_shards if len(whole) == len(inputs) else num_shards - 1
    num_groups = min(len(whole), most, max(1, round(num_shards * share)))
    if not num_groups:
        return []
    heap: list[tuple[int, int, list[int]]] = [(0, n, []) for n in range(num_groups)]  # (bytes, n, files)
    by_size = sorted(range(len(whole)), key=lambda each: (-whole[each].text_bytes, whole[each].file.path))
    for number in by_size:
        size, which, group = heap[0]
        group.append(number)
        heapq.heapreplace(heap, (size + whole[number].text_bytes, which, group))
    groups = sorted(sorted(group) for *_, group in heap if group)
    return [[whole[number] for number in group] for group in groups]


def _even_cuts(input_dir: Path, inputs: list[Weighed], num_shards: int, options: PlanOptions) -> list[Cut]:
    """Return where shards with even text begin, and where the last one ends."""
    ends = [0, *itertools.accumulate(item.text_bytes for item in inputs)]  # bytes of text through each file
    targets = [ends[-1] * number // num_shards for number in range(1, num_shards)]
    if not ends[-1]:
        return [Cut(0, 0), *[Cut(len(inputs), 0)] * num_shards]
    cuts: list[Cut] = []
    if all(item.is_whole for item in inputs):
        for target in targets:  # cut at the nearest end of a file
            number = bisect.bisect_right(ends, target)
            is_nearer_before = target - ends[number - 1] <= ends[number] - target
            cuts.append(Cut(number - is_nearer_before, 0))
        return [Cut(0, 0), *cuts, Cut(len(inputs), 0)]
    # Cut at the first place at or after a target where a part may begin, if it is before the next target. If
    # none is, cut where the next target does. So no byte is searched twice.
    stretches: list[tuple[int, int, int]] = []  # to search for a place: (input number, first byte, end)
    for target, following in itertools.pairwise([*targets, ends[-1]]):
        number = bisect.bisect_right(ends, target) - 1
        begin = ends[number]
        text_bytes = ends[number + 1] - ends[number]
        num_bytes = inputs[number].file.num_bytes
        first, end = ((each - begin) * num_bytes // text_bytes for each in (target, following))
        stretches.append((number, first, end if following <= ends[number + 1] else sys.maxsize))

    fields = text_fields_of(options)

    def starts(task: list[tuple[int, int, int]]) -> list[Start | None]:
        starts_here: list[Start | None] = []
        for number, group in itertools.groupby(task, key=lambda stretch: stretch[0]):
            file = OpenInput(input_dir / inputs[number].file.path)
            starts_here += formats.format_of(file.path.name).starts(
                file, [each[1:] for each in group], fields.of_file(inputs[number].file.path)
            )
        return starts_here

    tasks = [stretches[n : n + _MAX_AT_ONCE] for n in range(0, len(stretches), _MAX_AT_ONCE)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        starts_here = list(itertools.chain.from_iterable(pool.map(starts, tasks)))
    cuts.append(Cut(len(inputs), 0))
    for (number, _, _), start in zip(reversed(stretches), reversed(starts_here), strict=True):
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
    max_files: int = sys.maxsize,
    transform: Transform | None = None,
) -> Iterator[DocumentBatch]:
    """Yield about ``num_bytes`` of text, the same amount from each place; the next place makes up for less.

    Smaller inputs are read whole, unless there are more than ``max_files``. A file that can only be read
    from its beginning (gzip) gives its head. No document is sampled twice, and a long one is not cut.
    """
    fields = text_fields_of(options)
    ends = list(itertools.accumulate((item.num_bytes for item in inputs), initial=0))
    places = [Cut(0, 0)]  # ascending, several may be equal
    number = 0
    is_whole = ends[-1] <= num_bytes and (len(inputs) <= max_files or not ends[-1])
    for stretch in range(1, 1 if is_whole else num_places):
        # The place varies within each stretch: a fixed one might always be at the head of a file.
        target = int(ends[-1] * (stretch + (0.5 + stretch * _GOLDEN_RATIO) % 1) / num_places)
        while ends[number + 1] <= target:
            number += 1
        file = OpenInput(input_dir / inputs[number].path)
        byte = target - ends[number]
        (start,) = formats.format_of(file.path.name).starts(
            file, [(byte, sys.maxsize)], fields.of_file(inputs[number].path)
        )
        if start is not None and start.byte < inputs[number].num_bytes:
            places.append(Cut(number, start.byte, start.text_byte))
        elif len(places) > 1 and places[-1].input_number == number:  # no place follows in this file
            places.append(places[-1])
        else:
            places.append(Cut(number, 0))
    bytes_each = num_bytes // len(places)
    files_each = max(1, max_files // len(places))
    allowed = taken = 0
    for place, following in itertools.pairwise([*places, Cut(len(inputs), 0)]):
        allowed += bytes_each
        if taken >= allowed:
            continue
        # The files are not compared with their stamps: workers do that.
        ranges = ranges_between(input_dir, inputs, place, following)
        unchecked = (dataclasses.replace(each, planned=None) for each in ranges if each.start < each.end)
        some = list(itertools.islice(unchecked, files_each))
        batch_bytes = max(1, min(formats.BATCH_BYTES, bytes_each))
        batches = documents.DocumentReader(options, transform).read_ranges(some, batch_bytes)
        with contextlib.closing(batches):
            for batch in batches:
                yield batch
                taken += sum(map(len, batch.texts)) + len(batch.bad) * formats.SHORT_LINE_BYTES
                if taken >= allowed:
                    break
