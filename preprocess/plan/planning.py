"""``plan``: list the inputs, cut them into shards, resolve the tokenizer, measure, freeze the plan.

The inputs are read as one, in the order of the plan, and a shard is a stretch of that. Files that cannot be
cut (compressed ones, mostly) come last, grouped so that the shards are even. The input is only sampled, but
for the places between shards, so planning takes seconds for terabytes, unless ``--hash_inputs`` is given.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fnmatch
import hashlib
import heapq
import itertools
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import lustre
import shardprep
from preprocess.make.engines import FEW_BYTES, Engine, equal_fast_engine, ids_sha256
from preprocess.plan.cost_estimate import CostEstimate, measure, sample_texts, scratch_folder
from preprocess.plan.document_ends import document_ends_lines
from preprocess.plan.foreign_folders import (
    DELTA_LOG,
    REMEDIES,
    UNDERSCORE,
    UNKNOWN,
    compressed_copies,
    files_of_delta_table,
    split_lines,
    split_of,
    why_no_folder,
    why_no_input,
)
from preprocess.plan.tokenizer import ResolvedTokenizer, publish_tokenizer, resolve_tokenizer
from preprocess.read.chat import chat_template_of, chat_versions
from preprocess.read.documents import format_of, load_libraries, starts_in
from preprocess.read.format import Inspected, Start
from preprocess.read.inputs import OpenInput, RangeReader, check_is_fetched, sample_sha256
from preprocess.read.transform import Transform
from shardprep.console import Progress, counted, quoted
from shardprep.errors import CannotWrite, NotFound, Refused, UsageError
from shardprep.files import STALE_AFTER_S, make_folder, publish_bytes, remove_temporaries
from shardprep.format.document_names import DocumentNames, read_names
from shardprep.format.input_formats import input_kind, known_suffixes
from shardprep.format.names import EXCLUDED_NAME, INDEX_NAME, MAX_SHARDS, PLAN_NAME, TOKENIZER_DIR
from shardprep.format.options import PlanOptions, PrepConfig
from shardprep.format.plan import (
    Cut,
    InputFile,
    Plan,
    file_cuts,
    plan_differences,
    plan_id,
    publish_plan,
    read_plan,
)
from shardprep.format.tokenizer_files import TOKENIZER_FILE, stamp_tokenizer

_NUM_THREADS = 16  # opening or reading a file is a round trip on a network file system
_MOST_AT_ONCE = 64  # files or boundaries per turn of a thread
_NUM_SHOWN = 3  # names per reason

# Why a name is left out, beside what foreign_folders.py says, and what a user can do about it.
_FOLDER = "folder"
_LINK = "link to a folder"
_REPEATED = "folder that is taken already"
_SAME_FILE = "file that is taken by another name"
_COPY = "compressed form of a file that is taken"
_OLD_VERSION = "old version in a Delta table"
_OTHER_SPLIT = "other split"
_REMEDIES = REMEDIES | {
    _FOLDER: "; for what it holds add --recursive",
    _LINK: "; for what it holds add --recursive --follow_links",
    _REPEATED: "",
    _SAME_FILE: "",
    _COPY: "; rename it if it holds something else",
    _OLD_VERSION: "",
    _OTHER_SPLIT: "; --split chooses",
    "FIFO, socket or device": "",
}


@dataclass(frozen=True, kw_only=True)
class InputListing:
    """Every name in the input folder: taken, or left out, or below a folder that is left out."""

    paths: list[Path]  # taken, sorted by relative path
    left_out: dict[str, list[str]]  # reason -> paths relative to the folder, sorted
    num_links: int  # of the taken ones
    also: str  # the patterns of ``also`` that took something
    follow_links: bool  # whether a link to a folder was followed


def find_inputs(
    input_dir: Path, *, recursive: bool, follow_links: bool = False, also: str = "", split: str = ""
) -> InputListing:
    """Say of each name in a folder whether it is an input, and why not.

    A folder is taken once: links to folders are followed behind all others, in the order of their paths, and
    one that leads to a folder that is taken already is left out; so is another name of a file that is taken.
    ``also`` and ``split``: see ``PlanOptions``. Raises NotFound, UsageError, and BadInput for a table whose
    files do not tell its rows.
    """
    try:
        if not input_dir.is_dir():
            raise NotFound(path=input_dir, found="no folder", expected="one that holds input files")
        walk = _Walk(input_dir, recursive=recursive, follow_links=follow_links, also=also, split=split)
        listing = walk.run()
    except OSError as error:
        where, found = error.filename or input_dir, f"it cannot be listed: {error.strerror}"
        raise NotFound(path=where, found=found, expected="a folder that you can read") from None
    if not listing.paths:
        nothing = f"--input_dir {input_dir} holds no .txt file, nor any other input ({known_suffixes()})"
        raise NotFound(
            "; ".join([nothing, *left_out_lines(listing.left_out)]), path=input_dir, expected=known_suffixes()
        )
    for path in (input_dir.resolve(), *listing.paths):  # as a plan has them
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UsageError(f"the name of input {os.fsencode(path)!r} is not UTF-8; rename it") from None
    return listing


def list_inputs(input_dir: Path, *, recursive: bool) -> list[Path]:
    """Return the input files of a folder, sorted by relative path. Raises NotFound or UsageError."""
    return find_inputs(input_dir, recursive=recursive).paths


class _Taken(NamedTuple):
    place: tuple[int, int]  # device and number: what two names of one file have in common
    is_link: bool


class _Walk:
    def __init__(
        self, input_dir: Path, *, recursive: bool, follow_links: bool, also: str, split: str
    ) -> None:
        self._input_dir = input_dir
        self._is_recursive = recursive
        self._follows = recursive and follow_links
        # As in a shell, a hidden name needs a pattern that begins with a dot; one with _ in front likewise.
        self._also = {
            text: re.compile(("" if text[0] in "._" else "(?![._])") + fnmatch.translate(text.lower()))
            for text in filter(None, map(str.strip, also.split(",")))
        }
        self._splits = set(filter(None, map(str.strip, split.split(","))))
        self._used: set[str] = set()
        self._taken: dict[str, _Taken] = {}
        self._left_out: dict[str, list[str]] = {}
        self._num_followed = 0
        self._delta_tables: list[str] = []
        self._folders = [""]
        self._links: list[str] = []  # a heap

    def run(self) -> InputListing:
        seen: set[tuple[int, int]] = set()
        while self._folders or self._links:
            is_link = not self._folders
            folder = heapq.heappop(self._links) if is_link else self._folders.pop()
            place = self._input_dir / folder
            status = os.stat(place)  # noqa: PTH116 - as os.scandir, it names the file in its error
            if self._follows:
                if (status.st_dev, status.st_ino) in seen:
                    self._leave_out(folder, _REPEATED)
                    continue
                seen.add((status.st_dev, status.st_ino))
                self._num_followed += is_link
            with os.scandir(place) as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if reason := self._look_at(entry, path, status.st_dev):
                        self._leave_out(path, reason)
        self._leave_out_same_files()
        for path in compressed_copies(self._input_dir, self._taken):
            self._leave_out_taken(path, _COPY)
        self._leave_out_old_versions()
        for path in [path for path in self._taken if self._splits and split_of(path) not in self._splits]:
            self._leave_out_taken(path, _OTHER_SPLIT)
        taken = sorted(self._taken, key=lambda path: path.split("/"))
        return InputListing(
            paths=[Path(self._input_dir, path) for path in taken],
            left_out={reason: sorted(self._left_out[reason]) for reason in sorted(self._left_out)},
            num_links=sum(one.is_link for one in self._taken.values()),
            also=",".join(sorted(self._used)),
            follow_links=self._num_followed > 0,
        )

    def _look_at(self, entry: os.DirEntry[str], path: str, device: int) -> str | None:
        """Take a file, or note a folder; returns why that is not done."""
        is_link = entry.is_symlink()
        mode = _mode(entry) if is_link or not entry.is_file() else stat.S_IFREG
        if mode == stat.S_IFDIR:
            if entry.name == DELTA_LOG:
                self._delta_tables.append(path.removesuffix(entry.name))
            reason = why_no_folder(entry.name)
            if reason == UNDERSCORE and self._is_also(entry.name):
                reason = None
            if reason:
                return reason
            if is_link and not self._follows:
                return _LINK
            if not self._is_recursive:
                return _FOLDER
            heapq.heappush(self._links, path) if is_link else self._folders.append(path)
            return None
        if mode != stat.S_IFREG:
            return "hidden" if entry.name.startswith(".") else "FIFO, socket or device"
        if (reason := why_no_input(entry.name)) and not self._is_also(entry.name):
            return reason
        # The number of a regular file is in its folder; to ask for its status would be a round trip.
        place = (device, entry.inode())
        if is_link:
            with contextlib.suppress(OSError):  # one to nothing: opening it will say so
                place = (entry.stat().st_dev, entry.stat().st_ino)
        self._taken[path] = _Taken(place, is_link)
        return None

    def _is_also(self, name: str) -> bool:
        """Whether ``also`` asks for a name that would be left out."""
        matching = [text for text, each in self._also.items() if each.match(name.lower())]
        self._used.update(matching)
        return bool(matching)

    def _leave_out_same_files(self) -> None:
        """Take a file once: not by a link to it, nor by a second name in the same folder or another one."""
        first_names: dict[tuple[int, int], str] = {}
        for path in sorted(self._taken, key=lambda path: (self._taken[path].is_link, path.split("/"))):
            first = first_names.setdefault(self._taken[path].place, path)
            # Some file systems number files anew in each folder's listing.
            if first != path and (self._input_dir / first).samefile(self._input_dir / path):
                self._leave_out_taken(path, _SAME_FILE)

    def _leave_out_old_versions(self) -> None:
        for table in self._delta_tables:
            current = files_of_delta_table(self._input_dir / table)
            for path in [
                path for path in self._taken if path.startswith(table) and path.endswith(".parquet")
            ]:
                if path.removeprefix(table) not in current:
                    self._leave_out_taken(path, _OLD_VERSION)

    def _leave_out_taken(self, path: str, reason: str) -> None:
        del self._taken[path]
        self._leave_out(path, reason)

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


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per reason: how many names, the first of them, and how they could be taken."""
    lines = []
    for reason, names in left_out.items():
        first = names[0].rpartition("/")[2]
        suffixes = [os.path.splitext(name)[1] for name in names]  # noqa: PTH122 - of many names
        pattern = f"*{suffixes[0]}" if reason == UNKNOWN and suffixes[0] else first
        remedy = _REMEDIES[reason].format(pattern=pattern if pattern.isprintable() else "PATTERN")
        if reason == UNKNOWN:
            common = Counter(suffix or "none" for suffix in suffixes).most_common(_NUM_SHOWN)
            reason += f": {', '.join(f'{suffix} {number}' for suffix, number in common)}"
        shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_NUM_SHOWN])
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        lines.append(f"left out ({reason}): {len(names)}, such as {shown}{more}{remedy}")
    return lines


def stamp_inputs(
    input_dir: Path, paths: list[Path], options: PlanOptions, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[InputFile], list[Inspected]]:
    """Size, mtime and sampled hash of each file, and what its format says of it.

    Raises NotFound for one that cannot be opened, ReadWriteError, BadInput. ``progress`` counts them.
    """
    load_libraries(path.name for path in paths)  # threads that import parts of pyarrow at once fail
    root = str(input_dir / "_")[:-1]

    def stamp(path: Path) -> tuple[InputFile, Inspected]:
        file = OpenInput(path)
        check_is_fetched(file)
        relative, sha256 = str(path).removeprefix(root), sample_sha256(file)
        size, mtime_ns = file.stamp.num_bytes, file.stamp.mtime_ns
        stamped = InputFile(path=relative, num_bytes=size, mtime_ns=mtime_ns, sha256=sha256)
        return stamped, format_of(path.name).inspect(file, options)

    inputs: list[InputFile] = []
    inspected: list[Inspected] = []
    num_files = max(1, min(_MOST_AT_ONCE, -(-len(paths) // (4 * _NUM_THREADS))))
    turns = [paths[first : first + num_files] for first in range(0, len(paths), num_files)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for found in pool.map(lambda turn: [stamp(path) for path in turn], turns):
            inputs += [stamped for stamped, _ in found]
            inspected += [weighed for _, weighed in found]
            progress(len(found))
    return inputs, inspected


_Place = tuple[int, Start]  # (input, where in it)


@dataclass(frozen=True, kw_only=True)
class Division:
    """The inputs in the order in which they are read, and where each shard begins."""

    inputs: list[InputFile]
    cuts: list[Cut]  # num_shards + 1


def divide(
    input_dir: Path,
    inputs: list[InputFile],
    inspected: list[Inspected],
    num_shards: int,
    options: PlanOptions,
) -> Division:
    """Divide the inputs into ``num_shards`` of even text. Raises BadInput, NotFound, ReadWriteError."""
    # Whole files are put into shards by their size, but for plain text, whose order was promised.
    whole = [
        number
        for number, item in enumerate(inputs)
        if inspected[number].is_whole and not input_kind(item.path).is_in_bytes
    ]
    cut = sorted({*range(len(inputs))} - {*whole})
    bins = _bins(inputs, inspected, whole, num_shards)
    if num_shards == 1 or not bins:
        cut, bins = list(range(len(inputs))), []
    places = even_places(
        input_dir,
        [inputs[number] for number in cut],
        [inspected[number] for number in cut],
        max(num_shards - len(bins), 1) if cut else 0,
        options,
    )
    ends = itertools.accumulate((len(group) for group in bins), initial=len(cut))
    places += [(end, Start(0)) for end in ends][1:]
    places += [places[-1]] * (num_shards + 1 - len(places))  # more shards than files
    return Division(
        inputs=[inputs[number] for number in (*cut, *itertools.chain.from_iterable(bins))],
        cuts=[Cut(number, start.byte, start.text_byte) for number, start in places],
    )


def _bins(
    inputs: list[InputFile], inspected: list[Inspected], whole: list[int], num_shards: int
) -> list[list[int]]:
    """Whole files in groups of about equal text: the largest first, each to the group with the least."""
    total = sum(item.text_bytes for item in inspected)
    share = sum(inspected[number].text_bytes for number in whole) / max(1, total)
    most = num_shards if len(whole) == len(inspected) else num_shards - 1
    num_bins = min(len(whole), most, max(1, round(num_shards * share)))
    if not num_bins:
        return []
    groups: list[list[int]] = [[] for _ in range(num_bins)]
    sizes = [(0, number) for number in range(num_bins)]
    for number in sorted(whole, key=lambda number: (-inspected[number].text_bytes, inputs[number].path)):
        size, group = sizes[0]
        groups[group].append(number)
        heapq.heapreplace(sizes, (size + inspected[number].text_bytes, group))
    return sorted(sorted(group) for group in groups if group)


def even_places(
    input_dir: Path,
    inputs: list[InputFile],
    inspected: list[Inspected],
    num_shards: int,
    options: PlanOptions,
) -> list[_Place]:
    """Where shards of even text begin, and where the last one ends, in files that can be cut."""
    prefix = [0, *itertools.accumulate(item.text_bytes for item in inspected)]
    targets = [prefix[-1] * number // num_shards for number in range(1, num_shards)]
    if not prefix[-1]:
        places = [(len(inputs), Start(0))] * len(targets)
    elif all(item.is_whole for item in inspected):  # each at the nearest end of a file
        behind = [bisect.bisect_right(prefix, target) for target in targets]
        places = [
            (number - (target - prefix[number - 1] <= prefix[number] - target), Start(0))
            for number, target in zip(behind, targets, strict=True)
        ]
    else:
        places = _places_inside(input_dir, inputs, prefix, targets, options)
    return [(0, Start(0)), *places, (len(inputs), Start(0))][0 if num_shards else 1 :]


def _places_inside(
    input_dir: Path, inputs: list[InputFile], prefix: list[int], targets: list[int], options: PlanOptions
) -> list[_Place]:
    """For each target the first place at or behind it where a part may begin.

    It is looked for up to the next target alone, whose place is this one's where none is found: so no byte
    is read twice.
    """

    def stretch(target: int, following: int) -> tuple[int, int, int]:
        """(input, first byte, end): where a boundary is looked for."""
        number = bisect.bisect_right(prefix, target) - 1
        begin, text_bytes = prefix[number], prefix[number + 1] - prefix[number]
        first, end = ((each - begin) * inputs[number].num_bytes // text_bytes for each in (target, following))
        return number, first, end if following <= prefix[number + 1] else sys.maxsize

    def starts(turn: list[tuple[int, int, int]]) -> list[Start | None]:
        found: list[Start | None] = []
        for number, group in itertools.groupby(turn, key=lambda stretch: stretch[0]):
            file = OpenInput(input_dir / inputs[number].path)
            found += starts_in(file, [(begin, end) for _, begin, end in group], options)
        return found

    stretches = list(itertools.starmap(stretch, itertools.pairwise([*targets, prefix[-1]])))
    turns = [stretches[n : n + _MOST_AT_ONCE] for n in range(0, len(stretches), _MOST_AT_ONCE)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(itertools.chain.from_iterable(pool.map(starts, turns)))
    places: list[_Place] = []
    place = (len(inputs), Start(0))
    for (number, _, _), start in zip(reversed(stretches), reversed(found), strict=True):
        if start is not None:
            place = (number, start) if start.byte < inputs[number].num_bytes else (number + 1, Start(0))
        places.append(place)
    return places[::-1]


LONG_SHARD_S = 600.0  # on one core; the plan command warns of longer shards
_MANY_SHARDS = 1000  # more, each smaller than half of _SHARD_BYTES, and the plan command speaks of it
_SHARD_BYTES = 256 << 20  # of input: minutes of one core


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many shards: a number, a size of input bytes, or (neither) one per file."""

    num_shards: int | None = None
    shard_bytes: int | None = None


def _check_apart(config: PrepConfig) -> None:
    """Raises UsageError where the files of the data set would be among its inputs."""
    made, raw = config.output_dir.resolve(), config.input_dir.resolve()
    if made == raw or (config.recursive and made.is_relative_to(raw)):
        found = "--input_dir" if made == raw else f"it lies in --input_dir {raw}, where --recursive looks"
        expected = "a folder outside of the raw text, as plan.json would be an input"
        raise UsageError(path=config.output_dir, found=found, expected=expected)


def make_plan(
    config: PrepConfig,
    sharding: Sharding,
    *,
    stripe: str = "none",
    dry_run: bool = False,
    say: Callable[[str], None],
) -> tuple[Plan, CostEstimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    ``stripe`` is what ``plan --stripe`` takes: the Lustre layout of a folder without a plan yet. Where the
    folder has a plan already, the new one is compared with it and never written.
    Raises every ShardprepError that the inputs, the tokenizer or the folder give reason for.
    """
    if stripe not in {"auto", "none"}:
        lustre.parse_stripe(stripe)  # an impossible one is told first
    _check_apart(config)
    transform = None
    if config.transform is not None:
        transform = Transform(config.transform, config.transform_files)
        config = dataclasses.replace(config, transform_sha256=transform.sha256)
    names = None if config.exclude is None else read_names(config.exclude, id_field=config.id_field)
    listing = find_inputs(
        config.input_dir,
        recursive=config.recursive,
        follow_links=config.follow_links,
        also=config.also,
        split=config.split,
    )
    division = _divided(config, listing, sharding, say)
    with scratch_folder() as files:
        say(f"resolving the tokenizer of {config.model_id}")
        allow = config.encodes_control_tokens
        resolved = resolve_tokenizer(config.model_id, files, allow_special_tokens=allow)
        tokenizer = resolved.spec
        if resolved.num_altered:
            say(
                f"warning: the tokenizer.json of {config.model_id} by itself gives other ids than "
                f"transformers for {resolved.num_altered} of {counted(len(resolved.probe), 'probe text')}, "
                "as its class or its configuration alters it; the shards have the ids of AutoTokenizer, as "
                "training has them. If those of tokenizer.json are right, set tokenizer_class to "
                "PreTrainedTokenizerFast in the tokenizer_config.json of a copy, and pass that as --model_id"
            )
        if config.append_eos and tokenizer.eos_token_id is None:
            found = "a tokenizer without eos_token, so documents cannot end with one"
            expected = "eos_token in its tokenizer_config.json, or --no-append_eos"
            raise UsageError(path=config.model_id, found=found, expected=expected, remedy="--no-append_eos")
        if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
            say(
                f"warning: PAD is EOS ({tokenizer.eos_token_id}) in this tokenizer: loaders that mask labels "
                "by PAD lose those of EOS; this project's loader masks by length and keeps them"
            )
        plan, engine = _plan_of(config, listing, division, resolved, names, transform, say)
        for line in document_ends_lines(plan, resolved.folder):
            say(line)
        if not (plan.options.has_rows or plan.options.append_eos or tokenizer.eos_token_id is None):
            say(
                "note: documents end without EOS, so a model fine-tuned on them never learns to stop; "
                "add --append_eos, or train with seq_len=, which puts EOS behind each document"
            )
        estimate = measure(plan, engine, transform)
        if not dry_run:
            _prepare_folder(config.output_dir)
        frozen = read_plan(config.output_dir)
        if dry_run and frozen is not None and frozen.plan_id != plan.plan_id:
            differences = "; ".join(plan_differences(frozen, plan))
            raise Refused(f"{config.output_dir} has another plan: {differences}", path=config.output_dir)
        _set_layout(config.output_dir, stripe, say, is_planned=bool(frozen), dry_run=dry_run)
        if dry_run:
            return plan, estimate
        if frozen is None:
            stamps = publish_tokenizer(files, config.output_dir, tokenizer, None)
            plan = dataclasses.replace(plan, tokenizer_files=stamps)
        frozen = publish_plan(plan, config.output_dir)
        # It holds what the plan names, whoever planned meanwhile, or damaged it since.
        publish_tokenizer(files, config.output_dir, tokenizer, frozen.tokenizer_files)
        if transform is not None:
            transform.publish_copy(config.output_dir)
        if names is not None:
            publish_bytes(config.output_dir / EXCLUDED_NAME, names.keys.tobytes())
        return frozen, estimate


def small_shards_note(plan: Plan, sharding: Sharding) -> str | None:
    """What to type where one file per shard, which nobody asked for, makes many small shards; else None."""
    total = sum(plan.shard_bytes())
    fewer = max(1, round(total / _SHARD_BYTES))
    if sharding != Sharding() or plan.num_shards < _MANY_SHARDS or plan.num_shards < 2 * fewer:
        return None
    return (
        f"each of {plan.num_shards} input files is a shard of its own, {total / plan.num_shards / 1e6:.3g} "
        f"MB on average: {plan.num_shards} tasks, {3 * plan.num_shards} files; for even shards plan into a "
        f"new folder with --num_shards {fewer}"
    )


def _prepare_folder(folder: Path) -> None:
    """Make the output folder, without what dead attempts left in it."""
    try:
        make_folder(folder, parents=True)
    except CannotWrite as error:
        found = f"it cannot be made: {error.found}"
        raise CannotWrite(path=folder, found=found, expected="a folder that you can write to") from None
    stems = (PLAN_NAME, INDEX_NAME, TOKENIZER_DIR)
    remove_temporaries(folder, *stems, older_than_s=STALE_AFTER_S)


def _set_layout(
    folder: Path,
    stripe: str,
    say: Callable[[str], None],
    *,
    is_planned: bool,
    dry_run: bool,
) -> None:
    """Do what ``stripe`` asks for, and say it; where nothing was asked of a planned folder, say nothing."""
    if stripe == "none" or (is_planned and stripe == "auto"):
        return
    try:
        say(lustre.stripe_line(folder, stripe, is_planned=is_planned, dry_run=dry_run))
    except lustre.LustreError as error:
        raise CannotWrite(str(error)) from None


def _divided(
    config: PrepConfig, listing: InputListing, sharding: Sharding, say: Callable[[str], None]
) -> Division:
    """Stamp the inputs, and divide them into shards: even ones, or one per file."""
    paths = listing.paths
    plain = [path for path in paths if config.is_chat and not input_kind(path.name).format.has_fields]
    if plain:
        expected = "JSON lines and tables, out of which --record chat reads messages; move it away"
        raise UsageError(path=plain[0], found="text", expected=expected)
    links = f", {listing.num_links} of them links" if listing.num_links else ""
    say(f"{counted(len(paths), 'input file')} in {config.input_dir}{links}")
    for line in left_out_lines(listing.left_out):
        say(line)
    with Progress("looking at the inputs", len(paths), unit="files") as progress:
        inputs, inspected = stamp_inputs(config.input_dir, paths, config, progress.add)
    for line in split_lines([(item.path, item.num_bytes) for item in inputs], config.split):
        say(line)
    for line in _equal_lines(inputs):
        say(line)
    if empty := [item.path for item in inputs if not item.num_bytes]:
        say(f"{len(empty)} of them hold nothing, such as {empty[0]}")
    num_shards = _num_shards(inputs, inspected, sharding)
    if num_shards is None:
        return Division(inputs=inputs, cuts=file_cuts(inputs))
    return divide(config.input_dir, inputs, inspected, num_shards, config)


def _equal_lines(inputs: list[InputFile]) -> list[str]:
    """What to say of files that have equal sizes and samples."""
    first_paths: dict[tuple[int, str], str] = {}
    equal: list[tuple[str, str]] = []
    for item in inputs:
        first = first_paths.setdefault((item.num_bytes, item.sha256), item.path)
        if item.num_bytes and first != item.path:
            equal.append((item.path, first))
    if not equal:
        return []
    path, first = equal[0]
    found = f"{counted(len(equal), 'input file')} with the size and the samples of another one"
    return [f"warning: {found}, such as {path} and {first}; all are taken: move them away if they are copies"]


def _num_shards(inputs: list[InputFile], inspected: list[Inspected], sharding: Sharding) -> int | None:
    """How many even shards were asked for; None for one per file. Raises UsageError for none or too many."""
    for name, value in vars(sharding).items():
        if value is not None and value < 1:
            raise UsageError.of_value(f"--{name}", value, "at least 1")
    num_shards = sharding.num_shards or len(inputs)
    if sharding.shard_bytes:
        num_shards = max(1, -(-sum(item.text_bytes for item in inspected) // sharding.shard_bytes))
    if num_shards > MAX_SHARDS:
        smallest = -(-sum(item.num_bytes for item in inputs) // MAX_SHARDS)
        remedy = f"--num_shards {MAX_SHARDS}"
        expected = f"at most {MAX_SHARDS}: {remedy}, or --shard_bytes {-(-smallest // 2**20)}M"
        raise UsageError(found=f"{num_shards} shards", expected=expected, remedy=remedy)
    return None if sharding == Sharding() else num_shards


def ends_itself(resolved: ResolvedTokenizer) -> bool:
    """Whether the tokenizer puts EOS behind a text by itself."""
    around = resolved.reference.encode([b"a"]).ids.tolist()
    bare = resolved.reference.bare().encode([b"a"]).ids.tolist()
    return around[-1:] == [resolved.spec.eos_token_id] and around[-len(bare) :] != bare


def _settled_options(
    config: PrepConfig,
    listing: InputListing,
    resolved: ResolvedTokenizer,
    names: DocumentNames | None,
) -> PlanOptions:
    """The options with what planning found out, such as a conversation's template. Raises UsageError."""
    options = config.plan_options()
    found: dict[str, Any] = {"also": listing.also, "follow_links": listing.follow_links}
    if names is not None:
        found["excluded"] = hashlib.sha256(names.keys.tobytes()).hexdigest()
    if options.is_chat:
        template, mask_rule = chat_template_of(
            resolved.folder, config.chat_template_file, allows_control_tokens=options.allow_special_tokens
        )
        found |= {"chat_template": template.text, "chat_tokens": template.tokens}
        found |= {"chat_versions": chat_versions(), "chat_mask_rule": mask_rule}
    elif options.add_special_tokens and ends_itself(resolved):
        found |= {"append_eos": True, "own_eos": True}
    return dataclasses.replace(options, **found)


def _plan_of(
    config: PrepConfig,
    listing: InputListing,
    division: Division,
    resolved: ResolvedTokenizer,
    names: DocumentNames | None,
    transform: Transform | None,
    say: Callable[[str], None],
) -> tuple[Plan, Engine]:
    """The plan, with the engines' self-check, and the engine that workers will use."""
    plan = Plan(
        plan_id="",
        input_dir=config.input_dir.resolve(),
        options=_settled_options(config, listing, resolved, names),
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=resolved.spec,
        tokenizer_files=stamp_tokenizer(resolved.folder),
        probe=resolved.probe,
        probe_sha256=resolved.probe_sha256,
        fast_engine_is_equal=False,
        inputs=division.inputs,
        cuts=division.cuts,
        names_left_out=[(reason, name) for reason, names in listing.left_out.items() for name in names],
    )
    if config.hash_inputs:
        hashes = [*_input_sha256s(plan), ""]
        cuts = [
            msgspec.structs.replace(cut, sha256=each) for cut, each in zip(plan.cuts, hashes, strict=True)
        ]
        plan = dataclasses.replace(plan, cuts=cuts)
    plan = dataclasses.replace(plan, plan_id=plan_id(plan))
    if transform is not None:
        _check_gives_the_same(plan, transform)
    engine = resolved.reference
    is_little = config.engine == "auto" and sum(plan.shard_bytes()) < FEW_BYTES
    if not (config.engine == "tokenizers" or plan.options.is_chat or is_little):
        texts = [*resolved.probe, *sample_texts(plan, num_bytes=1 << 18, transform=transform)]
        fast = equal_fast_engine(
            resolved.folder / TOKENIZER_FILE,
            allow_special_tokens=resolved.allow_special_tokens,
            texts=texts,
            expected_sha256=ids_sha256([engine.encode_texts(texts)]),
        )
        if isinstance(fast, Engine) and not resolved.passes_gate(fast):
            fast = "its ids differ from those of tokenizers"
        if isinstance(fast, Engine):
            engine, plan = fast, dataclasses.replace(plan, fast_engine_is_equal=True)
        else:
            say(
                f"gigatoken is not used for this tokenizer ({fast}); tokenizers encodes, several times slower"
            )
    return plan, engine if plan.options.add_special_tokens else engine.bare()


def _check_gives_the_same(plan: Plan, transform: Transform) -> None:
    """Raise UsageError where the function gives other texts of a sample the second time."""
    first, second = (sample_texts(plan, num_bytes=1 << 18, transform=transform) for _ in range(2))
    if first != second:
        raise UsageError(
            f"--transform {transform.path} gave other texts the second time that it was given the same "
            "sample, so no shard could be made again: it must depend on nothing but the record, such as no "
            "time, chance or documents before",
            path=transform.path,
            expected="the same text for the same record",
        )


def _input_sha256s(plan: Plan) -> list[str]:
    """The sha256 of every shard's input bytes: reads all of it, about a second per core and gigabyte."""

    def sha256_of(shard_id: int) -> str:
        digest = hashlib.sha256()
        for part in plan.ranges(shard_id):
            reader = RangeReader(part, digest)
            reader.hash_rest()
            reader.file.check_unchanged()
        return digest.hexdigest()

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(sha256_of, range(plan.num_shards)))


_BATCH_CPUS = 8  # that prep_array.sh asks for
_DEFAULT_MAX_ARRAY_SIZE = 1001  # Slurm's own
_ANSWER_S = 3  # that Slurm is waited for


def next_lines(folder: Path, num_shards: int) -> list[str]:
    """Return the commands that make a planned data set; sbatch comes first where the site takes its array."""
    place = quoted(folder)
    script = Path(shardprep.__file__).resolve().parent.parent / "slurm" / "prep_array.sh"
    lines = []
    if num_shards <= _max_array_size() and script.is_file():
        most = _cpus_of_nodes()
        cpus = f"--cpus-per-task={most} " if 0 < most < _BATCH_CPUS else ""
        lines.append(f"sbatch --array=0-{num_shards - 1} {cpus}{quoted(script)} {place}")
    lines.append(f"shardprep submit {place}  # within the site's limits, verify included")
    lines.append(f"shardprep run {place}  # here, without a cluster")
    return [f"next: {lines[0]}", *(f"  or: {line}" for line in lines[1:])]


def _max_array_size() -> int:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _answer("scontrol", "show", "config"), re.MULTILINE)
    return int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE


def _cpus_of_nodes() -> int:
    """CPUs of the largest node of the partition that sbatch would take; 0 where Slurm does not say."""
    rows = re.findall(
        r"^(\S+?)(\*?)\|(\d+)", _answer("sinfo", "--noheader", "--exact", "--format=%P|%c"), re.MULTILINE
    )
    wanted = os.environ.get("SBATCH_PARTITION")
    return max((int(cpus) for name, star, cpus in rows if (name == wanted if wanted else star)), default=0)


def _answer(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, check=False, timeout=_ANSWER_S)
        return done.stdout.decode("utf-8", "replace")
    return ""
