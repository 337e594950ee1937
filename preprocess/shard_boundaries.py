"""Divides the inputs into shards of about equal text.

The inputs are read as one, in the order of the plan, and a shard is a stretch of that. Files that cannot be
cut (compressed ones, mostly) come last, put together so that the shards are even; so the order of the plan is
not always that of the paths. Dividing reads some KiB at each boundary between shards, or the table of places
that a file has.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from preprocess.documents import format_of_input
from preprocess.formats.format import Inspected, Reading, Start
from preprocess.inputs import InputFile, OpenInput
from preprocess.plan import Boundary
from shardprep.errors import UsageError
from shardprep.format.names import MAX_SHARDS

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
    return inspected.is_whole and not format_of_input(item.path).is_in_bytes


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
        form = format_of_input(path.name)
        found += form.starts(OpenInput(path), [(begin, end) for _, begin, end in group], reading)
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
