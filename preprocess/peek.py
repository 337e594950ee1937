"""``shardprep peek``: print decoded samples of the shards, with document boundaries and origins.

The data set's own tokenizer decodes the ids between special tokens, whose names are printed in brackets, as
⟦<|end_of_text|>⟧. If only some tokens of a sample have labels, these tokens are printed in ⟪ ⟫.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from preprocess.make.reference import decode, load_tokenizer
from preprocess.make.token_ids import Ids
from preprocess.peek_stats import stats_lines, stats_of
from shardprep.console import counted, output_is_read, print_exactly, print_lines, say, with_progress
from shardprep.errors import NotFound, UsageError
from shardprep.format import commands, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import kept_ids
from shardprep.format.idx import read_idx, samples_containing
from shardprep.format.inputs import input_kind, name_of_input, place_text
from shardprep.format.manifest import manifest_ids, read_manifest, side_file_lines
from shardprep.format.plan import Plan, need_plan
from shardprep.format.planned_tokenizer import check_tokenizer_files
from shardprep.format.shard_samples import ShardSamples
from shardprep.format.spec import BLANK, blank_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_IN_SHARD = re.compile(r"([0-9]{1,9}):([0-9]{1,9})(?::([0-9]{1,9}))?")
_DETAIL_CHARS = 300
Sample = tuple[int, int]  # shard, number in it


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[tuple[int, str]], int]:
    """Return the ids and names of special tokens, and the size of the vocabulary."""
    added = tokenizer.get_added_tokens_decoder()
    special = [(number, token.content) for number, token in added.items() if token.special]
    return special, tokenizer.get_vocab_size(with_added_tokens=True)


def _decoder(folder: DataFolder, plan: Plan) -> Callable[[Ids, npt.NDArray[np.bool_]], str]:
    """Return a function that decodes ids, given which have labels. Raises as ``check_tokenizer_files``."""
    content = check_tokenizer_files(folder, plan.tokenizer_files, names.TOKENIZER_FILE)
    path = folder.path_of(f"{names.TOKENIZER_DIR}/{names.TOKENIZER_FILE}")
    tokenizer = load_tokenizer(path, content)
    special, vocab_size = tokenizer.call(_special_tokens)
    name_of = dict(special)
    blanks = [BLANK, blank_id(vocab_size)]

    def text_of(ids: Ids, mask: npt.NDArray[np.bool_]) -> str:
        if len(ids) and np.isin(ids, blanks).all():
            return f"⟦{counted(len(ids), 'blanked token')}⟧"
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        parts = []
        for begin, end in itertools.pairwise(cuts):
            is_marked = len(cuts) > 2 and mask[begin:end].all()
            parts.append("⟪" if is_marked else "")
            for name, some in itertools.groupby(ids[begin:end].tolist(), name_of.get):
                if name is None:
                    parts.append(tokenizer.call(decode, list(some)))
                else:
                    parts += [f"⟦{name}⟧" for _ in some]
            parts.append("⟫" if is_marked else "")
        return "".join(parts)

    return text_of


def peek_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print samples of the shards, decoded by the data set's own tokenizer: special tokens in brackets, "
        "where documents begin in packed rows, and the file and place that each came from."
    )
    add = parser.add_argument
    add("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    text = (
        "print only this sample: SHARD:SAMPLE, such as 3:17, SHARD:ROW:DOCUMENT, FILE:BYTE of an input, or "
        "id:ID (default: the first samples)"
    )
    add("addresses", nargs="*", metavar="ADDRESS", help=text)
    add("--grep", help="only samples whose decoded text this regular expression finds (default: all)")
    add("--num", type=int, default=5, help="number of samples (default: 5)")
    text = "number of characters to print of each document; 0: all (default: 400)"
    add("--chars", type=int, default=400, help=text)
    add("--stats", action="store_true", help="print how long documents are, by source, instead of samples")
    text = "print a line of JSON for each sample, with whole documents; with --stats one line"
    add("--json", action="store_true", help=text)


def peek(args: argparse.Namespace) -> int:
    """Print samples. Raises NotFound if there are none, UsageError."""
    folder = DataFolder(args.output_dir)
    plan = need_plan(folder)
    for flag, value, least in (("--num", args.num, 1), ("--chars", args.chars, 0)):
        if value < least:
            raise UsageError.of_value(flag, value, f"a whole number from {least}")
    if args.stats:
        if args.addresses or args.grep:
            given = "--grep" if args.grep else args.addresses[0]
            raise UsageError(
                found=given, expected="no address and no --grep, as --stats counts all documents"
            )
        _print_stats(folder, plan, is_json=args.json)
        return 0
    try:
        pattern = re.compile(args.grep or "")
    except re.error as error:
        found = f"--grep {args.grep!r} ({error})"
        raise UsageError(found=found, expected="a regular expression") from None
    asked: dict[Sample, set[int]] = {}  # the documents to print of each sample; an empty set means all
    for address in args.addresses:
        if args.grep:
            raise UsageError(found="--grep", expected="no such flag, as an address says which sample to show")
        for sample, document in _samples_at(folder, plan, address):
            asked.setdefault(sample, set()).update(() if document is None else (document,))
    samples: Iterable[Sample] = asked
    if not args.addresses:
        made = _made_shards(folder)
        samples = ((each, n) for each in made for n in range(len(read_idx(folder, plan.spec, each))))
    text_of = _decoder(folder, plan)
    num_shown = 0
    for shard_id, of_shard in itertools.groupby(samples, key=lambda sample: sample[0]):
        with ShardSamples(folder, plan.spec, shard_id) as shard:
            for _, number in of_shard:
                ids = shard.ids(number)
                mask = shard.loss_mask(number)
                begins = shard.starts(number)
                # A row may begin with the rest of a document. A document may have no tokens.
                cuts = sorted({0, *begins.tolist(), len(ids)}) if len(ids) else [0, 0]
                documents = [text_of(ids[a:b], mask[a:b]) for a, b in itertools.pairwise(cuts)]
                if args.grep and not any(map(pattern.search, documents)):
                    continue
                only = asked.get((shard_id, number), set())
                if max(only, default=0) >= len(documents):
                    expected = f"documents 0 to {len(documents) - 1}"
                    raise NotFound(found=f"{shard_id}:{number}:{max(only)}", expected=expected)
                if args.json:
                    print_exactly(json.dumps(_sample_json(plan, shard, number, documents, only)))
                else:
                    _print_sample(plan, shard, number, documents, args.chars, only)
                num_shown += 1
                if (num_shown == args.num and not args.addresses) or not output_is_read():
                    return 0
    if not num_shown and not args.addresses:
        wanted = f"one with {args.grep!r}; try another --grep" if args.grep else "one"
        raise NotFound(path=folder, found="no such sample", expected=wanted)
    return 0


def _print_stats(folder: DataFolder, plan: Plan, *, is_json: bool) -> None:
    """Print the lengths of documents in all finished shards. Raises NotFound."""
    made = _made_shards(folder)
    stats = stats_of(read_manifest(folder, number) for number in with_progress("reading manifests", made))
    if is_json:
        sources = [source.to_json() for source in stats]
        facts = {"output_dir": str(folder), "num_shards": plan.num_shards, "num_made": len(made)}
        print_exactly(json.dumps({**facts, "sources": sources}))
        return
    if len(made) < plan.num_shards:
        say(f"{len(made)} of {plan.num_shards} shards are made")
    print_lines(*stats_lines(stats, columns=shutil.get_terminal_size().columns))


def _samples_at(folder: DataFolder, plan: Plan, address: str) -> Iterator[tuple[Sample, int | None]]:
    """Yield the samples at an address, with the document if the address names one.

    If the document was left out of its shard, print why, and yield nothing. Raises NotFound, UsageError.
    """
    in_shard = _IN_SHARD.fullmatch(address)
    if in_shard:
        shard_id = int(in_shard[1])
        number = int(in_shard[2])
        if shard_id >= plan.num_shards:
            expected = f"ids of 0 to {plan.num_shards - 1}"
            raise UsageError(found=f"shard {shard_id} in {address}", expected=expected)
        if shard_id not in manifest_ids(folder):
            path = folder.path_of(names.manifest_name(shard_id))
            remedy = commands.run(folder, str(shard_id))
            raise NotFound(path=path, found="missing: the shard is not made yet", remedy=remedy)
        num_samples = len(read_idx(folder, plan.spec, shard_id))
        if number >= num_samples:
            raise NotFound(found=f"{address}, no sample", expected=f"samples 0 to {num_samples - 1}")
        yield (shard_id, number), int(in_shard[3]) if in_shard[3] else None
        return
    paths = [item.path for item in plan.inputs]
    made = _made_shards(folder)
    if address.startswith("id:") and address != "id:":
        if not plan.options.id_field:
            found = "no document ids, because its plan has no --id_field"
            raise UsageError(path=folder, found=found, expected="SHARD:SAMPLE or FILE:BYTE")
        wanted = address.removeprefix("id:")
        place = _place_of_id(folder, made, wanted)
        if not 0 <= place[0] < len(paths):
            expected = "the id of a document in a finished shard"
            raise NotFound(path=folder, found=f"no id {wanted}", expected=expected)
        name = paths[place[0]]
    else:
        name, _, offset = address.rpartition(":")
        if not (name and offset.isdecimal() and len(offset) < 19):
            expected = "SHARD:SAMPLE, SHARD:ROW:DOCUMENT, FILE:BYTE or id:ID, such as 3:17"
            raise UsageError(found=f"{address}, which is not an address", expected=expected)
        if name not in paths:
            expected = f"a name such as {paths[0]}"
            raise NotFound(found=f"{name}, which is not an input of the plan", expected=expected)
        place = (paths.index(name), int(offset))
        # In other inputs a place is a decompressed byte or a row, whose number the plan does not have.
        num_bytes = plan.inputs[place[0]].num_bytes
        if input_kind(name).is_in_bytes and place[1] >= num_bytes:
            raise NotFound(path=name, found=place[1], expected=f"bytes 0 to {num_bytes - 1}")
    inputs_of = {
        number: [byte_range.input_number for byte_range in plan.shard(number).ranges] for number in made
    }
    shards = [number for number in made if place[0] in inputs_of[number]]
    for shard_id in shards:  # the document may have been left out
        entry = _left_out_at(folder, shard_id, name, place[1])
        if entry is not None:
            size = "" if input_kind(name).unit == "row" else f", {entry.num_bytes} bytes"
            why = f"{entry.reason}{size}: {entry.detail[:_DETAIL_CHARS]}"
            print_lines(f"{name}:{place[1]} was left out of shard {shard_id:05d} as {why}")
            return
    # The document is in the last shard that has a document which begins at the place or before it.
    for shard_id in reversed(shards):
        records = read_idx(folder, plan.spec, shard_id)
        num_train = len(records) - read_manifest(folder, shard_id).counts.held_out.num_samples
        numbers = samples_containing(records, place, num_train)
        if numbers:
            yield from (((shard_id, number), None) for number in numbers)
            return
    raise NotFound(found=f"{name}:{place[1]}", expected="a place in a finished shard")


class _LeftOut(msgspec.Struct):
    """A line of a quarantine file."""

    input: str
    input_offset: int
    num_bytes: int
    reason: str
    detail: str


_LEFT_OUT = msgspec.json.Decoder(_LeftOut)


def _left_out_at(folder: DataFolder, shard_id: int, name: str, offset: int) -> _LeftOut | None:
    """Return what was left out of a shard at a place of an input, or None. Raises BrokenShard."""
    stamp = read_manifest(folder, shard_id).quarantine
    last_entry = None
    if stamp is None:
        return None
    for line in side_file_lines(folder, names.quarantine_name(shard_id), shard_id, stamp):
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            entry = _LEFT_OUT.decode(line)
            if (entry.input, entry.input_offset) == (name, offset):
                last_entry = entry
    return last_entry


def _place_of_id(folder: DataFolder, shard_ids: list[int], wanted: str) -> Sample:
    """Return the input and the place in it of the first document with an id, or (-1, 0)."""
    for shard_id in with_progress("looking for an id", shard_ids):
        stamp = read_manifest(folder, shard_id).ids
        if stamp is None:
            continue
        place: Sample | None = None
        # All are read, because the file is compared with its stamp at its end.
        for number, at, name in kept_ids(folder, shard_id, stamp):
            if name == wanted and place is None:
                place = (number, at)
        if place is not None:
            return place
    return -1, 0


def _made_shards(folder: DataFolder) -> list[int]:
    """Return the finished shards of a data set, at least one. Raises NotFound."""
    made = manifest_ids(folder)
    if not made:
        raise NotFound(path=folder, found="no finished shard", remedy=commands.run(folder))
    return made


def _print_sample(
    plan: Plan, samples: ShardSamples, number: int, documents: list[str], chars: int, only: set[int]
) -> None:
    """Print a sample: up to ``chars`` characters (0: all) of each document in ``only`` (empty: all)."""
    record = samples.records[number]
    name = "row" if plan.spec.has_rows else "document"
    begins_inside = len(documents) > len(samples.starts(number))
    num_tokens = len(samples.ids(number))
    num_trained = int(samples.loss_mask(number).sum())
    counts = read_manifest(samples.folder, samples.shard_id).counts
    num_train = counts.num_samples - counts.held_out.num_samples
    path = name_of_input([item.path for item in plan.inputs], int(record["input_number"]))
    labels = "" if num_trained == num_tokens else f" ({num_trained} with labels)"
    side = ", for validation" if number >= num_train else ""
    place = "begins in the document at " if begins_inside else "from "
    place += place_text(path, int(record["input_offset"]))
    head = f"{names.shard_name(samples.shard_id)} {name} {number}"
    print_lines(f"{head}: {num_tokens} tokens{labels}{side}, {place}")
    for position, text in enumerate(documents):
        if only and position not in only:
            continue
        if plan.spec.has_rows:
            is_rest = begins_inside and position == 0
            text = _with_cut_marks(text, at_begin=is_rest, at_end=position == len(documents) - 1)
            what = "the rest of a document" if is_rest else "a document begins"
            print_lines(f"  --- {what}")
        if chars and len(text) > chars:
            text = f"{text[:chars]} ... ({len(text)} characters)"
        print_lines(*(f"  {line}" for line in text.split("\n")))
    print_lines("")


def _sample_json(
    plan: Plan, samples: ShardSamples, number: int, documents: list[str], only: set[int]
) -> dict[str, object]:
    """Return a sample for programs: whole documents, of those in ``only`` (empty: all)."""
    record = samples.records[number]
    return {
        "shard": samples.shard_id,
        "sample": number,
        "num_tokens": len(samples.ids(number)),
        "num_with_labels": int(samples.loss_mask(number).sum()),
        "begins_inside": len(documents) > len(samples.starts(number)),
        "input": name_of_input([item.path for item in plan.inputs], int(record["input_number"])),
        "input_offset": int(record["input_offset"]),
        "documents": [text for position, text in enumerate(documents) if not only or position in only],
    }


def _with_cut_marks(text: str, *, at_begin: bool, at_end: bool) -> str:
    """Replace what decoding made of a character that the end of a row cuts, by "…"."""
    if at_begin:
        text = re.sub("^\ufffd+", "…", text)
    if at_end:
        text = re.sub("\ufffd+$", "…", text)
    return text
