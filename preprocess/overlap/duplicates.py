"""``shardprep duplicates``: equal documents, across shards and data sets, by the digests that plans keep.

Digests are dealt to parts by their first bits, each a file without a name on the disk; then one part after
another is sorted in memory. So memory does not grow with the documents: 10^9 of them take 0.4 GB of memory
and 24 GB of disk. Of equal documents the first one stays, by the order of data sets, then of their inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.worker import documents_of_shard
from preprocess.read.transform import transform_of
from shardprep.console import Progress, counted, print_lines, quoted, say
from shardprep.errors import BrokenShard, Refused, UsageError
from shardprep.files import NOT_THERE, FileStamp, PublishedFile, read_regular, sync_folder
from shardprep.format.documents import DIGEST, MOST_NAMES, DocumentNames, name_of_place, pieces_of
from shardprep.format.idx import ShardSamples, read_idx
from shardprep.format.input_formats import name_of_input
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.names import DIGEST_BYTES, digests_path, missing_file, remake_command, source_of_path
from shardprep.format.plan import Plan, need_plan

Rows = npt.NDArray[np.void]
# A document: its digest as two numbers, and where it stands among the documents of all shards.
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
_FIRST_IS_HERE = np.uint64(1 << 63)  # in a number: the document that stays is of the same shard
_HALF = np.uint64(32)  # bits
_PART_ROWS = 1 << 22  # 100 MB, and twice as much to sort them
_MOST_PARTS = 256  # open files; above 10^9 documents parts grow


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find equal documents across the shards of one or several data sets, and write for each a list of "
        "those that go, which 'plan --exclude' and 'blank --ids' take. The first one stays: by the order in "
        "which the data sets are named, then of their inputs. Plans must keep digests."
    )
    add = parser.add_argument
    add("data_dirs", metavar="DATA", nargs="+", type=Path, help="folder of a data set, complete")
    text = "list of what goes of the first data set; the second one's has .2 before the suffix, and so on"
    add("--output", metavar="FILE", type=Path, required=True, help=text)
    text = "of packed rows, folder of the inputs, if they moved (default: the plans')"
    add("--input_dir", metavar="PATH", type=Path, help=text)
    text = "of packed rows, the file of the plans' --transform (default: none)"
    add("--transform", metavar="PATH", type=Path, help=text)
    add("--json", action="store_true", help="print JSON for programs")


@dataclass(eq=False)
class _DataSet:
    """A data set, and what goes of it."""

    folder: Path
    plan: Plan
    list_file: PublishedFile
    num_documents: int = 0  # that are not blanked
    num_duplicates: int = 0
    num_tokens: int = 0  # of these
    sources: dict[str, Counter[str]] = field(default_factory=dict)

    def write(self, going: Iterable[tuple[str, int, int]]) -> None:
        """List and count documents that go: input, place there and tokens of each."""
        lines = []
        for path, offset, num_tokens in going:
            lines.append(name_of_place(path, offset) + "\n")
            self.num_duplicates += 1
            self.num_tokens += num_tokens
            of_source = self.sources.setdefault(source_of_path(path), Counter())
            of_source.update(num_duplicates=1, num_tokens=num_tokens)
        self.list_file.write("".join(lines).encode())

    def lines(self) -> Iterator[str]:
        """Yield what a terminal shows."""
        path = quoted(self.list_file.path)
        yield (
            f"{self.folder}: {self.num_duplicates:,} of {counted(self.num_documents, 'document')} go, "
            f"{counted(self.num_tokens, 'token')}; list: {path}"
        )
        for source, of in sorted(self.sources.items(), key=lambda item: -item[1]["num_tokens"]):
            yield f"  {source}: {counted(of['num_duplicates'], 'document')}, {of['num_tokens']:,} tokens"
        if self.num_duplicates:
            blank = f"shardprep blank {quoted(self.folder)} --ids {path} --output NEW"
            yield f"  next: shardprep plan --exclude {path} ...  # or: {blank}"


class _Shard(NamedTuple):
    data_set: _DataSet
    shard_id: int
    stamp: FileStamp  # of its digests


class _Parts:
    """Rows on the disk, dealt to parts each of which fits into memory. A kill leaves nothing behind."""

    def __init__(self, num_rows: int, folder: Path) -> None:
        self.num_parts = min(1 + num_rows // _PART_ROWS, _MOST_PARTS)
        self._opened = contextlib.ExitStack()
        self._files = [
            self._opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=1 << 16))  # noqa: SIM115
            for _ in range(self.num_parts)
        ]

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, rows: Rows, parts: npt.NDArray[np.integer[Any]]) -> None:
        order = np.argsort(parts.astype(np.uint16), kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(self.num_parts + 1))
        raw = memoryview(rows[order].tobytes())
        for file, (begin, end) in zip(self._files, itertools.pairwise(bounds.tolist()), strict=True):
            file.write(raw[begin * _ROW.itemsize : end * _ROW.itemsize])

    def __iter__(self) -> Iterator[Rows]:
        for file in self._files:
            with file:
                file.seek(0)
                yield np.frombuffer(file.read(), _ROW)


def duplicates(args: argparse.Namespace) -> int:
    """Find the documents that go, write the lists, and print the sums. Raises what reading and writing do."""
    output: Path = args.output
    data_sets: list[_DataSet] = []
    with contextlib.ExitStack() as opened:
        for number, folder in enumerate(args.data_dirs, 1):
            plan = need_plan(folder)
            for other in data_sets:
                if other.plan.plan_id == plan.plan_id:
                    found = f"{other.folder} and {folder}, whose plan is the same"
                    raise UsageError(found=found, expected="each data set once")
            path = output if number == 1 else output.with_suffix(f".{number}{output.suffix}")
            # Before the work, so that a folder that cannot be written to is told at once.
            data_sets.append(_DataSet(folder, plan, opened.enter_context(PublishedFile(path))))
        shards = [shard for each in data_sets for shard in _shards_of(each)]
        # A document's number: those of all shards before it, and its place among its shard's digests.
        firsts = np.cumsum([0, *(shard.stamp.num_bytes // DIGEST_BYTES for shard in shards)])
        by_digest = opened.enter_context(_Parts(int(firsts[-1]), output.parent))
        by_shard = opened.enter_context(_Parts(int(firsts[-1]), output.parent))
        _deal(shards, firsts, by_digest)
        num_groups = _find(by_digest, firsts, by_shard)
        progress = Progress("writing the lists", by_shard.num_parts, unit="parts")
        for rows in by_shard:
            for number, some in _by_shard(rows, firsts):
                going = _going(shards[number], some, int(firsts[number]), args)
                shards[number].data_set.write(going)
            progress.add(1)
        for each in data_sets:
            each.list_file.sync()
        for each in data_sets:
            each.list_file.publish()
        sync_folder(output.parent)
    counts = ("num_documents", "num_duplicates", "num_tokens")
    answers = [{name: getattr(each, name) for name in (*counts, "sources")} for each in data_sets]
    sums = {"num_groups": num_groups, **{name: sum(each[name] for each in answers) for name in counts}}
    if args.json:
        for each, answer in zip(data_sets, answers, strict=True):
            answer |= {"data_dir": str(each.folder), "list": str(each.list_file.path)}
        print_lines(json.dumps({**sums, "data_sets": answers}))
    else:
        print_lines(
            f"{counted(sums['num_documents'], 'document')}: {sums['num_duplicates']:,} are copies of "
            f"{num_groups:,} others",
            *(line for each in data_sets for line in each.lines()),
        )
    for each in data_sets:
        if each.num_duplicates > MOST_NAMES:
            say(f"warning: {each.list_file.path} has more than {MOST_NAMES:,} names, and no command takes it")
    return 0


def _shards_of(data_set: _DataSet) -> Iterator[_Shard]:
    """Yield the shards. Raises UsageError where no digests are kept, and what ``check_done`` raises."""
    folder, plan = data_set.folder, data_set.plan
    findings = read_findings(folder, plan.plan_id)
    for shard_id in range(plan.num_shards):
        stamp = check_done(folder, shard_id, plan.plan_id, findings).digests
        if stamp is None:
            raise UsageError(
                path=folder,
                found="no digests of its documents",
                expected="a data set of plan --digests; plan anew with it, into a new folder",
                remedy="--digests",
            )
        yield _Shard(data_set, shard_id, stamp)


def _deal(shards: list[_Shard], firsts: npt.NDArray[np.int64], by_digest: _Parts) -> None:
    """Deal the documents of all shards by the first bits of their digests."""
    progress = Progress("reading digests", int(firsts[-1]), unit="documents")
    for (data_set, shard_id, stamp), first in zip(shards, firsts.tolist(), strict=False):
        path = digests_path(data_set.folder, shard_id)
        try:
            raw = read_regular(path, max_bytes=stamp.num_bytes)
        except NOT_THERE:
            raise missing_file(path, shard_id, data_set.folder) from None
        if (found := hashlib.sha256(raw).hexdigest()) != stamp.sha256:
            remedy, expected = remake_command(shard_id, data_set.folder), stamp.sha256[:12]
            raise BrokenShard(path=path, found=f"sha256 {found[:12]}", expected=expected, remedy=remedy)
        pairs = np.frombuffer(raw, ">u8").reshape(-1, 2)
        rows = np.empty(len(pairs), _ROW)
        rows["high"], rows["low"], rows["number"] = pairs[:, 0], pairs[:, 1], first + np.arange(len(pairs))
        # Of a blanked document all bits of the digest are 0, or 1.
        is_blank = (rows["high"] == rows["low"]) & ((rows["high"] == 0) | (rows["high"] == 2**64 - 1))
        rows = rows[~is_blank]
        by_digest.add(rows, (rows["high"] >> _HALF) * np.uint64(by_digest.num_parts) >> _HALF)
        data_set.num_documents += len(rows)
        progress.add(len(pairs))


def _find(by_digest: _Parts, firsts: npt.NDArray[np.int64], by_shard: _Parts) -> int:
    """Deal the documents that go by their shards; return the number of groups of equal documents."""
    num_groups, num_shards = 0, len(firsts) - 1
    progress = Progress("comparing", by_digest.num_parts, unit="parts")
    for rows in by_digest:
        # Most documents are alone, and to sort numbers costs a tenth of sorting rows.
        high = np.sort(rows["high"])
        rows = rows[np.isin(rows["high"], np.unique(high[1:][high[1:] == high[:-1]]))]
        rows = rows[np.lexsort((rows["number"], rows["low"], rows["high"]))]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
        shard = np.searchsorted(firsts, rows["number"].astype(np.int64), side="right") - 1
        rows["number"][shard == shard[first]] |= _FIRST_IS_HERE
        num_groups += len(np.unique(first[~is_first]))
        by_shard.add(rows[~is_first], shard[~is_first] * by_shard.num_parts // num_shards)
        progress.add(1)
    return num_groups


def _by_shard(rows: Rows, firsts: npt.NDArray[np.int64]) -> Iterator[tuple[int, Rows]]:
    """Yield the documents that go of each shard, in the order of its digests."""
    numbers = (rows["number"] & ~_FIRST_IS_HERE).astype(np.int64)
    order = np.argsort(numbers)
    shard = np.searchsorted(firsts, numbers[order], side="right") - 1
    cuts = np.flatnonzero(np.diff(shard, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*cuts, len(order)]):
        yield int(shard[begin]), rows[order[begin:end]]


def _going(shard: _Shard, rows: Rows, first: int, args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Yield input, place there and tokens of each document of a shard that goes.

    ``first``: number of the shard's first document. An idx has the place of a document that is a sample. Of
    rows it has not, so these documents are looked for in the input, by their digests.
    """
    (folder, plan), shard_id = (shard.data_set.folder, shard.data_set.plan), shard.shard_id
    positions = (rows["number"] & ~_FIRST_IS_HERE).astype(np.int64) - first
    paths = [item.path for item in plan.inputs]
    if not plan.spec.has_rows:
        records = read_idx(folder, plan.spec, shard_id)[positions]
        columns = (records[name].tolist() for name in ("source", "source_offset", "num_tokens"))
        for source, offset, num_tokens in zip(*columns, strict=True):
            yield name_of_input(paths, source), offset, num_tokens
        return
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        pieces = pieces_of(samples)
    num_tokens_of = np.bincount(pieces.document, pieces.num_tokens)[positions].astype(np.int64)
    pairs = np.stack([rows["high"], rows["low"]], axis=1).astype(">u8")
    keys, place = np.unique(pairs.view(DIGEST).reshape(-1), return_index=True)
    names, tokens = DocumentNames(keys=keys), num_tokens_of[place].tolist()
    stays = (rows["number"][place] >= _FIRST_IS_HERE).tolist()  # whether the next copy of a name does
    num_found = 0
    transform = transform_of(plan.options, args.transform)
    planned = plan.at(args.input_dir).shard(shard_id)
    digest = None if planned.sha256 is None else hashlib.sha256()
    for documents in documents_of_shard(plan, folder, planned, digest=digest, transform=transform):
        of = names.find(documents.digests())
        for offset, number in zip(documents.offsets[of >= 0].tolist(), of[of >= 0].tolist(), strict=True):
            if stays[number]:
                stays[number] = False
            else:
                num_found += 1
                yield paths[documents.input_number], offset, tokens[number]
    if num_found != len(rows):
        raise Refused(
            path=folder,
            found=f"{num_found} of {len(rows)} duplicates of shard {shard_id:05d} in its input",
            expected="the input, the function and the libraries that made it",
        )
