"""Divide the inputs of a plan into shards with even text.

The inputs, in the order of the plan, are one sequence of bytes, and a shard is a range of it. Files that
cannot be cut (mostly compressed ones) come last, in groups that make the shards even. Only samples of the
input, and the places between shards, are read, so planning takes seconds for terabytes.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from preprocess.plan.inputs import InputListing, left_out_lines, split_of
from preprocess.plan.looks import Look, look_at
from preprocess.plan.looks_together import lines_about, refuse_unusable
from preprocess.read import encodings, formats, inputs
from preprocess.read.encodings import Sample
from preprocess.read.fields import text_fields_of
from preprocess.read.formats import Inspected, Start
from preprocess.read.inputs import OpenInput
from shardprep.console import counted, with_progress
from shardprep.errors import BadInput, UsageError
from shardprep.format.inputs import InputKind, input_kind
from shardprep.format.names import MAX_SHARDS
from shardprep.format.plan import Cut, InputFile
from shardprep.format.plan_options import SPLITS, PlanOptions, PrepConfig

NUM_THREADS = 16  # opening or reading a file is a round trip on a network file system
_MAX_AT_ONCE = 64  # files or boundaries per task of a thread
# Files that are searched for notes about --doc and --separator, which hold for all files.
_MAX_SEARCHED = 256


class Weighed(NamedTuple):
    """An input file, and what its format found in it."""

    file: InputFile
    kind: InputKind
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
    kinds = [input_kind(path.name) for path in paths]
    # Import pyarrow before the threads start, which would fail if several imported it.
    for kind in dict.fromkeys(kinds):
        formats.format_of_kind(kind)
    root = str(input_dir / "_")[:-1]

    def stamp(path: Path, kind: InputKind, notes: bool) -> Weighed:
        file = OpenInput(path)
        size = file.stamp.num_bytes
        samples = inputs.samples_of(file)
        command = inputs.fetch_command(samples[0])
        if command:
            expected = "the file itself"
            advice = f"run in its repository: {command}"
            raise BadInput(
                path=path, found="a pointer to a file that was not fetched", expected=expected, advice=advice
            )
        name = str(path).removeprefix(root)
        here = fields.of_file(name)
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
            look = look_at(path, name, kind, texts, here, notes=notes)
            if not refuses and look.problem is not None:
                look = look._replace(problem=None, note=f"{name}: {look.problem.found}")
        # Equal names of fields are kept once, or those of 10^5 files would take 0.1 GB.
        names = frozenset(inspected.names) or look.names
        if names:
            look = look._replace(names=kept_names.setdefault(names, names))
        stamped = InputFile(
            path=name,
            num_bytes=size,
            mtime_ns=file.stamp.mtime_ns,
            sha256=inputs.sha256_of_samples(samples),
            encoding=look.encoding,
        )
        return Weighed(stamped, kind, inspected.text_bytes, inspected.is_whole, look)

    # Several files per task: a million futures would take 1 GB.
    num_files = max(1, min(_MAX_AT_ONCE, -(-len(paths) // (4 * NUM_THREADS))))
    spacing = max(1, -(-len(paths) // _MAX_SEARCHED))
    all_files = [(path, kinds[number], number % spacing == 0) for number, path in enumerate(paths)]
    tasks = [all_files[first : first + num_files] for first in range(0, len(paths), num_files)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        batches = pool.map(lambda task: [stamp(*each) for each in task], tasks)
        stamped = itertools.chain.from_iterable(batches)
        weighed = [next(stamped) for _ in with_progress("looking at the inputs", paths, unit="files")]
    refuse_unusable(input_dir, [(item.file, item.look) for item in weighed], options)
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
            expected = "JSON lines and tables, from which --record chat reads messages"
            advice = "move it away"
            raise UsageError(path=path, found="text", expected=expected, advice=advice)
    refuses = config.max_bad_fraction < 1
    weighed = stamp_inputs(config.input_dir, paths, config, looks=looks, refuses=refuses)
    inputs = [item.file for item in weighed]
    empty = [item.path for item in inputs if not item.num_bytes]
    if empty:
        say(f"{len(empty)} of {counted(len(paths), 'input file')} are empty, such as {empty[0]}")
    for line in left_out_lines(listing.left_out, config.input_dir):
        say(line)
    for line in lines_about([(item.file.path, item.kind, item.look) for item in weighed]):
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
        is_grouped = item.is_whole and not item.kind.is_in_bytes
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
    # Of each group: its bytes, its number, and the places of its files in ``whole``.
    heap: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_groups)]
    largest_first = sorted(range(len(whole)), key=lambda n: (-whole[n].text_bytes, whole[n].file.path))
    for place in largest_first:
        num_bytes, number, group = heap[0]
        group.append(place)
        heapq.heapreplace(heap, (num_bytes + whole[place].text_bytes, number, group))
    groups = sorted(sorted(group) for *_, group in heap if group)
    return [[whole[place] for place in group] for group in groups]


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
    ranges: list[tuple[int, int, int]] = []  # to search for a place: (input number, first byte, end)
    for target, following in itertools.pairwise([*targets, ends[-1]]):
        number = bisect.bisect_right(ends, target) - 1
        begin = ends[number]
        text_bytes = ends[number + 1] - ends[number]
        num_bytes = inputs[number].file.num_bytes
        first, end = ((each - begin) * num_bytes // text_bytes for each in (target, following))
        ranges.append((number, first, end if following <= ends[number + 1] else sys.maxsize))

    fields = text_fields_of(options)

    def starts(task: list[tuple[int, int, int]]) -> list[Start | None]:
        starts_here: list[Start | None] = []
        for number, group in itertools.groupby(task, key=lambda each: each[0]):
            file = OpenInput(input_dir / inputs[number].file.path)
            starts_here += formats.format_of(file.path.name).starts(
                file, [each[1:] for each in group], fields.of_file(inputs[number].file.path)
            )
        return starts_here

    tasks = [ranges[n : n + _MAX_AT_ONCE] for n in range(0, len(ranges), _MAX_AT_ONCE)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        starts_here = list(itertools.chain.from_iterable(pool.map(starts, tasks)))
    cuts.append(Cut(len(inputs), 0))
    for (number, _, _), start in zip(reversed(ranges), reversed(starts_here), strict=True):
        if start is not None:
            is_inside = start.byte < inputs[number].file.num_bytes
            cuts.append(Cut(number, start.byte, start.text_byte) if is_inside else Cut(number + 1, 0))
        else:
            cuts.append(cuts[-1])
    return [Cut(0, 0), *reversed(cuts)]
