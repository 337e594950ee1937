"""``plan``: list the inputs, cut them into shards, resolve the tokenizer, measure, freeze the plan.

The inputs are read as one, in the order of the plan, and a shard is a stretch of that. Files that cannot be
cut (compressed ones, mostly) come last, grouped so that the shards are even; so the order of the plan is not
always that of the paths. The input is only sampled, but for the places between shards, so planning takes
seconds for terabytes, unless ``--hash_inputs`` asks for a hash of every byte.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import hashlib
import heapq
import itertools
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lustre
from preprocess.formats.chat import chat_template_of, chat_versions, template_notes
from preprocess.formats.documents import inspect_input, starts_in
from preprocess.formats.format import Inspected, Reading, Start, reading_of
from preprocess.formats.inputs import InputFile, OpenInput, sample_sha256
from preprocess.formats.text_changes import text_versions
from preprocess.make.engines import (
    FEW_BYTES,
    Engine,
    equal_fast_engine,
    ids_sha256,
)
from preprocess.options import PlanOptions, PrepConfig
from preprocess.plan.cost_estimate import CostEstimate, measure, sample_texts, scratch_folder
from preprocess.plan.plan_file import (
    Boundary,
    Plan,
    file_boundaries,
    is_same_plan,
    plan_differences,
    plan_id,
    publish_plan,
    read_plan,
)
from preprocess.plan.tokenizer import ResolvedTokenizer, resolve_tokenizer
from preprocess.plan.tokenizer_files import (
    TOKENIZER_FILE,
    publish_tokenizer,
    stamp_tokenizer,
)
from preprocess.resources import BATCH_BYTES
from shardprep.console import Progress
from shardprep.errors import CannotWrite, NotFound, Refused, UsageError
from shardprep.files import STALE_AFTER_S, remove_temporaries
from shardprep.format.input_formats import input_kind, known_input_kind, known_suffixes
from shardprep.format.names import INDEX_NAME, MAX_SHARDS, OSTS_NAME, PLAN_NAME, TOKENIZER_DIR

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
        nothing = f"--input_dir {input_dir} holds no .txt file, nor any other input ({known_suffixes()})"
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
    if known_input_kind(name) is None:
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
    stamped = InputFile(
        path=relative,
        num_bytes=file.stamp.num_bytes,
        mtime_ns=file.stamp.mtime_ns,
        sha256=sample_sha256(file),
    )
    return stamped, inspect_input(file, reading)


_Stretch = tuple[int, int, int]  # (input, first byte, end): where a boundary is looked for
_Place = tuple[int, Start]  # (input, where in it)
_NUM_THREADS = 16  # a read is a round trip on a network file system
_NUM_STRETCHES = 64  # per turn of a thread


@dataclass(frozen=True, kw_only=True)
class Division:
    """The inputs in the order in which they are read, and where each shard begins."""

    inputs: list[InputFile]
    boundaries: list[Boundary]  # num_shards + 1
    text_starts: (
        list[int] | None
    )  # of each boundary: its byte of the text, where it lies in a compressed file


def divide(
    input_dir: Path,
    inputs: list[InputFile],
    inspected: list[Inspected],
    num_shards: int,
    reading: Reading,
) -> Division:
    """Divide the inputs into ``num_shards`` of even text. Raises BadInput, NotFound, ReadWriteError."""
    whole = {number for number, item in enumerate(inputs) if _is_packed(item, inspected[number])}
    cut = [number for number in range(len(inputs)) if number not in whole]
    bins = _bins(inputs, inspected, sorted(whole), _num_bins(inspected, whole, num_shards))
    if num_shards == 1 or not bins:
        cut, bins = list(range(len(inputs))), []
    places = even_places(
        input_dir,
        [inputs[number] for number in cut],
        [inspected[number] for number in cut],
        max(num_shards - len(bins), 1) if cut else 0,
        reading,
    )
    ends = itertools.accumulate((len(group) for group in bins), initial=len(cut))
    places += [(end, Start(0)) for end in ends][1:]
    places += [places[-1]] * (num_shards + 1 - len(places))  # more shards than files
    return Division(
        inputs=[inputs[number] for number in (*cut, *itertools.chain.from_iterable(bins))],
        boundaries=[(number, start.byte) for number, start in places],
        text_starts=[start.text_byte for _, start in places]
        if any(start[1] for _, start in places)
        else None,
    )


def _is_packed(item: InputFile, inspected: Inspected) -> bool:
    """Whether a file is put into a shard by its size: whole, and not plain text, whose order was promised."""
    return inspected.is_whole and not input_kind(item.path).is_in_bytes


def _num_bins(inspected: list[Inspected], whole: set[int], num_shards: int) -> int:
    """How many shards are made of whole files alone."""
    total = sum(item.text_bytes for item in inspected)
    share = sum(inspected[number].text_bytes for number in whole) / max(1, total)
    most = num_shards if len(whole) == len(inspected) else num_shards - 1
    return min(len(whole), most, max(1, round(num_shards * share)))


def _bins(
    inputs: list[InputFile], inspected: list[Inspected], whole: list[int], num_bins: int
) -> list[list[int]]:
    """Whole files in groups of about equal text: the largest first, each to the group with the least."""
    groups: list[list[int]] = [[] for _ in range(num_bins)]
    sizes = [(0, number) for number in range(num_bins)]
    for number in sorted(whole, key=lambda number: (-inspected[number].text_bytes, inputs[number].path)):
        if not sizes:
            break
        size, group = sizes[0]
        groups[group].append(number)
        heapq.heapreplace(sizes, (size + inspected[number].text_bytes, group))
    return sorted(sorted(group) for group in groups if group)


def even_places(
    input_dir: Path,
    inputs: list[InputFile],
    inspected: list[Inspected],
    num_shards: int,
    reading: Reading,
) -> list[_Place]:
    """Where shards of even text begin, and where the last one ends, in files that can be cut."""
    prefix = [0, *itertools.accumulate(item.text_bytes for item in inspected)]
    targets = [prefix[-1] * number // num_shards for number in range(1, num_shards)]
    if not prefix[-1]:
        places = [(len(inputs), Start(0))] * len(targets)
    elif all(item.is_whole for item in inspected):
        places = [_place_at_file(prefix, target) for target in targets]
    else:
        places = _places_inside(input_dir, inputs, prefix, targets, reading)
    return [(0, Start(0)), *places, (len(inputs), Start(0))][0 if num_shards else 1 :]


def _place_at_file(prefix: list[int], target: int) -> _Place:
    """The nearer end of the file that holds byte ``target``."""
    number = bisect.bisect_right(prefix, target) - 1
    nearer_end = target - prefix[number] > prefix[number + 1] - target
    return (number + nearer_end, Start(0))


def _places_inside(
    input_dir: Path, inputs: list[InputFile], prefix: list[int], targets: list[int], reading: Reading
) -> list[_Place]:
    """For each target the first place at or behind it where a part may begin.

    It is looked for up to the next target alone; where none is, the next target's is this one's.
    So no byte is read twice, and all targets can be asked for at once.
    """
    stretches = [
        _stretch(inputs, prefix, target, following)
        for target, following in itertools.pairwise([*targets, prefix[-1]])
    ]
    parts = [stretches[n : n + _NUM_STRETCHES] for n in range(0, len(stretches), _NUM_STRETCHES)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda part: _starts(input_dir, inputs, part, reading), parts)
        starts = list(itertools.chain.from_iterable(found))
    places: list[_Place] = []
    place = (len(inputs), Start(0))
    for (number, _, _), start in zip(reversed(stretches), reversed(starts), strict=True):
        if start is not None:
            place = (number, start) if start.byte < inputs[number].num_bytes else (number + 1, Start(0))
        places.append(place)
    return places[::-1]


def _stretch(inputs: list[InputFile], prefix: list[int], target: int, following: int) -> _Stretch:
    """From one target to the next, in bytes of the file that holds the first."""
    number = bisect.bisect_right(prefix, target) - 1
    text_bytes, file_bytes = prefix[number + 1] - prefix[number], inputs[number].num_bytes
    begin = (target - prefix[number]) * file_bytes // text_bytes
    if following > prefix[number + 1]:
        return number, begin, sys.maxsize
    return number, begin, (following - prefix[number]) * file_bytes // text_bytes


def _starts(
    input_dir: Path, inputs: list[InputFile], stretches: Sequence[_Stretch], reading: Reading
) -> list[Start | None]:
    """What begins first in each stretch; a file is opened once for those that lie in it."""
    found: list[Start | None] = []
    for number, group in itertools.groupby(stretches, key=lambda stretch: stretch[0]):
        path = input_dir / inputs[number].path
        found += starts_in(OpenInput(path), [(begin, end) for _, begin, end in group], reading)
    return found


def check_num_shards(num_shards: int, num_bytes: int) -> None:
    """Raises UsageError below 1 shard and above 99,999, naming the size that would fit."""
    if num_shards < 1:
        raise UsageError(f"--num_shards is {num_shards}, expected at least 1")
    if num_shards > MAX_SHARDS:
        smallest = -(-num_bytes // MAX_SHARDS)
        raise UsageError(
            f"{num_shards} shards are too many, at most {MAX_SHARDS} can be named; make them larger: "
            f"--num_shards {MAX_SHARDS}, or --shard_bytes {-(-smallest // 2**20)}M"
        )


LONG_SHARD_S = 600.0  # on one core; the plan command warns of longer shards
_MANY_SHARDS = 1000  # more, each smaller than half of _SHARD_BYTES, and the plan command speaks of it
_SHARD_BYTES = 256 << 20  # of input: minutes of one core
_HASHED_BYTES = 4 << 20  # read at once
_NUM_HASH_THREADS = 16  # hashing and reading both release the interpreter's lock
_NO_STRIPES = lustre.StripeRequest(stripe="none")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many shards: a number, a size of input bytes, or (neither) one per file."""

    num_shards: int | None = None
    shard_bytes: int | None = None


def make_plan(
    config: PrepConfig,
    sharding: Sharding,
    *,
    stripe: lustre.StripeRequest = _NO_STRIPES,
    dry_run: bool = False,
    say: Callable[[str], None],
) -> tuple[Plan, CostEstimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    ``stripe`` is the Lustre layout of a folder without a plan yet.

    Where the folder has a plan already, the new one is compared with it and never written.
    Raises every ShardprepError that the inputs, the tokenizer or the folder give reason for.
    """
    stripe.layout()  # an impossible one is told first
    listing = find_inputs(
        config.input_dir,
        recursive=config.recursive,
        follow_links=config.follow_links,
        also=config.also,
    )
    division = _divided(config, listing, sharding, say)
    with scratch_folder() as files:
        say(f"resolving the tokenizer of {config.model_id}")
        allow = config.encodes_control_tokens
        resolved = resolve_tokenizer(config.model_id, files, allow_special_tokens=allow)
        tokenizer = resolved.spec
        if config.append_eos and tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {config.model_id} names no eos_token, so documents cannot end with one; "
                "add --no-append_eos, or set eos_token in its tokenizer_config.json"
            )
        if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
            say(
                f"warning: PAD is EOS ({tokenizer.eos_token_id}) in this tokenizer: loaders that mask labels "
                "by PAD lose those of EOS; this project's loader masks by length and keeps them"
            )
        plan, engine = _plan_of(config, listing, division, resolved, say)
        if config.hash_inputs:
            plan = _with_hashes(plan)
        estimate = measure(plan, engine)
        if dry_run:
            frozen = read_plan(config.output_dir)
            if frozen is not None and not is_same_plan(frozen, plan):
                raise Refused(
                    f"{config.output_dir} has another plan: {'; '.join(plan_differences(frozen, plan))}"
                )
            _set_layout(config.output_dir, stripe, plan, estimate, say, is_planned=bool(frozen), dry_run=True)
            return plan, estimate
        frozen = _prepare_folder(config.output_dir)
        _set_layout(config.output_dir, stripe, plan, estimate, say, is_planned=bool(frozen))
        if frozen is None:
            stamps = publish_tokenizer(files, config.output_dir, tokenizer, None)
            plan = dataclasses.replace(plan, tokenizer_files=stamps)
        frozen = publish_plan(plan, config.output_dir)
        # It holds what the plan names, whoever planned meanwhile, or damaged it since.
        publish_tokenizer(files, config.output_dir, tokenizer, frozen.tokenizer_files)
        return frozen, estimate


def _check_has_fields(paths: list[Path]) -> None:
    """That no input is plain text, which has no messages. Raises UsageError."""
    if plain := [path for path in paths if not input_kind(path.name).format.has_fields]:
        raise UsageError(
            f"--record chat reads messages out of JSON lines and tables, and {plain[0]} is text; move it away"
        )


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


def _prepare_folder(folder: Path) -> Plan | None:
    """Make the output folder; returns the plan that it has already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"--output_dir {folder} cannot be made: {error.strerror}") from None
    stems = (PLAN_NAME, INDEX_NAME, OSTS_NAME, TOKENIZER_DIR)
    remove_temporaries(folder, *stems, older_than_s=STALE_AFTER_S)
    return read_plan(folder)


def _set_layout(
    folder: Path,
    stripe: lustre.StripeRequest,
    plan: Plan,
    estimate: CostEstimate,
    say: Callable[[str], None],
    *,
    is_planned: bool,
    dry_run: bool = False,
) -> None:
    """Do what ``stripe`` asks for, and say it; where nothing was asked of a planned folder, say nothing."""
    if stripe.stripe == "none" or (is_planned and stripe.layout() is None):
        return
    shard_bytes = max(1, estimate.output_bytes // plan.num_shards)
    shards = lustre.DataSize(num_shards=plan.num_shards, shard_bytes=shard_bytes)
    try:
        say(lustre.stripe_line(folder, stripe, shards=shards, is_planned=is_planned, dry_run=dry_run))
    except lustre.LustreError as error:
        raise CannotWrite(str(error)) from None


def _divided(
    config: PrepConfig, listing: InputListing, sharding: Sharding, say: Callable[[str], None]
) -> Division:
    """Stamp the inputs, and divide them into shards: even ones, or one per file."""
    paths = listing.paths
    if config.record == "chat":
        _check_has_fields(paths)
    links = f", {listing.num_links} of them links" if listing.num_links else ""
    say(f"{len(paths)} input file(s) in {config.input_dir}{links}")
    for line in left_out_lines(listing.left_out):
        say(line)
    reading = reading_of(config, BATCH_BYTES)
    with Progress("looking at the inputs", len(paths), unit="files") as progress:
        inputs, inspected = stamp_inputs(config.input_dir, paths, reading, progress.add)
    if empty := [item.path for item in inputs if not item.num_bytes]:
        say(f"{len(empty)} of them hold nothing, such as {empty[0]}")
    num_shards = _num_shards(inputs, inspected, sharding)
    if num_shards is None:
        return Division(inputs=inputs, boundaries=file_boundaries(inputs), text_starts=None)
    return divide(config.input_dir, inputs, inspected, num_shards, reading)


def _num_shards(inputs: list[InputFile], inspected: list[Inspected], sharding: Sharding) -> int | None:
    """How many even shards were asked for; None for one per file. Raises UsageError for too many."""
    num_bytes = sum(item.num_bytes for item in inputs)
    if sharding.num_shards is None and sharding.shard_bytes is None:
        check_num_shards(len(inputs), num_bytes)
        return None
    num_shards = sharding.num_shards
    if num_shards is None:
        assert sharding.shard_bytes is not None
        if sharding.shard_bytes < 1:
            raise UsageError(f"--shard_bytes is {sharding.shard_bytes}, expected at least 1")
        num_shards = max(1, -(-sum(item.text_bytes for item in inspected) // sharding.shard_bytes))
    check_num_shards(num_shards, num_bytes)
    return num_shards


def _with_template(config: PrepConfig, tokenizer_folder: Path, say: Callable[[str], None]) -> PlanOptions:
    """The options; those of conversations with the template of their tokenizer. Raises UsageError."""
    options = config.plan_options()
    options = dataclasses.replace(options, text_versions=text_versions(options))
    if not options.is_chat:
        return options
    template = chat_template_of(
        tokenizer_folder, config.chat_template_file, allows_control_tokens=options.allow_special_tokens
    )
    for note in template_notes(template):
        say(f"warning: {note}")
    return dataclasses.replace(
        options, chat_template=template.text, chat_tokens=template.tokens, chat_versions=chat_versions()
    )


def _plan_of(
    config: PrepConfig,
    listing: InputListing,
    division: Division,
    resolved: ResolvedTokenizer,
    say: Callable[[str], None],
) -> tuple[Plan, Engine]:
    """The plan, with the engines' self-check, and the engine that workers will use."""
    tokenizer, proof = resolved.spec, resolved.proof
    options = dataclasses.replace(
        _with_template(config, resolved.folder, say), also=listing.also, follow_links=listing.follow_links
    )
    allow = options.encodes_control_tokens
    plan = Plan(
        plan_id="",
        input_dir=config.input_dir.resolve(),
        options=options,
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=tokenizer,
        tokenizer_files=stamp_tokenizer(resolved.folder),
        probe=proof.probe,
        probe_sha256=proof.probe_sha256,
        fast_engine_is_equal=False,
        can_be_cut=proof.can_be_cut,
        inputs=division.inputs,
        boundaries=division.boundaries,
        text_starts=division.text_starts,
        names_left_out=[(reason, name) for reason, names in listing.left_out.items() for name in names],
    )
    plan = dataclasses.replace(plan, plan_id=plan_id(plan))
    reference = resolved.reference(allow_special_tokens=allow)
    is_little = config.engine == "auto" and sum(plan.shard_bytes()) < FEW_BYTES
    if config.engine == "tokenizers" or options.is_chat or is_little:
        return plan, reference
    texts = [*proof.probe, *sample_texts(plan, num_bytes=1 << 18)]
    fast = equal_fast_engine(
        resolved.folder / TOKENIZER_FILE,
        allow_special_tokens=allow,
        texts=texts,
        expected_sha256=ids_sha256([reference.encode(texts)]),
    )
    if isinstance(fast, Engine) and not resolved.passes_gate(fast, reference):
        fast = "its ids differ from those of tokenizers"
    if isinstance(fast, Engine):
        return dataclasses.replace(plan, fast_engine_is_equal=True, fast_engine=fast.name), fast
    say(f"gigatoken is not used for this tokenizer ({fast}); tokenizers encodes, several times slower")
    return plan, reference


def _with_hashes(plan: Plan) -> Plan:
    """The same plan with the sha256 of every shard's input bytes in it, and another plan id.

    Reads the whole input once, about a second of one core for a gigabyte. A shard's ranges are read in
    their order by its worker anyway, so that it hashes what it encodes and reads nothing twice. Raises
    NotFound, ReadWriteError or Refused where a file cannot be read or changes meanwhile.
    """
    with ThreadPoolExecutor(_NUM_HASH_THREADS) as pool:
        hashes = list(pool.map(lambda shard_id: _input_sha256(plan, shard_id), range(plan.num_shards)))
    plan = dataclasses.replace(plan, shard_sha256=hashes)
    return dataclasses.replace(plan, plan_id=plan_id(plan))


def _input_sha256(plan: Plan, shard_id: int) -> str:
    digest = hashlib.sha256()
    for part in plan.ranges(shard_id):
        file = part.open()
        for start in range(part.start, part.end, _HASHED_BYTES):
            digest.update(file.read_all(start, min(start + _HASHED_BYTES, part.end)))
        file.check_unchanged()
    return digest.hexdigest()
