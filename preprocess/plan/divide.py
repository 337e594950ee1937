"""Cut the inputs into shards: each is a stretch of the inputs read as one, in the order of the plan.

Files that cannot be cut (compressed ones, mostly) come last, grouped so that the shards are even. Of the
input only samples and the places between shards are read: so planning takes seconds for terabytes.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from preprocess.read.documents import format_of, load_libraries, starts_in
from preprocess.read.format import OpenInput, Start, check_is_fetched, sample_sha256
from shardprep.errors import UsageError
from shardprep.format.input_formats import input_kind
from shardprep.format.names import MAX_SHARDS
from shardprep.format.options import PlanOptions
from shardprep.format.plan import Cut, InputFile

NUM_THREADS = 16  # opening or reading a file is a round trip on a network file system
_MOST_AT_ONCE = 64  # files or boundaries per turn of a thread

_Place = tuple[int, Start]  # (input, where in it)


class Weighed(NamedTuple):
    """An input, and what its format says of it."""

    file: InputFile
    text_bytes: int  # about
    is_whole: bool  # it can only be read whole


def count_shards(inputs: list[Weighed], num_shards: int | None, shard_bytes: int | None) -> int:
    """Return how many shards there will be: a number, by a size of input bytes, or (neither) one per file.

    Raises UsageError for none or too many.
    """
    for name, value in (("num_shards", num_shards), ("shard_bytes", shard_bytes)):
        if value is not None and value < 1:
            raise UsageError.of_value(f"--{name}", value, "at least 1")
    if shard_bytes:
        num_shards = max(1, -(-sum(item.text_bytes for item in inputs) // shard_bytes))
    num_shards = num_shards or len(inputs)
    if num_shards > MAX_SHARDS:
        smallest = -(-sum(item.file.num_bytes for item in inputs) // MAX_SHARDS)
        remedy = f"--num_shards {MAX_SHARDS}"
        expected = f"at most {MAX_SHARDS}: {remedy}, or --shard_bytes {-(-smallest // 2**20)}M"
        raise UsageError(found=f"{num_shards} shards", expected=expected, remedy=remedy)
    return num_shards


def stamp_inputs(
    input_dir: Path, paths: list[Path], options: PlanOptions, progress: Callable[[int], None] = lambda _: None
) -> list[Weighed]:
    """Return size, mtime and sampled hash of each file, and what its format says of it.

    Raises NotFound for one that cannot be opened, ReadWriteError, BadInput. ``progress`` counts them.
    """
    load_libraries(path.name for path in paths)  # threads that import parts of pyarrow at once fail
    root = str(input_dir / "_")[:-1]

    def stamp(path: Path) -> Weighed:
        file = OpenInput(path)
        check_is_fetched(file)
        stamped = InputFile(
            path=str(path).removeprefix(root),
            num_bytes=file.stamp.num_bytes,
            mtime_ns=file.stamp.mtime_ns,
            sha256=sample_sha256(file),
        )
        return Weighed(stamped, *format_of(path.name).inspect(file, options))

    inputs: list[Weighed] = []
    num_files = max(1, min(_MOST_AT_ONCE, -(-len(paths) // (4 * NUM_THREADS))))
    turns = [paths[first : first + num_files] for first in range(0, len(paths), num_files)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for found in pool.map(lambda turn: [stamp(path) for path in turn], turns):
            inputs += found
            progress(len(found))
    return inputs


def divide(
    input_dir: Path, inputs: list[Weighed], num_shards: int, options: PlanOptions
) -> tuple[list[InputFile], list[Cut]]:
    """Divide the inputs into ``num_shards`` of even text. Raises BadInput, NotFound, ReadWriteError.

    Returns them in the order in which they are read, and where each shard begins (num_shards + 1).
    """
    whole: list[Weighed] = []
    cut: list[Weighed] = []
    for item in inputs:
        # Whole files are put into shards by their size, but for plain text, whose order was promised.
        is_grouped = item.is_whole and not input_kind(item.file.path).is_in_bytes
        (whole if is_grouped else cut).append(item)
    groups = _groups_of_whole_files(inputs, whole, num_shards)
    if num_shards == 1 or not groups:
        cut, groups = inputs, []
    places = [(0, Start(0))]
    if cut:
        places = _even_places(input_dir, cut, max(num_shards - len(groups), 1), options)
    for group in groups:
        places.append((places[-1][0] + len(group), Start(0)))
    places += [places[-1]] * (num_shards + 1 - len(places))  # more shards than files
    ordered = [item.file for item in (*cut, *itertools.chain.from_iterable(groups))]
    return ordered, [Cut(number, start.byte, start.text_byte) for number, start in places]


def _groups_of_whole_files(
    inputs: list[Weighed], whole: list[Weighed], num_shards: int
) -> list[list[Weighed]]:
    """Group files of about equal text: the largest first, each into the group with the least."""
    total = sum(item.text_bytes for item in inputs)
    share = sum(item.text_bytes for item in whole) / max(1, total)
    most = num_shards if len(whole) == len(inputs) else num_shards - 1
    num_groups = min(len(whole), most, max(1, round(num_shards * share)))
    if not num_groups:
        return []
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    sizes = [(0, number) for number in range(num_groups)]  # a heap
    by_size = sorted(range(len(whole)), key=lambda each: (-whole[each].text_bytes, whole[each].file.path))
    for number in by_size:
        size, group = sizes[0]
        groups[group].append(number)
        heapq.heapreplace(sizes, (size + whole[number].text_bytes, group))
    return [[whole[number] for number in group] for group in sorted(sorted(each) for each in groups if each)]


def _even_places(
    input_dir: Path, inputs: list[Weighed], num_shards: int, options: PlanOptions
) -> list[_Place]:
    """Return where shards of even text begin, and where the last one ends."""
    ends = [0, *itertools.accumulate(item.text_bytes for item in inputs)]  # of text, behind each file
    targets = [ends[-1] * number // num_shards for number in range(1, num_shards)]
    if not ends[-1]:
        places = [(len(inputs), Start(0)) for _ in targets]
    elif all(item.is_whole for item in inputs):
        places = []
        for target in targets:  # each at the nearest end of a file
            number = bisect.bisect_right(ends, target)
            is_nearer_before = target - ends[number - 1] <= ends[number] - target
            places.append((number - is_nearer_before, Start(0)))
    else:
        places = _places_inside(input_dir, inputs, ends, targets, options)
    return [(0, Start(0)), *places, (len(inputs), Start(0))]


def _places_inside(
    input_dir: Path, inputs: list[Weighed], ends: list[int], targets: list[int], options: PlanOptions
) -> list[_Place]:
    """Return for each target the first place at or behind it where a part may begin.

    It is looked for up to the next target alone, whose place is this one's where none is found: so no byte
    is read twice.
    """
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
            found += starts_in(file, [(begin, end) for _, begin, end in group], options)
        return found

    turns = [stretches[n : n + _MOST_AT_ONCE] for n in range(0, len(stretches), _MOST_AT_ONCE)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(itertools.chain.from_iterable(pool.map(starts, turns)))
    places: list[_Place] = []
    place = (len(inputs), Start(0))
    for (number, _, _), start in zip(reversed(stretches), reversed(found), strict=True):
        if start is not None:
            place = (number, start) if start.byte < inputs[number].file.num_bytes else (number + 1, Start(0))
        places.append(place)
    return places[::-1]
