"""``shardprep peek``: samples of the shards, decoded, with their boundaries and where they came from.

Ids are decoded by the data set's own tokenizer, piece by piece between the special tokens, which are shown by
their names in brackets, as ⟦<|end_of_text|>⟧.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.check.plain_reader import plain_records
from preprocess.plan.plan_file import Plan, need_plan
from preprocess.plan.tokenizer_files import TOKENIZER_FILE
from shardprep.console import output_is_read, print_lines, quoted
from shardprep.errors import NotFound, ReadWriteError, UsageError
from shardprep.format.idx import read_idx
from shardprep.format.input_formats import place_text
from shardprep.format.manifest import manifest_ids, read_manifest
from shardprep.format.names import TOKENIZER_DIR, ids_of_ranges, shard_name
from shardprep.format.shards import ShardSamples


class Decoder:
    """Ids -> text in which special tokens are seen. Raises ReadWriteError where there is no tokenizer."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / TOKENIZER_DIR / TOKENIZER_FILE
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ReadWriteError(
                f"{path} cannot be loaded: {error}; bring the folder back as it was"
            ) from None
        added = self._tokenizer.get_added_tokens_decoder()
        self._names = {number: token.content for number, token in added.items() if token.special}
        self._specials = np.array(sorted(self._names), np.int64)

    def text(self, ids: npt.NDArray[np.uint32]) -> str:
        """The text of some ids; each special token as ⟦name⟧."""
        parts, done = [], 0
        for place in np.flatnonzero(np.isin(ids, self._specials)).tolist():
            parts += [self._plain(ids[done:place]), f"⟦{self._names[int(ids[place])]}⟧"]
            done = place + 1
        return "".join([*parts, self._plain(ids[done:])])

    def masked_text(self, ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_]) -> str:
        """The same; what has labels between ⟪ and ⟫ where not all of it has."""
        if mask.all():
            return self.text(ids)
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        parts = [(self.text(ids[begin:end]), bool(mask[begin])) for begin, end in itertools.pairwise(cuts)]
        return "".join(f"⟪{text}⟫" if has_labels else text for text, has_labels in parts)

    def _plain(self, ids: npt.NDArray[np.uint32]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)) if len(ids) else ""


@dataclass(frozen=True, kw_only=True)
class PeekRequest:
    """Which samples to show."""

    shard_ids: list[int]
    input_numbers: Sequence[int] | None = None  # only those of some input files
    label: str | None = None  # only those whose --source_field has this value
    pattern: re.Pattern[str] | None = None
    longest: bool = False
    seed: int | None = None  # in a random order
    num: int = 5


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One sample, decoded."""

    shard_id: int
    number: int  # in its shard, from 0
    place: str  # file and byte where it, or its row's first document, begins
    num_tokens: int
    is_row: bool
    num_trained: int  # tokens with a label: of conversations, the assistant's
    documents: list[str]  # of a row: the end of one that began before it, if any, then those that begin in it
    begins_inside: bool  # the row begins inside of a document


def find_samples(folder: Path, plan: Plan, request: PeekRequest) -> Iterator[Shown]:
    """The samples that were asked for, at most ``request.num``."""
    decoder = Decoder(folder)
    if request.longest:
        places: Iterable[tuple[int, int]] = _longest(folder, plan, request)
    else:
        places = _in_turn(folder, plan, request)
    found = 0
    for shard_id, numbers in _by_shard(places):
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            for number in numbers:
                shown = _shown(plan, decoder, samples, number)
                if request.pattern is None or any(map(request.pattern.search, shown.documents)):
                    yield shown
                    found += 1
                    if found == request.num:
                        return


def _by_shard(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Neighbours of one shard together, 64 at most, so that a shard is opened once for them."""
    held: list[int] = []
    of_shard = -1
    for shard_id, number in places:
        if held and (shard_id != of_shard or len(held) == 64):
            yield of_shard, held
            held = []
        of_shard = shard_id
        held.append(number)
    if held:
        yield of_shard, held


def _candidates(folder: Path, plan: Plan, request: PeekRequest, shard_id: int) -> npt.NDArray[np.int64]:
    """The samples of a shard that may be shown; of rows, by the document that they begin with."""
    records = read_idx(folder, plan.spec, shard_id)
    if request.input_numbers is not None:
        return np.flatnonzero(np.isin(records["source"], request.input_numbers))
    if request.label is None:
        return np.arange(len(records))
    if request.label not in read_manifest(folder, shard_id).counts.sources:
        return np.empty(0, np.int64)
    labeled = plain_records(plan, shard_id)  # a shard keeps no label of a document: its input is read again
    places = {(one.source, one.offset) for one in labeled if one.named == request.label}
    found = zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True)
    return np.array([number for number, place in enumerate(found) if place in places], np.int64)


def _in_turn(folder: Path, plan: Plan, request: PeekRequest) -> Iterator[tuple[int, int]]:
    """Places in the order of the shards; with a seed, shards and their samples in a random order."""
    shard_ids = list(request.shard_ids)
    if request.seed is None:
        for shard_id in shard_ids:
            yield from ((shard_id, n) for n in _candidates(folder, plan, request, shard_id).tolist())
        return
    chooser = random.Random(request.seed)  # noqa: S311 - a choice to look at
    chooser.shuffle(shard_ids)
    of_shard: dict[int, list[int]] = {}
    share = 1 if request.pattern is None else 64  # of a shard, before the next shard's turn
    while shard_ids:
        for shard_id in list(shard_ids):
            if shard_id not in of_shard:
                of_shard[shard_id] = _candidates(folder, plan, request, shard_id).tolist()
                chooser.shuffle(of_shard[shard_id])
            taken, of_shard[shard_id] = of_shard[shard_id][:share], of_shard[shard_id][share:]
            yield from ((shard_id, number) for number in taken)
            if not of_shard[shard_id]:
                shard_ids.remove(shard_id)


def _longest(folder: Path, plan: Plan, request: PeekRequest) -> Iterator[tuple[int, int]]:
    """Places by the number of tokens, most first; of equal ones the earlier first."""
    best: list[tuple[int, int, int]] = []
    most = request.num if request.pattern is None else 10**6
    for shard_id in request.shard_ids:
        numbers = _candidates(folder, plan, request, shard_id)
        tokens = read_idx(folder, plan.spec, shard_id)["num_tokens"].astype(np.int64)[numbers]
        first = np.argsort(-tokens, kind="stable")[:most]
        pairs = zip(tokens[first].tolist(), numbers[first].tolist(), strict=True)
        best = sorted([*best, *((-length, shard_id, number) for length, number in pairs)])[:most]
    yield from ((shard_id, number) for _, shard_id, number in best)


def _shown(plan: Plan, decoder: Decoder, samples: ShardSamples, number: int) -> Shown:
    record, ids = samples.records[number], samples.ids(number)
    starts = samples.starts(number).tolist()
    cuts = sorted({0, *starts, len(ids)})
    mask = samples.loss_mask(number)
    pieces = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
    path = plan.inputs[int(record["source"])].path
    return Shown(
        shard_id=samples.shard_id,
        number=number,
        place=place_text(path, int(record["source_offset"])),
        num_tokens=len(ids),
        is_row=plan.spec.has_rows,
        documents=[decoder.masked_text(ids[piece], mask[piece]) for piece in pieces],
        num_trained=int(mask.sum()),
        begins_inside=bool(len(ids)) and 0 not in starts,
    )


def lines_of(shown: Shown, *, chars: int) -> Iterator[str]:
    """A sample for people; ``chars`` of each document at most (0: all)."""
    what = "row" if shown.is_row else "document"
    came = "begins in the document at" if shown.begins_inside else "from"
    name = f"{shard_name(shown.shard_id)} {what} {shown.number}"
    trained = "" if shown.num_trained == shown.num_tokens else f" ({shown.num_trained} with labels)"
    yield f"{name}: {shown.num_tokens} tokens{trained}, {came} {shown.place}"
    for number, text in enumerate(shown.documents):
        cut = text if not chars or len(text) <= chars else f"{text[:chars]} ... ({len(text)} characters)"
        if shown.is_row:
            goes_on = number == 0 and shown.begins_inside
            yield "  --- the rest of a document" if goes_on else "  --- a document begins"
        yield from (f"  {line}" for line in cut.split("\n"))
    yield ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print samples of the shards, decoded by the data set's own tokenizer: special tokens in brackets, "
        "where documents begin in packed rows, and the file and place that each came from."
    )
    parser.add_argument("output_dir", type=Path, help="folder of the data set")
    parser.add_argument("--shard", help="only these shards, such as 3 or 0-9,12 (default: all)")
    parser.add_argument(
        "--input", help="only samples of one input file, as plan.json names it (default: all)"
    )
    parser.add_argument("--source", help="only samples of one source, as the report names it (default: all)")
    parser.add_argument(
        "--grep", help="only samples whose decoded text this regular expression finds (default: all)"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--longest", action="store_true", help="those with most tokens first")
    order.add_argument("--random", action="store_true", help="some of all shards")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default 0)")
    parser.add_argument("--num", type=int, default=5, help="how many (default 5)")
    parser.add_argument(
        "--chars", type=int, default=400, help="most characters of a document, 0: all (default 400)"
    )


def peek(args: argparse.Namespace) -> int:
    """``peek O``: print samples. Raises NotFound where none is there, UsageError."""
    folder: Path = args.output_dir
    plan = need_plan(folder)
    request = _request(args, folder, plan)
    found = False
    for shown in find_samples(folder, plan, request):
        found = True
        print_lines(*lines_of(shown, chars=args.chars))
        if not output_is_read():
            break
    if not found:
        raise NotFound(f"{folder} has no sample that was asked for; take fewer flags")
    return 0


def _request(args: argparse.Namespace, folder: Path, plan: Plan) -> PeekRequest:
    for name in ("num", "chars"):
        if getattr(args, name) < (name == "num"):
            raise UsageError(
                f"--{name} is {getattr(args, name)}, expected a whole number from {int(name == 'num')}"
            )
    made = set(manifest_ids(folder))
    wanted = sorted(made) if args.shard is None else _shard_ids(args.shard, plan.num_shards)
    again = f"shardprep run {quoted(folder)}"
    if missing := [number for number in wanted if number not in made]:
        raise NotFound(f"shard {missing[0]:05d} is not made; {again} makes what is missing")
    if not wanted:
        raise NotFound(f"{folder} has no finished shard; {again} makes them")
    options: dict[str, Any] = {}
    if args.input is not None:
        options["input_numbers"] = [_input_number(plan, "--input", args.input)]
    if args.source is not None:
        options |= _of_source(plan, args.source)
    if args.grep is not None:
        try:
            options["pattern"] = re.compile(args.grep)
        except re.error as error:
            raise UsageError(f"--grep {args.grep!r} is no regular expression: {error}") from None
    if args.random:
        options["seed"] = args.seed
    return PeekRequest(shard_ids=wanted, longest=args.longest, num=args.num, **options)


def _shard_ids(text: str, num_shards: int) -> list[int]:
    try:
        return sorted(set(ids_of_ranges(text, end=num_shards)))
    except ValueError:
        raise UsageError(
            f"--shard is {text!r}, expected ids of 0 to {num_shards - 1}, such as 0-9,12"
        ) from None


def _of_source(plan: Plan, source: str) -> dict[str, Any]:
    """Which samples a source has: those of inputs, or of a value of --source_field."""
    paths = [item.path for item in plan.inputs]
    if plan.options.source_field and source not in paths:
        return {"label": source}
    numbers = [number for number in range(len(paths)) if plan.source_of(number) == source]
    return {"input_numbers": numbers or [_input_number(plan, "--source", source)]}


def _input_number(plan: Plan, flag: str, name: str) -> int:
    paths = [item.path for item in plan.inputs]
    matches = [number for number, path in enumerate(paths) if path == name]
    matches = matches or [number for number, path in enumerate(paths) if path.endswith(f"/{name}")]
    if len(matches) != 1:
        several = ", ".join(paths[number] for number in matches[:3])
        what = f"names {len(matches)} inputs ({several})" if matches else "is no input of the plan"
        if flag == "--source":
            sources = sorted(set(map(plan.source_of, range(len(paths)))))
            what += f" and no source, such as {', '.join(sources[:5])}"
        raise NotFound(f"{flag} {name} {what}; the inputs are named as {paths[0]}")
    return matches[0]
