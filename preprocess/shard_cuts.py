"""Sorted inputs, read as one -> where each shard begins."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from preprocess.inputs import InputFile, first_line_starts
from shardprep.errors import UsageError
from shardprep.format.names import MAX_SHARDS

Cut = tuple[int, int]  # (input, byte): where a shard begins in the sorted inputs read as one
_Stretch = tuple[int, int, int]  # (input, first byte, end): where a cut is looked for
_NUM_THREADS = 16  # a read is a round trip on a network file system
_NUM_STRETCHES = 64  # a thread's turn


def file_cuts(inputs: list[InputFile]) -> list[Cut]:
    """One input file is one shard: what the first script did."""
    return [(source, 0) for source in range(len(inputs) + 1)]


def even_cuts(input_dir: Path, inputs: list[InputFile], num_shards: int, *, cut_files: bool) -> list[Cut]:
    """Cut the sorted inputs, read as one, into shards of even bytes at line ends.

    Without ``cut_files`` (UTF-16/32, whole-file documents) cuts fall between files only.
    """
    prefix = [0, *itertools.accumulate(item.num_bytes for item in inputs)]
    targets = [prefix[-1] * number // num_shards for number in range(1, num_shards)]
    if not prefix[-1]:
        cuts = [(len(inputs), 0)] * len(targets)
    elif cut_files:
        cuts = _cuts_at_lines(input_dir, inputs, prefix, targets)
    else:
        cuts = [_cut_at_file(prefix, target) for target in targets]
    return [(0, 0), *cuts, (len(inputs), 0)]


def _cut_at_file(prefix: list[int], target: int) -> Cut:
    """The nearer end of the file that holds byte ``target``."""
    source = bisect.bisect_right(prefix, target) - 1
    nearer_end = target - prefix[source] > prefix[source + 1] - target
    return (source + nearer_end, 0)


def _cuts_at_lines(
    input_dir: Path, inputs: list[InputFile], prefix: list[int], targets: list[int]
) -> list[Cut]:
    """For each target the first line that begins at or behind it.

    It is looked for up to the next target alone; where none begins, the next target's is this one's.
    So no byte is read twice, and all targets can be asked for at once.
    """
    stretches: list[_Stretch] = []
    for target, following in itertools.pairwise([*targets, prefix[-1]]):
        source = bisect.bisect_right(prefix, target) - 1
        stretches.append((source, target - prefix[source], following - prefix[source]))
    parts = [stretches[n : n + _NUM_STRETCHES] for n in range(0, len(stretches), _NUM_STRETCHES)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda part: _line_starts(input_dir, inputs, part), parts)
        starts = list(itertools.chain.from_iterable(found))
    cuts: list[Cut] = []
    cut = (len(inputs), 0)
    for (source, _, _), start in zip(reversed(stretches), reversed(starts), strict=True):
        if start is not None:
            cut = (source, start) if start < inputs[source].num_bytes else (source + 1, 0)
        cuts.append(cut)
    return cuts[::-1]


def _line_starts(input_dir: Path, inputs: list[InputFile], stretches: Sequence[_Stretch]) -> list[int | None]:
    """What begins first in each stretch; a file is opened once for those that lie in it."""
    found: list[int | None] = []
    for source, group in itertools.groupby(stretches, key=lambda stretch: stretch[0]):
        places = [(start, end) for _, start, end in group]
        found += first_line_starts(input_dir / inputs[source].path, places)
    return found


def files_can_be_cut(options: dict[str, Any]) -> bool:
    """Whether shards may begin at line ends inside files: not for whole-file documents, nor UTF-16/32."""
    return options["doc"] == "line" and not options["encoding"].startswith(("utf-16", "utf-32"))


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
