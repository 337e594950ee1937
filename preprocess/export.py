"""The command ``export``: write the token ids in the layout of another tool."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from preprocess.export_layouts import LAYOUTS, SETTINGS, ExportedShard
from preprocess.make.token_ids import Ids
from preprocess.read.formats import Numbers
from shardprep import files
from shardprep.console import counted, print_lines, with_progress
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, Refused, UsageError
from shardprep.format.data_folder import DataFolder
from shardprep.format.done import done_manifests
from shardprep.format.json_files import load_json
from shardprep.format.plan import Plan, need_plan
from shardprep.format.shard_samples import ShardSamples
from shardprep.output_folder import OutputFolder

_WRITTEN = re.compile(
    r"export\.json|data_args\.txt|train\.bin|dataset_info\.json|state\.json"
    r"|shard-[0-9]{5}(_document\.(bin|idx)|\.bin\.partial)|data-[0-9]{5}-of-[0-9]{5}\.arrow"
)


class WholeDocuments:
    """The documents of rows that ``--pack best_fit`` made, each in one piece.

    A document longer than a row fills a row, and its rest follows in later rows, in order, with other
    documents between them. These rows begin without a start of a document, and have its place in the idx.
    Each is read when its document is written, in a read of its own.
    """

    def __init__(self, samples: ShardSamples) -> None:
        """Read where documents begin. Raises BrokenShard if the beginning of a document is missing."""
        self._samples = samples
        self._num_continued: list[int] = []  # of each row: the first tokens that continue a document
        self._rest_of: dict[int, list[int]] = {}  # row that a long document fills -> rows with its rest
        lengths: list[int] = []
        position_of_row: dict[int, int] = {}  # row that begins with a document -> its number in ``lengths``
        row_of_place: dict[tuple[int, int], int] = {}  # place of a document -> row that begins with it
        places = zip(
            samples.records["input_number"].tolist(), samples.records["input_offset"].tolist(), strict=True
        )
        for row, (place, num_tokens) in enumerate(
            zip(places, samples.records["num_tokens"].tolist(), strict=True)
        ):
            starts = samples.starts(row).tolist()
            num_continued = starts[0] if starts else num_tokens
            self._num_continued.append(num_continued)
            if num_continued:
                first = row_of_place.get(place)
                if first is None:
                    found = f"row {row} continues a document that no row before it fills"
                    raise BrokenShard(path=samples.path, found=found)
                self._rest_of.setdefault(first, []).append(row)
                lengths[position_of_row[first]] += num_continued
            elif starts == [0]:
                row_of_place[place] = row
                position_of_row[row] = len(lengths)
            bounds = [*starts, num_tokens]
            lengths += [end - begin for begin, end in itertools.pairwise(bounds)]
        self.lengths = np.array(lengths, np.int64)

    def pieces(self) -> Iterator[Ids]:
        """Yield the ids of all documents in the order of ``lengths``: uint32[tokens]."""
        num_tokens = self._samples.records["num_tokens"].tolist()
        row = 0
        for ids in self._samples.pieces():  # of whole rows
            begin = 0
            while begin < len(ids):
                end = begin + num_tokens[row]
                yield ids[begin + self._num_continued[row] : end]
                for later in self._rest_of.get(row, ()):
                    yield self._samples.ids(later)[: self._num_continued[later]]
                begin = end
                row += 1


def export_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the token ids of a data set in the layout of another tool. If it was stopped, run it again: "
        "it reads the files that are there and writes those that are missing or that were altered."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    add("--to", required=True, choices=tuple(LAYOUTS), help="tool whose layout to write")
    add("--output_dir", type=Path, required=True, help="folder of the export")
    text = "one side of a data set that was planned with --validation_fraction (default: all documents)"
    add("--split", choices=("train", "validation"), help=text)
    text = "add EOS to documents that lack it (default for megatron and nanogpt)"
    add("--put_eos", action=argparse.BooleanOptionalAction, help=text)


def export(args: argparse.Namespace) -> int:
    """Write the missing files of an export. Raises Refused if the folder has another export."""
    folder = OutputFolder(args.output_dir, mark=SETTINGS, writable=_WRITTEN)
    data = DataFolder(args.data_dir)
    plan = need_plan(data)
    eos = _checked_eos(
        plan, args.data_dir, args.output_dir, to=args.to, split=args.split, put_eos=args.put_eos
    )
    rows_of_shard: list[slice] = []  # the exported samples of each shard, and their tokens
    num_tokens: list[int] = []
    for manifest in done_manifests(data, plan.plan_id, range(plan.num_shards)):
        counts = manifest.counts
        held = manifest.counts.held_out
        num_train = counts.num_samples - held.num_samples
        if args.split == "validation":
            selected = slice(num_train, None)
            of_rows = held.num_tokens
            num_documents = held.num_documents
        elif args.split == "train":
            selected = slice(num_train)
            of_rows = counts.num_tokens - held.num_tokens
            num_documents = counts.num_documents - held.num_documents
        else:
            selected = slice(None)
            of_rows = counts.num_tokens
            num_documents = counts.num_documents
        rows_of_shard.append(selected)
        num_tokens.append(of_rows if eos is None else of_rows + num_documents)
    layout = LAYOUTS[args.to](folder, plan.tokenizer.vocab_size, num_tokens)
    side = {"split": args.split} if args.split else {}
    _claim(folder, {"to": args.to, "plan_id": plan.plan_id, "put_eos": eos, **side})
    for shard_id in with_progress("exporting", layout.missing()):
        with ShardSamples(data, plan.spec, shard_id, rows_of_shard[shard_id]) as samples:
            try:
                if layout.has_documents and plan.spec.has_rows and plan.options.pack == "best_fit":
                    whole = WholeDocuments(samples)
                    stored = whole.lengths
                    pieces = whole.pieces()
                else:
                    stored = samples.document_lengths()
                    pieces = samples.pieces()
                documents = stored + (eos is not None)
                rows = samples.records["num_tokens"].astype(np.int64) if plan.spec.has_rows else documents
                pieces = _with_eos(pieces, stored, eos)
                layout.write(shard_id, ExportedShard(documents, rows, pieces))
            except (CannotWrite, ReadWriteError):
                # An equal export that was faster may have removed this one's temporary files.
                if not layout.is_done(shard_id):
                    raise
    opened_by = layout.finish()
    folder.remove_temporaries()  # of dead attempts; a running one finds what it needs, or writes again
    sums = f"{counted(plan.num_shards, 'shard')}, {counted(sum(num_tokens), 'token')}"
    print_lines(f"{sums} in {folder}; {opened_by}")
    return 0


def _with_eos(pieces: Iterator[Ids], lengths: Numbers, eos: int | None) -> Iterator[Ids]:
    """Yield ids with EOS, if given, after each document. ``lengths`` are the tokens of the documents."""
    if eos is None:
        yield from pieces
        return
    ends = np.cumsum(lengths)
    num_ids = 0
    num_documents = 0
    for piece in pieces:
        until = int(np.searchsorted(ends, num_ids + len(piece), side="right"))
        yield np.insert(piece, ends[num_documents:until] - num_ids, eos)
        num_ids += len(piece)
        num_documents = until


def _checked_eos(
    plan: Plan, data_dir: Path, output_dir: Path, *, to: str, split: str | None, put_eos: bool | None
) -> int | None:
    """Return the id to add to each document, or None. Raises UsageError, Refused for what tools misread."""
    if plan.options.is_chat:
        expected = "texts: the layouts of other tools have no loss mask, so users' words would be trained on"
        raise UsageError(path=data_dir, found="conversations", expected=expected)
    if plan.options.blanked:
        found = "blanked documents, whose ids no other tool knows"
        advice = "plan the input again without them: --exclude takes the list that blank --ids took"
        raise Refused(path=data_dir, found=found, expected="none", advice=advice, remedy="--exclude")
    folder = output_dir.absolute()
    if to == "megatron" and any(map(str.isspace, str(folder))):
        expected = "a path without it, as Megatron splits its list of data sets there"
        raise UsageError(path=folder, found="white space", expected=expected)
    if split and not plan.options.validation_fraction:
        remedy = "--validation_fraction"
        expected = f"none, as it was planned without {remedy}"
        raise UsageError(path=data_dir, found="--split", expected=expected, remedy=remedy)
    if plan.spec.has_rows and put_eos and not plan.options.append_eos:
        raise UsageError("--put_eos is for documents; these rows were packed with --no-append_eos")
    # In a stream only EOS separates documents.
    is_wanted = to in ("megatron", "nanogpt") if put_eos is None else put_eos
    if not is_wanted or plan.options.append_eos or plan.spec.has_rows:
        return None
    if plan.tokenizer.eos_token_id is None:
        raise UsageError("the tokenizer has no EOS to add to documents; use --no-put_eos")
    return plan.tokenizer.eos_token_id


def _claim(folder: OutputFolder, settings: dict[str, object]) -> None:
    """Record the settings of the export in its folder. Raises Refused if the folder has another one."""
    try:
        folder.claim(json.dumps(settings).encode())
    except Refused as error:
        previous: object = "another"
        with contextlib.suppress(ValueError, BrokenShard, *files.NOT_THERE):
            previous = load_json(folder.read(SETTINGS, max_bytes=1 << 20))
        if previous == "another":
            raise
        advice = "use a new folder for --output_dir"
        raise Refused(
            path=error.path, found=f"an export of {previous!r:.200}", expected=settings, advice=advice
        ) from None
